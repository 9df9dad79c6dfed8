"""The verifier's states: computed, kept, or read from disk. May import rows/."""
