"""Acceptance reports as people read them. May import eval/decoding and eval/measures."""
