"""What a run says: a progress bar, `metrics.jsonl`, wandb when asked, and where it came from."""

import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from headstart.eval.reports.report import provenance
from headstart.train.run.settings import TrackingConfig
from headstart.train.run.wandb_run import WandbRun


def on_disk(method: Callable) -> Callable:
    """A failed write is the user's to mend."""

    @wraps(method)
    def wrapped(self: "Tracker", *args: Any) -> Any:
        try:
            return method(self, *args)
        except OSError as error:
            raise ValueError(f"training.output_dir cannot be written: {error}") from error

    return wrapped


class Tracker:
    """The main process writes; on the others every method does nothing."""

    def __init__(
        self, settings: TrackingConfig, output_dir: str | Path, recipe: dict[str, Any], main: bool
    ):
        if settings.log_every < 1:
            raise ValueError(f"tracking.log_every is {settings.log_every}; it must be 1 or more")
        self.settings = settings
        self.folder = Path(output_dir)
        self.recipe = recipe
        self.main = main
        self.metrics = self.folder / "metrics.jsonl"
        self.bar: tqdm | None = None
        self.run: WandbRun | None = None
        self.tau: float | None = None
        if settings.wandb and not installed("wandb"):
            raise ValueError(
                f"tracking.wandb is {settings.wandb!r} but wandb is not installed: "
                "pip install wandb, or leave tracking.wandb out"
            )

    @on_disk
    def start(self, step: int, tokens: int) -> None:
        """Begin at `step` (0, or where a checkpoint left off); later lines of a killed run go."""
        if not self.main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        truncate(self.metrics, step)
        (self.folder / "recipe.yaml").write_text(yaml.safe_dump(self.recipe, sort_keys=False))
        text = json.dumps(provenance(self.recipe), indent=2)
        (self.folder / "provenance.json").write_text(text + "\n")
        if self.settings.wandb:
            self.run = WandbRun(
                self.settings.wandb, self.folder, self.recipe, step, self.settings.wandb_offline
            )
        self.first, self.began, self.fraction = None, time.perf_counter(), 0.0
        self.bar = tqdm(initial=step, unit="step", disable=not sys.stderr.isatty(), leave=True)

    def advance(self, step: int, fraction: float) -> None:
        """One optimizer step is done, and with it `fraction` of the run."""
        if not self.main:
            return
        if self.first is None:  # time left is measured from the end of the first step on
            self.first, self.began = fraction, time.perf_counter()
        self.fraction = fraction
        self.bar.total = max(step, round(step / min(1.0, fraction)))
        self.bar.update(step - self.bar.n)

    @on_disk
    def log(self, step: int, tokens: int, numbers: dict[str, float]) -> None:
        """One line of `metrics.jsonl`: means since the last one."""
        if not self.main:
            return
        self.write({"step": step, "tokens": tokens, **numbers})
        shown = f"loss {numbers.get('loss', float('nan')):.3f}"
        if self.tau is not None:
            shown += f"  τ {self.tau:.3f}"
        shown += f"  {numbers['tokens_per_second']:.0f} tokens/s"
        self.bar.set_postfix_str(shown)
        if self.bar.disable:
            self.say(f"step {step}/{self.bar.total}  {shown}  {self.time_left()} left")

    @on_disk
    def validated(self, step: int, tokens: int, validation: dict[str, Any]) -> None:
        """One line of `metrics.jsonl` under the key `validation`."""
        if not self.main:
            return
        self.tau = validation["acceptance_length"]["value"]
        self.write({"step": step, "tokens": tokens, "validation": validation})
        by_position = " ".join(map(short, validation["conditional"]))
        self.say(f"step {step}  replayed τ {short(self.tau)}  α by position {by_position}")

    def say(self, text: str) -> None:
        """A line beside the progress bar."""
        if self.main:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def write(self, line: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.run is not None:
            self.run.log(line)

    def time_left(self) -> str:
        done = self.fraction - self.first
        if done <= 0 and self.fraction < 1:
            return "?"
        spent = time.perf_counter() - self.began
        return tqdm.format_interval(max(0, 1 - self.fraction) * spent / max(done, 1e-9))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.run is not None:
            self.run.finish()


def short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def installed(package: str) -> bool:
    """A folder that happens to have the package's name (no __init__) does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def truncate(metrics: Path, step: int) -> None:
    """Keep the lines up to `step`; a half-written last one goes too."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    kept = []
    for line in lines:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break
    partial = metrics.with_name(f".{metrics.name}.partial")
    partial.write_text("".join(kept))
    partial.replace(metrics)
