"""The rows of one file: JSON lines, a JSON document, or CSV. Only lines are read as they are asked
for; the others are in memory while they are read."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.data.conversations.bad import BadRow

_TEXTS = ("id", "question_id", "category", "prompt", "text", "system")  # of a CSV, no JSON
_LONGEST_CELL = 2**31 - 1
_NO_SPACE = re.compile(r"\S")


def rows_of(file: Path, line: int = 0, offset: int = 0) -> Iterator[tuple[int, int, str, Any]]:
    """What comes after line or row `line`, which ends at byte `offset` of JSON lines.

    Returns:
        Of each row its number from 1, the byte it ends at (0 where it has none of its own), what
        to call it, and the row, or why there is none.

    Raises:
        ValueError: a JSON document or CSV that cannot be read at all.
    """
    if file.suffix != ".csv" and not _is_document(file):
        yield from _lines(file, line, offset)
        return
    rows = _cells(file) if file.suffix == ".csv" else _documents(file)
    for number, row in enumerate(rows, 1):
        if number > line:
            yield number, 0, f"{file}, row {number}", row


def _lines(file: Path, line: int, offset: int) -> Iterator[tuple[int, int, str, Any]]:
    with file.open("rb") as lines:
        lines.seek(offset)
        for number, text in enumerate(lines, line + 1):
            offset += len(text)
            if text.strip():
                where = f"{file}, line {number}"
                yield number, offset, where, _of_line(text, where)


def _of_line(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))  # some editors begin with a mark
    except UnicodeDecodeError as error:
        return BadRow(where, "not UTF-8 text", f" ({error.reason})")
    except json.JSONDecodeError as error:
        found = f" ({error.msg} at column {error.colno}); mend or remove the line"
        return BadRow(where, "broken JSON", found)


def _is_document(file: Path) -> bool:
    """Whether the file is one array, or objects over several lines; else each line is a row."""
    with file.open("rb") as lines:
        first = next((line.strip() for line in lines if line.strip()), b"")
    first = first.removeprefix(b"\xef\xbb\xbf").lstrip()
    if first.startswith(b"[") or first == b"{":
        return True
    # a first line that is merely broken is named as a line
    return file.suffix == ".json" and isinstance(_of_line(first, ""), BadRow) and _begins(first)


def _begins(line: bytes) -> bool:
    """Whether a line opens more than it closes."""
    return line.startswith(b"{") and line.endswith((b"{", b"[", b","))


def _documents(file: Path) -> Iterator[Any]:
    """The items of an array, or objects one after the other."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text ({error.reason})") from error
    decoder, place = json.JSONDecoder(), 0
    while (begin := _NO_SPACE.search(text, place)) is not None:
        try:
            value, place = decoder.raw_decode(text, begin.start())
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{file}, line {error.lineno}: broken JSON ({error.msg} at column {error.colno})"
            ) from error
        yield from value if isinstance(value, list) else [value]


def _cells(file: Path) -> Iterator[dict[str, Any]]:
    """Rows by the names in the first line; empty cells are left out."""
    csv.field_size_limit(_LONGEST_CELL)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        try:
            for row in csv.DictReader(lines):
                yield {k: _cell(k, v) for k, v in row.items() if k is not None and v}
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text ({error.reason})") from error
        except csv.Error as error:
            raise ValueError(f"{file}: broken CSV ({error})") from error


def _cell(name: str, text: str) -> Any:
    """Lists and numbers are written as JSON."""
    if name in _TEXTS:
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
