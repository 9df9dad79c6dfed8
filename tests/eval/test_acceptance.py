"""The acceptance report, from a saved verifier and drafter to its three files."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save as save_verifier
from tiny import verifier as tiny_verifier
from workplace import make as make_workplace

from headstart.data.rows.row import Row
from headstart.eval import acceptance
from headstart.eval.decoding import trial
from headstart.eval.decoding.trial import pick
from headstart.eval.measures.intervals import LEAST_PROMPTS
from headstart.eval.reports import measuring, progress, report
from headstart.eval.reports.measurement import RunSettings
from headstart.eval.reports.measuring import Acceptance
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.medusa import Medusa, MedusaConfig
from headstart.models.joint.lora import JointConfig, JointModel
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier
from headstart.script import run_script

M = {
    "prompts", "tokens", "rounds", "acceptance_length", "tokens_per_round", "acceptance_rate",
    "draft_efficiency", "conditional", "joint",
}  # fmt: skip
CATEGORIES = {"chat": 4, "code": 3, "maths": 2}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A verifier, a drafter of it, and its answers at temperatures 0 and 1."""
    folder = tmp_path_factory.mktemp("acceptance")
    prompts = [(category, i) for category, count in CATEGORIES.items() for i in range(count)]
    verifier = make_workplace(folder, prompts)
    torch.manual_seed(0)
    drafter = Eagle3.create(
        verifier, Eagle3Config(draft_vocab_size=48), LossConfig(), torch.arange(64)
    )
    drafter.save(folder / "drafter")
    return folder


def run_settings(folder: Path, **changes: Any) -> Acceptance:
    runs = [
        RunSettings(str(folder / "t0.jsonl")),
        RunSettings(str(folder / "t1.jsonl"), temperature=1.0, drafting="sampled"),
    ]
    given = {
        "drafter": str(folder / "drafter"),
        "out": str(folder / "report"),
        "runs": runs,
        "decode_prompts": 6,
        "speed_prompts": 3,
        "speed_draft_lengths": (1, 3),
        "draft_length": 3,
        "max_new_tokens": 10,
        "speed_max_new_tokens": 8,
        "batch_size": 2,
    }
    return Acceptance(**(given | changes))


@pytest.fixture(scope="module")
def written(workplace) -> tuple[dict[str, Any], Path]:
    acceptance.run(run_settings(workplace))
    out = workplace / "report"
    return json.loads((out / "report.json").read_text()), out


def test_the_report_has_the_keys_of_its_schema(written):
    result, _ = written
    assert set(result) == {"schema", "drafter", "verifier", "runs", "speed", "provenance"}
    assert result["schema"] == 1
    assert set(result["drafter"]) == {"type", "path", "parameters", "fingerprint"}
    sizes = {"hidden_size", "mtp_modules"}
    assert set(result["verifier"]) == {"name", "fingerprint", "quality"} | sizes
    for entry in result["runs"]:
        assert set(entry) == {
            "settings", "overall", "categories", "lossless", "replay", "decoding_seconds",
        }  # fmt: skip
        assert set(entry["settings"]) == {
            "draft_length", "shape", "temperature", "top_p", "top_k", "drafting", "acceptance",
            "typical_epsilon", "typical_delta", "batch_size", "max_new_tokens", "seed", "dtype",
            "device", "data",
        }  # fmt: skip
        assert set(entry["overall"]) == M
        assert all(set(measures) == M for measures in entry["categories"].values())
        assert set(entry["replay"]) == {"same_prompts", "all"}
        assert set(entry["replay"]["same_prompts"]) == M | {"seconds"}
        assert set(entry["replay"]["all"]) == M | {"seconds", "categories"}
        assert set(entry["overall"]["acceptance_length"]) == {"value", "low", "high"}
    assert set(result["runs"][0]["lossless"]) == {"identical", "ties", "different", "prompts"}
    assert result["runs"][1]["lossless"] is None  # of distributions, no texts to compare
    for entry in result["speed"]:
        assert set(entry) == {
            "draft_length", "shape", "prompts", "seconds", "measured", "low", "high", "median",
            "predicted", "drafting_fixed", "cost_ratio", "verify_overhead", "acceptance_length",
            "tokens_per_round", "categories", "acceptance",
        }  # fmt: skip
    assert set(result["provenance"]) == {
        "command", "commit", "versions", "recipe", "time", "seconds",
    }  # fmt: skip


