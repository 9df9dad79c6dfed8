"""What a client waits for: the first token, and then each further one.

Tokens of one pass arrive together, so the first of them waited for the whole pass and the others
for nothing, as in `speedup.simulate_tail`. Which arrival holds how many tokens does not matter to
the mean or a percentile, only how many there are in all: so a server's chunks are enough.

A time is that of a *full* loop, in which a slot that ends an answer begins the next at once. Our
own loop does not refill a batch, and a server runs out of requests at the end of a trial, so only
passes, or the time, with every slot taken count.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.eval.decoding.speculate import Timer
from headstart.eval.measures.speedup import Latency


@dataclass
class Clock(Timer):
    """A timer that keeps the time of every lap, too."""

    laps: list[tuple[str, float]] = field(default_factory=list)
    """Each part, and the seconds since `start` at which it ended."""
    began: float = 0.0

    def start(self) -> None:
        super().start()
        self.began = self._last

    def lap(self, part: str) -> None:
        super().lap(part)
        self.laps.append((part, self._last - self.began))

    @property
    def first_token(self) -> float:
        """Seconds of prefill, the drafter's reading of the prompt included."""
        return self.prefill

    def passes(self) -> list[dict[str, float]]:
        """Seconds of each pass in its proposal, its verification, and the rest (cutting caches
        back, the drafter's reading of what was verified)."""
        found: list[dict[str, float]] = []
        current, before = _no_time(), 0.0
        for part, at in self.laps:
            if part != "prefill":
                current["rest" if part == "upkeep" else part] += at - before
            before = at
            if part == "verification":
                found.append(current)
                current = _no_time()
        return found


def _no_time() -> dict[str, float]:
    return {"proposal": 0.0, "verification": 0.0, "rest": 0.0}


@dataclass
class Answer:
    """One request to a server, in seconds of one clock."""

    begun: float
    arrivals: list[float]
    """Of each chunk with text."""
    ended: float
    tokens: int

    @property
    def tokens_per_arrival(self) -> float:
        return self.tokens / max(len(self.arrivals), 1)

    @staticmethod
    def now() -> float:
        return time.perf_counter()


def between_tokens(waits: Sequence[float], tokens: float) -> Latency:
    """Inter-token latency, in the unit of `waits`.

    Args:
        waits: for each arrival after the first token, in any order.
        tokens: that came with them, at least one each; those beyond it waited for 0. A number of
            tokens that is expected need not be whole.

    Returns:
        The mean, and percentiles of the nearest rank. Without a wait: zeros.
    """
    if not len(waits):
        return Latency(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(waits)
    together = max(tokens, len(ordered)) - len(ordered)

    def percentile(percent: int) -> float:
        rank = math.ceil(percent / 100 * (len(ordered) + together) - together - 1e-9)
        return ordered[rank - 1] if rank > 0 else 0.0

    mean = sum(ordered) / (len(ordered) + together)
    return Latency(mean, percentile(50), percentile(95), percentile(99))


def spread(values: Sequence[float]) -> Latency:
    """Mean and percentiles of values that each stand for themselves."""
    return between_tokens(values, len(values))


def full_until(answers: Sequence[Answer], concurrency: int) -> float:
    """When the first slot found no further request: from then on the server was not full."""
    ends = sorted(answer.ended for answer in answers)
    return ends[max(len(ends) - concurrency, 0)]


def full_tokens(answers: Sequence[Answer], until: float) -> float:
    """Tokens that arrived by then; every chunk of an answer counts alike."""
    return sum(a.tokens_per_arrival * sum(at <= until for at in a.arrivals) for a in answers)


def full_waits(answers: Sequence[Answer], until: float) -> tuple[list[float], float]:
    """Waits that ended by then, and the tokens after an answer's first that came by them."""
    waits: list[float] = []
    tokens = 0.0
    for answer in answers:
        gaps = [b - a for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
        ended = [gap for gap, at in zip(gaps, answer.arrivals[1:], strict=True) if at <= until]
        waits += ended
        if gaps:
            tokens += len(ended) * (answer.tokens - 1) / len(gaps)
    return waits, tokens
