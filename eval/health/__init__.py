"""Whether a saved drafter is sound. May import measures/."""
