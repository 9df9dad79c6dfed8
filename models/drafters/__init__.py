"""One drafter a file. May import models/parts and below."""
