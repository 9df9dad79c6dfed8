"""A run in three steps: what it is (settings), what it needs (prepare), what it does (the loop)."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from accelerate import Accelerator

from headstart.lock import only_writer
from headstart.models.verifier.outline import Outline
from headstart.train.run.checkpoint import Checkpoints
from headstart.train.run.loop import fit, launch
from headstart.train.run.plan import plan
from headstart.train.run.prepare import prepare
from headstart.train.run.settings import CommonRecipe, Script
from headstart.train.run.sharding import check_whole
from headstart.train.run.start import check_before, check_kind
from headstart.train.run.tracking import Tracker


def train(recipe: CommonRecipe, script: Script) -> None:
    """Train to the end of the recipe's budget: a new drafter, a given one, or a broken-off run's.

    Raises:
        ValueError: a setting, a model or data that the run cannot be made with.
    """
    if recipe.plan is not None:
        print(plan(recipe, script))
        return
    accelerator = launch(recipe.training)
    if script.joint is not None:
        check_whole(accelerator, "joint")
    folder = Path(recipe.training.output_dir)
    writer = only_writer(folder / ".training.lock", f"training.output_dir {str(folder)!r}")
    with writer if accelerator.is_main_process else nullcontext():
        _train(recipe, script, accelerator)
    accelerator.end_training()  # else a process may abort at its exit, while others talk to it


def _train(recipe: CommonRecipe, script: Script, accelerator: Accelerator) -> None:
    training, resolved = recipe.training, asdict(recipe)
    main = accelerator.is_main_process
    tracker = Tracker(recipe.tracking, training.output_dir, resolved, main)
    checkpoints = Checkpoints(training.output_dir, training.keep_last, resolved)
    resumed = checkpoints.open(
        training.resume, lambda folder: check_kind(folder, script.kind, "training.resume")
    )
    if training.resume and resumed is None:
        accelerator.print(f"nothing to resume in {training.output_dir}: a new run")
    with accelerator.main_process_first():  # which fetches an embedded verifier
        outline = Outline.read(recipe.verifier)
    check_before(recipe, script, outline, resumed)
    needs = prepare(recipe, script, accelerator, resumed)
    fit(
        needs.model,
        needs.loader,
        needs.featurize,
        training,
        accelerator,
        tracker,
        checkpoints,
        needs.validate,
        resumed,
    )
