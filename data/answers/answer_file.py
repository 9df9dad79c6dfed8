"""The file of answers that data/regenerate.py writes: continued by a later run, never cut short.

Beside `answers.jsonl` stands `answers.meta.json`, the settings that its answers were written with.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstart.data.conversations import reading
from headstart.data.conversations.conversation import Conversation, parse
from headstart.data.rows.template import plain
from headstart.lock import only_writer

_BEGINNING = b'{"id": "'  # of every line written here


class AnswerFile:
    """The answers of earlier runs and of this one, by id; of two rows with one id the later counts.

    Nothing is written to it before `begin`. Use `open`, which reads it and keeps others off.
    """

    def __init__(self, path: Path):
        self.path = path
        self.record = path.with_suffix(".meta.json")
        self.replaced = 0
        """Answers of this run whose prompt had another text before."""
        self._rows: dict[str, dict[str, Any]] = {}
        self._current: set[str] = set()  # ids whose row answers a prompt of this run
        self._begun: set[str] = set()  # ids whose row answers the first turns of one
        self._size = 0  # bytes of whole lines
        self._lacks_newline = False

    @classmethod
    @contextmanager
    def open(cls, path: Path, prompts: str | None = None) -> Iterator["AnswerFile"]:
        """The answers at `path`, which no other run may write to meanwhile.

        Args:
            path: the JSONL file.
            prompts: where this run's prompts come from; must not be the file itself.

        Raises:
            ValueError: no such file can be written, another run is writing it, or it holds
                something else than answers.
        """
        file = cls(path)
        with file._explained():
            file._check_place(prompts)
        with only_writer(path.with_name(f".{path.name}.lock"), f"out {str(path)!r}"):
            with file._explained():
                if path.exists():
                    file._read()
            yield file

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def others(self) -> int:
        """Answers to prompts that are not this run's."""
        return len(self._rows.keys() - self._current - self._begun)

    @property
    def begun(self) -> int:
        """Conversations of this run that lack the answers to their last turns."""
        return len(self._begun)

    def begin(self, settings: dict[str, Any]) -> None:
        """Make the file ready for `add`; a line that a crash cut off is removed.

        Raises:
            ValueError: the answers in it were written with other settings.
        """
        with self._explained():
            if self.path.exists() and self.record.exists():
                self._check_settings(settings)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _write(self.record, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
            if self.path.exists():
                os.truncate(self.path, self._size)
            self._append("\n" if self._lacks_newline else "")

    def has(self, prompt: Conversation) -> bool:
        """Whether an answer to just these turns is there already."""
        row = self._rows.get(prompt.id)
        if row is None or not _answers(parse(row, str(self.path), ""), prompt):
            return False
        self._current.add(prompt.id)
        return True

    def first_turns(self, prompt: Conversation) -> list[dict[str, Any]]:
        """The turns of `prompt` up to its last answer, where it was broken off between turns."""
        row = self._rows.get(prompt.id)
        if row is None:
            return []
        stored = parse(row, str(self.path), "")
        asked, wanted = plain(stored.asked()), plain(prompt.asked())
        if asked == wanted or asked != wanted[: len(asked)]:
            return []
        if stored.tools != prompt.tools or "truncated" in stored.messages[-1]:
            return []
        self._begun.add(prompt.id)
        return stored.messages

    def add(self, answered: Iterable[Conversation], whole: bool = True) -> None:
        """Append answers; where the disk is full, the file stays as it was.

        Args:
            whole: every turn is answered; otherwise the first turns are, and more is to come.
        """
        rows = [conversation.to_json() for conversation in answered]
        with self._explained():
            self._append("".join(map(_line, rows)))
        for row in rows:
            self.replaced += row["id"] in self._rows and row["id"] not in self._begun
            self._rows[row["id"]] = row
            (self._current if whole else self._begun).add(row["id"])
            if whole:
                self._begun.discard(row["id"])

    def finish(self, order: Iterable[str]) -> None:
        """Put the rows in the order of this run's prompts, those of other prompts after them."""
        first = dict.fromkeys(i for i in order if i in self._current)
        ids = [*first, *(i for i in self._rows if i not in first)]
        with self._explained():
            _write(self.path, "".join(_line(self._rows[i]) for i in ids))

    def _check_place(self, prompts: str | None) -> None:
        if self.path.is_dir():
            raise ValueError(f"out {str(self.path)!r} is a folder; name a .jsonl file in it")
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"out {str(self.path)!r} is not an ordinary file; name a .jsonl file")
        above = self.path.absolute().parent
        while not above.exists():
            above = above.parent
        if not above.is_dir():
            raise ValueError(f"out {str(self.path)!r}: {above} is a file, not a folder")
        if not os.access(above, os.W_OK | os.X_OK):
            raise ValueError(f"out {str(self.path)!r}: {above} is not writable; choose another")
        source = reading.resolve(prompts) if prompts else None
        if source is None:
            return
        taken = self.path.resolve()
        if source.resolve() in (taken, self.record.resolve()):
            raise ValueError(f"out {str(self.path)!r} would overwrite the prompts; choose another")
        if source.is_dir() and source.resolve() in taken.parents:
            raise ValueError(
                f"out {str(self.path)!r} lies in the folder of the prompts, and would be read as "
                "prompts the next time; choose another"
            )

    def _read(self) -> None:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                whole = line.endswith(b"\n")
                try:
                    row = json.loads(line)
                    answer = parse(row, "", "")
                except ValueError:
                    if not whole and line.startswith(_BEGINNING[: len(line)]):
                        return
                    answer = None
                if answer is None or not answer.id or not self._is_ours(answer):
                    raise ValueError(
                        f"out {str(self.path)!r}, line {number}: not an answer with id and "
                        "token_ids; the file was not written by this script, choose another --out"
                    )
                self._rows[answer.id] = row | {"id": answer.id}
                self._size += len(line)
                self._lacks_newline = not whole

    def _is_ours(self, answer: Conversation) -> bool:
        """A server may give no token ids; then the record of the settings tells."""
        if any("token_ids" in message for message in answer.messages):
            return True
        answered = any(message["role"] == "assistant" for message in answer.messages)
        return answered and answer.law is not None and self.record.exists()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        try:
            before = json.loads(self.record.read_text(encoding="utf-8"))
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise ValueError(
                f"{self.record} is broken, so the settings of {self.path} are not known; "
                "choose another --out"
            )
        for name, value in settings.items():
            if before.get(name) != value:
                raise ValueError(
                    f"{self.path} was begun with {name} = {before.get(name)!r}, this run has "
                    f"{value!r}; choose another --out or the same settings"
                )

    def _append(self, text: str) -> None:
        data = text.encode("utf-8")
        try:
            with self.path.open("ab") as file:
                file.write(data)
        except OSError:
            if self.path.exists():
                os.truncate(self.path, self._size)  # no half lines
            raise
        self._size += len(data)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What the operating system refuses is the user's to mend."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"out {str(self.path)!r} cannot be written: {error.strerror or error}. No answer "
                "in it is lost: mend that and run the same command again, or choose another --out"
            ) from error


def _answers(stored: Conversation, prompt: Conversation) -> bool:
    """Whether `stored` answers the turns of `prompt`; one cut off lacks the turns after it."""
    asked, answered = plain(prompt.asked()), plain(stored.asked())
    if "truncated" in stored.messages[-1]:
        asked = asked[: len(answered)]
    return asked == answered and stored.tools == prompt.tools


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    """Replace `path` at once, or leave it as it is."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
