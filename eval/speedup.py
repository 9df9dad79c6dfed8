"""What drafting brings, by formula, under the name that users know; it lives in eval/measures."""

from headstart.eval.measures.speedup import (
    Production,
    breakeven_acceptance_rate,
    breakeven_alpha,
    expected_speedup,
    expected_tokens_per_verify,
    predicted_speedup,
    simulate_accepted,
    simulate_tail,
    token_gaps,
    wall_time_per_token,
)

__all__ = [
    "Production",
    "breakeven_acceptance_rate",
    "breakeven_alpha",
    "expected_speedup",
    "expected_tokens_per_verify",
    "predicted_speedup",
    "simulate_accepted",
    "simulate_tail",
    "token_gaps",
    "wall_time_per_token",
]
