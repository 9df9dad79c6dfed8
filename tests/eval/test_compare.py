"""Comparing drafters, from saved drafters and earlier reports to one table."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save as save_verifier
from tiny import verifier as tiny_verifier
from workplace import make as make_workplace

from headstart.eval import acceptance, compare
from headstart.eval.compare import Compare, labels
from headstart.eval.reports import measuring, side_by_side
from headstart.eval.reports.measurement import RunSettings
from headstart.eval.reports.measuring import Acceptance
from headstart.lock import only_writer
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier
from headstart.script import run_script

LAYERS = "layers:0-6"


def save_drafter(folder: Path, verifier: Verifier, seed: int, tokens: int) -> None:
    torch.manual_seed(seed)
    config = Eagle3Config(draft_vocab_size=48)
    Eagle3.create(verifier, config, LossConfig(), torch.arange(64)).save(folder)
    (folder / "resume").mkdir()
    (folder / "resume" / "state.json").write_text(json.dumps({"step": 3, "tokens": tokens}))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A verifier, its answers at temperatures 0 and 1, and two checkpoints of one name."""
    folder = tmp_path_factory.mktemp("compare")
    verifier = make_workplace(folder, zip(["chat"] * 3 + ["code"] * 2, range(5), strict=True))
    save_drafter(folder / "one" / "best", verifier, 0, 12345)
    save_drafter(folder / "two" / "best", verifier, 1, 67890)
    return folder


def shared(folder: Path) -> dict[str, Any]:
    runs = [
        RunSettings(str(folder / "t0.jsonl")),
        RunSettings(str(folder / "t1.jsonl"), temperature=1.0, drafting="sampled"),
    ]
    return {
        "verifier": str(folder / "verifier"),
        "runs": runs,
        "decode_prompts": 3,
        "speed_prompts": 2,
        "speed_draft_lengths": (1, 3),
        "draft_length": 3,
        "max_new_tokens": 8,
        "speed_max_new_tokens": 6,
        "tree": "static:2x2",
    }


def compare_settings(folder: Path, **changes: Any) -> Compare:
    drafters = ["prompt-lookup", str(folder / "one" / "best"), LAYERS]
    given = {"out": str(folder / "all"), "drafters": drafters}
    return Compare(**(shared(folder) | given | changes))


@pytest.fixture(scope="module")
def written(workplace) -> tuple[dict[str, Any], Path]:
    compare.run(compare_settings(workplace))
    out = workplace / "all"
    return json.loads((out / "compare.json").read_text()), out


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """Who is measured from here on; nobody really is."""
    asked: list[str] = []

    def measure(settings: Acceptance, *_: Any) -> None:
        asked.append(settings.drafter)
        raise ValueError("measured")

    monkeypatch.setattr(measuring, "measure", measure)
    return asked


# ---- the table ---------------------------------------------------------------------------------


def test_drafters_are_ordered_by_chain_length_at_temperature_zero(written):
    result, _ = written
    lengths = [row["laws"][0]["chain"]["acceptance_length"]["value"] for row in result["drafters"]]
    assert lengths == sorted(lengths, reverse=True)
    assert result["drafters"][0]["label"] == "layers-0-6"  # most of the verifier itself
    assert {row["label"] for row in result["drafters"]} == {"layers-0-6", "one", "prompt-lookup"}


def test_every_value_is_that_of_the_drafters_report(written):
    result, out = written
    for row in result["drafters"]:
        full = json.loads((out / row["label"] / "report.json").read_text())
        assert row["report"] == str(out / row["label"] / "report.json")
        assert (row["type"], row["parameters"]) == tuple(
            full["drafter"][key] for key in ("type", "parameters")
        )
        assert row["speed"] == full["speed"] and row["best"] in full["speed"]
        assert row["best"]["measured"] == max(entry["measured"] for entry in full["speed"])
        longest = full["speed"][1]
        assert row["cost_ratio"] == {
            "draft_length": 3,
            "fixed": longest["drafting_fixed"],
            "value": longest["cost_ratio"],
        }
        assert row["lossless"] == {"identical": 6, "ties": 0, "different": 0, "prompts": 6}
        for law, (chain, tree) in zip(
            row["laws"], (full["runs"][:2], full["runs"][2:]), strict=True
        ):
            widest = chain["overall"] if chain["replay"] is None else chain["replay"]["all"]
            assert law["chain"]["acceptance_length"] == widest["acceptance_length"]
            assert law["chain"]["prompts"] == widest["prompts"]
            overall = chain["overall"]["acceptance_length"]
            assert law["chain"]["decoded"] == {"prompts": 3, "acceptance_length": overall}
            assert law["tree"]["acceptance_length"] == tree["overall"]["acceptance_length"]


