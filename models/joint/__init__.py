"""Verifiers trained together with their drafter. May import drafters/ and below."""
