"""The arithmetic of speed, at values worked out by hand, by loops and by simulation."""

import math
import random
from dataclasses import FrozenInstanceError
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

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


def test_expected_tokens_are_a_geometric_sum():
    assert expected_tokens_per_verify(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens_per_verify(0.5, 3) == pytest.approx((1 - 0.5**4) / 0.5)
    assert expected_tokens_per_verify(0.0, 5) == 1
    assert expected_tokens_per_verify(1.0, 5) == 6
    assert expected_tokens_per_verify(0.7, 0) == 1


@pytest.mark.parametrize("alpha, N", [(-0.1, 2), (1.1, 2), (math.nan, 2), (0.5, -1)])
def test_what_is_no_rate_or_length_is_refused(alpha, N):
    with pytest.raises(ValueError, match="must be"):
        expected_tokens_per_verify(alpha, N)


def test_the_prediction_counts_the_wider_pass():
    """Passes of 77 against 40 ms make the textbook's 1.89 a 1.05."""
    assert predicted_speedup(0.6, 3, 0.05, 0.0) == pytest.approx(1.89, abs=0.005)
    assert predicted_speedup(0.6, 3, 0.05, 77 / 40 - 1) == pytest.approx(1.05, abs=0.005)
    assert predicted_speedup(0.0, 2, 0.1, 0.2) == pytest.approx(1 / 1.4)


# ---- textbook and production forms -------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("N", [0, 1, 4, 9])
@pytest.mark.parametrize("c", [0.0, 0.05, 0.7])
def test_wall_time_is_that_of_every_possible_round(alpha, N, c):
    seconds = tokens = 0.0
    for accepted in range(N + 1):
        probability = alpha**accepted * (1 - alpha if accepted < N else 1)
        seconds += probability * (sum(c for _ in range(N)) + 1)  # every round drafts all N
        tokens += probability * (accepted + 1)
    assert wall_time_per_token(alpha, N, c) == pytest.approx(seconds / tokens)


def test_wall_time_is_the_textbooks():
    assert wall_time_per_token(0.8, 4, 0.05) == pytest.approx(1.2 / 3.3616)
    assert wall_time_per_token(0.6, 3, 0.05) == pytest.approx(
        1 / predicted_speedup(0.6, 3, 0.05, 0)
    )


def test_production_form_by_hand():
    assert expected_speedup(Production(alpha=0.5, K=4, verify_overhead=0.5)) == pytest.approx(2.0)
    assert expected_speedup(Production(0.0, 3, 0.25)) == pytest.approx(0.8)
    assert expected_speedup(Production(1.0, 5, 0.0)) == pytest.approx(6.0)


def test_production_form_reads_attributes_and_mappings():
    values = {"alpha": 0.5, "K": 4, "verify_overhead": 0.5}
    assert expected_speedup(values) == expected_speedup(SimpleNamespace(**values)) == 2.0
    assert expected_speedup({**values, "prompts": 24}) == 2.0
    with pytest.raises(FrozenInstanceError):
        Production(**values).alpha = 0.6


@pytest.mark.parametrize("alpha", [0.2, 0.7, 1.0])
@pytest.mark.parametrize("K", [1, 4, 8])
def test_production_form_and_prediction_are_one_law(alpha, K):
    """Draft efficiency is (E − 1) / K, and the production form's overhead is K·c + v_K."""
    efficiency = (expected_tokens_per_verify(alpha, K) - 1) / K
    production = Production(efficiency, K, K * 0.06 + 0.3)
    assert expected_speedup(production) == pytest.approx(predicted_speedup(alpha, K, 0.06, 0.3))


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": 1.2}, {"alpha": -0.1}, {"K": 0}, {"verify_overhead": -1.0},
     {"verify_overhead": math.nan}],
)  # fmt: skip
def test_what_is_no_production_figure_is_refused(wrong):
    values = {"alpha": 0.5, "K": 4, "verify_overhead": 0.5} | wrong
    ((name, value),) = wrong.items()
    for read in (lambda: Production(**values), lambda: expected_speedup(values)):
        with pytest.raises(ValueError, match=f"{name}.* must be .*got {value}"):
            read()


@pytest.mark.parametrize("p", [{"alpha": 0.5, "K": 4}, SimpleNamespace(alpha=0.5, K=4), 3.0])
def test_a_missing_production_figure_is_named(p):
    with pytest.raises(ValueError, match="has no") as caught:
        expected_speedup(p)
    assert "\n" not in str(caught.value)


# ---- break-even --------------------------------------------------------------------------------


@pytest.mark.parametrize("overhead, K", [(0.0, 1), (0.2, 1), (0.5, 4), (2.2, 8), (4.0, 4)])
def test_speedup_at_break_even_is_one(overhead, K):
    alpha = breakeven_alpha(overhead, K)
    assert expected_speedup(Production(alpha, K, overhead)) == pytest.approx(1.0, abs=1e-12)
    rate = breakeven_acceptance_rate(overhead, K)
    assert predicted_speedup(rate, K, 0.0, overhead) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("K", [1, 2, 5, 12])
@pytest.mark.parametrize("overhead", [0.01, 0.3, 0.9, 1.7])
def test_break_even_rate_is_that_of_brute_force(overhead, K):
    grid = np.linspace(0, 1, 200_001)
    gained = sum(grid**i for i in range(1, K + 1))
    pays = np.flatnonzero(gained >= overhead)
    got = breakeven_acceptance_rate(overhead, K)
    assert got == (pytest.approx(grid[pays[0]], abs=1e-5) if len(pays) else math.inf)


def test_an_overhead_above_the_drafts_never_pays():
    assert breakeven_alpha(4.4, 4) == pytest.approx(1.1)
    assert breakeven_acceptance_rate(4.4, 4) == math.inf
    assert breakeven_acceptance_rate(4.0, 4) == 1.0