def test_the_report_agrees_with_itself(written, workplace):
    result, _ = written
    for entry in result["runs"]:
        settings, replayed = entry["settings"], entry["replay"]
        assert (settings["shape"], settings["draft_length"]) == ("chain", 3)
        assert set(entry["categories"]) == set(replayed["all"]["categories"]) == set(CATEGORIES)
        measured = [entry["overall"], replayed["same_prompts"], replayed["all"]]
        for m in [*measured, *entry["categories"].values()]:
            accepted = sum(m["joint"])
            assert m["acceptance_length"]["value"] == pytest.approx(1 + accepted)
            assert m["draft_efficiency"] <= m["acceptance_rate"]["value"] + 1e-9
            assert len(m["conditional"]) == len(m["joint"]) == 3
            assert m["joint"][0] == pytest.approx(m["conditional"][0])
            assert m["tokens_per_round"] <= m["acceptance_length"]["value"] + 1e-9
            for measure in (m["acceptance_length"], m["acceptance_rate"]):
                assert (measure["low"] is None) == (m["prompts"] < LEAST_PROMPTS)
        assert [m["prompts"] for m in measured] == [6, 6, 9]
        for name, count in CATEGORIES.items():
            assert replayed["all"]["categories"][name]["prompts"] == count
            assert entry["categories"][name]["prompts"] == 2
    assert result["drafter"]["parameters"] > 10_000 and len(result["drafter"]["fingerprint"]) == 16
    assert result["verifier"]["name"] == str(workplace / "verifier")
    assert [entry["draft_length"] for entry in result["speed"]] == [1, 3]
    for entry in result["speed"]:
        assert entry["low"] is entry["high"] is None and entry["prompts"] == 3
        cost = entry["drafting_fixed"] + entry["draft_length"] * entry["cost_ratio"]
        cost += 1 + entry["verify_overhead"]
        assert entry["predicted"] == pytest.approx(entry["tokens_per_round"] / cost)


def test_replay_of_the_decoded_prompts_equals_decoding(written):
    entry = written[0]["runs"][0]
    decoded = entry["overall"]
    replayed = {k: v for k, v in entry["replay"]["same_prompts"].items() if k != "seconds"}
    assert replayed == decoded


def test_every_greedy_text_is_the_verifiers(written):
    lossless = written[0]["runs"][0]["lossless"]
    assert lossless == {"identical": 6, "ties": 0, "different": 0, "prompts": 6}


def test_provenance_has_the_resolved_settings(written):
    origin = written[0]["provenance"]
    assert origin["recipe"]["runs"][1]["temperature"] == 1.0
    assert origin["recipe"]["speed_draft_lengths"] == [1, 3]
    assert {"torch", "transformers", "headstart", "python"} <= set(origin["versions"])


def test_the_report_can_be_read_and_seen(written):
    _, out = written
    text = (out / "report.md").read_text()
    titles = ["T = 0 (greedy, greedy drafts)", "T = 1 (temperature 1, sampled drafts)"]
    measured = [
        "conditional acceptance",
        "replay, chat",
        "decoding, same prompts",
        "Best: K =",
        "tokens a pass",
    ]
    for words in [*titles, *measured, "lossless: of 6 texts, 6 are the verifier's own"]:
        assert words in text, words
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_without_speed_and_at_temperature_one_alone(workplace, tmp_path):
    runs = [RunSettings(str(workplace / "t1.jsonl"), temperature=1.0, drafting="greedy")]
    changes = {"runs": runs, "out": str(tmp_path), "decode_prompts": 2, "speed_draft_lengths": ()}
    acceptance.run(run_settings(workplace, **changes))
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["speed"] == []
    assert report.NO_SPEED in (tmp_path / "report.md").read_text()
    changes |= {"speed_draft_lengths": (1,), "speed_prompts": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "measure_run", lambda *_: [])
        patch.setattr(report, "print_law", lambda _: None)
        verifier = Verifier.load(str(workplace / "verifier"))
        drafter = load_checkpoint(workplace / "drafter", verifier)
        settings = run_settings(workplace, **changes)
        assert measuring.measure(settings, verifier, drafter)["speed"] == []
    assert (tmp_path / "acceptance.png").exists()


