"""The verifier's states of a batch: computed, kept, read from disk. May import data/rows."""
