"""The model drafted for: its states, logits, caches, adapters. May import nothing of headstart but script."""
