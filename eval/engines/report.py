"""How a comparison of vLLM with our own loop is shown."""

from collections.abc import Iterable

import numpy as np

from headstart.eval.engines.parity import TIE, Compared
from headstart.eval.measures.intervals import interval, ratio_bounds
from headstart.eval.reports import report


def line(found: Compared) -> str:
    """One prompt."""
    counts = f"accepted {found.engine} in {found.rounds[1]} rounds"
    if not found.equal:
        counts += f", ours {found.ours} in {found.rounds[0]}: {reason(found)}"
    lossless = "" if found.lossless is None else f"; with and without drafts: {found.lossless}"
    return f"{found.id}: text {found.text}{lossless}; {counts}"


def reason(found: Compared) -> str:
    """Why the counts of a prompt differ."""
    if found.deviations is None:
        return "NO REASON FOUND, the engine's steps came in one piece"
    if not found.deviations:
        return "every round of the engine's is as the drafter's logits say of its text"
    parts = []
    for one in found.deviations:
        what = "past the limit" if one.margin is None else f"logits {one.margin:+.1e} apart"
        name = "" if one.explained else "NO TIE, "
        parts.append(f"{name}token {one.token} as draft {one.position}, {what}")
    return "; ".join(parts)


def speedup(pairs: Iterable[tuple[float, float]]) -> dict[str, float | None]:
    """Total time without / with drafts, and its 95 % interval over prompts, if there are enough."""
    seconds = np.array(list(pairs))
    without, drafted = seconds.sum(0).tolist()
    return interval(without / drafted, ratio_bounds(seconds, (1, -1)))


def counts_table(done: list[Compared]) -> str:
    """Accepted by position, and what follows from it."""
    rows, lengths = [], range(len(done[0].engine))
    for name, which in (("vLLM", 1), ("ours", 0)):
        rounds = sum(c.rounds[which] for c in done)
        accepted = [sum((c.ours, c.engine)[which][i] for c in done) for i in lengths]
        shown = [f"{a}, {report.number(a / rounds)}" for a in accepted]
        rows.append([name, str(rounds), *shown, report.number(1 + sum(accepted) / rounds)])
    positions = [f"accepted at {i + 1}, joint" for i in lengths]
    return report.table(["loop", "rounds", *positions, "τ"], rows)


def speed_table(done: list[Compared]) -> str:
    names = sorted({c.category for c in done})
    rows = []
    for name, part in [
        *((name, [c for c in done if c.category == name]) for name in names),
        ("all", done),
    ]:
        accepted, rounds = sum(sum(c.engine) for c in part), sum(c.rounds[1] for c in part)
        ratio = report.interval(speedup(c.seconds for c in part))
        rows.append([name, str(len(part)), report.number(1 + accepted / rounds), ratio])
    header = ["prompts of", "prompts", "τ in vLLM", "speedup in vLLM, interleaved"]
    return report.table(header, rows)


def summary(done: list[Compared]) -> str:
    """The comparison as a page."""
    texts = [c.text for c in done]
    parts = [counts_table(done)]
    told = f"{len(done)} prompts. Text of vLLM and of our loop: {kinds(texts)}."
    if done[0].lossless is not None:
        told += f" Text of vLLM with and without drafts: {kinds([c.lossless for c in done])}."
    equal, explained = sum(c.equal for c in done), sum(c.explained for c in done)
    told += f" Accepted drafts: equal at every position for {equal}"
    if equal < len(done):
        told += (
            f", for {explained - equal} others different at ties alone (logits within {TIE:g}) or "
            f"past the limit, for {len(done) - explained} different without a reason"
        )
    parts.append(f"{told}.")
    if done[0].seconds is not None:
        parts.append(speed_table(done))
    return "\n\n".join(parts)


def kinds(verdicts: list[str]) -> str:
    names = ("identical", "tie", "different")
    return ", ".join(f"{verdicts.count(n)} {n}" for n in names if n in verdicts)