# ---- trees, and drafters that are no checkpoints -----------------------------------------------


def report_of(workplace: Path, out: Path, **changes: Any) -> tuple[dict[str, Any], str]:
    acceptance.run(run_settings(workplace, out=str(out), **changes))
    return json.loads((out / "report.json").read_text()), (out / "report.md").read_text()


@pytest.mark.parametrize("tree", ["static:2x2", "dynamic:depth=3,top_k=2,total=6", "optimal:5"])
def test_a_tree_has_entries_and_columns_of_its_own(tree, workplace, tmp_path):
    result, text = report_of(workplace, tmp_path, tree=tree, decode_prompts=4, speed_prompts=2)
    shapes = [entry["settings"]["shape"] for entry in result["runs"]]
    assert shapes == ["chain", tree, "chain", tree]
    drafting = [entry["settings"]["drafting"] for entry in result["runs"]]
    last = "greedy" if tree.startswith("dynamic") else "sampled"
    assert drafting == ["greedy", "greedy", "sampled", last]
    for chain, branching in (result["runs"][:2], result["runs"][2:]):
        assert branching["replay"] is None and chain["replay"] is not None
        m = branching["overall"]
        assert m["acceptance_length"]["value"] == pytest.approx(1 + sum(m["joint"]))
        assert m["acceptance_rate"]["value"] >= m["draft_efficiency"]
    lossless = result["runs"][1]["lossless"]
    assert lossless == {"identical": 4, "ties": 0, "different": 0, "prompts": 4}
    assert [entry["shape"] for entry in result["speed"]] == ["chain", "chain", tree]
    assert all(entry["predicted"] > 0 for entry in result["speed"])
    assert "τ tree" in text and f"Tree {tree}, greedy drafts, by depth" in text


@pytest.mark.parametrize("name", ["prompt-lookup", "lookahead:window=4,ngram=3", "layers:0-6"])
def test_drafters_without_training_get_the_same_report(name, workplace, tmp_path):
    verifier = str(workplace / "verifier")
    changes = {"decode_prompts": 6, "speed_prompts": 2, "tree": "dynamic:depth=3,top_k=2,total=6"}
    result, text = report_of(workplace, tmp_path, drafter=name, verifier=verifier, **changes)
    lookup = not name.startswith("layers")
    kind = name.partition(":")[0] if lookup else "draft_lm"
    assert (result["drafter"]["type"], result["drafter"]["path"]) == (kind, name)
    assert (result["drafter"]["parameters"] == 0) == lookup
    assert (result["drafter"]["fingerprint"] is None) == lookup
    for entry in result["runs"]:
        assert set(entry["categories"]) == set(CATEGORIES) and set(entry["overall"]) == M
        assert (entry["replay"] is None) == (lookup or entry["settings"]["shape"] != "chain")
    for entry in result["runs"][:2]:
        assert entry["lossless"]["identical"] == 6
    if not lookup:
        replayed = dict(result["runs"][0]["replay"]["same_prompts"])
        del replayed["seconds"]
        assert replayed == result["runs"][0]["overall"]
    assert ("decoding, chat" in text) == lookup and ("Lookups have no replay" in text) == lookup
    assert "pays on" in text and (tmp_path / "acceptance.png").exists()


def test_a_model_of_the_users_drafts(workplace, tmp_path):
    """Any folder with a causal language model of the verifier's tokenizer."""
    small = tiny_verifier(max_position_embeddings=96, num_hidden_layers=1, seed=3)
    save_verifier(small, tmp_path / "small")
    verifier = str(workplace / "verifier")
    changes = {"drafter": str(tmp_path / "small"), "verifier": verifier, "speed_prompts": 1}
    result, _ = report_of(workplace, tmp_path / "report", **changes)
    assert result["drafter"]["type"] == "draft_lm" and result["drafter"]["parameters"] > 1000


# ---- typical acceptance ------------------------------------------------------------------------


LOSSY = "typical acceptance (lossy)"
MARKED = ("| measured on", "| position", "| drafts", "Best:", "Speed, batch 1", "T = 1 (", "Tree ")


