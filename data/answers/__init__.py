"""The verifier's answers, and the file of them. May import rows/ and conversations/."""
