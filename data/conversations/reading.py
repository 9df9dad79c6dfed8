"""Read conversations: JSON, CSV or Parquet, a file or a folder of them, or a Hub data set."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from headstart.data.conversations import law
from headstart.data.conversations.bad import BadRow
from headstart.data.conversations.conversation import Conversation, parse, without_nulls
from headstart.data.conversations.files import rows_of
from headstart.script import ROOT

_KINDS = (".jsonl", ".json", ".csv", ".parquet")


def read(
    source: str,
    split: str = "train",
    limit: int | None = None,
    spread: bool = False,
    refuse: Callable[[BadRow], None] | None = None,
) -> Iterator[Conversation]:
    """Stream the conversations of `source`, at most `limit`; the rest as of `Reader`.

    No two have the same id: one that came before is preceded by where the row stands.

    Args:
        spread: take the `limit` evenly over the whole source, which is then read to its end; else
            the first.
        refuse: told of each row that cannot be read, which is then left out; default: it is raised.
    """
    if not spread or limit is None:
        yield from islice(_distinct(Reader(source, split), refuse), limit)
        return
    rows = list(_distinct(Reader(source, split), refuse))
    count = min(limit, len(rows))
    yield from (rows[i * len(rows) // count] for i in range(count))


def _distinct(reader: "Reader", refuse: Callable[[BadRow], None] | None) -> Iterator[Conversation]:
    seen: set[str] = set()
    for row in reader:
        if isinstance(row, BadRow):
            if refuse is None:
                raise row
            refuse(row)
            continue
        if row.id in seen:
            row.id = f"{reader.place}:{row.id}"
        seen.add(row.id)
        yield row


class Reader:
    """The conversations of a source, in its order; of JSON lines and Parquet only the row at hand
    is in memory.

    Iterating goes on after the last row that was read; `state_dict` says where that is. In place of
    a row that cannot be read comes a `BadRow`, which names it by file and line.

    Args:
        source: a .jsonl, .json, .csv or .parquet file, a folder of such files (read in name order),
            or the name of a Hub data set. A path is looked for below the working directory, then
            among headstart's own files.
        split: of a Hub data set.

    Raises:
        ValueError: no such source, or a file that cannot be read at all.
    """

    def __init__(self, source: str, split: str = "train"):
        self.source, self.split = source, split
        self.files = find(source)
        self.lines = bool(self.files) and self.files[0].suffix != ".parquet"
        self.bytes = sum(file.stat().st_size for file in self.files)
        self.place = ""  # of the last row: where it stands in the source
        self._names = _names(source, self.files)
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

    def __iter__(self) -> Iterator[Conversation | BadRow]:
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

    def _read_lines(self) -> Iterator[Conversation | BadRow]:
        while self._file < len(self.files):
            file, (name, path) = self.files[self._file], self._names[self._file]
            record = law.recorded(file)
            rows = rows_of(file, self._line, self._offset)
            for self._line, self._offset, where, row in rows:
                self.number += 1
                self.place = f"{path}-{self._line:06d}"
                yield _parsed(law.completed(row, record), where, f"{name}-{self._line:06d}")
            self._file, self._line, self._offset = self._file + 1, 0, 0

    def _read_rows(self) -> Iterator[Conversation | BadRow]:
        for row in () if self._ended else self._rows:
            where = f"{self.source}, row {self.number}"
            self.place = f"{self.split}-{self.number:06d}"
            self.number += 1
            yield _parsed(without_nulls(row), where, self.place)
        self._ended = True


def _parsed(row: Any, where: str, default_id: str) -> Conversation | BadRow:
    if isinstance(row, BadRow):
        return row
    try:
        return parse(row, where, default_id)
    except BadRow as bad:
        return bad


def _names(source: str, files: list[Path]) -> list[tuple[str, str]]:
    """Of each file what its rows without an id are called by, and its path in the source.

    That is the file's name, or the path where a file before it has the same name.
    """
    folder = resolve(source)
    names: dict[str, str] = {}
    for file in files:
        path = (file.relative_to(folder) if folder.is_dir() else Path(file.name)).with_suffix("")
        names[path.as_posix() if file.stem in names else file.stem] = path.as_posix()
    return list(names.items())


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
    local = source.endswith(_KINDS) or source.startswith((".", "/"))
    if path is None and local:
        raise ValueError(f"{source!r}: no such file or folder")
    if path is None:
        return []
    if not path.is_dir():
        return [path]
    for kind in (".jsonl", ".parquet", ".json", ".csv"):  # beside the first two lie records
        files = sorted(path.glob(f"**/*{kind}"))
        if files:
            return files
    raise ValueError(f"{source!r}: the folder holds no {', '.join(_KINDS)} file")


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