@pytest.fixture(scope="module")
def lossy_report(workplace, tmp_path_factory) -> tuple[dict[str, Any], str]:
    """With the exact rule and with typical acceptance, the latter first; with a tree."""
    exact = RunSettings(str(workplace / "t1.jsonl"), temperature=1.0, drafting="sampled")
    typical = replace(exact, acceptance="typical", typical_epsilon=0.02, typical_delta=0.2)
    out = tmp_path_factory.mktemp("lossy")
    return report_of(workplace, out, runs=[typical, exact], tree="static:2x2")


def test_every_figure_measured_with_typical_acceptance_says_lossy(lossy_report):
    result, text = lossy_report
    rules = [entry["settings"]["acceptance"] for entry in result["runs"]]
    assert rules == ["typical", "typical", "exact", "exact"]
    assert {entry["acceptance"] for entry in result["speed"]} == {"typical"}
    settings = [entry["settings"] for entry in result["runs"]]
    assert (settings[0]["typical_epsilon"], settings[0]["typical_delta"]) == (0.02, 0.2)
    assert settings[2]["typical_epsilon"] is settings[2]["typical_delta"] is None
    _, first, second, speed, _ = text.split("\n## ")
    title = "T = 1 (temperature 1, sampled drafts), chain of K = 3, typical acceptance (lossy)"
    assert first.startswith(f"{title}, ε = 0.02, δ = 0.2\n")
    for part in (first, speed):
        lines = [line for line in part.splitlines() if line.startswith(MARKED)]
        assert len(lines) >= 3
        # a tree's last line is its verdict
        assert all(LOSSY in line or "NOT LOSSLESS" in line for line in lines)
    assert LOSSY not in second


def test_typical_acceptance_is_never_called_lossless_and_has_no_replay(lossy_report):
    result, text = lossy_report
    assert [entry["replay"] is None for entry in result["runs"]] == [True, True, False, True]
    assert result["runs"][0]["lossless"] is None
    _, first, second, _, _ = text.split("\n## ")
    said = (
        "NOT LOSSLESS: with typical acceptance the text is not distributed as the verifier's, "
        "by intent."
    )
    assert f"\n{said}\n" in first and f"\nTree static:2x2: {said}\n" in first
    assert "Typical acceptance (lossy) has no replay, which computes what the exact rule" in first
    assert "replay, all" not in first and "replay, all" in second
    assert "NOT LOSSLESS" not in second and "has no replay" not in second


def test_typical_acceptance_accepts_by_its_thresholds(workplace, tmp_path):
    """With tiny ones every draft is kept, where the exact rule rejects most."""
    run = RunSettings(str(workplace / "t1.jsonl"), temperature=1.0, acceptance="typical",
                      typical_epsilon=1e-30, typical_delta=1e-30)  # fmt: skip
    result, _ = report_of(workplace, tmp_path, runs=[run])
    assert result["runs"][0]["overall"]["acceptance_rate"]["value"] == 1.0
    assert all(entry["acceptance_length"] > 1.5 for entry in result["speed"])


def test_labels_of_the_picture_say_lossy(lossy_report, tmp_path, monkeypatch):
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    report.plot(lossy_report[0], tmp_path / "a.png")
    first, second, third = figures[0].axes
    for axes in (first, second):
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert [LOSSY in label for label in labels] == [True, True, False, False]
        assert "exact chains by replay" in axes.get_title()
    assert third.get_legend().get_title().get_text() == LOSSY


# ---- an optimal tree ---------------------------------------------------------------------------


def test_an_optimal_tree_is_fitted_to_answers_that_are_not_decoded(
    workplace, tmp_path, monkeypatch
):
    fitted, decoded = [], []
    really, decode = measuring.rank_acceptance, trial.decode

    def spied(drafter: Any, rows: list[Row], *others: Any) -> torch.Tensor:
        fitted.extend(row.id for row in rows)
        return really(drafter, rows, *others)

    def watched(verifier: Any, drafter: Any, rows: list[Row], *others: Any) -> Any:
        decoded.extend(row.id for row in rows)
        return decode(verifier, drafter, rows, *others)

    monkeypatch.setattr(measuring, "rank_acceptance", spied)
    monkeypatch.setattr(trial, "decode", watched)
    report_of(workplace, tmp_path, tree="optimal:5", decode_prompts=4, speed_prompts=1)
    assert len(fitted) == 5 and len(set(decoded)) == 4 and not set(fitted) & set(decoded)


