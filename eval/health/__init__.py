"""Whether a saved drafter is sound. May import eval/measures."""
