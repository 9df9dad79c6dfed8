"""The commands of eval/engine.py, on a stand-in for vLLM that speaks its protocol."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import fake_engine
from metrics_page import page, serving
from steps import in_steps
from workplace import make as make_workplace

from headstart.eval import engine
from headstart.eval.decoding.trial import prompt_of
from headstart.eval.engine import Compare, Serve
from headstart.eval.engines import report
from headstart.eval.engines.parity import Answer, Compared, Deviation, own_answer
from headstart.lock import only_writer
from headstart.models.drafter import Drafter
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.loading import load_pair
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier
from headstart.script import run_commands

K, LIMIT = 2, 12


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A verifier, prompts, and a drafter that is right now and then."""
    folder = tmp_path_factory.mktemp("engine")
    verifier = make_workplace(folder, [("code", 0), ("code", 1), ("chat", 0)])
    torch.manual_seed(0)
    drafter = Eagle3.create(verifier, Eagle3Config(init="verifier"), LossConfig(), torch.ones(64))
    drafter.save(folder / "drafter")
    return folder


class StandIn:
    """Answers as a vLLM with the drafter does; `change` may falsify an answer."""

    def __init__(self, drafter: Drafter, verifier: Verifier, change: Callable[[Answer], Answer]):
        self.drafter, self.verifier, self.change = drafter, verifier, change
        self.rounds, self.accepted, self.generated = 0, [0] * K, 0

    def __call__(self, path: str, body: bytes) -> str:
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "served"}]})
        if path == "/metrics":
            return page(self.rounds, K * self.rounds, self.accepted, self.generated)
        assert path == "/v1/completions"
        asked = json.loads(body)
        assert (asked["model"], asked["temperature"], asked["ignore_eos"]) == ("served", 0, True)
        answer = own_answer(self.verifier, self.drafter, asked["prompt"], K, asked["max_tokens"])
        answer = self.change(answer)
        self.rounds += len(answer.accepted)
        self.generated += asked["max_tokens"]
        self.accepted = [a + b for a, b in zip(self.accepted, answer.by_position(K), strict=True)]
        lines = [
            f"data: {json.dumps({'choices': [{'token_ids': step, 'text': ''}]})}\n\n"
            for step in in_steps(answer, asked["max_tokens"])
        ]
        return "".join([*lines, "data: [DONE]\n\n"])


def untouched(answer: Answer) -> Answer:
    return answer


def compared(folder: Path, change: Callable[[Answer], Answer], **settings: Any) -> list[Compared]:
    """What `compare` finds of a stand-in, beside an honest one without drafts."""
    verifier, drafter = load_pair(None, str(folder / "drafter"), "float32", "cpu")
    given = {
        "drafter": str(folder / "drafter"),
        "draft_length": K,
        "max_new_tokens": LIMIT,
        "prompts": str(folder / "t0.jsonl"),
        "out": str(folder / "out"),
    }
    drafted, plain = StandIn(drafter, verifier, change), StandIn(drafter, verifier, untouched)
    with serving(drafted) as server, serving(plain) as without:
        return engine.compare(Compare(**(given | {"server": server, "plain": without} | settings)))


def test_an_engine_that_agrees_is_found_to_agree(workplace, capsys):
    done = compared(workplace, untouched)
    out = capsys.readouterr().out
    assert len(done) == 3 and {c.category for c in done} == {"chat", "code"}
    assert all((c.text, c.lossless) == ("identical", "identical") and c.equal for c in done)
    assert sum(c.rounds[0] for c in done) > 0
    assert "Accepted drafts: equal at every position for 3." in out
    assert "3 identical" in out and "speedup in vLLM, interleaved" in out
    result = json.loads((workplace / "out" / "engine.json").read_text())
    assert [row["engine"] for row in result["prompts"]] == [c.ours for c in done]
    assert all(row["equal"] and row["seconds"] for row in result["prompts"])
    assert result["provenance"]["recipe"]["draft_length"] == K
    assert (workplace / "out" / "engine.md").read_text().startswith("# ")


def test_only_prompts_that_were_asked_for(workplace):
    (one,) = compared(workplace, untouched, categories=["chat"], plain=None, out=None)
    assert (one.category, one.lossless, one.seconds) == ("chat", None, None)
    assert len(compared(workplace, untouched, num_prompts=2)) == 2
    with pytest.raises(ValueError, match=r"no prompt of \['poetry'\]"):
        compared(workplace, untouched, categories=["poetry"])


