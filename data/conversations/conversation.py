"""One conversation, of any shape of row that is understood:

- `messages`: [{"role", "content"}, …] as in OpenAI's API, with `tools` beside it if any
- `conversations`: [{"from", "value"}, …] as in ShareGPT's files
- `text`: plain text without turns, for base models
- `prompt` (a string) or `turns` (strings): user turns that still want an answer

Beside them, the law of the answers (see `law.py`) and, in a turn, whether it is trained on.
"""

import json
import warnings
from dataclasses import dataclass, field
from typing import Any

from headstart.data.conversations import law as laws
from headstart.data.conversations.law import Law

ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool",
}  # fmt: skip
SUPERVISION = ("loss", "train", "weight")
"""Of a turn: 0 (or false) in one of them keeps it from being trained on."""


@dataclass
class Conversation:
    """One row. Plain text has `text` and no messages."""

    id: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    category: str = "all"
    law: Law | None = None
    """Under which the verifier wrote the answers; None where it is not known."""
    chat_template_kwargs: dict[str, Any] | None = None
    """What the chat template was given when the answers were written; None: not recorded."""

    def asked(self) -> list[dict[str, Any]]:
        """The turns that an assistant answers: all but its own."""
        return [message for message in self.messages if message["role"] != "assistant"]

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"id": self.id, "category": self.category}
        if self.law is not None:
            row |= self.law.to_json()
        if self.chat_template_kwargs:
            row["chat_template_kwargs"] = self.chat_template_kwargs
        if self.tools:
            row["tools"] = self.tools
        if self.text is not None:
            return row | {"text": self.text}
        return row | {"messages": self.messages}


def parse(row: Any, where: str, default_id: str) -> Conversation:
    """One row of any understood shape.

    Raises:
        ValueError: naming `where` and what is wrong.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be a JSON object, got {type(row).__name__}")
    common: dict[str, Any] = {
        "id": str(row.get("id", row.get("question_id", default_id))),
        "category": str(row.get("category") or "all"),
        "law": laws.of_row(row, where),
    }
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _json_field(tools, where, "tools")
    if tools and not isinstance(tools, list):
        raise ValueError(f"{where}: tools must be a list, got {type(tools).__name__}")
    common["tools"] = tools or None
    kwargs = row.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ValueError(f"{where}: chat_template_kwargs must be an object, got {kwargs!r}")
    common["chat_template_kwargs"] = kwargs
    if isinstance(row.get("messages"), list):
        messages = [_message(m, where, "role", "content") for m in row["messages"]]
    elif isinstance(row.get("conversations"), list):
        messages = [_message(m, where, "from", "value") for m in row["conversations"]]
        system = row.get("system")
        if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
    elif isinstance(row.get("turns"), list):
        messages = [{"role": "user", "content": _content(t, where)} for t in row["turns"]]
    elif isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    elif isinstance(row.get("text"), str):
        return Conversation(text=row["text"], **common)
    else:
        for name in ("messages", "conversations", "turns", "prompt", "text"):
            if row.get(name) is not None:
                kind = "a string" if name in ("prompt", "text") else "a list"
                got = type(row[name]).__name__
                raise ValueError(f"{where}: {name} must be {kind}, got {got}")
        raise ValueError(
            f"{where}: no messages, conversations, turns, prompt or text "
            f"(the row's fields: {', '.join(map(str, row)) or 'none'})"
        )
    if not messages:
        raise ValueError(f"{where}: the conversation has no turns")
    return Conversation(messages=messages, **common)


def _message(message: Any, where: str, role_field: str, content_field: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where}: a turn must be an object, got {type(message).__name__}")
    role = message.get(role_field)
    if role == "function_call" and role_field == "from":  # ShareGPT: the assistant calls a tool
        call = _json_field(str(message.get(content_field)), where, "function_call")
        calls = [{"type": "function", "function": call}]
        made = {"role": "assistant", "content": "", "tool_calls": calls}
        return made | _mark(message, "assistant")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(
            f"{where}: unknown {role_field} {role!r}; known are {', '.join(sorted(ROLES))}"
        )
    ours = (role_field, content_field, *SUPERVISION)
    kept = {k: v for k, v in message.items() if k not in ours and v}
    ids = kept.get("token_ids", [])
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{where}: token_ids must be a list of token ids")
    content = message.get(content_field)
    if content is None and kept.get("tool_calls"):
        content = ""
    made = {"role": ROLES[role], "content": _content(content, where)} | kept
    return made | _mark(message, ROLES[role])


def _mark(message: dict[str, Any], role: str) -> dict[str, Any]:
    """`context_only` for an assistant turn that is not to be trained on, however that is said."""
    given = [message[name] for name in SUPERVISION if message.get(name) is not None]
    if any(value not in (0, 1) for value in given):
        warnings.warn(
            f"a turn's {', '.join(SUPERVISION)} is read as 0 or 1, and anything but 0 as 1: a turn "
            "is trained on or not",
            stacklevel=2,
        )
    return {"context_only": True} if role == "assistant" and 0 in given else {}


def _content(content: Any, where: str) -> str:
    """A string, or the joined text of a list of text parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            if isinstance(part, dict) and part.get("type") == "text" and "text" in part:
                parts.append(str(part["text"]))
            elif isinstance(part, str):
                parts.append(part)
            else:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"{where}: content part of type {kind!r}; only text is supported")
        return "".join(parts)
    raise ValueError(
        f"{where}: content must be a string or a list of text parts, got {type(content).__name__}"
    )


def _json_field(text: str, where: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {name} is not JSON ({error.msg})") from error
