"""What the report scripts are tested on: a saved verifier and its answers to a few prompts."""

import json
from collections.abc import Iterable
from pathlib import Path

import tiny

from headstart.data import regenerate
from headstart.models.verifier.verifier import Verifier


def make(folder: Path, prompts: Iterable[tuple[str, int]]) -> Verifier:
    """The verifier, saved in `folder / "verifier"`; its answers at temperatures 0 and 1 lie in
    t0.jsonl and t1.jsonl.

    Args:
        prompts: the category of each, and its number there.
    """
    tiny.save(tiny.verifier(max_position_embeddings=96), folder / "verifier")
    with (folder / "prompts.jsonl").open("w") as file:
        for category, i in prompts:
            messages = [{"role": "user", "content": f"w{i} w{len(category)} w{7 + 3 * i}"}]
            row = {"id": f"{category}-{i}", "category": category, "messages": messages}
            file.write(json.dumps(row) + "\n")
    for temperature in (0, 1):
        regenerate.run(
            regenerate.Regenerate(
                out=str(folder / f"t{temperature}.jsonl"),
                verifier=str(folder / "verifier"),
                prompts=str(folder / "prompts.jsonl"),
                max_new_tokens=20,
                temperature=float(temperature),
            )
        )
    return Verifier.load(str(folder / "verifier"))
