"""How batches are made: conversations, rendering, collation, the verifier's own answers."""
