"""Prompts drawn from templates: the rows of a shipped data set, and the script that writes them."""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

Draw = Callable[[], str]
_MOST_IN_VAIN = 10_000


def rows(evaluation: bool, draws: dict[str, Draw], count: int, rng: random.Random,
         taken: set[str]) -> list[dict]:  # fmt: skip
    """`count` distinct prompts of each category, none of them in `taken`, which they join.

    Args:
        draws: category -> what draws a prompt of it from `rng`.

    Raises:
        ValueError: there are not so many prompts of a category.
    """
    split = "eval" if evaluation else "train"
    found = []
    for category, draw in draws.items():
        made: list[str] = []
        in_vain = 0  # draws since the last new prompt
        while len(made) < count:
            prompt = draw()
            in_vain += 1
            if prompt not in taken:
                taken.add(prompt)
                made.append(prompt)
                in_vain = 0
            if in_vain == _MOST_IN_VAIN:
                raise ValueError(
                    f"{count} {split} prompts of {category} are more than its templates give, "
                    f"{len(made)} or a few more; ask for fewer"
                )
        found += [
            {
                "id": f"{split}-{category}-{number:04d}",
                "category": category,
                "messages": [{"role": "user", "content": prompt}],
            }
            for number, prompt in enumerate(made)
        ]
    if not evaluation:
        rng.shuffle(found)  # any prefix of the file is balanced
    return found


def write(
    description: str,
    make: Callable[[bool, int, int, set[str]], list[dict]],
    unit: str,
    train: int,
    evaluation: int,
) -> None:
    """The script: `train.jsonl` and `eval.jsonl`, prompts only.

    Args:
        make: evaluation, prompts of each category, seed, prompts already taken -> rows.
        unit: what a category is called.
        train, evaluation: default number of prompts of each.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument(f"--train_per_{unit}", dest="train", type=int, default=train)
    parser.add_argument(f"--eval_per_{unit}", dest="eval", type=int, default=evaluation)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for split in ("train", "eval"):
        if getattr(args, split) < 0:
            name = f"--{split}_per_{unit}"
            parser.error(f"argument {name}: must be 0 or more, got {getattr(args, split)}")
    taken: set[str] = set()
    for split in ("eval", "train"):
        try:
            made = make(split == "eval", getattr(args, split), args.seed, taken)
        except ValueError as error:
            parser.error(f"argument --{split}_per_{unit}: {error}")
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{split}.jsonl").write_text(text)
        except OSError as error:
            parser.error(f"argument --out: {error}; pass another folder")
        print(f"{args.out / f'{split}.jsonl'}: {len(made)} prompts")