def test_an_optimal_tree_without_other_answers_is_refused(workplace, monkeypatch, capsys):
    words = ["--tree=optimal:5", "--decode_prompts=0"]
    assert "decode_prompts 0 leaves none of" in error_of(workplace, monkeypatch, capsys, *words)


# ---- drafters of a few heads -------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_heads(workplace) -> str:
    verifier = Verifier.load(str(workplace / "verifier"))
    torch.manual_seed(0)
    drafter = Medusa.create(verifier, MedusaConfig(), LossConfig(num_steps=2), torch.ones(64))
    drafter.save(workplace / "medusa")
    return str(workplace / "medusa")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "draft_length is 4, but this drafter makes 2 drafts in a row at most; pass 2 or less"),
        (["--draft_length=2"], "speed_draft_lengths is 4, but"),
        (["--tree=dynamic"], ": its depth is 5, but"),
    ],
)
def test_more_drafts_than_heads_are_refused_before_anything_is_measured(
    arguments, message, two_heads, workplace, monkeypatch, capsys
):
    monkeypatch.setattr(measuring, "read_rows", None)
    if arguments == ["--tree=dynamic"]:
        arguments = [*arguments, "--draft_length=2", "--speed_draft_lengths=[1]"]
    arguments = [f"--drafter={two_heads}", *arguments]
    assert message in error_of(workplace, monkeypatch, capsys, *arguments)


def test_an_optimal_tree_is_no_deeper_than_the_heads(two_heads, workplace, tmp_path):
    changes = {"drafter": two_heads, "tree": "optimal:30", "speed_prompts": 1, "draft_length": 2}
    result, _ = report_of(workplace, tmp_path / "report", speed_draft_lengths=(2,), **changes)
    (tree, *_) = (r for r in result["runs"] if r["settings"]["shape"] == "optimal:30")
    assert 1 <= tree["settings"]["draft_length"] <= 2
    assert result["drafter"]["type"] == "medusa"


# ---- bad input ---------------------------------------------------------------------------------


