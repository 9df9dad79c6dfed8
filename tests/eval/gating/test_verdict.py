"""Verdict and exit code of twelve constructed cases, each with one thing different."""

import copy
import math
import re
from typing import Any

import pytest
from synthetic import acceptance_report, report

from headstart.eval.gating.checks import SWITCH_OFF, TUNE, Thresholds
from headstart.eval.gating.gain import COSTS, OPEN, PAYS, Gain
from headstart.eval.gating.verdict import Verdict, judge

BELOW, ACROSS, ABOVE = (0.8, 0.74, 0.86), (1.05, 0.97, 1.14), (1.3, 1.22, 1.39)


def case(
    ratio: tuple[float, float | None, float | None] = ABOVE,
    alpha: float = 0.75,
    benchmark: bool = True,
    trials: int = 8,
    efficient: bool = True,
    mtp: int = 0,
    hidden: int = 4096,
    **thresholds: Any,
) -> Verdict:
    """A drafter with one draft length, measured at a concurrency of 1.

    Args:
        ratio: measured speedup and its bounds.
        benchmark: whether P99 was measured, too; else the speed is an acceptance report's.
        efficient: whether draft efficiency is above the fitted break-even.
        mtp: modules that the verifier ships with.
        hidden: size of the verifier.
    """
    names = ("value", "low", "high")
    accepted = acceptance_report(alpha)
    accepted["verifier"] |= {"hidden_size": hidden, "mtp_modules": mtp}
    if not benchmark:
        accepted["speed"] = [{
            "draft_length": 4, "shape": "chain", "measured": ratio[0], "low": ratio[1],
            "high": ratio[2], "cost_ratio": 0.05, "drafting_fixed": 0.0, "verify_overhead": 0.3,
            "acceptance_length": 2.6, "prompts": 12, "seconds": 60.0,
        }]  # fmt: skip
        return judge([("acceptance.json", accepted)], Thresholds(**thresholds))
    measured = copy.deepcopy(SWEEP)
    (point,) = measured["series"][0]["by_concurrency"][0]["points"]
    point["measured"] = dict(zip(names, ratio, strict=True))
    point["breakeven_efficiency"] = point["draft_efficiency"] + (-0.1 if efficient else 0.1)
    for cell in measured["cells"]:
        cell["trials"] = trials
    reports = [("benchmark.json", measured), ("acceptance.json", accepted)]
    return judge(reports, Thresholds(**thresholds))


SWEEP = report(0.75, concurrency=(1,), lengths=(4,))
TRAIN, OFF = "train a domain drafter", "switch off"

TABLE = {
    "above 1": ({}, 0, ""),
    "above 1, whatever break-even says": ({"efficient": False}, 0, ""),
    "straddling 1": (
        {"ratio": ACROSS}, 3, "more seconds a cell .* give a bound above 1 if the mean is right",
    ),
    "below 1": ({"ratio": BELOW, "efficient": False}, 4, "drafting costs more than it brings"),
    "below 1, though above break-even": (  # the slowdown that was shipped
        {"ratio": BELOW}, 4, "0.80 .0.74, 0.86. times plain decoding",
    ),
    "too few trials for an interval": ({"trials": 4}, 3, "an interval, which takes 6 trials"),
    "P99 not known": ({"benchmark": False}, 3, "not measured at concurrency 1"),
    "P99 over the limit": ({"max_p99": 1.0}, 3, "both over the limit of 1"),
    "α low, with gain": ({"alpha": 0.4}, 3, f"{TRAIN} .*meanwhile it gains"),
    "α low, without gain": ({"alpha": 0.4, "ratio": BELOW}, 4, f"{OFF}, as it is 0.80.*or {TRAIN}"),
    "α low, gain not known": (
        {"alpha": 0.4, "ratio": ACROSS}, 3, f"{TRAIN}.*, or {OFF}: which of the two",
    ),
    "MTP available": ({"mtp": 1}, 3, "1 modules, hidden size 4096: measure these first"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_verdict_and_exit_code(name):
    how, code, said = TABLE[name]
    found = case(**how)
    assert (found.code, found.value) == (code, {0: "ship", 3: TUNE, 4: SWITCH_OFF}[code])
    reasons = "; ".join(f"{c.name}: {c.reason}" for c in found.reasons)
    assert re.search(said, reasons), reasons


def test_modules_of_a_small_verifier_are_not_asked_for():
    assert case(mtp=1, hidden=2048).code == 0
    assert case(mtp=1, min_mtp_hidden_size=8192).code == 0


def test_every_check_states_value_bound_threshold_and_source():
    for check in case().checks:
        assert all((check.value, check.bound, check.threshold, check.source))
        assert check.threshold != "–"
    (speed,) = [c for c in case().checks if c.name == "speed against plain decoding"]
    assert (speed.value, speed.bound, speed.source) == ("1.30", "1.22", "benchmark.json")
    said = "value 1.30, bound 1.22, threshold lower bound above 1, source benchmark.json"
    assert said in str(case())


# ---- how much longer -----------------------------------------------------------------------------


def gain(value: float, half: float, units: int = 8, seconds: float = 40.0) -> Gain:
    """Bounds a factor of exp(half) around the value."""
    low, high = value * math.exp(-half), value * math.exp(half)
    return Gain("chain:2", value, low, high, units, 6, "trials", seconds, "b.json")


def test_interval_decides():
    assert gain(1.2, 0.1).state == PAYS and gain(0.8, 0.1).state == COSTS
    assert gain(1.05, 0.1).state == gain(0.95, 0.1).state == OPEN


@pytest.mark.parametrize("value, bound", [(1.05, "a bound above 1"), (0.95, "an upper bound")])
def test_the_seconds_named_are_those_that_settle_it(value, bound):
    """An interval of four times the trials is half as wide."""
    open_ = gain(value, 0.1)
    said = open_.longer()
    assert bound in said
    more = float(re.search(r"(\d+) more seconds", said)[1])
    units = open_.units * (1 + more / open_.seconds)
    for times, settled in ((1.01, True), (0.7, False)):
        later = gain(value, 0.1 * math.sqrt(open_.units / (units * times)), int(units * times))
        assert (later.state != OPEN) == settled


def test_without_an_interval_it_says_what_one_takes():
    found = Gain("chain:2", 1.2, None, None, 4, 6, "trials", 40.0, "b.json")
    assert found.state == OPEN
    assert found.longer() == (
        "measure longer: 20 more seconds a cell (--seconds 60) give an interval, which takes 6 "
        "trials"
    )
    assert "equally fast" in gain(1.0, 0.1).longer()
