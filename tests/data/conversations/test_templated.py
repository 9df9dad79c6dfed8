"""Prompts from templates: distinct, split, and written by a script."""

import json
import random
import sys
from pathlib import Path

import pytest

from headstart.data.conversations import templated


def make(evaluation: bool, count: int, seed: int, taken: set[str]) -> list[dict]:
    rng = random.Random(seed)
    draws = {name: lambda name=name: f"{name} {rng.randrange(9)}" for name in ("a", "b")}
    return templated.rows(evaluation, draws, count, rng, taken)


def test_no_prompt_is_drawn_twice_in_either_split() -> None:
    taken = {"a 0"}
    evaluation, train = make(True, 3, 0, taken), make(False, 5, 0, taken)
    asked = [row["messages"][0]["content"] for row in evaluation + train]
    assert len(set(asked)) == len(asked) == 16 and "a 0" not in asked
    assert [row["id"] for row in evaluation] == [
        f"eval-{c}-{i:04d}" for c in "ab" for i in range(3)
    ]
    assert sorted(row["id"] for row in train) == [
        f"train-{c}-{i:04d}" for c in "ab" for i in range(5)
    ]
    assert [row["category"] for row in train] != sorted(
        row["category"] for row in train
    )  # shuffled


def test_more_prompts_than_the_templates_give_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for words, said in [
        (["--train_per_kind", "9"], "argument --train_per_kind: 9 train prompts of a are more"),
        (["--eval_per_kind", "-1"], "argument --eval_per_kind: must be 0 or more, got -1"),
        (["--out", str(tmp_path / "file")], "argument --out: [Errno 17] File exists"),
    ]:
        monkeypatch.setattr(sys, "argv", ["prompts.py", "--out", str(tmp_path / "new"), *words])
        with pytest.raises(SystemExit) as stop:
            templated.write("write", make, "kind", train=2, evaluation=1)
        assert stop.value.code == 2 and said in capsys.readouterr().err


def test_the_script_writes_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["prompts.py", "--out", str(tmp_path / "new"), "--train_per_kind", "4"]
    monkeypatch.setattr(sys, "argv", words)
    templated.write("write", make, "kind", train=2, evaluation=1)
    lines = {f.name: f.read_text().splitlines() for f in (tmp_path / "new").iterdir()}
    assert {name: len(of) for name, of in lines.items()} == {"train.jsonl": 8, "eval.jsonl": 2}
    taken: set[str] = set()
    evaluation = make(True, 1, 0, taken)
    assert [json.loads(line) for line in lines["eval.jsonl"]] == evaluation
    assert [json.loads(line) for line in lines["train.jsonl"]] == make(False, 4, 0, taken)
