"""What must hold before a drafter serves: the checks of eval/gate.py.

A check says ok, tune (it pays or could, with the change named) or switch off (it costs more than it
brings, or harms the output). What was not measured is never taken as good.
"""

from dataclasses import dataclass
from typing import Any

from headstart.eval.gating.evidence import Evidence
from headstart.eval.reports import report
from headstart.eval.service.sweep import OFF

OK, TUNE, SWITCH_OFF = "ok", "tune", "switch off"
BENCHMARK = "measure it with eval/benchmark.py"
LOSSLESSNESS = "check it with eval/acceptance.py at temperature 0"


@dataclass
class Thresholds:
    """What your service needs."""

    concurrency: int = 1
    """Answers written at the same time in your service."""
    temperature: float = 0.0
    """The highest you serve at."""
    drafts: str | None = None
    """What you serve with, such as chain:4; default: the fastest measured."""
    workload: str | None = None
    """Of the benchmark, the one like your traffic; default: its first."""
    data: str | None = None
    """The acceptance report's runs on this file are your traffic; default: all of its runs."""
    min_acceptance_rate: float = 0.55
    """Lowest α on your own traffic; below it, train a domain drafter."""
    max_p99: float | None = None
    """Longest P99 inter-token latency, in milliseconds; default: no limit."""
    min_answer_tokens: float = 50.0
    """Shortest mean answer that drafting is worth it for."""
    min_verifier_parameters: float = 3e9
    """Smaller verifiers need a measured gain."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be 1 or more, got {self.concurrency}")
        if not 0 <= self.min_acceptance_rate <= 1:
            raise ValueError(
                f"min_acceptance_rate must be in [0, 1], got {self.min_acceptance_rate}"
            )
        for name in ("temperature", "min_answer_tokens", "min_verifier_parameters"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.max_p99 is not None and self.max_p99 <= 0:
            raise ValueError(f"max_p99 must be above 0 milliseconds, got {self.max_p99}")


@dataclass
class Check:
    """One thing that must hold."""

    name: str
    result: str
    """ok, tune or switch off."""
    reason: str


def _drafted(evidence: Evidence, point: dict[str, Any] | None) -> float | None:
    """Drafts made at the point; of an acceptance report, more than none wherever τ is known."""
    if point is None:
        return None
    if point["drafts"] in evidence.cells:
        return evidence.cells[point["drafts"]]["drafted"]
    return None if point["acceptance_length"] is None else float("inf")


def drafting_is_on(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name, drafted = "drafting is on", _drafted(e, point)
    if point is None:
        return Check(name, TUNE, f"nothing measured at concurrency {t.concurrency}; {BENCHMARK}")
    if drafted is None:
        return Check(
            name, TUNE, "the server counts no drafts, so none may be made; look at its /metrics"
        )
    if drafted == 0:
        return Check(
            name, TUNE, f"0 tokens drafted with {point['drafts']}: drafting is not enabled; "
            "start the server with the drafter's serve command",
        )  # fmt: skip
    length = point["acceptance_length"]
    said = "drafts were made" if drafted == float("inf") else f"{drafted:,.0f} tokens drafted"
    return Check(name, OK, f"{said}, {length:.2f} tokens a pass")


def acceptance_rate(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name = "acceptance rate α"
    rates = [(rate.value, rate.source) for rate in e.rates]
    chains = [drafts for drafts in e.cells if drafts.startswith("chain:")]  # α is of chains
    if point is not None and point["drafts"] in chains:
        chains = [point["drafts"]]
    for drafts in [] if rates else chains:
        acceptance = e.cells[drafts]["acceptance"]
        if acceptance is not None and acceptance["acceptance_rate"]["value"] is not None:
            rates.append((acceptance["acceptance_rate"]["value"], f"the benchmark, {drafts}"))
    if not rates:
        return Check(name, TUNE, "not measured; measure it with eval/acceptance.py on your traffic")
    value, source = min(rates)
    if value < t.min_acceptance_rate:
        return Check(
            name, TUNE, f"{value:.3f} is below {t.min_acceptance_rate:g} ({source}): train a "
            "domain drafter on your own traffic, docs/your-verifier.md",
        )  # fmt: skip
    return Check(name, OK, f"{value:.3f}, at least {t.min_acceptance_rate:g} ({source})")


def _p99(evidence: Evidence, drafts: str) -> float | None:
    """In milliseconds."""
    cell = evidence.cells.get(drafts)
    return cell and 1000 * cell["inter_token"]["p99"]


def _pays(point: dict[str, Any]) -> bool:
    """By draft efficiency against break-even; by speed where either is not known."""
    efficiency, needed = point["draft_efficiency"], point["breakeven_efficiency"]
    if efficiency is None or needed is None:
        return (point["measured"]["value"] or 0.0) > 1
    return efficiency > needed


def tail_latency(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name = "P99 inter-token latency"
    p99 = _p99(e, point["drafts"]) if point else None
    plain = _p99(e, OFF)
    if p99 is None or plain is None:
        if t.max_p99 is None:
            return Check(name, OK, "no limit set (max_p99), and not measured")
        return Check(name, TUNE, f"not measured at concurrency {t.concurrency}; {BENCHMARK}")
    said = f"{p99:.1f} ms with {point['drafts']}, {plain:.1f} ms without"
    if t.max_p99 is None:
        return Check(name, OK, f"{said}; no limit set (max_p99)")
    if p99 <= t.max_p99:
        return Check(name, OK, f"{said}, limit {t.max_p99:g}")
    if plain > t.max_p99:
        return Check(
            name, TUNE, f"{said}, both over the limit of {t.max_p99:g}: it takes less concurrency "
            "or another limit",
        )  # fmt: skip
    said += f", over the limit of {t.max_p99:g}: a rejected round pays in full for one token"
    within = [p for p in e.points if _p99(e, p["drafts"]) <= t.max_p99 and _pays(p)]
    if within:
        best = max(within, key=lambda p: p["measured"]["value"])
        return Check(
            name, TUNE, f"{said}; {best['drafts']} keeps it, {_p99(e, best['drafts']):.1f} ms at "
            f"{best['measured']['value']:.2f} times plain decoding",
        )  # fmt: skip
    if min(p["draft_length"] for p in e.points) > 1:
        return Check(name, TUNE, f"{said}; measure shorter drafts, which make shorter rounds")
    return Check(name, SWITCH_OFF, f"{said}, and no measured drafts keep it and pay")


def break_even(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name = "draft efficiency above break-even"
    if point is None:
        return Check(name, TUNE, f"not measured at concurrency {t.concurrency}; {BENCHMARK}")
    if _drafted(e, point) == 0:
        return Check(name, TUNE, "not known, as nothing was drafted")
    efficiency, needed = point["draft_efficiency"], point["breakeven_efficiency"]
    said = (
        "" if efficiency is None or needed is None else f"{efficiency:.3f} against {needed:.3f}, "
    )
    said += f"{report.interval(point['measured'], 2)} times plain decoding"
    if e.concurrency != t.concurrency:
        said += f" at concurrency {e.concurrency}, the nearest measured"
    if _pays(point):
        return Check(name, OK, said)
    others = [p for p in e.points if _pays(p) and p["measured"]["value"]]
    if others:
        best = max(others, key=lambda p: p["measured"]["value"])
        return Check(
            name, TUNE,
            f"{said} with {point['drafts']}; {best['drafts']} pays, "
            f"{best['measured']['value']:.2f}",
        )  # fmt: skip
    return Check(
        name, SWITCH_OFF, f"{said} with {point['drafts']}: drafting costs more than it brings, "
        "with any drafts measured",
    )  # fmt: skip


def output_is_lossless(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name = "output is lossless"
    if e.lossy:
        return Check(name, SWITCH_OFF, f"typical acceptance is lossy ({e.lossy[0]}); use the exact "
                     "rule")  # fmt: skip
    if not e.texts:
        return Check(name, TUNE, f"not measured; {LOSSLESSNESS}")
    texts = sum(found.prompts for found in e.texts)
    wrong = max(e.texts, key=lambda found: found.different)
    if wrong.different:
        return Check(
            name, SWITCH_OFF, f"{wrong.different} of {wrong.prompts} greedy texts are not the "
            f"verifier's ({wrong.source}); see docs/losslessness.md",
        )  # fmt: skip
    return Check(name, OK, f"{texts} greedy texts are the verifier's own, ties apart")


def caches_are_cut_back(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    """After a rejection, what was drafted must be gone: a text that is still the verifier's shows
    it."""
    name = "cache rollback"
    rejected = [found for found in e.texts if found.rejected]
    if not rejected:
        return Check(name, TUNE, f"no greedy text with a rejected draft was compared; "
                     f"{LOSSLESSNESS}")  # fmt: skip
    wrong = sum(found.different for found in rejected)
    texts = sum(found.prompts for found in rejected)
    if wrong:
        return Check(name, SWITCH_OFF, f"{wrong} of {texts} texts went another way after "
                     "rejections: the cache may not be cut back")  # fmt: skip
    return Check(name, OK, f"{texts} texts came through rejected drafts unchanged")


def temperature_is_measured(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name, highest = "temperature", max(e.temperatures, default=None)
    if highest is None:
        return Check(name, TUNE, f"none was measured; {BENCHMARK}")
    if t.temperature > highest:
        return Check(
            name, TUNE, f"{t.temperature:g} is above the highest measured, {highest:g}: measure "
            f"there, or decode plainly above {highest:g}",
        )  # fmt: skip
    return Check(name, OK, f"{t.temperature:g}, measured up to {highest:g}")


def answers_are_long(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name = "answer length"
    if e.answer_tokens is None:
        return Check(name, TUNE, f"not measured; {BENCHMARK}")
    said = f"{e.answer_tokens:.0f} tokens on average"
    if e.answer_tokens <= t.min_answer_tokens:
        return Check(
            name, TUNE, f"{said}, not above {t.min_answer_tokens:g}: prefill decides there; "
            "decode short answers plainly",
        )  # fmt: skip
    return Check(name, OK, f"{said}, above {t.min_answer_tokens:g}")


def verifier_is_large(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name = "verifier's size"
    size = "size not known" if e.parameters is None else f"{e.parameters / 1e6:,.3g}M parameters"
    if (e.parameters or 0) >= t.min_verifier_parameters:
        return Check(name, OK, size)
    gain = point["measured"]["value"] if point else None
    if gain is not None and gain > 1:
        return Check(name, OK, f"{size}, but a measured gain: {gain:.2f} times plain decoding")
    least = f"{t.min_verifier_parameters / 1e9:g}B"
    return Check(
        name, TUNE, f"{size}, below {least} or unknown, and no gain was measured: drafting may "
        f"cost nearly as much as it saves",
    )  # fmt: skip


CHECKS = (
    drafting_is_on,
    acceptance_rate,
    tail_latency,
    break_even,
    output_is_lossless,
    caches_are_cut_back,
    temperature_is_measured,
    answers_are_long,
    verifier_is_large,
)
