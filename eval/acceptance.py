"""Acceptance report of a drafter: how much of what it drafts its frozen verifier accepts.

    python eval/acceptance.py --drafter outputs/quickstart/best --out outputs/quickstart

Replays the evaluation answers (every prompt, seconds), decodes some of the prompts for real, checks
that the text is the verifier's own, measures the speed of the same loop with and without drafts,
and writes report.json, report.md and acceptance.png. A run with typical acceptance, which is lossy,
is decoded only, and called so beside each of its figures. A stopped report is continued by the same
command, which measures no run twice.
"""

from headstart.eval.reports import report
from headstart.eval.reports.measurement import check_data
from headstart.eval.reports.measuring import Acceptance, measure
from headstart.lock import only_writer
from headstart.models.loading import load_pair


def run(settings: Acceptance) -> None:
    """Measure, print, and write the report."""
    out = report.folder(settings.out)  # before anything is measured that could not be written
    check_data(settings)
    with only_writer(out / ".report.lock", f"out {settings.out!r}"):
        verifier, drafter = load_pair(
            settings.verifier,
            settings.drafter,
            settings.dtype,
            settings.device,
            settings.allow_verifier,
        )
        report.write(measure(settings, verifier, drafter), out)
    print(f"wrote {out}/report.json, report.md, acceptance.png")


if __name__ == "__main__":
    from headstart.script import run_script

    run_script(Acceptance, run)
