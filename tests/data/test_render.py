import json
import sys
import warnings

import pytest
import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from headstart.data import render as render_file
from headstart.data.conversations.conversation import Conversation
from headstart.data.render import Render, painted
from headstart.data.rows.rendering import load_tokenizer, render, render_all
from headstart.data.rows.row import Audit
from headstart.data.rows.template import template_ids
from headstart.script import run_script

START, END, EOS, BOS = "<|start|>", "<|end|>", "<eos>", "<bos>"
PLAIN = (  # ChatML's shape, a newline after each turn, no generation marks
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKED = (  # the marks leave the end of turn out, as many templates' do
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant\n{% generation %}"
    "{{ m.content }}{% endgeneration %}<|end|>\n{% else %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
FORGETFUL = (  # drops the reasoning of every assistant turn but the last
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1] %}"
    "{% endif %}<|start|>{{ m.role }}\n{{ text }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SWITCH = PLAIN.replace(
    "<|start|>assistant\n{% endif %}",
    "<|start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}",
)


def byte_tokenizer(template=PLAIN, merges=(), adds_bos=False) -> PreTrainedTokenizerFast:
    """One token a byte, but for `merges`, so that any text encodes and decodes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = [EOS, BOS, START, END, *letters, *("".join(pair) for pair in merges)]
    ids = {token: i for i, token in enumerate(vocab)}
    raw = Tokenizer(models.BPE(ids, list(merges)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=EOS,
        bos_token=BOS,
        additional_special_tokens=[START, END],
        clean_up_tokenization_spaces=False,
    )
    if adds_bos:
        raw = tokenizer.backend_tokenizer
        raw.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])]
        )
    tokenizer.chat_template = template
    return tokenizer


def terminators(tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.convert_tokens_to_ids([EOS, END]))


def chat(*contents, **fields) -> Conversation:
    """User and assistant in turn; a dict adds fields to its message."""
    messages = []
    for number, content in enumerate(contents):
        message = content if isinstance(content, dict) else {"content": content}
        messages.append({"role": ("user", "assistant")[number % 2]} | message)
    return Conversation("c", messages, **fields)


def made(conversation, tokenizer, max_length=1000, **kwargs):
    return render(conversation, tokenizer, terminators(tokenizer), max_length, **kwargs)


def supervised_texts(row, tokenizer) -> list[str]:
    """Text of each assistant turn of the mask."""
    texts = []
    for turn in range(1, max(row.loss_mask, default=0) + 1):
        pairs = zip(row.input_ids, row.loss_mask, strict=True)
        texts.append(tokenizer.decode([i for i, t in pairs if t == turn]))
    return texts


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["without marks", "with marks"])
def test_answers_and_their_terminators_are_supervised_and_nothing_else(template):
    tokenizer = byte_tokenizer(template)
    [row] = made(chat("hi", "hello", "bye", "see you"), tokenizer)
    assert supervised_texts(row, tokenizer) == [f"hello{END}", f"see you{END}"]
    # the template's own text, without the newline after the last answer
    text = tokenizer.apply_chat_template(
        chat("hi", "hello", "bye", "see you").messages, tokenize=False
    )
    assert tokenizer.decode(row.input_ids) == text.removesuffix("\n")
    assert (row.turns, row.finished, row.terminators, row.truncated) == (2, 2, 2, False)
    newline = row.input_ids[row.loss_mask.index(1) + len("hello") + 1]
    assert tokenizer.decode(newline) == "\n"
    assert row.loss_mask[row.loss_mask.index(1) + len("hello") + 1] == 0


def test_marks_that_hold_the_end_of_turn_give_the_same_mask():
    wide = MARKED.replace("{% endgeneration %}<|end|>\n", "<|end|>{% endgeneration %}{{ '\n' }}")
    conversation = chat("hi", "hello", "bye", "see you")
    assert made(conversation, byte_tokenizer(wide)) == made(conversation, byte_tokenizer(MARKED))


def test_marks_decide_where_an_answer_begins():
    late = MARKED.replace("{% generation %}", "Well: {% generation %}")
    tokenizer = byte_tokenizer(late)
    [row] = made(chat("hi", "hello"), tokenizer)
    assert supervised_texts(row, tokenizer) == [f"hello{END}"]


def test_an_end_of_turn_that_is_not_the_eos_is_a_supervised_terminator(tmp_path):
    tokenizer = byte_tokenizer()
    config = tiny.verifier(eos_token_id=0, vocab_size=300).model.config
    tokenizer.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)  # no weights beside it
    loaded, found = load_tokenizer(str(tmp_path))
    assert found == terminators(tokenizer)
    [row] = render(chat("hi", "hello"), loaded, found, 100)
    assert tokenizer.decode(row.input_ids[-1]) == END
    assert row.loss_mask[-1] == 1


def test_the_terminators_of_a_folder_are_the_verifiers(tmp_path):
    verifier = tiny.verifier()
    verifier.model.config.save_pretrained(tmp_path)
    verifier.tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))[1] == verifier.terminator_ids


def test_a_verifier_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"verifier '\./nowhere': no such folder"):
        load_tokenizer("./nowhere")


def test_an_unstable_template_gives_one_row_a_turn_as_the_verifier_saw_it():
    tokenizer = byte_tokenizer(FORGETFUL)
    with pytest.warns(UserWarning, match="one row per assistant turn") as warned:
        rows = made(chat("hi", "<think>hm</think>hello", "bye", "<think>so</think>ciao"), tokenizer)
        made(chat("hi", "<think>hm</think>hello", "bye", "<think>so</think>ciao"), tokenizer)
    assert len({str(w.message) for w in warned}) == 1
    head = f"{START}user\nhi{END}\n{START}assistant\n"
    assert [tokenizer.decode(row.input_ids) for row in rows] == [
        f"{head}<think>hm</think>hello{END}",
        f"{head}hello{END}\n{START}user\nbye{END}\n{START}assistant\n<think>so</think>ciao{END}",
    ]
    assert [supervised_texts(row, tokenizer) for row in rows] == [
        [f"<think>hm</think>hello{END}"],
        [f"<think>so</think>ciao{END}"],
    ]
    assert [row.id for row in rows] == ["c/1", "c/2"]


def test_the_warning_is_given_once():
    tokenizer = byte_tokenizer(FORGETFUL)
    conversation = chat("hi", "<think>hm</think>hello", "bye", "<think>so</think>ciao")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            made(conversation, tokenizer)
    assert len(caught) == 1


def test_an_unstable_template_is_stable_where_there_is_nothing_to_drop():
    tokenizer = byte_tokenizer(FORGETFUL)
    [row] = made(chat("hi", "hello", "bye", "ciao"), tokenizer)
    assert supervised_texts(row, tokenizer) == [f"hello{END}", f"ciao{END}"]


def test_marks_of_an_unstable_template_give_one_row_a_turn_too():
    forgetful = MARKED.replace(
        "{{ m.content }}{% endgen",
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{% endgen",
    )
    tokenizer = byte_tokenizer(forgetful)
    with pytest.warns(UserWarning, match="one row per assistant turn"):
        rows = made(chat("hi", "<think>hm</think>hello", "bye", "<think>so</think>ciao"), tokenizer)
    assert [supervised_texts(row, tokenizer) for row in rows] == [
        [f"<think>hm</think>hello{END}"],
        [f"<think>so</think>ciao{END}"],
    ]


def test_a_generation_prompt_that_the_finished_turn_lacks_is_not_supervised():
    opening = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    tokenizer = byte_tokenizer(opening)
    with pytest.warns(UserWarning, match="rewrites earlier"):
        [row] = made(chat("hi", "hello"), tokenizer)
    assert supervised_texts(row, tokenizer) == [f"hello{END}"]


def test_a_template_that_rewrites_the_question_is_refused():
    rewriting = (
        "{% if messages[-1].role == 'assistant' %}A{% else %}B{% endif %}"
        "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    )
    with pytest.raises(ValueError, match="row 'c': the chat template rewrites the turns before"):
        made(chat("hi", "hello"), byte_tokenizer(rewriting))


def test_a_template_that_refuses_a_row_is_an_error_naming_it():
    strict = "{{ raise_exception('no system turns here') }}"
    with pytest.raises(ValueError, match="row 'c': the chat template refuses it: no system turns"):
        made(chat("hi", "hello"), byte_tokenizer(strict))


def test_bos_appears_once():
    tokenizer = byte_tokenizer(BOS + PLAIN, adds_bos=True)
    bos = tokenizer.bos_token_id
    assert tokenizer("x").input_ids[0] == bos, "the tokenizer adds it itself"
    for conversation in (
        chat("hi", "hello", "bye", "ciao"),
        Conversation("t", text="once upon a time"),
        Conversation("t", text=f"{BOS}once upon a time"),
    ):
        [row] = made(conversation, tokenizer)
        assert row.input_ids[0] == bos
        assert row.input_ids.count(bos) == 1
    tokenizer.chat_template = None
    assert template_ids(tokenizer, [{"role": "user", "content": f"{BOS}x"}]).count(bos) == 1


def test_a_template_without_bos_gets_none():
    tokenizer = byte_tokenizer(PLAIN, adds_bos=True)
    assert tokenizer.bos_token_id not in made(chat("hi", "hello"), tokenizer)[0].input_ids


def unmerged(tokenizer, text) -> list[int]:
    """Ids that decode to `text` but are not those that it encodes to."""
    return [i for letter in text for i in tokenizer(letter, add_special_tokens=False).input_ids]


def test_stored_ids_are_kept_where_their_text_would_give_others():
    tokenizer = byte_tokenizer(merges=[("a", "b")])
    ids = [*unmerged(tokenizer, "abc"), terminators(tokenizer)[1]]
    assert tokenizer("abc").input_ids != ids[:-1]
    stored = {"content": "abc", "token_ids": ids}
    [row] = made(chat("hi", stored), tokenizer)
    assert [i for i, turn in zip(row.input_ids, row.loss_mask, strict=True) if turn] == ids
    # followed by another turn: a row each, as each was written
    first, second = made(chat("hi", stored, "bye", "ab"), tokenizer)
    assert first.input_ids == row.input_ids
    merged = tokenizer.convert_tokens_to_ids("ab")
    assert merged in second.input_ids[: second.loss_mask.index(1)]
    assert supervised_texts(second, tokenizer) == [f"ab{END}"]


def test_stored_ids_that_are_their_texts_make_one_row():
    tokenizer = byte_tokenizer(merges=[("a", "b")])
    ids = [*tokenizer("abc").input_ids, terminators(tokenizer)[1]]
    stored = {"content": "abc", "token_ids": ids}
    assert made(chat("hi", stored, "bye", stored), tokenizer) == made(
        chat("hi", "abc", "bye", "abc"), tokenizer
    )


def test_stored_ids_of_another_tokenizer_are_refused():
    stored = {"content": "abc", "token_ids": [77, 78, 79]}
    with pytest.raises(ValueError, match=r"row 'c': token_ids and content .* another verifier"):
        made(chat("hi", stored), byte_tokenizer())


def test_a_token_over_the_border_of_the_prompt_is_split_as_in_serving():
    tokenizer = byte_tokenizer(merges=[("Ċ", "Ċ")])  # two newlines
    [row] = made(chat("hi", "\nhello"), tokenizer)
    prompt = template_ids(tokenizer, chat("hi").messages)
    assert row.input_ids[: len(prompt)] == prompt
    assert row.loss_mask[: len(prompt) + 1] == [0] * len(prompt) + [1]
    assert supervised_texts(row, tokenizer) == [f"\nhello{END}"]


def test_a_row_over_the_limit_is_cut_without_a_terminator():
    tokenizer = byte_tokenizer()
    [whole] = made(chat("hi", "hello", "bye", "see you"), tokenizer)
    at = whole.loss_mask.index(2) + 3
    [row] = made(chat("hi", "hello", "bye", "see you"), tokenizer, max_length=at)
    assert row.input_ids == whole.input_ids[:at]
    assert (row.truncated, row.turns, row.finished, row.terminators) == (True, 2, 1, 1)
    # cut inside the second prompt: what could not be supervised goes too
    [row] = made(chat("hi", "hello", "bye", "see you"), tokenizer, max_length=at - 8)
    assert supervised_texts(row, tokenizer) == [f"hello{END}"]
    assert row.loss_mask[-1] == 1


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_an_answer_that_was_cut_when_written_gets_no_terminator(template):
    tokenizer = byte_tokenizer(template)
    [row] = made(chat("hi", {"content": "hello th", "truncated": True}), tokenizer)
    assert supervised_texts(row, tokenizer) == ["hello th"]
    assert (row.turns, row.finished, row.terminators) == (1, 0, 0)


def test_plain_text_is_one_turn_ended_by_eos():
    tokenizer = byte_tokenizer(template=None)
    [row] = made(Conversation("t", text="once"), tokenizer)
    assert tokenizer.decode(row.input_ids) == f"once{EOS}"
    assert row.loss_mask == [1] * 5
    assert (row.finished, row.terminators) == (1, 1)
    [row] = made(Conversation("t", text=f"a{EOS}bc{EOS}"), tokenizer)
    assert row.loss_mask == [1, 1, 2, 2, 2]
    assert row.terminators == row.finished == 2
    [row] = made(Conversation("t", text="once"), tokenizer, max_length=3)
    assert row.loss_mask == [1] * 3
    assert (row.finished, row.terminators, row.truncated) == (0, 0, True)


def test_answers_of_a_base_model_need_their_ids():
    tokenizer = byte_tokenizer(template=None)
    ids = [*tokenizer("hello").input_ids, tokenizer.eos_token_id]
    [row] = made(chat("hi", {"content": "hello", "token_ids": ids}), tokenizer)
    assert tokenizer.decode(row.input_ids) == f"hihello{EOS}"
    assert supervised_texts(row, tokenizer) == [f"hello{EOS}"]
    with pytest.raises(ValueError, match="row 'c': the verifier has no chat template"):
        made(chat("hi", "hello"), tokenizer)


def test_an_answer_to_nothing_is_context_only():
    tokenizer = byte_tokenizer()
    greeting = {"role": "assistant", "content": "welcome"}
    conversation = Conversation("c", [greeting, *chat("hi", "hello").messages])
    [row] = made(conversation, tokenizer)
    assert supervised_texts(row, tokenizer) == [f"hello{END}"]
    assert "welcome" in tokenizer.decode(row.input_ids)


def test_tools_reach_the_template():
    tokenizer = byte_tokenizer("{% if tools %}{{ tools[0].name }}\n{% endif %}" + PLAIN)
    [row] = made(chat("hi", "hello", tools=[{"name": "weather"}]), tokenizer)
    assert tokenizer.decode(row.input_ids).startswith("weather\n")


def test_chat_template_kwargs_are_the_recorded_ones_and_a_mismatch_is_an_error():
    tokenizer = byte_tokenizer(SWITCH)
    off = {"enable_thinking": False}
    ids = [*tokenizer("hello").input_ids, terminators(tokenizer)[1]]
    stored = {"content": "hello", "token_ids": ids}
    recorded = chat("hi", stored, chat_template_kwargs=off)
    [row] = made(recorded, tokenizer)
    assert "<think></think>hello" in tokenizer.decode(row.input_ids)
    assert row.chat_template_kwargs == off
    assert made(recorded, tokenizer, chat_template_kwargs=off) == [row]
    for asked in ({}, {"enable_thinking": True}):
        with pytest.raises(ValueError, match="row 'c': its answers were written with chat_templ"):
            made(recorded, tokenizer, chat_template_kwargs=asked)
    with pytest.raises(ValueError, match=r"written with chat_template_kwargs \{\}"):
        made(chat("hi", stored), tokenizer, chat_template_kwargs=off)
    [row] = made(chat("hi", stored), tokenizer)
    assert "<think>" not in tokenizer.decode(row.input_ids)


# ---- data sets -------------------------------------------------------------------------------


def data(tmp_path, *conversations) -> str:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(c.to_json()) + "\n" for c in conversations))
    return str(file)


def test_the_audit_counts(tmp_path):
    tokenizer = byte_tokenizer()
    source = data(
        tmp_path,
        chat("hi", "hello", "bye", "ciao"),
        chat("only a question"),
        chat("hi", {"content": "hel", "truncated": True}),
        chat("hi", "x" * 200),
        chat("q" * 200, "never reached"),
    )
    rows, audit = render_all(source, tokenizer, terminators(tokenizer), 100)
    lengths = [len(row.input_ids) for row in rows]
    assert [row.empty for row in rows] == [False] * 3, "rows without supervision are left out"
    assert audit.supervised == 6 + 5 + 3 + sum(turn > 0 for turn in rows[2].loss_mask)
    assert audit.tokens >= sum(lengths)
    assert audit == Audit(
        conversations=5,
        rows=5,
        tokens=audit.tokens,
        supervised=audit.supervised,
        terminators=2,
        turns=5,
        finished=2,
        truncated=2,
        empty=2,
    )
    assert len(render_all(source, tokenizer, terminators(tokenizer), 100, limit=1)[0]) == 1


def test_missing_terminators_are_warned_about(tmp_path):
    tokenizer = byte_tokenizer()
    source = data(tmp_path, chat("hi", "hello"))
    with pytest.warns(UserWarning, match="0 supervised terminators for 1 finished"):
        render_all(source, tokenizer, (tokenizer.eos_token_id,), 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        render_all(source, tokenizer, terminators(tokenizer), 100)


@pytest.mark.parametrize(
    ("conversations", "template", "reason"),
    [
        ([], PLAIN, "it has no rows"),
        ([chat("a question")], PLAIN, "no row has an assistant turn; let data/regenerate.py"),
        ([chat("q" * 100, "hello")], PLAIN, "begin after max_length = 60; raise it"),
        (
            [chat("hi", "hello")],
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "nothing of its assistant turns is found",
        ),
    ],
)
def test_a_data_set_without_supervision_is_an_error_that_says_why(
    tmp_path, conversations, template, reason
):
    tokenizer = byte_tokenizer(template)
    source = data(tmp_path, *conversations)
    with pytest.raises(ValueError, match=rf"^'.*data\.jsonl': not one supervised.*{reason}"):
        render_all(source, tokenizer, terminators(tokenizer), 60)


# ---- the script ------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> str:
    byte_tokenizer().save_pretrained(tmp_path / "verifier")
    tiny.verifier(eos_token_id=0, vocab_size=300).model.config.save_pretrained(
        tmp_path / "verifier"
    )
    return str(tmp_path / "verifier")


def test_the_script_prints_a_row_and_the_audit(tmp_path, folder, capsys):
    source = data(tmp_path, chat("hi", "hello"), chat("hey", "hello you"))
    render_file.run(Render(data=source, verifier=folder, row=1))
    out = capsys.readouterr().out
    assert f"{START}user\nhey{END}\n{START}assistant\n[[hello you{END}]]" in out
    assert "2 conversations, 2 rows" in out
    assert "2 supervised terminators for 2 finished of 2 assistant turns" in out


@pytest.mark.parametrize("field, least", [("max_length", 1), ("limit", 1), ("row", 0)])
def test_numbers_that_make_no_sense_are_refused(field, least):
    with pytest.raises(ValueError, match=f"^{field} must be {least} or more, got {least - 1}"):
        render_file.run(Render(data="none.jsonl", **{field: least - 1}))


def test_supervised_tokens_are_in_colour():
    tokenizer = byte_tokenizer()
    [row] = made(chat("hi", "hello"), tokenizer)
    assert painted(row, tokenizer, colour=True).endswith(f"\x1b[1;32mhello{END}\x1b[0m")


def test_the_script_ends_with_one_line_and_code_2(tmp_path, folder, capsys, monkeypatch):
    source = data(tmp_path, chat("a question"))
    monkeypatch.setattr(sys, "argv", ["render.py", "--verifier", folder, "--data", source])
    with pytest.raises(SystemExit) as stopped:
        run_script(Render, render_file.run)
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: data: ")
    assert "no row has an assistant turn" in error
