"""Scores with drafts and without: exact decoding leaves them alone, a biased rule does not."""

import itertools
import json
import math
from pathlib import Path

import pytest
import tiny
import torch

from headstart.data.rows.row import Row
from headstart.eval.decoding import rejection, tasks
from headstart.eval.decoding.tasks import Task, is_right, paired_test
from headstart.models.drafters.draft_lm import DraftLM
from headstart.models.losses import LossConfig
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain
from headstart.script import ROOT


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("The answer is 12.", "12", True),
        ("12 + 3 is 15", "12", False),  # the last number counts
        ("1,200", "1200", True),
        ("It is 112.", "12", False),
        ("-4", "4", False),
        ("The capital is PARIS.", "Paris", True),
        ("Parisian", "Paris", False),
        ("H2O", "H2O", True),
        ("", "Paris", False),
        ("no number", "7", False),
    ],
)
def test_a_text_is_right_if_it_says_the_answer(text: str, answer: str, right: bool) -> None:
    assert is_right(text, answer) is right


def test_the_paired_test_is_that_of_a_shuffle_within_each_task() -> None:
    """Against every way to deal a task's right texts out, in plain loops."""
    plain, drafted, samples = [3, 0, 2], [1, 1, 0], 3
    laws = []
    for a, b in zip(drafted, plain, strict=True):
        ways = {}
        for chosen in itertools.combinations(range(2 * samples), samples):
            right = sum(i < a + b for i in chosen)
            ways[right] = ways.get(right, 0) + 1
        total = sum(ways.values())
        laws.append({right: n / total for right, n in ways.items()})
    mean = sum(r * p for law in laws for r, p in law.items())
    variance = sum(
        sum(p * r * r for r, p in law.items()) - sum(p * r for r, p in law.items()) ** 2
        for law in laws
    )
    expected = math.erfc(abs(sum(drafted) - mean) / math.sqrt(2 * variance))
    assert paired_test(plain, drafted, samples) == pytest.approx(expected)
    assert paired_test([3, 0], [3, 0], 3) == 1.0


def scored(samples: int) -> tasks.Paired:
    """A sharp little verifier, drafted for by another of its kind, on twelve tasks."""
    verifier = tiny.verifier()
    lm = tiny.verifier(seed=3)
    drafter = DraftLM(lm, verifier, LossConfig()).eval()
    found = []
    for i in range(12):
        prompt = [1, 5 + i, 7]
        with torch.no_grad():
            states = verifier.states(torch.tensor([prompt]))
            best = verifier.logits(states.last_hidden[0, -1]).topk(1).indices
        word = verifier.tokenizer.decode(best)
        found.append(Task(Row(prompt, [0, 0, 0], str(i)), word.strip()))
    law = Sampling(0.7)
    drafting = Drafting(True, law)
    return tasks.score(verifier, drafter, found, chain(3), law, drafting, 8, 128, 0, samples)


def test_exact_decoding_solves_as_many_tasks() -> None:
    exact = scored(100)
    assert 0.05 < exact.plain / exact.texts < 0.95  # neither floor nor ceiling
    assert exact.p_value > 0.01


def test_a_biased_rule_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rejection, "accepts", lambda uniform, q, p: torch.ones_like(uniform, dtype=torch.bool)
    )
    assert scored(100).p_value < 0.001


def test_shipped_tasks_are_sound() -> None:
    lines = (ROOT / "data/tasks/short.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["id"] for row in rows}) == len(rows) == 64
    for row in rows:
        user, right = row["messages"]
        assert user["role"] == "user" and is_right(right["content"], right["content"])
        if row["category"] in ("sums", "products"):
            a, sign, b = user["content"].split("?")[0].split("is ")[1].replace("times", "*").split()
            assert str(eval(f"{a} {sign} {b}")) == right["content"]


def test_a_task_without_an_answer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"id": "x", "prompt": "2 + 2"}) + "\n")
    with pytest.raises(ValueError, match="row 'x': a task ends with its right answer"):
        tasks.read(str(file), tiny.tokenizer(), 64)
