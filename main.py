"""Speculative decoding without a model, in seconds.

    python main.py --vocab 64 --alpha 0.75 --k 4 --samples 50000

runs eval/simulate.py; `--help` lists the settings.
"""

import sys

if __name__ == "__main__":
    try:
        from headstart.eval.simulate import Simulation, run
        from headstart.script import run_script
    except ModuleNotFoundError as error:
        if "." in str(error.name):  # a part of what is installed: a fault, not a missing set-up
            raise
        print(
            f"error: {error.name} is not installed; in the clone, run `pip install -e .`, or "
            "`make test` and then .venv/bin/python",
            file=sys.stderr,
        )
        sys.exit(2)
    run_script(Simulation, run)
