"""Train an EAGLE-1 drafter, which with a dynamic tree is EAGLE-2, and with several steps HASS.

    accelerate launch train/eagle1.py --config recipes/eagle1/tiny.yaml
    accelerate launch -m headstart.train.eagle1 --config recipes/eagle1/tiny.yaml

Writes what train/eagle3.py writes.
"""

from dataclasses import dataclass, field

from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.losses import LossConfig
from headstart.script import run_script
from headstart.train.run.recipe import CommonRecipe, train


@dataclass
class Recipe(CommonRecipe):
    """Everything that decides a run."""

    loss: LossConfig = field(default_factory=lambda: LossConfig(num_steps=1))
    drafter: Eagle1Config = field(default_factory=Eagle1Config)


def run(recipe: Recipe) -> None:
    """Train to the end of the recipe's budget."""
    train(
        recipe,
        "eagle1",
        lambda verifier, data: Eagle1.create(verifier, recipe.drafter, recipe.loss),
    )


if __name__ == "__main__":
    run_script(Recipe, run)
