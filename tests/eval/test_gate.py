"""Verdicts on constructed cases, each by what it was constructed to show."""

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic import acceptance_report, plain_pass, report

from headstart.eval import gate
from headstart.eval.gate import Gate
from headstart.eval.gating.checks import Check, Thresholds
from headstart.eval.gating.evidence import Report
from headstart.eval.gating.verdict import Verdict, judge
from headstart.script import run_script

GOOD = 0.75


def verdict(*reports: dict[str, Any], **thresholds: Any) -> Verdict:
    named: list[Report] = [(f"{i}.json", content) for i, content in enumerate(reports)]
    return judge(named, Thresholds(**thresholds))


def reasons(found: Verdict) -> dict[str, str]:
    """Of the checks that decided."""
    return {check.name: check.reason for check in found.checks if check.result == found.value}


def of(found: Verdict, name: str) -> Check:
    (check,) = [check for check in found.checks if check.name == name]
    return check


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    return report(GOOD)


# ---- the five cases ------------------------------------------------------------------------------


def test_good_drafter_is_shipped(good):
    found = verdict(good, acceptance_report(GOOD), concurrency=1)
    assert (found.value, found.code, found.drafts) == ("ship", 0, "chain:4")
    assert {check.result for check in found.checks} == {"ok"} and len(found.checks) == 10


def test_untrained_drafter_is_switched_off_and_is_to_be_trained():
    found = verdict(report(0.01), acceptance_report(0.01), concurrency=1)
    assert (found.value, found.code) == ("switch off", 4)
    assert list(reasons(found)) == ["speed against plain decoding", "acceptance rate α"]
    rate = reasons(found)["acceptance rate α"]
    assert "is below 0.55: switch off" in rate and "or train a domain drafter" in rate


def test_good_drafter_past_break_even_is_switched_off(good):
    found = verdict(good, acceptance_report(GOOD), concurrency=64)
    assert (found.value, found.code) == ("switch off", 4)
    (reason,) = reasons(found).values()
    point = max(
        good["series"][0]["by_concurrency"][-1]["points"], key=lambda p: p["measured"]["value"]
    )
    assert f"draft efficiency {point['draft_efficiency']:.3f}" in reason
    assert f"break-even {point['breakeven_efficiency']:.3f}" in reason
    assert verdict(good, acceptance_report(GOOD), concurrency=16).value == "ship"


def test_drafter_that_is_not_enabled_is_said_to_be_so():
    served = report(GOOD, lengths=(4,), parts=False, drafting=False)
    found = verdict(served, acceptance_report(GOOD), concurrency=4)
    assert (found.value, found.code) == ("tune", 3)
    assert "0 tokens drafted" in reasons(found)["drafting is on"]
    assert "not enabled" in reasons(found)["drafting is on"]


def test_worse_p99_decides_though_the_mean_is_better(good):
    """A round takes 1 + overhead: over a limit that plain decoding keeps."""
    limit = 1000 * plain_pass(1) * 1.25
    found = verdict(good, acceptance_report(GOOD), concurrency=1, max_p99=limit)
    cell = {cell["drafts"]: cell for cell in good["cells"] if cell["concurrency"] == 1}
    assert cell["chain:4"]["inter_token"]["mean"] < cell["off"]["inter_token"]["mean"]
    assert (found.value, found.code) == ("tune", 3)
    reason = reasons(found)["P99 inter-token latency"]
    assert f"{1000 * cell['chain:4']['inter_token']['p99']:.1f} ms with chain:4" in reason
    assert "chain:1 keeps it" in reason or "chain:2 keeps it" in reason


# ---- tail latency --------------------------------------------------------------------------------


def test_p99_without_shorter_drafts_asks_for_them_and_then_switches_off():
    only_long, only_one = (report(GOOD, (1,), lengths=(k,)) for k in (4, 1))
    limit = 1000 * plain_pass(1) * 1.01
    found = verdict(only_long, acceptance_report(GOOD), max_p99=limit)
    assert found.value == "tune" and "measure shorter drafts" in reasons(found).popitem()[1]
    found = verdict(only_one, acceptance_report(GOOD), max_p99=limit)
    assert found.value == "switch off"
    assert verdict(only_long, acceptance_report(GOOD), max_p99=1000).value == "ship"


def test_limit_that_plain_decoding_breaks_is_not_the_drafter_s_doing(good):
    found = verdict(good, acceptance_report(GOOD), max_p99=1000 * plain_pass(1) * 0.9)
    assert found.value == "tune"
    assert "both over the limit" in reasons(found)["P99 inter-token latency"]


