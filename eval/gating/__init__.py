"""Ship, tune or switch off. May import eval/service."""