def test_what_each_length_rests_on_is_said(written):
    result, _ = written
    for row in result["drafters"]:
        lookup = row["label"] == "prompt-lookup"
        for law in row["laws"]:
            chain = law["chain"]
            assert (chain["source"], chain["prompts"]) == (
                ("decoding", 3) if lookup else ("replay", 5)
            )
            assert (law["tree"]["source"], law["tree"]["prompts"]) == ("decoding", 3)
        assert side_by_side.source_cell(row) == ("decoding of 3" if lookup else "replay of 5")


def test_training_tokens_are_those_of_the_checkpoint(written):
    tokens = {row["label"]: row["training_tokens"] for row in written[0]["drafters"]}
    assert tokens == {"one": 12345, "prompt-lookup": None, "layers-0-6": None}


def test_the_table_can_be_read_and_the_picture_seen(written):
    result, out = written
    text = (out / "compare.md").read_text()
    assert f"3 drafters of {result['verifier']['name']}" in text
    for words in [
        "τ chain of 3, T = 0, greedy drafts",
        "τ chain of 3, T = 1, sampled drafts",
        "the same, T = 0, 3 prompts decoded",
        "τ tree static:2x2, T = 0, greedy drafts, 3 prompts decoded",
        "τ tree static:2x2, T = 1, sampled drafts, 3 prompts decoded",
        "fixed cost",
        "best speedup",
        "12,345",
        "replay of 5",
        "yes, 6 of 6",
    ]:
        assert words in text, words
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        row["label"] for row in result["drafters"]
    ]
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_lossy_law_is_called_so_at_its_figures(workplace, tmp_path):
    runs = [
        RunSettings(str(workplace / "t1.jsonl"), 1.0, acceptance="typical"),
        RunSettings(str(workplace / "t0.jsonl")),
    ]
    drafters = [str(workplace / "one" / "best")]
    compare.run(compare_settings(workplace, runs=runs, drafters=drafters, out=str(tmp_path)))
    text = (tmp_path / "compare.md").read_text()
    lossy = "typical acceptance (lossy)"
    assert f"τ chain of 3, T = 1, {lossy}, ε = 0.09, δ = 0.3, greedy drafts" in text
    assert f"best speedup, {lossy}" in text and "| decoding of 3 / replay of 5 |" in text
    assert "the same, T = 0, 3 prompts decoded" in text and "lossless at T = 0" in text


# ---- nothing twice -----------------------------------------------------------------------------


def test_a_second_call_measures_nothing(workplace, written, measured, capsys):
    compare.run(compare_settings(workplace))
    assert measured == []
    assert capsys.readouterr().out.count("is read, nothing measured again") == 3
    again = json.loads((workplace / "all" / "compare.json").read_text())
    assert again["drafters"] == written[0]["drafters"]


def test_after_a_kill_only_the_unfinished_are_measured(workplace, written, tmp_path, measured):
    for label in ("prompt-lookup", "one"):
        shutil.copytree(written[1] / label, tmp_path / label)
    with pytest.raises(ValueError, match="measured"):
        compare.run(compare_settings(workplace, out=str(tmp_path)))
    assert measured == [LAYERS]


def test_an_earlier_report_stands_for_its_drafter(workplace, written, tmp_path, measured):
    changes = {"drafters": [str(written[1] / "one"), str(written[1] / "prompt-lookup")]}
    compare.run(compare_settings(workplace, out=str(tmp_path), **changes))
    result = json.loads((tmp_path / "compare.json").read_text())
    before = {row["label"]: row for row in written[0]["drafters"]}
    for row in result["drafters"]:
        expected = before[row["label"]] | {"name": row["name"]}
        assert row == expected  # training tokens too: its checkpoint is still the same
    assert not (tmp_path / "one").exists()


def test_a_changed_checkpoint_does_not_lend_its_tokens_to_an_earlier_report(
    workplace, written, tmp_path, measured
):
    result = json.loads((written[1] / "one" / "report.json").read_text())
    result["drafter"]["path"] = str(workplace / "two" / "best")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "report.json").write_text(json.dumps(result))
    changes = {"drafters": [str(tmp_path / "old")], "out": str(tmp_path / "out")}
    compare.run(compare_settings(workplace, **changes))
    [row] = json.loads((tmp_path / "out" / "compare.json").read_text())["drafters"]
    assert row["training_tokens"] is None


