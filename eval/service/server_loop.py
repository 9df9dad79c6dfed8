"""A benchmark's back end: a running server with OpenAI's interface, such as `vllm serve`.

`concurrency` slots ask it, each for its next prompt as soon as its last answer has ended; answers
are streamed. Drafts are counted by the server's own counters (vLLM's /metrics), where it has them.
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from headstart.data.answers.request_law import LeftOut, law_fields, refused_fields
from headstart.eval.engines import metrics
from headstart.eval.measures.counts import Counts
from headstart.eval.service.latency import Answer, full_tokens, full_until, full_waits
from headstart.eval.service.sweep import OFF, Cell, Measure, Trial
from headstart.eval.service.workload import Prompt, Workload, batch
from headstart.models.proposal import trees
from headstart.models.proposal.sampling import Sampling

_TIMEOUT = httpx2.Timeout(600.0, connect=10.0)


@dataclass
class Server:
    """One way to reach a model: without drafts, or with some."""

    url: str
    """Address of its interface, such as http://localhost:8000/v1."""
    drafts: str = OFF
    """What it drafts: off, or chain:K for K draft tokens."""
    model: str | None = None
    """Default: the first that the server names."""
    body: dict[str, Any] = field(default_factory=dict)
    """Goes into each request, such as {ignore_eos: true}, or a switch of drafting; what it says of
    the law counts."""

    def __post_init__(self) -> None:
        if self.drafts != OFF:
            trees.parse(self.drafts)
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"servers: url {self.url!r} must begin with http:// or https://, such as "
                "http://localhost:8000/v1"
            )
        self.url = self.url.rstrip("/")


def headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _unreachable(server: Server, error: Exception) -> ValueError:
    return ValueError(
        f"servers: {server.url} does not answer ({type(error).__name__}: {error}); start it, and "
        "give the same command: what was measured is kept"
    )


def _refused(server: Server, status: int, text: str) -> ValueError:
    return ValueError(f"servers: {server.url} answers {status}: {' '.join(text.split())[:300]}")


def first_model(server: Server) -> str:
    """The name of the model it serves.

    Raises:
        ValueError: it does not answer, or not as expected.
    """
    try:
        response = httpx2.get(f"{server.url}/models", headers=headers(), timeout=_TIMEOUT)
    except httpx2.TransportError as error:
        raise _unreachable(server, error) from error
    if response.status_code != 200:
        raise _refused(server, response.status_code, response.text)
    try:
        return response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"servers: {server.url}/models names no model; set model for it"
        ) from error


def draft_counters(server: Server) -> dict[str, float] | None:
    """Drafts so far: `drafts` (rounds), `draft_tokens`, `accepted_tokens`, and accepted by position
    (`0`, `1`, …). Empty where the server drafts nothing, None where it has no such page."""
    page = server.url.removesuffix("/v1") + "/metrics"
    try:
        response = httpx2.get(page, headers=headers(), timeout=_TIMEOUT)
    except httpx2.TransportError as error:
        raise _unreachable(server, error) from error
    return None if response.status_code != 200 else read_counters(response.text)


