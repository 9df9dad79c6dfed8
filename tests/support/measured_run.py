"""The main memory that a training run takes beyond what its imports did, in bytes, on Linux:
`python tests/support/measured_run.py eagle3 --config recipes/eagle3/smollm2-135m.yaml …`."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from headstart.script import parse
from headstart.train.run import recipe as shared

STATUS = Path("/proc/self/status")


def kilobytes(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())[1])


def fit(*arguments: Any) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading the verifier
    real_fit(*arguments)


real_fit, shared.fit = shared.fit, fit

if __name__ == "__main__":
    script = importlib.import_module(f"headstart.train.{sys.argv[1]}")
    settings = parse(script.Recipe, sys.argv[2:])
    before = kilobytes("VmRSS")
    script.run(settings)
    print(f"measured {(kilobytes('VmHWM') - before) * 1024}")
