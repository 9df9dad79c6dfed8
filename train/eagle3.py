"""Train an EAGLE-3 drafter.

    accelerate launch train/eagle3.py --config recipes/eagle3/tiny.yaml
    accelerate launch -m headstart.train.eagle3 --config recipes/eagle3/tiny.yaml

Writes to training.output_dir: `checkpoints/`, of which `best` (by replayed acceptance length) is
what an engine loads, `metrics.jsonl`, `provenance.json` and the resolved `recipe.yaml`.
"""

from dataclasses import dataclass, field

from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.script import run_script
from headstart.train.run.recipe import CommonRecipe, train


@dataclass
class Recipe(CommonRecipe):
    """Everything that decides a run."""

    drafter: Eagle3Config = field(default_factory=Eagle3Config)


def run(recipe: Recipe) -> None:
    """Train to the end of the recipe's budget."""
    train(
        recipe,
        "eagle3",
        lambda verifier, data: Eagle3.create(
            verifier, recipe.drafter, recipe.loss, data.token_counts
        ),
        check=recipe.drafter.check,
    )


if __name__ == "__main__":
    run_script(Recipe, run)
