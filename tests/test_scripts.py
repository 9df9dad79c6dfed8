"""What scripts share: settings from YAML and command line, one-line errors, exit codes."""

import ast
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from headstart import script
from headstart.script import ROOT, arguments, parse, run_commands, run_script
from headstart.train import draft_lm, medusa

SCRIPTS = sorted(
    path
    for folder in (".", "models", "data", "eval", "train")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


@dataclass
class Optimizer:
    """How weights move."""

    learning_rate: float = 1e-3
    """Peak of the rate, per step."""

    def __post_init__(self) -> None:
        if self.learning_rate < 0:
            raise ValueError(f"learning_rate must be 0 or more, got {self.learning_rate}")


@dataclass
class Recipe:
    """Settings of a run."""

    out: str
    """Folder to write to."""
    num_steps: int = 3
    layers: list[int] | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)
    others: list[Optimizer] = field(default_factory=list)
    second: Optimizer | None = None


def yaml_file(folder: Path, text: str) -> str:
    (folder / "recipe.yaml").write_text(text)
    return str(folder / "recipe.yaml")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return yaml_file(tmp_path, "out: x\nnum_steps: 4\noptimizer:\n  learning_rate: 1e-4\n")


def test_overrides_come_after_the_file(recipe: str) -> None:
    words = ["--config", recipe, "--num-steps", "5", "--optimizer.learning_rate=0.5"]
    assert parse(Recipe, words) == Recipe("x", 5, None, Optimizer(0.5))
    assert parse(Recipe, ["--config", recipe]) == Recipe("x", 4, None, Optimizer(1e-4))
    assert parse(Recipe, ["--out", "y", "--layers", "[1, 2]"]) == Recipe("y", layers=[1, 2])


