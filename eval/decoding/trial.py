"""Decoding prompts for real: several shapes of proposal over the same ones, compared and timed."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from headstart.data.rows.row import Row
from headstart.eval.decoding.speculate import Generated, Timer, generate
from headstart.eval.decoding.typical import Typical
from headstart.eval.measures.costs import fit_drafting
from headstart.eval.measures.counts import Counts, summarise
from headstart.eval.measures.intervals import ratio_bounds
from headstart.models.drafter import Drafter
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import Dynamic, Shape
from headstart.models.verifier.verifier import Verifier


@dataclass
class Decoded:
    """One prompt, decoded with one shape of proposal (None: plainly)."""

    row: Row
    shape: Shape | None
    output: Generated
    seconds: float
    timer: Timer

    @property
    def name(self) -> str | None:
        return self.shape and self.shape.name

    def counts(self) -> Counts:
        return self.output.counts(self.row.id, self.row.category)

    def as_row(self) -> Row:
        """The text just decoded, to be replayed."""
        prompt, answer = prompt_of(self.row), self.output.tokens
        mask = [0] * len(prompt) + [1] * len(answer)
        return replace(self.row, input_ids=prompt + answer, loss_mask=mask)


def prompt_of(row: Row) -> list[int]:
    """The ids before the first answer of a row; all of them where there is none."""
    first = next((i for i, turn in enumerate(row.loss_mask) if turn), len(row.loss_mask))
    return row.input_ids[:first]


def pick(rows: list[Row], count: int) -> list[Row]:
    """`count` rows dealt evenly over the categories, in file order; 0: all."""
    if count == 0 or count >= len(rows):
        return rows
    by_category: dict[str, list[Row]] = {}
    for row in rows:
        by_category.setdefault(row.category, []).append(row)
    dealt: list[Row] = []
    for turn in range(count):
        dealt += [group[turn] for group in by_category.values() if turn < len(group)]
    chosen = {id(row) for row in dealt[:count]}
    return [row for row in rows if id(row) in chosen]


def by_category(counts: list[Counts]) -> dict[str, Any]:
    names = sorted({c.category for c in counts})
    return {name: summarise([c for c in counts if c.category == name]) for name in names}


def drafting_for(shape: Shape | None, drafting: Drafting) -> Drafting:
    """A dynamic tree chooses its nodes by their probability: its drafts cannot be sampled."""
    return Drafting(False, Sampling()) if isinstance(shape, Dynamic) else drafting


def decode(
    verifier: Verifier,
    drafter: Drafter,
    rows: list[Row],
    shapes: list[Shape | None],
    sampling: Sampling,
    drafting: Drafting,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    acceptance: Typical | None = None,
) -> list[Decoded]:
    """Decode every batch of rows with each of `shapes` in turn (interleaved, for fair timing).

    Args:
        acceptance: None is the exact rule; typical acceptance is lossy.
    """
    done = []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        for shape in shapes:
            timer = Timer()
            began = time.monotonic()
            outputs = generate(
                verifier,
                None if shape is None else drafter,
                [prompt_of(row) for row in part],
                shape=shape,
                sampling=sampling,
                drafting=drafting_for(shape, drafting),
                max_new_tokens=max_new_tokens,
                seed=seed,
                row_ids=list(range(start, start + len(part))),
                timer=timer,
                acceptance=acceptance,
            )
            seconds = time.monotonic() - began
            done += [
                Decoded(row, shape, output, seconds / len(part), timer)
                for row, output in zip(part, outputs, strict=True)
            ]
    return done


def speed(timed: list[Decoded], shapes: list[Shape]) -> list[dict[str, Any]]:
    """Speedup of each shape, measured and predicted, of prompts decoded one at a time.

    The measured one is total time without / with drafts over the same prompts, with its interval
    over prompts. The prediction is tokens a pass / (1 + a + K·c + v_N), its costs fitted to the
    same runs' timers as in `measures.costs`.

    Returns:
        for each shape, among others:
        seconds: with and without drafts, together
        drafting_fixed, cost_ratio, verify_overhead: a (None: one draft length only, it is in c), c
        and v_N, in plain passes
        acceptance_length, tokens_per_round: τ and tokens a pass
        categories: the speedup of each
    """
    plain = {id(d.row): d for d in timed if d.shape is None}
    without = Part.of(plain.values())
    if not without.rounds:  # nothing was timed, or every answer ended in prefill
        return []
    unit = without.drafting + without.verification
    by_shape = {shape.name: [d for d in timed if d.name == shape.name] for shape in shapes}
    parts = {name: Part.of(drafted) for name, drafted in by_shape.items()}
    extra = {name: (part.drafting - without.drafting) / unit for name, part in parts.items()}
    fitted = fit_drafting(extra, {shape.name: shape for shape in shapes})
    entries = []
    for shape in shapes:
        drafted = by_shape[shape.name]
        pairs = np.array([[plain[id(d.row)].seconds, d.seconds] for d in drafted])
        cost_ratio = fitted.step[shape.name]
        overhead = (parts[shape.name].verification - without.verification) / unit
        cost = 1 + (fitted.fixed or 0.0) + shape.depth * cost_ratio + overhead
        measures = summarise([d.counts() for d in drafted])
        low, high = ratio_bounds(pairs, (1, -1)) or (None, None)
        entries.append(
            {
                "draft_length": shape.depth,
                "shape": shape.name if shape.branches else "chain",
                "prompts": len(drafted),
                "seconds": float(pairs.sum()),
                "measured": float(pairs[:, 0].sum() / pairs[:, 1].sum()),
                "low": low,
                "high": high,
                "median": float(np.median(pairs[:, 0] / pairs[:, 1])),
                "predicted": (measures["tokens_per_round"] or 1.0) / cost,
                "drafting_fixed": fitted.fixed,
                "cost_ratio": cost_ratio,
                "verify_overhead": overhead,
                "acceptance_length": measures["acceptance_length"]["value"],
                "tokens_per_round": measures["tokens_per_round"],
                "categories": {
                    name: float(
                        sum(plain[id(d.row)].seconds for d in drafted if d.row.category == name)
                        / sum(d.seconds for d in drafted if d.row.category == name)
                    )
                    for name in sorted({d.row.category for d in drafted})
                },
            }
        )
    return entries


class Part(NamedTuple):
    """Seconds of a mean pass."""

    rounds: int
    drafting: float
    """The drafter's work, and cutting caches back."""
    verification: float

    @staticmethod
    def of(decoded: Iterable[Decoded]) -> "Part":
        timers = [d.timer for d in decoded]
        rounds = sum(timer.rounds for timer in timers)
        return Part(
            rounds,
            sum(timer.proposal + timer.upkeep for timer in timers) / max(rounds, 1),
            sum(timer.verification for timer in timers) / max(rounds, 1),
        )
