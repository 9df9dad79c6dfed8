"""Train multi-token prediction modules, for a verifier that stays as it is or together with it.

    accelerate launch train/mtp.py --config recipes/mtp/tiny.yaml
    accelerate launch -m headstart.train.mtp --config recipes/mtp/tiny.yaml

Writes what train/eagle3.py writes; with `mode: joint`, a checkpoint holds the verifier too.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from accelerate import PartialState

from headstart.models.drafters.mtp import MTP, check_all_trained
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.formats import mtp_native
from headstart.models.joint.mtp import JointMTP, check_loss
from headstart.models.losses import LossConfig
from headstart.models.saved import read_tensors
from headstart.models.verifier.outline import Outline
from headstart.script import run_script
from headstart.train.run.recipe import train
from headstart.train.run.settings import CommonRecipe, Script, TrainingConfig


@dataclass
class Recipe(CommonRecipe):
    """Everything that decides a run."""

    loss: LossConfig = field(default_factory=lambda: LossConfig(num_steps=1, gamma=1.0))
    """What is learned; with gamma 1, λ/D times the loss of each of D = loss.num_steps steps."""
    drafter: MTPConfig = field(default_factory=MTPConfig)
    mode: Literal["graft", "joint", "native"] = "graft"
    """graft: modules for a verifier that stays as it is; joint: the verifier is trained too, in
    full, on its own next token and on the modules' loss; native: modules that the verifier's folder
    holds, written back into a folder like it, `verifier/` in training.output_dir."""


def scheduled(config: MTPConfig, training: TrainingConfig) -> MTPConfig:
    """The config with λ's switch as a share of the run.

    Raises:
        ValueError: a switch in tokens, of a run that is not.
    """
    if config.switch_tokens is None:
        return config
    if training.max_tokens is None:
        raise ValueError(
            f"drafter.switch_tokens is {config.switch_tokens}, but the run's length is not given "
            "in tokens; give training.max_tokens, or drafter.switch"
        )
    return replace(config, switch=min(1.0, config.switch_tokens / training.max_tokens))


def check(recipe: Recipe, verifier: Outline) -> None:
    """Raise a ValueError for new modules that would not all be trained, or native ones that are
    not there."""
    number = recipe.drafter.num_modules
    if recipe.mode == "native":
        number = mtp_native.find(verifier.name).num_modules
    check_all_trained(number, recipe.loss)


def run(recipe: Recipe) -> None:
    """Train to the end of the recipe's budget."""
    config = scheduled(recipe.drafter, recipe.training)
    if recipe.mode == "joint":
        check_loss(recipe.loss)
    create = mtp_native.create if recipe.mode == "native" else MTP.create
    script = Script(
        "mtp",
        lambda verifier, counts: create(verifier, config, recipe.loss),
        check=lambda verifier: check(recipe, verifier),
        joint=(lambda drafter, _: JointMTP(drafter)) if recipe.mode == "joint" else None,
    )
    train(recipe, script)
    if recipe.mode == "native" and PartialState().is_main_process:
        write_back(recipe)


def write_back(recipe: Recipe) -> None:
    """Lay the best checkpoint's modules into a folder like the verifier's."""
    output_dir = Path(recipe.training.output_dir)
    folders = [output_dir / "best", *sorted(output_dir.glob("checkpoints/step-*"), reverse=True)]
    best = next(folder for folder in folders if folder.exists())
    target = output_dir / "verifier"
    mtp_native.write_back(read_tensors(best), mtp_native.find(recipe.verifier), target)
    print(f"{target} is the verifier with the modules of {best.resolve().name}")


if __name__ == "__main__":
    run_script(Recipe, run)
