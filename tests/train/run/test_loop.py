"""The loop's invariants, on a tiny EAGLE-3 drafter."""

import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
import torch
from tiny_run import batch, losses, rows_of, train

from headstart.models.drafters.eagle3 import Eagle3
from headstart.models.losses import LossConfig
from headstart.train.run.loop import count, rate
from headstart.train.run.settings import TrainingConfig, check

PROGRAM = [sys.executable, tiny_run.__file__]
TWO_RANKS = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
    tiny_run.__file__,
]  # fmt: skip


def run(program: list[str], output_dir: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*program, str(output_dir), *options], capture_output=True, text=True, timeout=120
    )


def difference(one: Eagle3, other: Eagle3) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_accumulation_1_by_8_equals_8_by_1(tmp_path: Path) -> None:
    whole = batch(8)
    one, _ = train(tmp_path / "a", [whole], max_steps=1, warmup=0.0, schedule="constant")
    eight, _ = train(
        tmp_path / "b", rows_of(whole), max_steps=1, warmup=0.0, schedule="constant", accumulation=8
    )
    assert difference(one, eight) < 1e-6
    initial, _ = train(tmp_path / "c", [whole], max_steps=1, learning_rate=0.0)
    assert difference(one, initial) > 1e-3


def test_logged_loss_is_the_mean_over_supervised_slots_whatever_the_accumulation(
    tmp_path: Path,
) -> None:
    whole = batch(8)
    train(tmp_path / "a", [whole], max_steps=1, learning_rate=0.0)
    drafter, _ = train(
        tmp_path / "b", rows_of(whole), max_steps=1, learning_rate=0.0, accumulation=8
    )
    (one,), (eight,) = (tiny_run.lines(tmp_path / run) for run in "ab")
    assert one["loss"] == pytest.approx(eight["loss"], rel=1e-6)
    assert one["accuracy/0"] == eight["accuracy/0"]
    weights = LossConfig(num_steps=2).step_weights()
    by_step = weights[0] * eight["loss/0"] + weights[1] * eight["loss/1"]
    assert eight["loss"] == pytest.approx(by_step.item())
    slots = count([whole], range(2))[:2]
    with torch.no_grad():
        value = drafter(tiny_run.featurize(whole), weights / slots).value
    assert eight["loss"] == pytest.approx(value.item(), rel=1e-6)


def test_log_line_is_the_mean_over_its_steps(tmp_path: Path) -> None:
    train(tmp_path / "a", max_steps=6)
    train(tmp_path / "b", max_steps=6, log_every=3)
    each, thirds = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert thirds == pytest.approx([sum(each[:3]) / 3, sum(each[3:]) / 3])


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    train(tmp_path, [batch(2)], max_steps=30, log_every=5)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.5


def test_learning_rate_moves_once_an_optimizer_step(tmp_path: Path) -> None:
    train(tmp_path, max_steps=4, accumulation=3)
    expected = [
        rate(TrainingConfig("", max_steps=4, learning_rate=1e-2), i / 4) for i in (1, 2, 3, 4)
    ]
    assert [line["lr"] for line in tiny_run.lines(tmp_path)] == pytest.approx(expected)
    assert expected[-1] == pytest.approx(1e-3)


def test_rate_warms_up_and_ends_at_the_floor() -> None:
    settings = TrainingConfig("", max_steps=1, learning_rate=1.0, warmup=0.1, floor=0.2)
    assert [rate(settings, f) for f in (0.05, 0.1, 0.55, 1.0)] == pytest.approx([0.5, 1, 0.6, 0.2])
    settings.schedule = "constant"
    assert [rate(settings, f) for f in (0.05, 0.1, 1.0)] == pytest.approx([0.5, 1, 1])


def test_length_is_given_in_epochs_or_tokens_too(tmp_path: Path) -> None:
    _, result = train(tmp_path / "a", num_epochs=2, accumulation=4)  # 6 batches of 48 tokens
    assert (result["step"], result["tokens"]) == (3, 3 * 4 * 48)
    _, result = train(tmp_path / "b", max_tokens=100)
    assert (result["step"], result["tokens"]) == (3, 144)


def test_padding_is_not_counted_as_tokens() -> None:
    padded = batch(1)
    padded["document_ids"][:, 20:] = -1
    assert count([padded], range(2))[-1] == 20


def test_step_without_supervised_slots_contributes_nothing(tmp_path: Path) -> None:
    train(tmp_path / "a", [batch(2, supervised=False), batch(2)], max_steps=2, warmup=0.0)
    first, second = tiny_run.lines(tmp_path / "a", "step")
    assert "loss" not in first and first["grad_norm"] == 0
    assert math.isfinite(second["loss"])
    train(
        tmp_path / "b", [batch(2, seed=1), batch(2, supervised=False)], max_steps=1, accumulation=2
    )
    train(tmp_path / "c", [batch(2, seed=1)], max_steps=1)
    assert losses(tmp_path / "b") == losses(tmp_path / "c")


