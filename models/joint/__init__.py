"""Verifiers that are trained together with their drafter. May import models/drafters and below."""
