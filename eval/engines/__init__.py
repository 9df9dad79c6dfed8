"""Inference engines: served, counted, held against our loop. May import reports/ and below."""
