"""Turns that their data says not to train on: read, but not learned."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from stub_remote import END, TOKENIZER

from headstart.data.conversations.conversation import parse
from headstart.data.rows.rendering import render, render_all
from headstart.data.rows.row import Audit
from headstart.data.rows.template import plain

TURNS = ["w1", "w2 w3", "w4", "w5 w6", "w7", "w8"]


def chat(marks: dict[int, dict[str, Any]], shape: str = "messages") -> dict[str, Any]:
    """Three turns and their answers; `marks` are added to the turns of these numbers."""
    names = {"messages": ("role", "content"), "conversations": ("from", "value")}
    role, content = names[shape]
    roles = ["user", "assistant"] * 3
    turns = [{role: r, content: t} for r, t in zip(roles, TURNS, strict=True)]
    return {shape: [turn | marks.get(i, {}) for i, turn in enumerate(turns)]}


def rendered(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    (made,) = render(parse(row, "here", "x"), TOKENIZER, (END,), 200)
    return made.input_ids, made.loss_mask


PLAIN = rendered(chat({}))


@pytest.mark.parametrize("shape", ["messages", "conversations"])
@pytest.mark.parametrize(
    "mark", [{"loss": 0}, {"loss": False}, {"train": False}, {"weight": 0.0}, {"weight": 0, "a": 1}]
)
def test_a_turn_that_says_so_is_context_alone(mark: dict[str, Any], shape: str) -> None:
    ids, mask = rendered(chat({3: mark}, shape))
    assert ids == PLAIN[0]
    assert mask == [0 if turn == 2 else turn for turn in PLAIN[1]]


@pytest.mark.parametrize("mark", [{"loss": 1}, {"train": True}, {"weight": 1.0}, {"weight": None}])
def test_a_turn_that_says_the_opposite_or_nothing_is_trained_on(mark: dict[str, Any]) -> None:
    assert rendered(chat({3: mark})) == PLAIN


def test_on_other_turns_the_mark_changes_nothing() -> None:
    given = parse(chat({0: {"loss": 0}, 2: {"train": False}}), "here", "x")
    assert given.messages == parse(chat({}), "here", "x").messages
    assert rendered(chat({0: {"loss": 0}})) == PLAIN


def test_a_share_is_said_to_be_none() -> None:
    with pytest.warns(UserWarning, match="loss, train, weight is read as 0 or 1"):
        assert rendered(chat({3: {"weight": 0.5}})) == PLAIN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rendered(chat({3: {"weight": 0}, 5: {"weight": 1}}))


def test_a_template_never_sees_the_mark_and_ids_that_were_stored_stay() -> None:
    answer = [9, 10, END]
    stored = {"content": TOKENIZER.decode(answer[:-1]), "token_ids": answer, "loss": 0}
    (_, turn, *_) = parse(chat({1: stored}), "here", "x").messages
    assert "loss" not in turn and plain([turn]) == [{"role": "assistant", "content": "w2 w3"}]
    ids, mask = rendered(chat({1: stored}))
    where = ids.index(9)
    assert ids[where : where + 3] == answer and not any(mask[: where + 3])


def test_a_function_call_may_be_context_alone() -> None:
    call = json.dumps({"name": "f", "arguments": {}})
    row = {"conversations": [{"from": "function_call", "value": call, "loss": False}]}
    assert parse(row, "here", "x").messages[0]["context_only"]


def test_such_turns_survive_writing_and_reading() -> None:
    once = parse(chat({3: {"loss": 0}}), "here", "x")
    assert parse(json.loads(json.dumps(once.to_json())), "here", "x") == once


def test_they_are_counted_and_lack_no_terminator(tmp_path: Path) -> None:
    rows = [chat({3: {"loss": 0}}), chat({1: {"train": False}, 5: {"weight": 0}}), chat({})]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept, audit = render_all(str(tmp_path / "a.jsonl"), TOKENIZER, (END,), 200)
    assert len(kept) == 3
    assert (audit.turns, audit.context_only, audit.finished, audit.terminators) == (9, 3, 6, 6)
    assert "3 assistant turns not trained on, as the data says" in str(audit)
    assert "not trained on" not in str(Audit())


def test_data_without_any_other_turn_is_refused_for_that_reason(tmp_path: Path) -> None:
    marks = {i: {"loss": 0} for i in (1, 3, 5)}
    (tmp_path / "a.jsonl").write_text(json.dumps(chat(marks)) + "\n")
    with pytest.raises(ValueError, match="every assistant turn says loss, train or weight 0"):
        render_all(str(tmp_path / "a.jsonl"), TOKENIZER, (END,), 200)
