"""The training scripts, from a verifier's folder and a JSONL file to a checkpoint.

A new script adds itself to `SCRIPTS`.
"""

import copy
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from runs import JOINT, ONES, SCRIPTS, recipe, run, verifier, write_conversations  # noqa: F401
from safetensors.torch import load_file
from tiny_run import lines, losses

from headstart.data.rows import packing
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.models.drafter import TrainableDrafter
from headstart.models.drafters.draft_lm import DraftLMConfig
from headstart.models.drafters.medusa import Medusa, MedusaConfig
from headstart.models.joint.lora import JointConfig
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import Verifier
from headstart.script import parse, run_script
from headstart.train import eagle3, medusa
from headstart.train.run import checkpoint, prepare
from headstart.train.run import recipe as shared
from headstart.train.run.checkpoint import Saved
from headstart.train.run.prepare import count_tokens
from headstart.train.run.settings import DataConfig
from headstart.train.run.start import check_checkpoint, initial_drafter
from headstart.train.run.tracking import Tracker

torch.set_num_threads(1)


def test_run_leaves_a_drafter_for_its_verifier(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    run(recipe(tmp_path, verifier))
    output = capsys.readouterr().out
    assert "12 conversations, 12 rows" in output and "3 rows are replayed" in output
    assert "draft vocabulary: 32 of 64 ids" in output
    drafter = load_checkpoint(tmp_path / "run" / "best", tiny.verifier())
    assert len(drafter.draft_ids) == 32
    validations = [line["validation"] for line in lines(tmp_path / "run", "validation")]
    assert [v["step"] for v in validations] == [2, 4]
    assert validations[0]["prompts"] == 3 and len(validations[0]["conditional"]) == 4
    with pytest.raises(ValueError, match="was trained for"):
        load_checkpoint(tmp_path / "run" / "best", tiny.verifier(seed=1))


@pytest.mark.parametrize("kind", SCRIPTS)
def test_every_trained_tensor_is_saved_and_every_saved_tensor_is_trained(
    tmp_path: Path, verifier: str, kind: str
) -> None:
    """A head that drafts go through but that is not saved, or saved but never trained, passes
    unnoticed until it is served."""
    drafters: list[TrainableDrafter] = []

    def fit(drafter: TrainableDrafter, *arguments: Any) -> None:
        drafters.append(copy.deepcopy(drafter.state_dict()))
        real_fit(drafter, *arguments)
        drafters.append(drafter)

    real_fit = shared.fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "fit", fit)
        run(recipe(tmp_path, verifier, kind, learning_rate=1e-2, warmup=0.0))
    before, drafter = drafters
    last = tmp_path / "run" / "checkpoints" / "step-000004"
    saved = load_file(last / "model.safetensors")
    trained = {name for name, weight in drafter.named_parameters() if weight.requires_grad}
    loaded = load_checkpoint(last, tiny.verifier())
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, drafter.get_parameter(name)), f"{name} came back different"
    assert trained and trained == {name for name, _ in loaded.named_parameters()}
    for name in trained:
        assert not torch.equal(before[name], drafter.get_parameter(name)), f"{name} is not trained"
    rows = loaded.verifier.head.weight
    rows = rows if loaded.draft_ids is None else rows[loaded.draft_ids]
    others = {
        name for name, tensor in saved.items()
        if tensor.is_floating_point() and not tensor.equal(rows)
    }  # fmt: skip
    assert len(others) == len(trained)  # but for the verifier's head, which engines want there


@pytest.mark.parametrize("kind", SCRIPTS)
def test_resolved_recipe_can_be_run_again(tmp_path: Path, verifier: str, kind: str) -> None:
    run(recipe(tmp_path, verifier, kind))
    script, _ = SCRIPTS[kind]
    again = parse(script.Recipe, ["--config", str(tmp_path / "run" / "recipe.yaml")])
    assert again == recipe(tmp_path, verifier, kind)
    again.training.output_dir = str(tmp_path / "again")
    run(again)
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


