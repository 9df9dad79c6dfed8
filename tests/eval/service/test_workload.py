"""Prompts of a workload: which, in what order, after what context."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headstart.eval.service.workload import Workload, batch, prompts


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(name: str, category: str, system: bool = False) -> dict[str, Any]:
    turns = [("user", f"ask {name}"), ("assistant", f"answer {name} at length"), ("user", "more")]
    if system:
        turns.insert(0, ("system", f"be {name}"))
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"id": name, "category": category, "messages": messages}


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [row(f"a{i}", "chat", system=i == 0) for i in range(3)] + [row("b0", "code")]
    answer_only = {"id": "c", "messages": [{"role": "assistant", "content": "hello"}]}
    return written(tmp_path, [*rows, answer_only])


def test_prompts_end_before_the_first_answer_and_deal_the_categories(data):
    found = prompts(Workload(data=data))
    assert [prompt.id for prompt in found] == ["a0", "b0", "a1", "a2"]
    assert found[0].messages == [
        {"role": "system", "content": "be a0"},
        {"role": "user", "content": "ask a0"},
    ]
    assert [p.id for p in prompts(Workload(data=data, categories=["chat"]))] == ["a0", "a1", "a2"]


def test_context_is_made_of_other_conversations_and_the_system_message_stays_first(data):
    found = prompts(Workload(data=data, context_words=12))
    assert [m["content"] for m in found[0].messages] == [
        "be a0", "ask a1", "answer a1 at length", "ask a2", "answer a2 at length", "ask a0",
    ]  # fmt: skip
    for prompt in found:
        assert sum(len(m["content"].split()) for m in prompt.messages) >= 12
        assert prompt.messages[-1] == {"role": "user", "content": f"ask {prompt.id}"}


def test_batches_go_round_without_leaving_anybody_out(data):
    found = prompts(Workload(data=data))
    taken = Counter(prompt.id for number in range(4) for prompt in batch(found, 3, number))
    assert set(taken.values()) == {3}


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"categories": ["maths"]}, "no prompt of category 'maths', only of chat, code"),
        ({"context_words": 1000}, "context_words 1000 is more than all"),
        ({"data": "nowhere.jsonl"}, "no such file"),
    ],
)
def test_what_cannot_be_asked_is_refused(data, wrong, said):
    with pytest.raises(ValueError, match=said):
        prompts(Workload(**{"data": data} | wrong))


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 1}, {"context_words": -1}, {"name": ""}], ids=str
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be|needs a name"):
        Workload(**wrong)


def test_data_that_asks_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no conversation that asks something"):
        prompts(Workload(data=written(tmp_path, [{"id": "t", "text": "plain text"}])))
