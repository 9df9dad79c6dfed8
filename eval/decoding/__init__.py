"""Decoding with drafts, and whether it is exact. May import measures/."""