def test_loss_that_is_not_finite_names_the_step_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    calls = []

    def poison() -> dict:
        calls.append(1)
        if len(calls) == 2:
            drafter.fc.weight.data.fill_(float("nan"))
        return tiny_run.TAU

    drafter, _ = train(tmp_path / "unused", max_steps=1)
    with pytest.raises(ValueError, match=r"step 3: the loss is nan.*step-000001 is intact"):
        train(tmp_path / "run", max_steps=9, validate=poison, validate_every=1, drafter=drafter)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def test_drafter_trains_again_after_validation(tmp_path: Path) -> None:
    modes = []

    def validate() -> dict:
        modes.append(drafter.training)
        return tiny_run.TAU

    drafter, _ = train(tmp_path / "unused", max_steps=1)
    train(tmp_path / "run", max_steps=4, validate=validate, validate_every=2, drafter=drafter)
    assert modes == [False, False] and drafter.training
    assert [v["step"] for v in tiny_run.lines(tmp_path / "run", "validation")] == [2, 4]


def test_bf16_trains_float32_weights(tmp_path: Path) -> None:
    drafter, _ = train(tmp_path, [batch(2)], max_steps=10, mixed_precision="bf16")
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of max_steps, num_epochs and max_tokens, not none"),
        ({"max_steps": 1, "num_epochs": 1}, "not max_steps and num_epochs"),
        ({"max_steps": 0}, "training.max_steps is 0"),
        ({"max_steps": 1, "accumulation": 0}, "training.accumulation is 0"),
        ({"max_steps": 1, "draft_length": 0}, "training.draft_length is 0"),
        ({"max_steps": 1, "draft_length": 10**9}, "training.draft_length .* 4096 or less"),
        ({"max_steps": 1, "seed": -1}, r"training.seed is -1; it must be in \[0, 2\^32\)"),
        ({"max_steps": 1, "learning_rate": -1.0}, "training.learning_rate is -1.0"),
        ({"max_steps": 1, "warmup": 3.0}, "training.warmup is 3.0"),
    ],
)
def test_impossible_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(TrainingConfig("", **settings))


# ---- stopping and going on -------------------------------------------------------------------


def test_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    settings = {"max_steps": 9, "accumulation": 2, "save_every": 4, "log_every": 3}
    whole, _ = train(tmp_path / "whole", **settings)
    options = [f"{name}={value}" for name, value in settings.items()]
    killed = run(PROGRAM, tmp_path / "broken", *options, "kill_at=6")
    assert killed.returncode == -signal.SIGKILL
    assert len(losses(tmp_path / "broken")) == 1
    resumed, result = train(tmp_path / "broken", resume=True, **settings)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert result["step"] == 9
    assert difference(whole, resumed) == 0


def test_finished_run_has_nothing_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(tmp_path, max_steps=2)
    before = losses(tmp_path)
    _, result = train(tmp_path, max_steps=2, resume=True)
    assert result["step"] == 2 and losses(tmp_path) == before
    assert "nothing to resume" in capsys.readouterr().out


def test_folder_with_checkpoints_is_not_overwritten(tmp_path: Path) -> None:
    train(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match=r"pass --training\.resume true or another output_dir"):
        train(tmp_path, max_steps=1)


def test_resume_without_checkpoints_starts_anew(tmp_path: Path) -> None:
    _, result = train(tmp_path, max_steps=1, resume=True)
    assert result["step"] == 1


def test_sigterm_saves_and_ends_with_code_0(tmp_path: Path) -> None:
    stopped = run(PROGRAM, tmp_path, "max_steps=9", "term_at=2", "log_every=2")
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped by SIGTERM after step 3; to go on: --training.resume true" in stopped.stdout
    train(tmp_path, max_steps=9, log_every=2, resume=True)
    train(tmp_path / "whole", max_steps=9, log_every=2)
    assert losses(tmp_path) == losses(tmp_path / "whole")


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    ranks = run(TWO_RANKS, tmp_path / "two", "max_steps=3", "save_every=2")
    assert ranks.returncode == 0, ranks.stderr
    train(tmp_path / "one", max_steps=3, accumulation=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_another_number_of_processes_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    killed = run(
        TWO_RANKS, tmp_path / "two", "max_steps=4", "log_every=3", "save_every=2", "kill_at=3"
    )
    assert killed.returncode != 0
    settings = {"max_steps": 4, "accumulation": 2, "log_every": 3}  # step 3's line spans the change
    train(tmp_path / "two", resume=True, **settings)
    assert "2 processes began this run, 1 go on: each row still comes" in capsys.readouterr().out
    train(tmp_path / "one", **settings)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
def test_two_ranks_resume_and_may_lack_supervised_slots(tmp_path: Path) -> None:
    options = ["max_steps=4", "save_every=2", "unsupervised_rank=true"]
    assert run(TWO_RANKS, tmp_path / "whole", *options).returncode == 0
    assert run(TWO_RANKS, tmp_path / "broken", *options, "kill_at=3").returncode != 0
    resumed = run(TWO_RANKS, tmp_path / "broken", *options, "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


def test_length_given_twice_is_refused_with_a_way_out() -> None:
    with pytest.raises(ValueError, match=r"exactly one of .*--training\.max_tokens null"):
        check(TrainingConfig("", max_steps=4, max_tokens=100))
    with pytest.raises(ValueError, match=r"not none; such as --training\.num_epochs 1"):
        check(TrainingConfig(""))


@pytest.mark.parametrize("below", [".", "a/b"])
def test_output_dir_that_cannot_be_a_folder_is_refused_at_once(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    wrong = str(tmp_path / "file" / below)
    message = rf"training\.output_dir '{wrong}': {tmp_path}/file is not a folder; pass another"
    with pytest.raises(ValueError, match=message):
        check(TrainingConfig(wrong, max_steps=1))
    check(TrainingConfig(str(tmp_path / "new" / "run"), max_steps=1))
