"""What reports say of a drafter in service: of eval/acceptance.py and of eval/benchmark.py."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.eval.service.sweep import OFF

Report = tuple[str, dict[str, Any]]
"""Its path and its content."""


def read(path: str) -> Report:
    """A report from its file.

    Raises:
        ValueError: it is none.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        kinds = [key for key in ("runs", "series") if key in result]
        if result["schema"] != 1 or len(kinds) != 1:
            raise ValueError("another schema")
    except (OSError, KeyError, TypeError, ValueError) as error:
        missing = "no such file" if not Path(path).exists() else "another content"
        missing = "no JSON, damaged" if isinstance(error, json.JSONDecodeError) else missing
        raise ValueError(
            f"reports: {path} is no report of this version of eval/acceptance.py or "
            f"eval/benchmark.py ({missing}); measure again"
        ) from error
    return path, result


@dataclass
class Rate:
    """A measured acceptance rate."""

    value: float
    low: float | None
    high: float | None
    source: str


@dataclass
class Texts:
    """Greedy texts, with drafts against without."""

    different: int
    prompts: int
    rejected: bool
    """Whether a draft was rejected on the way, so that caches had to be cut back."""
    source: str


@dataclass
class Evidence:
    """What has been measured of one drafter, at one workload, temperature and concurrency."""

    concurrency: int | None = None
    """Of `points`; None: nothing was measured at the wanted one or above."""
    points: list[dict[str, Any]] = field(default_factory=list)
    """Of `fit.point`."""
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of `cells.measures`, by drafts; empty without a benchmark."""
    speed_source: str = ""
    """The report that `points` come from."""
    rates: list[Rate] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    texts: list[Texts] = field(default_factory=list)
    lossy: list[str] = field(default_factory=list)
    """Where typical acceptance was used."""
    answer_tokens: float | None = None
    """Mean length of an answer."""
    parameters: int | None = None
    """Of the verifier."""
    hidden_size: int | None = None
    """Of the verifier; None: a server's, or of a report that does not say."""
    mtp_modules: int = 0
    """That the verifier ships with."""
    kind: str | None = None
    """The drafter's type."""


def gather(
    reports: list[Report],
    concurrency: int,
    temperature: float,
    workload: str | None = None,
    data: str | None = None,
) -> Evidence:
    """The evidence at the user's settings, or at the nearest that were measured: the lowest
    concurrency and temperature not below them.

    Raises:
        ValueError: reports of several drafters or verifiers, or without the workload or data.
    """
    check(reports, data)
    found = Evidence()
    benchmarks = [report for report in reports if "series" in report[1]]
    if workload is not None and not benchmarks:
        raise ValueError(
            f"workload: {workload!r} is looked for in reports of eval/benchmark.py, and none is "
            "given; add one, or leave --workload out"
        )
    for path, result in reports:
        with whole(path):
            _of_the_models(found, result)
    for path, result in [report for report in reports if "runs" in report[1]]:
        with whole(path):
            _from_acceptance(found, path, result, temperature, data, concurrency, not benchmarks)
    for path, result in benchmarks:
        with whole(path):
            _from_benchmark(found, path, result, temperature, workload, concurrency)
    return found


@contextmanager
def whole(path: str) -> Iterator[None]:
    """What a report lacks is named with its file."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"reports: {path} is damaged, it lacks or misplaces {error}; measure again"
        ) from error


def nearest(wanted: float, there: list[float]) -> float:
    """The lowest that is not below, else the highest."""
    return min((value for value in there if value >= wanted), default=max(there))


def check(reports: list[Report], data: str | None) -> None:
    """Raise a ValueError where reports do not belong together, or none has a run on `data`."""
    for kind in ("drafter", "verifier"):
        marks: dict[str, str] = {}
        for path, result in reports:
            with whole(path):
                mark = result[kind] and result[kind]["fingerprint"]
            if mark is not None:
                marks[mark] = path
        if len(marks) > 1:
            raise ValueError(
                f"reports: {' and '.join(marks.values())} are of different {kind}s "
                f"(fingerprints {' and '.join(marks)}); judge one pair at a time"
            )
    runs = [run for _, result in reports for run in result.get("runs", [])]
    if data is not None and all(run["settings"]["data"] != data for run in runs):
        raise ValueError(f"data: no report has a run on {data}")


def _of_the_models(found: Evidence, result: dict[str, Any]) -> None:
    """What kind of drafter, and the verifier's size: reports of before do not say the latter."""
    drafter, verifier = result["drafter"] or {}, result["verifier"] or {}
    found.kind = drafter.get("type", found.kind)
    found.hidden_size = verifier.get("hidden_size", found.hidden_size)
    found.mtp_modules = verifier.get("mtp_modules", found.mtp_modules)


