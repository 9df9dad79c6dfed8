"""Train Hydra heads.

    accelerate launch train/hydra_heads.py --config recipes/hydra_heads/tiny.yaml
    accelerate launch -m headstart.train.hydra_heads --config recipes/hydra_heads/tiny.yaml

Writes to training.output_dir: `checkpoints/`, with `best` (by replayed acceptance length) among
them, `metrics.jsonl`, `provenance.json` and the resolved `recipe.yaml`. No engine loads Hydra
heads; headstart decodes with them.
"""

from dataclasses import dataclass, field

from headstart.models.drafters.hydra_heads import HydraHeads, HydraHeadsConfig
from headstart.models.losses import LossConfig
from headstart.script import run_script
from headstart.train.run.recipe import train
from headstart.train.run.settings import CommonRecipe, Script


@dataclass
class Recipe(CommonRecipe):
    """Everything that decides a run."""

    loss: LossConfig = field(default_factory=lambda: LossConfig(num_steps=4))
    """What is learned; loss.num_steps is the number of heads too."""
    drafter: HydraHeadsConfig = field(default_factory=HydraHeadsConfig)


def run(recipe: Recipe) -> None:
    """Train to the end of the recipe's budget."""
    script = Script(
        "hydra_heads",
        lambda verifier, counts: HydraHeads.create(verifier, recipe.drafter, recipe.loss, counts),
        check=recipe.drafter.check,
        max_depth=recipe.loss.num_steps,
    )
    train(recipe, script)


if __name__ == "__main__":
    run_script(Recipe, run)
