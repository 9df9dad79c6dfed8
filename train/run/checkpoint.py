"""Checkpoints of a run: written whole or not at all, the last few and the best kept.

In outputs/<run>/, `checkpoints/step-000123/` is a drafter's folder as an engine loads it; its
`resume/` holds what only training needs; `best` is a relative link to the best of them.
"""

import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import yaml
from safetensors import SafetensorError, safe_open

from headstart.eval.engines import server
from headstart.models.drafter import TrainableDrafter
from headstart.models.verifier.adapter import join, split
from headstart.models.verifier.names import split_length
from headstart.train.run.settings import RUN_LENGTH

_MAY_CHANGE = {  # on a resume: how long and how carefully to train, where to write, memory
    "verifier",  # its weights decide, by their fingerprint
    *(f"training.{name}" for name in RUN_LENGTH),
    "training.accumulation",  # by which another number of processes keeps its steps as large
    *("training.learning_rate", "training.mixed_precision"),  # the way out of a loss gone astray
    *("training.validate_every", "training.save_every", "training.keep_last"),
    *("training.output_dir", "training.resume"),
    *("data.keep_states", "data.features", "data.max_bad_rows", "loss.chunk_positions"),
}


@dataclass
class Saved:
    """An intact checkpoint and its resume state."""

    folder: Path
    recipe: dict[str, Any]
    state: dict[str, Any]
    """step, tokens, validation."""
    ranks: list[dict[str, Any]]
    """Of each rank: loader, averages, random."""
    optimizer: dict[str, Any]

    def of_rank(self, rank: int, world: int) -> dict[str, Any]:
        """What rank `rank` of `world` goes on from; another number of processes may have saved it.

        Then the loader's position stands for all of them, rank 0 has the sums of all `averages`,
        and a new rank has no `random`.
        """
        if len(self.ranks) == world:
            return self.ranks[rank]
        names = self.ranks[0]["averages"]
        sums = {name: sum(saved["averages"][name] for saved in self.ranks) for name in names}
        return {
            "loader": self.ranks[0]["loader"],
            "averages": sums if rank == 0 else {name: 0 * pair for name, pair in sums.items()},
            "random": self.ranks[rank]["random"] if rank < len(self.ranks) else None,
        }