@pytest.mark.parametrize(
    "text, said",
    [
        ("out: x\nnumsteps: 3", "recipe.yaml: Option 'numsteps' .*did you mean 'num_steps'"),
        ("out: x\noptimizer:\n  lerning_rate: 1", "did you mean 'optimizer.learning_rate'"),
        ("out: x\noptimizer:\n  zzz: 1", "'zzz'; optimizer has learning_rate$"),
        ("out: x\nwholly_unknown: 1", "'wholly_unknown' is not accepted; --help lists"),
        ("out: x\nnum_steps: three", "recipe.yaml: num_steps: Expected a int.*three"),
        ("num_steps: 3", "required: out"),
        ("out: [", "recipe.yaml: Problems parsing config"),
        ("out: x\noptimizer:\n  learning_rate: -1", "learning_rate must be 0 or more, got -1"),
        ("out: x\noptimizer:\n  learning_rate: .nan", "^optimizer.learning_rate must be a number"),
        ("out: ''", "^out is empty; give it a value"),
        ("", "recipe.yaml: Expected lines of name: value;"),
        ("- out", "recipe.yaml: Expected lines of name: value;"),
        ("out: x\nsecond: 3", "recipe.yaml: second: Expected one setting or more. Got value: 3;"),
    ],
)
def test_fault_in_a_recipe_is_one_line_that_names_it(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        parse(Recipe, ["--config", yaml_file(tmp_path, text)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--numsteps", "3"], "arguments: --numsteps 3; did you mean 'num_steps'"),
        (["--optimizer.learning", "3"], "did you mean 'optimizer.learning_rate'"),
        (["--num_steps", "x"], "^num_steps: Expected a int. Got value: x"),
        (["--layers", "one"], r"^layers: Expected a list. Got value: one; write '\[one\]'$"),
        (["--layers", "1,2"], r"^layers: Expected a list. Got value: 1,2; write '\[1, 2\]'$"),
        (
            ["--layers", "[1,"],
            r"^layers: .*Got value: \[1,; a list with spaces is written in quotes: '\[1, …\]'$",
        ),
        (["--learning_rate", "3"], "did you mean 'optimizer.learning_rate'"),
        (["--optimiser.learning_rate", "3"], "did you mean 'optimizer.learning_rate'"),
        (["--optimizer.lr", "3"], "did you mean 'optimizer.learning_rate'"),
        (["--num_heads", "3"], "did you mean 'num_steps'"),
        (["stray"], "^unrecognized arguments: stray; a setting is given as --name value"),
        (["--out", ""], "^out is empty; give it a value, or leave it out$"),
        (
            ["--others", "[{learning_rate: 1}, {learning_rate: .nan}]"],
            r"^others\[1\].learning_rate must be a number",
        ),
        (
            ["--optimizer", "3"],
            "^optimizer: Expected one .* Got value: 3; optimizer has learning_ra",
        ),
        (["--others", "a"], "^others: Expected .* Got value: a; others has learning_rate$"),
        (
            ["--second", "true"],
            "^second: Expected one .* Got value: true; second has learning_rate$",
        ),
        (["--second.zzz", "1"], "second: Option 'zzz' is not accepted; second has learning_rate$"),
        (
            ["--second.learning_rate", "nan"],
            "second.learning_rate: Expected a float. Got value: nan;",
        ),
        (
            ["--others", "[{lerning_rate: 1}]"],
            "^others: Option 'lerning_rate' is not accepted; did you mean 'others.learning_rate'",
        ),
        (["--others", "[{}]"], "^others: Expected .* Got value: {}; others has learning_rate$"),
        (["--others", "[3]"], "^others: Expected .* Got value: 3; others has learning_rate$"),
        (["--others", "[{learning_rate: x}]"], "^others: learning_rate: Expected a float"),
    ],
)
def test_fault_on_the_command_line_is_one_line(recipe: str, words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        parse(Recipe, ["--config", recipe, *words])
    assert "\n" not in str(caught.value)


def test_a_hint_names_each_setting_once() -> None:
    names = script._field_names(Recipe)
    assert len(names) == len(set(names)) and "second.learning_rate" in names


def test_a_recipe_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"weights\.bin: not UTF-8 text"):
        parse(Recipe, ["--config", str(tmp_path / "weights.bin")])


def test_missing_recipe_is_named() -> None:
    with pytest.raises(ValueError, match=r"does not exist.*nowhere\.yaml"):
        parse(Recipe, ["--config", "nowhere.yaml"])


def test_number_of_heads_is_the_number_of_steps() -> None:
    words = ["--config", "recipes/medusa/tiny.yaml", "--drafter.num_heads", "3"]
    with pytest.raises(ValueError, match=r"did you mean 'loss\.num_steps'"):
        parse(medusa.Recipe, words)


def test_recipe_of_another_script_is_told(tmp_path: Path) -> None:
    shipped = ["--config", "recipes/eagle3/tiny.yaml"]
    said = "recipes/eagle3/tiny.yaml is a recipe of train/eagle3.py$"
    with pytest.raises(ValueError, match=f"'draft_vocab_size'.*; {said}"):
        parse(draft_lm.Recipe, shipped)
    with pytest.warns(UserWarning, match=f"^{said}"):  # every setting fits
        parse(medusa.Recipe, shipped)
    mine = tmp_path / "mine.yaml"
    mine.write_text((ROOT / "recipes/eagle3/tiny.yaml").read_text())
    with pytest.raises(ValueError, match=r"mine\.yaml is a recipe of train/eagle3\.py$"):
        parse(draft_lm.Recipe, ["--config", str(mine)])


def test_dashes_in_option_names_are_underscores_and_values_stay() -> None:
    words = ["--num-steps=3", "--a-b.c-d", "e-f", "-1", "--out", "my-run"]
    assert arguments(words) == ["--num_steps=3", "--a_b.c_d", "e-f", "-1", "--out", "my-run"]


def test_shipped_recipe_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = str(ROOT / "recipes/eagle3/tiny.yaml")
    assert arguments(["--config", "recipes/eagle3/tiny.yaml"]) == ["--config", shipped]
    assert arguments(["--config=recipes/eagle3/tiny.yaml"]) == ["--config", shipped]
    (tmp_path / "recipes/eagle3").mkdir(parents=True)
    (tmp_path / "recipes/eagle3/tiny.yaml").touch()
    words = ["--config", "recipes/eagle3/tiny.yaml"]
    assert arguments(words) == words  # the user's own comes first


# ---- run_script --------------------------------------------------------------------------------


def exit_code(monkeypatch: pytest.MonkeyPatch, words: list[str], run: Any) -> int | None:
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    try:
        run_script(Recipe, run)
    except SystemExit as stop:
        return stop.code
    return None


def test_run_gets_the_settings(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    seen: list[Recipe] = []
    assert exit_code(monkeypatch, ["--config", recipe], seen.append) is None
    assert seen == [Recipe("x", 4, None, Optimizer(1e-4))]


def test_value_error_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def run(_: Recipe) -> None:
        raise ValueError("out 'x' is full;\n  free some space")

    assert exit_code(monkeypatch, ["--out", "x"], run) == 2
    assert capsys.readouterr().err == "error: out 'x' is full; free some space\n"
    assert exit_code(monkeypatch, ["--out"], run) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_programmers_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Recipe) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        exit_code(monkeypatch, ["--out", "x"], run)


def test_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Recipe) -> None:
        raise KeyboardInterrupt

    assert exit_code(monkeypatch, ["--out", "x"], run) == 130


