"""Does drafting pay? The whole generation cycle, with drafts and without, over concurrency.

    python eval/benchmark.py --drafter outputs/quickstart/best --out outputs/benchmark

measures in our own batched loop; of a running server with OpenAI's interface, in streamed answers:

    python eval/benchmark.py --out outputs/served --servers \\
        '[{url: "http://localhost:8000/v1"}, {url: "http://localhost:8001/v1", drafts: "chain:3"}]'

Draft lengths (and trees) × concurrency × workloads × temperatures, in turn on the same prompts.
Writes trials.jsonl as it goes, so that the same command continues a stopped benchmark; and from it
benchmark.json, PNGs, and benchmark.html, one page with the verdict of eval/gate.py on top.
"""

from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from headstart.eval.gating.checks import Thresholds
from headstart.eval.gating.evidence import Report, check, read
from headstart.eval.gating.verdict import Verdict, judge
from headstart.eval.measures.intervals import LEAST_TRIALS
from headstart.eval.reports import report
from headstart.eval.reports.measuring import fingerprint_of, size_of
from headstart.eval.service import cells, fit, page
from headstart.eval.service.own_loop import lossless, own_loop
from headstart.eval.service.server_loop import Server, servers_loop
from headstart.eval.service.sweep import (
    OFF,
    Cell,
    Measure,
    Trial,
    TrialFile,
    groups,
    measure_group,
    warmed,
)
from headstart.eval.service.workload import Prompt, Workload, prompts
from headstart.models import loading
from headstart.models.drafter import Drafter, check_depth
from headstart.models.proposal import trees
from headstart.models.proposal.sampling import Sampling, check_seed
from headstart.models.proposal.trees import Shape
from headstart.models.verifier.verifier import Verifier


