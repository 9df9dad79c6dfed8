import pytest
import tiny

from headstart.data.conversations.conversation import Conversation, parse
from headstart.data.rows.row import Audit
from headstart.data.rows.selection import Selection, prompt_key

TOKENIZER = tiny.tokenizer()


def selection(**settings) -> Selection:
    return Selection(
        TOKENIZER, (TOKENIZER.eos_token_id,), settings.pop("max_length", 100), **settings
    )


def chat(*turns: str, system: str | None = None) -> Conversation:
    """User and assistant in turn."""
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation("c", messages)


def tokens(conversation: Conversation) -> int:
    return sum(len(row.input_ids) for row in selection().rows(conversation))


def test_a_conversation_with_an_evaluation_prompt_is_left_out_and_counted():
    chosen = selection()
    chosen.hold_out([chat("w1 w2", "w9 w9"), chat("w5 w6")])
    assert not chosen.rows(chat("w1  W2!", "w3 w4 w5"))
    assert not chosen.rows(chat("w5 w6", "w3 w4 w5", "w7", "w8 w9", system="w0"))
    assert chosen.rows(chat("w2 w1", "w3 w4 w5"))
    assert chosen.rows(chat("w3", "w3 w4 w5", "w1 w2", "w3 w4"))
    assert chosen.audit.contaminated == 2
    assert chosen.audit.conversations == 2
    assert "2 conversations left out as evaluation prompts" in str(chosen.audit)


@pytest.mark.parametrize(
    "one, other, same",
    [
        ({"prompt": "How are you?"}, {"prompt": " how  are you"}, True),
        ({"prompt": "How are you?"}, {"prompt": "How are they?"}, False),
        ({"prompt": "?"}, {"prompt": "!"}, False),
        ({"prompt": "Grüße"}, {"prompt": "GRÜSSE"}, True),
        ({"text": "One day"}, {"text": "one day."}, True),
        ({"turns": ["a", "b"]}, {"turns": ["a", "c"]}, False),
    ],
)
def test_prompts_are_compared_but_for_case_spaces_and_signs(one, other, same):
    keys = [prompt_key(parse(row, "here", "x")) for row in (one, other)]
    assert (keys[0] == keys[1]) is same


def test_short_and_long_rows_are_left_out_and_counted():
    short, middle, long = chat("w1", "w2 w3"), chat("w1", "w2 " * 9), chat("w1", "w2 " * 30)
    lengths = [tokens(c) for c in (short, middle, long)]
    chosen = selection(max_length=lengths[1], min_tokens=lengths[0] + 1, longer="drop")
    assert [len(chosen.rows(c)) for c in (short, middle, long)] == [0, 1, 0]
    assert (chosen.audit.short, chosen.audit.long, chosen.audit.truncated) == (1, 1, 1)
    assert "1 rows left out as too short, 1 rows left out as too long" in str(chosen.audit)
    cut = selection(max_length=lengths[1])
    assert [len(cut.rows(c)) for c in (short, middle, long)] == [1, 1, 1]
    assert (cut.audit.short, cut.audit.long, cut.audit.truncated) == (0, 0, 1)


def test_data_of_which_nothing_is_left_is_an_error_that_says_why():
    only = selection()
    only.hold_out([chat("w1")])
    only.rows(chat("w1", "w2 w3 w4"))
    with pytest.raises(ValueError, match="all its 1 prompts are evaluation prompts"):
        only.audit.check("x", 100)
    short = selection(min_tokens=90)
    short.rows(chat("w1", "w2 w3 w4"))
    with pytest.raises(ValueError, match=r"1 rows are shorter than data\.min_tokens"):
        short.audit.check("x", 100)


def test_without_anything_left_out_the_audit_says_nothing_of_it():
    assert "left out" not in str(Audit(conversations=3, rows=3))
