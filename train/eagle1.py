"""Train an EAGLE-1 drafter, which with a dynamic tree is EAGLE-2.

    accelerate launch train/eagle1.py --config recipes/eagle1/tiny.yaml
    accelerate launch -m headstart.train.eagle1 --config recipes/eagle1/tiny.yaml

Writes what train/eagle3.py writes.
"""

from dataclasses import dataclass, field

from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.losses import LossConfig
from headstart.script import run_script
from headstart.train.run.recipe import train
from headstart.train.run.settings import CommonRecipe, Script


@dataclass
class Recipe(CommonRecipe):
    """Everything that decides a run."""

    loss: LossConfig = field(default_factory=lambda: LossConfig(num_steps=1))
    drafter: Eagle1Config = field(default_factory=Eagle1Config)


def run(recipe: Recipe) -> None:
    """Train to the end of the recipe's budget."""
    script = Script(
        "eagle1",
        lambda verifier, counts: Eagle1.create(verifier, recipe.drafter, recipe.loss),
    )
    train(recipe, script)


if __name__ == "__main__":
    run_script(Recipe, run)
