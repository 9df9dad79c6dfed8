"""Scaled positions in a real vLLM process: beyond 2,048 tokens as many drafts are accepted as at
the start, and at each position as many as by our chain loop.

Needs the engine's environment (`make engine`). A verifier's short texts and its long ones lie on
both sides of the context that its positions were scaled from, so a drafter served with positions
that are not scaled drafts well on the former alone: that folder is served too, as the control.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from overfit import answered_rows
from vllm_runs import LENGTH, LOSS, K, answered, check, compared
from vllm_runs import pytestmark as pytestmark

from headstart.data.rows.collate import collate
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.eval.engines.commands import speculative_config
from headstart.eval.engines.parity import Compared
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.verifier.verifier import Verifier

ROPES: dict[str, dict[str, Any]] = {
    "llama3": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 32.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
             "original_max_position_embeddings": 1024},
}  # fmt: skip
SHORT, LONG = (40, 48), (2060,)  # tokens of the prompts


def learned(verifier: Verifier, rows: list[Row]) -> Eagle3:
    """A drafter that knows most of every row, each trained on by itself: they differ in length."""
    torch.manual_seed(0)
    drafter = Eagle3.create(verifier, Eagle3Config(feature_layers=(1, 2, 4)), LOSS, torch.ones(64))
    featurize = Featurizer(verifier, drafter.feature_layers)
    batches = [featurize(collate([row], len(row.input_ids), packed=False)) for row in rows]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        right = []
        for batch in batches:
            weights = drafter.loss.step_weights() / batch["loss_mask"].sum()
            loss = drafter.train()(batch, weights)
            loss.value.backward()
            totals = [loss.metrics[f"accuracy/{s}"] for s in range(K)]
            right.append(float(sum(t for t, _ in totals) / sum(n for _, n in totals)))
        optimizer.step()
        if min(right) > 0.8:
            break
    return drafter.eval()


def unscaled(folder: Path, copy: Path) -> str:
    """The drafter's folder as one who forgets rope_scaling writes it."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"],
    }  # fmt: skip
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[list[Compared]]]:
    """Of each kind of scaling, every prompt with the drafter's folder and with the unscaled one."""
    folder = tmp_path_factory.mktemp("rope")
    random = torch.Generator().manual_seed(8)
    prompts = [torch.randint(3, 64, (n,), generator=random).tolist() for n in (*SHORT, *LONG)]
    engines, made = [], {}
    for name, rope in ROPES.items():
        verifier = tiny.verifier(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, rope_parameters=rope, max_position_embeddings=8192,
        )  # fmt: skip
        verifier.terminator_ids = ()
        rows = answered_rows(verifier, prompts, LENGTH)
        drafter = learned(verifier, rows)
        drafter.save(folder / name / "drafter")
        model = {"model": tiny.save(verifier, folder / name / "verifier"), "max_model_len": 4096}
        drafters = [
            str(folder / name / "drafter"),
            unscaled(folder / name / "drafter", folder / name / "unscaled"),
        ]
        engines += [model]
        engines += [model | {"speculative_config": speculative_config(d, K)} for d in drafters]
        made[name] = drafter, rows
    done = answered(folder, engines, prompts)
    return {
        name: [compared(*made[name], done[3 * i], one) for one in done[3 * i + 1 : 3 * i + 3]]
        for i, name in enumerate(ROPES)
    }


def shares(found: list[Compared]) -> list[float]:
    """Of each prompt, accepted drafts / drafts in vLLM."""
    return [sum(c.engine) / (K * c.rounds[1]) for c in found]


@pytest.mark.parametrize("name", ROPES)
def test_acceptance_does_not_fall_beyond_the_original_context(name, runs):
    found, wrong = runs[name]
    check(found)
    short, long = shares(found)[: len(SHORT)], shares(found)[len(SHORT) :]
    assert min(long) > 0.6 and min(long) > min(short) - 0.2, (short, long)
    for one in found[len(SHORT) :]:  # at every position of the chain, far above chance
        assert min(one.engine) > 0.5 * one.rounds[1]
    # which unscaled positions would not do, although the texts stay the verifier's own
    assert all((one.text, one.lossless) == ("identical", "identical") for one in wrong)
    assert max(shares(wrong)[len(SHORT) :]) < 0.75 * min(long), shares(wrong)
    assert not any(one.explained for one in wrong[len(SHORT) :])
