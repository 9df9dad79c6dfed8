"""The training script, from a verifier's folder and a JSONL file to a checkpoint."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from accelerate.state import AcceleratorState
from tiny_run import lines, losses

from headstart.data.render import Row
from headstart.models import drafter as drafters
from headstart.models.eagle3 import Eagle3Config
from headstart.models.losses import LossConfig
from headstart.script import parse
from headstart.train import eagle3
from headstart.train.eagle3 import Recipe
from headstart.train.loop import TrainingConfig
from headstart.train.prepare import DataConfig, count_tokens, initial_drafter

torch.set_num_threads(1)


def save_verifier(folder: Path, **overrides: Any) -> str:
    verifier = tiny.verifier(**overrides)
    verifier.model.save_pretrained(folder)
    verifier.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_verifier(tmp_path_factory.mktemp("verifier"))


def write_conversations(path: Path, count: int, seed: int) -> str:
    words = random.Random(seed)

    def text(least: int, most: int) -> str:
        return " ".join(f"w{words.randrange(50)}" for _ in range(words.randint(least, most)))

    with path.open("w") as file:
        for number in range(count):
            turns = [
                {"role": "user", "content": text(2, 6)},
                {"role": "assistant", "content": text(4, 12)},
            ] * 2
            file.write(json.dumps({"id": f"{seed}-{number}", "messages": turns}) + "\n")
    return str(path)


def recipe(folder: Path, verifier: str, **training: Any) -> Recipe:
    data = DataConfig(
        write_conversations(folder / "train.jsonl", 12, seed=1),
        write_conversations(folder / "eval.jsonl", 5, seed=2),
        max_length=64,
        batch_tokens=128,
        eval_limit=3,
    )
    training = {"max_steps": 4, "mixed_precision": "no", "validate_every": 2} | training
    return Recipe(
        data,
        TrainingConfig(str(folder / "run"), **training),
        verifier,
        drafter=Eagle3Config(draft_vocab_size=32),
        loss=LossConfig(num_steps=2),
    )


def run(recipe: Recipe) -> None:
    AcceleratorState._reset_state()
    eagle3.run(recipe)


def test_run_leaves_a_drafter_for_its_verifier(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    run(recipe(tmp_path, verifier))
    output = capsys.readouterr().out
    assert "12 conversations, 12 rows" in output and "3 rows are replayed" in output
    assert "draft vocabulary: 32 of 64 ids" in output
    drafter = drafters.load(tmp_path / "run" / "best", tiny.verifier())
    assert len(drafter.draft_ids) == 32
    validations = [line["validation"] for line in lines(tmp_path / "run", "validation")]
    assert [v["step"] for v in validations] == [2, 4]
    assert validations[0]["prompts"] == 3 and len(validations[0]["conditional"]) == 4
    with pytest.raises(ValueError, match="was trained for"):
        drafters.load(tmp_path / "run" / "best", tiny.verifier(seed=1))


def test_resolved_recipe_can_be_run_again(tmp_path: Path, verifier: str) -> None:
    run(recipe(tmp_path, verifier))
    again = parse(Recipe, ["--config", str(tmp_path / "run" / "recipe.yaml")])
    assert again == recipe(tmp_path, verifier)
    again.training.output_dir = str(tmp_path / "again")
    run(again)
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


def test_resumed_run_equals_an_unbroken_one(tmp_path: Path, verifier: str) -> None:
    broken = recipe(tmp_path, verifier, max_steps=8, save_every=3, keep_last=9)
    broken.tracking.log_every = 2
    run(broken)
    whole = lines(tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        if folder.name > "step-000003":  # within a log interval and within an epoch
            (folder / "config.json").unlink()
    broken.training.resume = True
    with pytest.warns(UserWarning, match="skipping broken"):
        run(broken)
    resumed = lines(tmp_path / "run")
    for line in whole + resumed:
        del line["tokens_per_second"]
    assert resumed == whole and len(whole) == 4


def test_init_from_another_verifiers_drafter_warns(tmp_path: Path, verifier: str) -> None:
    run(recipe(tmp_path, verifier))
    best = str(tmp_path / "run" / "best")
    with pytest.warns(UserWarning, match="was trained for .*, which is not this"):
        drafter = initial_drafter(best, tiny.verifier(seed=1), LossConfig(num_steps=3))
    assert drafter.loss.num_steps == 3
    start = recipe(tmp_path, verifier)
    start.init_from, start.training.output_dir = best, str(tmp_path / "second")
    start.training.learning_rate = 0.0
    run(start)
    first, *_ = lines(tmp_path / "run", "validation")  # the best; later ones were no better
    for line in lines(tmp_path / "second", "validation"):
        assert line["validation"]["conditional"] == first["validation"]["conditional"]


def test_only_supervised_tokens_are_counted(tmp_path: Path) -> None:
    counts = count_tokens([Row([3, 4, 4, 5], [0, 1, 1, 0], "a"), Row([5, 4], [0, 2], "b")], 7)
    assert counts.tolist() == [0, 0, 0, 0, 3, 0, 0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("verifier", "nowhere/nothing", "verifier 'nowhere/nothing' cannot be loaded"),
        ("data.train", "missing.jsonl", "missing.jsonl"),
        ("data.max_length", 1024, "data.max_length is 1024; it must be in 2 … 512"),
        ("drafter.draft_vocab_size", 65, "draft_vocab_size must be in 1 … 64"),
        (
            "drafter.feature_layers",
            (2, 9),
            "feature_layers must be distinct, ascending ids in 1 … 8",
        ),
        ("init_from", "nowhere", "drafter 'nowhere' is not a checkpoint"),
        ("training.max_steps", -1, "training.max_steps is -1"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, verifier: str, field: str, value: Any, message: str
) -> None:
    wrong = recipe(tmp_path, verifier)
    *path, name = field.split(".")
    setattr(getattr(wrong, path[0]) if path else wrong, name, value)
    with pytest.raises(ValueError, match=message):
        run(wrong)


def test_data_without_a_supervised_token_is_an_error(tmp_path: Path, verifier: str) -> None:
    wrong = recipe(tmp_path, verifier)
    row = {"id": "a", "messages": [{"role": "user", "content": "w1 w2"}]}
    Path(wrong.data.train).write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="not one supervised token"):
        run(wrong)


def test_tiny_recipe_is_one_of_the_scripts(tmp_path: Path) -> None:
    parsed = parse(Recipe, ["--config", "recipes/eagle3/tiny.yaml", "--training.resume", "true"])
    assert parsed.training.resume
    with pytest.raises(ValueError, match="learning_rte"):
        parse(Recipe, ["--config", "recipes/eagle3/tiny.yaml", "--training.learning_rte", "1"])
    saved = yaml.safe_load(Path("recipes/eagle3/tiny.yaml").read_text())
    assert saved["verifier"] == parsed.verifier
