"""What drafting brings: the measured ratio to plain decoding, and whether its interval says so."""

import math
from dataclasses import dataclass
from typing import Any

from headstart.eval.gating.evidence import Evidence
from headstart.eval.measures.intervals import LEAST_PROMPTS, LEAST_TRIALS
from headstart.eval.reports import report

PAYS, COSTS, OPEN = "pays", "costs", "open"


@dataclass
class Gain:
    """Speed with some drafts / without."""

    drafts: str
    value: float | None
    low: float | None
    """Of the 95 % interval; None: too few units for one."""
    high: float | None
    units: int
    least: int
    """Units that an interval takes."""
    unit: str
    """trials or prompts."""
    seconds: float | None
    """Measured so far, of a cell; None: not recorded."""
    source: str

    @property
    def state(self) -> str:
        """pays: the lower bound is above 1; costs: the upper bound is below; else open."""
        if self.low is None or self.high is None:
            return OPEN
        return PAYS if self.low > 1 else COSTS if self.high < 1 else OPEN

    def __str__(self) -> str:
        return f"{report.interval(vars(self), 2)} times plain decoding with {self.drafts}"

    def longer(self) -> str:
        """How much more measuring would settle it, if the mean is right: an interval's half-width,
        on the log scale, falls with the root of the number of units."""
        if self.value is None or self.value <= 0:
            return "measure it again"
        if self.low is None or self.high is None:
            more = self._more(self.least / max(self.units, 1))
            return f"measure longer: {more} give an interval, which takes {self.least} {self.unit}"
        mean = math.log(self.value)
        side = "low" if mean > 0 else "high"
        half = abs(math.log(getattr(self, side)) - mean)
        if abs(mean) < half / 100:
            return "with and without drafts are equally fast, and no measuring will tell them apart"
        more = self._more(max((half / mean) ** 2, 1 + 1 / self.units))
        bound = "a bound above 1" if mean > 0 else "an upper bound below 1"
        return f"measure longer: {more} give {bound} if the mean is right"

    def _more(self, times: float) -> str:
        units = max(math.ceil(self.units * times) - self.units, 1)
        if self.seconds is None:
            return f"{units} more {self.unit}"
        seconds = self.seconds * units / max(self.units, 1)
        if self.unit == "prompts":
            return f"{seconds:.0f} more seconds (--speed_prompts {self.units + units})"
        return f"{seconds:.0f} more seconds a cell (--seconds {self.seconds + seconds:.0f})"


def gains(evidence: Evidence) -> dict[str, Gain]:
    """Of all drafts measured at the evidence's concurrency, by their name.

    A report of before may have an interval of too few units, which held the truth less often than
    it said: it counts as none.
    """
    return {point["drafts"]: _gain(evidence, point) for point in evidence.points}


def _gain(evidence: Evidence, point: dict[str, Any]) -> Gain:
    measured, cells = point["measured"], evidence.cells
    cell = cells.get(point["drafts"])
    if cell is None:
        unit, least, units, seconds = "prompts", LEAST_PROMPTS, point["prompts"], point["seconds"]
    else:
        unit, least, units = "trials", LEAST_TRIALS, cell["trials"]
        seconds = sum(one["seconds"] for one in cells.values()) / len(cells)
    enough = units >= least
    low, high = (measured[bound] if enough else None for bound in ("low", "high"))
    drafts, source = point["drafts"], evidence.speed_source
    return Gain(drafts, measured["value"], low, high, units, least, unit, seconds, source)