def test_without_overhead_any_acceptance_pays():
    assert breakeven_acceptance_rate(0.0, 4) == breakeven_alpha(0.0, 4) == 0.0
    assert breakeven_acceptance_rate(-0.02, 4) == 0.0  # a noisy measurement
    assert breakeven_alpha(-0.02, 4) == pytest.approx(-0.005)


# ---- the tail of inter-token latency -----------------------------------------------------------


@pytest.mark.parametrize("alpha", [round(0.1 * i, 1) for i in range(11)])
@pytest.mark.parametrize("K", [1, 4, 8])
def test_simulated_accepted_counts_have_the_law_of_a_chain(alpha, K):
    rounds = 20_000
    accepted = simulate_accepted(alpha, K, rounds, np.random.default_rng(7))
    for i in range(1, K + 1):  # P(at least i) = α^i
        mean, bound = alpha**i, 4 * math.sqrt(alpha**i * (1 - alpha**i) / rounds)
        assert abs((accepted >= i).mean() - mean) <= bound
    assert accepted.min() >= 0 and accepted.max() <= K


def slow_gaps(accepted: list[int], round_time: float, n_tokens: int) -> list[float]:
    """Every token with its own time of arrival, then differences."""
    arrivals, clock = [], 0.0
    for count in accepted:
        clock += round_time
        for _ in range(count + 1):
            arrivals.append(clock)
    arrivals = [0.0, *arrivals[:n_tokens]]
    return [after - before for before, after in pairwise(arrivals)]


def test_tokens_of_a_round_arrive_together_at_its_end():
    assert token_gaps(np.array([2, 0, 1]), 1.5).tolist() == [1.5, 0, 0, 1.5, 1.5, 0]
    assert token_gaps(np.array([0, 0]), 1.5).tolist() == [1.5, 1.5]


@pytest.mark.parametrize("seed", range(20))
def test_tail_is_that_of_a_slow_loop(seed):
    dice = random.Random(seed)
    alpha, K = dice.choice([0.0, 0.3, 0.6, 0.9, 1.0]), dice.randint(1, 8)
    c, v, n_tokens = dice.uniform(0, 0.2), dice.uniform(0, 1), dice.randint(1, 400)
    tail = simulate_tail(alpha, K, c, v, n_tokens, seed)
    accepted = simulate_accepted(alpha, K, n_tokens, np.random.default_rng(seed)).tolist()
    gaps = slow_gaps(accepted, 1 + K * c + v, n_tokens)
    assert len(gaps) == n_tokens
    ordered = sorted(gaps)
    assert tail.drafted.mean == pytest.approx(sum(gaps) / n_tokens)
    for percent, got in ((50, tail.drafted.p50), (95, tail.drafted.p95), (99, tail.drafted.p99)):
        rank = next(r for r in range(1, n_tokens + 1) if 100 * r >= percent * n_tokens)
        assert got == pytest.approx(ordered[rank - 1])
    assert tail.plain == (1, 1, 1, 1)


def test_percentiles_are_of_the_nearest_rank_upwards():
    tail = simulate_tail(1.0, 1, 0.1, 0.4, n_tokens=3)  # gaps of 1.5, 0, 1.5
    assert tail.drafted == pytest.approx((1.0, 1.5, 1.5, 1.5))
    tail = simulate_tail(1.0, 1, 0.1, 0.4, n_tokens=4)  # 1.5, 0, 1.5, 0
    assert tail.drafted == pytest.approx((0.75, 0.0, 1.5, 1.5))


def test_mean_latency_is_the_inverse_of_the_predicted_speedup():
    tail = simulate_tail(0.75, 4, 0.05, 0.2, n_tokens=200_000)
    assert tail.drafted.mean == pytest.approx(1 / predicted_speedup(0.75, 4, 0.05, 0.2), rel=0.01)


def test_tail_pays_for_the_whole_round_where_the_mean_gains():
    """Every round's first token waits for all of the round, however few tokens come of it."""
    good = simulate_tail(0.8, 4, 0.05, 0.2)
    assert good.drafted.mean < 1 < good.drafted.p99 == pytest.approx(1.4)
    assert good.drafted.p50 == 0
    poor = simulate_tail(0.05, 4, 0.05, 0.2)
    assert poor.drafted.mean > 1 and poor.drafted.p50 == poor.drafted.p99 == pytest.approx(1.4)


def test_a_tail_is_reproducible_and_follows_its_seed():
    assert simulate_tail(0.6, 4, 0.05, 0.2, seed=3) == simulate_tail(0.6, 4, 0.05, 0.2, seed=3)
    assert simulate_tail(0.6, 4, 0.05, 0.2, seed=3) != simulate_tail(0.6, 4, 0.05, 0.2, seed=4)


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": 1.1}, {"alpha": math.nan}, {"K": 0}, {"c": -0.1}, {"c": math.inf},
     {"verify_overhead": -1.5}, {"n_tokens": 0}, {"seed": -1}],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused(wrong):
    values = {"alpha": 0.5, "K": 4, "c": 0.05, "verify_overhead": 0.2, "n_tokens": 10, "seed": 0}
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}.* must be .*got {value}"):
        simulate_tail(**values | wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda: wall_time_per_token(0.5, 4, -0.1),
        lambda: wall_time_per_token(1.5, 4, 0.1),
        lambda: breakeven_alpha(0.5, 0),
        lambda: breakeven_alpha(-1.0, 4),
        lambda: breakeven_acceptance_rate(math.nan, 4),
        lambda: breakeven_acceptance_rate(0.5, 0),
    ],
)
def test_figures_out_of_range_are_refused(call):
    with pytest.raises(ValueError, match="must be"):
        call()
