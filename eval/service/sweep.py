"""The measuring of a benchmark: cell by cell, with and without drafts in turn, kept as it comes.

A cell is one way to decode at one concurrency; the cells of a workload, temperature and concurrency
form a group. Trial i of a group decodes the same batch of prompts in each of its cells, one after
the other, every second time in the opposite order. Each trial is one line of `trials.jsonl`,
appended when it ends, so a stopped benchmark goes on where it was.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headstart.eval.measures.counts import Counts

OFF = "off"
"""Instead of a shape's name: plain decoding."""


@dataclass(frozen=True)
class Cell:
    """One way to decode."""

    workload: str
    temperature: float
    concurrency: int
    """Answers written at the same time."""
    drafts: str
    """off, or the name of a shape, such as chain:4."""

    @property
    def group(self) -> tuple[str, float, int]:
        return self.workload, self.temperature, self.concurrency

    def __str__(self) -> str:
        return (
            f"{self.workload}, T = {self.temperature:g}, concurrency {self.concurrency}, "
            f"{self.drafts}"
        )


@dataclass
class Trial:
    """One batch of prompts, decoded in one cell. Times are seconds."""

    cell: Cell
    number: int
    seconds: float
    """Of all of it, as it ran."""
    tokens: int
    requests: int
    full_seconds: float
    """While every slot was taken, after prefill."""
    full_tokens: float
    """Tokens of that time, in a loop that refills its slots: see `own_loop` and `server`."""
    first_token: list[float]
    """Of each request, from its beginning."""
    waits: list[float]
    """For each arrival after the first, while every slot was taken."""
    wait_tokens: float
    """Tokens that came with them."""
    parts: dict[str, float] | None
    """Of the full time: proposal, verification and rest; None where a server does not tell."""
    passes: int | None
    """Of the verifier in the full time."""
    counts: list[Counts] | None
    """Drafts of each text, or of the trial in all; None where a server does not tell."""
    texts: list[list[int]] = field(default_factory=list)
    """Ids of each answer, of greedy decoding in our own loop."""


Measure = Callable[[Cell, int], Trial]


class TrialFile:
    """What has been measured: `trials.jsonl`, and beside it the settings it was measured with.

    Raises:
        ValueError: a file that cannot be read, or trials of other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.path = folder / "trials.jsonl"
        self.trials: dict[tuple[Cell, int], Trial] = {}
        record = folder / "trials.meta.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if record.exists() and self.path.exists():
                self._check(record, settings)
                self._read()
            else:
                self.path.write_bytes(b"")
            record.write_text(json.dumps(settings, indent=1) + "\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, trial: Trial) -> None:
        """Append; where the disk is full, what is there stays whole."""
        size = self.path.stat().st_size
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
        except OSError as error:
            os.truncate(self.path, size)
            raise self._unwritable(error) from error
        self.trials[trial.cell, trial.number] = trial

    def group(self, group: tuple[str, float, int]) -> list[Trial]:
        return [trial for (cell, _), trial in self.trials.items() if cell.group == group]

    def _check(self, record: Path, settings: dict[str, Any]) -> None:
        """Workloads may be added later; whatever else is recorded must be as it was."""
        try:
            there = json.loads(record.read_text())
        except ValueError as error:
            raise ValueError(f"out: {record} cannot be read; pass another --out") from error
        workloads = there.get("workloads", {}) | settings["workloads"]
        for name, value in (settings | {"workloads": workloads}).items():
            its = there.get(name)
            if name == "workloads":
                its = workloads | (its or {})
            if its != value:
                raise ValueError(
                    f"out: {self.path} was measured with another setting, {name} is {its!r} there "
                    f"and {value!r} here; give the same, or pass another --out"
                )
        settings["workloads"] = workloads

    def _read(self) -> None:
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    row["cell"] = Cell(**row["cell"])
                    if row["counts"] is not None:
                        row["counts"] = [Counts(**one) for one in row["counts"]]
                    trial = Trial(**row)
                except (ValueError, TypeError, KeyError) as error:
                    if not line.endswith(b"\n"):  # cut off when the last run was killed
                        break
                    raise ValueError(
                        f"out: {self.path}, line {number} is no trial; remove it, or pass another "
                        "--out"
                    ) from error
                if not line.endswith(b"\n"):
                    break
                self.trials[trial.cell, trial.number] = trial
                whole += len(line)
        os.truncate(self.path, whole)

    def _unwritable(self, error: OSError) -> ValueError:
        return ValueError(
            f"out: {self.path} cannot be written ({error.strerror}); make room or pass another "
            "folder; what was measured before is kept"
        )


def warmed(measure: Measure) -> Measure:
    """The same, after one answer for each kind of drafts that does not count: first calls are
    slow."""
    seen: set[str] = set()

    def measured(cell: Cell, number: int) -> Trial:
        if cell.drafts not in seen:
            seen.add(cell.drafts)
            measure(replace(cell, concurrency=1), number)
        return measure(cell, number)

    return measured


def groups(cells: list[Cell]) -> list[list[Cell]]:
    """The cells of each group, in order; plain decoding is the first of each."""
    found: dict[tuple[str, float, int], list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.group, []).append(cell)
    return list(found.values())


def measure_group(
    file: TrialFile,
    cells: list[Cell],
    measure: Measure,
    seconds: float,
    least: int,
    done: Callable[[Trial], None] = lambda trial: None,
) -> int:
    """Trials of one group, until its cells have `seconds` each on average, and `least` trials.

    Args:
        done: told of every new trial.

    Returns:
        How many trials were new.
    """
    number = new = 0
    while True:
        spent = sum(trial.seconds for trial in file.group(cells[0].group))
        finished = all((cell, number) not in file.trials for cell in cells)
        if finished and number >= least and spent >= seconds * len(cells):
            return new
        for cell in cells if number % 2 == 0 else reversed(cells):
            if (cell, number) not in file.trials:
                trial = measure(cell, number)
                file.add(trial)
                done(trial)
                new += 1
        number += 1