def read_counters(page: str) -> dict[str, float]:
    """The counters of a Prometheus page, summed over engines."""
    found, accepted = metrics.counters(page)
    names = {
        name: f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    totals = {name: found[long] for name, long in names.items() if long in found}
    return totals | {str(position): value for position, value in accepted.items()}


def counted(
    number: int, tokens: int, before: dict[str, float], after: dict[str, float]
) -> list[Counts]:
    """What a chain's counters say of a trial: a position is examined where the one before it was
    accepted. Nothing drafted: none."""
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    rounds, drafted = grown.get("drafts", 0.0), grown.get("draft_tokens", 0.0)
    if not drafted:
        return []
    accepted = [grown[key] for key in sorted(filter(str.isdecimal, grown), key=int)]
    if not accepted:
        accepted = [grown.get("accepted_tokens", 0.0)]
    examined = [rounds, *accepted[:-1]]
    each = drafted / len(accepted)
    return [Counts(str(number), "all", tokens, rounds, [each] * len(accepted), examined, accepted)]


def servers_loop(
    servers: Sequence[Server],
    workloads: Mapping[str, tuple[Workload, list[Prompt]]],
    requests_per_slot: int,
    seed: int,
) -> Measure:
    """What measures a trial of a cell by asking the server with its drafts.

    Args:
        requests_per_slot: how many prompts each slot gets in a trial, on average.
    """
    by_drafts = {server.drafts: server for server in servers}
    models = {server.drafts: server.model or first_model(server) for server in servers}
    left_out = {server.drafts: LeftOut(server.url) for server in servers}

    def measure(cell: Cell, number: int) -> Trial:
        workload, prompts = workloads[cell.workload]
        chosen = batch(prompts, cell.concurrency * requests_per_slot, number)
        server = by_drafts[cell.drafts]
        requests = [
            {
                "model": models[cell.drafts],
                "messages": prompt.messages,
                "max_tokens": workload.max_new_tokens,
                "seed": seed + number * len(chosen) + i,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            | law_fields(Sampling(cell.temperature))
            | ({"tools": prompt.tools} if prompt.tools else {})
            | (
                {"chat_template_kwargs": prompt.chat_template_kwargs}
                if prompt.chat_template_kwargs
                else {}
            )
            | server.body
            for i, prompt in enumerate(chosen)
        ]
        before = draft_counters(server)
        began = Answer.now()
        try:
            answers = asyncio.run(
                ask_all(server, requests, cell.concurrency, left_out[cell.drafts])
            )
        except httpx2.TransportError as error:
            raise _unreachable(server, error) from error
        seconds = Answer.now() - began
        after = draft_counters(server)
        trial = trial_of(cell, number, answers, began, seconds)
        if before is not None and after is not None:
            # of all requests together, as of one text: prefill wrote a token of each
            written = trial.tokens - trial.requests + 1
            trial.counts = counted(number, written, before, after)
        return trial

    return measure


def trial_of(
    cell: Cell, number: int, answers: Sequence[Answer], began: float, seconds: float
) -> Trial:
    """What a server's answers say of a cell, its own counters apart."""
    until = full_until(answers, cell.concurrency)
    waits, wait_tokens = full_waits(answers, until)
    first = [(answer.arrivals or [answer.ended])[0] - answer.begun for answer in answers]
    return Trial(
        cell=cell,
        number=number,
        seconds=seconds,
        tokens=sum(answer.tokens for answer in answers),
        requests=len(answers),
        full_seconds=until - began,
        full_tokens=full_tokens(answers, until),
        first_token=first,
        waits=waits,
        wait_tokens=wait_tokens,
        parts=None,
        passes=None,
        counts=None,
    )


async def ask_all(
    server: Server, requests: Sequence[dict[str, Any]], concurrency: int, left_out: LeftOut
) -> list[Answer]:
    """Answers in the order of their ends; `concurrency` slots take the requests in turn."""
    waiting = iter(requests)
    answers: list[Answer] = []
    unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=None)

    async def slot(client: httpx2.AsyncClient) -> None:
        for request in waiting:
            answers.append(await ask(client, server, request, left_out))

    async with httpx2.AsyncClient(headers=headers(), timeout=_TIMEOUT, limits=unlimited) as client:
        await asyncio.gather(*(slot(client) for _ in range(concurrency)))
    return answers


async def ask(
    client: httpx2.AsyncClient, server: Server, request: dict[str, Any], left_out: LeftOut
) -> Answer:
    """One streamed answer, without the fields of the law that the server refuses."""
    refused = set[str]()
    while True:
        body = left_out.of(request, refused)
        found = await _streamed(client, server, body)
        if isinstance(found, Answer):
            left_out.settle(refused)
            return found
        refused |= found


async def _streamed(
    client: httpx2.AsyncClient, server: Server, body: dict[str, Any]
) -> Answer | set[str]:
    """The answer, or the fields that it is refused for."""
    begun = Answer.now()
    arrivals: list[float] = []
    tokens = 0
    url = f"{server.url}/chat/completions"
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            named = refused_fields(response.status_code, response.text, body)
            if named:
                return named
            raise _refused(server, response.status_code, response.text)
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.strip() == "data: [DONE]":
                continue
            now = Answer.now()
            chunk = json.loads(line.removeprefix("data:"))
            if "error" in chunk:
                raise _refused(server, 200, json.dumps(chunk["error"]))
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            if any(_text(choice.get("delta") or {}) for choice in chunk.get("choices", [])):
                arrivals.append(now)
    if arrivals and not tokens:
        raise ValueError(
            f"servers: {server.url} does not say how many tokens it wrote, though asked to "
            "(stream_options.include_usage); a chunk may hold several, so its speed cannot be told"
        )
    return Answer(begun, arrivals, Answer.now(), tokens)


def _text(delta: dict[str, Any]) -> Any:
    """Thinking is text, too."""
    return delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content")
