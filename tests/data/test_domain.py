"""The shipped domain: what its README promises."""

import json
import re
from collections import Counter

import pytest
import torch

from headstart.data.domain import prompts
from headstart.models.verifier.verifier import Verifier
from headstart.script import ROOT

FILES = ("train", "eval", "eval-t1")


def rows(name: str, folder: str = "domain") -> list[dict]:
    lines = (ROOT / "data" / folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def asked(row: dict) -> str:
    return next(m["content"] for m in row["messages"] if m["role"] == "user")


def test_sizes_and_kinds() -> None:
    train, greedy, sampled = map(rows, FILES)
    assert Counter(r["category"] for r in train) == dict.fromkeys(prompts.TEMPLATES, 120)
    assert Counter(r["category"] for r in greedy) == dict.fromkeys(prompts.TEMPLATES, 15)
    assert [r["messages"][:-1] for r in greedy] == [r["messages"][:-1] for r in sampled]
    assert {r["temperature"] for r in train + greedy} == {0.0}
    assert {r["temperature"] for r in sampled} == {1.0}


def test_no_prompt_occurs_twice_or_in_the_general_data() -> None:
    train, greedy = ([asked(r) for r in rows(name)] for name in ("train", "eval"))
    assert len({*train, *greedy}) == len(train) + len(greedy)
    general = {asked(r) for name in FILES for r in rows(name, "smollm2")}
    assert not general & {*train, *greedy}


def test_evaluation_has_things_and_templates_of_its_own() -> None:
    train, evaluation = ("\n".join(asked(r) for r in rows(name)) for name in ("train", "eval"))
    assert not [thing for thing in prompts.EVAL_THINGS if thing in train]
    assert not [thing for thing in prompts.THINGS if thing in evaluation]
    for _, own in prompts.TEMPLATES.values():
        pattern = re.sub(r"\\{.\\}", ".+", re.escape(own))
        assert re.search(pattern, evaluation) and not re.search(pattern, train)


def test_prompts_are_those_that_the_script_writes() -> None:
    taken: set[str] = set()
    for evaluation, count, name in ((True, 15, "eval"), (False, 120, "train")):
        made = prompts.make(evaluation, count, 0, taken)
        shipped = rows(name)
        assert [r["id"] for r in made] == [r["id"] for r in shipped]
        assert [r["messages"] for r in made] == [r["messages"][:-1] for r in shipped]


def test_greedy_answers_say_something_and_nearly_all_end() -> None:
    for name in ("train", "eval"):
        answers = [r["messages"][-1] for r in rows(name)]
        assert min(len(a["token_ids"]) for a in answers) >= 8
        assert sum("truncated" in a for a in answers) <= len(answers) / 20


@pytest.mark.slow
def test_answers_are_the_verifiers_own() -> None:
    verifier = Verifier.load("embedded/smollm2-135m")
    for name in FILES:
        for row in rows(name):
            answer = row["messages"][-1]
            ids = answer["token_ids"]
            cut = "truncated" in answer
            assert cut or ids[-1] in verifier.terminator_ids
            assert verifier.tokenizer.decode(ids if cut else ids[:-1]) == answer["content"]
    for row in rows("eval")[::20] + rows("train")[::130]:
        prompt = verifier.tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        answer = row["messages"][-1]["token_ids"]
        states = verifier.states(torch.tensor([prompt + answer]))
        logits = verifier.logits(states.last_hidden[0, len(prompt) - 1 : -1])
        top = logits.topk(2, dim=-1)
        tie = top.values[:, 0] - top.values[:, 1] < 1e-3
        assert bool(((top.indices[:, 0] == torch.tensor(answer)) | tie).all()), row["id"]