@dataclass(kw_only=True)
class Benchmark:
    """Settings of a benchmark."""

    out: str
    """Folder for what is measured, and to continue."""
    drafter: str | None = None
    """A checkpoint's folder, prompt-lookup, lookahead, layers:0-5, or a model with the verifier's
    tokenizer; none with servers."""
    verifier: str | None = None
    """Default: the verifier the drafter was trained for; needed for any other drafter."""
    allow_verifier: bool = False
    """Accept a verifier with another fingerprint, such as a quantised copy of the drafter's."""
    servers: list[Server] = field(default_factory=list)
    """Measure running servers instead: one without drafts, others with some."""
    draft_lengths: tuple[int, ...] = (1, 2, 4, 8)
    """K of each chain; of a server, its own drafts say it."""
    trees: list[str] = field(default_factory=list)
    """Trees too: dynamic:depth=5,top_k=10,total=60, eagle2, static:4x2x2 or static:paths.json."""
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Answers written at the same time."""
    workloads: list[Workload] = field(default_factory=lambda: [Workload()])
    temperatures: tuple[float, ...] = (0.0,)
    drafting: str = "greedy"
    """greedy: the drafter's best token; sampled: drawn from its law at the verifier's temperature;
    a server decides for itself."""
    seconds: float = 40.0
    """Spent on a cell, about."""
    least_trials: int = LEAST_TRIALS
    """Of a cell, whatever they take; with fewer there is no interval."""
    requests_per_slot: int = 4
    """Prompts that each of a server's slots gets in a trial, on average."""
    reports: list[str] = field(default_factory=list)
    """report.json files of eval/acceptance.py, for the gate."""
    gate: Thresholds = field(default_factory=Thresholds)
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if bool(self.servers) == (self.drafter is not None):
            raise ValueError("give either drafter or servers, one of the two")
        if self.servers:
            self._check_servers()
        for name in ("draft_lengths", "concurrency", "workloads", "temperatures"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one")
        for name in ("draft_lengths", "concurrency"):
            if min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be 1 or more each, got {min(getattr(self, name))}")
        for name in ("least_trials", "requests_per_slot"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        check_seed(self.seed)
        if self.seconds < 0:
            raise ValueError(f"seconds must be 0 or more, got {self.seconds}")
        if self.drafting not in ("greedy", "sampled"):
            raise ValueError(f"drafting must be greedy or sampled, got {self.drafting!r}")
        for temperature in self.temperatures:
            Sampling(temperature)
        for tree in self.trees:
            if trees.optimal_budget(tree) is not None:
                raise ValueError(
                    f"trees: {tree} is fitted to a drafter by eval/acceptance.py; pass a static "
                    "or dynamic tree here"
                )
        names = [workload.name for workload in self.workloads]
        if len(set(names)) < len(names):
            raise ValueError(f"workloads: two have one name, in {', '.join(names)}")
        gate, shapes = self.gate, shapes_of(self)
        if gate.drafts is not None and gate.drafts not in shapes:
            raise ValueError(
                f"gate.drafts {gate.drafts!r} is not measured, {', '.join(shapes)} are"
            )
        if gate.workload is not None and gate.workload not in names:
            raise ValueError(f"gate.workload {gate.workload!r} is none of {', '.join(names)}")

    def _check_servers(self) -> None:
        drafts = [server.drafts for server in self.servers]
        if drafts.count(OFF) != 1 or len(drafts) < 2 or len(set(drafts)) < len(drafts):
            raise ValueError(
                "servers: one must be without drafts (off) and one or more with others, each once, "
                f"got {', '.join(drafts)}"
            )
        for name, value in (("trees", []), ("drafting", "greedy"), ("verifier", None)):
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is not used with servers; leave it out"
                )


def shapes_of(settings: Benchmark) -> dict[str, Shape]:
    """What is drafted, by name, the chains first."""
    if settings.servers:
        shapes = [trees.parse(s.drafts) for s in settings.servers if s.drafts != OFF]
    else:
        chains = map(trees.chain, settings.draft_lengths)
        shapes = [*chains, *map(trees.parse, settings.trees)]
    return {shape.name: shape for shape in shapes}


Asked = dict[str, tuple[Workload, list[Prompt]]]


def cells_of(settings: Benchmark) -> list[Cell]:
    """Group by group, plain decoding first in each."""
    axes = product(settings.workloads, settings.temperatures, settings.concurrency)
    return [
        Cell(workload.name, float(temperature), concurrency, drafts)
        for workload, temperature, concurrency in axes
        for drafts in (OFF, *shapes_of(settings))
    ]


def recorded(settings: Benchmark, identity: dict[str, Any]) -> dict[str, Any]:
    """What trials in one file must have in common."""
    shared = ("drafting", "requests_per_slot", "seed", "dtype", "device")
    return {
        "identity": identity,
        "servers": [asdict(server) for server in settings.servers],
        "drafts": list(shapes_of(settings)),
        **{name: getattr(settings, name) for name in shared},
        "workloads": {workload.name: asdict(workload) for workload in settings.workloads},
    }


def summary(
    settings: Benchmark, file: TrialFile, asked: Asked, verifier: Verifier | None
) -> list[dict[str, Any]]:
    """The report's cells, of what has been measured so far."""
    found = []
    for group in groups(cells_of(settings)):
        plain = _trials(file, group[0])
        for cell in group:
            trials = _trials(file, cell)
            if not trials:
                continue
            entry = cells.measures(cell, trials) | {"speedup": None, "lossless": None}
            if cell.drafts != OFF:
                entry["speedup"] = cells.speedup(plain, trials)
                if verifier is not None:
                    entry["lossless"] = lossless(verifier, asked[cell.workload][1], plain, trials)
            found.append(entry)
    return found


def _trials(file: TrialFile, cell: Cell) -> list[Trial]:
    return [trial for (its, _), trial in file.trials.items() if its == cell]


def own_back_end(
    settings: Benchmark, asked: Asked
) -> tuple[Measure, dict[str, Any], dict[str, Any], Verifier]:
    """What measures, the report's entries of drafter and verifier, and the verifier."""
    verifier, drafter = loading.load_pair(
        settings.verifier,
        settings.drafter,
        settings.dtype,
        settings.device,
        settings.allow_verifier,
    )
    for name, shape in shapes_of(settings).items():
        check_depth(drafter.max_depth, shape.depth, f"the depth of {name}")
    sampled = settings.drafting == "sampled"
    measure = own_loop(verifier, drafter, shapes_of(settings), asked, sampled, settings.seed)
    return measure, _drafter_entry(settings, drafter), _verifier_entry(verifier), verifier


def _drafter_entry(settings: Benchmark, drafter: Drafter) -> dict[str, Any]:
    return {
        "type": loading.kind_of(drafter),
        "path": settings.drafter,
        "fingerprint": fingerprint_of(drafter),
    }


def _verifier_entry(verifier: Verifier) -> dict[str, Any]:
    return {
        "name": verifier.name,
        "fingerprint": verifier.fingerprint(),
        "parameters": sum(p.numel() for p in verifier.model.parameters()),
    }


def run(settings: Benchmark) -> None:
    """Measure what is missing, and say what follows."""
    out = report.folder(settings.out)
    asked = {workload.name: (workload, prompts(workload)) for workload in settings.workloads}
    others = [read(path) for path in settings.reports]  # before anything is measured
    verifier = None
    if settings.servers:
        measure = servers_loop(settings.servers, asked, settings.requests_per_slot, settings.seed)
        drafter_entry, verifier_entry = None, None
    else:
        measure, drafter_entry, verifier_entry, verifier = own_back_end(settings, asked)
    identity = {"drafter": drafter_entry, "verifier": verifier_entry}
    check([(settings.out, identity), *others], settings.gate.data)
    file = TrialFile(out, recorded(settings, identity))
    measure = warmed(measure)
    planned = groups(cells_of(settings))
    try:
        for number, group in enumerate(planned, 1):
            name = f"{group[0].workload}, T = {group[0].temperature:g}"
            print(f"{number} of {len(planned)}: {name}, concurrency {group[0].concurrency}, "
                  f"{', '.join(cell.drafts for cell in group)}: ", end="", flush=True)  # fmt: skip
            new = measure_group(file, group, measure, settings.seconds, settings.least_trials)
            there = len(file.group(group[0].group)) - new
            print(f"{new} trials measured" + (f", {there} kept from before" if there else ""))
    finally:  # stopped, too, it says what it has
        if file.trials:
            found = summary(settings, file, asked, verifier)
            if verifier is not None:  # not in what a continued benchmark is held against
                identity["verifier"] |= size_of(verifier)
            conclude(settings, identity, found, others, out)


def conclude(
    settings: Benchmark,
    identity: dict[str, Any],
    found: list[dict[str, Any]],
    others: list[Report],
    out: Path,
) -> None:
    """Print and write what follows from the cells."""
    result = {
        "schema": 1,
        **identity,
        "servers": [asdict(server) for server in settings.servers],
        "cells": found,
        "series": fit.series(found),
        "provenance": report.provenance(asdict(settings)),
    }
    reports = [(str(out / "benchmark.json"), result), *others]
    verdict = judge(reports, settings.gate)
    elsewhere = [
        judge(reports, replace(settings.gate, concurrency=concurrency))
        for concurrency in settings.concurrency
    ]
    page.write(result, opinion(verdict), [opinion(other) for other in elsewhere], out)
    print(f"\n{page.table(result)}\n\n{verdict}\nwrote {out}/benchmark.json, benchmark.html")


def opinion(verdict: Verdict) -> page.Opinion:
    """The gate's verdict, for the page."""
    return page.Opinion(
        verdict.value,
        verdict.concurrency,
        verdict.drafts,
        holds=not verdict.code,
        reasons=[f"{check.name}: {check.reason}" for check in verdict.reasons],
        checks=[
            [c.name, c.result, c.value, c.bound, c.threshold, c.source, c.reason]
            for c in verdict.checks
        ],
    )


if __name__ == "__main__":
    from headstart.script import run_script

    run_script(Benchmark, run)