@pytest.mark.parametrize(
    "kind, keep_states", [*((kind, True) for kind in SCRIPTS | JOINT), ("eagle3", False)]
)
def test_resumed_run_equals_an_unbroken_one(
    tmp_path: Path, verifier: str, monkeypatch: pytest.MonkeyPatch, kind: str, keep_states: bool
) -> None:
    groups: list[list[int]] = []  # sizes of the verifier's groups, of each featurizer

    def make_featurizer(*arguments: Any) -> Featurizer:
        made = prepare_featurizer(*arguments)
        groups.append([len(g) for g in {id(g): g for g in made.groups.values()}.values()])
        return made

    prepare_featurizer = prepare.make_featurizer
    monkeypatch.setattr(prepare, "make_featurizer", make_featurizer)
    monkeypatch.setattr("headstart.data.states.featurize._GROUP_TOKENS", 128)
    broken = recipe(tmp_path, verifier, kind, max_steps=8, save_every=3, keep_last=9)
    broken.data.keep_states = keep_states
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
    assert groups[0] == groups[1]
    assert (len(groups[0]) > 2 and max(groups[0]) > 1) if keep_states else groups[0] == []


def test_interrupted_run_ends_with_code_130_and_can_be_resumed(
    tmp_path: Path,
    verifier: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    settings = recipe(tmp_path, verifier, save_every=2)
    run(settings)
    whole = losses(tmp_path / "run")
    settings.training.output_dir = str(tmp_path / "broken")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(asdict(settings)))
    advance = Tracker.advance

    def advance_and_interrupt(self: Tracker, step: int, fraction: float) -> None:
        advance(self, step, fraction)
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "argv", ["eagle3.py", "--config", str(tmp_path / "recipe.yaml")])
    # A shell lets its background jobs ignore the signal, and with them pytest.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(Tracker, "advance", advance_and_interrupt)
        AcceleratorState._reset_state()
        run_script(eagle3.Recipe, eagle3.run)
    assert stop.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped by the user"
    checkpoints = tmp_path / "broken" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-000002"]
    settings.training.resume = True
    run(settings)
    assert losses(tmp_path / "broken") == whole


