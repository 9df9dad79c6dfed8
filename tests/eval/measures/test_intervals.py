"""Bounds hold the truth as often as they say, for prompts as uneven as lookup's."""

import math

import numpy as np
import pytest
from skewed import COUNTS

from headstart.eval.measures.intervals import LEAST_PROMPTS, LEAST_TRIALS, ratio_bounds

ACCEPTED, ROUNDS, EXAMINED = COUNTS.T
LENGTH = np.stack([ACCEPTED + ROUNDS, ROUNDS], 1)
ODDS = np.stack([ACCEPTED, EXAMINED - ACCEPTED], 1)


def by_hand(columns: np.ndarray, signs: tuple[int, ...], seed: int, resamples: int):
    """The same in plain loops over the units."""

    def log_ratio(units: list[np.ndarray]) -> tuple[float, float]:
        sums = [sum(unit[c] for unit in units) for c in range(len(signs))]
        value = sum(sign * math.log(total) for sign, total in zip(signs, sums, strict=True))
        squares = 0.0
        for unit in units:
            squares += sum(s * x / t for s, x, t in zip(signs, unit, sums, strict=True)) ** 2
        return value, math.sqrt(squares * len(units) / (len(units) - 1))

    value, error = log_ratio(list(columns))
    many = len(columns)
    times = np.random.default_rng(seed).multinomial(many, np.full(many, 1 / many), resamples)
    deviations = []
    for drawn in times:
        units = [columns[i] for i, number in enumerate(drawn) for _ in range(number)]
        its_value, its_error = log_ratio(units)
        deviations.append((its_value - value) / its_error)
    deviations.sort()
    low, high = (deviations[math.ceil(share * resamples) - 1] for share in (0.025, 0.975))
    return math.exp(value - high * error), math.exp(value - low * error)


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1, 1, -1)])
def test_bounds_are_those_of_plain_loops(signs):
    columns = np.random.default_rng(2).uniform(1, 9, (13, len(signs)))
    found = ratio_bounds(columns, signs, seed=5, resamples=200)
    assert found == pytest.approx(by_hand(columns, signs, 5, 200))


def test_no_bounds_for_few_units_or_where_nothing_varies():
    columns = LENGTH[:LEAST_PROMPTS]
    assert ratio_bounds(columns, (1, -1)) is not None
    assert ratio_bounds(columns[1:], (1, -1)) is None
    assert ratio_bounds(np.full((50, 2), 3.0), (1, -1)) is None
    assert ratio_bounds(np.array([[0.0, 4.0]] * 20), (1, -1)) is None
    once = np.array([[0.0, 4.0]] * 19 + [[2.0, 4.0]])  # every third draw has nothing above the line
    assert ratio_bounds(once, (1, -1)) is None


def coverage(columns: np.ndarray, signs: tuple[int, ...], units: int, draw, **how) -> float:
    """How often the bounds hold the ratio of all columns."""
    sums = columns.sum(0)
    true = math.prod(float(total) ** sign for total, sign in zip(sums, signs, strict=True))
    held = 0
    for _ in range(SIMULATIONS):
        low, high = ratio_bounds(draw(columns, units), signs, **how) or (0.0, math.inf)
        held += low <= true <= high
    return held / SIMULATIONS


SIMULATIONS = 1000  # the coverage's own standard error is .007
LEAST_COVERAGE = 0.93


@pytest.mark.slow
@pytest.mark.parametrize("units", [LEAST_PROMPTS, 12, 24, 120])
@pytest.mark.parametrize("columns", [LENGTH, ODDS], ids=["length", "rate"])
def test_bounds_over_prompts_hold_the_truth(columns, units):
    generator = np.random.default_rng(0)

    def prompts(columns: np.ndarray, units: int) -> np.ndarray:
        return columns[generator.integers(len(columns), size=units)]

    assert coverage(columns, (1, -1), units, prompts) >= LEAST_COVERAGE


@pytest.mark.slow
@pytest.mark.parametrize("trials", [LEAST_TRIALS, 12])
@pytest.mark.parametrize("concurrency", [1, 2, 4, 16])
def test_bounds_over_trials_hold_the_truth(concurrency, trials):
    """Tokens and seconds without and with drafts; seconds vary by 4 % from trial to trial."""
    generator = np.random.default_rng(0)
    tokens = ACCEPTED + ROUNDS
    columns = np.stack([tokens, tokens, tokens, 1.2 * ROUNDS], 1)

    def batches(columns: np.ndarray, trials: int) -> np.ndarray:
        chosen = generator.integers(len(columns), size=(trials, concurrency))
        noise = np.exp(generator.normal(0, 0.04, (trials, 2)))
        return columns[chosen].sum(1) * np.insert(noise, [0, 1], 1.0, axis=1)

    how = {"least": LEAST_TRIALS}
    assert coverage(columns, (-1, 1, 1, -1), trials, batches, **how) >= LEAST_COVERAGE