def error_of(folder: Path, monkeypatch, capsys, *arguments: str) -> str:
    """What the script says on the command line; its exit code must be 2."""
    words = ["--drafter", str(folder / "drafter"), "--out", str(folder / "none")]
    words += ["--runs", json.dumps([{"data": str(folder / "t0.jsonl")}])]
    words += ["--decode_prompts=2", "--speed_prompts=1", "--max_new_tokens=6"]
    monkeypatch.setattr(sys, "argv", ["acceptance.py", *words, *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_script(Acceptance, acceptance.run)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ") and not any("Traceback" in line for line in lines)
    assert not (folder / "none").exists()
    return lines[-1]


BAD = {
    "K below one": (["--draft_length=0"], "draft_length must be 1 or more, at most 4096, got 0"),
    "K of the speed part": (
        ["--speed_draft_lengths=[2,-1]"],
        "speed_draft_lengths must be 1 or more each, got -1",
    ),
    "no token": (["--max_new_tokens=0"], "max_new_tokens must be 1 or more, got 0"),
    "prompts below zero": (["--decode_prompts=-1"], "decode_prompts must be 0 (all) or more"),
    "no drafter": (["--drafter=/nowhere"], "drafter '/nowhere' is not a checkpoint"),
    "no data": (
        ['--runs=[{"data": "/nowhere.jsonl"}]'],
        "error: runs[0].data: '/nowhere.jsonl': no such file",
    ),
    "longer than the context": (["--max_new_tokens=95"], "that is more than the context"),
    "unknown key": (["--draft_lenght=3"], "draft_length"),
    "no seed": (["--seed=-1"], "error: seed must be in [0, 2^63), got -1"),
    "empty drafter": (["--drafter="], "error: drafter is empty; give it a value"),
    "no runs": (["--runs=[]"], "runs must name at least one law"),
    "unknown dtype": (["--dtype=float8"], "dtype 'float8'"),
    "unknown tree": (["--tree=bush"], "error: tree 'bush': not known"),
    "a tree without width": (["--tree=static:0x2"], "error: tree 'static:0x2': static widths"),
    "a tree's unknown option": (["--tree=dynamic:k=2"], "error: tree 'dynamic:k=2': 'k=2' is not"),
    "a tree of no level": (["--tree=dynamic:depth=0"], "error: tree 'dynamic:depth=0': depth must"),
    "a tree in no file": (["--tree=static:no.json"], "error: tree 'static:no.json': neither"),
    "the second run": (
        ["--runs=[{temperature: 0}, {temperature: -1}]"],
        "error: runs[1]: temperature must be 0 (greedy) or a positive number, got -1",
    ),
    "data of the second run": (
        ["--runs=[{data: '{folder}/t0.jsonl'}, {data: nowhere.jsonl}]"],
        "error: runs[1].data: 'nowhere.jsonl': no such file",
    ),
    "a tree without nodes": (["--tree=optimal:0"], "needs a number of nodes"),
    "an optimal tree of a lookup": (
        ["--drafter=prompt-lookup", "--verifier={folder}/verifier", "--tree=optimal:9"],
        "prompt-lookup cannot tell",
    ),
    "a lookup of no verifier": (["--drafter=lookahead"], "made for none in particular"),
    "an option that a lookup has not": (
        ["--drafter=prompt-lookup:ngram=3", "--verifier={folder}/verifier"],
        "error: drafter 'prompt-lookup:ngram=3': 'ngram=3' is not understood; prompt-lookup takes",
    ),
    "layers that are not there": (
        ["--drafter=layers:0-8", "--verifier={folder}/verifier"],
        "error: drafter 'layers:0-8': layers must be ids in 0 … 7",
    ),
    "no layers": (
        ["--drafter=layers:a", "--verifier={folder}/verifier"],
        "'layers:a': 'a' is no layer",
    ),
    "a model that is not there": (
        ["--drafter=nobody/nothing", "--verifier={folder}/verifier"],
        "drafter 'nobody/nothing'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case, workplace, monkeypatch, capsys):
    arguments, message = BAD[case]
    arguments = [word.replace("{folder}", str(workplace)) for word in arguments]
    assert message in error_of(workplace, monkeypatch, capsys, *arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"temperature": -1}, "temperature must be 0 (greedy) or a positive number, got -1"),
        ({"top_p": 0}, "top_p must be in (0, 1]"),
        ({"drafting": "wild"}, "drafting must be greedy or sampled, got 'wild'"),
        ({"acceptance": "lax"}, "acceptance must be exact or typical, got 'lax'"),
        (
            {"acceptance": "typical"},
            "acceptance typical equals exact at temperature 0, where only the argmax is kept; set "
            "acceptance to exact or a temperature above 0",
        ),
        (
            {"acceptance": "typical", "temperature": 1, "typical_epsilon": 1.5},
            "typical_epsilon must be above 0 and below 1, got 1.5",
        ),
        (
            {"typical_delta": 0.5},
            "error: runs[0]: typical_delta 0.5 is not used by acceptance exact; leave it out or",
        ),
        (
            {"temperature": 1},
            "was answered at temperature 0, not at temperature 1: replay needs answers of its own "
            "law; give runs[0] theirs, {temperature: 0}, or write answers anew with "
            "data/regenerate.py --temperature 1",
        ),
    ],
)
def test_a_law_that_cannot_be_measured_is_refused(change, message, workplace, monkeypatch, capsys):
    runs = [{"data": str(workplace / "t0.jsonl")} | change]
    assert message in error_of(workplace, monkeypatch, capsys, f"--runs={json.dumps(runs)}")


@pytest.mark.parametrize(
    "law, way_out",
    [
        ({"top_k": 3}, "give runs[0] theirs, {temperature: 1, top_k: 3}, or write"),
        ({"top_p": 0.9}, "give runs[0] theirs, {temperature: 1, top_p: 0.9}, or write"),
        ({"min_p": 0.1}, "not at temperature 1: write answers anew with data/regenerate.py"),
        ({"top_k": None, "top_p": None, "temperature": None}, None),
    ],
)
def test_answers_of_another_law_are_not_replayed(
    law, way_out, workplace, tmp_path, monkeypatch, capsys
):
    """Whatever shaped them; of an unknown law they are taken as they are."""
    lines = (workplace / "t1.jsonl").read_text().splitlines()
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(json.loads(line) | law) + "\n" for line in lines))
    run = {"data": str(answers), "temperature": 1, "drafting": "sampled"}
    if way_out is not None:
        said = error_of(workplace, monkeypatch, capsys, f"--runs={json.dumps([run])}")
        assert f"runs[0].data {str(answers)!r}: chat-0 was answered at temperature 1" in said
        assert way_out in said
    own = run | {k: v for k, v in law.items() if v is not None}
    if "min_p" in law:
        return
    settings = run_settings(workplace, runs=[RunSettings(**own)])
    verifier = Verifier.load(str(workplace / "verifier"))
    assert len(measuring.read_rows(verifier, settings.runs[0], settings)) == 9


