"""One conversation, of any shape of row that is understood:

- `messages`: [{"role", "content"}, …] as in OpenAI's API, with `tools` beside it if any
- `conversations`: [{"from", "value"}, …] as in ShareGPT's files; either may be keyed as the other
- `text`: plain text without turns, for base models
- `prompt` (a string) or `turns` (strings): user turns that still want an answer

Beside them, the law of the answers (see `law.py`) and, in a turn, whether it is trained on.
"""

import json
import warnings
from dataclasses import dataclass, field
from typing import Any

from headstart.data.conversations import law as laws
from headstart.data.conversations.bad import BadRow
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
        """The turns that an assistant answers: all but its own, and the calls that led to a result.

        A call whose result is not there ends them: nobody ran it, so nothing follows.
        """
        kept = []
        for turn, after in zip(self.messages, [*self.messages, None][1:], strict=True):
            led = after is not None and after["role"] == "tool"
            if turn["role"] != "assistant" or led:
                kept.append(turn)
            elif turn.get("tool_calls"):
                break
        return kept

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
        BadRow: naming `where` and what is wrong.
    """
    if not isinstance(row, dict):
        raise BadRow(where, "a row must be a JSON object", f", got {type(row).__name__}")
    if _of_a_table(row):
        row = without_nulls(row)
    given = [row[name] for name in ("id", "question_id") if row.get(name) not in (None, "")]
    common: dict[str, Any] = {
        "id": str((given or [default_id])[0]),
        "category": str(row.get("category") or "all"),
        "law": laws.of_row(row, where),
    }
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _json_field(tools, where, "tools")
    if tools and not isinstance(tools, list):
        raise BadRow(where, "tools must be a list", f", got {type(tools).__name__}")
    common["tools"] = tools or None
    kwargs = row.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise BadRow(where, "chat_template_kwargs must be an object", f", got {kwargs!r}")
    common["chat_template_kwargs"] = kwargs
    lists = {name: _list_of(row, name, where) for name in ("messages", "conversations", "turns")}
    if lists["messages"] is not None:
        messages = [_message(m, where, "role", "content") for m in lists["messages"]]
    elif lists["conversations"] is not None:
        messages = [_message(m, where, "from", "value") for m in lists["conversations"]]
        system = row.get("system")
        if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
    elif lists["turns"] is not None:
        messages = [{"role": "user", "content": _content(t, where)} for t in lists["turns"]]
    elif isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    elif isinstance(row.get("text"), str):
        return Conversation(text=row["text"], **common)
    else:
        for name in (*lists, "prompt", "text"):
            if row.get(name) is not None:
                kind = "a list" if name in lists else "a string"
                raise BadRow(where, f"{name} must be {kind}", f", got {type(row[name]).__name__}")
        raise BadRow(
            where,
            "no messages, conversations, turns, prompt or text",
            f" (the row's fields: {', '.join(map(str, row)) or 'none'})",
        )
    if not messages:
        raise BadRow(where, "the conversation has no turns")
    return Conversation(messages=messages, **common)


def without_nulls(value: Any) -> Any:
    """Without the keys that are null: a table has those of every other row.

    In lists null stays, as in a schema's `enum`.
    """
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _of_a_table(row: dict[str, Any]) -> bool:
    """Whether a JSON row was written from a table: turns that call nothing have null for it.

    In any other row, null in a call's arguments or in a tool's schema is what its author wrote.
    """
    turns = row.get("messages")
    return isinstance(turns, list) and any(
        isinstance(turn, dict)
        and turn.get("role") != "assistant"
        and turn.get("tool_calls", turn) is None
        for turn in turns
    )


def _list_of(row: dict[str, Any], name: str, where: str) -> list | None:
    """The list in a field, as itself or as JSON text; None: there is none."""
    value = row.get(name)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _json_field(value, where, name)
    return value if isinstance(value, list) else None


def _message(message: Any, where: str, role_field: str, content_field: str) -> dict[str, Any]:
    """A turn; its fields may be the other shape's."""
    if not isinstance(message, dict):
        raise BadRow(where, "a turn must be an object", f", got {type(message).__name__}")
    others = {"role": "from", "from": "role", "content": "value", "value": "content"}
    if message.get(role_field) is None and message.get(others[role_field]) is not None:
        role_field = others[role_field]
    if message.get(content_field) is None and message.get(others[content_field]) is not None:
        content_field = others[content_field]
    role = message.get(role_field)
    if role == "function_call":  # ShareGPT: the assistant calls a tool, or several
        found = _json_field(str(message.get(content_field)), where, "function_call")
        calls = [{"function": call} for call in (found if isinstance(found, list) else [found])]
        made = {"role": "assistant", "content": "", "tool_calls": _calls(calls, where)}
        return made | _mark(message, "assistant")
    if not isinstance(role, str) or role not in ROLES:
        known = f"known are {', '.join(sorted(ROLES))}"
        raise BadRow(where, f"unknown {role_field}", f" {role!r}; {known}")
    ours = (role_field, content_field, *SUPERVISION)
    kept = {k: v for k, v in message.items() if k not in ours and v}
    ids = kept.get("token_ids", [])
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise BadRow(where, "token_ids must be a list of token ids")
    call = kept.get("function_call")
    if isinstance(call, dict) and "tool_calls" not in kept:  # OpenAI's API before it had several
        kept["tool_calls"] = [{"function": kept.pop("function_call")}]
    if kept.get("tool_calls"):
        kept["tool_calls"] = _calls(kept["tool_calls"], where)
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


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls of tools as chat templates expect them: the arguments an object, not its JSON text."""
    if isinstance(calls, str):
        calls = _json_field(calls, where, "tool_calls")
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(where, "a call of a tool must be an object with a name", f", got {call!r}")
        if isinstance(function.get("arguments"), str):
            text = function["arguments"].strip() or "{}"  # of a tool that takes none
            arguments = _json_field(text, where, "the arguments of a call")
            function = function | {"arguments": arguments}
        rest = call if "function" in call else {}
        made.append({"type": "function"} | rest | {"function": function})
    return made


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
                raise BadRow(where, "content part of type", f" {kind!r}; only text is supported")
        return "".join(parts)
    raise BadRow(
        where, "content must be a string or a list of text parts", f", got {type(content).__name__}"
    )


def _json_field(text: str, where: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow(where, f"{name} is not JSON", f" ({error.msg})") from error
