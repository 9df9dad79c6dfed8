"""From conversations to rows of ids, to batches. May import data/conversations."""
