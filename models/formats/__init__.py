"""Other programs' checkpoints, in and out. May import drafters/ and below."""
