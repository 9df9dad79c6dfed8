"""The verdict on a drafter: its checks, and the worst of them."""

from dataclasses import dataclass, field
from typing import Any

from headstart.eval.gating.checks import CHECKS, SWITCH_OFF, TUNE, Check, Thresholds
from headstart.eval.gating.evidence import Evidence, Report, gather
from headstart.eval.gating.gain import PAYS, gains

CODES = {"ship": 0, TUNE: 3, SWITCH_OFF: 4}


@dataclass
class Verdict:
    """What to do, at a concurrency and with some drafts."""

    concurrency: int
    drafts: str | None
    checks: list[Check] = field(default_factory=list)

    @property
    def value(self) -> str:
        results = {check.result for check in self.checks}
        return next((worst for worst in (SWITCH_OFF, TUNE) if worst in results), "ship")

    @property
    def code(self) -> int:
        return CODES[self.value]

    @property
    def reasons(self) -> list[Check]:
        """Behind the verdict: what failed, the worst first; all checks where none did."""
        failed = [c for worst in (SWITCH_OFF, TUNE) for c in self.checks if c.result == worst]
        return failed or self.checks

    def __str__(self) -> str:
        at = f"at concurrency {self.concurrency}" + (f" with {self.drafts}" if self.drafts else "")
        width = max(len(check.result) for check in self.checks)
        lines = []
        for c in self.checks:
            lines += [
                f"{c.result.ljust(width)}  {c.name}: {c.reason}",
                " " * (width + 4) + c.held(),
            ]
        return "\n".join([f"Verdict: {self.value}, {at}.", *lines])


def judge(reports: list[Report], thresholds: Thresholds) -> Verdict:
    """The verdict on the drafter of these reports.

    Raises:
        ValueError: reports that do not belong together, or without what is asked for.
    """
    t = thresholds
    evidence = gather(reports, t.concurrency, t.temperature, t.workload, t.data)
    point = chosen(evidence, t)
    drafts = t.drafts if point is None else point["drafts"]
    return Verdict(t.concurrency, drafts, [check(evidence, point, t) for check in CHECKS])


def chosen(evidence: Evidence, thresholds: Thresholds) -> dict[str, Any] | None:
    """The point of the drafts that are served with: those named, else the fastest of those that
    pay for sure, else the fastest. None where nothing was measured.

    Raises:
        ValueError: these drafts were not measured.
    """
    points = evidence.points
    if thresholds.drafts is None:
        measured, found = [p for p in points if p["measured"]["value"] is not None], gains(evidence)
        paid = [p for p in measured if found[p["drafts"]].state == PAYS]
        return max(paid or measured, key=lambda p: p["measured"]["value"], default=None)
    named = [p for p in points if p["drafts"] == thresholds.drafts]
    if points and not named:
        raise ValueError(
            f"drafts: {thresholds.drafts!r} was not measured, only "
            f"{', '.join(p['drafts'] for p in points)}"
        )
    return named[0] if named else None
