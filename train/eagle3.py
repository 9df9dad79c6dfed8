"""Train an EAGLE-3 drafter.

    accelerate launch train/eagle3.py --config recipes/eagle3/tiny.yaml
    accelerate launch -m headstart.train.eagle3 --config recipes/eagle3/tiny.yaml

Writes to training.output_dir: `checkpoints/`, of which `best` (by replayed acceptance length) is
what an engine loads, `metrics.jsonl`, `provenance.json` and the resolved `recipe.yaml`.
"""

from dataclasses import asdict, dataclass, field

from headstart.models import vocab
from headstart.models.eagle3 import Eagle3, Eagle3Config
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig
from headstart.script import run_script
from headstart.train import prepare
from headstart.train.checkpoint import Checkpoints
from headstart.train.loop import TrainingConfig, fit, launch
from headstart.train.prepare import DataConfig
from headstart.train.tracking import Tracker, TrackingConfig


@dataclass
class Recipe:
    """Everything that decides a run."""

    data: DataConfig
    training: TrainingConfig
    verifier: str = "embedded/smollm2-135m"
    """Embedded name, local folder or Hub name of the model drafted for."""
    verifier_dtype: str = "auto"
    """float32 or bfloat16; auto: bfloat16 where training's mixed precision is bf16."""
    drafter: Eagle3Config = field(default_factory=Eagle3Config)
    loss: LossConfig = field(default_factory=LossConfig)
    init_from: str | None = None
    """Folder of a trained drafter to start from; its shape replaces `drafter`."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


def run(recipe: Recipe) -> None:
    """Train to the end of the recipe's budget."""
    training = recipe.training
    accelerator = launch(training)
    resolved = asdict(recipe)
    tracker = Tracker(
        recipe.tracking, training.output_dir, resolved, main=accelerator.is_main_process
    )
    checkpoints = Checkpoints(training.output_dir, training.keep_last, resolved)
    resumed = checkpoints.open(training.resume)

    verifier = prepare.load_verifier(recipe.verifier, recipe.verifier_dtype, accelerator)
    data = prepare.render_data(recipe.data, verifier, accelerator)
    if resumed is not None:
        drafter = load_checkpoint(resumed.folder, verifier, allow_verifier=None)
        drafter.loss = recipe.loss
        accelerator.print(f"resuming from {resumed.folder}")
    elif recipe.init_from is not None:
        drafter = prepare.initial_drafter(recipe.init_from, verifier, recipe.loss)
    else:
        drafter = Eagle3.create(verifier, recipe.drafter, recipe.loss, data.token_counts)
    if drafter.draft_ids is not None:
        covered = vocab.coverage(data.token_counts, drafter.draft_ids.cpu())
        accelerator.print(
            f"draft vocabulary: {len(drafter.draft_ids)} of {verifier.vocab_size} ids, which are "
            f"{covered:.2%} of the supervised tokens"
        )

    loader = prepare.make_loader(recipe.data, data, verifier, training, accelerator)
    featurize = prepare.make_featurizer(recipe.data, data, drafter, accelerator)
    validate = prepare.make_validation(data, drafter, featurize, training.draft_length, accelerator)
    fit(drafter, loader, featurize, training, accelerator, tracker, checkpoints, validate, resumed)


if __name__ == "__main__":
    run_script(Recipe, run)
