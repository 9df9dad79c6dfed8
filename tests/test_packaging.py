"""The wheel, built from the source archive, works far from the clone."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from headstart.script import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="needs git's list of files: this is no clone"
)
SHIPPED = ("models", "data", "eval", "train", "recipes")
ELSEWHERE = """
import pathlib, sys
import headstart.train.eagle3
from headstart.data.conversations import reading
from headstart.script import ROOT, parse

site = pathlib.Path(sys.argv[1])
assert pathlib.Path(headstart.__file__).is_relative_to(site), headstart.__file__
assert not any(pathlib.Path(p or ".").resolve() == pathlib.Path(sys.argv[2]) for p in sys.path)
names = [f"{d}/{f}.jsonl" for d in ("smollm2", "domain") for f in ("train", "eval", "eval-t1")]
for name in names:
    rows = list(reading.read(f"data/{name}", limit=5))
    assert len(rows) == 5 and rows[0].messages
recipe = parse(headstart.train.eagle3.Recipe, ["--config", "recipes/eagle3/tiny.yaml"])
assert recipe.verifier == "embedded/smollm2-135m"
print("works")
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel made from it. Built from a copy: no stale build/."""
    folder = tmp_path_factory.mktemp("built")
    files = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    copy = folder / "copy"
    for file in filter(None, files):
        if (ROOT / file).is_file():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            (copy / file).write_bytes((ROOT / file).read_bytes())
    # With the packages of this environment, so that nothing is fetched.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=copy)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (file,) = built.glob("*.whl")
    return file


def test_wheel_has_code_data_and_recipes_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    ours = {n.removeprefix("headstart/") for n in names if n.startswith("headstart/")}
    assert len(names) - len(ours) == sum(".dist-info/" in n for n in names)
    shared = ["__init__.py", "script.py"]
    wanted = [*shared, *run("git", "ls-files", *SHIPPED, cwd=ROOT).splitlines()]
    assert set(wanted) - ours == set()
    assert {Path(n).parts[0] for n in ours if "/" in n} == set(SHIPPED)
    assert not [n for n in ours if n.endswith(".pyc")]


def test_sdist_is_a_clone(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {n.partition("/")[2] for n in opened.getnames()}
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    assert set(tracked) - names == set()


def test_metadata_names_licence_extras_and_python(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = archive.read(info).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    for extra in ("deepspeed", "wandb", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())


def test_installed_wheel_works_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    """Installed beside the dependencies of this environment, but before the editable clone."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", site, wheel, cwd=elsewhere)
    file = elsewhere / "check.py"
    file.write_text(ELSEWHERE)
    out = run(sys.executable, file, site, ROOT, cwd=elsewhere, PYTHONPATH=str(site))
    assert "works" in out
    assert not list(site.glob("*.pth"))
    helped = run(
        sys.executable, "-m", "headstart.train.eagle3", "--help",
        cwd=elsewhere, PYTHONPATH=str(site),
    )  # fmt: skip
    assert "--training.output_dir" in helped


def test_every_constraint_is_a_direct_dependency_or_explained() -> None:
    """constraints.txt pins what pyproject.toml asks for; two more decide which models load."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").lower()
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    names = [line.split("==")[0] for line in constraints if line and not line.startswith("#")]
    assert all("==" in line for line in constraints if line and not line.startswith("#"))
    extra = {"tokenizers", "huggingface_hub"}
    assert not [n for n in names if n not in extra and f'"{n}' not in project]
