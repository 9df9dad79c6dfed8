"""A run on wandb: its recipe, curves, what was accepted as table and picture, and its files."""

import json
import os
import re
from math import nan
from pathlib import Path
from typing import Any

FILES = ("recipe.yaml", "provenance.json", "metrics.jsonl")
PICTURE = "acceptance.png"


class WandbRun:
    """One process's part of a run, from a start or a resume on; wandb must be installed.

    Args:
        project: on wandb.
        folder: of the run; wandb's own files lie in it.
        recipe: the run's configuration.
        step: where it begins; 0, or where a checkpoint left off.
        offline: keep everything in `folder` for a later `wandb sync`.

    Raises:
        ValueError: wandb refuses, or is not to be reached.
    """

    def __init__(
        self, project: str, folder: Path, recipe: dict[str, Any], step: int, offline: bool
    ):
        import wandb

        self.folder = folder
        if offline:  # copies of artifacts belong to what is synced later
            os.environ.setdefault("WANDB_DATA_DIR", str((folder / "wandb").absolute()))
        try:
            self.run = wandb.init(
                project=project,
                name=folder.name if step == 0 else f"{folder.name} from step {step}",
                group=folder.name,
                config=recipe,
                dir=folder,
                mode="offline" if offline else None,
            )
        except wandb.Error as error:
            raise ValueError(
                f"tracking.wandb is {project!r} but wandb cannot be reached "
                f"({' '.join(str(error).split())}); `wandb login`, or pass "
                "--tracking.wandb_offline true"
            ) from error
        self.validations = validations(folder / "metrics.jsonl")  # of before a resume, too

    def log(self, line: dict[str, Any]) -> None:
        """The numbers of a line of `metrics.jsonl`; of a validation, its table and picture too."""
        import wandb

        shown: dict[str, Any] = flat(line)
        if "validation" in line:
            self.validations.append(line)
            header, rows = table(self.validations)
            shown["acceptance"] = wandb.Table(columns=header, data=rows)
            plot(self.validations, self.folder / PICTURE)
            shown["acceptance by step and position"] = wandb.Image(str(self.folder / PICTURE))
        self.run.log(shown, step=line["step"])

    def finish(self) -> None:
        """Hand over the best checkpoint, as an engine loads it, and the run's own files."""
        import wandb

        name = re.sub(r"[^\w.-]", "-", self.folder.absolute().name)
        best = (self.folder / "best").resolve()
        if best.is_dir():
            drafter = wandb.Artifact(f"{name}-drafter", type="model", metadata=of(best))
            for file in sorted(best.iterdir()):
                if file.is_file():  # resume/ is for training alone
                    drafter.add_file(str(file))
            self.run.log_artifact(drafter, aliases=["best", best.name])
        record = wandb.Artifact(f"{name}-run", type="run")
        for file in FILES:
            record.add_file(str(self.folder / file))
        self.run.log_artifact(record)
        self.run.finish()


def validations(metrics: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` that hold one."""
    lines = map(json.loads, metrics.read_text().splitlines())
    return [line for line in lines if "validation" in line]


def of(checkpoint: Path) -> dict[str, Any]:
    """Step, tokens and measures of a checkpoint."""
    return json.loads((checkpoint / "resume" / "state.json").read_text())


def table(lines: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and a row for each validation: τ and α with intervals, acceptance by position."""
    length = max(len(line["validation"]["conditional"]) for line in lines)
    header = ["step", "tokens", "τ", "τ low", "τ high", "α", "α low", "α high"]
    header += [f"{name} {k}" for name in ("conditional", "joint") for k in range(1, length + 1)]
    rows = []
    for line in lines:
        measured = line["validation"]
        row = [line["step"], line["tokens"]]
        for name in ("acceptance_length", "acceptance_rate"):
            row += [measured[name][bound] for bound in ("value", "low", "high")]
        for name in ("conditional", "joint"):
            row += measured[name] + [None] * (length - len(measured[name]))
        rows.append(row)
    return header, rows


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """τ over the steps, with its interval, and α by position at the first and the last."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2))
    over, by_position = figure.subplots(1, 2)
    known = [line for line in lines if line["validation"]["acceptance_length"]["value"] is not None]
    steps = [line["step"] for line in known]
    tau = [line["validation"]["acceptance_length"] for line in known]
    over.plot(steps, [t["value"] for t in tau], "o-")
    # nothing is drawn where there is no interval
    low, high = ([nan if t[bound] is None else t[bound] for t in tau] for bound in ("low", "high"))
    over.fill_between(steps, low, high, alpha=0.2)
    over.set(title="replayed τ, T = 0", xlabel="step")
    for line in {id(line): line for line in (lines[0], lines[-1])}.values():
        conditional = line["validation"]["conditional"]
        places = [k for k, value in enumerate(conditional, 1) if value is not None]
        by_position.plot(
            places, [conditional[k - 1] for k in places], "o-", label=f"step {line['step']}"
        )
    by_position.set(title="α by position", xlabel="draft position", ylim=(0, 1))
    by_position.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested numbers under one key each, as wandb plots them: `validation/conditional/1`."""
    found = {}
    for name, value in values.items():
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value, start=1)}
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{name}"] = value
    return found
