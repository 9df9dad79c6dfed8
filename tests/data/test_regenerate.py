import json
import re
import sys

import pytest
import tiny
import torch

from headstart.data import regenerate
from headstart.data.answers.decoding import generate, user_prefix
from headstart.data.conversations import reading
from headstart.data.conversations.conversation import Conversation
from headstart.data.conversations.law import Law
from headstart.data.regenerate import Regenerate, run
from headstart.data.rows.rendering import render
from headstart.data.rows.template import template_ids
from headstart.models.proposal.sampling import RowRandom, Sampling
from headstart.models.verifier.verifier import Verifier
from headstart.script import run_script

VERIFIER = tiny.verifier(seed=4, vocab_size=20)  # few words, so its answers come to an end


@pytest.fixture(autouse=True)
def tiny_verifier(monkeypatch):
    monkeypatch.setattr(Verifier, "load", classmethod(lambda cls, *_: VERIFIER))


@pytest.fixture
def prompts(tmp_path) -> str:
    """Eleven conversations of different length, every third with two user turns."""
    file = tmp_path / "prompts.jsonl"
    lines = []
    for n in range(11):
        turns = [
            {"role": "user", "content": " ".join(f"w{(n + k) % 12}" for k in range(1 + n % 4))}
        ]
        if n % 3 == 0:
            turns.append({"role": "user", "content": f"w{n}"})
        lines.append(json.dumps({"id": f"p{n}", "category": "chat", "messages": turns}))
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def settings(tmp_path, prompts, name="answers", **fields) -> Regenerate:
    chosen = {"max_new_tokens": 12, "batch_size": 4} | fields
    return Regenerate(out=str(tmp_path / f"{name}.jsonl"), prompts=prompts, **chosen)


def answers(asked: Regenerate) -> dict[str, Conversation]:
    run(asked)
    return {c.id: c for c in reading.read(asked.out)}


