"""A conversation while its verifier answers it, turn by turn."""

import json
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from headstart.data.conversations.bad import BadRow
from headstart.data.conversations.conversation import Conversation
from headstart.data.conversations.law import Law
from headstart.data.rows.template import plain, refused, template_ids
from headstart.models.proposal.sampling import Sampling


@dataclass
class Limits:
    """How long prompts and answers may be, in tokens."""

    max_prompt_tokens: int
    max_new_tokens: int
    context_length: int | None
    """None: not known; whoever answers refuses what is too long."""

    def excess(self, prompt_tokens: int) -> str | None:
        """Why a prompt of so many tokens is too long; None: it is not."""
        if prompt_tokens > self.max_prompt_tokens:
            return f"longer than max_prompt_tokens ({self.max_prompt_tokens})"
        if self.context_length and prompt_tokens + self.max_new_tokens > self.context_length:
            return (
                f"too long for the context of {self.context_length} tokens, with an answer of "
                f"{self.max_new_tokens}"
            )
        return None

    def check(self, name: str) -> None:
        """Raise a ValueError where no prompt at all would fit."""
        if self.context_length and self.max_new_tokens >= self.context_length:
            raise ValueError(
                f"max_new_tokens {self.max_new_tokens} leaves no room for a prompt: the context "
                f"of {name!r} is {self.context_length} tokens; pass a smaller one"
            )


@dataclass
class Asking:
    """How answers are written, whoever writes them."""

    limits: Limits
    sampling: Sampling
    seed: int
    chat_template_kwargs: dict[str, Any] | None


class Turns:
    """The turns written so far, and those that wait: every assistant turn is written anew, but the
    calls of tools whose results are there. Those are context, as the results are.

    Args:
        written: first turns that have been answered already.
    """

    def __init__(self, conversation: Conversation, written: Sequence[dict[str, Any]] = ()):
        self.conversation = conversation
        self.written = list(written)
        asked = len(Conversation("", self.written).asked())
        self.waiting = [
            turn | {"context_only": True} if turn["role"] == "assistant" else turn
            for turn in conversation.asked()[asked:]
        ]

    def ask(self, tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any] | None) -> list[int]:
        """The next turns, up to and with the user or tool turn that wants a reply.

        Returns:
            Ids of all that is written, up to where the assistant begins.

        Raises:
            BadRow: the chat template refuses them.
        """
        while self.waiting:
            self.written.append(self.waiting.pop(0))
            following = self.waiting[0]["role"] if self.waiting else None
            asks = self.written[-1]["role"] in ("user", "tool")
            if asks and following not in ("tool", "assistant"):
                break
        try:
            return template_ids(tokenizer, self.written, self.conversation.tools, kwargs)
        except (TemplateError, TypeError) as error:
            raise refused(self.conversation.id, error) from error

    def sent(self) -> list[dict[str, Any]]:
        """What is written, as OpenAI's API takes it: a call's arguments are JSON text, and calls
        and results have ids."""
        sent, number = [], 0
        unanswered: list[str] = []  # ids of calls
        for message in plain(self.written):
            if "tool_calls" in message:
                calls = []
                for call in message["tool_calls"]:
                    number += 1
                    function = call["function"]
                    text = json.dumps(function.get("arguments", {}), ensure_ascii=False)
                    own = {"id": f"call{number:05d}"} | call
                    calls.append(own | {"function": function | {"arguments": text}})
                unanswered = [call["id"] for call in calls]
                message = message | {"tool_calls": calls}
            elif message["role"] == "tool" and unanswered:
                message = {"tool_call_id": unanswered.pop(0)} | message
            sent.append(message)
        return sent

    def seed(self) -> int:
        """Of the next answer: the same for the same turns, whatever is answered beside them."""
        return zlib.crc32(json.dumps(self.written).encode())

    def reply(self, message: dict[str, Any]) -> bool:
        """Take in an assistant's turn; whether another one is wanted after it."""
        self.written.append(message)
        return bool(self.waiting) and "truncated" not in message

    def answered(self, asking: Asking, left_to_server: tuple[str, ...] = ()) -> Conversation:
        """The conversation with its answers so far, and how they were written.

        Args:
            left_to_server: fields of the law that whoever wrote them decided.
        """
        sampling = asking.sampling
        law = Law(sampling.temperature, sampling.top_k, sampling.top_p)
        return Conversation(
            self.conversation.id,
            self.written.copy(),
            tools=self.conversation.tools,
            category=self.conversation.category,
            law=replace(law.shape, left_to_server=left_to_server),
            chat_template_kwargs=asking.chat_template_kwargs,
        )


def count_refused(skipped: Counter[str], row: BadRow) -> None:
    """Count a prompt by the reason, of which the first one's words are kept."""
    known = (kind for kind in skipped if kind.startswith(row.reason))
    skipped[next(known, f"{row.reason} (such as {row})")] += 1


def reply_of(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, terminators: Collection[int]
) -> dict[str, Any]:
    """The assistant's turn whose tokens are `ids`; without a terminator at its end it was cut."""
    finished = ids[-1] in terminators
    text = tokenizer.decode(ids[:-1] if finished else ids)
    reply = {"role": "assistant", "content": text, "token_ids": ids}
    return reply if finished else reply | {"truncated": True}