def test_rate_of_the_benchmark_stands_in_where_there_is_no_acceptance_report(good):
    (rate,) = [c for c in verdict(good).checks if c.name == "acceptance rate α"]
    assert rate.result == "ok" and rate.source == "0.json, chain:4"
    (rate,) = [c for c in verdict(report(0.3)).checks if c.name == "acceptance rate α"]
    assert rate.result == "tune" and rate.reason.startswith("0.3")


def test_shorter_drafts_than_served_that_pay_are_named(good):
    slow = copy.deepcopy(good)
    entry = slow["series"][0]["by_concurrency"][0]
    entry["points"][2]["measured"] = {"value": 0.9, "low": 0.85, "high": 0.95}
    found = verdict(slow, acceptance_report(GOOD), drafts="chain:4")
    assert found.value == "tune"
    assert "chain:2 pays" in reasons(found)["speed against plain decoding"]
    assert verdict(slow, acceptance_report(GOOD)).drafts == "chain:2"  # the fastest that pays


# ---- the other checks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, thresholds, name, said",
    [
        ({}, {"temperature": 0.7}, "temperature", "0.7 is above the highest measured, 0"),
        ({}, {"min_answer_tokens": 1e6}, "answer length", "not above 1e+06"),
        ({"rate": 0.5}, {}, "acceptance rate α", "0.500 [0.500, 0.500] is below 0.55"),
        ({}, {"min_acceptance_rate": 0.9}, "acceptance rate α", "is below 0.9"),
    ],
)
def test_what_calls_for_tuning(good, change, thresholds, name, said):
    found = verdict(good, acceptance_report(change.get("rate", GOOD)), **thresholds)
    assert found.value == "tune" and list(reasons(found)) == [name]
    assert said in reasons(found)[name]


def test_small_verifier_needs_a_measured_gain(good):
    small = copy.deepcopy(good)
    small["verifier"]["parameters"] = 135_000_000
    assert verdict(small, acceptance_report(GOOD)).value == "ship"  # it gains
    for entry in small["series"][0]["by_concurrency"]:
        for point in entry["points"]:
            point["measured"] = {"value": None, "low": None, "high": None}
    found = verdict(small, acceptance_report(GOOD), drafts="chain:4")
    assert "135M parameters, below 3B" in reasons(found)["verifier's size"]


def test_output_that_is_not_the_verifier_s_is_switched_off(good):
    wrong = acceptance_report(GOOD)
    wrong["runs"][0]["lossless"]["different"] = 2
    found = verdict(good, wrong)
    assert found.value == "switch off"
    assert set(reasons(found)) == {"output is lossless", "cache rollback"}
    assert "2 of 20" in reasons(found)["output is lossless"]
    lossy = acceptance_report(GOOD, temperature=1.0, acceptance="typical")
    assert "typical acceptance" in reasons(verdict(good, lossy))["output is lossless"]


def test_rollback_is_shown_only_by_texts_with_rejections():
    served = report(GOOD, lengths=(4,), parts=False)
    found = verdict(served, acceptance_report(1.0))
    assert list(reasons(found)) == ["cache rollback"]
    assert verdict(served, acceptance_report(0.9)).value == "ship"


def test_what_was_not_measured_is_not_taken_as_good(good):
    found = verdict(good, acceptance_report(GOOD), concurrency=128)
    assert found.value == "tune"
    assert "nothing measured at concurrency 128" in reasons(found)["drafting is on"]
    served = report(GOOD, lengths=(4,), parts=False)
    found = verdict(served)
    assert set(reasons(found)) == {"output is lossless", "cache rollback"}
    assert "eval/acceptance.py" in reasons(found)["output is lossless"]
    for cell in served["cells"]:
        cell |= {"drafted": None, "acceptance": None}
    served["series"][0]["by_concurrency"][0]["points"][0]["draft_efficiency"] = None
    assert "counts no drafts" in reasons(verdict(served))["drafting is on"]


def test_an_acceptance_report_alone_speaks_for_concurrency_one_only():
    """And knows no P99, so it never ships."""
    alone = acceptance_report(GOOD)
    speed = {
        "draft_length": 4, "shape": "chain", "measured": 1.6, "low": 1.5, "high": 1.7,
        "cost_ratio": 0.04, "drafting_fixed": 0.04, "verify_overhead": 0.3, "prompts": 12,
        "seconds": 60.0, "acceptance_length": 2.6,
    }  # fmt: skip
    alone["speed"] = [speed]
    found = verdict(alone)
    assert found.value == "tune" and list(reasons(found)) == ["P99 inter-token latency"]
    said = of(found, "speed against plain decoding").reason
    assert said == (
        "1.60 [1.50, 1.70] times plain decoding with chain:4; draft efficiency 0.400, break-even "
        "0.125"
    )
    assert of(verdict(alone, concurrency=2), "speed against plain decoding").result == "tune"
    alone["speed"] = [speed | {"measured": 0.7, "low": 0.6, "high": 0.8}]
    assert verdict(alone).value == "switch off"


