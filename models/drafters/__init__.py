"""One drafter a file. May import parts/ and what is below it."""
