"""Whatever the launcher shares out: the same training, and checkpoints that any other takes up.

Each launch has two processes on the CPU, as recipes/accelerate says.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from runs import recipe, verifier  # noqa: F401
from safetensors.torch import load_file
from tiny_run import losses, train
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from headstart.models.batch import Loss
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.losses import LossConfig
from headstart.script import ROOT
from headstart.train.run import sharding

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)
LAUNCHERS = [
    "torchrun", "fsdp2", *(pytest.param(n, marks=needs_deepspeed) for n in ("zero2", "zero3"))
]  # fmt: skip


def launch(launcher: str, output_dir: Path, **options: Any) -> subprocess.CompletedProcess:
    """tests/support/tiny_run.py on two processes."""
    words = [f"{name}={str(value).lower()}" for name, value in options.items()]
    return start(launcher, tiny_run.__file__, str(output_dir), *words)


def start(launcher: str, *words: str) -> subprocess.CompletedProcess:
    """A program on two processes."""
    if launcher == "torchrun":
        starter = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    else:
        file = ROOT / "recipes" / "accelerate" / f"{launcher}.yaml"
        starter = ["accelerate.commands.launch", "--config_file", str(file)]
        starter += ["--num_processes", "2", "--main_process_port", "0"]
    return subprocess.run(
        [sys.executable, "-m", *starter, *words], cwd=ROOT,
        capture_output=True, text=True, timeout=1800, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def succeed(launched: subprocess.CompletedProcess) -> str:
    assert launched.returncode == 0, launched.stderr[-3000:]
    return launched.stdout


def weights(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(output_dir / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def same(one: Path, other: Path, step: int) -> None:
    """Whether two runs have the same trace and weights, to float tolerance."""
    assert losses(one) == pytest.approx(losses(other), rel=1e-5)
    theirs = weights(other, step)
    for name, weight in weights(one, step).items():
        assert torch.allclose(weight.float(), theirs[name].float(), atol=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_train_like_one_and_go_on_after_a_kill(tmp_path: Path, launcher: str) -> None:
    whole, broken, one = tmp_path / "whole", tmp_path / "broken", tmp_path / "one"
    settings = {"max_steps": 4, "save_every": 2, "accumulation": 2, "schedule": '"constant"'}
    assert "done" in succeed(launch(launcher, whole, **settings))
    alone = {"save_every": 2, "accumulation": 4, "schedule": "constant"}
    train(one, max_steps=4, **alone)
    same(whole, one, 4)

    assert launch(launcher, broken, kill_at=3, **settings).returncode != 0
    assert not (broken / "checkpoints" / "step-000004").exists()
    succeed(launch(launcher, broken, resume=True, **settings))
    assert losses(broken) == losses(whole)
    theirs = weights(whole, 4)
    assert all(torch.equal(w, theirs[name]) for name, w in weights(broken, 4).items())

    # one process goes on with what two saved, and two with what one saved
    train(broken, max_steps=6, resume=True, **alone)
    train(one, max_steps=8, resume=True, **alone)
    succeed(launch(launcher, broken, **settings | {"max_steps": 8}, resume=True))
    same(broken, one, 8)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sigterm_to_one_process_saves_and_ends_all(tmp_path: Path, launcher: str) -> None:
    output = succeed(launch(launcher, tmp_path, max_steps=9, term_at=2))
    assert "stopped by SIGTERM after step 3; to go on: --training.resume true" in output
    assert weights(tmp_path, 3)
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    "launcher", ["fsdp2", pytest.param("zero3", marks=[needs_deepspeed, pytest.mark.slow])]
)
def test_shared_weights_are_whole_where_drafts_are_replayed(tmp_path: Path, launcher: str) -> None:
    settings = {"max_steps": 2, "validate_every": 1, "replayed": 3}
    succeed(launch(launcher, tmp_path / "two", **settings))
    train(tmp_path / "one", accumulation=2, **settings)
    same(tmp_path / "two", tmp_path / "one", 2)
    two, one = (
        [line["validation"] for line in tiny_run.lines(tmp_path / run, "validation")]
        for run in ("two", "one")
    )
    assert len(two) == 2
    for shared, alone in zip(two, one, strict=True):
        assert shared["prompts"] == alone["prompts"] == 3
        assert shared["acceptance_length"]["value"] == alone["acceptance_length"]["value"]


@pytest.mark.slow
@needs_deepspeed
def test_the_verifier_is_whole_in_every_process(tmp_path: Path, verifier: str) -> None:
    settings = asdict(recipe(tmp_path, verifier, max_steps=2))
    settings["data"]["limit"] = 10  # four batches, which need not be halved for two processes
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    words = ("train/eagle3.py", "--config", str(tmp_path / "recipe.yaml"))
    succeed(start("zero3", *words))
    alone = str(tmp_path / "alone")
    more = ("--training.output_dir", alone, "--training.accumulation", "2")
    subprocess.run([sys.executable, *words, *more], cwd=ROOT, check=True, timeout=1800)
    same(tmp_path / "run", tmp_path / "alone", 2)


def drafter() -> Eagle3:
    torch.manual_seed(0)
    return Eagle3.create(tiny_run.VERIFIER, Eagle3Config(), LossConfig(num_steps=2), torch.ones(64))


def test_gradients_in_one_piece_are_the_drafters_own() -> None:
    plain, piece = drafter(), drafter()
    batch = tiny_run.featurize(tiny_run.batch(2))
    shares = torch.tensor([0.1, 0.05])
    plain(batch, shares).value.backward()
    loss: Loss = sharding.Root(piece)(batch, shares)
    loss.value.backward()
    for (name, weight), own in zip(plain.named_parameters(), piece.parameters(), strict=True):
        assert torch.equal(weight.grad, own.grad), name


def test_last_gradient_comes_after_all_of_the_piece() -> None:
    """DeepSpeed takes the gradients of a piece when its inputs have theirs."""
    piece = sharding.Piece(drafter())
    end = torch.zeros((), requires_grad=True)
    missing: list[str] = []

    def look(*_: Any) -> None:
        missing.extend(name for name, p in piece.named_parameters() if p.grad is None)
        missing.append("looked")

    piece.register_full_backward_hook(look)
    loss = piece(tiny_run.featurize(tiny_run.batch(2)), torch.tensor([0.1, 0.05]), end)
    loss.value.backward()
    assert missing == ["looked"]


class Launched:
    """An Accelerator, as far as `configure` looks at it."""

    mixed_precision = "bf16"

    def __init__(self, kind: DistributedType, **plugins: Any):
        self.distributed_type = kind
        self.state = type("State", (), plugins)


@needs_deepspeed
def test_deepspeed_leaves_counting_to_the_loop_and_weights_in_float32() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=7)
    launched = Launched(DistributedType.DEEPSPEED, deepspeed_plugin=plugin)
    plugin.set_deepspeed_weakref()  # as Accelerate does
    assert is_deepspeed_zero3_enabled()
    sharding.configure(launched, 0.5)
    assert not is_deepspeed_zero3_enabled()
    config = plugin.deepspeed_config
    assert config["gradient_accumulation_steps"] == 1 and config["gradient_clipping"] == 0.5
    assert not config["bf16"]["enabled"] and config["torch_autocast"]["enabled"]
    assert sharding.in_bf16(launched) and sharding.shares_weights(launched)
    with pytest.raises(ValueError, match=r"joint needs the trained weights whole .* zero2\.yaml"):
        sharding.check_whole(launched, "joint")
    plugin.zero_stage = 1
    with pytest.raises(ValueError, match=r"zero_stage is 1; launch with 2 or 3, .*zero2\.yaml"):
        sharding.configure(launched, 0.5)


def test_fsdp_keeps_weights_in_float32_and_its_first_version_is_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    launched = Launched(DistributedType.FSDP, fsdp_plugin=plugin)
    sharding.configure(launched, 1.0)
    assert plugin.mixed_precision_policy is None and sharding.in_bf16(launched)
    plugin.fsdp_version = 1
    with pytest.raises(ValueError, match=r"fsdp_version is 1; launch with 2, .*fsdp2\.yaml"):
        sharding.configure(launched, 1.0)


def test_deepspeed_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.ops", None)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ValueError, match=r"pip install 'headstart\[deepspeed\]'"):
        sharding.compile_nothing()


def test_one_process_has_all_there_is() -> None:
    assert sharding.collect([1, 2]) == [1, 2]
    assert sharding.total(torch.tensor([3.0])).item() == 3.0
    sharding.check_whole(Accelerator(cpu=True), "joint")