def test_an_earlier_acceptance_report_is_judged_by_its_number_of_prompts():
    """It has one cost for each K, and stands without the number beside its interval."""
    earlier = acceptance_report(GOOD)
    earlier["speed"] = [{
        "draft_length": 4, "shape": "chain", "measured": 1.6, "low": 1.5, "high": 1.7,
        "cost_ratio": 0.05, "verify_overhead": 0.3, "acceptance_length": 2.6,
    }]  # fmt: skip
    for prompts, result in ((12, "ok"), (4, "tune")):
        earlier["provenance"] = {"recipe": {"speed_prompts": prompts}}
        assert of(verdict(earlier), "speed against plain decoding").result == result
    assert (
        "4 more prompts give an interval"
        in of(verdict(earlier), "speed against plain decoding").reason
    )


def test_a_workload_is_looked_for_in_benchmarks_only():
    with pytest.raises(ValueError, match="workload: 'nope' is looked for in reports of eval/bench"):
        verdict(acceptance_report(GOOD), workload="nope")


def test_another_concurrency_than_the_wanted_one_decides_nothing(good):
    for at in (2, 20):  # measured at 4, where it pays, and at 64, where it costs
        found = verdict(good, acceptance_report(GOOD), concurrency=at)
        assert found.value == "tune"
        assert f"measure it at {at}" in reasons(found)["speed against plain decoding"]


def test_traffic_may_be_named_by_its_data(good):
    both = acceptance_report(GOOD)
    other = copy.deepcopy(both["runs"][0])
    other["settings"]["data"] = "general.jsonl"
    other["replay"]["all"]["acceptance_rate"]["value"] = 0.2
    both["runs"].append(other)
    assert verdict(good, both).value == "tune"
    assert verdict(good, both, data="mine.jsonl").value == "ship"


# ---- the script ----------------------------------------------------------------------------------


def exit_code(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> int:
    monkeypatch.setattr(sys, "argv", ["gate.py", *gate.arguments(words)])
    with pytest.raises(SystemExit) as stop:
        run_script(Gate, lambda settings: sys.exit(gate.run(settings)))
    return stop.value.code


def test_exit_code_is_the_verdict_s(good, tmp_path: Path, monkeypatch, capsys):
    files = []
    for name, content in (("b", good), ("a", acceptance_report(GOOD))):
        files.append(str(tmp_path / f"{name}.json"))
        Path(files[-1]).write_text(json.dumps(content))
    assert exit_code(monkeypatch, files) == 0
    assert "Verdict: ship, at concurrency 1 with chain:4." in capsys.readouterr().out
    assert exit_code(monkeypatch, [*files, "--temperature", "1"]) == 3
    assert exit_code(monkeypatch, [*files, "--concurrency", "64"]) == 4
    assert exit_code(monkeypatch, ["--reports", json.dumps(files)]) == 0


@pytest.mark.parametrize(
    "change, thresholds, said",
    [
        ({"schema": 2}, [], "is no report of this version"),
        ({}, ["--drafts", "chain:9"], "'chain:9' was not measured, only chain:1, chain:2"),
        ({}, ["--workload", "code"], "has no 'code', only mixed"),
        ({}, ["--data", "x.jsonl"], "no report has a run on x.jsonl"),
        ({}, ["--concurrency", "0"], "concurrency must be 1 or more, got 0"),
        ({}, ["--max_p99", "-3"], "max_p99 must be above 0 milliseconds, got -3"),
        ({}, ["--min_acceptance_rate", "55"], "must be in .0, 1., got 55"),
    ],
)
def test_what_cannot_be_judged_is_one_line(
    good, tmp_path: Path, monkeypatch, capsys, change, thresholds, said
):
    (tmp_path / "b.json").write_text(json.dumps(good | change))
    assert exit_code(monkeypatch, [str(tmp_path / "b.json"), *thresholds]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(said, error), error


@pytest.mark.parametrize("key", ["drafter", "runs", "speed"])
def test_a_damaged_report_is_named(tmp_path: Path, key):
    broken = acceptance_report(GOOD)
    if key == "runs":
        del broken["runs"][0]["overall"]
    else:
        del broken[key]
    (tmp_path / "r.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=r"r.json is damaged, it lacks or misplaces"):
        gate.run(Gate(reports=[str(tmp_path / "r.json")]))
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON, damaged"):
        gate.run(Gate(reports=[str(tmp_path / "r.json")]))


def test_reports_of_two_drafters_are_refused(good):
    other = acceptance_report(GOOD)
    other["drafter"]["fingerprint"] = "another"
    with pytest.raises(ValueError, match="are of different drafters"):
        verdict(good, other)
    with pytest.raises(ValueError, match="no such file"):
        gate.run(Gate(reports=["nowhere.json"]))
