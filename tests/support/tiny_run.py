"""A tiny EAGLE-3 training run: for the tests of the loop, and as a program for those that kill it
or start two ranks: `python tests/support/tiny_run.py OUTPUT_DIR max_steps=4 …`."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tiny
import torch
from accelerate.state import AcceleratorState

from headstart.data.rows.row import Row
from headstart.eval.measures.counts import Counts, summarise
from headstart.models.batch import Batch
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig
from headstart.script import leave
from headstart.train.run.checkpoint import Checkpoints
from headstart.train.run.loop import fit, launch
from headstart.train.run.prepare import Data, make_validation
from headstart.train.run.settings import TrackingConfig, TrainingConfig
from headstart.train.run.tracking import Tracker

torch.set_num_threads(1)  # of a tiny model, more would wait for each other


def measured(tau: float | None) -> dict[str, Any]:
    """The measures of a validation whose acceptance length is `tau`; None: no round was needed."""
    if tau is None:
        return summarise([Counts("one", "all", 1, 0.0, [0.0, 0.0], [0.0, 0.0], [0.0, 0.0])])
    accepted = [4 * min(tau - 1, 1.0), 4 * max(tau - 2, 0.0)]
    return summarise([Counts("one", "all", 10, 4.0, [4.0, 4.0], [4.0, accepted[0]], accepted)])


TAU = measured(1.0)


class Batches:
    """A resumable loader over given batches, dealt out to the ranks."""

    def __init__(self, batches: list[Batch], rank: int = 0, world: int = 1):
        self.batches = batches[rank::world]
        self.position, self.world = 0, world

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "world": self.world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"] * state["world"] // self.world


def batch(rows: int, width: int = 24, seed: int = 0, supervised: bool = True) -> Batch:
    """Random tokens; a prompt of another length in each row, then one assistant turn."""
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(4, width // 2, (rows, 1), generator=random)
    positions = torch.arange(width).expand(rows, width)
    return {
        "input_ids": torch.randint(0, 64, (rows, width), generator=random),
        "loss_mask": (positions >= prompts).long() * int(supervised),
        "position_ids": positions,
        "document_ids": torch.zeros(rows, width, dtype=torch.long),
    }


def rows_of(whole: Batch) -> list[Batch]:
    return [{k: v[i : i + 1] for k, v in whole.items()} for i in range(len(whole["input_ids"]))]


VERIFIER = tiny.verifier()


def featurize(batch: Batch) -> Batch:
    states = VERIFIER.states(
        batch["input_ids"], (2, 4, 5), batch["position_ids"], batch["document_ids"]
    )
    return {**batch, "features": states.features, "last_hidden": states.last_hidden}


def train(
    output_dir: Path,
    batches: list[Batch] | None = None,
    validate: Callable[[], dict[str, Any]] | None = None,
    log_every: int = 1,
    drafter: Eagle3 | None = None,
    tracking: dict[str, Any] | None = None,
    replayed: int = 0,
    **settings: Any,
) -> tuple[Eagle3, dict[str, Any]]:
    """Train; the drafter and what `fit` returned. Of `replayed` rows, each rank replays its own."""
    settings = {"learning_rate": 1e-2, "mixed_precision": "no"} | settings
    config = TrainingConfig(str(output_dir), **settings)
    if "RANK" not in os.environ:
        AcceleratorState._reset_state()  # one process trains many times, in several precisions
    accelerator = launch(config)
    recipe = {"verifier": VERIFIER.name}
    checkpoints = Checkpoints(output_dir, config.keep_last, recipe)
    resumed = checkpoints.open(config.resume)
    if resumed is not None:
        drafter = load_checkpoint(resumed.folder, VERIFIER)
        drafter.loss = LossConfig(num_steps=2)
    elif drafter is None:
        drafter = Eagle3.create(VERIFIER, Eagle3Config(), LossConfig(num_steps=2), torch.ones(64))
    loader = Batches(
        batches or [batch(2, seed=seed) for seed in range(6)],
        accelerator.process_index,
        accelerator.num_processes,
    )
    main = accelerator.is_main_process
    if replayed:
        ids = torch.randint(0, 64, (replayed, 20), generator=torch.Generator().manual_seed(9))
        rows = [Row(row, [0] * 4 + [1] * 16, str(i)) for i, row in enumerate(ids.tolist())]
        data = Data([], rows, torch.ones(64))
        validate = make_validation(data, drafter, featurize, 2, accelerator)
    tracker = Tracker(TrackingConfig(log_every, **(tracking or {})), output_dir, recipe, main)
    result = fit(
        drafter, loader, featurize, config, accelerator, tracker, checkpoints, validate, resumed
    )
    accelerator.end_training()
    return drafter, result


def lines(output_dir: Path, key: str = "loss") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that have `key`."""
    read = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in read if key in line]


def losses(output_dir: Path) -> list[float]:
    return [line["loss"] for line in lines(output_dir)]


if __name__ == "__main__":
    options = {k: json.loads(v) for k, v in (word.split("=") for word in sys.argv[2:])}
    kill_at, term_at = options.pop("kill_at", None), options.pop("term_at", None)
    unsupervised_rank = options.pop("unsupervised_rank", False)
    if kill_at or term_at:
        advance = Tracker.advance

        def advance_and_kill(self: Tracker, step: int, fraction: float) -> None:
            advance(self, step, fraction)
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == term_at:
                os.kill(os.getpid(), signal.SIGTERM)

        Tracker.advance = advance_and_kill
    batches = [batch(2, seed=seed) for seed in range(6)]
    if unsupervised_rank:
        batches = [batch(2, seed=s, supervised=s % 2 == 0) for s in range(6)]
    train(Path(sys.argv[1]), batches, **options)
    print("done")
    leave()
