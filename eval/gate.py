"""Ship, tune or switch off? A verdict on a drafter, with the reason and the number behind it.

    python eval/gate.py outputs/benchmark/benchmark.json outputs/quickstart/report.json \\
        --concurrency 8 --max_p99 60

reads reports of eval/benchmark.py and eval/acceptance.py, any number of one drafter. Exit code 0:
ship, serve it so; 3: tune, it pays or could pay with the change named; 4: switch off, it costs more
than it brings or harms the output. (2: a report or a setting is wrong.) What was not measured is
never taken as good: it says tune, and names the command that measures it.
"""

import json
import sys
from dataclasses import dataclass
from itertools import takewhile

from headstart.eval.gating.checks import Thresholds
from headstart.eval.gating.evidence import read
from headstart.eval.gating.verdict import judge


@dataclass(kw_only=True)
class Gate(Thresholds):
    """Settings of a verdict."""

    reports: list[str]
    """The reports; may be given without this name, before all other settings."""


def run(settings: Gate) -> int:
    """Print the verdict; its exit code."""
    verdict = judge([read(path) for path in settings.reports], settings)
    print(verdict)
    return verdict.code


def arguments(words: list[str]) -> list[str]:
    """Reports before the first setting are its `--reports`."""
    reports = list(takewhile(lambda word: not word.startswith("-"), words))
    return [*(["--reports", json.dumps(reports)] if reports else []), *words[len(reports) :]]


if __name__ == "__main__":
    from headstart.script import run_script

    sys.argv[1:] = arguments(sys.argv[1:])
    run_script(Gate, lambda settings: sys.exit(run(settings)))
