"""What a stopped report has measured already: each run's entries are on disk as soon as it ends.

The same command goes on after the last of them; any other setting, drafter, verifier or data begins
anew. The file is gone once the report is written.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headstart.data.rows.row import Row
from headstart.eval.reports.measurement import Measurement
from headstart.models.proposal.trees import Shape

FILE = ".report.runs.json"
Entries = list[dict[str, Any]]


def identity(
    settings: Measurement,
    fingerprints: list[str | None],
    rows: list[list[Row]],
    shapes: list[Shape],
) -> str:
    """16 hex digits over all that decides what is measured.

    Args:
        fingerprints: the verifier's and the drafter's.
        rows: of each run.
    """
    said = {k: v for k, v in asdict(settings).items() if k != "out"}
    ids = [[[row.id, row.input_ids, row.loss_mask] for row in run] for run in rows]
    everything = [said, fingerprints, ids, [repr(shape) for shape in shapes]]
    return hashlib.sha256(json.dumps(everything, default=str).encode()).hexdigest()[:16]


class Progress:
    """The entries of the runs that have ended, by the number of the run."""

    def __init__(self, out: Path, same: str):
        """`same` is the identity of what is measured; entries of another one do not count."""
        self.path, self.same = out / FILE, same
        self.entries: dict[str, Entries] = {}
        try:
            found = json.loads(self.path.read_text())
            if found["identity"] == same:
                self.entries = dict(found["runs"])
        except (OSError, ValueError, TypeError, LookupError):
            pass  # none yet, or half a file: measured anew

    def of(self, number: int) -> Entries | None:
        """The entries of a run that has ended; None: it has not."""
        return self.entries.get(str(number))

    def ended(self, number: int, entries: Entries) -> None:
        """Keep a run's entries.

        Raises:
            ValueError: the disk is full or the folder gone.
        """
        self.entries[str(number)] = entries
        temporary = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"identity": self.same, "runs": self.entries}))
            temporary.replace(self.path)
        except OSError as error:
            raise ValueError(
                f"out: what was measured cannot be written to {self.path.parent} "
                f"({error.strerror}); make room or pass another folder"
            ) from error
