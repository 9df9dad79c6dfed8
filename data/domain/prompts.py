"""Write the prompts of the domain's conversations: how to care for household goods.

    python data/domain/prompts.py --out outputs/domain/prompts

Makes `train.jsonl` and `eval.jsonl` there: prompts only, four kinds of question, no prompt in both.
All of it is our own: templates below, filled with things below. Evaluation has things of its own,
and in each kind a template of its own beside the shared ones.
"""

import argparse
import json
import random
from pathlib import Path

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
    split = "eval" if evaluation else "train"
    rows = []
    for kind, (shared, own) in TEMPLATES.items():
        templates = [*shared, own] if evaluation else shared
        made: list[str] = []
        while len(made) < per_kind:
            prompt = rng.choice(templates).format(
                t=rng.choice(EVAL_THINGS if evaluation else THINGS),
                c=rng.choice(COLOURS),
                s=rng.choice(STAINS),
                h=rng.choice(HARMS),
            )
            if prompt not in taken:
                taken.add(prompt)
                made.append(prompt)
        rows += [
            {
                "id": f"{split}-{kind}-{number:04d}",
                "category": kind,
                "messages": [{"role": "user", "content": prompt}],
            }
            for number, prompt in enumerate(made)
        ]
    if not evaluation:
        rng.shuffle(rows)  # any prefix of the file is balanced
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="write the domain's prompts")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--train_per_kind", type=int, default=120)
    parser.add_argument("--eval_per_kind", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for split, count in (("eval", args.eval_per_kind), ("train", args.train_per_kind)):
        rows = make(split == "eval", count, args.seed, taken)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (args.out / f"{split}.jsonl").write_text(text)
        print(f"{args.out / f'{split}.jsonl'}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
