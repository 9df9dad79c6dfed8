"""Known costs are recovered from a synthetic sweep; speedups, break-even and where it stops."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from synthetic import FIXED, C, plain_pass, trial, verify_overhead

from headstart.eval.measures.intervals import LEAST_TRIALS
from headstart.eval.measures.speedup import (
    breakeven_acceptance_rate,
    breakeven_alpha,
    expected_tokens_per_verify,
)
from headstart.eval.service import cells, fit
from headstart.eval.service.sweep import OFF, Cell

ALPHA = 0.7
LENGTHS = (1, 2, 4, 8)
CONCURRENCY = (1, 4, 16, 64)


def cell(
    concurrency: int, length: int, numbers: Sequence[int] = range(LEAST_TRIALS), **how: Any
) -> dict:
    alpha = how.pop("alpha", ALPHA)
    trials = [trial(concurrency, length, n, alpha, **how) for n in numbers]
    entry = cells.measures(trials[0].cell, trials)
    if length:
        plain = [trial(concurrency, 0, n, alpha, **how) for n in numbers]
        entry["speedup"] = cells.speedup(plain, trials)
    return entry


@pytest.fixture(scope="module")
def sweep() -> list[dict[str, Any]]:
    return [cell(b, length) for b in CONCURRENCY for length in (0, *LENGTHS)]


def true_overhead(concurrency: int, length: int) -> float:
    return FIXED + C * length + verify_overhead(concurrency, length)


def test_known_costs_are_recovered_at_each_concurrency(sweep):
    (series,) = fit.series(sweep)
    assert [entry["concurrency"] for entry in series["by_concurrency"]] == list(CONCURRENCY)
    for entry in series["by_concurrency"]:
        found = entry["fit"]
        assert found["cost_ratio"] == pytest.approx(C)
        assert found["drafting_fixed"] == pytest.approx(FIXED)
        assert found["cost_ratios"] == {f"chain:{k}": found["cost_ratio"] for k in LENGTHS}
        for length in LENGTHS:
            expected = verify_overhead(entry["concurrency"], length)
            assert found["verify_overhead"][f"chain:{length}"] == pytest.approx(expected)


def test_predicted_speedup_is_the_measured_one_and_the_theory_s(sweep):
    (series,) = fit.series(sweep)
    for entry in series["by_concurrency"]:
        for point in entry["points"]:
            length = point["draft_length"]
            overhead = true_overhead(entry["concurrency"], length)
            assert point["overhead"] == pytest.approx(overhead)
            assert point["predicted"] == pytest.approx(point["measured"]["value"])
            ideal = expected_tokens_per_verify(ALPHA, length) / (1 + overhead)
            assert point["measured"]["value"] == pytest.approx(ideal, rel=0.1)
            low, high = point["measured"]["low"], point["measured"]["high"]
            assert low <= point["measured"]["value"] <= high


def test_break_even_is_that_of_the_arithmetic_and_divides_gain_from_loss(sweep):
    (series,) = fit.series(sweep)
    gains = set()
    for entry in series["by_concurrency"]:
        for point in entry["points"]:
            length, overhead = point["draft_length"], point["overhead"]
            assert point["breakeven_efficiency"] == pytest.approx(breakeven_alpha(overhead, length))
            rate = breakeven_acceptance_rate(overhead, length)
            assert point["breakeven_acceptance_rate"] == (None if math.isinf(rate) else rate)
            gain = point["measured"]["value"] > 1
            gains.add(gain)
            assert (point["draft_efficiency"] > point["breakeven_efficiency"]) == gain
    assert gains == {True, False}


def test_best_draft_length_falls_with_concurrency_until_none_pays(sweep):
    (series,) = fit.series(sweep)
    best = [int(entry["best"].removeprefix("chain:")) for entry in series["by_concurrency"]]
    assert best == sorted(best, reverse=True) and best[0] > best[-1]
    stops = series["stops_paying"]
    assert stops["chain:8"] < stops["chain:1"] <= stops["best"]
    assert 16 < stops["best"] < 64


def test_where_it_stops_paying_lies_between_two_measured_points():
    assert fit.stops_paying([(1, 2.0), (4, 0.5), (2, 1.5)]) == pytest.approx(2 * 2**0.5)
    assert fit.stops_paying([(1, 2.0), (2, 1.1)]) is None
    assert fit.stops_paying([(2, 0.9), (4, 0.8)]) == 2
    assert fit.stops_paying([(1, 0.9), (2, 1.2), (4, 0.8)]) == pytest.approx(2 * 2**0.5)
    assert fit.stops_paying([]) is None


def test_a_server_without_parts_gets_a_line_over_its_draft_lengths():
    sweep = [cell(4, length, parts=False) for length in (0, *LENGTHS)]
    (series,) = fit.series(sweep)
    (entry,) = series["by_concurrency"]
    assert entry["fit"]["overhead_fixed"] == pytest.approx(FIXED)
    assert entry["fit"]["overhead_per_draft"] == pytest.approx(C + verify_overhead(4, 1))
    for point in entry["points"]:
        assert point["overhead"] == pytest.approx(true_overhead(4, point["draft_length"]))
        assert point["predicted"] == pytest.approx(point["measured"]["value"])


def test_one_server_s_speed_predicts_nothing_but_has_its_overhead():
    (series,) = fit.series([cell(4, length, parts=False) for length in (0, 2)])
    (entry,) = series["by_concurrency"]
    (point,) = entry["points"]
    assert entry["fit"] == {} and point["predicted"] is None
    assert point["overhead"] == pytest.approx(true_overhead(4, 2))


def test_a_drafter_that_is_not_enabled_has_no_acceptance():
    (series,) = fit.series([cell(2, length, drafting=False) for length in (0, 4)])
    (point,) = series["by_concurrency"][0]["points"]
    assert point["draft_efficiency"] is None and point["breakeven_efficiency"] is None
    assert point["measured"]["value"] == pytest.approx(1)


# ---- one cell ------------------------------------------------------------------------------------


def test_measures_of_a_cell_are_sums_divided_once():
    trials = [trial(4, 2, n, ALPHA, passes=50 + 50 * n) for n in range(3)]
    found = cells.measures(trials[0].cell, trials)
    overhead = true_overhead(4, 2)
    assert found["parts"]["proposal"] == pytest.approx(plain_pass(4) * C * 2)
    assert sum(found["parts"].values()) == pytest.approx(plain_pass(4) * (1 + overhead))
    tokens = sum(c.rounds + sum(c.accepted) for t in trials for c in t.counts)
    seconds = sum(t.full_seconds for t in trials)
    assert found["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert found["inter_token"]["mean"] == pytest.approx(4 * seconds / tokens)
    assert found["inter_token"]["p99"] == pytest.approx(plain_pass(4) * (1 + overhead))
    assert found["drafted"] == found["accepted"] + found["wasted"]
    assert found["drafted"] == 2 * 4 * 300
    first, second = found["positions"]
    assert first["examined"] == 4 * 300 and second["examined"] == first["accepted"]
    assert found["acceptance"]["conditional"][1] == second["accepted"] / second["examined"]


def test_speedup_compares_the_trials_that_both_have():
    plain = [trial(1, 0, n, ALPHA) for n in range(3)]
    drafted = [trial(1, 4, n, ALPHA) for n in (1, 2, 7)]
    both = cells.speedup(plain[1:], drafted[:2])
    assert cells.speedup(plain, drafted) == both
    assert cells.speedup(plain, drafted[2:])["value"] is None
    many = [[trial(1, length, n, ALPHA) for n in range(LEAST_TRIALS)] for length in (0, 4)]
    assert cells.speedup(*many)["low"] < cells.speedup(*many)["value"]
    assert cells.speedup(*(trials[1:] for trials in many))["low"] is None


def test_plain_decoding_has_no_drafts():
    found = cells.measures(Cell("mixed", 0.0, 1, OFF), [trial(1, 0, 0, ALPHA)])
    assert (found["drafted"], found["wasted"], found["acceptance"]) == (None, None, None)
