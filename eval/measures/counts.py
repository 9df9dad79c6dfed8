"""Acceptance measures: counts of rounds and drafts, summed and divided once.

A round is one verifier pass over drafts; prefill and its token belong to none. Drafts after a
terminator or the length limit are not examined. The definitions are those of the acceptance
report: one name each, for decoding and for replay.

Legend: P prompts, K draft length, R bootstrap resamples.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Counts:
    """What happened on one text. Floats, because replay counts in expectation."""

    id: str
    category: str
    tokens: float
    """Tokens written, prefill's included."""
    rounds: float
    drafted: list[float] = field(default_factory=list)
    """Drafts made at position 1, 2, …, K of their chain."""
    examined: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def acceptance_rate(self, k: int | None = None) -> float | None:
        """Accepted / examined at position k, from 1 on (conditional acceptance); over all positions
        when not given. None where nothing was examined.

        Raises:
            ValueError: a position that was never drafted.
        """
        if k is not None and not 1 <= k <= len(self.examined):
            raise ValueError(f"k must be a position in 1 … {len(self.examined)}, got {k}")
        chosen = slice(None) if k is None else slice(k - 1, k)
        return _number(_ratio(sum(self.accepted[chosen]), sum(self.examined[chosen])))


def summarise(counts: list[Counts], seed: int = 0, resamples: int = 1000) -> dict[str, Any]:
    """The measures of `counts`, with 95 % intervals by bootstrap over prompts.

    Texts with the same id (the turns of one conversation) are one prompt: they are resampled
    together. A measure whose denominator is zero does not exist and is None, as are its bounds;
    so text without rounds has no acceptance length, and plain decoding no acceptance rate.

    Returns:
        prompts, tokens, rounds: how much was measured
        acceptance_length: {value, low, high} of 1 + accepted / rounds
        tokens_per_round: written without prefill's tokens / rounds
        acceptance_rate: {value, low, high} of accepted / examined
        draft_efficiency: accepted / drafted
        conditional: by position, accepted / examined
        joint: by position, accepted / rounds
    """
    length = max((len(c.drafted) for c in counts), default=0)
    drafted, examined, accepted = (
        np.array([_padded(getattr(c, name), length) for c in counts]).reshape(len(counts), length)
        for name in ("drafted", "examined", "accepted")
    )  # [texts, K] each
    rounds = np.array([c.rounds for c in counts], dtype=float)
    tokens = sum(c.tokens for c in counts)
    names, prompt = np.unique([c.id for c in counts], return_inverse=True)
    columns = np.stack([accepted.sum(1), rounds, examined.sum(1)], axis=1)
    by_prompt = np.zeros((len(names), 3))
    np.add.at(by_prompt, prompt, columns)
    total = by_prompt.sum(0)
    resampled = _resample(by_prompt, seed, resamples)
    return {
        "prompts": len(names),
        "tokens": tokens,
        "rounds": rounds.sum().item(),
        "acceptance_length": _interval(1 + _ratio(total[0], total[1]),
                                       1 + _ratio(resampled[:, 0], resampled[:, 1])),
        "tokens_per_round": _number(_ratio(tokens - len(counts), total[1])),
        "acceptance_rate": _interval(_ratio(total[0], total[2]),
                                     _ratio(resampled[:, 0], resampled[:, 2])),
        "draft_efficiency": _number(_ratio(total[0], drafted.sum())),
        "conditional": [_number(r) for r in _ratio(accepted.sum(0), examined.sum(0))],
        "joint": [_number(r) for r in _ratio(accepted.sum(0), total[1])],
    }  # fmt: skip


def _padded(values: list[float], length: int) -> list[float]:
    return list(values) + [0.0] * (length - len(values))


def _resample(by_prompt: np.ndarray, seed: int, resamples: int) -> np.ndarray:
    """Sums over prompts drawn with replacement: `[P, columns]` -> `[R, columns]`."""
    number = len(by_prompt)
    if number == 0:
        return np.zeros((resamples, by_prompt.shape[1]))
    times = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), resamples)
    return times @ by_prompt


def _ratio(above: np.ndarray | float, below: np.ndarray | float) -> np.ndarray:
    """above / below, NaN where below is 0."""
    above, below = np.broadcast_arrays(np.asarray(above, float), np.asarray(below, float))
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


def _number(value: np.ndarray) -> float | None:
    return None if np.isnan(value) else float(value)


def _interval(value: np.ndarray, resampled: np.ndarray) -> dict[str, float | None]:
    resampled = resampled[~np.isnan(resampled)]
    if np.isnan(value) or not len(resampled):
        return {"value": None, "low": None, "high": None}
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {"value": float(value), "low": float(low), "high": float(high)}
