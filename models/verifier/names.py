"""What a model's name is: an embedded model, a folder on this machine, or a name of the Hub."""

import re
from pathlib import Path

PREFIX = "embedded/"
HINT = "Pass embedded/smollm2-135m, a local folder, or a Hub name."


def is_embedded(name: str) -> bool:
    """Whether the package index carries it."""
    return name.startswith(PREFIX)


def is_path(name: str) -> bool:
    """Whether this leads to a place on this machine, there or not, and is no name of the Hub.

    `outputs/nope` reads like a name of the Hub, but its first part is a folder here.
    """
    if is_embedded(name):
        return False
    path = Path(name)
    inside = path.parent != Path(".") and path.parent.is_dir()
    return inside or path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1


def split_length(name: str) -> tuple[str, int | None]:
    """MODEL@TOKENS -> its parts; of anything else, the name and None."""
    found = re.fullmatch(r"(.+)@(\d+)", name)
    if found is None or Path(name).exists():
        return name, None
    return found[1], int(found[2])


def check_there(field: str, name: str, hint: str = HINT) -> None:
    """Raise a ValueError for a path, the value of `field`, that leads to no folder."""
    path = Path(name)
    if not is_path(name) or path.is_dir():
        return
    what = "a file, not a folder" if path.exists() else "no such folder"
    inside = path.parent != Path(".") and path.parent.is_dir() and not path.exists()
    what += f" in {str(path.parent)!r}" if inside else ""
    raise ValueError(f"{field} {name!r}: {what}. {hint}")
