"""A plan knows what a run takes, from the verifier's config alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from runs import SCRIPTS, recipe, run, verifier  # noqa: F401
from torch.autograd.graph import saved_tensors_hooks

from headstart.models.joint.lora import JointConfig
from headstart.models.verifier.verifier import Verifier
from headstart.script import ROOT
from headstart.train.run import plan as planning
from headstart.train.run.plan import Weightless, parse, plan
from headstart.train.run.settings import CommonRecipe


def planned(settings: CommonRecipe, kind: str, launcher: str = "ddp:1") -> planning.Plan:
    """The plan of a recipe; the script's own maker of drafters."""
    made: list[planning.Plan] = []
    script, _ = SCRIPTS[kind]
    settings.plan = launcher
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.train.run.recipe.plan", lambda *args: made.append(plan(*args)))
        script.run(settings)
    return made[0]


def create(kind: str, settings: CommonRecipe) -> Any:
    """The real drafter of a recipe."""
    made = tiny.verifier()
    found: list[Any] = []
    script, _ = SCRIPTS[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            script, "train", lambda _, added: found.append(added.create(made, torch.ones(64)))
        )
        script.run(settings)
    return found[0]


@pytest.mark.parametrize("kind", sorted(SCRIPTS.keys() - {"draft_lm"}))
def test_parameters_and_saved_tensors_are_those_of_the_real_drafter(
    tmp_path: Path,
    verifier: str,
    kind: str,
) -> None:
    settings = recipe(tmp_path, verifier, kind)
    settings.data.packed = False
    found = planned(settings, kind)
    drafter = create(kind, settings)
    assert found.drafter_parameters == sum(p.numel() for p in drafter.parameters())
    assert found.verifier_parameters == sum(p.numel() for p in drafter.verifier.model.parameters())

    kept: dict[int, int] = {}  # address -> bytes
    held = []
    own = {p.untyped_storage().data_ptr() for p in drafter.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(0, 64, (2, 64))
    positions = torch.arange(64).expand(2, 64)
    batch = {"input_ids": ids, "loss_mask": torch.ones_like(ids), "position_ids": positions}
    batch["document_ids"] = torch.zeros_like(ids)
    states = drafter.verifier.states(ids, drafter.feature_layers)
    batch |= {"features": states.features, "last_hidden": states.last_hidden}
    given = {t.untyped_storage().data_ptr() for t in batch.values() if t is not None}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        for hidden in drafter.unroll(batch, settings.loss.num_steps):
            pack(hidden)
    real = sum(size for address, size in kept.items() if address not in given)
    assert found.activations == pytest.approx(real, rel=0.1)


def test_sizes_are_shared_out_as_the_launcher_does(
    tmp_path: Path, verifier: str
) -> None:  # fmt: skip
    settings = recipe(tmp_path, verifier, accumulation=3)
    one = planned(settings, "eagle3", "ddp:1")
    whole = 4 * one.drafter_parameters
    assert (one.weights, one.gradients, one.optimizer, one.gathered) == (whole, whole, 2 * whole, 0)
    assert one.tokens_per_step == 3 * 128 and one.feature_bytes == 4 * 32 * 4
    assert one.features == 128 * one.feature_bytes
    ddp, zero2, zero3, fsdp2 = (
        planned(settings, "eagle3", f"{name}:4") for name in ("ddp", "zero2", "zero3", "fsdp2")
    )
    assert (ddp.total, ddp.tokens_per_step) == (one.total, 4 * one.tokens_per_step)
    assert zero2.weights == whole and zero2.optimizer == 2 * whole // 4
    assert zero3.weights == fsdp2.weights == whole // 4
    assert zero3.gathered == 2 * whole
    half = recipe(tmp_path, verifier, mixed_precision="bf16")
    assert planned(half, "eagle3").verifier == one.verifier // 2
    assert planned(half, "eagle3").activations < 0.8 * one.activations


def test_nothing_is_loaded_and_nothing_is_written(
    tmp_path: Path,
    verifier: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    settings = recipe(tmp_path, verifier)
    (tmp_path / "verifier").mkdir()
    config = (Path(verifier) / "config.json").read_text()
    (tmp_path / "verifier" / "config.json").write_text(config)  # and no more
    settings.verifier, settings.data.train = str(tmp_path / "verifier"), "not-there.jsonl"
    settings.plan = "zero3:8"
    monkeypatch.setattr(Verifier, "load", None)
    run(settings)
    said = capsys.readouterr().out
    assert "eagle3 for" in said and "zero3 on 8 processes" in said
    assert "features: 512 bytes a token; cached on disk 0.5 GB for each million tokens" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["ddp", "zero3", "zero1:8", "ddp:0", "8", "fsdp:2"])
def test_unknown_launcher_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"plan is .*; pass launcher and processes, such as ddp:1"):
        parse(text)


def test_what_cannot_be_planned_is_named(tmp_path: Path, verifier: str) -> None:
    settings = recipe(tmp_path, verifier, "medusa")
    settings.plan, settings.joint = "ddp:1", JointConfig(rank=2)
    with pytest.raises(ValueError, match="trains the verifier too"):
        run(settings)
    settings = recipe(tmp_path, verifier, "draft_lm")
    settings.plan = "ddp:1"
    with pytest.raises(ValueError, match=r"trains a language model \(draft_lm\) cannot be planned"):
        run(settings)
    with pytest.raises(ValueError, match=r"'nowhere/nothing': its config cannot be read"):
        Weightless.load("nowhere/nothing")


# glibc: what is freed goes back to the system at once, or its own hoard would be measured too
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_plan_agrees_with_measured_memory(tmp_path: Path, kind: str) -> None:
    """Within 15 %, on the embedded verifier."""
    words = [
        "--config", f"recipes/{kind}/smollm2-135m.yaml", "--data.limit", "40", "--data.eval",
        "null", "--data.keep_states", "false", "--training.max_tokens", "null",
        "--training.max_steps", "8", "--training.mixed_precision", "no", "--data.batch_tokens",
        "2048", "--data.max_length", "512", "--training.output_dir", str(tmp_path / "run"),
    ]  # fmt: skip

    def start(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True, text=True, cwd=ROOT, timeout=1200, env=os.environ | GIVE_BACK,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    said = start(f"train/{kind}.py", *words, "--plan", "ddp:1")
    predicted = float(re.search(r"total\s+([\d.]+)", said)[1]) * 1e9
    output = start("tests/support/measured_run.py", kind, *words)
    measured = int(re.search(r"measured (\d+)", output)[1])
    print(json.dumps({"kind": kind, "predicted": predicted, "measured": measured}))
    print(said)
    assert predicted == pytest.approx(measured, rel=0.15)
