"""What is proposed: trees, growing them, sampling. May import verifier/."""
