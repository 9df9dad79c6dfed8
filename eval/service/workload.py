"""What a benchmark asks for: prompts of some kinds, with short or long context and answers."""

from dataclasses import dataclass, field
from typing import Any

from headstart.data.conversations import reading
from headstart.data.conversations.conversation import Conversation


@dataclass
class Workload:
    """One kind of traffic."""

    name: str = "mixed"
    data: str = "data/smollm2/eval.jsonl"
    """Conversations; what comes before their first answer is the prompt."""
    categories: list[str] = field(default_factory=list)
    """Only these of the data's categories, such as [chat, prose]; none: all."""
    max_new_tokens: int = 64
    """Longest answer, in tokens."""
    context_words: int = 0
    """Turns of other conversations go before a prompt until it has so many words."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("workloads: each needs a name")
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens must be 2 or more, got {self.max_new_tokens}: the first token "
                "comes before there are drafts"
            )
        if self.context_words < 0:
            raise ValueError(f"context_words must be 0 or more, got {self.context_words}")


@dataclass
class Prompt:
    """What a chat template or a server is given."""

    id: str
    category: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any]


def prompts(workload: Workload) -> list[Prompt]:
    """In turn one of each category, each category in the data's order.

    Raises:
        ValueError: data that cannot be read, or without such a prompt.
    """
    rows = [row for row in reading.read(workload.data) if _asked(row)]
    there = sorted({row.category for row in rows})
    for category in workload.categories:
        if category not in there:
            raise ValueError(
                f"workloads: {workload.data} has no prompt of category {category!r}, only of "
                f"{', '.join(there) or 'none'}"
            )
    if not rows:
        raise ValueError(f"workloads: {workload.data} has no conversation that asks something")
    by_category: dict[str, list[Prompt]] = {}
    for number, row in enumerate(rows):
        if not workload.categories or row.category in workload.categories:
            before = _context(rows, number, workload.context_words)
            prompt = Prompt(
                row.id,
                row.category,
                _with_context(before, _asked(row)),
                row.tools,
                row.chat_template_kwargs or {},
            )
            by_category.setdefault(row.category, []).append(prompt)
    most = max(map(len, by_category.values()))
    return [group[i] for i in range(most) for group in by_category.values() if i < len(group)]


def batch(everything: list[Prompt], size: int, number: int) -> list[Prompt]:
    """The `number`-th batch, from 0 on; after the last prompt comes the first again."""
    start = size * number
    return [everything[i % len(everything)] for i in range(start, start + size)]


def _asked(row: Conversation) -> list[dict[str, Any]]:
    """The turns before the first answer; none where the conversation asks nothing."""
    turns: list[dict[str, Any]] = []
    for message in row.messages:
        if message["role"] == "assistant":
            break
        turns.append({"role": message["role"], "content": message["content"]})
    return turns if turns and turns[-1]["role"] == "user" else []


def _words(messages: list[dict[str, Any]]) -> int:
    return sum(len(str(message["content"]).split()) for message in messages)


def _context(rows: list[Conversation], number: int, words: int) -> list[dict[str, Any]]:
    """Whole conversations from after row `number`, the first again after the last."""
    context: list[dict[str, Any]] = []
    missing = words - _words(_asked(rows[number]))
    for step in range(1, len(rows)):
        if missing <= 0:
            break
        other = rows[(number + step) % len(rows)]
        turns = [
            {"role": message["role"], "content": message["content"]}
            for message in other.messages
            if message["role"] in ("user", "assistant")
        ]
        while turns and turns[-1]["role"] != "assistant":
            turns.pop()
        context += turns
        missing -= _words(turns)
    if missing > 0:
        raise ValueError(
            f"context_words {words} is more than all conversations of the data hold together; "
            "lower it"
        )
    return context


def _with_context(
    before: list[dict[str, Any]], asked: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The system message stays the first."""
    system = [message for message in asked if message["role"] == "system"]
    return system + before + [message for message in asked if message["role"] != "system"]
