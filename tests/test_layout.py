"""The layout that the README promises: folders, import direction, names, file sizes."""

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["models", "data", "eval", "train"]
SHARED = ["headstart", "headstart.script"]  # below all sub-packages
FOLDERS = [*ORDER, "recipes", "tests"]
FILES = [
    "pyproject.toml", "constraints.txt", "constraints-engine.txt", "Makefile", "README.md",
    "CONTRIBUTING.md", "LICENSE",
    ".ci/run", ".pre-commit-config.yaml", ".gitignore", "script.py", "main.py",
    "data/smollm2/README.md", "data/domain/README.md", "docs/losslessness.md",
    "docs/your-verifier.md", "docs/in-service.md", "docs/choosing-a-drafter.md", "docs/mtp.md",
    "docs/serving.md", "docs/distributed.md", "docs/results.md",
]  # fmt: skip
MAX_LINES = 400
OTHERS = set(sys.stdlib_module_names) | set(packages_distributions()) - {"headstart"}

SOURCES = sorted(p for folder in ORDER for p in (ROOT / folder).rglob("*.py"))
PACKAGE = [ROOT / "__init__.py", ROOT / "script.py", *SOURCES]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    """Every module `path` imports, relative ones with their dots: `from a import b` gives a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def may_import(folder: str, module: str) -> bool:
    """Is headstart's `module` at or below `folder` in the import direction?"""
    allowed = [f"headstart.{f}" for f in ORDER[: ORDER.index(folder) + 1]] if folder else []
    return any(f"{module}.".startswith(f"{a}.") for a in [*allowed, *SHARED[1:]])


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_exists(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert folder == "tests" or (ROOT / folder / "__init__.py").is_file()


@pytest.mark.parametrize("file", FILES)
def test_file_exists(file: str) -> None:
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_point_downwards(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    ours = {m for m in imported(path) if m.split(".")[0] == "headstart"}
    assert not [m for m in ours if not may_import(folder, m)]


def test_script_is_below_every_folder() -> None:
    for path in (ROOT / "__init__.py", ROOT / "script.py"):
        assert not [m for m in imported(path) if m.split(".")[0] == "headstart"]


@pytest.mark.parametrize("path", [*PACKAGE, *TESTS], ids=name)
def test_imports_are_absolute(path: Path) -> None:
    bare = set(FOLDERS) | {"script"}
    assert not [m for m in imported(path) if m.startswith(".") or m.split(".")[0] in bare]


@pytest.mark.parametrize("path", [*PACKAGE, *TESTS], ids=name)
def test_file_is_not_named_like_another_module(path: Path) -> None:
    """Only the folders themselves may be: they are imported as headstart.<folder>, and a script's
    own folder, not the root, is first on sys.path."""
    assert path.stem == "__init__" or path.stem not in OTHERS


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_file_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_no_drawer_for_everything() -> None:
    assert not [p for p in PACKAGE if p.stem in ("utils", "helpers", "misc", "common")]


def test_recipes_hold_no_code() -> None:
    files = [p for p in (ROOT / "recipes").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert not [p for p in files if p.suffix != ".yaml" and p.name != "__init__.py"]
    assert not (ROOT / "recipes" / "__init__.py").read_text(encoding="utf-8").strip()


def test_source_file_has_a_test() -> None:
    """Imported by a test, or run by it as folder/file.py."""
    modules = set().union(*map(imported, TESTS))
    text = "\n".join(p.read_text(encoding="utf-8") for p in TESTS)

    def tested(path: Path) -> bool:
        module = "headstart." + name(path).removesuffix(".py").replace("/", ".")
        return name(path) in text or any(f"{m}.".startswith(f"{module}.") for m in modules)

    assert not [name(p) for p in SOURCES if p.stem != "__init__" and not tested(p)]


def test_checker_sees_a_wrong_import(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("from headstart import train\nimport models.cache\nfrom . import x\n")
    assert imported(file) == {"headstart.train", "models.cache", "..x"}
    assert not may_import("models", "headstart.train")
    assert not may_import("data", "headstart.eval.measures.replay")
    assert may_import("eval", "headstart.models.verifier.cache.RaggedCache")
    assert may_import("models", "headstart.script.run_script")
