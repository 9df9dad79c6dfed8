"""The arithmetic of speed.

α acceptance rate, N or K draft length, c cost ratio (one draft step / one verifier pass of one
token), v verify overhead (a pass of N+1 tokens / of one token, − 1). E tokens a round emits. Times
are in units of one verifier pass of one token: what a token costs without drafting.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np


def expected_tokens_per_verify(alpha: float, N: int) -> float:
    """Tokens a round emits when each draft is accepted with probability `alpha`.

    Σ_{i=0}^{N} α^i (Leviathan et al. 2023, eq. 1). α = 0.8, N = 4 gives 3.3616.

    Raises:
        ValueError: alpha outside [0, 1], or N < 0.
    """
    _check_rate("alpha", alpha)
    if N < 0:
        raise ValueError(f"N (draft length) must be 0 or more, got {N}")
    return float(sum(alpha**i for i in range(N + 1)))


def predicted_speedup(alpha: float, N: int, c: float, v: float) -> float:
    """Decoding without / with drafting: E / (1 + N·c + v)."""
    return expected_tokens_per_verify(alpha, N) / (1 + N * c + v)


def wall_time_per_token(alpha: float, N: int, c: float) -> float:
    """Mean time of a token with drafting, by the textbook: (N·c + 1) / E.

    Leviathan et al. 2023, theorem 3.8: its inverse is their speedup. It takes a pass of N+1 tokens
    to cost as much as a pass of one, so it leaves out v_N; where that is not small, as on a CPU or
    in large batches, 1 / `predicted_speedup` is the time to expect.

    Raises:
        ValueError: alpha outside [0, 1], N < 0, or c negative or not finite.
    """
    _check_cost(c)
    return (N * c + 1) / expected_tokens_per_verify(alpha, N)


# ---- the production form -------------------------------------------------------------------------


@dataclass(frozen=True)
class Production:
    """What an engine's counters say of a deployment.

    Raises:
        ValueError: a figure out of its range.
    """

    alpha: float
    """Draft efficiency, accepted / drafted, in [0, 1]: what engines report as acceptance rate. It
    is lower than the acceptance rate of examined drafts, which does not belong here."""
    K: int
    """Draft length."""
    verify_overhead: float
    """Everything a round costs beyond a plain pass, drafting included: K·c + v_K, above −1."""

    def __post_init__(self) -> None:
        _check_rate("alpha", self.alpha)
        _check_draft_length(self.K)
        _check_overhead(self.verify_overhead)


def expected_speedup(p: Production | Mapping[str, float] | Any) -> float:
    """Decoding without / with drafting from production figures: (1 + K·α) / (1 + verify_overhead).

    Args:
        p: alpha (draft efficiency), K, verify_overhead, as attributes or as keys; see `Production`.

    Raises:
        ValueError: one of them is missing or out of its range.
    """
    p = p if isinstance(p, Production) else _read(p)
    return (1 + p.K * p.alpha) / (1 + p.verify_overhead)


def breakeven_alpha(verify_overhead: float, K: int) -> float:
    """Draft efficiency at which `expected_speedup` is 1: verify_overhead / K.

    Above 1, drafting never pays at this overhead; at 0 or below, it always does. The overhead grows
    with concurrency, and break-even with it.

    Args:
        verify_overhead: K·c + v_K, as in `Production`.

    Raises:
        ValueError: verify_overhead not above −1 or not finite, or K < 1.
    """
    _check_overhead(verify_overhead)
    _check_draft_length(K)
    return verify_overhead / K


def breakeven_acceptance_rate(verify_overhead: float, K: int) -> float:
    """Acceptance rate at which drafting neither gains nor loses: Σ_{i=1}^{K} α^i = verify_overhead.

    inf where the overhead is above K, which no rate pays back; 0 where there is no overhead.

    Args:
        verify_overhead: K·c + v_K, as in `Production`.

    Raises:
        ValueError: verify_overhead not above −1 or not finite, or K < 1.
    """
    _check_overhead(verify_overhead)
    _check_draft_length(K)
    if verify_overhead > K:
        return math.inf
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:  # until no double lies between them
        pays = expected_tokens_per_verify(middle, K) - 1 >= verify_overhead
        low, high = (low, middle) if pays else (middle, high)
    return high if verify_overhead > 0 else 0.0


# ---- the tail ------------------------------------------------------------------------------------


class Latency(NamedTuple):
    """Of the times between tokens, in verifier passes of one token."""

    mean: float
    p50: float
    p95: float
    p99: float


class Tail(NamedTuple):
    """The same tokens decoded both ways."""

    drafted: Latency
    plain: Latency


def simulate_tail(
    alpha: float,
    K: int,
    c: float,
    verify_overhead: float,
    n_tokens: int = 1000,
    seed: int = 0,
) -> Tail:
    """Inter-token latency of a simulated text, with and without drafting.

    A round takes 1 + K·c + v, whatever comes of it, and its tokens arrive together at its end: the
    first of them waited for the whole round, the others follow after 0. So a round that rejects its
    first draft pays in full and gives one token. The mean is (1 + K·c + v) / E, the median 0 where
    a round gives more than two tokens on average, and P95 and P99 a whole round, as long as it
    gives fewer than 20 and 100: more than the 1 that plain decoding takes each time. A client that
    is sent a round's tokens in one piece sees only the gaps of whole rounds.

    Percentiles are observed gaps (nearest rank), never values between two of them. The first token
    counts from the end of prefill; of the last round, only tokens up to `n_tokens` count.

    Args:
        alpha: acceptance rate, in [0, 1]; each draft independently.
        K: draft length.
        c: cost ratio of one draft step.
        verify_overhead: v_K, of the verifier's pass alone; drafting is counted by c. (The
            `verify_overhead` of `Production` includes both.)
        n_tokens: length of the text.
        seed: of the draws.

    Raises:
        ValueError: an argument out of its range, named.
    """
    _check_rate("alpha", alpha)
    _check_draft_length(K)
    _check_cost(c)
    _check_overhead(verify_overhead)
    if n_tokens < 1:
        raise ValueError(f"n_tokens must be 1 or more, got {n_tokens}")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    # as many rounds as could be needed: each emits a token at least
    accepted = simulate_accepted(alpha, K, n_tokens, np.random.default_rng(seed))
    accepted = accepted[: np.searchsorted((accepted + 1).cumsum(), n_tokens) + 1]
    gaps = token_gaps(accepted, 1 + K * c + verify_overhead)[:n_tokens]
    return Tail(_latency(gaps), _latency(np.ones(n_tokens)))


def simulate_accepted(
    alpha: float, K: int, rounds: int, generator: np.random.Generator
) -> np.ndarray:
    """Drafts accepted in each of `rounds` independent rounds: `[rounds]`, 0 … K, P(≥ i) = α^i."""
    at_least = alpha ** np.arange(K, 0, -1)  # [K] ascending
    return K - np.searchsorted(at_least, generator.random(rounds), side="right")


def token_gaps(accepted: np.ndarray, round_time: float) -> np.ndarray:
    """Time before each token of a text, from the drafts accepted in each of its rounds.

    Args:
        accepted: [rounds] drafts accepted; the round emits one token more.
        round_time: what every round takes.

    Returns:
        [tokens] `round_time` for the first token of a round, 0 for those that arrive with it.
    """
    emitted = accepted + 1
    gaps = np.zeros(emitted.sum())
    gaps[emitted.cumsum() - emitted] = round_time
    return gaps


def _latency(gaps: np.ndarray) -> Latency:
    ordered = np.sort(gaps)
    ranks = [-(-percent * len(gaps) // 100) for percent in (50, 95, 99)]  # rounded up
    return Latency(float(gaps.mean()), *(float(ordered[rank - 1]) for rank in ranks))


# ---- what is refused -----------------------------------------------------------------------------


def _read(p: Any) -> Production:
    names = [field.name for field in fields(Production)]
    given = p if isinstance(p, Mapping) else {n: getattr(p, n) for n in names if hasattr(p, n)}
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(
            f"p has no {', '.join(missing)}; it needs {', '.join(names)}, got {type(p).__name__}"
        )
    return Production(*(given[name] for name in names))


def _check_rate(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def _check_draft_length(K: int) -> None:
    if K < 1:
        raise ValueError(f"K (draft length) must be 1 or more, got {K}")


def _check_cost(c: float) -> None:
    if not 0 <= c < math.inf:
        raise ValueError(f"c (draft step / verifier pass) must be 0 or more and finite, got {c}")


def _check_overhead(verify_overhead: float) -> None:
    if not -1 < verify_overhead < math.inf:
        raise ValueError(f"verify_overhead must be above -1 and finite, got {verify_overhead}")