def test_two_runs_do_not_write_to_one_folder(
    tmp_path: Path, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = recipe(tmp_path, verifier), recipe(tmp_path, verifier, resume=True)
    said = rf"training\.output_dir '.*run': process {os.getpid()} on .* is writing there"

    def fit(*arguments: Any) -> None:
        with pytest.raises(ValueError, match=said):
            run(second)
        fitted.append(real(*arguments))

    real, fitted = shared.fit, []
    monkeypatch.setattr(shared, "fit", fit)
    run(first)
    assert len(fitted) == 1 and not list((tmp_path / "run").glob(".*"))


def test_resume_with_other_settings_or_another_verifier_is_refused(
    tmp_path: Path, verifier: str
) -> None:
    settings = recipe(tmp_path, verifier)
    run(settings)
    written = (tmp_path / "run" / "recipe.yaml").read_text()
    settings.training.resume, settings.training.max_steps = True, 5
    settings.drafter.draft_vocab_size = 16
    with pytest.raises(ValueError, match=r"with drafter\.draft_vocab_size = 32, now it is 16"):
        run(settings)
    settings.drafter.draft_vocab_size = 32
    settings.verifier = tiny.save(tiny.verifier(seed=1), tmp_path / "other")
    with pytest.raises(ValueError, match=r"was trained for .*its own verifier$"):
        run(settings)  # training has no --allow_verifier
    assert (tmp_path / "run" / "recipe.yaml").read_text() == written


def test_init_from_another_verifiers_drafter_warns(tmp_path: Path, verifier: str) -> None:
    run(recipe(tmp_path, verifier))
    best = str(tmp_path / "run" / "best")
    with pytest.warns(UserWarning, match="was trained for .*, which is not this"):
        drafter = initial_drafter(best, tiny.verifier(seed=1), LossConfig(num_steps=3), ONES)
    assert drafter.loss.num_steps == 3
    drafter.save(tmp_path / "adapted")
    load_checkpoint(tmp_path / "adapted", tiny.verifier(seed=1))  # it is for this one now
    with pytest.raises(
        ValueError, match=r"type eagle3, this script trains medusa; use train/eagle3"
    ):
        check_checkpoint(best, "medusa", Outline.read(verifier), "init_from")
    start = recipe(tmp_path, verifier)
    start.init_from, start.training.output_dir = best, str(tmp_path / "second")
    start.training.learning_rate = 0.0
    run(start)
    first, *_ = lines(tmp_path / "run", "validation")  # the best; later ones were no better
    load_checkpoint(tmp_path / "second" / "best", tiny.verifier())
    for line in lines(tmp_path / "second", "validation"):
        assert line["validation"]["conditional"] == first["validation"]["conditional"]


def test_a_drafter_to_start_from_makes_room_for_the_tokens_of_the_data(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    run(recipe(tmp_path, verifier))
    before = load_checkpoint(tmp_path / "run" / "best", tiny.verifier())
    new = [i for i in range(64) if i not in before.draft_ids][:5]
    counts = torch.zeros(64).index_fill(0, torch.tensor(new), 3.0)
    counts[before.draft_ids[-4:]] = 9.0
    best = str(tmp_path / "run" / "best")
    after = initial_drafter(best, tiny.verifier(), LossConfig(), counts)
    assert "5 ids of its draft vocabulary make room" in capsys.readouterr().out
    assert len(after.draft_ids) == 32 and set(new) <= set(after.draft_ids.tolist())
    head = after.verifier.head.weight
    for row, token in enumerate(after.draft_ids.tolist()):
        if token in new:
            assert torch.equal(after.lm_head.weight[row], head[token])
        else:
            at = before.draft_ids.tolist().index(token)
            assert torch.equal(after.lm_head.weight[row], before.lm_head.weight[at])
    for name, weight in after.named_parameters():
        assert name == "lm_head.weight" or torch.equal(weight, before.get_parameter(name))


def test_only_supervised_tokens_are_counted(tmp_path: Path) -> None:
    counts = count_tokens([Row([3, 4, 4, 5], [0, 1, 1, 0], "a"), Row([5, 4], [0, 2], "b")], 7)
    assert counts.tolist() == [0, 0, 0, 0, 3, 0, 0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("training.draft_length", 0, "training.draft_length is 0"),
        ("verifier", "nowhere/nothing", "verifier 'nowhere/nothing' cannot be loaded"),
        ("data.train", "missing.jsonl", r"^data\.train: 'missing\.jsonl': no such file"),
        ("data.eval", "missing.jsonl", r"^data\.eval: 'missing\.jsonl': no such file"),
        ("data.max_length", 1024, "data.max_length is 1024; it must be in 2 … 512"),
        ("drafter.draft_vocab_size", 65, r"^drafter\.draft_vocab_size must be in 1 … 64"),
        (
            "drafter.feature_layers",
            (2, 9),
            "feature_layers must be distinct, ascending ids in 1 … 8",
        ),
        ("init_from", "nowhere", "^init_from: drafter 'nowhere' is not a checkpoint"),
        ("training.max_steps", -1, "training.max_steps is -1"),
        ("tracking.log_every", 0, "tracking.log_every is 0; it must be 1 or more"),
    ],
)
def test_bad_input_is_named_before_the_verifier_is_loaded(
    tmp_path: Path,
    verifier: str,
    field: str,
    value: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Verifier, "load", None)  # is not reached
    wrong = recipe(tmp_path, verifier)
    *path, name = field.split(".")
    setattr(getattr(wrong, path[0]) if path else wrong, name, value)
    with pytest.raises(ValueError, match=message):
        run(wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("draft_lm", {"drafter": DraftLMConfig("layers:0-8")}, "^drafter.init 'layers:0-8': .* 7 "),
        ("draft_lm", {"drafter": DraftLMConfig("./none")}, r"^drafter.init './none': no such .*Or"),
        (
            "draft_lm",
            {"drafter": DraftLMConfig("{f}/medusa")},
            "^drafter.init .* is a drafter of type medusa, .* use train/medusa.py with --init_from",
        ),
        (
            "medusa",
            {"loss": LossConfig(num_steps=2)},
            "^training.draft_length is 4.* makes 2",
        ),
        (
            "medusa",
            {"drafter": MedusaConfig(draft_vocab_size=65)},
            "^drafter.draft_vocab_size",
        ),
        ("medusa", {"joint": JointConfig()}, "^joint: .* needs the package peft"),
        ("eagle1", {"init_from": "{f}/medusa"}, "^init_from: .*medusa is .* use train/medusa.py"),
        (
            "medusa",
            {"init_from": "{f}/wide"},
            "^init_from: .* size 64 and 64 tokens",
        ),
        ("medusa", {"init_from": "{f}/medusa"}, "^training.draft_length is 4, but .* makes 3"),
    ],
)
def test_a_start_that_does_not_fit_is_told_before_the_verifier_is_loaded(
    tmp_path: Path,
    verifier: str,
    kind: str,
    change: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, width in (("medusa", 32), ("wide", 64)):
        of = tiny.verifier(hidden_size=width)
        Medusa.create(of, MedusaConfig(), LossConfig(num_steps=3), ONES).save(tmp_path / name)
    monkeypatch.setattr(Verifier, "load", None)  # is not reached
    monkeypatch.setitem(sys.modules, "peft", None)
    wrong = recipe(tmp_path, verifier, kind)
    for field, value in change.items():
        value = value.format(f=tmp_path) if isinstance(value, str) else value
        if isinstance(value, DraftLMConfig):
            value = DraftLMConfig(value.init.format(f=tmp_path))
        setattr(wrong, field, value)
    with pytest.raises(ValueError, match=message):
        run(wrong)


def test_streamed_mixture_resumes_like_an_unbroken_run(
    tmp_path: Path, verifier: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(packing, "WINDOW", 6)
    broken = recipe(tmp_path, verifier, max_steps=10, save_every=4, keep_last=9)
    more = write_conversations(tmp_path / "more.jsonl", 5, seed=3)
    with open(more, "a") as file:  # an evaluation prompt among them
        file.write(Path(broken.data.eval).read_text().splitlines(keepends=True)[0])
    broken.data.train = {broken.data.train: 2.0, more: 1.0}
    broken.data.streaming = True
    broken.tracking.log_every = 1
    run(broken)
    whole = losses(tmp_path / "run")
    said = capsys.readouterr().out
    assert len(whole) == 10 and "1 conversations left out as evaluation prompts" in said
    assert "pass 1 over the training data: 1" in said, "the stop lies in another pass"
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        if folder.name > "step-000004":
            shutil.rmtree(folder)
    broken.training.resume = True
    run(broken)
    assert losses(tmp_path / "run") == whole
    card = (tmp_path / "run" / "checkpoints" / "step-000010" / "README.md").read_text()
    assert f"train.jsonl, {more}`" in card


def test_training_on_the_evaluation_data_is_as_asked_for_but_warned_of(
    tmp_path: Path, verifier: str
) -> None:
    same = recipe(tmp_path, verifier, max_steps=1)
    same.data.train = same.data.eval
    with pytest.warns(UserWarning, match=r"data\.eval .* is trained on: its τ says nothing about"):
        run(same)


def test_streaming_needs_a_length_that_is_known(tmp_path: Path, verifier: str) -> None:
    wrong = recipe(tmp_path, verifier, max_steps=None, num_epochs=1)
    wrong.data.streaming = True
    with pytest.raises(ValueError, match=r"data\.streaming: .* training\.max_steps or"):
        run(wrong)


def test_a_mixture_is_trained_on_in_memory_too(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    mixed = recipe(tmp_path, verifier, max_steps=1)
    more = write_conversations(tmp_path / "more.jsonl", 4, seed=3)
    words = ["--config", "recipes/eagle3/tiny.yaml", "--data.train"]
    parsed = parse(eagle3.Recipe, [*words, f"{{{mixed.data.train}: 3, {more}: 1}}"])
    assert parsed.data.train == {mixed.data.train: 3.0, more: 1.0}
    mixed.data.train = parsed.data.train
    run(mixed)
    conversations = int(re.search(r"(\d+) conversations", capsys.readouterr().out)[1])
    assert 16 <= conversations <= 16 + 4, "all of both, and few come again before the end is seen"
    with pytest.raises(ValueError, match=r"weight of 'a\.jsonl' is 0"):
        parse(eagle3.Recipe, [*words, "{a.jsonl: 0}"])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("data.batch_tokens", "0", "data.batch_tokens is 0; it must be 1 or more"),
        ("data.max_length", "-1", "data.max_length is -1; it must be 2 or more"),
        ("data.limit", "0", "data.limit is 0; it must be 1 or more"),
        ("data.eval_limit", "-3", "data.eval_limit is -3; it must be 1 or more"),
        ("drafter.draft_vocab_size", "0", "drafter.draft_vocab_size must be 1 or more, got 0"),
        ("drafter.feature_layers", "[3, 2]", r"ascending ids from 1 on, got \[3, 2\]"),
        ("drafter.feature_layers", "[0, 2]", r"ascending ids from 1 on, got \[0, 2\]"),
        ("drafter.feature_layers", "[]", r"ascending ids from 1 on, got \[\]"),
    ],
)
def test_settings_that_no_verifier_could_take_are_refused_at_once(
    option: str, value: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(eagle3.Recipe, ["--config", "recipes/eagle3/tiny.yaml", f"--{option}", value])
    assert "\n" not in str(caught.value)


def test_data_without_a_supervised_token_is_an_error(tmp_path: Path, verifier: str) -> None:
    wrong = recipe(tmp_path, verifier)
    row = {"id": "a", "messages": [{"role": "user", "content": "w1 w2"}]}
    Path(wrong.data.train).write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="not one supervised token"):
        run(wrong)


def test_tiny_recipe_is_one_of_the_scripts(tmp_path: Path) -> None:
    parsed = parse(
        eagle3.Recipe, ["--config", "recipes/eagle3/tiny.yaml", "--training.resume", "true"]
    )
    assert parsed.training.resume
    with pytest.raises(ValueError, match="learning_rte"):
        parse(
            eagle3.Recipe, ["--config", "recipes/eagle3/tiny.yaml", "--training.learning_rte", "1"]
        )
    saved = yaml.safe_load(Path("recipes/eagle3/tiny.yaml").read_text())
    assert saved["verifier"] == parsed.verifier


def test_a_run_is_resumed_by_its_own_script_alone(tmp_path: Path, verifier: str) -> None:
    settings = recipe(tmp_path, verifier, "hydra_heads")
    run(settings)
    other = recipe(tmp_path, verifier, "medusa", resume=True, max_steps=5)
    other.drafter = MedusaConfig(**asdict(settings.drafter))
    other.data.max_length = 48  # another data setting is the lesser difference
    with pytest.raises(ValueError, match=r"training.resume: .* of type hydra_heads, this script"):
        run(other)


def test_a_resume_of_nothing_says_that_the_run_is_new(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    settings = recipe(tmp_path, verifier, resume=True, max_steps=1)
    run(settings)
    assert f"nothing to resume in {settings.training.output_dir}: a new run" in (
        capsys.readouterr().out
    )
    run(settings)
    assert ": a new run" not in capsys.readouterr().out


def test_no_more_of_the_evaluation_is_rendered_than_replayed(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    config = recipe(tmp_path, verifier).data
    data = prepare.render_data(config, Verifier.load(verifier), Accelerator(cpu=True))
    assert [row.id for row in data.eval] == ["2-0", "2-1", "2-3"]  # evenly, of five
    assert "eval.jsonl: 3 conversations, 3 rows" in capsys.readouterr().out


@pytest.mark.parametrize("trained_on", [False, True])
def test_answers_that_are_not_greedy_do_not_validate(
    tmp_path: Path, verifier: str, trained_on: bool
) -> None:
    """Though they may be trained on."""
    config = recipe(tmp_path, verifier).data
    lines = Path(config.eval).read_text().splitlines()
    rows = [json.loads(line) | {"temperature": 1.0, "top_k": 3} for line in lines]
    Path(config.eval).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.train = config.eval if trained_on else config.train
    given = config, Verifier.load(verifier), Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"data\.eval .*2-0 was answered at .*--data\.eval null"):
        prepare.render_data(*given)
    config.train, config.eval = config.eval, None
    assert len(prepare.render_data(*given).train) == 5


def test_rows_that_cannot_be_used_are_left_out_of_both_data_sets_and_named(
    tmp_path: Path, verifier: str, capsys: pytest.CaptureFixture
) -> None:
    config = recipe(tmp_path, verifier).data
    for source in (config.train, config.eval):
        with Path(source).open("a") as file:
            file.write('{broken\n{"a": 1}\n')
    loaded = Verifier.load(verifier)
    with pytest.warns(UserWarning, match=r"eval\.jsonl: left out: 1 rows: broken JSON .* line 6"):
        data = prepare.render_data(config, loaded, Accelerator(cpu=True))
    assert (len(data.train), len(data.eval)) == (12, 3)
    said = capsys.readouterr().out
    assert "left out: 1 rows: broken JSON (the first: " in said and "train.jsonl, line 13" in said
    assert "1 rows: no messages, conversations, turns, prompt or text (the first: " in said


def test_more_of_them_than_the_limit_end_a_run(tmp_path: Path, verifier: str) -> None:
    config = recipe(tmp_path, verifier).data
    with Path(config.train).open("a") as file:
        file.write('{"text": "w1 w2 w3"}\n' * 975 + "{broken\n" * 13)
    loaded = Verifier.load(verifier)
    complaint = r"data\.train: 13 of 1000 rows .* max_bad_rows = 0\.01 allows: .* line 988: broken"
    with pytest.raises(ValueError, match=complaint):
        prepare.render_data(config, loaded, Accelerator(cpu=True))
    config.max_bad_rows = 0.02
    assert len(prepare.render_data(config, loaded, Accelerator(cpu=True)).train) == 12 + 975
    checkpoint.check_same(  # a run that too many have ended goes on with a higher limit
        Saved(Path("x"), {"data": {"max_bad_rows": 0.01}}, {}, [], {}),
        {"data": {"max_bad_rows": 0.02}},
    )
    with pytest.raises(ValueError, match=r"data\.max_bad_rows is 2.*; it must be a fraction"):
        DataConfig("x.jsonl", max_bad_rows=2.0)


@pytest.mark.parametrize(
    "first, second", [(None, JointConfig(rank=2)), (JointConfig(rank=2), None)]
)
def test_a_run_is_resumed_with_its_verifier_trained_or_not_as_before(
    tmp_path: Path, verifier: str, first: JointConfig | None, second: JointConfig | None
) -> None:
    settings = recipe(tmp_path, verifier, "medusa")
    settings.joint = first
    run(settings)
    settings.joint, settings.training.resume, settings.training.max_steps = second, True, 5
    with pytest.raises(ValueError, match=r"was made with joint(\.\w+)? = .*, now it is"):
        run(settings)


def test_a_wrong_setting_of_a_section_that_may_be_left_out_is_one_clear_line(capsys) -> None:
    words = ["medusa.py", "--config", "recipes/medusa/tiny.yaml", "--joint.warmup", "1.5"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sys, "argv", words)
        run_script(medusa.Recipe, medusa.run)
    assert capsys.readouterr().err == "error: joint.warmup must be in [0, 1), got 1.5\n"
