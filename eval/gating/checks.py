"""What must hold before a drafter serves: the checks of eval/gate.py.

A check says ok, tune (it pays or could, with the change named) or switch off (it costs more than it
brings, or harms the output). What was not measured is never taken as good.
"""

from dataclasses import dataclass
from typing import Any

from headstart.eval.gating.evidence import Evidence, rate_of
from headstart.eval.gating.gain import COSTS, OPEN, PAYS, gains
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
    """What you serve with, such as chain:4; default: the fastest measured, of those that pay."""
    workload: str | None = None
    """Of the benchmark, the one like your traffic; default: its first."""
    data: str | None = None
    """The acceptance report's runs on this file are your traffic; default: all of its runs."""
    min_acceptance_rate: float = 0.55
    """Lowest α on your own traffic; below it, train a domain drafter, or switch off."""
    max_p99: float | None = None
    """Longest P99 inter-token latency, in milliseconds; default: no limit."""
    min_answer_tokens: float = 50.0
    """Shortest mean answer that drafting is worth it for."""
    min_verifier_parameters: float = 3e9
    """Smaller verifiers need a measured gain."""
    min_mtp_hidden_size: int = 4096
    """A verifier of this hidden size that ships MTP modules should be measured with them first."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be 1 or more, got {self.concurrency}")
        if not 0 <= self.min_acceptance_rate <= 1:
            raise ValueError(
                f"min_acceptance_rate must be in [0, 1], got {self.min_acceptance_rate}"
            )
        least = ("min_answer_tokens", "min_verifier_parameters", "min_mtp_hidden_size")
        for name in ("temperature", *least):
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
    value: str = "not measured"
    bound: str = "–"
    """Of the value's 95 % interval: the one that is held against the threshold."""
    threshold: str = "–"
    source: str = "–"
    """The report that the value comes from."""

    def held(self) -> str:
        """What was held against what."""
        return (
            f"value {self.value}, bound {self.bound}, threshold {self.threshold}, "
            f"source {self.source}"
        )


def _drafted(evidence: Evidence, point: dict[str, Any] | None) -> float | None:
    """Drafts made at the point; of an acceptance report, more than none wherever τ is known."""
    if point is None:
        return None
    if point["drafts"] in evidence.cells:
        return evidence.cells[point["drafts"]]["drafted"]
    return None if point["acceptance_length"] is None else float("inf")


