"""Latencies against plain loops: every token with its own time of arrival."""

import random
from itertools import pairwise

import pytest

from headstart.eval.service.latency import (
    Answer,
    Clock,
    between_tokens,
    full_tokens,
    full_until,
    full_waits,
    spread,
)


def slow(gaps: list[float]) -> tuple[float, float, float, float]:
    """Mean and nearest-rank percentiles of every gap, written out."""
    ordered = sorted(gaps)
    found = []
    for percent in (50, 95, 99):
        rank = next(r for r in range(1, len(ordered) + 1) if 100 * r >= percent * len(ordered))
        found.append(ordered[rank - 1])
    return sum(gaps) / len(gaps), *found


@pytest.mark.parametrize("seed", range(30))
def test_percentiles_are_those_of_every_token_with_its_own_gap(seed):
    dice = random.Random(seed)
    waits = [dice.uniform(0.01, 2) for _ in range(dice.randint(1, 300))]
    together = [dice.choice([0, 0, 1, 3]) for _ in waits]  # tokens that came with the first
    gaps = [g for wait, more in zip(waits, together, strict=True) for g in [wait] + [0.0] * more]
    assert between_tokens(waits, len(gaps)) == pytest.approx(slow(gaps))
    dice.shuffle(waits)
    assert between_tokens(waits, len(gaps)) == pytest.approx(slow(gaps))


def test_values_that_stand_for_themselves_have_their_own_percentiles():
    values = [0.3, 0.1, 0.2, 0.9]
    assert spread(values) == pytest.approx(slow(values))
    assert between_tokens([], 0) == (0, 0, 0, 0)


def test_more_tokens_a_pass_lower_the_mean_and_leave_the_tail():
    waits = [1.0] * 50
    assert between_tokens(waits, 100) == (0.5, 0.0, 1.0, 1.0)
    assert between_tokens(waits, 50) == (1, 1, 1, 1)


class Ticking(Clock):
    """Every lap takes as long as it is told."""

    now = 0.0

    @staticmethod
    def _now() -> float:
        return Ticking.now

    def spend(self, part: str, seconds: float) -> None:
        Ticking.now += seconds
        self.lap(part)


def test_clock_tells_each_pass_apart():
    Ticking.now = 5.0
    clock = Ticking()
    clock.start()
    for part, seconds in [
        ("prefill", 3), ("prefill", 1), ("proposal", 0.5), ("verification", 2),
        ("upkeep", 0.25), ("proposal", 0.125), ("verification", 4),
    ]:  # fmt: skip
        clock.spend(part, seconds)
    assert clock.first_token == 4
    assert clock.passes() == [
        {"proposal": 0.5, "verification": 2, "rest": 0},
        {"proposal": 0.125, "verification": 4, "rest": 0.25},
    ]
    assert (clock.proposal, clock.verification, clock.upkeep) == (0.625, 6, 0.25)


# ---- a server ------------------------------------------------------------------------------------


def served(dice: random.Random, concurrency: int, requests: int) -> list[Answer]:
    """A loop of slots, each of which takes the next request when it is free."""
    free = [0.0] * concurrency
    answers = []
    for _ in range(requests):
        slot = min(range(concurrency), key=lambda i: free[i])
        at = begun = free[slot]
        arrivals = []
        for _ in range(dice.randint(1, 6)):
            at += dice.uniform(0.1, 1)
            arrivals.append(at)
        free[slot] = at
        answers.append(Answer(begun, arrivals, at, 2 * len(arrivals)))
    return answers


@pytest.mark.parametrize("seed", range(20))
def test_server_is_full_until_a_slot_finds_no_request(seed):
    dice = random.Random(seed)
    concurrency = dice.randint(1, 4)
    answers = served(dice, concurrency, concurrency * 3)
    until = full_until(answers, concurrency)
    after = (until + max([a.ended for a in answers if a.ended > until], default=until)) / 2

    def busy(at: float) -> int:
        return sum(a.begun <= at < a.ended for a in answers)

    times = sorted(t for a in answers for t in (a.begun, a.ended) if t < until)
    assert all(busy(t) == concurrency for t in times)
    assert concurrency == 1 or busy(after) < concurrency

    tokens = gaps = 0.0
    slow_waits = []
    for answer in answers:
        for i, at in enumerate(answer.arrivals):
            if at <= until:
                tokens += 2
                if i:
                    slow_waits.append(at - answer.arrivals[i - 1])
                    gaps += (answer.tokens - 1) / (len(answer.arrivals) - 1)
    assert full_tokens(answers, until) == pytest.approx(tokens)
    waits, wait_tokens = full_waits(answers, until)
    assert sorted(waits) == pytest.approx(sorted(slow_waits))
    assert wait_tokens == pytest.approx(gaps)


def test_every_wait_of_an_answer_counts_once_the_server_is_full_to_the_end():
    answer = Answer(1.0, [2.0, 2.5, 4.0], 4.0, 9)
    waits, tokens = full_waits([answer], full_until([answer], 1))
    assert waits == [b - a for a, b in pairwise(answer.arrivals)] and tokens == 8
    assert full_tokens([answer], 4.0) == 9
