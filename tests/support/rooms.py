"""The rooms of each floor, and what they import of each other: `python tests/support/rooms.py`.

A room is a folder inside a floor; a file beside the rooms is a room of its own. An arrow is a pair
of rooms, one of which imports something of the other; a circle, rooms that lead back to themselves.
"""

import ast
import sys
from pathlib import Path

FLOORS = ("models", "data", "eval", "train")
Graph = dict[str, set[str]]


def modules(root: Path, floor: str) -> dict[str, Path]:
    """Dotted name, below headstart, of every module of a floor."""
    files = sorted((root / floor).rglob("*.py"))
    return {
        ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p
        for p in files
    }


def imported(path: Path) -> set[str]:
    """Every module that `path` imports, relative ones with their dots: `from a import b` gives
    a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def edges(root: Path, floor: str) -> Graph:
    """Module -> the modules of the same floor that it imports."""
    known = modules(root, floor)
    graph: Graph = {}
    for name, path in known.items():
        graph[name] = set()
        for target in imported(path):
            parts = target.removeprefix("headstart.").split(".")
            for length in (len(parts), len(parts) - 1):
                module = ".".join(parts[:length])
                if target.startswith("headstart.") and length > 1 and module in known:
                    graph[name].add(module)
                    break
    return graph


def room_of(module: str, floor_modules: dict[str, Path]) -> str:
    """floor/room for a file in a folder, floor/file for one beside the rooms."""
    parts = module.split(".")
    is_room = floor_modules[module].name == "__init__.py" or len(parts) > 2
    return "/".join(parts[:2]) + ("/" if is_room and len(parts) > 1 else "")


def rooms(root: Path, floor: str) -> tuple[dict[str, list[str]], Graph]:
    """Room -> its files, and room -> other rooms that it imports."""
    known = modules(root, floor)
    held: dict[str, list[str]] = {}
    for module, path in known.items():
        if module != floor and path.name != "__init__.py":
            held.setdefault(room_of(module, known), []).append(module)
    graph: Graph = {room: set() for room in held}
    for module, targets in edges(root, floor).items():
        for target in targets:
            if module == floor or known[target].name == "__init__.py":
                continue
            a, b = room_of(module, known), room_of(target, known)
            if a != b and a in graph:
                graph[a].add(b)
    return held, graph


def circles(graph: Graph) -> list[set[str]]:
    """Sets of rooms each of which leads to every other."""
    reach: Graph = {}
    for start in graph:
        seen, todo = set(), list(graph[start])
        while todo:
            room = todo.pop()
            if room not in seen:
                seen.add(room)
                todo += graph.get(room, ())
        reach[start] = seen
    found: list[set[str]] = []
    for room, seen in reach.items():
        circle = {other for other in seen if room in reach[other]}
        if room in seen and circle not in found:
            found.append(circle)
    return found


def upward(root: Path) -> list[tuple[str, str]]:
    """Modules that import one of a floor above theirs."""
    found = []
    for number, floor in enumerate(FLOORS):
        above = tuple(f"headstart.{f}" for f in FLOORS[number + 1 :])
        for module, path in modules(root, floor).items():
            found += [(module, t) for t in imported(path) if f"{t}.".startswith(above)]
    return found


def table(root: Path) -> str:
    """Files, rooms, arrows and circles of every floor, then every room."""
    lines = ["| floor | files | rooms | arrows | imports | circles |", "|---|---|---|---|---|---|"]
    details = ["", "| room | files | imports |", "|---|---|---|"]
    for floor in FLOORS:
        held, graph = rooms(root, floor)
        files, arrows = sum(map(len, held.values())), sum(map(len, graph.values()))
        between = sum(map(len, edges(root, floor).values()))
        numbers = (files, len(held), arrows, between, len(circles(graph)))
        lines.append(f"| {floor} | " + " | ".join(map(str, numbers)) + " |")
        for room in sorted(held, key=lambda r: (not r.endswith("/"), r)):
            below = ", ".join(sorted(t.split("/", 1)[1] for t in graph[room]))
            details.append(f"| {room} | {len(held[room])} | {below or '–'} |")
        for circle in circles(graph):
            details.append(f"circle: {', '.join(sorted(circle))}")
    return "\n".join([*lines, *details, "", f"arrows up: {len(upward(root))}"])


if __name__ == "__main__":
    print(table(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[2]))
