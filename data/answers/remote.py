"""The verifier answers in a server: any that speaks OpenAI's chat API.

Requests are sent concurrently, and again after a wait that doubles each time where the server is
down, busy or broken. A server that returns token ids (vLLM's `return_token_ids`) gives the ids as
they were written, and its prompts are compared with the verifier's own; of any other server the
text is kept. `OPENAI_API_KEY` in the environment is sent along.
"""

import os
import queue
import random
import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import httpx2
from transformers import PreTrainedTokenizerBase

from headstart.data.answers.request_law import LeftOut, law_fields, refused_fields
from headstart.data.answers.turns import Asking, Turns, reply_of
from headstart.data.conversations.bad import BadRow
from headstart.data.conversations.conversation import Conversation

_FINISHED = ("stop", "tool_calls")
_OWN_FAILURES = 8  # of one request while others are answered: it will never be
_REFUSALS = 20  # before the first answer: it is not the prompts
_LONGEST_WAIT = 30.0  # seconds between two tries, unless the server asks for more


@dataclass
class Outcome:
    """What became of a prompt: an answer, or why there is none."""

    conversation: Conversation | None = None
    """With its answers so far."""
    tokens: int = 0
    """Of the last answer; 0 where the server does not count them."""
    more: bool = False
    """Whether another turn is being answered."""
    skipped: str = ""


class Unusable(Exception):
    """A reply that may be better the next time."""


class Foreign(Unusable):
    """A reply to another prompt than the verifier's template writes."""


class Skipped(Exception):
    """A prompt that this server will not answer."""