class Checkpoints:
    """The checkpoints below `output_dir`. Only the main process saves."""

    def __init__(self, output_dir: str | Path, keep_last: int, recipe: dict[str, Any]):
        self.output_dir = Path(output_dir)
        self.folder = self.output_dir / "checkpoints"
        self.keep_last = keep_last
        self.recipe = recipe
        self.best = self.output_dir / "best"

    def steps(self) -> list[Path]:
        """Checkpoint folders, oldest first, broken ones too."""
        return sorted(self.folder.glob("step-*"))

    def open(
        self, resume: bool, check: Callable[[Path], object] = lambda folder: None
    ) -> Saved | None:
        """The checkpoint to continue from, if any.

        Args:
            check: raises a ValueError for a folder that is not this run's, whatever its recipe.

        Raises:
            ValueError: there are checkpoints and `resume` is false, or all are broken, or the
                recipe is not the one they were made with.
        """
        if not self.steps():
            return None
        if not resume:
            raise ValueError(
                f"training.output_dir {str(self.output_dir)!r} holds checkpoints already: "
                "pass --training.resume true or another output_dir"
            )
        newest = self.newest()
        if newest is None:
            raise ValueError(
                f"no checkpoint in {self.folder} can be read; pass another --training.output_dir"
            )
        check(newest.folder)
        check_same(newest, self.recipe)
        return newest

    def newest(self) -> Saved | None:
        """The newest checkpoint that can be read whole; warns of each that cannot."""
        for folder in reversed(self.steps()):
            try:
                return read(folder)
            except ValueError as error:
                warnings.warn(f"skipping broken checkpoint {folder}: {error}", stacklevel=2)
        return None

    def intact(self) -> str:
        """What stands, for error messages."""
        steps = self.steps()
        return f"{steps[-1]} is intact" if steps else "no checkpoint was written yet"

    def save(
        self,
        drafter: TrainableDrafter,
        state: dict[str, Any],
        ranks: list[dict[str, Any]],
        optimizer: dict[str, Any],
    ) -> Path:
        """Write one checkpoint and drop those no longer kept.

        Raises:
            ValueError: it cannot be written (disk full, …); the earlier ones are as they were.
        """
        target = self.folder / f"step-{state['step']:06d}"
        temporary = self.folder / f".{target.name}.partial"
        try:
            for leftover in self.folder.glob(".step-*.partial*"):  # of a killed process
                shutil.rmtree(leftover, ignore_errors=True)
            (temporary / "resume").mkdir(parents=True)
            drafter.save(temporary)
            (temporary / "recipe.yaml").write_text(yaml.safe_dump(self.recipe, sort_keys=False))
            (temporary / "README.md").write_text(model_card(self.recipe, state, drafter))
            write(optimizer, temporary / "resume" / "optimizer.pt")
            write(ranks, temporary / "resume" / "ranks.pt")
            (temporary / "resume" / "state.json").write_text(json.dumps(state))
            remove(target)  # a broken one of the same step
            temporary.rename(target)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, OSError | SafetensorError):
                raise
            raise ValueError(
                f"checkpoint {target} cannot be written: {error}; {self.intact()}. "
                "Make room and go on with --training.resume true"
            ) from error
        try:
            self.settle(target, state)
        except OSError as error:
            raise ValueError(
                f"{target} is intact, but training stopped after it: {error}"
            ) from error
        return target

    def settle(self, target: Path, state: dict[str, Any]) -> None:
        """Point `best` at the new checkpoint if it is, and drop those no longer kept."""
        self.point_best(target, state)
        best = self.best.resolve()
        for folder in self.steps()[: -self.keep_last]:
            if folder.resolve() != best:
                remove(folder)

    def point_best(self, target: Path, state: dict[str, Any]) -> None:
        """Point `best` at this checkpoint, if its validation is better."""
        if self.is_better(state["validation"], state["step"]):
            link = self.output_dir / ".best.partial"
            link.unlink(missing_ok=True)
            link.symlink_to(target.relative_to(self.output_dir), target_is_directory=True)
            link.replace(self.best)

    def is_better(self, validation: dict[str, Any] | None, step: int | None = None) -> bool:
        """Whether a validation (of `step`, if given) beats the best checkpoint's τ."""
        if validation is None or step not in (None, validation["step"]):
            return False
        try:
            state = json.loads((self.best / "resume" / "state.json").read_text())
        except (OSError, ValueError):  # none yet, or broken
            return True
        return acceptance_length(validation) > acceptance_length(state["validation"])


def acceptance_length(validation: dict[str, Any]) -> float:
    """τ; 0 where no answer was long enough to have one."""
    return validation["acceptance_length"]["value"] or 0.0


def read(folder: Path) -> Saved:
    """A checkpoint with its resume state.

    Raises:
        ValueError: a file is missing or broken; says which.
    """

    def part(name: str, reader: Callable[[Path], Any]) -> Any:
        try:
            return reader(folder / name)
        except Exception as error:  # whatever a half-written file makes its reader raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"{name}: {reason[0]}") from error

    part("model.safetensors", weight_names)
    part("config.json", read_json)
    return Saved(
        folder,
        part("recipe.yaml", lambda file: yaml.safe_load(file.read_text())),
        part("resume/state.json", read_progress),
        part("resume/ranks.pt", read_state),
        part("resume/optimizer.pt", read_state),
    )


def weight_names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as weights:
        return list(weights.keys())


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def read_progress(file: Path) -> dict[str, Any]:
    progress = read_json(file)
    if "epochs" not in progress:
        raise ValueError("it is of an earlier version; begin anew, with --init_from this folder")
    return progress


