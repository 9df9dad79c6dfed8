"""A run: what it is, what it needs, what it does. May import all floors below."""