def step_by_step(prompt: list[int], count: int) -> list[int]:
    """Greedy decoding, the whole text again for every token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        logits = VERIFIER.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
        if ids[-1] in VERIFIER.terminator_ids:
            break
    return ids[len(prompt) :]


def test_greedy_answers_are_the_verifiers_own_step_by_step(tmp_path, prompts):
    made = answers(settings(tmp_path, prompts))
    assert list(made) == [f"p{n}" for n in range(11)], "in the order of the prompts"
    finished = 0
    for conversation in made.values():
        assert conversation.law == Law(0.0)
        assert conversation.category == "chat"
        for index, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            prompt = template_ids(VERIFIER.tokenizer, conversation.messages[:index])
            ids = message["token_ids"]
            assert ids == step_by_step(prompt, 12)
            ended = ids[-1] in VERIFIER.terminator_ids
            assert message.get("truncated", False) is not ended
            assert message["content"] == VERIFIER.tokenizer.decode(ids[:-1] if ended else ids)
            finished += ended
    assert 3 < finished < sum(len(c.messages) for c in made.values()) // 2


def test_every_turn_is_answered_until_one_is_cut_off(tmp_path, prompts):
    made = answers(settings(tmp_path, prompts))
    for n in range(0, 11, 3):
        roles = [m["role"] for m in made[f"p{n}"].messages]
        cut = "truncated" in made[f"p{n}"].messages[1]
        assert roles == ["user", "assistant"] * (1 if cut else 2)


def test_answers_render_to_exactly_their_ids(tmp_path, prompts):
    for conversation in answers(settings(tmp_path, prompts)).values():
        rows = render(conversation, VERIFIER.tokenizer, VERIFIER.terminator_ids, 500)
        supervised = [i for r in rows for i, m in zip(r.input_ids, r.loss_mask, strict=True) if m]
        written = [i for m in conversation.messages for i in m.get("token_ids", [])]
        assert supervised == written
        assert sum(r.terminators for r in rows) == sum(r.finished for r in rows)


def test_old_answers_are_written_anew(tmp_path):
    file = tmp_path / "old.jsonl"
    old = [
        {"role": "system", "content": "w9"},
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "somebody else's words"},
    ]
    file.write_text(json.dumps({"id": "x", "messages": old}) + "\n")
    [made] = answers(settings(tmp_path, str(file))).values()
    assert made.messages[:2] == old[:2]
    assert "token_ids" in made.messages[2]
    assert made.messages[2]["content"] != old[2]["content"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_cut_off_in_the_middle_of_a_line_is_continued(tmp_path, prompts, temperature):
    asked = settings(tmp_path, prompts, temperature=temperature)
    run(asked)
    out = tmp_path / "answers.jsonl"
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:7]) + lines[7][:50])
    asked_of = []
    answer = regenerate.answer

    def counting(verifier, batch, *rest):
        asked_of.extend(batch)
        return answer(verifier, batch, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regenerate, "answer", counting)
        run(asked)
    assert out.read_bytes() == whole
    assert len(asked_of) == 11 - 7, "answered prompts are kept"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_the_batch(tmp_path, prompts, temperature):
    made = [
        answers(settings(tmp_path, prompts, f"b{n}", batch_size=n, temperature=temperature))
        for n in (1, 3, 11)
    ]
    assert made[0] == made[1] == made[2]


def test_sampled_answers_depend_on_the_seed_and_follow_the_filter(tmp_path, prompts):
    first = answers(settings(tmp_path, prompts, "a", temperature=1.0))
    other = answers(settings(tmp_path, prompts, "b", temperature=1.0, seed=1))
    greedy = answers(settings(tmp_path, prompts, "c"))
    top_1 = answers(settings(tmp_path, prompts, "d", temperature=1.0, top_k=1))
    assert first != other
    assert first != greedy
    assert [c.messages for c in top_1.values()] == [c.messages for c in greedy.values()]


def test_sampling_follows_the_verifiers_distribution():
    prompt = [1, 4, 9, 2]
    probs = VERIFIER.logits(VERIFIER.states(torch.tensor([prompt])).last_hidden[0, -1]).softmax(-1)
    drawn = generate(VERIFIER, [prompt] * 4000, Sampling(1.0), 1, RowRandom(0, list(range(4000))))
    counts = torch.bincount(torch.tensor(drawn)[:, 0], minlength=20).double()
    deviation = (counts - 4000 * probs).abs() / (4000 * probs * (1 - probs)).sqrt().clamp(min=1)
    assert deviation.max() < 4.5


def test_the_verifier_writes_its_own_prompts(tmp_path):
    asked = settings(tmp_path, None, self_prompt=6, batch_size=16, seed=1)
    made = answers(asked)
    assert len(made) == 6
    assert {c.category for c in made.values()} == {"self-prompted"}
    texts = [c.messages[0]["content"] for c in made.values()]
    assert len(set(texts)) == 6
    assert all(c.messages[1]["token_ids"] for c in made.values())
    out = tmp_path / "answers.jsonl"
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    run(asked)
    assert out.read_bytes() == whole


def test_the_user_prefix_is_all_that_comes_before_a_users_text():
    assert VERIFIER.tokenizer.decode(user_prefix(VERIFIER, {})) == "<|im_start|> user"


def test_chat_template_kwargs_are_recorded(tmp_path, prompts):
    made = answers(settings(tmp_path, prompts, limit=2, chat_template_kwargs={"thinking": False}))
    assert len(made) == 2
    assert all(c.chat_template_kwargs == {"thinking": False} for c in made.values())


def test_prompts_that_are_too_long_are_skipped_and_counted(tmp_path, prompts, capsys):
    made = answers(settings(tmp_path, prompts, max_prompt_tokens=7))
    assert 0 < len(made) < 11
    err = capsys.readouterr().err
    assert "context" not in err
    assert f"{11 - len(made)} prompts skipped as longer than max_prompt_tokens (7)" in err


def test_prompts_that_fill_the_context_are_counted_as_such(tmp_path, prompts, capsys):
    assert not answers(settings(tmp_path, prompts, max_new_tokens=510))
    err = capsys.readouterr().err
    assert "0 conversations" in err
    assert "11 prompts skipped as too long for the context of 512 tokens, with an answer of" in err
    assert "max_prompt_tokens" not in err


def test_the_progress_bar_is_quiet_where_nobody_watches(tmp_path, prompts, capsys):
    run(settings(tmp_path, prompts, max_new_tokens=40))
    said = capsys.readouterr().err
    assert said.count("\r") < 20
    assert ": :" not in said and re.search(r"answered: .*11/11 .*tokens/s", said)


def test_a_run_is_only_continued_with_its_own_settings(tmp_path, prompts):
    run(settings(tmp_path, prompts, limit=1))
    run(settings(tmp_path, prompts, limit=2, batch_size=3))
    with pytest.raises(ValueError, match=r"begun with temperature = 0.0, this run has 1.0"):
        run(settings(tmp_path, prompts, temperature=1.0))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompts": None}, "nothing to answer: pass --prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0"),
        ({"max_new_tokens": 512}, "max_new_tokens 512 leaves no room .* is 512 tokens"),
        ({"self_prompt": -1}, "self_prompt must be 0 or more, got -1"),
        ({"limit": 0}, "limit must be 1 or more, got 0"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"prompts": "missing.jsonl"}, r"^prompts: 'missing\.jsonl': no such file"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, prompts, fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        run(Regenerate(**({"out": str(tmp_path / "x.jsonl"), "prompts": prompts} | fields)))
    assert not list(tmp_path.glob("x*"))


def test_rows_without_an_id_or_with_anothers_are_answered_and_found_again(tmp_path, capsys):
    file = tmp_path / "twice.jsonl"
    rows = [{"id": "a"}, {"id": None}, {}, {"id": "a"}, {"id": None}]
    file.write_text("".join(json.dumps(r | {"prompt": f"w{n}"}) + "\n" for n, r in enumerate(rows)))
    made = answers(settings(tmp_path, str(file)))
    assert list(made) == ["a", "twice-000002", "twice-000003", "twice-000004:a", "twice-000005"]
    assert [c.messages[0]["content"] for c in made.values()] == [f"w{n}" for n in range(5)]
    capsys.readouterr()
    assert answers(settings(tmp_path, str(file))) == made
    assert "5 conversations, 0 tokens written" in capsys.readouterr().err


def test_a_larger_folder_keeps_the_answers_to_a_smaller_one(tmp_path, capsys):
    folder = tmp_path / "chats"
    for name in ("x", "y"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.jsonl").write_text('{"prompt": "w1"}\n{"id": "b", "prompt": "w2"}\n')
        made = answers(settings(tmp_path, str(folder)))
    assert list(made) == ["a-000001", "b", "y/a-000001", "y/a-000002:b"]
    assert "answered anew" not in capsys.readouterr().err


SYSTEM = [{"role": "system", "content": "w0"}]
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.fixture
def strict(tmp_path, monkeypatch) -> str:
    """Twenty prompts, seven of which the template refuses."""
    monkeypatch.setattr(VERIFIER.tokenizer, "chat_template", STRICT + tiny.TEMPLATE)
    file = tmp_path / "strict.jsonl"
    turns = [[{"role": "user", "content": f"w{n % 9}"}] for n in range(20)]
    rows = [{"id": f"p{n}", "messages": SYSTEM * (n % 3 == 0) + t} for n, t in enumerate(turns)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_prompts_that_the_template_refuses_are_counted_and_the_others_answered(
    tmp_path, strict, capsys
):
    made = answers(settings(tmp_path, strict))
    assert list(made) == [f"p{n}" for n in range(20) if n % 3]
    said = "7 prompts skipped as the chat template refuses it (such as row 'p0': the chat template"
    assert said in capsys.readouterr().err
    assert answers(settings(tmp_path, strict)) == made


def test_prompts_that_are_all_refused_are_an_error_that_says_why(tmp_path, strict):
    with pytest.raises(ValueError, match=r"none is answered: the chat template refuses it .*'p0'"):
        run(settings(tmp_path, strict, limit=1))


def test_prompts_that_cannot_be_read_are_left_out_and_named(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "w1"}\n{broken\n{"a": 1}\n{"prompt": "w2"}\n')
    said = (
        r"some\.jsonl': left out: 1 rows: broken JSON \(the first: .* line 2: .*; 1 rows: no mess"
    )
    with pytest.warns(UserWarning, match=said):
        assert list(answers(settings(tmp_path, str(file)))) == ["some-000001", "some-000004"]
    file.write_text("{broken\n")
    with pytest.raises(ValueError, match="nothing to answer, no row of it can be read: 1 rows: br"):
        run(settings(tmp_path, str(file), "others"))


def test_too_many_that_cannot_be_read_end_the_run_before_it_answers(tmp_path):
    file = tmp_path / "many.jsonl"
    file.write_text("{broken\n" * 11 + '{"prompt": "w1"}\n' * 989)
    with pytest.raises(ValueError, match=r"11 of 1000 rows .* max_bad_rows = 0\.01 allows"):
        run(settings(tmp_path, str(file)))
    assert not (tmp_path / "answers.jsonl").exists()
    asked = settings(tmp_path, str(file), max_bad_rows=0.02)
    with pytest.warns(UserWarning, match="11 rows: broken JSON"):
        assert len(regenerate.read_prompts(asked)) == 989
    with pytest.raises(ValueError, match=r"max_bad_rows is -1\.0; it must be a fraction"):
        run(settings(tmp_path, str(file), max_bad_rows=-1.0))


def test_a_call_with_its_result_is_context_for_the_answer(tmp_path, capsys):
    call = {"type": "function", "function": {"name": "w3", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w4", "tool_calls": [call]},
        {"role": "tool", "content": "w5"},
        {"role": "assistant", "content": "somebody else's words"},
    ]
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps({"id": "x", "messages": turns}) + "\n")
    [made] = answers(settings(tmp_path, str(file))).values()
    assert made.messages[:3] == [turns[0], turns[1] | {"context_only": True}, turns[2]]
    prompt = template_ids(VERIFIER.tokenizer, turns[:3])
    assert made.messages[3]["token_ids"] == step_by_step(prompt, 12)
    [row] = render(made, VERIFIER.tokenizer, VERIFIER.terminator_ids, 500)
    supervised = [i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m]
    assert supervised == made.messages[3]["token_ids"] and row.context_only == 1
    capsys.readouterr()
    assert answers(settings(tmp_path, str(file))) == {"x": made}
    assert "1 conversations, 0 tokens written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "it holds no rows"),
        ("\n", "it holds no rows"),
        ('{"text": "w1 w2"}\n', "none of 1 rows has a user turn"),
    ],
)
def test_prompts_without_anything_to_answer_are_refused(tmp_path, content, complaint):
    file = tmp_path / "none.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"nothing to answer, {complaint}"):
        run(settings(tmp_path, str(file)))


def test_a_base_model_cannot_prompt_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(VERIFIER.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="self_prompt needs an instruct verifier"):
        run(settings(tmp_path, None, self_prompt=2))


def test_the_script_ends_with_one_line_and_code_2(monkeypatch, tmp_path, capsys):
    out = str(tmp_path / "x.jsonl")
    monkeypatch.setattr(sys, "argv", ["regenerate.py", "--out", out, "--self-prompt", "-3"])
    with pytest.raises(SystemExit) as stopped:
        run_script(Regenerate, run)
    assert stopped.value.code == 2
    assert "error: nothing to answer" in capsys.readouterr().err
