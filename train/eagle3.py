"""Train an EAGLE-3 drafter.

    accelerate launch train/eagle3.py --config recipes/eagle3/tiny.yaml
    accelerate launch -m headstart.train.eagle3 --config recipes/eagle3/tiny.yaml

Writes to training.output_dir: `checkpoints/`, of which `best` (by replayed acceptance length) is
what an engine loads, `metrics.jsonl`, `provenance.json` and the resolved `recipe.yaml`.
"""

from dataclasses import dataclass, field

from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.script import run_script
from headstart.train.run.recipe import train
from headstart.train.run.settings import CommonRecipe, Script


@dataclass
class Recipe(CommonRecipe):
    """Everything that decides a run."""

    drafter: Eagle3Config = field(default_factory=Eagle3Config)


def run(recipe: Recipe) -> None:
    """Train to the end of the recipe's budget."""
    script = Script(
        "eagle3",
        lambda verifier, counts: Eagle3.create(verifier, recipe.drafter, recipe.loss, counts),
        check=recipe.drafter.check,
    )
    train(recipe, script)


if __name__ == "__main__":
    run_script(Recipe, run)