def test_help_has_the_fields_docstrings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert exit_code(monkeypatch, ["--help"], print) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert "Folder to write to." in help_text and "Peak of the rate, per step." in help_text


def test_print_config_is_a_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, recipe: str, tmp_path: Path
) -> None:
    assert exit_code(monkeypatch, ["--config", recipe, "--print_config"], print) == 0
    printed = yaml_file(tmp_path, capsys.readouterr().out)
    assert parse(Recipe, ["--config", printed]) == Recipe("x", 4, None, Optimizer(1e-4))


# ---- run_commands ------------------------------------------------------------------------------


def commanded(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> tuple[list[Any], int | None]:
    """What the commands were given, and the exit code."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    commands = {"write": (Recipe, seen.append), "tune": (Optimizer, seen.append)}
    try:
        run_commands(commands)
    except SystemExit as stop:
        return seen, stop.code
    return seen, None


def test_first_word_names_the_command_and_the_next_may_be_its_first_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [Recipe("x", 4)]
    assert commanded(monkeypatch, ["write", "x", "--num-steps", "4"]) == (wanted, None)
    assert commanded(monkeypatch, ["write", "--num-steps", "4", "--out", "x"]) == (wanted, None)
    assert commanded(monkeypatch, ["tune", "0.5"]) == ([Optimizer(0.5)], None)
    assert commanded(monkeypatch, ["tune"]) == ([Optimizer()], None)


def test_faults_of_a_command_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for words, said in [
        (["read"], "no command 'read'; usage: script.py write | tune"),
        ([], "no command ''"),
        (["tune", "--learning_rat", "1"], "did you mean 'learning_rate'"),
        (["tune", "-1"], "-1"),
    ]:
        assert commanded(monkeypatch, words) == ([], 2)
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_help_of_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert commanded(monkeypatch, ["--help"]) == ([], 0)
    assert "write | tune" in capsys.readouterr().out
    assert commanded(monkeypatch, ["tune", "--help"]) == ([], 0)
    assert "Peak of the rate" in capsys.readouterr().out


# ---- threads under accelerate launch -----------------------------------------------------------


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    return chosen


def test_accelerate_launch_gives_one_thread_and_we_take_all(
    threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails because Accelerate exports something else, `_use_all_cores` can go."""
    words = launch_command_parser().parse_args(["--num_processes", "1", "train/eagle3.py"])
    words.num_cpu_threads_per_process = 1  # what its validation sets without --cpu
    words.mixed_precision, words.dynamo_backend, words.num_machines = "no", "no", 1
    words.use_cpu = words.cpu
    _, environment = prepare_simple_launcher_cmd_env(words)
    for name in ("OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, environment[name])
    script._use_all_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    script._use_all_cores()
    assert threads == [6, 1]


def test_threads_that_somebody_chose_are_left_alone(
    threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script._use_all_cores()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    script._use_all_cores()
    assert threads == []


# ---- every script ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_script_opens_with_its_command_and_has_help(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    name = str(path.relative_to(ROOT))
    documentation = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert name in documentation
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert stop.value.code == 0
    assert "--config" in capsys.readouterr().out
