"""What a run hands to wandb, read back from the file that `wandb sync` would send."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from tiny_run import lines, train

from headstart.train.run.wandb_run import WandbRun, flat, plot, table

FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
BLOCK, HEADER = 32768, 7


def chunks(data: bytes) -> Iterator[bytes]:
    """The records of wandb's log: blocks of 32 KiB, in which a record may come in parts."""
    place, parts = HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        place += HEADER
        parts += data[place : place + length]
        place += length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def sent(folder: Path) -> dict[str, Any]:
    """Of all runs in `folder`: config, history (key -> values) and artifacts (name -> files)."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"config": {}, "history": {}, "artifacts": {}}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for chunk in chunks(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(chunk)
            for item in record.run.config.update:
                found["config"][item.key] = json.loads(item.value_json)
            for item in record.history.item:
                key = item.key or "/".join(item.nested_key)
                found["history"].setdefault(key, []).append(json.loads(item.value_json))
            artifact = record.artifact
            if not artifact.name:
                artifact = record.request.log_artifact.artifact
            if artifact.name:
                entries = {entry.path for entry in artifact.manifest.contents}
                found["artifacts"][artifact.name] = (artifact.type, entries)
    return found


def test_a_run_and_its_resume_are_on_wandb_with_all_that_they_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    tracking = {"wandb": "project", "wandb_offline": True}
    settings = {"validate": lambda: tiny_run.measured(1.5), "validate_every": 2}
    folder = Path("outputs/run")
    train(folder, max_steps=2, tracking=tracking, **settings)
    train(folder, max_steps=3, tracking=tracking, resume=True, **settings)
    wandb.teardown()  # its own process has written everything then
    made = sent(folder)
    assert made["config"]["verifier"] == "tiny/llama"
    history = made["history"]
    assert history["loss"] == [line["loss"] for line in lines(folder)]
    assert history["validation/acceptance_length/value"] == [1.5, 1.5]
    assert history["acceptance/nrows"] == [1, 2], "the first run's row too"
    assert history["acceptance by step and position/_type"] == ["image-file"] * 2
    kind, files = made["artifacts"]["run-drafter"]
    assert kind == "model" and {"config.json", "model.safetensors", "recipe.yaml"} <= files
    assert not [file for file in files if file.startswith("resume")]
    kind, files = made["artifacts"]["run-run"]
    assert kind == "run" and files == {"recipe.yaml", "provenance.json", "metrics.jsonl"}
    assert sorted(path.name for path in tmp_path.iterdir()) in (["outputs"], ["home", "outputs"])
    assert (folder / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_wandb_that_is_not_to_be_reached_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"tracking\.wandb is 'p' but .*pass --tracking\.wandb_of"):
        WandbRun("p", tmp_path, {}, 0, offline=False)


def validation(step: int, tau: float | None) -> dict[str, Any]:
    return {"step": step, "tokens": 48 * step, "validation": tiny_run.measured(tau)}


def test_table_has_a_row_for_each_validation() -> None:
    header, rows = table([validation(2, 1.5), validation(4, None)])
    assert header[:3] == ["step", "tokens", "τ"] and header[-1] == "joint 2"
    assert all(len(row) == len(header) for row in rows)
    first, second = (dict(zip(header, row, strict=True)) for row in rows)
    assert (first["step"], first["tokens"], first["τ"]) == (2, 96, 1.5)
    assert first["conditional 1"] == 0.5 and second["τ"] is None


@pytest.mark.parametrize("taus", [[1.5], [1.2, 1.5, 1.9], [None], [1.5, None]])
def test_picture_is_drawn_of_whatever_was_measured(
    tmp_path: Path, taus: list[float | None]
) -> None:
    plot([validation(step, tau) for step, tau in enumerate(taus)], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_nested_numbers_get_a_key_each() -> None:
    nested = {"step": 3, "validation": {"acceptance_length": {"value": 1.5}, "conditional": [0.5]}}
    assert flat(nested) == {
        "step": 3,
        "validation/acceptance_length/value": 1.5,
        "validation/conditional/1": 0.5,
    }
