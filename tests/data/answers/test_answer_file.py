"""The file that data/regenerate.py writes: what is in it stays, whatever comes between."""

import errno
import json
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

from headstart.data.answers.answer_file import AnswerFile
from headstart.data.conversations import reading
from headstart.data.conversations.conversation import Conversation
from headstart.data.regenerate import Regenerate, run
from headstart.models.verifier.verifier import Verifier

VERIFIER = tiny.verifier(seed=4, vocab_size=20)  # few words, so its answers come to an end


@pytest.fixture(autouse=True)
def tiny_verifier(monkeypatch):
    monkeypatch.setattr(Verifier, "load", classmethod(lambda cls, *_: VERIFIER))


@pytest.fixture
def prompts(tmp_path) -> str:
    """Eleven conversations, every third with two user turns."""
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"id": f"p{n}", "turns": [f"w{n} w{n // 2}", "w3"][: 1 + (n % 3 == 0)]} for n in range(11)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def settings(tmp_path, prompts, name="answers", **fields) -> Regenerate:
    chosen = {"max_new_tokens": 12, "batch_size": 4} | fields
    return Regenerate(out=str(tmp_path / f"{name}.jsonl"), prompts=prompts, **chosen)


def answers(asked: Regenerate) -> dict[str, Conversation]:
    run(asked)
    return {c.id: c for c in reading.read(asked.out)}


def test_nothing_is_written_before_the_settings_are_known_to_fit(tmp_path):
    with AnswerFile.open(tmp_path / "deep" / "answers.jsonl"):
        assert not list((tmp_path / "deep").glob("answers*"))
    assert not list(tmp_path.iterdir())
    with AnswerFile.open(tmp_path / "deep" / "answers.jsonl") as file:
        file.begin({"seed": 0})
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == [
        "answers.jsonl",
        "answers.meta.json",
    ]


def test_a_smaller_run_keeps_the_answers_of_a_larger_one(tmp_path, prompts, capsys):
    whole = answers(settings(tmp_path, prompts))
    capsys.readouterr()
    kept = answers(settings(tmp_path, prompts, limit=2))
    assert list(kept.items()) == list(whole.items())
    err = capsys.readouterr().err
    assert "11 conversations, 0 tokens written" in err
    assert "9 kept that answer none of this run's prompts" in err


def test_fewer_self_prompts_keep_the_others(tmp_path):
    asked = {"self_prompt": 6, "batch_size": 16, "seed": 1}
    whole = answers(settings(tmp_path, None, **asked))
    assert answers(settings(tmp_path, None, **(asked | {"self_prompt": 2}))) == whole


def test_changed_prompts_are_answered_anew(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    turns = [{"prompt": f"w{n}"} for n in range(5)]

    def answered(rows) -> dict[str, Conversation]:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        capsys.readouterr()
        return answers(settings(tmp_path, str(file)))

    before = answered(turns)
    system = {"messages": [{"role": "system", "content": "w9"}, {"role": "user", "content": "w2"}]}
    changed = [turns[0], {"prompt": "w11"}, system, turns[3] | {"tools": [{"name": "t"}]}]
    after = answered(changed)
    assert "3 answered anew, as their prompts have changed" in capsys.readouterr().err
    assert list(after) == list(before)
    for n in (0, 4):  # not changed, and not among the prompts any more
        assert after[f"prompts-{n + 1:06d}"] == before[f"prompts-{n + 1:06d}"]
    assert after["prompts-000002"].messages[0]["content"] == "w11"
    assert after["prompts-000003"].asked() == system["messages"]
    assert after["prompts-000004"].tools == [{"name": "t"}]
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 5
    assert answered(changed) == after
    assert "answered anew" not in capsys.readouterr().err


def test_an_answer_cut_off_before_the_last_turn_answers_its_prompt(tmp_path, prompts, capsys):
    made = answers(settings(tmp_path, prompts, max_new_tokens=2))
    assert any("truncated" in made[f"p{n}"].messages[1] for n in range(0, 11, 3))
    capsys.readouterr()
    assert answers(settings(tmp_path, prompts, max_new_tokens=2)) == made
    assert " 0 tokens written" in capsys.readouterr().err


ANSWER = '{"id": "a", "messages": [{"role": "user", "content": "w1"}'


@pytest.mark.parametrize(
    "content",
    [
        "my notes\n",
        "my notes",
        '{"id": "a", "prompt": "w1"}',
        '{"prompt": "w1"}\n',
        "[1]\n",
        ANSWER + "]}\n",
        ANSWER + ', {"role": "assistant", "content": "w2"}]}\n',
        '{"messages": [{"role": "assistant", "content": "w2", "token_ids": [9]}]}\n',
    ],
)
def test_a_file_of_somebody_elses_is_not_touched(tmp_path, prompts, monkeypatch, content):
    monkeypatch.setattr(Verifier, "load", None)  # is not reached
    (tmp_path / "answers.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"line 1: .* not written by this script"):
        run(settings(tmp_path, prompts))
    assert (tmp_path / "answers.jsonl").read_text() == content
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("out", "complaint"),
    [
        ("", "is a folder; name a .jsonl file"),
        ("prompts.jsonl", "would overwrite the prompts"),
        ("../{name}/prompts.jsonl", "would overwrite the prompts"),
        ("prompts.jsonl/answers.jsonl", "prompts.jsonl is a file, not a folder"),
        ("prompts.jsonl/below/answers.jsonl", "prompts.jsonl is a file, not a folder"),
        ("a" * 300 + ".jsonl", "cannot be written: File name too long"),
    ],
)
def test_a_place_that_cannot_hold_answers_is_refused(
    tmp_path, prompts, monkeypatch, out, complaint
):
    monkeypatch.setattr(Verifier, "load", None)  # is not reached
    before = Path(prompts).read_text()
    place = str(tmp_path / out.format(name=tmp_path.name))
    with pytest.raises(ValueError, match=complaint) as caught:
        run(Regenerate(out=place, prompts=prompts))
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]
    assert Path(prompts).read_text() == before