def read_state(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def remove(folder: Path) -> None:
    """Delete a checkpoint; killed halfway, it leaves nothing that looks like one."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.partial-removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def write(value: Any, path: Path) -> None:
    """torch.save, which reports a full disk as a RuntimeError about positions in the file.

    Raises:
        OSError: it cannot be written.
    """
    try:
        torch.save(value, path)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        free = shutil.disk_usage(path.parent).free
        raise OSError(f"{path.name}: {reason} ({free / 1e6:.1f} MB are free)") from error


def check_same(saved: Saved, recipe: dict[str, Any]) -> None:
    """Raise a ValueError for a recipe under which `saved` would go on as something else.

    A field that only one of the two has belongs to another version of headstart.
    """
    now = yaml.safe_load(yaml.safe_dump(recipe))  # as the saved one was read
    for section, value in now.items():
        for name, then, present in differing(section, saved.recipe.get(section, value), value):
            if name not in _MAY_CHANGE and section != "tracking":
                raise ValueError(
                    f"{saved.folder} was made with {name} = {then!r}, now it is {present!r}; "
                    "resume with the same settings, or begin a new run in another "
                    f"--training.output_dir (--init_from {saved.folder} starts from this drafter)"
                )


def differing(section: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, earlier and present value of what differs: fields, or a section that comes or goes."""
    pairs = [(section, before, now)]
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(f"{section}.{n}", before[n], value) for n, value in now.items() if n in before]
    return (pair for pair in pairs if pair[1] != pair[2])


def random_state() -> dict[str, Any]:
    """Every generator of this process, in types that `weights_only` loading takes."""
    name, keys, *rest = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def model_card(recipe: dict[str, Any], state: dict[str, Any], drafter: TrainableDrafter) -> str:
    """README.md of a checkpoint: what it is for, what it learned from, what it reached, its use."""
    verifier, data = recipe.get("verifier"), recipe.get("data", {})
    trained_on = data.get("train")
    if isinstance(trained_on, dict):  # a mixture
        trained_on = ", ".join(trained_on)
    verifier = join(str(verifier), recipe.get("adapter"))
    parts = [
        f"# A drafter for `{verifier}`",
        f"Made by headstart for speculative decoding: trained for {state['step']} optimizer steps, "
        f"{state['tokens']:,} tokens, on `{trained_on}`. The settings are in `recipe.yaml`. "
        "It drafts for this verifier alone; the fingerprint in `config.json` tells.",
    ]
    measured = state["validation"]
    if measured is not None:
        joint = ", ".join(f"{value:.3f}" for value in measured["joint"] if value is not None)
        parts += [
            f"Replayed greedily over {measured['prompts']} prompts of `{data.get('eval')}`, chain "
            f"of {len(measured['joint'])} drafts, at step {measured['step']}:",
            "| measure | value |\n|---|---|\n"
            f"| acceptance length τ | {acceptance_length(measured):.3f} |\n"
            f"| acceptance rate α | {measured['acceptance_rate']['value'] or 0:.3f} |\n"
            f"| joint acceptance by position | {joint} |",
        ]
    if drafter.serving is None:
        parts.append(drafter.unserved)
    else:
        length = min(2, drafter.max_depth or 2)
        config = {
            "method": drafter.serving,
            "model": "THIS-FOLDER",
            "num_speculative_tokens": length,
        }
        model, adapter = split(str(verifier))
        if adapter is not None:
            parts.append(f"Before it is served, merge the adapter `{adapter}` into its model.")
        more = server.unchecked(drafter.config.to_dict())
        made_for = drafter.verifier
        if made_for.length or made_for.longer:  # by which an engine chooses rotary factors
            more += ["--max-model-len", str(made_for.context_length)]
        words = server.command(split_length(model)[0], config, more)
        parts += ["Serve it:", f"    {server.shown(words, {})}"]
    return "\n\n".join(parts) + "\n"
