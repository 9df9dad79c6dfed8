"""Drafters in a real vLLM, and the comparison with our loop."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data.rows.row import Row
from headstart.eval.engines.metrics import EngineCounts
from headstart.eval.engines.parity import Compared, judge
from headstart.eval.engines.report import line
from headstart.eval.engines.server import cpu_environment
from headstart.models.drafter import TrainableDrafter
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier
from headstart.script import ROOT

ENGINE = ROOT / ".venv-engine"


pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not (ENGINE / "installed").exists(), reason="needs vLLM in .venv-engine: make engine"
    ),
]


K, LENGTH = 3, 32


LOSS = LossConfig("hard_ce", num_steps=K, gamma=1.0)


def counts(verifier: Verifier) -> torch.Tensor:
    return torch.ones(verifier.vocab_size)


def answered(
    folder: Path,
    engines: list[dict[str, Any]],
    prompts: list[list[int]],
    may_fail: bool = False,
) -> list[list[dict[str, Any]]]:
    """What each engine did, of each prompt; with `may_fail` the text of an error, where it ended
    with one."""
    job = {"engines": engines, "prompts": prompts, "max_tokens": LENGTH, "may_fail": may_fail}
    (folder / "job.json").write_text(json.dumps(job))
    program = ENGINE / "bin" / "python"
    environment = os.environ | cpu_environment(str(program))
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    script = ROOT / "tests" / "support" / "engine_process.py"
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [program, script, folder / "job.json", folder / "result.json"],
            env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    assert done.returncode == 0, (folder / "log").read_text()[-4000:]
    return json.loads((folder / "result.json").read_text())


def counted(page: dict[str, Any]) -> EngineCounts:
    return EngineCounts(page["num_drafts"], page["num_draft_tokens"], page["per_position"], 0.0)


def compared(
    drafter: TrainableDrafter, rows: list[Row], plain: list[dict], drafted: list[dict]
) -> list[Compared]:
    found = []
    for row, without, reply in zip(rows, plain, drafted, strict=True):
        prompt = row.input_ids[: row.loss_mask.index(1)]
        counts = counted(reply["after"]).since(counted(reply["before"]))
        text = [token for step in without["steps"] for token in step]
        assert len(text) == LENGTH
        found.append(judge(drafter, row, prompt, reply["steps"], counts, text))
        print(line(found[-1]))
    return found


def check(found: list[Compared]) -> None:
    assert all(one.lossless == "identical" for one in found)
    assert all(one.text == "identical" for one in found)
    assert all(one.explained for one in found)
    accepted = sum(sum(c.engine) for c in found)
    drafted = sum(len(c.engine) * c.rounds[1] for c in found)
    assert 0.1 < accepted / drafted < 0.95  # neither hopeless nor perfect
