"""The way of one setting from a recipe to the tensor that it decides:

    python tests/support/follow.py

Runs `train/eagle3.py` with a tiny verifier up to the choice of its draft vocabulary, and prints the
files of headstart that are entered, in order, and how often the way climbs back to train/, where
the setting lies, from another floor.
"""

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import headstart

ROOT = Path(headstart.__file__).parent


FLOORS = ("models/", "data/", "eval/", "train/")


class Arrived(BaseException):
    """The tensor is made."""


def follow(run: Any, recipe: Any) -> tuple[list[str], list[str], int]:
    """Files in the order in which they are entered, those of them that are handed the recipe or the
    drafter's part of it, and climbs back into train/."""
    entered: list[str] = []
    handed: list[str] = []
    held = (id(recipe), id(recipe.drafter))
    climbs = 0

    def place(frame: FrameType | None) -> str | None:
        if frame is None or frame.f_code.co_name in ("<module>", "<listcomp>", "<genexpr>"):
            return None
        file = Path(frame.f_code.co_filename)
        if not file.is_relative_to(ROOT):
            return None
        name = str(file.relative_to(ROOT))
        return name if name.startswith(FLOORS) else None

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal climbs
        here = place(frame)
        if here is None:
            return
        if event == "call":
            if here not in entered:
                entered.append(here)
            if here not in handed and any(id(v) in held for v in frame.f_locals.values()):
                handed.append(here)
            if here == choose and frame.f_code.co_name == "choose":
                raise Arrived
        elif event == "return":
            above = place(frame.f_back)
            if above is not None and above.startswith("train/"):
                climbs += not here.startswith("train/")

    choose = "models/vocab.py"
    sys.setprofile(watch)
    try:
        run()
    except Arrived:
        pass
    finally:
        sys.setprofile(None)
    return entered, handed, climbs


def main() -> None:
    import tiny

    from headstart.script import parse
    from headstart.train import eagle3

    with tempfile.TemporaryDirectory() as folder:
        tiny.save(tiny.verifier(), Path(folder, "verifier"))
        row = '{"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": '
        Path(folder, "train.jsonl").write_text(row + '"w2 w3 w4 w5"}]}\n')
        words = [
            *("--verifier", f"{folder}/verifier", "--data.train", f"{folder}/train.jsonl"),
            *("--training.output_dir", f"{folder}/run", "--training.max_steps", "1"),
            *("--data.max_length", "32", "--drafter.draft_vocab_size", "40"),
        ]
        recipe = parse(eagle3.Recipe, words)
        entered, handed, climbs = follow(lambda: eagle3.run(recipe), recipe)
    print("\n".join(entered))
    print(f"\n{len(entered)} files entered, {climbs} returns to train/")
    print(f"{len(handed)} are handed the setting: {', '.join(handed)}")


if __name__ == "__main__":
    main()
