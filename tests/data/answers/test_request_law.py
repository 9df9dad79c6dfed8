"""Whatever generation_config a server has, it writes under the law that was asked for: for answers,
for the comparison with an engine, and for a benchmark."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from law_server import CONFIG, OFF, LawServer, written

from headstart.data.answers.request_law import LeftOut, law_fields, refused_fields
from headstart.data.conversations import reading
from headstart.data.conversations.law import Law
from headstart.data.regenerate import Regenerate, run
from headstart.eval.engines.server import complete
from headstart.eval.service.server_loop import Server, servers_loop
from headstart.eval.service.sweep import Cell
from headstart.eval.service.workload import Prompt, Workload
from headstart.models.proposal.sampling import Sampling

VERIFIER = tiny.verifier()
TEXTS = [f"w{n} w{3 * n + 1}" for n in range(4)]
LENGTH = 10


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def regenerated(server: LawServer, folder: Path, temperature: float) -> None:
    rows = [{"id": text, "prompt": text} for text in TEXTS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = tiny.save(VERIFIER, folder / "verifier")
    asked = Regenerate(str(folder / "out.jsonl"), name, str(folder / "prompts.jsonl"))
    asked.server, asked.max_new_tokens, asked.temperature = server.url, LENGTH, temperature
    asked.timeout = asked.patience = 30.0
    run(asked)


def completed(server: LawServer, folder: Path, temperature: float) -> None:
    for text in TEXTS:
        prompt = VERIFIER.tokenizer(text).input_ids
        reply = complete(server.url, "tiny", prompt, LENGTH)
        assert reply.tokens == server.answers[-1][1]


def benchmarked(server: LawServer, folder: Path, temperature: float) -> None:
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    prompts = [Prompt(str(i), "all", chat, None, {}) for i, chat in enumerate(chats)]
    workloads = {"mixed": (Workload(max_new_tokens=LENGTH), prompts)}
    measure = servers_loop([Server(f"{server.url}/v1")], workloads, 2, 0)
    for number in range(2):
        trial = measure(Cell("mixed", temperature, 2, "off"), number)
        assert trial.requests == 4


WAYS = [regenerated, completed, benchmarked]
Way = Callable[[LawServer, Path, float], None]


def ruled(law: dict[str, float]) -> dict[str, float]:
    """With the two numbers that mean "no top_k" made one."""
    return law | {"top_k": max(0, law["top_k"])}


@pytest.mark.parametrize("way", WAYS)
def test_a_server_s_own_defaults_shape_no_greedy_answer(way: Way, tmp_path: Path) -> None:
    server = LawServer(VERIFIER)
    way(server, tmp_path, 0.0)
    server.stop()
    assert len(server.answers) >= 4
    moved = 0
    for prompt, ids in server.answers:
        plain = written(VERIFIER, prompt, {"temperature": 0.0} | OFF, LENGTH)
        assert ids == plain
        moved += plain != written(VERIFIER, prompt, CONFIG | {"temperature": 0.0}, LENGTH)
    assert moved > len(server.answers) / 2, "its config would have shaped them"


@pytest.mark.parametrize("way", [regenerated, benchmarked])
def test_a_server_s_own_defaults_shape_no_sampled_answer(way: Way, tmp_path: Path) -> None:
    server = LawServer(VERIFIER)
    way(server, tmp_path, 0.8)
    server.stop()
    assert [ruled(law) for law in server.laws] == [{"temperature": 0.8} | OFF] * len(server.laws)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_server_refuses_is_left_out_and_said_once(way: Way, tmp_path: Path) -> None:
    refused = ("min_p", "presence_penalty", "repeat_penalty")
    server = LawServer(VERIFIER, refuses=refused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # as Python shows them: what is repeated, once
        way(server, tmp_path, 0.0)
    server.stop()
    said = [str(w.message) for w in caught if "refuses" in str(w.message)]
    assert len(said) == 1 and "refuses min_p, presence_penalty: left out" in said[0]
    left = {name: CONFIG[name] for name in ("min_p", "presence_penalty")}
    assert all(ruled(law) == {"temperature": 0.0} | OFF | left for law in server.laws)
    if way is regenerated:
        made = list(reading.read(str(tmp_path / "out.jsonl")))
        assert {c.law for c in made} == {Law(0.0, left_to_server=("min_p", "presence_penalty"))}
    if way is benchmarked:
        assert server.refusals <= 3 * 2, "two slots may find it out together, and then never again"


@pytest.mark.parametrize("field", ["temperature", "top_k"])
def test_a_field_that_is_on_is_not_left_out(field: str) -> None:
    request = law_fields(Sampling(1.0, top_k=3))
    assert not refused_fields(400, f"unknown {field}", request)
    assert refused_fields(422, "no top_p, no min_p", request) == {"top_p", "min_p"}
    assert not refused_fields(500, "no top_p", request)
    assert not refused_fields(400, "no stop_p and no min_p0", request)


def test_a_refusal_that_leaving_out_does_not_mend_is_the_prompt_s(tmp_path: Path) -> None:
    server = LawServer(VERIFIER, refuses=("top_p", "max_tokens"))
    with pytest.raises(ValueError, match=r"refuses every prompt .*max_tokens"):
        regenerated(server, tmp_path, 0.0)
    server.stop()
    assert not server.answers


def test_both_names_of_one_field_must_be_refused_before_the_server_decides_it() -> None:
    left = LeftOut("s")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        left.settle({"repeat_penalty"})
    assert left.undecided == ()
    with pytest.warns(UserWarning, match="refuses repetition_penalty: left out"):
        left.settle({"repetition_penalty"})
    assert left.undecided == ("repetition_penalty",)
    assert left.of(law_fields(Sampling()), {"min_p"}).keys() == {
        "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty",
    }  # fmt: skip
