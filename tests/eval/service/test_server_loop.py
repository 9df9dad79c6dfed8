"""A benchmark of a running server, against a stub that answers as OpenAI's interface says."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from stub_server import CHUNKS, TOKENS, Stub

from headstart.eval.service import cells
from headstart.eval.service.server_loop import (
    Server,
    counted,
    draft_counters,
    read_counters,
    servers_loop,
)
from headstart.eval.service.sweep import OFF, Cell
from headstart.eval.service.workload import Prompt, Workload


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def stubs() -> Iterator[list[Stub]]:
    started = [Stub(), Stub(drafts=3)]
    yield started
    for stub in started:
        stub.shutdown()
        stub.server_close()


def asked(count: int = 12) -> dict[str, tuple[Workload, list[Prompt]]]:
    messages = [{"role": "user", "content": "hello"}]
    made = [Prompt(str(i), "all", messages, None, {}) for i in range(count)]
    return {"mixed": (Workload(max_new_tokens=TOKENS), made)}


def both(stubs: list[Stub], **changes: Any) -> list[Server]:
    return [Server(stubs[0].url), Server(stubs[1].url + "/", **{"drafts": "chain:3"} | changes)]


def test_every_answer_is_streamed_at_the_wanted_concurrency(stubs):
    servers = both(stubs, body={"ignore_eos": True, "temperature": 0.25})
    stubs[1].together = threading.Barrier(4)
    measure = servers_loop(servers, asked(), requests_per_slot=3, seed=5)
    trial = measure(Cell("mixed", 0.5, 4, "chain:3"), 0)
    assert trial.requests == 12 and trial.tokens == 12 * TOKENS
    assert stubs[1].most_busy == 4 and not stubs[0].requests
    sent = stubs[1].requests
    assert sorted(request["seed"] for request in sent) == list(range(5, 17))
    for request in sent:
        assert request["model"] == "the-model" and request["stream"]
        assert request["stream_options"] == {"include_usage": True}
        assert request["ignore_eos"] and request["temperature"] == 0.25  # the body has the say
        assert request["max_tokens"] == TOKENS and request["messages"][0]["content"] == "hello"
    assert len(trial.first_token) == 12
    assert 0 < trial.full_seconds <= trial.seconds and trial.full_tokens <= trial.tokens
    assert trial.wait_tokens == pytest.approx(len(trial.waits) * (TOKENS - 1) / (CHUNKS - 1))
    assert trial.parts is None and trial.passes is None


def test_drafts_are_what_the_server_s_counters_grew_by(stubs):
    measure = servers_loop(both(stubs), asked(), 2, 0)
    for number in range(2):  # the counters do not begin at 0 the second time
        trial = measure(Cell("mixed", 0.0, 2, "chain:3"), number)
        (counts,) = trial.counts
        assert counts.rounds == 16 and counts.drafted == [16, 16, 16]
        assert counts.accepted == [12, 8, 4] and counts.examined == [16, 12, 8]
    entry = cells.measures(trial.cell, [trial])
    assert entry["acceptance"]["acceptance_length"]["value"] == 2.5
    assert entry["acceptance"]["conditional"] == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert (entry["drafted"], entry["accepted"], entry["wasted"]) == (48, 24, 24)


def test_a_server_that_drafts_nothing_is_told_from_one_that_does_not_say(stubs):
    servers = [Server(stubs[0].url), Server(stubs[0].url, "chain:3", body={"speculate": True})]
    trial = servers_loop(servers, asked(), 1, 0)(Cell("mixed", 0.0, 2, "chain:3"), 0)
    assert trial.counts == [] and cells.measures(trial.cell, [trial])["drafted"] == 0
    stubs[0].faults = "no metrics"
    trial = servers_loop(servers, asked(), 1, 0)(Cell("mixed", 0.0, 2, "chain:3"), 0)
    assert trial.counts is None and cells.measures(trial.cell, [trial])["drafted"] is None


def test_counters_are_summed_over_engines():
    page = "".join(
        f'vllm:spec_decode_num_drafts_total{{engine="{i}"}} 1.5e+1\n'
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{i}",position="0"}} 7.0\n'
        for i in range(2)
    )
    assert read_counters(page) == {"drafts": 30, "0": 14}
    assert read_counters("# nothing of ours\nup 1\n") == {}
    assert counted(0, 5, {}, {}) == []


@pytest.mark.parametrize(
    "faults, said",
    [
        ("refuses", "answers 400: .*no such.*model"),
        ("no usage", "does not say how many tokens"),
        ("breaks", "answers 200: .*out of memory"),
    ],
)
def test_a_server_s_fault_is_one_line(stubs, faults, said):
    stubs[1].faults = faults
    measure = servers_loop(both(stubs), asked(), 1, 0)
    with pytest.raises(ValueError, match=said) as caught:
        measure(Cell("mixed", 0.0, 2, "chain:3"), 0)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_gone_is_named_and_measuring_may_go_on_later(stubs):
    measure = servers_loop(both(stubs), asked(), 1, 0)
    stubs[1].shutdown()
    stubs[1].server_close()
    with pytest.raises(ValueError, match=r"does not answer .*what was measured is kept"):
        measure(Cell("mixed", 0.0, 2, "chain:3"), 0)
    assert measure(Cell("mixed", 0.0, 2, OFF), 0).requests == 2
    assert draft_counters(Server(stubs[0].url)) is not None


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"url": "localhost:8000"}, "must begin with http"),
        ({"drafts": "three"}, "'three': not known"),
    ],
)
def test_servers_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Server(**{"url": "http://localhost:8000/v1"} | wrong)
