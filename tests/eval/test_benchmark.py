"""The benchmark, from a saved verifier to its page; in our own loop and of a server."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from stub_server import Stub
from workplace import make as make_workplace

from headstart.eval import benchmark
from headstart.eval.benchmark import Benchmark
from headstart.eval.decoding.speculate import generate
from headstart.eval.gating.checks import Thresholds
from headstart.eval.service import own_loop
from headstart.eval.service.latency import Clock
from headstart.eval.service.server_loop import Server
from headstart.eval.service.sweep import OFF, Cell
from headstart.eval.service.workload import Workload, batch, prompts
from headstart.models.loading import load_pair
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain

LAYERS = "layers:0-6"
LIMIT = 12


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    make_workplace(folder, [(category, i) for category in ("chat", "code") for i in range(3)])
    return folder


def settings(folder: Path, **changes: Any) -> Benchmark:
    given: dict[str, Any] = {
        "drafter": LAYERS,
        "verifier": str(folder / "verifier"),
        "out": str(folder / "out"),
        "workloads": [Workload(data=str(folder / "t0.jsonl"), max_new_tokens=LIMIT)],
        "draft_lengths": (1, 3),
        "trees": ["static:2x1"],
        "concurrency": (1, 3),
        "temperatures": (0.0, 1.0),
        "seconds": 0.0,
        "least_trials": 2,
    }
    return Benchmark(**(given | changes))


@pytest.fixture(scope="module")
def written(workplace) -> tuple[dict[str, Any], Path]:
    benchmark.run(settings(workplace))
    out = workplace / "out"
    return json.loads((out / "benchmark.json").read_text()), out


def test_every_cell_is_measured_and_the_files_are_there(written):
    result, out = written
    assert set(result) == {
        "schema", "drafter", "verifier", "servers", "cells", "series", "provenance",
    }  # fmt: skip
    keys = [(c["temperature"], c["concurrency"], c["drafts"]) for c in result["cells"]]
    drafts = [OFF, "chain:1", "chain:3", "static:2x1"]
    assert keys == [(t, b, d) for t in (0.0, 1.0) for b in (1, 3) for d in drafts]
    assert {c["trials"] for c in result["cells"]} == {2}
    pictures = {
        f"{n}-{i}.png" for n in ("speedup", "latency", "positions", "parts") for i in (1, 2)
    }
    names = {"trials.jsonl", "trials.meta.json", "benchmark.json", "benchmark.html"}
    assert {path.name for path in out.iterdir()} == names | pictures
    assert len((out / "trials.jsonl").read_text().splitlines()) == 2 * len(keys)
    assert result["provenance"]["recipe"]["draft_lengths"] == [1, 3]


def test_greedy_texts_are_compared_and_sampled_ones_are_not(written):
    result, _ = written
    for cell in result["cells"]:
        if cell["drafts"] == OFF:
            continue
        if cell["temperature"]:
            assert cell["lossless"] is None
        else:
            texts = 2 * cell["concurrency"]
            assert cell["lossless"] == {
                "identical": texts, "ties": 0, "different": 0, "prompts": texts,
            }  # fmt: skip


def test_figures_of_a_cell_agree_with_each_other(written):
    result, _ = written
    for cell in result["cells"]:
        total = sum(cell["parts"].values())
        assert cell["inter_token"]["p50"] <= cell["inter_token"]["p99"]
        per_pass = 1.0
        if cell["drafts"] != OFF:
            assert cell["drafted"] == cell["accepted"] + cell["wasted"]
            per_pass = cell["acceptance"]["tokens_per_round"]
        assert cell["tokens_per_second"] == pytest.approx(
            cell["concurrency"] * per_pass / total, rel=0.35
        )  # trials differ in length
    for series in result["series"]:
        for entry in series["by_concurrency"]:
            for point in entry["points"]:
                found, v = entry["fit"], entry["fit"]["verify_overhead"][point["drafts"]]
                cost_ratio = found["cost_ratios"][point["drafts"]]
                drafting = found["drafting_fixed"] + point["draft_length"] * cost_ratio
                expected = point["tokens_per_round"] / (1 + drafting + v)
                assert point["predicted"] == pytest.approx(expected)


def test_the_same_command_measures_nothing_again(workplace, written, capsys):
    result, out = written
    before = (out / "trials.jsonl").read_bytes()
    benchmark.run(settings(workplace))
    assert (out / "trials.jsonl").read_bytes() == before
    assert "0 trials measured, 8 kept from before" in capsys.readouterr().out
    assert json.loads((out / "benchmark.json").read_text())["cells"] == result["cells"]


class Stopped(Exception):
    pass


def test_a_killed_benchmark_goes_on_where_it_was(workplace, written, monkeypatch):
    whole, _ = written
    out = workplace / "killed"
    calls, really = [0], own_loop.generate

    def killing(*words: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 15:  # 4 do not count, so in the second group
            raise Stopped
        return really(*words, **named)

    monkeypatch.setattr(own_loop, "generate", killing)
    with pytest.raises(Stopped):
        benchmark.run(settings(workplace, out=str(out)))
    kept = (out / "trials.jsonl").read_bytes()
    assert len(kept.splitlines()) == 10
    assert len(json.loads((out / "benchmark.json").read_text())["cells"]) == 6  # of what it has
    with (out / "trials.jsonl").open("ab") as file:
        file.write(b'{"cell": {"workload": "mix')  # killed while it wrote
    monkeypatch.setattr(own_loop, "generate", really)
    benchmark.run(settings(workplace, out=str(out)))
    assert (out / "trials.jsonl").read_bytes().startswith(kept)
    result = json.loads((out / "benchmark.json").read_text())
    for ours, theirs in zip(result["cells"], whole["cells"], strict=True):
        for name in ("drafts", "trials", "requests", "tokens", "drafted", "accepted", "lossless"):
            assert ours[name] == theirs[name]


def test_trials_of_another_drafter_are_refused(workplace, written):
    with pytest.raises(ValueError, match=r"another setting, identity is .*layers:0-6.*lookup"):
        benchmark.run(settings(workplace, drafter="prompt-lookup", draft_lengths=(1, 3)))


# ---- one trial of our own loop -------------------------------------------------------------------


def test_trial_counts_full_passes_only_and_every_row_s_tokens(workplace):
    """Against a plain loop over what came out."""
    verifier, drafter = load_pair(str(workplace / "verifier"), LAYERS, "float32", "cpu")
    workload = Workload(data=str(workplace / "t0.jsonl"), max_new_tokens=LIMIT)
    asked = {"mixed": (workload, prompts(workload))}
    measure = own_loop.own_loop(verifier, drafter, {"chain:3": chain(3)}, asked, False, 0)
    trial = measure(Cell("mixed", 0.0, 4, "chain:3"), 1)
    rounds = [int(counts.rounds) for counts in trial.counts]
    assert min(rounds) < max(rounds)  # the batch empties towards its end
    assert trial.passes == len(trial.waits) == min(rounds)
    assert trial.full_seconds == pytest.approx(sum(trial.waits))
    assert sum(trial.parts.values()) == pytest.approx(trial.full_seconds)
    written = sum(len(text) - 1 for text in trial.texts)
    assert trial.full_tokens == pytest.approx(4 * min(rounds) * written / sum(rounds))
    assert trial.tokens == written + 4 and trial.full_seconds < trial.seconds
    ids = [p.id for p in batch(asked["mixed"][1], 4, 1)]
    assert [counts.id for counts in trial.counts] == ids


def test_tokens_of_each_round_are_told(workplace):
    verifier, drafter = load_pair(str(workplace / "verifier"), LAYERS, "float32", "cpu")
    clock = Clock()
    outputs = generate(
        verifier, drafter, [[5, 9, 11], [7, 8]], shape=chain(3), sampling=Sampling(),
        drafting=Drafting(False, Sampling()), max_new_tokens=10, timer=clock,
    )  # fmt: skip
    for output in outputs:
        assert len(output.emitted) == output.rounds
        assert 1 + sum(output.emitted) == len(output.tokens)
        assert max(output.emitted) <= 4 and min(output.emitted) >= 1
    assert len(clock.passes()) == max(output.rounds for output in outputs) == clock.rounds


# ---- servers -------------------------------------------------------------------------------------


def test_servers_are_swept_like_our_own_loop(workplace, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    stubs = [Stub(), Stub(drafts=3)]
    out = workplace / "served"
    given = settings(
        workplace,
        out=str(out),
        drafter=None,
        verifier=None,
        trees=[],
        servers=[Server(stubs[0].url), Server(stubs[1].url, "chain:3")],
        temperatures=(0.0,),
    )
    benchmark.run(given)
    for stub in stubs:
        stub.shutdown()
        stub.server_close()
    result = json.loads((out / "benchmark.json").read_text())
    assert [c["drafts"] for c in result["cells"]] == [OFF, "chain:3"] * 2
    points = [entry["points"][0] for entry in result["series"][0]["by_concurrency"]]
    for point in points:
        assert point["acceptance_length"] == 2.5 and point["draft_efficiency"] == 0.5
        overhead = 2.5 / point["measured"]["value"] - 1
        assert point["overhead"] == pytest.approx(overhead)
        assert point["breakeven_efficiency"] == pytest.approx(overhead / 3)
    assert (out / "benchmark.html").is_file()


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"drafter": None}, "give either drafter or servers"),
        ({"draft_lengths": (0, 2)}, "draft_lengths must be 1 or more each, got 0"),
        ({"concurrency": ()}, "concurrency must name at least one"),
        ({"least_trials": 0}, "least_trials must be 1 or more, got 0"),
        ({"seconds": -1.0}, "seconds must be 0 or more"),
        ({"drafting": "best"}, "drafting must be greedy or sampled, got 'best'"),
        ({"trees": ["optimal:9"]}, "optimal:9 is fitted to a drafter"),
        ({"trees": ["bush"]}, "'bush': not known"),
        ({"temperatures": (-1.0,)}, "temperature"),
        ({"workloads": [Workload(), Workload()]}, "two have one name, in mixed, mixed"),
        ({"gate": Thresholds(drafts="chain:9")}, "gate.drafts 'chain:9' is not measured, chain:1"),
        ({"gate": Thresholds(workload="code")}, "gate.workload 'code' is none of mixed"),
        ({"drafter": None, "servers": [Server("http://a")]}, "one must be without drafts"),
        (
            {"drafter": None, "servers": [Server("http://a"), Server("http://b", "chain:2")]},
            "trees .* is not used with servers",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, wrong, said):
    with pytest.raises(ValueError, match=said):
        settings(tmp_path, **wrong)


def test_reports_are_read_before_anything_is_measured(workplace):
    with pytest.raises(ValueError, match=r"nowhere\.json is no report"):
        benchmark.run(settings(workplace, out=str(workplace / "no"), reports=["nowhere.json"]))
    assert not (workplace / "no").exists()


def test_too_long_chains_are_named_before_anything_is_measured(workplace, written):
    shutil.rmtree(workplace / "none", ignore_errors=True)
    with pytest.raises(ValueError, match="draft_length must be 1 or more, at most"):
        benchmark.run(settings(workplace, out=str(workplace / "none"), draft_lengths=(10**6,)))
    assert not (workplace / "none").exists()
