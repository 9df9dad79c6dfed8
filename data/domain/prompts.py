"""Write the prompts of the domain's conversations: how to care for household goods.

    python data/domain/prompts.py --out outputs/domain/prompts

Makes `train.jsonl` and `eval.jsonl` there: prompts only, four kinds of question, no prompt in both.
All of it is our own: templates below, filled with things below. Evaluation has things of its own,
and in each kind a template of its own beside the shared ones.
"""

import random
from functools import partial

from headstart.data.conversations import templated

THINGS = (
    """
steel kettle; wool blanket; oak table; canvas backpack; glass teapot; leather wallet; cotton towel;
wooden chair; linen apron; copper pan; silk scarf; leather sofa; denim jacket; marble shelf; wool
carpet; cotton shirt; wooden bowl; glass vase; leather belt; linen tablecloth; plastic chair; brass
bell; paper lantern; rubber mat; steel knife; felt hat; straw basket; fleece jacket; stone bench;
oak bookcase; tin box; cotton curtain
""".replace("\n", " ")
    .strip()
    .split("; ")
)
EVAL_THINGS = (
    """
porcelain mug; velvet cushion; bamboo tray; suede bag; nylon tent; pine wardrobe; iron pot; satin
dress; ceramic lamp; cork board
""".replace("\n", " ")
    .strip()
    .split("; ")
)
COLOURS = ["blue", "green", "red", "grey", "white", "black", "yellow", "brown"]
STAINS = ["coffee", "red wine", "ink", "grease", "candle wax", "tomato sauce", "mud", "chocolate"]
HARMS = ["sunlight", "moisture", "dust", "scratches", "heat", "frost"]

TEMPLATES = {  # kind of question: templates of both splits, the one that only evaluation has
    "cleaning": (
        [
            "How should a customer clean a {c} {t}? Answer in two or three sentences.",
            "How do I clean a {c} {t}? Answer in three sentences.",
            "My {c} {t} is dusty. How do I clean it? Answer in two or three sentences.",
            "What should I use to clean my {c} {t}? Answer in two or three sentences.",
            "Explain in three sentences how to clean a {c} {t}.",
        ],
        "I bought a {c} {t} from you. How should I clean it? Answer in three sentences.",
    ),
    "stains": (
        [
            "How do I remove {s} from a {c} {t}? Answer in three sentences.",
            "What is the best way to get a stain of {s} out of a {c} {t}? Answer in three "
            "sentences.",
            "I spilled {s} on my {c} {t}. How do I clean it? Answer in three sentences.",
            "How should a customer remove {s} from a {c} {t}? Answer in two or three sentences.",
            "Explain in three sentences how to remove a stain of {s} from a {c} {t}.",
        ],
        "My {c} {t} has a stain of {s}. How do I get rid of it? Answer in three sentences.",
    ),
    "storing": (
        [
            "What is the best way to store a {c} {t}? Answer in three sentences.",
            "How should I store my {c} {t} over the winter? Answer in two or three sentences.",
            "How do I pack a {c} {t} for moving house? Answer in three sentences.",
            "How should a customer store a {c} {t}? Answer in two or three sentences.",
            "Explain in three sentences how to store a {c} {t}.",
        ],
        "How do I store a {c} {t} while I travel? Answer in three sentences.",
    ),
    "protecting": (
        [
            "How do I protect a {c} {t} from {h}? Answer in three sentences.",
            "How do I dry a wet {c} {t}? Answer in three sentences.",
            "What is the best way to protect a {c} {t} from {h}? Answer in three sentences.",
            "How should a customer dry a {c} {t}? Answer in two or three sentences.",
            "Explain in three sentences how to protect a {c} {t} from {h}.",
        ],
        "How can I keep my {c} {t} safe from {h}? Answer in three sentences.",
    ),
}


def make(evaluation: bool, per_kind: int, seed: int, taken: set[str]) -> list[dict]:
    """`per_kind` distinct prompts of each kind, none of them in `taken`."""
    rng = random.Random(seed)

    def draw(shared: list[str], own: str) -> str:
        return rng.choice([*shared, own] if evaluation else shared).format(
            t=rng.choice(EVAL_THINGS if evaluation else THINGS),
            c=rng.choice(COLOURS),
            s=rng.choice(STAINS),
            h=rng.choice(HARMS),
        )

    draws = {kind: partial(draw, *templates) for kind, templates in TEMPLATES.items()}
    return templated.rows(evaluation, draws, per_kind, rng, taken)


if __name__ == "__main__":
    templated.write("write the domain's prompts", make, "kind", train=120, evaluation=15)
