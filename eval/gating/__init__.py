"""Ship, tune or switch off. May import service/ and reports/."""