def _from_acceptance(
    found: Evidence,
    path: str,
    result: dict[str, Any],
    temperature: float,
    data: str | None,
    concurrency: int,
    alone: bool,
) -> None:
    runs = [run for run in result["runs"] if data in (None, run["settings"]["data"])]
    if not runs:
        return
    found.temperatures += [run["settings"]["temperature"] for run in runs]
    at = nearest(temperature, [run["settings"]["temperature"] for run in runs])
    for run in runs:
        settings = run["settings"]
        where = f"{path}, {settings['data']}, T = {settings['temperature']:g}"
        if settings["acceptance"] != "exact":
            found.lossy.append(where)
            continue
        widest = run["overall"] if run["replay"] is None else run["replay"]["all"]
        if settings["temperature"] == at:
            rate = widest["acceptance_rate"]["value"]
            if settings["shape"] == "chain" and rate is not None:
                found.rates.append(rate_of(widest["acceptance_rate"], where))
            if alone:
                found.answer_tokens = run["overall"]["tokens"] / run["overall"]["prompts"]
        if run["lossless"] is not None:
            rate = run["overall"]["acceptance_rate"]["value"]
            rejected = rate is not None and rate < 1
            judged = run["lossless"]
            found.texts.append(Texts(judged["different"], judged["prompts"], rejected, where))
    if alone and concurrency == 1 and result["speed"]:
        found.concurrency, found.speed_source = 1, path
        # before it stood beside each speed, the number of prompts was the setting alone
        prompts = result.get("provenance", {}).get("recipe", {}).get("speed_prompts", 0)
        found.points = [_speed_point(entry, prompts) for entry in result["speed"]]


def rate_of(measure: dict[str, Any], source: str) -> Rate:
    """α with its interval, as a report has it."""
    return Rate(measure["value"], measure["low"], measure["high"], source)


def _speed_point(entry: dict[str, Any], prompts: int) -> dict[str, Any]:
    """An entry of an acceptance report's speed, as a benchmark has it."""
    chain = entry["shape"] == "chain"
    overhead = entry["draft_length"] * entry["cost_ratio"] + entry["verify_overhead"]
    overhead += entry.get("drafting_fixed") or 0.0  # earlier reports have it in the cost ratio
    length = entry["acceptance_length"]
    return {
        "drafts": f"chain:{entry['draft_length']}" if chain else entry["shape"],
        "draft_length": entry["draft_length"],
        "prompts": entry.get("prompts", prompts),
        "seconds": entry.get("seconds"),
        "measured": {"value": entry["measured"], "low": entry["low"], "high": entry["high"]},
        "overhead": overhead,
        "acceptance_length": length,
        "draft_efficiency": (length - 1) / entry["draft_length"] if chain and length else None,
        "breakeven_efficiency": overhead / entry["draft_length"] if chain else None,
    }


def _from_benchmark(
    found: Evidence,
    path: str,
    result: dict[str, Any],
    temperature: float,
    workload: str | None,
    concurrency: int,
) -> None:
    names = list(dict.fromkeys(entry["workload"] for entry in result["series"]))
    if workload is not None and workload not in names:
        raise ValueError(f"workload: {path} has no {workload!r}, only {', '.join(names)}")
    mine = [entry for entry in result["series"] if entry["workload"] == (workload or names[0])]
    found.temperatures += [entry["temperature"] for entry in mine]
    at = nearest(temperature, [entry["temperature"] for entry in mine])
    judged = next(entry for entry in mine if entry["temperature"] == at)
    if result["verifier"] is not None:
        found.parameters = result["verifier"]["parameters"]
    found.speed_source = path
    there = [e["concurrency"] for e in judged["by_concurrency"]]
    for cell in result["cells"]:
        if cell.get("lossless"):
            where = f"{path}, concurrency {cell['concurrency']}, {cell['drafts']}"
            rejected = (
                bool(cell["acceptance"])
                and (cell["acceptance"]["acceptance_rate"]["value"] or 1) < 1
            )
            judged_texts = cell["lossless"]
            found.texts.append(
                Texts(judged_texts["different"], judged_texts["prompts"], rejected, where)
            )
    if not there or max(there) < concurrency:
        return
    found.concurrency = int(nearest(concurrency, there))
    entry = next(e for e in judged["by_concurrency"] if e["concurrency"] == found.concurrency)
    found.points = entry["points"]
    found.cells = {
        cell["drafts"]: cell
        for cell in result["cells"]
        if (cell["workload"], cell["temperature"], cell["concurrency"])
        == (judged["workload"], at, found.concurrency)
    }
    plain = found.cells[OFF]
    found.answer_tokens = plain["tokens"] / plain["requests"]
