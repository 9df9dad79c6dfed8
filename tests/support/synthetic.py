"""Trials of a loop whose costs are known, for the tests of what is made of them."""

import random
from typing import Any

from headstart.eval.measures.counts import Counts
from headstart.eval.measures.intervals import LEAST_TRIALS
from headstart.eval.service import cells, fit
from headstart.eval.service.sweep import OFF, Cell, Trial

FIXED, C = 0.05, 0.08


def plain_pass(concurrency: int) -> float:
    """Seconds of a pass without drafts."""
    return 0.02 + 0.002 * concurrency


def verify_overhead(concurrency: int, length: int) -> float:
    """v of `length` drafts: small alone, large where batching has filled the machine."""
    return 0.02 * concurrency * length


def trial(
    concurrency: int,
    length: int,
    number: int,
    alpha: float,
    temperature: float = 0.0,
    passes: int = 200,
    parts: bool = True,
    drafting: bool = True,
) -> Trial:
    """Drafts of which each is accepted with probability `alpha` until the first is not.

    Args:
        length: K; 0 is plain decoding.
        parts: whether it tells proposal, verification and rest, as our own loop does.
        drafting: False: a server that was asked to draft and does not.
    """
    dice = random.Random(f"{concurrency} {length} {number}")
    drafts = OFF if length == 0 else f"chain:{length}"
    really = length if drafting else 0
    unit = plain_pass(concurrency)
    one = {
        "proposal": unit * C * really,
        "verification": unit * (0.9 + verify_overhead(concurrency, really)),
        "rest": unit * (0.1 + (FIXED if really else 0.0)),
    }
    seconds = passes * sum(one.values())
    examined, accepted = [0.0] * length, [0.0] * length
    for _ in range(passes * concurrency):
        for i in range(really):
            examined[i] += 1
            if dice.random() >= alpha:
                break
            accepted[i] += 1
    rounds = passes * concurrency
    tokens = rounds + sum(accepted)
    counts = Counts(
        str(number), "all", 1 + tokens, rounds, [rounds * 1.0] * length, examined, accepted
    )
    return Trial(
        cell=Cell("mixed", temperature, concurrency, drafts),
        number=number,
        seconds=seconds + 0.1,
        tokens=int(tokens + concurrency),
        requests=max(int(tokens) // 100, 1),
        full_seconds=seconds,
        full_tokens=tokens,
        first_token=[0.1] * concurrency,
        waits=[sum(one.values())] * passes,
        wait_tokens=tokens / concurrency,
        parts={part: passes * value for part, value in one.items()} if parts else None,
        passes=passes if parts else None,
        counts=[counts] if drafting else [],
    )


def report(
    alpha: float,
    concurrency: tuple[int, ...] = (1, 4, 16, 64),
    lengths: tuple[int, ...] = (1, 2, 4),
    **how: Any,
) -> dict[str, Any]:
    """A benchmark's report of such a loop."""
    found = []
    for at in concurrency:
        plain = [trial(at, 0, number, alpha, **how) for number in range(LEAST_TRIALS)]
        found.append(cells.measures(plain[0].cell, plain))
        for length in lengths:
            trials = [trial(at, length, number, alpha, **how) for number in range(LEAST_TRIALS)]
            entry = cells.measures(trials[0].cell, trials)
            entry["speedup"] = cells.speedup(plain, trials)
            texts = {"identical": 8, "ties": 0, "different": 0, "prompts": 8}
            entry["lossless"] = texts if how.get("parts", True) else None
            found.append(entry)
    return {
        "schema": 1,
        "drafter": {"type": "eagle3", "path": "drafter", "fingerprint": "d"},
        "verifier": {"name": "verifier", "fingerprint": "v", "parameters": 8_000_000_000},
        "servers": [],
        "cells": found,
        "series": fit.series(found),
        "provenance": {
            "command": "python eval/benchmark.py",
            "commit": None,
            "versions": {"torch": "2"},
            "recipe": {},
            "time": "now",
        },
    }


def acceptance_report(rate: float, temperature: float = 0.0, **changes: Any) -> dict[str, Any]:
    """What eval/acceptance.py says, as far as it is read."""
    rates = {"value": rate, "low": rate, "high": rate}
    settings = {
        "draft_length": 4,
        "shape": "chain",
        "temperature": temperature,
        "acceptance": "exact",
        "data": "mine.jsonl",
    }
    run = {
        "settings": settings | changes,
        "overall": {"tokens": 1600, "prompts": 20, "acceptance_rate": rates},
        "lossless": {"identical": 20, "ties": 0, "different": 0, "prompts": 20},
        "replay": {"all": {"acceptance_rate": rates}},
    }
    return {
        "schema": 1,
        "drafter": {"fingerprint": "d"},
        "verifier": {"name": "verifier", "fingerprint": "v"},
        "runs": [run],
        "speed": [],
    }
