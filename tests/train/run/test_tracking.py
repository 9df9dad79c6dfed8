"""What a run writes about itself."""

import errno
import importlib.util
import json
from pathlib import Path

import pytest
import tiny_run
from tiny_run import lines, train

from headstart.train.run.settings import TrackingConfig
from headstart.train.run.tracking import Tracker, truncate


def test_every_log_line_has_the_numbers(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    for number, line in enumerate(lines(tmp_path, "step"), start=1):
        assert line["step"] == number and line["tokens"] == 48 * number
        wanted = {"loss", "loss/0", "loss/1", "accuracy/0", "accuracy/1", "lr", "grad_norm"}
        assert wanted | {"tokens_per_second"} <= set(line)


def test_without_a_terminal_each_log_interval_prints_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(
        tmp_path, max_steps=4, log_every=2, validate_every=2, validate=lambda: tiny_run.TAU
    )  # fmt: skip
    captured = capsys.readouterr()
    out = captured.out.splitlines()
    assert len(out) == 4 and "step/s" not in captured.err
    assert out[0].startswith("step 2/4  loss ") and "tokens/s" in out[0] and out[0].endswith("left")
    assert out[1] == "step 2  replayed τ 1.000  α by position 0.000 -"
    assert "τ 1.000" in out[2]


def test_provenance_and_recipe_are_written(tmp_path: Path) -> None:
    train(tmp_path, max_steps=1)
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert set(provenance) == {"command", "commit", "versions", "recipe", "time"}
    assert {"python", "torch", "transformers", "headstart"} <= set(provenance["versions"])
    assert provenance["recipe"] == {"verifier": "tiny/llama"}
    assert (tmp_path / "recipe.yaml").read_text() == "verifier: tiny/llama\n"


def test_metrics_are_cut_back_to_the_resumed_step(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    truncate(metrics, 2)
    assert metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
    truncate(metrics, 0)
    assert metrics.read_text() == ""


def test_full_disk_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Tracker, "write", no_space)
    with pytest.raises(ValueError, match=r"output_dir cannot be written: .*No space left"):
        train(tmp_path, max_steps=1)


def test_missing_wandb_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="wandb is not installed: pip install wandb"):
        Tracker(TrackingConfig(wandb="project"), tmp_path, {}, main=True)


def test_log_every_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tracking\.log_every is 0"):
        Tracker(TrackingConfig(log_every=0), tmp_path, {}, main=True)


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    tracker = Tracker(TrackingConfig(), tmp_path / "run", {}, main=False)
    tracker.start(0, 0)
    tracker.advance(1, 0.1)
    tracker.log(1, 1, {"loss": 1.0, "tokens_per_second": 1.0})
    tracker.close()
    assert not (tmp_path / "run").exists()