def test_an_earlier_report_may_lack_the_tree_or_have_one_too_many(workplace, written, tmp_path):
    given = shared(workplace) | {"tree": None, "speed_draft_lengths": ()}
    out = tmp_path / "bare"
    acceptance.run(Acceptance(drafter="prompt-lookup", out=str(out), **given))
    changes = {"out": str(tmp_path / "all"), "speed_draft_lengths": (), "drafters": [str(out)]}
    compare.run(compare_settings(workplace, **changes))
    text = (tmp_path / "all" / "compare.md").read_text()
    assert "τ tree" not in text and "| fixed cost" not in text
    assert (tmp_path / "all/compare.png").exists()
    changes = {"out": str(tmp_path / "no"), "tree": None, "drafters": [str(written[1] / "one")]}
    compare.run(compare_settings(workplace, **changes))
    [row] = json.loads((tmp_path / "no" / "compare.json").read_text())["drafters"]
    assert row["laws"][0]["tree"] is None and row["lossless"]["prompts"] == 3
    assert {entry["shape"] for entry in row["speed"]} == {"chain"}


def test_a_report_of_before_is_compared_with_its_one_cost(workplace, written, tmp_path):
    """Its speed had one cost for each K, no tokens a pass and no number of prompts."""
    before = tmp_path / "before"
    before.mkdir()
    result = json.loads((written[1] / "one" / "report.json").read_text())
    for entry in result["speed"]:
        for name in ("prompts", "seconds", "drafting_fixed", "tokens_per_round"):
            del entry[name]
        entry |= {"low": 0.5, "high": 2.0, "cost_ratio": 0.25}
    for name in ("hidden_size", "mtp_modules"):
        del result["verifier"][name]
    (before / "report.json").write_text(json.dumps(result))
    changes = {"out": str(tmp_path / "all"), "drafters": [str(before)]}
    compare.run(compare_settings(workplace, **changes))
    text = (tmp_path / "all" / "compare.md").read_text()
    assert "| 0.250 at K = 3 |" in text and " [0.50, 2.00], " in text


# ---- refusals ----------------------------------------------------------------------------------


