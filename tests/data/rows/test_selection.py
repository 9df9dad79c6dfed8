import pytest
import tiny

from headstart.data.conversations.bad import BadRow
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
    assert "2 conversations left out as evaluation prompts: c ('w1 W2!'), c ('w5 w6')" in str(
        chosen.audit
    )


def test_the_first_three_evaluation_prompts_are_shown():
    chosen = selection()
    chosen.hold_out(chat(f"w{n} " * 30) for n in range(5))
    for n in range(3):
        chosen.rows(chat(f"w{n} " * 30))
    assert str(chosen.audit).endswith(f"c ('{('w2 ' * 30)[:59]}…')")
    chosen.rows(chat("w3 " * 30))
    assert str(chosen.audit).endswith(f"c ('{('w2 ' * 30)[:59]}…'), …")
    assert "w3" not in str(chosen.audit)


@pytest.mark.parametrize(
    "one, other, same",
    [
        ({"prompt": "How are you?"}, {"prompt": " how  are you"}, True),
        ({"prompt": "How are you?"}, {"prompt": "How are they?"}, False),
        ({"prompt": "?"}, {"prompt": "!"}, False),
        ({"prompt": "How are you"}, {"prompt": "How are you ?!…"}, True),
        ({"prompt": "7 * 5"}, {"prompt": "7 + 5"}, False),
        ({"prompt": "-3"}, {"prompt": "3"}, False),
        ({"prompt": "x = -3."}, {"prompt": "X = -3"}, True),
        ({"prompt": "f(x, y)"}, {"prompt": "f(x; y)"}, False),
        ({"prompt": "C#"}, {"prompt": "C"}, False),
        ({"prompt": "कि"}, {"prompt": "की"}, False),
        ({"prompt": "कि।"}, {"prompt": "कि"}, True),
        ({"prompt": "كَتَبَ"}, {"prompt": "كُتُب"}, False),
        ({"prompt": "كيف؟"}, {"prompt": "كيف"}, True),
        ({"prompt": "cafe\u0301"}, {"prompt": "CAF\u00c9"}, True),
        ({"prompt": "resume\u0301"}, {"prompt": "resume"}, False),
        ({"prompt": "２つ。"}, {"prompt": "2つ"}, True),
        ({"prompt": "a\u00a0\u3000b"}, {"prompt": "a b"}, True),
        ({"prompt": "Grüße"}, {"prompt": "GRÜSSE"}, True),
        ({"text": "One day"}, {"text": "one day."}, True),
        ({"turns": ["a", "b"]}, {"turns": ["a", "c"]}, False),
    ],
)
def test_prompts_are_compared_but_for_case_spaces_and_marks_at_the_end(one, other, same):
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
    bad = selection()
    bad.rows(foreign())
    with pytest.raises(ValueError, match="no row of it can be used; left out: 1 rows: token_ids"):
        bad.audit.check("x", 100)
    short = selection(min_tokens=90)
    short.rows(chat("w1", "w2 w3 w4"))
    with pytest.raises(ValueError, match=r"1 rows are shorter than data\.min_tokens"):
        short.audit.check("x", 100)


def test_without_anything_left_out_the_audit_says_nothing_of_it():
    assert "left out" not in str(Audit(conversations=3, rows=3))


def foreign(number: int = 0) -> Conversation:
    """Whose ids are another tokenizer's."""
    answer = {"role": "assistant", "content": "w1", "token_ids": [40, 41]}
    return Conversation(f"f{number}", [{"role": "user", "content": "w2"}, answer])


def test_rows_that_cannot_be_used_are_left_out_and_counted_by_reason():
    chosen = selection()
    broken = [BadRow(f"line {n}", "broken JSON", " (x)") for n in (3, 9)]
    for row in (chat("w1", "w2 w3"), broken[0], foreign(7), chat("w3", "w4 w5"), broken[1]):
        chosen.rows(row)
    assert chosen.audit.conversations == 2
    assert (
        "left out: 2 rows: broken JSON (the first: line 3: broken JSON (x)); "
        "1 rows: token_ids and content of an assistant turn differ" in str(chosen.audit)
    )
    assert "row 'f7': token_ids" in str(chosen.audit)


def test_a_template_refuses_rows_without_ending_the_run(monkeypatch):
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", strict + TOKENIZER.chat_template)
    chosen = selection()
    for _ in range(600):
        assert chosen.rows(chat("w1", "w2 w3"))
        assert not chosen.rows(chat("w1", "w2 w3", system="w0"))
    assert "600 rows: the chat template refuses it (the first: row 'c': " in str(chosen.audit)


def test_too_many_bad_rows_end_the_run_after_a_thousand():
    chosen = selection()
    for number in range(11):
        chosen.rows(foreign(number))
    for _ in range(988):
        chosen.rows(chat("w1", "w2 w3"))
    with pytest.raises(ValueError, match=r"11 of 1000 rows .* max_bad_rows = 0\.01 .* row 'f0'"):
        chosen.rows(chat("w1", "w2 w3"))
    other = selection(max_bad_rows=0.02)
    for number in range(1000):
        other.rows(foreign() if number < 20 else chat("w1", "w2 w3"))
    with pytest.raises(ValueError, match="21 of 1001 rows"):
        other.rows(foreign())


def test_answers_written_with_other_settings_are_no_bad_rows():
    row = chat("w1", "w2 w3")
    row.chat_template_kwargs = {"thinking": True}
    with pytest.raises(ValueError, match="its answers were written with chat_template_kwargs"):
        selection(chat_template_kwargs={"thinking": False}).rows(row)
