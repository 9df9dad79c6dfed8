"""How a drafter is trained: one loop, one script per drafter."""
