"""Other programs' checkpoints, in and out. May import models/drafters and below."""