def test_another_verifier_is_refused_by_name(workplace, tmp_path, monkeypatch, capsys):
    other = tiny_verifier(seed=1)
    save_verifier(other, tmp_path)
    said = error_of(workplace, monkeypatch, capsys, f"--verifier={tmp_path}")
    assert "was trained for" in said and "--allow_verifier true" in said


def test_a_model_with_another_tokenizer_is_refused(workplace, tmp_path, monkeypatch, capsys):
    other = tiny_verifier(vocab_size=60)
    save_verifier(other, tmp_path)
    words = [f"--drafter={tmp_path}", f"--verifier={workplace / 'verifier'}"]
    assert "has another tokenizer" in error_of(workplace, monkeypatch, capsys, *words)


# ---- parts -------------------------------------------------------------------------------------


def rows_of(*categories: str) -> list[Row]:
    return [Row([1], [1], str(i), category) for i, category in enumerate(categories)]


def test_pick_deals_categories_evenly_in_file_order():
    rows = rows_of("a", "a", "a", "b", "a", "b", "c")
    assert [row.id for row in pick(rows, 3)] == ["0", "3", "6"]
    assert [row.id for row in pick(rows, 5)] == ["0", "1", "3", "5", "6"]
    assert [row.id for row in pick(rows, 6)] == ["0", "1", "2", "3", "5", "6"]
    assert pick(rows, 0) == pick(rows, 7) == pick(rows, 99) == rows


def test_a_picture_is_drawn_where_intervals_miss_their_value(written, tmp_path):
    """An interval that is far to one side of its value, as an earlier report may have it."""
    result = json.loads(json.dumps(written[0]))
    length = result["runs"][0]["replay"]["all"]["acceptance_length"]
    length |= {"low": length["value"] + 0.1, "high": length["value"] + 0.2}
    nothing = {"value": None, "low": None, "high": None}
    result["runs"][1]["replay"]["all"]["acceptance_length"] = nothing
    result["runs"][1]["replay"]["all"]["conditional"] = [None] * 3
    report.plot(result, tmp_path / "a.png")
    report.write_markdown(result, tmp_path / "a.md")
    assert (tmp_path / "a.png").exists()


def test_answers_that_end_in_prefill_are_reported(workplace, tmp_path):
    """Without a round there is no acceptance length, and no speedup."""
    changes = {"out": str(tmp_path), "max_new_tokens": 1, "speed_max_new_tokens": 1}
    acceptance.run(run_settings(workplace, **changes))
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["speed"] == []
    assert result["runs"][0]["overall"]["acceptance_length"]["value"] is None
    assert result["runs"][0]["replay"]["all"]["acceptance_length"]["value"] > 1


def test_text_that_differs_is_not_called_lossless(written):
    entry = json.loads(json.dumps(written[0]["runs"][0]))
    entry["lossless"] |= {"identical": 5, "different": 1}
    assert report.lossless_line(entry).startswith("NOT LOSSLESS")


def test_a_report_that_could_not_be_written_is_refused_before_measuring(tmp_path):
    """Nor is a full disk a traceback."""
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for out in (taken, taken / "below"):
        with pytest.raises(ValueError, match=f"out: '{out}' cannot be a folder .* {taken}"):
            report.folder(str(out))
    assert taken.read_text() == "a file"
    with pytest.raises(ValueError, match=r"the report cannot be written .* make room"):
        report.write({"schema": 1}, taken / "below")