def test_two_comparisons_do_not_write_to_one_folder(workplace):
    out = workplace / "taken"
    with (
        only_writer(out / ".engine.lock", "the other"),
        pytest.raises(ValueError, match=r"^out '.*taken': process \d+ on .* is writing there"),
    ):
        compared(workplace, untouched, out=str(out))
    assert not out.exists()


def test_another_text_ends_with_code_1(workplace, capsys, monkeypatch):
    def wrong(answer: Answer) -> Answer:
        return Answer([*answer.tokens[:5], (answer.tokens[5] + 1) % 64, *answer.tokens[6:]],
                      answer.accepted)  # fmt: skip

    done = compared(workplace, wrong)
    assert all((c.text, c.lossless) == ("different", "different") for c in done)
    assert "3 different" in capsys.readouterr().out
    monkeypatch.setattr(engine, "compare", lambda settings: done)
    with pytest.raises(SystemExit, match="1"):
        engine.check(None)


def test_fewer_accepted_drafts_end_with_code_1(workplace, capsys, monkeypatch):
    """The text is right, but nothing that the drafter got right was accepted."""

    def stubborn(answer: Answer) -> Answer:
        return Answer(answer.tokens, [0] * (LIMIT - 1))

    done = compared(workplace, stubborn)
    assert all(c.text == "identical" for c in done)
    accepted = [c for c in done if sum(c.ours)]
    assert accepted and not any(c.explained for c in accepted)
    assert "NO TIE" in capsys.readouterr().out
    monkeypatch.setattr(engine, "compare", lambda settings: done)
    with pytest.raises(SystemExit, match="1"):
        engine.check(None)


def test_a_server_that_others_use_too_is_refused(workplace):
    class Busy(StandIn):
        def __call__(self, path: str, body: bytes) -> str:
            self.generated += path == "/metrics"
            return super().__call__(path, body)

    verifier, drafter = load_pair(None, str(workplace / "drafter"), "float32", "cpu")
    with (
        serving(Busy(drafter, verifier, untouched)) as server,
        pytest.raises(ValueError, match="compare needs it for itself"),
    ):
        compared(workplace, untouched, server=server)


def test_a_server_of_another_draft_length_is_refused(workplace):
    with pytest.raises(ValueError, match="drafts 2 tokens a round, draft_length is 3"):
        compared(workplace, untouched, draft_length=3)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"drafter": "prompt-lookup", "verifier": "V"}, "vLLM looks up other matches"),
        ({"drafter": "lookahead", "verifier": "V"}, "vLLM knows no lookahead"),
    ],
)
def test_what_cannot_be_compared_is_refused(workplace, given, said):
    given = {k: str(workplace / "verifier") if v == "V" else v for k, v in given.items()}
    with pytest.raises(ValueError, match=said):
        engine.compare(Compare(server="http://127.0.0.1:9", **given))


@pytest.mark.parametrize(
    "given, said",
    [
        ({"max_new_tokens": 1, "out": "x"}, "max_new_tokens must be 2 or more"),
        ({"num_prompts": -1, "out": "x"}, "num_prompts must be 0"),
        ({"plain": "http://x"}, "name the one with them as server"),
        ({"server": "localhost:8000"}, "server is .* begins so: 'http://localhost:8000'"),
        ({"server": "http://x", "plain": "x:80"}, "plain is .* begins so: 'http://x:80'"),
        ({}, "out: name a folder"),
    ],
)
def test_impossible_comparisons_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Compare("drafter", **given)


def test_differences_are_told_with_their_reasons():
    found = Compared("a", "code", "identical", None, [3, 1], [3, 0], (4, 5))
    assert "NO REASON FOUND" in report.line(found) and not found.explained
    found.deviations = []  # then our own loop is at fault: the texts are one
    assert not found.explained
    found.deviations = [Deviation(7, 2, -2e-4)]
    assert "token 7 as draft 2, logits -2.0e-04 apart" in report.line(found)
    assert found.explained and "NO TIE" not in report.line(found)
    assert "for 1 others different at ties alone" in report.summary([found])
    found.deviations += [Deviation(11, 2, None), Deviation(9, 1, 0.5)]
    assert "token 11 as draft 2, past the limit" in report.line(found)
    assert "NO TIE, token 9 as draft 1" in report.line(found) and not found.explained
    assert "for 1 different without a reason" in report.summary([found])


