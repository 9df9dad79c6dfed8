"""Answers from a server that fails in every way a server can."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import stub_remote
import tiny
from stub_remote import END, TOKENIZER, Stub

from headstart.data.answers import remote
from headstart.data.conversations import reading
from headstart.data.conversations.conversation import Conversation
from headstart.data.conversations.law import Law
from headstart.data.regenerate import Regenerate, run
from headstart.data.rows.rendering import render
from headstart.data.rows.template import template_ids
from headstart.script import ROOT


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tiny.verifier(), tmp_path_factory.mktemp("verifier"))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LONGEST_WAIT", 0.2)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def write_prompts(folder: Path, count: int, turns: int = 1) -> list[str]:
    """Their ids; each has another text."""
    rows = [
        {"id": f"p{n}", "category": f"c{n % 3}", "turns": [f"w{n % 57} w{n // 57}"] * turns}
        for n in range(count)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [row["id"] for row in rows]


def settings(folder: Path, verifier: str, stub: Stub, **fields: Any) -> Regenerate:
    chosen = {"batch_size": 8, "timeout": 20.0, "patience": 60.0, "max_new_tokens": 12} | fields
    return Regenerate(
        str(folder / "answers.jsonl"),
        verifier,
        str(folder / "prompts.jsonl"),
        server=stub.url,
        **chosen,
    )


def answered(folder: Path) -> list[Conversation]:
    return list(reading.read(str(folder / "answers.jsonl")))


def check(made: list[Conversation], wanted: list[str]) -> None:
    """Every prompt once, in order, with its own answer."""
    assert [c.id for c in made] == wanted
    for conversation in made:
        messages = conversation.messages
        for place in range(1, len(messages), 2):
            prompt = template_ids(TOKENIZER, messages[:place])
            assert messages[place]["token_ids"] == stub_remote.answer(prompt)


TROUBLES = ["500", "429", "cut", "garbage", "abort", "twice", "other", "stall"]


def test_500_prompts_get_an_answer_each_in_order_from_a_server_that_is_killed_twice(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    wanted = write_prompts(tmp_path, 500)

    def trouble(text: str, attempt: int) -> str | None:
        number = int(text.split()[0][1:]) + 57 * int(text.split()[1][1:])
        if number % 5:
            return None
        kind = TROUBLES[number // 5 % len(TROUBLES)]
        often = 1 if kind in ("stall", "other") else 2
        return kind if attempt <= often else None

    stub = Stub(trouble, die_after=(120, 300))
    run(settings(tmp_path, verifier, stub, batch_size=16, timeout=4.0))
    stub.kill()
    check(answered(tmp_path), wanted)
    assert stub.kills == 2
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 500
    assert "500 conversations" in capsys.readouterr().err


def test_a_killed_run_asks_again_only_what_was_in_flight(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    wanted = write_prompts(tmp_path, 60, turns=2)
    stub = Stub()
    asked = settings(tmp_path, verifier, stub, batch_size=4)
    command = [sys.executable, str(ROOT / "data" / "regenerate.py")]
    for name in ("out", "verifier", "prompts", "server", "batch_size", "max_new_tokens"):
        command += [f"--{name}", str(getattr(asked, name))]
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    stub.when_replied = lambda count: os.kill(program.pid, signal.SIGKILL) if count == 25 else None
    _, errors = program.communicate(timeout=120)
    assert program.returncode == -signal.SIGKILL, errors
    stub.when_replied = lambda count: None
    # of two rows with one id, which read as "place:id", the later counts
    before = {c.id.split(":")[-1]: len(c.messages) // 2 for c in answered(tmp_path)}
    assert set(before.values()) == {1, 2}, "some are between their turns"
    kept = sum(before.values())
    assert 25 - 4 <= kept < 120
    stub.bodies.clear()
    run(asked)
    stub.kill()
    check(answered(tmp_path), wanted)
    assert all(len(c.messages) == 4 for c in answered(tmp_path))
    assert len(stub.bodies) == 120 - kept
    said = capsys.readouterr().err
    assert "60 conversations" in said and "anew" not in said and "kept" not in said


def test_requests_are_in_flight_together_and_no_more_than_asked_for(
    tmp_path: Path, verifier: str
) -> None:
    write_prompts(tmp_path, 24)
    stub = Stub(lambda text, attempt: "slow")
    run(settings(tmp_path, verifier, stub, batch_size=6))
    stub.kill()
    assert stub.most_at_once == 6


def test_every_turn_is_asked_for_after_the_answers_before_it(tmp_path: Path, verifier: str) -> None:
    wanted = write_prompts(tmp_path, 5, turns=3)
    stub = Stub()
    run(settings(tmp_path, verifier, stub, max_prompt_tokens=150))
    stub.kill()
    made = answered(tmp_path)
    check(made, wanted)
    assert all([m["role"] for m in c.messages] == ["user", "assistant"] * 3 for c in made)
    assert {len(body["messages"]) for body in stub.bodies} == {1, 3, 5}
    assert not any("token_ids" in m for body in stub.bodies for m in body["messages"])
    for conversation in made:
        rows = render(conversation, TOKENIZER, (END,), 500)
        supervised = [i for r in rows for i, m in zip(r.input_ids, r.loss_mask, strict=True) if m]
        assert supervised == [i for m in conversation.messages for i in m.get("token_ids", [])]


def test_temperature_and_thinking_mode_are_asked_for_and_recorded(
    tmp_path: Path, verifier: str
) -> None:
    write_prompts(tmp_path, 3)
    stub = Stub()
    fields = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    thinking = {"enable_thinking": False}
    run(settings(tmp_path, verifier, stub, chat_template_kwargs=thinking, **fields))
    stub.kill()
    assert all(c.law == Law(0.7, top_k=5, top_p=0.9) for c in answered(tmp_path))
    assert all(c.chat_template_kwargs == thinking for c in answered(tmp_path))
    for body in stub.bodies:
        assert body["chat_template_kwargs"] == thinking
        assert {name: body[name] for name in fields} == fields
        assert body["stop_token_ids"] == [END]
    assert len({body["seed"] for body in stub.bodies}) == 3
    recorded = json.loads((tmp_path / "answers.meta.json").read_text())
    assert recorded["server_model"] == "tiny" and "server" not in recorded


def test_an_answer_that_reaches_max_new_tokens_is_marked_as_cut(
    tmp_path: Path, verifier: str
) -> None:
    write_prompts(tmp_path, 9, turns=2)
    stub = Stub()
    run(settings(tmp_path, verifier, stub, max_new_tokens=4))
    stub.kill()
    cut = [c for c in answered(tmp_path) if c.messages[-1].get("truncated")]
    assert 0 < len(cut) < 9
    assert all(len(c.messages[-1]["token_ids"]) == 4 for c in cut)
    assert any(len(c.messages) == 2 for c in cut), "nothing is asked after a cut answer"


@pytest.mark.parametrize("knows_ids", [False, None])
def test_a_server_without_token_ids_gives_texts_and_this_is_said(
    tmp_path: Path, verifier: str, knows_ids: bool | None
) -> None:
    wanted = write_prompts(tmp_path, 12)
    stub = Stub(knows_ids=knows_ids)
    with pytest.warns(UserWarning, match="no token ids for 12 answers"):
        run(settings(tmp_path, verifier, stub))
    made = answered(tmp_path)
    assert [c.id for c in made] == wanted
    for conversation in made:
        rows = render(conversation, TOKENIZER, (END,), 500)
        supervised = [i for r in rows for i, m in zip(r.input_ids, r.loss_mask, strict=True) if m]
        assert supervised == stub_remote.answer(template_ids(TOKENIZER, conversation.asked()))
    stub.bodies.clear()
    run(settings(tmp_path, verifier, stub))
    stub.kill()
    assert not stub.bodies, "the texts are known to be answers"


def test_a_server_is_sent_calls_as_text_and_the_answer_after_their_result_is_kept(
    tmp_path: Path, verifier: str
) -> None:
    call = {"type": "function", "function": {"name": "w3", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w4", "tool_calls": [call]},
        {"role": "tool", "content": "w5"},
    ]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "x", "messages": turns}) + "\n")
    stub = Stub()
    run(settings(tmp_path, verifier, stub))
    run(settings(tmp_path, verifier, stub))
    stub.kill()
    [body] = stub.bodies
    [sent] = body["messages"][1]["tool_calls"]
    assert sent["function"] == {"name": "w3", "arguments": '{"a": 1}'}
    assert (
        body["messages"][2]["tool_call_id"] == sent["id"]
        and "context_only" not in body["messages"][1]
    )
    [made] = answered(tmp_path)
    assert made.messages[:3] == [turns[0], turns[1] | {"context_only": True}, turns[2]]
    assert made.messages[3]["token_ids"] == stub_remote.answer(template_ids(TOKENIZER, turns))


def test_what_the_template_refuses_is_skipped_and_never_sent(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    write_prompts(tmp_path, 6)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    for row in rows[::2]:
        system = {"role": "system", "content": "w0"}
        row["messages"] = [system, {"role": "user", "content": row.pop("turns")[0]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Path(verifier) / "chat_template.jinja"
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    before = config.read_text()
    config.write_text(strict + before)
    stub = Stub()
    try:
        run(settings(tmp_path, verifier, stub))
    finally:
        stub.kill()
        config.write_text(before)
    assert [c.id for c in answered(tmp_path)] == [row["id"] for row in rows[1::2]]
    assert len(stub.bodies) == 3
    said = "3 prompts skipped as the chat template refuses it (such as row 'p"
    assert said in capsys.readouterr().err


def test_another_model_or_template_on_the_server_is_found_out(
    tmp_path: Path, verifier: str
) -> None:
    write_prompts(tmp_path, 4)
    stub = Stub(lambda text, attempt: "other")
    with pytest.raises(ValueError, match=r"row 'p\d': server .* differ from number \d on; let it"):
        run(settings(tmp_path, verifier, stub))
    stub.kill()


def test_a_count_of_prompt_tokens_that_differs_is_doubted_once(
    tmp_path: Path, verifier: str
) -> None:
    write_prompts(tmp_path, 6)
    stub = Stub(lambda text, attempt: "other", knows_ids=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(settings(tmp_path, verifier, stub))
    stub.kill()
    assert sum("is it the same model" in str(w.message) for w in caught) == 1


def test_a_prompt_that_always_fails_is_given_up_while_others_are_answered(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    write_prompts(tmp_path, 150)
    refuse = {"w5 w0": "500", "w6 w0": "400"}

    def trouble(text: str, attempt: int) -> str | None:
        if text == "w7 w0" and attempt < 12:
            return "429"  # a busy server is waited for, however often
        return refuse.get(text, "slow")

    stub = Stub(trouble)  # so slow that it answers while others wait
    run(settings(tmp_path, verifier, stub, batch_size=4))
    stub.kill()
    assert len(answered(tmp_path)) == 148
    said = capsys.readouterr().err
    assert "1 prompts skipped as failed 8 times while others were answered (such as 500" in said
    assert "1 prompts skipped as refused by the server (such as row 'p6', 400: so it is)" in said


def test_a_turn_that_is_refused_leaves_the_answers_before_it(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    rows = [{"id": f"p{n}", "turns": ["w1", "w2" if n else "w3"]} for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stub = Stub(lambda text, attempt: "400" if text == "w3" else None)
    for _ in range(2):
        run(settings(tmp_path, verifier, stub))
        made = answered(tmp_path)
        assert sorted((c.id, len(c.messages)) for c in made) == [("p0", 2), ("p1", 4), ("p2", 4)]
        assert "1 without the answers to their last turns" in capsys.readouterr().err
    assert stub.tries == {"w1": 3, "w2": 2, "w3": 2}
    stub.kill()


def test_too_long_prompts_are_skipped_by_the_servers_context(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    write_prompts(tmp_path, 3)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "w1 " * 195}) + "\n")
    stub = Stub()
    run(settings(tmp_path, verifier, stub))
    assert "1 prompts skipped as too long for the context of 200 tokens" in capsys.readouterr().err
    with pytest.raises(ValueError, match="the context of 'tiny' is 200 tokens"):
        run(settings(tmp_path, verifier, stub, max_new_tokens=200))
    stub.kill()


@pytest.mark.parametrize("trouble, message", [
    ("400", r"refuses every prompt \(row 'p\d+', 400: so it is\)"),
    ("404", r"does not serve 'tiny' so \(404: so it is\)"),
    ("500", r"has answered nothing for \d seconds \(500: so it is\)\. No answer is lost"),
])  # fmt: skip
def test_a_server_that_answers_nothing_ends_the_run_in_one_line(
    tmp_path: Path, verifier: str, trouble: str, message: str
) -> None:
    write_prompts(tmp_path, 30)
    stub = Stub(lambda text, attempt: trouble)
    with pytest.raises(ValueError, match=message) as caught:
        run(settings(tmp_path, verifier, stub, patience=1.0))
    stub.kill()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fields, message", [
    ({"server_model": "big"}, "server_model: .* serves no 'big'; pass one of other, tiny"),
    ({}, "server_model: .* serves several models; pass one of other, tiny"),
    ({"server_model": "tiny", "self_prompt": 3}, "self_prompt needs the verifier in this process"),
    ({"server_model": "tiny", "timeout": 0.0}, "timeout must be above 0 seconds"),
    ({"server": "http://127.0.0.1:9"}, "'http://127.0.0.1:9/v1' does not say what it serves"),
    ({"server": "localhost:8000"}, "'localhost:8000/v1' does not say what it serves"),
])  # fmt: skip
def test_what_cannot_be_asked_is_named_at_once(
    tmp_path: Path, verifier: str, fields: dict[str, Any], message: str
) -> None:
    write_prompts(tmp_path, 3)
    stub = Stub(models=("tiny", "other"))
    asked = settings(tmp_path, verifier, stub)
    for name, value in fields.items():
        setattr(asked, name, value)
    with pytest.raises(ValueError, match=message):
        run(asked)
    stub.kill()
    assert not (tmp_path / "answers.jsonl").exists()


def test_answers_of_a_server_are_not_continued_by_another_model(
    tmp_path: Path, verifier: str
) -> None:
    write_prompts(tmp_path, 3)
    stub, other = Stub(), Stub(models=("other",))
    run(settings(tmp_path, verifier, stub))
    with pytest.raises(ValueError, match="begun with server_model = 'tiny', this run has 'other'"):
        run(settings(tmp_path, verifier, other))
    stub.kill(), other.kill()
