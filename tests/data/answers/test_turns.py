import json
from collections import Counter

import pytest
import tiny

from headstart.data.answers.turns import Asking, Limits, Turns, count_refused, reply_of
from headstart.data.conversations.bad import BadRow
from headstart.data.conversations.conversation import Conversation, parse
from headstart.data.rows.rendering import render
from headstart.data.rows.template import template_ids
from headstart.models.proposal.sampling import Sampling

TOKENIZER = tiny.tokenizer()
CALL = {"type": "function", "function": {"name": "w1", "arguments": {"w2": "é"}}}


def conversation(roles: str) -> Conversation:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "c": "assistant"}
    turns = [{"role": names[role], "content": f"w{place}"} for place, role in enumerate(roles)]
    for turn, role in zip(turns, roles, strict=True):
        if role == "c":
            turn |= {"tool_calls": [CALL]}
    return Conversation("c", turns)


def answered(turns: Turns) -> str:
    """Roles of the turns as they are asked and answered, to the end."""
    more = True
    while more:
        turns.ask(TOKENIZER, None)
        more = turns.reply({"role": "assistant", "content": "w9"})
    return "".join(m["role"][0] if "context_only" not in m else "c" for m in turns.written)


@pytest.mark.parametrize(
    "roles, written",
    [("u", "ua"), ("suu", "suaua"), ("uau", "uaua"), ("utt", "utta"), ("utu", "utaua")],
)
def test_a_user_turn_gets_a_reply_or_the_tools_after_it_do(roles: str, written: str) -> None:
    assert answered(Turns(conversation(roles))) == written


@pytest.mark.parametrize(
    "roles, written",
    [
        ("ucta", "ucta"), ("uctt", "uctta"), ("uctu", "uctaua"), ("uctcta", "uctcta"),
        ("uauctau", "uauctaua"),
        ("uata", "ucta"),  # a call in plain text: its result tells
        ("uc", "ua"), ("ucua", "ua"), ("uauc", "uaua"), ("uctc", "ucta"),
    ],
)  # fmt: skip
def test_a_call_with_a_result_stays_and_one_without_is_written_anew_and_ends_the_row(
    roles: str, written: str
) -> None:
    asked = conversation(roles)
    assert answered(Turns(asked)) == written
    kept = [turn for turn in Turns(asked).waiting if turn["role"] == "assistant"]
    assert [
        turn | {"context_only": True} for turn in asked.asked() if turn["role"] == "assistant"
    ] == kept


def test_calls_are_context_and_the_answers_around_them_are_supervised() -> None:
    turns = Turns(conversation("uauctau"))
    more = True
    while more:
        turns.ask(TOKENIZER, None)
        more = turns.reply(reply_of([8, 9, 2], TOKENIZER, {2}))
    stored = turns.answered(Asking(Limits(99, 9, None), Sampling(), 0, None)).to_json()
    [row] = render(parse(json.loads(json.dumps(stored)), "here", "x"), TOKENIZER, (2,), 500)
    supervised = [i for i, turn in zip(row.input_ids, row.loss_mask, strict=True) if turn]
    assert supervised == [8, 9, 2] * 3 and (row.turns, row.context_only, row.terminators) == (
        4,
        1,
        3,
    )
    assert row.input_ids == template_ids(TOKENIZER, stored["messages"], prompt=False)


def test_first_turns_go_on_after_a_call() -> None:
    asked = conversation("uctuu")
    first = Turns(asked)
    first.ask(TOKENIZER, None)
    first.reply({"role": "assistant", "content": "w8"})
    rest = Turns(asked, first.written)
    assert answered(rest) == "uctauaua"
    assert rest.written[:4] == first.written


def test_a_server_is_sent_arguments_as_text_and_ids_that_match() -> None:
    asked = conversation("uctctt")
    asked.messages[3]["tool_calls"] = [CALL | {"id": "mine"}, CALL]
    asked.messages[5]["tool_call_id"] = "theirs"
    turns = Turns(asked)
    turns.ask(TOKENIZER, None)
    sent = turns.sent()
    assert sent[1] == {
        "role": "assistant",
        "content": "w1",
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "w1", "arguments": '{"w2": "é"}'},
            }
        ],
    }
    assert [call["id"] for call in sent[3]["tool_calls"]] == ["mine", "call00003"]
    assert [sent[i]["tool_call_id"] for i in (2, 4, 5)] == ["call00001", "mine", "theirs"]
    assert CALL["function"]["arguments"] == {"w2": "é"}
    plain = Turns(conversation("sua"))
    plain.ask(TOKENIZER, None)
    assert plain.sent() == conversation("su").messages


def test_what_a_template_refuses_names_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ raise_exception('not so') }}")
    with pytest.raises(BadRow, match="row 'c': the chat template refuses it: not so"):
        Turns(conversation("u")).ask(TOKENIZER, None)
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ messages[0].content + 1 }}")
    with pytest.raises(BadRow, match="row 'c': the chat template refuses it: can only"):
        Turns(conversation("u")).ask(TOKENIZER, None)


def test_refusals_are_counted_as_one_kind_with_the_first_ones_words() -> None:
    skipped = Counter[str]()
    for row in "ab":
        count_refused(skipped, BadRow(f"row {row}", "odd", ": why"))
    assert skipped == {"odd (such as row a: odd: why)": 2}


def test_first_turns_that_were_answered_before_are_not_asked_again() -> None:
    asked = conversation("suu")
    first = Turns(asked)
    first.ask(TOKENIZER, None)
    first.reply({"role": "assistant", "content": "w8"})
    rest = Turns(asked, first.written)
    assert rest.ask(TOKENIZER, None) == first.ask(TOKENIZER, None)
    assert rest.seed() == first.seed()
    assert len(rest.written) == 4


def test_nothing_is_asked_after_a_cut_answer() -> None:
    turns = Turns(conversation("uu"))
    turns.ask(TOKENIZER, None)
    reply = reply_of([8, 9], TOKENIZER, {2})
    assert reply == {
        "role": "assistant", "content": "w1 w2", "token_ids": [8, 9], "truncated": True,
    }  # fmt: skip
    assert not turns.reply(reply)
    assert "truncated" not in reply_of([8, 2], TOKENIZER, {2})


def test_limits_name_what_is_too_long() -> None:
    limits = Limits(max_prompt_tokens=50, max_new_tokens=20, context_length=60)
    assert limits.excess(40) is None
    assert limits.excess(41) == "too long for the context of 60 tokens, with an answer of 20"
    assert limits.excess(51) == "longer than max_prompt_tokens (50)"
    assert Limits(50, 20, None).excess(50) is None
    Limits(50, 20, None).check("m")
    with pytest.raises(ValueError, match="max_new_tokens 60 leaves no room for a prompt"):
        Limits(50, 60, 60).check("m")
