"""The arithmetic of speed.

α acceptance rate, N or K draft length, c cost ratio (one draft step / one verifier pass of one
token), v verify overhead (a pass of N+1 tokens / of one token, − 1).
"""


def expected_tokens_per_verify(alpha: float, N: int) -> float:
    """Tokens a round emits when each draft is accepted with probability `alpha`.

    Σ_{i=0}^{N} α^i (Leviathan et al. 2023, eq. 1). α = 0.8, N = 4 gives 3.3616.

    Raises:
        ValueError: alpha outside [0, 1], or N < 0.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    if N < 0:
        raise ValueError(f"N (draft length) must be 0 or more, got {N}")
    return float(sum(alpha**i for i in range(N + 1)))


def predicted_speedup(alpha: float, N: int, c: float, v: float) -> float:
    """Decoding without / with drafting: E / (1 + N·c + v)."""
    return expected_tokens_per_verify(alpha, N) / (1 + N * c + v)
