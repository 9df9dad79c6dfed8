"""Checkpoints: whole or not at all, the last few and the best."""

import errno
import json
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors import safe_open
from tiny_run import VERIFIER, losses, measured, train

from headstart.models.loading import load_checkpoint
from headstart.train.run import checkpoint
from headstart.train.run.checkpoint import Checkpoints, random_state, restore_random


def measures(*taus: float | None) -> Callable[[], dict[str, Any]]:
    """A validation whose τ takes these values in turn."""
    values = iter(taus)
    return lambda: measured(next(values))


def names(output_dir: Path) -> list[str]:
    return sorted(path.name for path in (output_dir / "checkpoints").iterdir())


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def file_limit() -> Iterator[Callable[[int], None]]:
    """A function that lets no file grow beyond so many bytes: writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_checkpoint_is_a_drafter_with_its_resume_state_apart(tmp_path: Path) -> None:
    drafter, _ = train(tmp_path, max_steps=2)
    folder = tmp_path / "checkpoints" / "step-000002"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "recipe.yaml", "resume",
    ]  # fmt: skip
    loaded = load_checkpoint(folder, VERIFIER)
    for saved, trained in zip(loaded.parameters(), drafter.parameters(), strict=True):
        assert torch.equal(saved, trained)


def test_frozen_verifier_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    drafter, _ = train(tmp_path, max_steps=1)
    folder = tmp_path / "checkpoints" / "step-000001"
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        saved = set(weights.keys())
    assert saved == set(drafter.state_dict())
    optimizer = torch.load(folder / "resume" / "optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == len(list(drafter.parameters()))
    own = sum(weight.numel() for weight in drafter.parameters())
    for file in folder.rglob("*"):
        assert file.stat().st_size < 2 * 4 * own + 50_000


def test_last_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    train(
        tmp_path, max_steps=5, save_every=1, keep_last=2, validate_every=1,
        validate=measures(1.1, 1.5, 1.2, 1.3, None),
    )  # fmt: skip
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    assert (tmp_path / "best").readlink() == Path("checkpoints/step-000002")
    assert (tmp_path / "best" / "model.safetensors").exists()


def test_better_validation_is_saved_between_two_saves(tmp_path: Path) -> None:
    train(
        tmp_path, max_steps=4, save_every=0, validate_every=1, validate=measures(1.1, 1.5, 1.2, 1)
    )
    assert (tmp_path / "best").resolve().name == "step-000002"


def test_best_survives_a_resume(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2, validate_every=1, validate=measures(1.5, 1.2))
    train(tmp_path, max_steps=4, validate_every=1, validate=measures(1.4, 1.3), resume=True)
    assert (tmp_path / "best").resolve().name == "step-000001"


def test_best_is_found_after_a_kill_right_before_it_was_pointed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    settle = Checkpoints.settle

    def killed(self: Checkpoints, target: Path, state: dict[str, Any]) -> None:
        if state["step"] == 2:
            raise Killed
        settle(self, target, state)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Checkpoints, "settle", killed)
        train(tmp_path, max_steps=4, validate_every=1, validate=measures(1.1, 1.5))
    assert (tmp_path / "best").resolve().name == "step-000001"
    train(tmp_path, max_steps=4, validate_every=1, validate=measures(1.2, 1.3), resume=True)
    assert (tmp_path / "best").resolve().name == "step-000002"


def test_resume_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, max_steps=3, save_every=1, keep_last=3)
    for broken in ("step-000002", "step-000003"):
        (tmp_path / "checkpoints" / broken / "config.json").unlink()
    resumed = []

    def save(self: Checkpoints, *_: Any) -> None:
        resumed.extend(names(tmp_path))

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.warns(UserWarning, match="skipping broken checkpoint"):
        train(tmp_path, max_steps=3, keep_last=1, resume=True)
    assert resumed[:1] == ["step-000001"]


def test_checkpoint_of_an_earlier_version_is_told_apart(tmp_path: Path) -> None:
    train(tmp_path, max_steps=1)
    file = tmp_path / "checkpoints" / "step-000001" / "resume" / "state.json"
    state = json.loads(file.read_text())
    del state["epochs"]
    file.write_text(json.dumps(state))
    with (
        pytest.warns(UserWarning, match=r"state\.json: it is of an earlier version; .*--init_from"),
        pytest.raises(ValueError, match="no checkpoint in"),
    ):
        train(tmp_path, max_steps=2, resume=True)


def test_run_folder_can_be_moved(tmp_path: Path) -> None:
    train(tmp_path / "old", max_steps=1, validate=measures(1.5))
    (tmp_path / "old").rename(tmp_path / "new")
    assert (tmp_path / "new" / "best" / "config.json").exists()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model.safetensors", "File too large"),
        ("resume/optimizer.pt", r"optimizer\.pt: .*MB are free"),
        ("config.json", "No space left on device"),
    ],
)
def test_full_disk_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, said: str
) -> None:
    whole = tmp_path / "whole"
    train(whole, max_steps=4)
    run = tmp_path / "run"
    with monkeypatch.context() as patch, file_limit() as limit, pytest.raises(ValueError) as caught:

        def validate() -> dict[str, Any]:  # the disk fills up after the first checkpoint
            first = run / "checkpoints" / "step-000002"
            if first.exists():
                if file == "config.json":
                    patch.setattr(tiny_run.Eagle3, "save", no_space)
                else:
                    limit((first / file).stat().st_size - 5000)
            return tiny_run.TAU

        train(run, max_steps=4, save_every=2, validate_every=3, validate=validate)
    message = str(caught.value)
    assert re.search(f"step-000003 cannot be written: .*{said}", message)
    assert "step-000002 is intact" in message and "\n" not in message
    assert names(run) == ["step-000002"]
    train(run, max_steps=4, resume=True)
    assert losses(run) == losses(whole)


@pytest.mark.parametrize("file", [
    "model.safetensors", "config.json", "recipe.yaml", "resume/state.json", "resume/optimizer.pt",
    "resume/ranks.pt",
])  # fmt: skip
def test_broken_newest_checkpoint_is_skipped_with_a_warning(tmp_path: Path, file: str) -> None:
    train(tmp_path / "whole", max_steps=5)
    run = tmp_path / "run"
    train(run, max_steps=4, save_every=2, schedule="constant", warmup=0.0)
    broken = run / "checkpoints" / "step-000004" / file
    broken.write_bytes(b"{" + broken.read_bytes()[:10])
    said = rf"skipping broken checkpoint .*step-000004: {re.escape(file)}: "
    with pytest.warns(UserWarning, match=said):
        assert Checkpoints(run, 2, {}).newest().state["step"] == 2
    with pytest.warns(UserWarning, match="skipping broken checkpoint"):
        train(run, max_steps=4, resume=True, schedule="constant", warmup=0.0)
    assert Checkpoints(run, 2, {}).newest().state["step"] == 4
    assert len(losses(run)) == 4


def test_failure_after_a_checkpoint_says_that_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoints, "settle", no_space)
    with pytest.raises(ValueError, match=r"step-000001 is intact, but .*No space left on device"):
        train(tmp_path, max_steps=1)


RECIPE = {
    "verifier": "a", "init_from": None, "drafter": {"feature_layers": None, "init": "verifier"},
    "data": {"train": "a.jsonl", "keep_states": True}, "loss": {"gamma": 0.8},
    "training": {"max_steps": 4, "max_tokens": None, "seed": 0, "learning_rate": 1e-4},
    "tracking": {"log_every": 10},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint_of_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    drafter = tiny_run.Eagle3.create(
        VERIFIER, tiny_run.Eagle3Config(), tiny_run.LossConfig(), torch.ones(64)
    )
    state = {"step": 1, "tokens": 0, "epochs": 0.0, "validation": None}
    Checkpoints(folder, 2, RECIPE).save(drafter, state, [{}], {})
    return folder


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("drafter", "feature_layers", (2, 4)),
        ("drafter", "init", "random"),
        ("data", "train", "b.jsonl"),
        ("loss", "gamma", 0.9),
        ("training", "seed", 1),
    ],
)
def test_resume_with_settings_that_would_be_ignored_or_mixed_is_refused(
    checkpoint_of_recipe: Path, section: str, name: str, value: Any
) -> None:
    before = RECIPE[section][name]
    recipe = RECIPE | {section: RECIPE[section] | {name: value}}
    shown = list(value) if isinstance(value, tuple) else value
    with pytest.raises(ValueError) as caught:
        Checkpoints(checkpoint_of_recipe, 2, recipe).open(resume=True)
    said = f"step-000001 was made with {section}.{name} = {before!r}, now it is {shown!r}; resume"
    assert said in str(caught.value) and "--init_from" in str(caught.value)


def test_resume_may_change_what_does_not_matter_to_what_was_done(
    checkpoint_of_recipe: Path,
) -> None:
    training = {"max_steps": None, "max_tokens": 9, "learning_rate": 1e-5, "resume": True}
    recipe = RECIPE | {
        "verifier": "moved/a",
        "training": RECIPE["training"] | training,
        "tracking": {"log_every": 1},
        "data": RECIPE["data"] | {"keep_states": False, "of_another_version": 1},
    }
    assert Checkpoints(checkpoint_of_recipe, 2, recipe).open(resume=True).state["step"] == 1


def test_only_broken_checkpoints_are_an_error(tmp_path: Path) -> None:
    train(tmp_path, max_steps=1)
    (tmp_path / "checkpoints" / "step-000001" / "config.json").unlink()
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"no checkpoint in .* can be"):
        train(tmp_path, max_steps=2, resume=True)


def test_process_killed_while_saving_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):  # not an Exception: nothing gets to clean up
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    train(tmp_path, max_steps=4, save_every=2)
    before = losses(tmp_path)
    drafter = load_checkpoint(tmp_path / "checkpoints" / "step-000004", VERIFIER)
    state = {"step": 5, "tokens": 0, "epochs": 0.0, "validation": None}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(json, "dumps", killed)  # the last file of a checkpoint
        Checkpoints(tmp_path, 2, {}).save(drafter, state, [{}], {})
    assert ".step-000005.partial" in names(tmp_path)
    _, result = train(tmp_path, max_steps=6, resume=True)
    assert result["step"] == 6 and losses(tmp_path)[:4] == before
    assert names(tmp_path) == ["step-000004", "step-000006"]


def test_random_generators_are_restored() -> None:
    state = random_state()
    first = torch.rand(3), checkpoint.random.random(), checkpoint.numpy.random.rand()
    restore_random(state)
    again = torch.rand(3), checkpoint.random.random(), checkpoint.numpy.random.rand()
    assert torch.equal(first[0], again[0]) and first[1:] == again[1:]
