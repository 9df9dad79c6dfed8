"""The shipped conversations: what their README promises."""

import json
from collections import Counter

import pytest
import torch

from headstart.data.smollm2 import prompts
from headstart.models.verifier.verifier import Verifier
from headstart.script import ROOT

SHIPPED = ROOT / "data" / "smollm2"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (SHIPPED / name).read_text().splitlines()]


def asked(row: dict) -> str:
    return next(m["content"] for m in row["messages"] if m["role"] == "user")


def test_no_evaluation_prompt_occurs_in_training() -> None:
    assert not {asked(r) for r in rows("eval.jsonl")} & {asked(r) for r in rows("train.jsonl")}


def test_sizes_and_categories() -> None:
    train, greedy, sampled = (rows(f"{n}.jsonl") for n in ("train", "eval", "eval-t1"))
    assert len(train) >= 1000
    assert Counter(r["category"] for r in greedy) == dict.fromkeys(prompts.TEMPLATES, 20)
    assert [asked(r) for r in greedy] == [asked(r) for r in sampled]
    assert {r["temperature"] for r in train + greedy} == {0.0}
    assert {r["temperature"] for r in sampled} == {1.0}
    assert Counter(r["category"] for r in train)["self-prompted"] > 0


def test_prompts_are_those_that_the_script_writes() -> None:
    taken: set[str] = set()
    evaluation = prompts.make(True, 20, 0, taken)
    assert [r["id"] for r in evaluation] == [r["id"] for r in rows("eval.jsonl")]
    assert [asked(r) for r in evaluation] == [asked(r) for r in rows("eval.jsonl")]
    made = {r["id"]: asked(r) for r in prompts.make(False, 500, 0, taken)}
    templated = [r for r in rows("train.jsonl") if r["category"] != "self-prompted"]
    assert all(made[r["id"]] == asked(r) for r in templated)


def test_no_prompt_is_made_twice() -> None:
    taken: set[str] = set()
    made = prompts.make(True, 20, 0, taken) + prompts.make(False, 100, 0, taken)
    assert len({asked(r) for r in made}) == len(made) == 6 * 120


@pytest.mark.slow
def test_greedy_answers_are_the_verifiers_own() -> None:
    verifier = Verifier.load("embedded/smollm2-135m")
    for row in rows("eval.jsonl")[::30] + rows("train.jsonl")[::400]:
        prompt = verifier.tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        answer = row["messages"][-1]["token_ids"]
        states = verifier.states(torch.tensor([prompt + answer]))
        logits = verifier.logits(states.last_hidden[0, len(prompt) - 1 : -1])
        top = logits.topk(2, dim=-1)
        ours = torch.tensor(answer)
        tie = top.values[:, 0] - top.values[:, 1] < 1e-3
        assert bool(((top.indices[:, 0] == ours) | tie).all()), row["id"]
