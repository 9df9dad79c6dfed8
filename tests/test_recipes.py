"""Every shipped recipe fits its script and says what it is: command, hardware, time, result."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headstart.data.conversations.reading import resolve
from headstart.script import ROOT, parse

FOLDERS = sorted(
    p for p in (ROOT / "recipes").iterdir() if p.is_dir() and not p.name.startswith("_")
)
RECIPES = sorted(p for f in FOLDERS if f.name != "accelerate" for p in f.glob("*.yaml"))
LAUNCHERS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))  # Accelerate's own settings


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def settings_class(recipe: Path) -> type:
    """`Recipe` of train/<script>.py, or the class of eval/<script>.py named like it."""
    script = recipe.parent.name
    if (ROOT / "train" / f"{script}.py").is_file():
        return importlib.import_module(f"headstart.train.{script}").Recipe
    module = importlib.import_module(f"headstart.eval.{script}")
    return getattr(module, script.title().replace("_", ""))


def header(recipe: Path) -> str:
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])


def test_there_are_recipes() -> None:
    assert ROOT / "recipes" / "eagle3" / "smollm2-135m.yaml" in RECIPES


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_folder_is_named_like_its_script(folder: Path) -> None:
    scripts = [ROOT / f / f"{folder.name}.py" for f in ("train", "eval")]
    assert folder.name == "accelerate" or any(script.is_file() for script in scripts)
    assert not [p for p in folder.rglob("*") if p.suffix != ".yaml"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_recipe_parses(recipe: Path) -> None:
    settings = parse(settings_class(recipe), ["--config", str(recipe)])
    for section, values in yaml.safe_load(recipe.read_text(encoding="utf-8")).items():
        read = getattr(settings, section)
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, str | int | bool):
                assert getattr(read, key) == value, f"{section}.{key}"


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_shipped_data_of_a_recipe_exists(recipe: Path) -> None:
    """A path under outputs/ is the user's own; any other must be found from a fresh clone."""
    paths = re.findall(r"[\w./-]+\.jsonl", recipe.read_text(encoding="utf-8"))
    shipped = [p for p in paths if p.startswith("data/")]
    assert not [p for p in shipped if resolve(p) is None]


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.stem == "tiny"], ids=name)
def test_tiny_runs_are_named_like_their_script(recipe: Path) -> None:
    folder = f"outputs/tiny-{recipe.parent.name}"
    assert yaml.safe_load(recipe.read_text(encoding="utf-8"))["training"]["output_dir"] == folder


def test_smoke_measures_the_drafter_that_it_trains() -> None:
    smoke = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--config recipes/eagle3/tiny.yaml" in smoke
    assert "--drafter outputs/tiny-eagle3/best --out outputs/tiny-eagle3 " in smoke


def test_what_a_fresh_clone_can_do_can_be_done_twice() -> None:
    """A run does not write to a folder with checkpoints unless it resumes."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = {
        target: re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
        for target in ("quickstart", "smoke")
    }
    assert "train/eagle3.py --config $(RECIPE) --training.resume true" in commands["quickstart"]
    assert commands["smoke"].startswith("\trm -rf outputs/tiny-eagle3\n")


@pytest.mark.parametrize("section", ["", "training"])
@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_unknown_key_is_refused(recipe: Path, section: str, tmp_path: Path) -> None:
    values: dict[str, Any] = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    if section and section not in values:
        pytest.skip(f"no section {section}")
    (values[section] if section else values)["bogus_key"] = 1
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match=r"recipe\.yaml: .*bogus_key") as caught:
        parse(settings_class(recipe), ["--config", str(file)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_recipe_opens_with_its_lab_note(recipe: Path) -> None:
    note = header(recipe)
    assert f"--config {name(recipe)}" in note, "the command that runs it"
    ran = re.search(r"\d.*\b(seconds|minutes|hours?)\b", note) and re.search(r"core|GPU", note)
    assert ran or re.search(r"\bnot run\b", note, re.IGNORECASE), "hardware and wall time"
    assert max(map(len, recipe.read_text(encoding="utf-8").splitlines())) <= 100


@pytest.mark.parametrize("recipe", LAUNCHERS, ids=name)
def test_launcher_settings_open_with_a_note(recipe: Path) -> None:
    assert name(recipe) in header(recipe)
    assert "num_processes" in yaml.safe_load(recipe.read_text(encoding="utf-8"))
