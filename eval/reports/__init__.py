"""Acceptance reports, measured and written. May import decoding/, measures/."""
