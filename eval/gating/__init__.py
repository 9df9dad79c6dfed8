"""Ship, tune or switch off. May import measures/, service/ and reports/."""