def drafting_is_on(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name, drafted = "drafting is on", _drafted(e, point)
    held = {"threshold": "more than 0 tokens drafted", "source": e.speed_source or "–"}
    if point is None:
        said = f"nothing measured at concurrency {t.concurrency}; {BENCHMARK}"
        return Check(name, TUNE, said, **held)
    if drafted is None:
        said = "the server counts no drafts, so none may be made; look at its /metrics"
        return Check(name, TUNE, said, **held)
    if drafted == 0:
        return Check(
            name, TUNE, f"0 tokens drafted with {point['drafts']}: drafting is not enabled; "
            "start the server with the drafter's serve command", "0", **held,
        )  # fmt: skip
    length = point["acceptance_length"]
    said = "drafts were made" if drafted == float("inf") else f"{drafted:,.0f} tokens drafted"
    value = "more than 0" if drafted == float("inf") else f"{drafted:,.0f}"
    return Check(name, OK, f"{said}, acceptance length {length:.2f}", value, **held)


# ---- speed ---------------------------------------------------------------------------------------


def state(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> str:
    """Whether drafting pays with the point's drafts at the wanted concurrency; it costs where none
    of the drafts measured may pay."""
    if point is None or e.concurrency != t.concurrency or _drafted(e, point) == 0:
        return OPEN
    found = gains(e)
    if found[point["drafts"]].state == COSTS and any(g.state != COSTS for g in found.values()):
        return OPEN
    return found[point["drafts"]].state


def speed(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    """The measured ratio's interval decides: its lower bound above 1, or its upper bound below."""
    name, threshold = "speed against plain decoding", "lower bound above 1"
    if point is None:
        said = f"not measured at concurrency {t.concurrency}; {BENCHMARK}"
        return Check(name, TUNE, said, threshold=threshold)
    found = gains(e)
    gain = found[point["drafts"]]
    bound = report.number(gain.high if gain.state == COSTS else gain.low, 2)
    held = (report.number(gain.value, 2), bound, threshold, gain.source)
    if _drafted(e, point) == 0:
        return Check(name, TUNE, "not known, as nothing was drafted", *held)
    said = str(gain)
    efficiency, needed = point["draft_efficiency"], point["breakeven_efficiency"]
    if efficiency is not None and needed is not None:
        said += f"; draft efficiency {efficiency:.3f}, break-even {needed:.3f}"
    if e.concurrency != t.concurrency:
        return Check(
            name, TUNE, f"{said}, at concurrency {e.concurrency}: measure it at {t.concurrency}, "
            "less may be faster or slower", *held,
        )  # fmt: skip
    if gain.state == PAYS:
        return Check(name, OK, said, *held)
    others = [g for g in found.values() if g.value is not None and g is not gain]
    paying = [g for g in others if g.state == PAYS]
    if paying:
        best = max(paying, key=lambda g: g.value)
        return Check(name, TUNE, f"{said}; {best.drafts} pays: {best}", *held)
    if gain.state == OPEN:
        return Check(name, TUNE, f"{said}; {gain.longer()}", *held)
    still = [g for g in others if g.state == OPEN]
    if still:
        best = max(still, key=lambda g: g.value)
        return Check(name, TUNE, f"{said}; {best.drafts} may pay: {best}; {best.longer()}", *held)
    return Check(
        name, SWITCH_OFF, f"{said}: drafting costs more than it brings, with any drafts measured",
        held[0], held[1], "upper bound not below 1", gain.source,
    )  # fmt: skip


def acceptance_rate(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    """A low rate asks for a domain drafter where drafting gains, and is no reason to keep one that
    costs."""
    name, threshold = "acceptance rate α", f"at least {t.min_acceptance_rate:g}"
    rates = list(e.rates)
    chains = [drafts for drafts in e.cells if drafts.startswith("chain:")]  # α is of chains
    if point is not None and point["drafts"] in chains:
        chains = [point["drafts"]]
    for drafts in [] if rates else chains:
        acceptance = e.cells[drafts]["acceptance"]
        if acceptance is not None and acceptance["acceptance_rate"]["value"] is not None:
            rates.append(rate_of(acceptance["acceptance_rate"], f"{e.speed_source}, {drafts}"))
    if not rates:
        said = "not measured; measure it with eval/acceptance.py on your traffic"
        return Check(name, TUNE, said, threshold=threshold)
    rate = min(rates, key=lambda rate: rate.value)
    held = (f"{rate.value:.3f}", report.number(rate.low), threshold, rate.source)
    said = report.interval(vars(rate))
    if rate.value >= t.min_acceptance_rate:
        return Check(name, OK, f"{said}, at least {t.min_acceptance_rate:g}", *held)
    said += f" is below {t.min_acceptance_rate:g}: "
    train = "train a domain drafter on your own traffic, docs/your-verifier.md"
    now = state(e, point, t)
    if now == COSTS:
        gain = gains(e)[point["drafts"]]
        return Check(name, SWITCH_OFF, f"{said}switch off, as it is {gain}, or {train}", *held)
    if now == PAYS:
        return Check(name, TUNE, f"{said}{train}; meanwhile it gains", *held)
    return Check(
        name, TUNE, f"{said}{train}, or switch off: which of the two, the gain at concurrency "
        f"{t.concurrency} will say, and it is not known yet", *held,
    )  # fmt: skip


def _p99(evidence: Evidence, drafts: str) -> float | None:
    """In milliseconds."""
    cell = evidence.cells.get(drafts)
    return cell and 1000 * cell["inter_token"]["p99"]


def tail_latency(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name = "P99 inter-token latency"
    threshold = "none set (max_p99)" if t.max_p99 is None else f"at most {t.max_p99:g} ms"
    p99 = _p99(e, point["drafts"]) if point else None
    plain = _p99(e, OFF)
    if p99 is None or plain is None or e.concurrency != t.concurrency:
        said = f"not measured at concurrency {t.concurrency}; {BENCHMARK}"
        return Check(name, TUNE, said, threshold=threshold)
    held = (f"{p99:.1f} ms", "–", threshold, e.speed_source)
    said = f"{p99:.1f} ms with {point['drafts']}, {plain:.1f} ms without"
    if t.max_p99 is None:
        return Check(name, OK, f"{said}; no limit set (max_p99)", *held)
    if p99 <= t.max_p99:
        return Check(name, OK, f"{said}, limit {t.max_p99:g}", *held)
    if plain > t.max_p99:
        return Check(
            name, TUNE, f"{said}, both over the limit of {t.max_p99:g}: it takes less concurrency "
            "or another limit", *held,
        )  # fmt: skip
    said += f", over the limit of {t.max_p99:g}: a rejected round pays in full for one token"
    found = gains(e)
    within = [g for name, g in found.items() if g.state == PAYS and _p99(e, name) <= t.max_p99]
    if within:
        best = max(within, key=lambda g: g.value)
        kept = f"{best.drafts} keeps it, {_p99(e, best.drafts):.1f} ms: {best}"
        return Check(name, TUNE, f"{said}; {kept}", *held)
    if min(p["draft_length"] for p in e.points) > 1:
        said += "; measure shorter drafts, which make shorter rounds"
        return Check(name, TUNE, said, *held)
    if any(_p99(e, name) <= t.max_p99 and g.state == OPEN for name, g in found.items()):
        return Check(name, TUNE, f"{said}; drafts that keep it may pay: measure longer", *held)
    return Check(name, SWITCH_OFF, f"{said}, and no measured drafts keep it and pay", *held)


# ---- the output ----------------------------------------------------------------------------------


def output_is_lossless(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name, threshold = "output is lossless", "0 texts differ but at a tie"
    if e.lossy:
        return Check(
            name, SWITCH_OFF, f"typical acceptance is lossy ({e.lossy[0]}); use the exact rule",
            "typical acceptance", "–", "the exact rule", e.lossy[0],
        )  # fmt: skip
    if not e.texts:
        return Check(name, TUNE, f"not measured; {LOSSLESSNESS}", threshold=threshold)
    texts = sum(found.prompts for found in e.texts)
    wrong = max(e.texts, key=lambda found: found.different)
    held = (f"{wrong.different} of {wrong.prompts}", "–", threshold, wrong.source)
    if wrong.different:
        return Check(
            name, SWITCH_OFF, f"{wrong.different} of {wrong.prompts} greedy texts are not the "
            f"verifier's ({wrong.source}); see docs/losslessness.md", *held,
        )  # fmt: skip
    said = f"{texts} greedy texts are the verifier's own, ties apart"
    return Check(name, OK, said, f"0 of {texts}", *held[1:])


def caches_are_cut_back(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    """After a rejection, what was drafted must be gone: a text that is still the verifier's shows
    it."""
    name, threshold = "cache rollback", "0 texts differ after a rejection"
    rejected = [found for found in e.texts if found.rejected]
    if not rejected:
        said = f"no greedy text with a rejected draft was compared; {LOSSLESSNESS}"
        return Check(name, TUNE, said, threshold=threshold)
    wrong = sum(found.different for found in rejected)
    texts = sum(found.prompts for found in rejected)
    source = max(rejected, key=lambda found: found.different).source
    held = (f"{wrong} of {texts}", "–", threshold, source)
    if wrong:
        return Check(
            name, SWITCH_OFF, f"{wrong} of {texts} texts went another way after rejections: the "
            "cache may not be cut back", *held,
        )  # fmt: skip
    return Check(name, OK, f"{texts} texts came through rejected drafts unchanged", *held)


# ---- traffic and verifier ------------------------------------------------------------------------


def temperature_is_measured(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name, highest = "temperature", max(e.temperatures, default=None)
    threshold = f"{t.temperature:g} or higher"
    if highest is None:
        return Check(name, TUNE, f"none was measured; {BENCHMARK}", threshold=threshold)
    held = (f"{highest:g}", "–", threshold, "all reports")
    if t.temperature > highest:
        return Check(
            name, TUNE, f"{t.temperature:g} is above the highest measured, {highest:g}: measure "
            f"there, or decode plainly above {highest:g}", *held,
        )  # fmt: skip
    return Check(name, OK, f"{t.temperature:g}, measured up to {highest:g}", *held)


def answers_are_long(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    name, threshold = "answer length", f"above {t.min_answer_tokens:g} tokens on average"
    if e.answer_tokens is None:
        return Check(name, TUNE, f"not measured; {BENCHMARK}", threshold=threshold)
    said = f"{e.answer_tokens:.0f} tokens on average"
    held = (f"{e.answer_tokens:.0f}", "–", threshold, e.speed_source or "all reports")
    if e.answer_tokens <= t.min_answer_tokens:
        return Check(
            name, TUNE, f"{said}, not above {t.min_answer_tokens:g}: prefill decides there; "
            "decode short answers plainly", *held,
        )  # fmt: skip
    return Check(name, OK, f"{said}, above {t.min_answer_tokens:g}", *held)


def verifier_is_large(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    least = f"{t.min_verifier_parameters / 1e9:g}B"
    name, threshold = "verifier's size", f"{least} parameters, or a measured gain"
    size = "size not known" if e.parameters is None else f"{e.parameters / 1e6:,.3g}M parameters"
    held = (size, "–", threshold, e.speed_source or "–")
    if (e.parameters or 0) >= t.min_verifier_parameters:
        return Check(name, OK, size, *held)
    if state(e, point, t) == PAYS:
        said = f"{size}, but a measured gain: {gains(e)[point['drafts']]}"
        return Check(name, OK, said, *held)
    return Check(
        name, TUNE, f"{size}, below {least} or unknown, and no gain was measured for sure: "
        "drafting may cost nearly as much as it saves", *held,
    )  # fmt: skip


def own_modules_come_first(e: Evidence, point: dict[str, Any] | None, t: Thresholds) -> Check:
    """Modules that a large verifier was pretrained with: no drafter of yours sees as much data."""
    name = "the verifier's own MTP modules"
    threshold = f"measured first at a hidden size of {t.min_mtp_hidden_size} or more"
    if e.hidden_size is None:
        said = "not known whether it ships any: a server's, or an earlier report's"
        return Check(name, OK, said, "not known", "–", threshold)
    has = f"{e.mtp_modules or 'no'} modules, hidden size {e.hidden_size}"
    held = (has, "–", threshold, "the verifier's configuration")
    if e.kind == "mtp" or not e.mtp_modules or e.hidden_size < t.min_mtp_hidden_size:
        return Check(name, OK, has + (", and they are measured" if e.kind == "mtp" else ""), *held)
    return Check(
        name, TUNE, f"{has}: measure these first, docs/mtp.md; where this drafter is better, say "
        f"so by --min_mtp_hidden_size {e.hidden_size + 1}", *held,
    )  # fmt: skip


CHECKS = (
    drafting_is_on,
    speed,
    acceptance_rate,
    tail_latency,
    output_is_lossless,
    caches_are_cut_back,
    temperature_is_measured,
    answers_are_long,
    verifier_is_large,
    own_modules_come_first,
)
