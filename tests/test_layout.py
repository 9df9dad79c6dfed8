"""The layout that the README promises: folders, import direction, names, file sizes."""

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import rooms
from rooms import imported

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["models", "data", "eval", "train"]
SHARED = ["headstart", "headstart.script", "headstart.lock"]  # below all sub-packages
CONTRACTS = ["batch", "drafter", "losses", "vocab", "saved", "loading"]  # in models/, above rooms
PUBLIC = ["models/trees", "eval/speculate", "eval/speedup"]  # old names, which only import
FOLDERS = [*ORDER, "recipes", "tests"]
FILES = [
    "pyproject.toml", "constraints.txt", "constraints-engine.txt", "Makefile", "README.md",
    "CONTRIBUTING.md", "LICENSE",
    ".ci/run", ".pre-commit-config.yaml", ".gitignore", "script.py", "main.py",
    "data/smollm2/README.md", "data/domain/README.md", "docs/losslessness.md",
    "docs/your-verifier.md", "docs/in-service.md", "docs/choosing-a-drafter.md", "docs/mtp.md",
    "docs/serving.md", "docs/distributed.md", "docs/results.md", "docs/verifiers.md",
]  # fmt: skip
MAX_LINES = 400
MAX_FILES = 15  # of a room
OTHERS = set(sys.stdlib_module_names) | set(packages_distributions()) - {"headstart"}

SOURCES = sorted(p for folder in ORDER for p in (ROOT / folder).rglob("*.py"))
PACKAGE = [ROOT / "__init__.py", ROOT / "script.py", ROOT / "lock.py", *SOURCES]
ROOMS = sorted(p.parent for p in SOURCES if p.name == "__init__.py" and p.parent.parent != ROOT)
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


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


def test_script_and_lock_are_below_every_folder() -> None:
    for path in (ROOT / "__init__.py", ROOT / "script.py", ROOT / "lock.py"):
        assert not [m for m in imported(path) if m.split(".")[0] == "headstart"]


def is_script(path: Path) -> bool:
    """Whether it is there to be run."""
    return 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("floor", ORDER)
def test_rooms_form_an_order(floor: str) -> None:
    """No room leads back to itself, through whichever others."""
    _, graph = rooms.rooms(ROOT, floor)
    assert rooms.circles(graph) == []


@pytest.mark.parametrize("floor", ORDER)
def test_file_sits_in_a_room_or_is_a_script(floor: str) -> None:
    beside = [p for p in (ROOT / floor).glob("*.py") if p.stem != "__init__"]
    named = CONTRACTS if floor == "models" else []
    loose = [name(p) for p in beside if not is_script(p) and p.stem not in named]
    assert sorted(loose) == sorted(f"{p}.py" for p in PUBLIC if p.startswith(f"{floor}/"))


@pytest.mark.parametrize("file", PUBLIC)
def test_an_old_name_only_imports(file: str) -> None:
    tree = ast.parse((ROOT / f"{file}.py").read_text(encoding="utf-8"))
    assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in tree.body)
    held = [n.targets[0].id for n in tree.body if isinstance(n, ast.Assign)]
    assert held == ["__all__"]


def test_nothing_but_a_test_imports_a_script() -> None:
    scripts = {f"headstart.{name(p)[:-3].replace('/', '.')}" for p in SOURCES if is_script(p)}
    assert len(scripts) > 10
    leaves = [
        (name(path), target)
        for path in SOURCES
        for target in imported(path)
        if target in scripts or target.rpartition(".")[0] in scripts
    ]
    assert not leaves


def test_nothing_imports_an_old_name() -> None:
    old = {f"headstart.{file.replace('/', '.')}" for file in PUBLIC}
    for path in SOURCES:
        assert not [t for t in imported(path) if t in old or t.rpartition(".")[0] in old]


@pytest.mark.parametrize("floor", ORDER)
def test_no_room_is_a_hall(floor: str) -> None:
    held, _ = rooms.rooms(ROOT, floor)
    assert not [room for room, files in held.items() if len(files) > MAX_FILES]


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_room_says_in_one_line_what_it_is_for(room: Path) -> None:
    line = (room / "__init__.py").read_text(encoding="utf-8")
    assert line.startswith('"""') and line.endswith('."""\n') and line.count("\n") == 1
    assert "mport" in line, "what it may import"
    assert room.name not in OTHERS


def test_checker_sees_a_circle_a_loose_arrow_and_a_step_up(tmp_path: Path) -> None:
    files = {
        "models/a/one.py": "from headstart.models.b import two\n",
        "models/b/two.py": "import headstart.models.c\n",
        "models/c.py": "from headstart.models.a.one import x\nfrom headstart.eval.d import y\n",
        "models/e/three.py": "from headstart.models.a.one import x\n",
        "eval/d.py": "",
    }
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    _, graph = rooms.rooms(tmp_path, "models")
    assert graph["models/e/"] == {"models/a/"}
    assert rooms.circles(graph) == [{"models/a/", "models/b/", "models/c"}]
    assert rooms.upward(tmp_path) == [("models.c", "headstart.eval.d.y")]
    (tmp_path / "models/c.py").write_text("")
    assert rooms.circles(rooms.rooms(tmp_path, "models")[1]) == []
    assert rooms.upward(tmp_path) == []


@pytest.mark.parametrize("path", [*PACKAGE, *TESTS], ids=name)
def test_imports_are_absolute(path: Path) -> None:
    bare = set(FOLDERS) | {"script", "lock"}
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
