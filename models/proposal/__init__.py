"""What a drafter proposes: trees, growing them, sampling. May import models/verifier."""
