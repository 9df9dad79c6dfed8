"""The verifier's answers: asked, written down. May import data/conversations and data/rows."""