def test_speedup_is_a_ratio_of_total_times():
    found = report.speedup([(2.0, 1.0), (4.0, 4.0)])
    assert found["value"] == pytest.approx(6 / 5)
    assert found["low"] is found["high"] is None  # of two prompts
    found = report.speedup([(2.0 + i % 3, 1.0 + i % 2) for i in range(20)])
    assert found["low"] < found["value"] < found["high"]


def test_serve_prints_the_command(workplace, capsys, monkeypatch):
    words = ["engine.py", "serve", str(workplace / "drafter"), "--draft-length", "3"]
    monkeypatch.setattr(sys, "argv", [*words, "--arguments", "[--dtype, float32]"])
    run_commands({"serve": (Serve, engine.serve)})
    config = json.dumps({"method": "eagle3", "model": words[2], "num_speculative_tokens": 3})
    verifier = workplace / "verifier"
    printed = capsys.readouterr()
    assert printed.out == (
        f"vllm serve {verifier} --dtype float32 --speculative-config '{config}'\n"
    )
    assert printed.err == ""


def test_serve_prints_another_engines_commands(workplace, capsys, monkeypatch):
    drafter = workplace / "drafter"
    words = ["engine.py", "serve", str(drafter), "--engine-name", "sglang", "--method", "eagle3"]
    monkeypatch.setattr(sys, "argv", words)
    run_commands({"serve": (Serve, engine.serve)})
    export, launch = capsys.readouterr().out.splitlines()
    assert export == f"python models/export.py {drafter} --to sglang --out {drafter}-sglang"
    assert f" --speculative-draft-model-path {drafter}-sglang " in launch
    with pytest.raises(ValueError, match=r"run is for vllm alone, engine_name is llama.cpp"):
        Serve(str(drafter), engine_name="llama.cpp", run=True)


def test_serve_says_what_is_not_here(workplace, capsys):
    verifier = str(workplace / "verifier")
    engine.serve(Serve("some/model", verifier=verifier, method="draft_model"))
    note = "note: no folder 'some/model' is here; vLLM takes it from the Hub\n"
    assert capsys.readouterr().err == note
    engine.serve(Serve("prompt-lookup", verifier="some/model"))
    assert capsys.readouterr().err == note


def test_serve_says_which_layer_ids_vllm_does_not_find_on_gpus(workplace, tmp_path, capsys):
    shutil.copytree(workplace / "drafter", tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    engine.serve(Serve(str(tmp_path / "old")))
    note = capsys.readouterr().err
    assert "in eagle_config alone: on GPUs" in note and note.count("\n") == 1
    engine.serve(Serve(str(tmp_path / "old"), engine_name="sglang"))
    assert capsys.readouterr().err == ""


def test_serve_runs_the_command_it_prints(workplace, tmp_path, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(engine.os, "execve", lambda *given: ran.append(given))
    folder = fake_engine(tmp_path / "engine", "")
    engine.serve(Serve(str(workplace / "drafter"), engine=folder, run=True))
    ((program, words, environment),) = ran
    assert program == words[0] == str(tmp_path / "engine" / "bin" / "vllm")
    assert environment["LD_PRELOAD"] == str(tmp_path / "engine" / "lib" / "libiomp5.so")
    out = capsys.readouterr().out
    assert out.startswith("LD_PRELOAD=") and out.endswith(shlex.join(words) + "\n")


def test_prompts_need_no_answers(workplace: Path, tmp_path: Path) -> None:
    answered = [json.loads(line) for line in (workplace / "t0.jsonl").read_text().splitlines()]
    bare = tmp_path / "prompts.jsonl"
    rows = [row | {"messages": row["messages"][:1]} for row in answered]
    bare.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verifier = Verifier.load(str(workplace / "verifier"))
    settings = [
        engine.Compare(drafter="x", prompts=str(file), num_prompts=0, out=str(tmp_path))
        for file in (workplace / "t0.jsonl", bare)
    ]
    with_answers, without = (engine.chosen_rows(one, verifier) for one in settings)
    assert [prompt_of(r) for r in without] == [prompt_of(r) for r in with_answers] != []
