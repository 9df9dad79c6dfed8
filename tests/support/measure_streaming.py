"""How much memory a streamed run takes:
`python tests/support/measure_streaming.py FOLDER [CONVERSATIONS]`.

Writes so many conversations (100,000 when not given) and a tiny verifier to FOLDER, trains one pass
over them by streaming, and prints the process's memory along the way: resident bytes, and the peak
of all. Then the same run is killed in a quarter of the pass and resumed for a while, and its losses
are compared with those of the run that was not.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FIGURES = 40  # of a run


def write_conversations(file: Path, count: int, seed: int) -> None:
    words = random.Random(seed)
    with file.open("w") as out:
        for number in range(count):
            ask, answer = (
                " ".join(f"w{words.randrange(57)}" for _ in range(words.randint(least, most)))
                for least, most in ((3, 12), (20, 120))
            )
            turns = [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"id": f"{seed}-{number}", "messages": turns}) + "\n")


def settings(folder: Path, run: str, **training: Any) -> Path:
    """The recipe of a run, as a file."""
    recipe = {
        "verifier": str(folder / "verifier"),
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "max_length": 256,
            "batch_tokens": 8192,
            "eval_limit": 4,
            "streaming": True,
        },
        "drafter": {"draft_vocab_size": 32},
        "loss": {"num_steps": 2},
        "tracking": {"log_every": 1},
        "training": {
            "output_dir": str(folder / run),
            "validate_every": 0,
            "schedule": "constant",  # the same for a run that ends earlier
            "warmup": 0.0,
            **training,
        },
    }
    file = folder / f"{run}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def watched(recipe: Path, every: int, kill_at: int | None) -> None:
    """In a process of its own: train, noting the memory; killed at a step, if one is given."""
    from headstart.script import parse
    from headstart.train import eagle3
    from headstart.train.run.tracking import Tracker

    advance = Tracker.advance

    def advance_and_note(self: Any, step: int, fraction: float) -> None:
        advance(self, step, fraction)
        if step % every == 0:
            fields = dict(
                line.split(":") for line in Path("/proc/self/status").read_text().splitlines()
            )
            now, peak = (int(fields[name].split()[0]) // 1024 for name in ("VmRSS", "VmHWM"))
            print(f"memory at step {step}: {now} MB, peak {peak} MB", flush=True)
        if step == kill_at:
            os._exit(9)

    Tracker.advance = advance_and_note
    eagle3.run(parse(eagle3.Recipe, ["--config", str(recipe)]))


def train(recipe: Path, every: int, kill_at: int | None = None) -> list[tuple[int, int, int]]:
    """Step, resident and peak megabytes along a run."""
    command = [sys.executable, __file__, "--watched", str(recipe), str(every), str(kill_at or 0)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    figures = []
    for line in program.stdout:
        if line.startswith("memory at step"):
            step, now, peak = (int(word.rstrip(":")) for word in line.split() if word[0].isdigit())
            figures.append((step, now, peak))
            print(line, end="", flush=True)
        elif "conversations" in line:
            print(line, end="", flush=True)
    program.wait()
    assert program.returncode == (9 if kill_at else 0), program.returncode
    return figures


def losses(folder: Path, run: str) -> dict[int, float]:
    lines = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def main(folder: Path, count: int) -> None:
    import tiny

    folder.mkdir(parents=True, exist_ok=True)
    tiny.save(tiny.verifier(), folder / "verifier")
    write_conversations(folder / "train.jsonl", count, seed=1)
    write_conversations(folder / "eval.jsonl", 8, seed=2)
    # 83 tokens a conversation on average, in batches of 8192 slots: a little less than one pass
    steps = count * 78 // 8192
    broken_at, every = steps // 4, max(1, steps // FIGURES)
    end = broken_at + max(2, steps // 16)
    figures = train(settings(folder, "whole", max_steps=steps, save_every=0), every)
    early = max(now for step, now, _ in figures if step <= max(every, steps // 5))
    late = max(now for step, now, _ in figures if step > steps // 5)
    print(f"resident at most {early} MB in the first fifth of the run, {late} MB after it")
    part = {"max_steps": end, "save_every": broken_at}
    train(settings(folder, "broken", **part), every, kill_at=broken_at + 1)
    train(settings(folder, "broken", resume=True, **part), every)
    whole, broken = losses(folder, "whole"), losses(folder, "broken")
    same = [step for step in broken if whole[step] == broken[step]]
    print(
        f"killed after step {broken_at} of {steps} and resumed until {end}: {len(same)} of "
        f"{len(broken)} losses are those of the unbroken run"
    )
    assert len(same) == len(broken) == end
    assert late < 1.1 * early


if __name__ == "__main__":
    if sys.argv[1] == "--watched":
        watched(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) or None)
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100_000)
