"""From conversations to rows of ids, and to batches. May import conversations/."""
