"""Acceptance measures: counts of rounds and drafts, summed and divided once.

A round is one verifier pass over drafts; prefill and its token belong to none. Drafts after a
terminator or the length limit are not examined. The definitions are those of the acceptance
report: one name each, for decoding and for replay.

τ, the acceptance length, is 1 + accepted / rounds: drafts accepted, and the verifier's own token.
Tokens a pass, `tokens_per_round`, is (tokens − one of prefill for each text) / rounds: what was
really written. They differ where a text ends inside a round: a terminator or the length limit
among the accepted drafts leaves no place for the verifier's token. τ says how good the drafter is;
speed follows from tokens a pass.

Legend: P prompts, K draft length.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headstart.eval.measures.intervals import interval, ratio_bounds


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

        k is a position, not a draft length: that is `acceptance_rate_of_length`.

        Raises:
            ValueError: a position that was never drafted.
        """
        self._check("k", "position", k)
        return self._rate(slice(None) if k is None else slice(k - 1, k))

    def acceptance_rate_of_length(self, length: int) -> float | None:
        """Accepted / examined over positions 1 … length: α of these rounds, had each drafted no
        more than so many. None where nothing was examined.

        Raises:
            ValueError: a length that was never drafted.
        """
        self._check("length", "draft length", length)
        return self._rate(slice(length))

    def _check(self, name: str, what: str, value: int | None) -> None:
        if value is not None and not 1 <= value <= len(self.examined):
            raise ValueError(f"{name} must be a {what} in 1 … {len(self.examined)}, got {value}")

    def _rate(self, chosen: slice) -> float | None:
        return _number(_ratio(sum(self.accepted[chosen]), sum(self.examined[chosen])))


def summarise(counts: list[Counts], seed: int = 0) -> dict[str, Any]:
    """The measures of `counts`, with 95 % intervals over prompts.

    Texts with the same id (the turns of one conversation) are one prompt: they are resampled
    together. A measure whose denominator is zero does not exist and is None, as are its bounds;
    so text without rounds has no acceptance length, and plain decoding no acceptance rate. Bounds
    are None, too, for fewer prompts than `intervals.LEAST_PROMPTS`, or where all prompts say the
    same.

    Returns:
        prompts, tokens, rounds: how much was measured
        acceptance_length: τ, {value, low, high}
        tokens_per_round: tokens a pass
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
    kept, passes, looked = by_prompt.T
    length_bounds = ratio_bounds(np.stack([kept + passes, passes], 1), (1, -1), seed=seed)
    if length_bounds is not None:
        length_bounds = max(length_bounds[0], 1.0), length_bounds[1]
    rate_bounds = ratio_bounds(np.stack([kept, looked - kept], 1), (1, -1), seed=seed)
    if rate_bounds is not None:  # they are of the odds, so that the rate's stay in (0, 1)
        rate_bounds = rate_bounds[0] / (1 + rate_bounds[0]), rate_bounds[1] / (1 + rate_bounds[1])
    return {
        "prompts": len(names),
        "tokens": tokens,
        "rounds": rounds.sum().item(),
        "acceptance_length": interval(_number(1 + _ratio(total[0], total[1])), length_bounds),
        "tokens_per_round": _number(_ratio(tokens - len(counts), total[1])),
        "acceptance_rate": interval(_number(_ratio(total[0], total[2])), rate_bounds),
        "draft_efficiency": _number(_ratio(total[0], drafted.sum())),
        "conditional": [_number(r) for r in _ratio(accepted.sum(0), examined.sum(0))],
        "joint": [_number(r) for r in _ratio(accepted.sum(0), total[1])],
    }


def _padded(values: list[float], length: int) -> list[float]:
    return list(values) + [0.0] * (length - len(values))


def _ratio(above: np.ndarray | float, below: np.ndarray | float) -> np.ndarray:
    """above / below, NaN where below is 0."""
    above, below = np.broadcast_arrays(np.asarray(above, float), np.asarray(below, float))
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


def _number(value: np.ndarray) -> float | None:
    return None if np.isnan(value) else float(value)
