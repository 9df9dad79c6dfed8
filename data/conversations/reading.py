"""Read conversations: JSONL or Parquet, a file or a folder of them, or a data set of the Hub."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from headstart.data.conversations import law
from headstart.data.conversations.conversation import Conversation, parse
from headstart.script import ROOT


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
            record = law.recorded(file)
            with file.open("rb") as lines:
                lines.seek(self._offset)
                for line in lines:
                    self._line, self._offset = self._line + 1, self._offset + len(line)
                    if line.strip():
                        self.number += 1
                        yield _parse_line(line, file, self._line, record)
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


def _parse_line(line: bytes, file: Path, number: int, record: dict[str, Any]) -> Conversation:
    where = f"{file}, line {number}"
    try:
        row = json.loads(line.decode("utf-8-sig"))  # some editors begin with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: broken JSON ({error.msg} at column {error.colno}); mend or remove the line"
        ) from error
    return parse(law.completed(row, record), where, default_id=f"{file.stem}-{number:06d}")


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