def error_of(monkeypatch, capsys, folder: Path, drafters: list[str], *words: str) -> str:
    given = ["--out", str(folder / "none"), "--drafters", json.dumps(drafters)]
    for name, value in shared(folder).items():
        if name == "runs":
            value = json.dumps([vars(one) for one in value])
        given.append(f"--{name}={list(value) if isinstance(value, tuple) else value}")
    monkeypatch.setattr(sys, "argv", ["compare.py", *given, *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_script(Compare, compare.run)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ") and not any("Traceback" in line for line in lines)
    assert not (folder / "none").exists()
    return lines[-1]


BAD = {
    # the first drafter is always a good one
    "nobody": ([], [], "drafters must name at least one"),
    "missing": (["/nowhere"], [], "'/nowhere' is not a checkpoint"),
    "twice": (["{f}/one/best", "{f}/one/best/"], [], "is there twice; name it once"),
    "no verifier": ([LAYERS], ["--verifier=null"], "none of the drafters was made for one"),
    "an optimal tree of a lookup": (
        ["prompt-lookup"],
        ["--tree=optimal:5"],
        "prompt-lookup:max_ngram=4 cannot tell",
    ),
    "K of an earlier report": (
        ["{f}/all/one"],
        ["--draft_length=2"],
        "draft_length is 3 there and 2 here",
    ),
    "seed": (["{f}/all/one"], ["--seed=1"], "seed is 0 there and 1 here"),
    "tree": (["{f}/all/one"], ["--tree=dynamic"], "tree is 'static:2x2' there and 'dynamic:"),
    "number of prompts": (
        ["{f}/all/one"],
        ["--decode_prompts=4"],
        "decode_prompts is 3 there and 4 here",
    ),
    "number of laws": (
        ["{f}/all/one"],
        ['--runs=[{"data": "{f}/t0.jsonl"}]'],
        "runs: how many is 2 there and 1 here",
    ),
    "data": (
        ["{f}/all/one"],
        ['--runs=[{"data": "{f}/copy.jsonl"}, {"data": "{f}/t1.jsonl", "temperature": 1.0}]'],
        "runs[0].data is",
    ),
    "a drafting rule": (
        ["{f}/all/one"],
        ['--runs=[{"data": "{f}/t0.jsonl", "drafting": "sampled"}, {"data": "{f}/t1.jsonl"}]'],
        "runs[0].drafting is 'greedy' there and 'sampled' here",
    ),
    "verifier": (
        ["{f}/all/one"],
        ["--verifier={f}/other"],
        "the verifier is",
    ),
    "a drafter of another verifier": (["{f}/one/best"], ["--verifier={f}/other"], "was trained"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_refusal_is_one_line_before_anything_is_measured(
    case, workplace, written, measured, monkeypatch, capsys
):
    if not (workplace / "other").exists():
        other = tiny_verifier(seed=1)
        save_verifier(other, workplace / "other")
        shutil.copy(workplace / "t0.jsonl", workplace / "copy.jsonl")
    drafters, words, message = BAD[case]
    drafters = [name.replace("{f}", str(workplace)) for name in drafters]
    if case not in ("nobody", "no verifier"):
        drafters = ["prompt-lookup:max_ngram=4", *drafters]
    words = [word.replace("{f}", str(workplace)) for word in words]
    assert message in error_of(monkeypatch, capsys, workplace, drafters, *words)
    assert measured == []


def test_two_comparisons_do_not_write_to_one_folder(workplace, measured, monkeypatch, capsys):
    said = r"^out '.*none': process \d+ on .* is writing there"
    lock = workplace / "none" / ".compare.lock"
    with only_writer(lock, "the other"), pytest.raises(ValueError, match=said):
        compare.run(compare_settings(workplace, out=str(workplace / "none")))
    assert measured == [] and not (workplace / "none").exists()


def test_more_drafts_than_a_drafter_makes_are_refused_before_measuring(
    workplace, measured, monkeypatch, capsys
):
    monkeypatch.setattr(Eagle3, "max_depth", 2)
    drafters = ["prompt-lookup", str(workplace / "one" / "best")]
    message = "one/best': draft_length is 3, but this drafter makes 2 drafts in a row"
    assert message in error_of(monkeypatch, capsys, workplace, drafters)
    words = ["--draft_length=2", "--speed_draft_lengths=[1]", "--tree=static:2x2x1"]
    message = "one/best': tree 'static:2x2x1': its depth is 3, but this drafter makes 2"
    assert message in error_of(monkeypatch, capsys, workplace, drafters, *words)
    assert measured == []


def test_a_report_of_other_data_under_the_same_name_is_refused(workplace, written, tmp_path):
    result = json.loads((written[1] / "one" / "report.json").read_text())
    result["runs"][0]["replay"]["all"]["prompts"] = 4
    (tmp_path / "report.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match=r"prompts replayed is 4 there and 5 here"):
        compare.run(compare_settings(workplace, drafters=[str(tmp_path)], out=str(tmp_path)))


def test_a_finished_report_of_another_drafter_is_not_taken(workplace, written, tmp_path, measured):
    one, two = (str(workplace / name / "best") for name in ("one", "two"))
    shutil.copytree(written[1] / "one", tmp_path / "two")
    with pytest.raises(ValueError, match=r"fingerprint is .*pass another --out"):
        compare.run(compare_settings(workplace, drafters=[one, two], out=str(tmp_path)))
    with pytest.raises(ValueError, match=r"two/report.json .*tree is 'static:2x2' there and None"):
        compare.run(compare_settings(workplace, drafters=[two], out=str(tmp_path), tree=None))
    shutil.copytree(written[1] / "prompt-lookup", tmp_path / "prompt-lookup-max_ngram=4")
    changes = {"drafters": ["prompt-lookup:max_ngram=4"], "out": str(tmp_path)}
    with pytest.raises(ValueError, match="the drafter is 'prompt-lookup' there"):
        compare.run(compare_settings(workplace, **changes))
    assert measured == []


def test_a_file_that_is_no_report_is_refused(workplace, tmp_path):
    for text in ("{", "[]", '{"schema": 1}'):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(ValueError, match=r"report.json is no report of this version"):
            compare.run(compare_settings(workplace, drafters=[str(tmp_path)], out=str(tmp_path)))


# ---- parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, expected",
    [
        (["outputs/eagle3/best", "prompt-lookup", "layers:0-5"], "eagle3 prompt-lookup layers-0-5"),
        (["outputs/a/checkpoints/step-000120", "/b"], "a b"),
        (["a/eagle3/best", "b/eagle3/best", "c"], "a-eagle3 b-eagle3 c"),
        (["o/eagle3/best", "o/eagle3/step-12"], "eagle3-best eagle3-step-12"),
        (["eagle3", "x/eagle3/best"], "eagle3 x-eagle3"),
        (["embedded/smollm2-135m", "best"], "smollm2-135m best"),
        (["lookahead:window=4,ngram=3", "lookahead"], "lookahead-window=4,ngram=3 lookahead"),
    ],
)
def test_labels_are_short_and_tell_apart(names, expected):
    assert labels(names) == expected.split()


def test_the_verifier_is_that_of_the_first_drafter_made_for_one(workplace, written):
    named = [str(workplace / "one" / "best"), str(written[1] / "layers-0-6")]
    for name in named:
        settings = compare_settings(workplace, verifier=None, drafters=[LAYERS, name])
        assert compare.verifier_name(settings) == str(workplace / "verifier")


def test_text_that_differs_is_not_called_lossless():
    found = {"identical": 5, "ties": 1, "different": 0, "prompts": 6}
    assert side_by_side.lossless_cell(found) == "yes, 5 of 6, 1 at a tie"
    assert side_by_side.lossless_cell(found | {"different": 1, "ties": 0}) == "NO, 1 of 6 differ"
    assert side_by_side.lossless_cell(None) == "–"
