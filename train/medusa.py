"""Train Medusa heads, for a verifier that stays as it is or, with `joint`, is trained too.

    accelerate launch train/medusa.py --config recipes/medusa/tiny.yaml
    accelerate launch -m headstart.train.medusa --config recipes/medusa/tiny.yaml

Writes to training.output_dir: `checkpoints/`, of which `best` (by replayed acceptance length) is
what an engine loads, `metrics.jsonl`, `provenance.json` and the resolved `recipe.yaml`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from headstart.models.drafters.medusa import Medusa, MedusaConfig
from headstart.models.joint.lora import ADAPTER, JointConfig, JointModel
from headstart.models.losses import LossConfig
from headstart.models.verifier.adapter import import_peft
from headstart.models.verifier.outline import Outline
from headstart.script import run_script
from headstart.train.run.recipe import train
from headstart.train.run.settings import CommonRecipe, Script


@dataclass
class Recipe(CommonRecipe):
    """Everything that decides a run."""

    loss: LossConfig = field(default_factory=lambda: LossConfig(num_steps=4))
    """What is learned; loss.num_steps is the number of heads too."""
    drafter: MedusaConfig = field(default_factory=MedusaConfig)
    joint: JointConfig | None = None
    """Medusa-2: the verifier is tuned by LoRA. Default, Medusa-1: it stays as it is."""


def run(recipe: Recipe) -> None:
    """Train to the end of the recipe's budget."""
    if recipe.joint is not None:
        import_peft("joint")  # said before minutes are spent on weights and data

    def joint(drafter: Medusa, folder: Path | None) -> JointModel:
        return JointModel(drafter, recipe.joint, folder and folder / ADAPTER)

    def check(verifier: Outline) -> None:
        recipe.drafter.check(verifier)
        if recipe.joint is not None:
            recipe.joint.check(verifier)

    script = Script(
        "medusa",
        lambda verifier, counts: Medusa.create(verifier, recipe.drafter, recipe.loss, counts),
        check=check,
        max_depth=recipe.loss.num_steps,
        joint=joint if recipe.joint is not None else None,
    )
    train(recipe, script)


if __name__ == "__main__":
    run_script(Recipe, run)
