import pytest
import tiny

from headstart.data.answers.turns import Limits, Turns, reply_of
from headstart.data.conversations.conversation import Conversation

TOKENIZER = tiny.tokenizer()


def conversation(roles: str) -> Conversation:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    turns = [{"role": names[role], "content": f"w{place}"} for place, role in enumerate(roles)]
    return Conversation("c", turns)


def answered(turns: Turns) -> str:
    """Roles of the turns as they are asked and answered, to the end."""
    more = True
    while more:
        turns.ask(TOKENIZER, None)
        more = turns.reply({"role": "assistant", "content": "w9"})
    return "".join(message["role"][0] for message in turns.written)


@pytest.mark.parametrize(
    "roles, written",
    [("u", "ua"), ("suu", "suaua"), ("uau", "uaua"), ("utt", "utta"), ("utu", "utaua")],
)
def test_a_user_turn_gets_a_reply_or_the_tools_after_it_do(roles: str, written: str) -> None:
    assert answered(Turns(conversation(roles))) == written


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