def test_the_best_of_speeds_that_do_not_pay_says_so():
    entry = {"shape": "chain", "draft_length": 1, "acceptance": "exact", "categories": {"chat": 1}}
    assert report.best_line([entry | {"measured": 0.86}]) == (
        "Best: K = 1, 0.86 × plain decoding, which does not pay."
    )
    assert report.best_line([entry | {"measured": 1.2}]) == "Best: K = 1, 1.20 × plain decoding."


def test_one_timed_prompt_has_no_interval():
    row = {
        "draft_length": 1,
        "shape": "chain",
        "acceptance": "exact",
        "categories": {},
        "measured": 1.2,
        "low": None,
        "high": None,
        "median": 1.2,
    }
    rest = {"predicted": 1.1, "cost_ratio": 0.1, "verify_overhead": 0.1, "acceptance_length": 1.3}
    rest |= {"drafting_fixed": None, "tokens_per_round": 1.2}
    assert "1.20 [–]" in report.speed_table([row | rest])


# ---- a verifier that was trained with its drafter ----------------------------------------------


def test_a_tuned_verifier_is_compared_with_the_original_and_replays_its_own_texts(
    workplace, tmp_path, capsys
):
    verifier = Verifier.load(str(workplace / "verifier"))
    torch.manual_seed(0)
    drafter = Medusa.create(verifier, MedusaConfig(), LossConfig(num_steps=4), torch.ones(64))
    model = JointModel(drafter, JointConfig(rank=2))
    with torch.no_grad():
        for weight in model.adapter:
            weight.normal_(0, 0.1)
    model.save(tmp_path / "joint")
    changes = {"drafter": str(tmp_path / "joint"), "speed_prompts": 1}
    result, text = report_of(workplace, tmp_path / "report", **changes)
    tuned, quality = result["verifier"], result["verifier"]["quality"]
    assert "tuned by" in tuned["name"] and tuned["fingerprint"] != verifier.fingerprint()
    assert quality["kl"] > 0.02 and quality["tokens"] > 10
    for said in (text, capsys.readouterr().out):
        assert "WARNING: quality moved" in said
        assert "lossless means the tuned verifier's own" in said
    for entry in result["runs"]:
        if entry["replay"] is not None:
            # the answers in the data are the original's: only its own texts are replayed
            assert entry["replay"]["all"]["prompts"] == entry["overall"]["prompts"]
            if entry["settings"]["temperature"] == 0:
                same = entry["replay"]["same_prompts"]["acceptance_length"]
                assert same["value"] == entry["overall"]["acceptance_length"]["value"]
                assert entry["lossless"]["different"] == 0


# ---- a stopped report --------------------------------------------------------------------------


def without_times(value: Any) -> Any:
    """A report's numbers that are the same in every run."""
    if isinstance(value, dict):
        dropped = ("seconds", "decoding_seconds", "time", "command", "provenance", "speed", "out")
        return {k: without_times(v) for k, v in value.items() if k not in dropped}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def test_a_stopped_report_goes_on_and_measures_no_run_twice(
    workplace: Path, written: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    asked: list[float] = []
    measure_run = measuring.measure_run

    def counted(verifier: Any, drafter: Any, run: RunSettings, *rest: Any) -> Any:
        asked.append(run.temperature)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return measure_run(verifier, drafter, run, *rest)

    settings = run_settings(workplace, out=str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "measure_run", counted)
        with pytest.raises(KeyboardInterrupt):
            acceptance.run(settings)
        assert not (tmp_path / "report.json").exists() and (tmp_path / progress.FILE).exists()
        acceptance.run(settings)
    assert asked == [0.0, 1.0, 1.0]
    result = json.loads((tmp_path / "report.json").read_text())
    assert without_times(result) == without_times(written[0])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "acceptance.png", "report.json", "report.md",
    ]  # fmt: skip


def test_runs_of_other_settings_are_not_taken_over(tmp_path: Path) -> None:
    done = progress.Progress(tmp_path, "one")
    done.ended(0, [{"a": 1}])
    assert progress.Progress(tmp_path, "one").of(0) == [{"a": 1}]
    assert progress.Progress(tmp_path, "other").of(0) is None
    (tmp_path / progress.FILE).write_text('{"identity": "one", "runs"')
    assert progress.Progress(tmp_path, "one").of(0) is None
