"""What every training script shares: the common part of its recipe, and the run itself."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from headstart.data.states.featurize import Featurizer
from headstart.lock import only_writer
from headstart.models import vocab
from headstart.models.batch import Batch
from headstart.models.drafter import TrainableDrafter
from headstart.models.joint.lora import JointModel
from headstart.models.joint.mtp import VERIFIER, JointMTP
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig
from headstart.models.verifier.adapter import join
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import Verifier
from headstart.train.run import prepare
from headstart.train.run.checkpoint import Checkpoints
from headstart.train.run.loop import TrainingConfig, fit, launch
from headstart.train.run.plan import plan
from headstart.train.run.prepare import Data, DataConfig
from headstart.train.run.sharding import check_whole
from headstart.train.run.tracking import Tracker, TrackingConfig

Featurize = Callable[[Batch], Batch]


@dataclass
class CommonRecipe:
    """What decides a run; each script adds `drafter`, its own drafter's config."""

    data: DataConfig
    training: TrainingConfig
    verifier: str = "embedded/smollm2-135m"
    """Embedded name, local folder or Hub name of the model drafted for."""
    adapter: str | None = None
    """LoRA adapter of the verifier, which it is answered with: a folder or a Hub name."""
    verifier_dtype: str = "auto"
    """float32 or bfloat16; auto: bfloat16 where training's mixed precision is bf16."""
    loss: LossConfig = field(default_factory=LossConfig)
    init_from: str | None = None
    """Folder of a trained drafter to start from, headstart's or another program's; its shape
    replaces `drafter`. Ids that the data needs enter its draft vocabulary."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    plan: str | None = None
    """Print the memory and disk that a run would need, from the verifier's config alone, and stop:
    ddp:1, ddp:8, zero2:8, zero3:8 or fsdp2:8, launcher and processes."""


def train(
    recipe: CommonRecipe,
    kind: str,
    create: Callable[[Verifier, Data], TrainableDrafter],
    check: Callable[[Outline], None] | None = None,
    max_depth: int | None = None,
    rewrite: Callable[[Any, Featurize], Featurize] | None = None,
    joint: Callable[[Any, Path | None], JointModel | JointMTP] | None = None,
) -> None:
    """Train to the end of the recipe's budget: a new drafter, a given one, or a broken-off run's.

    Args:
        kind: type of drafter that this script trains, as checkpoints name it.
        create: makes a new one.
        check: raises a ValueError for a new one's settings that this verifier does not allow.
        max_depth: most drafts in a row that a new one makes; None: any.
        rewrite: of a drafter and what adds the verifier's states, something that does so to texts
            that it has changed first. Training's batches go through it, validation's do not.
        joint: of a drafter, and the folder of the checkpoint that it comes from, what is trained
            where its verifier is trained too; None: the verifier stays as it is.
    """
    if recipe.plan is not None:
        print(plan(recipe, kind, create, joint))
        return
    training = recipe.training
    accelerator = launch(training)
    if joint is not None:
        check_whole(accelerator, "joint")
    folder = Path(training.output_dir)
    writer = only_writer(folder / ".training.lock", f"training.output_dir {str(folder)!r}")
    with writer if accelerator.is_main_process else nullcontext():
        _train(recipe, accelerator, kind, create, check, max_depth, rewrite, joint)
    accelerator.end_training()  # else a process may abort at its exit, while others talk to it


def _train(
    recipe: CommonRecipe,
    accelerator: Accelerator,
    kind: str,
    create: Callable[[Verifier, Data], TrainableDrafter],
    check: Callable[[Outline], None] | None,
    max_depth: int | None,
    rewrite: Callable[[Any, Featurize], Featurize] | None,
    joint: Callable[[Any, Path | None], JointModel | JointMTP] | None,
) -> None:
    training, resolved = recipe.training, asdict(recipe)
    tracker = Tracker(
        recipe.tracking, training.output_dir, resolved, main=accelerator.is_main_process
    )
    checkpoints = Checkpoints(training.output_dir, training.keep_last, resolved)
    resumed = checkpoints.open(
        training.resume, lambda folder: prepare.check_kind(folder, kind, "training.resume")
    )
    if training.resume and resumed is None:
        accelerator.print(f"nothing to resume in {training.output_dir}: a new run")
    # what can be told before minutes are spent on weights and data
    with accelerator.main_process_first():  # which fetches the embedded one
        outline = Outline.read(recipe.verifier)
    prepare.check_data(recipe.data, outline)
    start, field = recipe.init_from, "init_from"
    if resumed is not None:
        start, field = resumed.folder, "training.resume"
    if start is not None:
        max_depth = prepare.check_checkpoint(start, kind, outline, field).get("num_heads")
    elif check is not None:
        check(outline)
    prepare.check_depths(max_depth, training.draft_length, recipe.loss)

    name = join(recipe.verifier, recipe.adapter)
    if resumed is not None and (resumed.folder / VERIFIER).is_dir():
        name = str(resumed.folder / VERIFIER)  # as far as it has been trained
    whole = joint is not None or recipe.adapter is not None or kind == "draft_lm"
    verifier = prepare.load_verifier(
        name, recipe.verifier_dtype, accelerator, None if whole else recipe.data.features
    )
    data = prepare.render_data(recipe.data, verifier, accelerator)
    if resumed is not None:
        drafter = load_checkpoint(resumed.folder, verifier, allow_verifier=None)
        drafter.loss = recipe.loss
        accelerator.print(f"resuming from {resumed.folder}")
    elif recipe.init_from is not None:
        drafter = prepare.initial_drafter(
            recipe.init_from, verifier, recipe.loss, data.token_counts
        )
    else:
        drafter = create(verifier, data)
    if drafter.draft_ids is not None:
        covered = vocab.coverage(data.token_counts, drafter.draft_ids.cpu())
        accelerator.print(
            f"draft vocabulary: {len(drafter.draft_ids)} of {verifier.vocab_size} ids, which are "
            f"{covered:.2%} of the supervised tokens"
        )

    model, loader = drafter, prepare.make_loader(recipe.data, data, verifier, training, accelerator)
    featurize = prepare.make_featurizer(recipe.data, data, drafter, accelerator)
    validating = featurize
    if joint is not None:
        model = joint(drafter, resumed and resumed.folder)
        featurize = model.original(featurize)
        # of the verifier as it is by then: its states cannot be kept
        validating = Featurizer(verifier, drafter.feature_layers)
    elif rewrite is not None:
        featurize = rewrite(drafter, featurize)
        if featurize is not validating:
            check_whole(accelerator, "on_policy")
    length = training.draft_length
    validate = prepare.make_validation(data, drafter, validating, length, accelerator)
    fit(model, loader, featurize, training, accelerator, tracker, checkpoints, validate, resumed)
