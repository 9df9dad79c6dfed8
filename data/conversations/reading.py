"""Read conversations: JSONL or Parquet, a file or a folder of them, or a data set of the Hub.

Three shapes of a row are understood, and turned into one:

- `messages`: [{"role", "content"}, …] as in OpenAI's API, with `tools` beside it if any
- `conversations`: [{"from", "value"}, …] as in ShareGPT's files
- `text`: plain text without turns, for base models
- `prompt` (a string) or `turns` (strings): user turns that still want an answer
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from headstart.script import ROOT

ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool",
}  # fmt: skip


@dataclass
class Conversation:
    """One row. Plain text has `text` and no messages."""

    id: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    category: str = "all"
    temperature: float | None = None
    """Temperature at which the verifier wrote the answers; None where it is not known."""
    chat_template_kwargs: dict[str, Any] | None = None
    """What the chat template was given when the answers were written; None: not recorded."""

    def asked(self) -> list[dict[str, Any]]:
        """The turns that an assistant answers: all but its own."""
        return [message for message in self.messages if message["role"] != "assistant"]

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"id": self.id, "category": self.category}
        if self.temperature is not None:
            row["temperature"] = self.temperature
        if self.chat_template_kwargs:
            row["chat_template_kwargs"] = self.chat_template_kwargs
        if self.tools:
            row["tools"] = self.tools
        if self.text is not None:
            return row | {"text": self.text}
        return row | {"messages": self.messages}


def read(
    source: str, split: str = "train", limit: int | None = None, spread: bool = False
) -> Iterator[Conversation]:
    """Stream the conversations of `source`, at most `limit`; the rest as of `Reader`.

    Args:
        spread: take the `limit` evenly over the whole source, which is then read to its end; else
            the first.
    """
    if not spread or limit is None:
        yield from islice(Reader(source, split), limit)
        return
    rows = list(Reader(source, split))
    count = min(limit, len(rows))
    yield from (rows[i * len(rows) // count] for i in range(count))


class Reader:
    """The conversations of a source, in its order, with only the row at hand in memory.

    Iterating goes on after the last row that was read; `state_dict` says where that is.

    Args:
        source: a .jsonl or .parquet file, a folder of such files (read in name order), or the name
            of a Hub data set. A path is looked for below the working directory, then among
            headstart's own files.
        split: of a Hub data set.

    Raises:
        ValueError: no such source, or a row that cannot be read (named by file and line).
    """

    def __init__(self, source: str, split: str = "train"):
        self.source, self.split = source, split
        self.files = find(source)
        self.lines = bool(self.files) and self.files[0].suffix != ".parquet"
        self.bytes = sum(file.stat().st_size for file in self.files)
        if not self.lines:
            self._rows = _data_set(source, split, self.files)
            self._first = self._rows.state_dict()
        self.restart()

    def restart(self) -> None:
        """The next row is the first."""
        self.number = 0  # rows that were read
        self._file = self._line = self._offset = 0
        self._ended = False  # a data set would begin anew
        if not self.lines:
            self._rows.load_state_dict(self._first)

    def __iter__(self) -> Iterator[Conversation]:
        return self._read_lines() if self.lines else self._read_rows()

    def state_dict(self) -> dict[str, Any]:
        """Where the next row begins."""
        place = {"file": self._file, "line": self._line, "offset": self._offset}
        if not self.lines:
            place = {"ended": self._ended, "rows": self._rows.state_dict()}
        return {"source": self.source, "bytes": self.bytes, "number": self.number, "place": place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: it is of another source, or the source has changed.
        """
        if (state["source"], state["bytes"]) != (self.source, self.bytes):
            raise ValueError(
                f"{self.source!r} of {self.bytes} bytes was {state['source']!r} of "
                f"{state['bytes']} bytes when the run was begun; resume with the same data, or "
                "begin a new run"
            )
        self.number, place = state["number"], state["place"]
        if self.lines:
            self._file, self._line, self._offset = (place[k] for k in ("file", "line", "offset"))
        else:
            self._ended = place["ended"]
            self._rows.load_state_dict(place["rows"])

    def _read_lines(self) -> Iterator[Conversation]:
        while self._file < len(self.files):
            file = self.files[self._file]
            with file.open("rb") as lines:
                lines.seek(self._offset)
                for line in lines:
                    self._line, self._offset = self._line + 1, self._offset + len(line)
                    if line.strip():
                        self.number += 1
                        yield _parse_line(line, file, self._line)
            self._file, self._line, self._offset = self._file + 1, 0, 0

    def _read_rows(self) -> Iterator[Conversation]:
        for row in () if self._ended else self._rows:
            number, self.number = self.number, self.number + 1
            where, default_id = f"{self.source}, row {number}", f"{self.split}-{number:06d}"
            yield parse(row, where, default_id)
        self._ended = True


def resolve(path: str) -> Path | None:
    """`path` below the working directory, else among headstart's own files, else None."""
    for candidate in (Path(path), ROOT / path):
        if candidate.exists():
            return candidate
    return None


def find(source: str) -> list[Path]:
    """The files of `source`; none for a name of the Hub.

    Raises:
        ValueError: no such file or folder, or a folder without one.
    """
    path = resolve(source)
    local = source.endswith((".jsonl", ".json", ".parquet")) or source.startswith((".", "/"))
    if path is None and local:
        raise ValueError(f"{source!r}: no such file or folder")
    if path is None:
        return []
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("**/*.jsonl")) or sorted(path.glob("**/*.parquet"))
    if not files:
        raise ValueError(f"{source!r}: the folder holds no .jsonl file, and no .parquet file")
    return files


def _parse_line(line: bytes, file: Path, number: int) -> Conversation:
    where = f"{file}, line {number}"
    try:
        row = json.loads(line.decode("utf-8-sig"))  # some editors begin with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: broken JSON ({error.msg} at column {error.colno}); mend or remove the line"
        ) from error
    return parse(row, where, default_id=f"{file.stem}-{number:06d}")


def _data_set(source: str, split: str, files: list[Path]) -> Any:
    """What `datasets` streams: Parquet files, or a data set of the Hub."""
    import datasets

    try:
        if files:
            return datasets.load_dataset(
                "parquet", data_files=[str(f) for f in files], split="train", streaming=True
            )
        return datasets.load_dataset(source, split=split, streaming=True)
    except Exception as error:  # the library raises a dozen kinds, all meaning "not to be had"
        kind = "no Parquet files" if files else "neither a local file nor a Hub data set"
        raise ValueError(
            f"{source!r}: {kind} that can be loaded ({str(error).strip().splitlines()[0]})"
        ) from error


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
        "temperature": row.get("temperature"),
    }
    temperature = common["temperature"]
    if temperature is not None and (
        isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature < 0
    ):
        raise ValueError(f"{where}: temperature must be a number ≥ 0, got {temperature!r}")
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
        return {"role": "assistant", "content": "", "tool_calls": calls}
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(
            f"{where}: unknown {role_field} {role!r}; known are {', '.join(sorted(ROLES))}"
        )
    kept = {k: v for k, v in message.items() if k not in (role_field, content_field) and v}
    ids = kept.get("token_ids", [])
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{where}: token_ids must be a list of token ids")
    content = message.get(content_field)
    if content is None and kept.get("tool_calls"):
        content = ""
    return {"role": ROLES[role], "content": _content(content, where)} | kept


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