def test_a_device_and_a_folder_of_prompts_are_no_place_for_answers(tmp_path, prompts):
    with pytest.raises(ValueError, match="not an ordinary file"):
        run(Regenerate(out="/dev/full", prompts=prompts))
    with pytest.raises(ValueError, match="would be read as prompts the next time"):
        run(settings(tmp_path, str(tmp_path)))
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize("full_at", ["append", "rewrite"])
def test_a_full_disk_is_one_line_and_costs_no_answer(tmp_path, prompts, monkeypatch, full_at):
    """The disk takes half of what the third batch, or the final file, wants to write."""
    asked = settings(tmp_path, prompts)
    whole = answers(settings(tmp_path, prompts, "whole"))
    opened, write_text = Path.open, Path.write_text
    appends = []

    def full_open(path, mode="r", **options):
        return full_append(path) if mode == "ab" else opened(path, mode, **options)

    @contextmanager
    def full_append(path):
        with opened(path, "ab") as file:
            appends.append(path)
            if len(appends) < 4:  # making the file ready is the first
                yield file
            else:
                yield SimpleNamespace(write=lambda data: half(file.write, data))

    def full_write_text(path, text, encoding):
        if path.name != "answers.jsonl.tmp":
            return write_text(path, text, encoding)
        return half(lambda data: write_text(path, data), text)

    def half(write, data):
        write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if full_at == "append":
            patch.setattr(Path, "open", full_open)
        else:
            patch.setattr(Path, "write_text", full_write_text)
        with pytest.raises(ValueError, match=r"cannot be written: No space left .* is lost") as e:
            run(asked)
    assert "\n" not in str(e.value)
    kept = {c.id: c for c in reading.read(asked.out)}
    assert len(kept) == (11 if full_at == "rewrite" else 8)
    assert kept.items() <= whole.items()
    assert not list(tmp_path.glob("*.tmp"))
    assert answers(asked) == whole


def test_a_last_line_without_newline_is_an_answer(tmp_path, prompts):
    run(settings(tmp_path, prompts, limit=3))
    out = tmp_path / "answers.jsonl"
    out.write_bytes(out.read_bytes().removesuffix(b"\n"))
    assert len(answers(settings(tmp_path, prompts, limit=5))) == 5


def test_two_runs_do_not_write_to_one_file(tmp_path, prompts):
    said = rf"out '.*answers\.jsonl': process {os.getpid()} on"
    with AnswerFile.open(tmp_path / "answers.jsonl"), pytest.raises(ValueError, match=said):
        run(settings(tmp_path, prompts))
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]
    run(settings(tmp_path, prompts))


def test_a_broken_record_of_the_settings_is_named(tmp_path, prompts):
    run(settings(tmp_path, prompts, limit=3))
    (tmp_path / "answers.meta.json").write_text("")
    with pytest.raises(ValueError, match=r"answers\.meta\.json is broken"):
        run(settings(tmp_path, prompts))