class RemoteVerifier:
    """A server and the model on it.

    Args:
        url: with or without the `/v1` at its end.
        model: None: the only one that it serves.
        tokenizer, terminators: the verifier's.
        timeout: seconds after which a request is sent again.
        patience: seconds without any answer, requests failing, after which it is given up.

    Raises:
        ValueError: it does not answer, or serves no such model.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        tokenizer: PreTrainedTokenizerBase,
        terminators: Collection[int],
        timeout: float,
        patience: float,
    ):
        self.url = url.rstrip("/")
        if not self.url.endswith("/v1"):
            self.url += "/v1"
        self.tokenizer, self.terminators = tokenizer, list(terminators)
        self.patience = patience
        self.without_ids = 0
        """Answers of which only the text is known."""
        self.doubted = False  # whether it serves the verifier
        self.extended = True  # it takes vLLM's fields beside OpenAI's
        self.left_out = LeftOut(self.url)
        self.replies = self.refusals = 0
        self.first_reason: dict[str, str] = {}  # kind of skip -> what the first of them said
        self.last_sign = time.monotonic()  # of life
        self.lock = threading.Lock()  # fast tokenizers are not for several threads at once
        self.stop = threading.Event()
        key = os.environ.get("OPENAI_API_KEY")
        self.options = {
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx2.Timeout(timeout, connect=min(timeout, 30.0)),
            "verify": httpx2.create_ssl_context(),  # made once: it takes long
        }
        self.model, self.context_length = self._served(model)

    def _served(self, model: str | None) -> tuple[str, int | None]:
        """Name and context length of the model to ask."""
        try:
            with httpx2.Client(**self.options) as client:
                reply = client.get(f"{self.url}/models", timeout=30)
            reply.raise_for_status()
            found = {entry["id"]: entry.get("max_model_len") for entry in reply.json()["data"]}
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"server {self.url!r} does not say what it serves ({_line(error)}); start it, wait "
                "until it is ready, or mend the URL"
            ) from error
        if model is None and len(found) == 1:
            model = next(iter(found))
        if model not in found:
            missing = "several models" if model is None else f"no {model!r}"
            raise ValueError(
                f"server_model: {self.url} serves {missing}; pass one of {', '.join(sorted(found))}"
            )
        return model, found[model]

    def answers(
        self, conversations: Sequence[Turns], asking: Asking, concurrency: int, before: int = 0
    ) -> Iterator[Outcome]:
        """The outcome of each turn, as they come; `concurrency` requests are in flight at once.

        Args:
            before: answers of earlier runs, which show that it does not refuse all.

        Raises:
            ValueError: the server refuses all, serves another model, or is gone for good.
        """
        waiting = deque(conversations)
        outcomes: queue.SimpleQueue[tuple[Outcome | Exception, threading.Event]]
        outcomes = queue.SimpleQueue()

        def hand_over(outcome: Outcome | Exception) -> None:
            """Wait until it is dealt with: a killed run loses at most `concurrency` replies."""
            taken = threading.Event()
            outcomes.put((outcome, taken))
            while not (taken.wait(1.0) or self.stop.is_set()):
                pass

        def work() -> None:
            with Connection(self.options) as connection:
                while waiting and not self.stop.is_set():
                    try:
                        turns = waiting.popleft()
                    except IndexError:  # another thread was faster
                        return
                    try:
                        for outcome in self._answer(connection, turns, asking):
                            hand_over(outcome)
                    except Exception as error:  # to be raised where somebody sees it
                        hand_over(error)

        self.replies, self.last_sign = before, time.monotonic()
        for _ in range(min(concurrency, len(conversations))):
            # a daemon does not hold up the end of the program with a request that nobody waits for
            threading.Thread(target=work, daemon=True).start()
        try:
            left = len(conversations)
            while left:
                outcome, taken = outcomes.get()
                if isinstance(outcome, Exception):
                    raise outcome
                left -= not outcome.more
                yield outcome
                taken.set()
        finally:
            self.stop.set()
        if self.refusals and not self.replies:
            self._refuse()

    def _answer(self, connection: "Connection", turns: Turns, asking: Asking) -> Iterator[Outcome]:
        more = True
        while more:
            try:
                with self.lock:
                    prompt = turns.ask(self.tokenizer, asking.chat_template_kwargs)
            except BadRow as error:
                first = self.first_reason.setdefault(error.reason, str(error))
                yield Outcome(skipped=f"{error.reason} (such as {first})")
                return
            excess = asking.limits.excess(len(prompt))
            if excess:
                yield Outcome(skipped=excess)
                return
            try:
                message, written = self._reply(connection, turns, prompt, asking)
            except Skipped as reason:
                yield Outcome(skipped=str(reason))
                return
            more = turns.reply(message)
            answered = turns.answered(asking, self.left_out.undecided)
            yield Outcome(answered, written, more)

    def _reply(
        self, connection: "Connection", turns: Turns, prompt: list[int], asking: Asking
    ) -> tuple[dict[str, Any], int]:
        """The assistant's turn, and its number of tokens, however often it takes."""
        attempt = failures = foreign = 0
        replies, refused = self.replies, set[str]()
        while True:
            extended, wait, busy = self.extended, 0.0, False
            body = self.left_out.of(self._body(turns, asking, extended), refused)
            try:
                response = connection.client.post(f"{self.url}/chat/completions", json=body)
                if response.status_code == 200:
                    with self.lock:
                        self.left_out.settle(refused)
                    made = self._message(_json(response), prompt, turns.conversation.id)
                    with self.lock:
                        self.replies += 1
                        self.last_sign = time.monotonic()
                    return made
                reason = f"{response.status_code}: {_complaint(response)}"
                said = response.text if response.status_code in (400, 422) else ""
                if extended and "_token_ids" in said:
                    self.extended = False  # OpenAI's fields alone
                    continue
                named = refused_fields(response.status_code, said, body)
                if named:
                    refused |= named
                    continue
                self._check(response.status_code, reason, turns.conversation.id)
                wait = _seconds(response.headers.get("Retry-After"))
                busy = response.status_code in (429, 503)
            except Foreign as error:
                reason, foreign = str(error), foreign + 1
                if foreign == 3:
                    raise ValueError(reason) from error
                connection.renew()  # a reply too many may be waiting on it
            except (httpx2.HTTPError, Unusable) as error:
                reason = _line(error)
                connection.renew()
            # others are answered, and the server is not merely busy: it is this request's failure
            failures += self.replies > replies and not busy
            replies = self.replies
            if failures == _OWN_FAILURES:
                self._skip(f"failed {failures} times while others were answered", reason)
            silent = time.monotonic() - self.last_sign
            if silent > self.patience:
                raise ValueError(
                    f"server {self.url} has answered nothing for {silent:.0f} seconds ({reason}). "
                    "No answer is lost: run the same command again when it is back"
                )
            doubled = min(_LONGEST_WAIT, 0.5 * 2.0**attempt)
            if self.stop.wait(max(wait, doubled * random.uniform(0.5, 1.0))):
                raise Skipped("the run has ended")
            attempt += 1

    def _body(self, turns: Turns, asking: Asking, extended: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": turns.sent(),
            "max_tokens": asking.limits.max_new_tokens,
        } | law_fields(asking.sampling)
        if not asking.sampling.greedy:
            body["seed"] = zlib.crc32(f"{asking.seed} {turns.seed()}".encode()) >> 1
        if turns.conversation.tools:
            body["tools"] = turns.conversation.tools
        if asking.chat_template_kwargs:
            body["chat_template_kwargs"] = asking.chat_template_kwargs
        if extended:
            body |= {"return_token_ids": True, "stop_token_ids": self.terminators}
        return body

    def _check(self, status: int, reason: str, row: str) -> None:
        """Raise what no further try will mend."""
        if status in (401, 403):
            raise ValueError(f"server {self.url} refuses the key in OPENAI_API_KEY ({reason})")
        if status == 404:
            raise ValueError(f"server {self.url} does not serve {self.model!r} so ({reason})")
        if status >= 500 or status in (408, 409, 425, 429):
            return
        with self.lock:
            self.refusals += 1
            self.last_sign = time.monotonic()
        try:
            self._skip("refused by the server", f"row {row!r}, {reason}")
        finally:
            if self.refusals == _REFUSALS and not self.replies:
                self._refuse()

    def _refuse(self) -> None:
        first = "".join(self.first_reason.values())
        raise ValueError(f"server {self.url} refuses every prompt ({first})")

    def _skip(self, kind: str, reason: str) -> None:
        """One reason a kind, the first one's: they are counted by it."""
        raise Skipped(f"{kind} (such as {self.first_reason.setdefault(kind, reason)})")

    def _message(self, data: Any, prompt: list[int], row: str) -> tuple[dict[str, Any], int]:
        """The assistant's turn in a reply, and its number of tokens."""
        try:
            choice = data["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
            content = message.get("content")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Unusable("a reply without a message") from error
        if reason not in (*_FINISHED, "length"):
            raise Unusable(f"a reply that ends by {reason!r}")
        usage = data.get("usage") or {}
        seen = data.get("prompt_token_ids")
        if seen is not None and seen != prompt:
            pairs = zip(seen, prompt, strict=False)
            same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            raise Foreign(
                f"row {row!r}: server {self.url} was given {len(seen)} prompt tokens where the "
                f"verifier's template writes {len(prompt)}, and they differ from number {same} on; "
                "let it serve the verifier itself, with its own chat template"
            )
        other = seen is None and usage.get("prompt_tokens", len(prompt)) != len(prompt)
        if other and not self.doubted:
            self.doubted = True  # once is enough
            warnings.warn(
                f"the server counts {usage['prompt_tokens']} prompt tokens where the verifier's "
                f"template writes {len(prompt)} (row {row!r}): is it the same model, and does it "
                "heed chat_template_kwargs?",
                stacklevel=2,
            )
        ids = choice.get("token_ids")
        if ids and (ids[-1] in self.terminators) == (reason in _FINISHED):
            with self.lock:
                return reply_of(ids, self.tokenizer, self.terminators), len(ids)
        if message.get("tool_calls"):
            self._skip("answered by a call of a tool, without token ids", f"row {row!r}")
        if not isinstance(content, str):
            raise Unusable("a reply without a text")
        with self.lock:
            self.without_ids += 1
        reply = {"role": "assistant", "content": content}
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            reply["reasoning_content"] = reasoning
        if reason == "length":
            reply["truncated"] = True
        return reply, usage.get("completion_tokens") or 0


class Connection:
    """One thread's; after a failure, a new one."""

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.client = httpx2.Client(**options)

    def __enter__(self) -> "Connection":
        return self

    def renew(self) -> None:
        self.client.close()
        self.client = httpx2.Client(**self.options)

    def __exit__(self, *_: Any) -> None:
        self.client.close()


def _json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise Unusable("a reply that is not JSON") from error


def _complaint(response: httpx2.Response) -> str:
    """What a server says beside an error's number."""
    try:
        found = response.json()
        return _line(found.get("error", found).get("message", found))
    except (ValueError, AttributeError):
        return _line(response.text or response.reason_phrase)


def _line(message: Any) -> str:
    """On one line, and not too long a one."""
    text = " ".join(str(message).split()) or type(message).__name__
    return text if len(text) <= 200 else text[:199] + "…"


def _seconds(retry_after: str | None) -> float:
    """A wait that the server asks for; 0 where it gives a date."""
    return float(retry_after) if retry_after and retry_after.isdigit() else 0.0
