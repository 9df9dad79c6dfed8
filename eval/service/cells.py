"""The measures of one cell of a benchmark, from its trials. Times are seconds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstart.eval.measures.counts import Counts, summarise
from headstart.eval.measures.intervals import LEAST_TRIALS, interval, ratio_bounds
from headstart.eval.service import latency
from headstart.eval.service.sweep import OFF, Cell, Trial


def measures(cell: Cell, trials: Sequence[Trial]) -> dict[str, Any]:
    """What a report says of a cell; None where its back end does not tell.

    Returns:
        tokens_per_second: of all answers together, while every slot is taken
        tokens_per_second_as_run: of the whole trials, prefill and emptying slots included
        first_token, inter_token: mean, p50, p95, p99
        parts: of a mean pass: proposal, verification, rest
        acceptance: of `measures.summarise`
        rounds, drafted, accepted, wasted: counts; wasted drafts were not accepted
        positions: for each draft position, how many drafts were examined and accepted there
    """
    passes = sum(t.passes or 0 for t in trials)
    counts = None
    if all(t.counts is not None for t in trials):
        counts = [c for t in trials for c in t.counts]
    rounds = drafted = accepted = None
    if counts is not None and cell.drafts != OFF:
        rounds = sum(c.rounds for c in counts)
        drafted = sum(sum(c.drafted) for c in counts)
        accepted = sum(sum(c.accepted) for c in counts)
    waits = [wait for t in trials for wait in t.waits]
    tokens, seconds = sum(t.tokens for t in trials), sum(t.seconds for t in trials)
    return {
        "workload": cell.workload,
        "temperature": cell.temperature,
        "concurrency": cell.concurrency,
        "drafts": cell.drafts,
        "trials": len(trials),
        "requests": sum(t.requests for t in trials),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": ratio(
            sum(t.full_tokens for t in trials), sum(t.full_seconds for t in trials)
        ),
        "tokens_per_second_as_run": ratio(tokens, seconds),
        "first_token": latency.spread([s for t in trials for s in t.first_token])._asdict(),
        "inter_token": latency.between_tokens(waits, sum(t.wait_tokens for t in trials))._asdict(),
        "parts": {
            part: sum(t.parts[part] for t in trials) / passes
            for part in ("proposal", "verification", "rest")
        }
        if passes
        else None,
        "acceptance": summarise(counts) if rounds and drafted else None,
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "wasted": None if drafted is None else drafted - accepted,
        "positions": _positions(counts or []),
    }


def _positions(counts: Sequence[Counts]) -> list[dict[str, float]]:
    longest = max((len(c.examined) for c in counts), default=0)
    return [
        {
            "examined": sum(c.examined[i] for c in counts if i < len(c.examined)),
            "accepted": sum(c.accepted[i] for c in counts if i < len(c.accepted)),
        }
        for i in range(longest)
    ]


def speedup(plain: Sequence[Trial], drafted: Sequence[Trial]) -> dict[str, float | None]:
    """Tokens a second with drafts / without, over the trials that both have.

    Returns:
        value: while every slot is taken; low, high: its 95 % interval over trials, None with
        fewer than `intervals.LEAST_TRIALS`; as_run: of the whole trials.
    """
    without = {t.number: t for t in plain}
    pairs = [(without[t.number], t) for t in drafted if t.number in without]
    full = np.array(
        [[p.full_tokens, p.full_seconds, d.full_tokens, d.full_seconds] for p, d in pairs]
    ).reshape(-1, 4)
    whole = np.array([[p.tokens, p.seconds, d.tokens, d.seconds] for p, d in pairs]).reshape(-1, 4)
    bounds = ratio_bounds(full, (-1, 1, 1, -1), LEAST_TRIALS)
    value, as_run = (_speed_ratio(c.sum(0)) for c in (full, whole))
    return interval(value, bounds) | {"as_run": as_run}


def ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _speed_ratio(sums: np.ndarray) -> float | None:
    """Of the sums of tokens and seconds without, tokens and seconds with: [4]; None where plain
    decoding wrote nothing or drafting took no time."""
    plain_tokens, plain_seconds, tokens, seconds = sums.tolist()
    return ratio(tokens * plain_seconds, plain_tokens * seconds)
