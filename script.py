"""What every script shares: settings from YAML and the command line, errors in one line."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jsonargparse import auto_cli

Settings = TypeVar("Settings")
ROOT = Path(__file__).resolve().parent


def run_script(settings_class: type[Settings], run: Callable[[Settings], Any]) -> None:
    """Read `settings_class` from `--config FILE` and dotted overrides, and hand it to `run`.

    Arguments apply in order, so `--config` comes first. `--print_config` shows the resolved
    settings. A ValueError is the user's to mend: it ends the program with one line and code 2.
    """
    try:
        settings = auto_cli(settings_class, as_positional=False, args=arguments(sys.argv[1:]))
        run(settings)
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped by the user", file=sys.stderr)
        sys.exit(130)


def arguments(argv: list[str]) -> list[str]:
    """Dashes in option names become underscores; a shipped recipe is found from anywhere."""
    words = []
    for word in argv:
        option = re.match(r"--[A-Za-z][\w.-]*", word)
        if option:
            word = "--" + option[0][2:].replace("-", "_") + word[option.end() :]
        elif words and words[-1] == "--config" and not Path(word).exists():
            shipped = ROOT / word
            word = str(shipped) if shipped.exists() else word
        words.append(word)
    return words
