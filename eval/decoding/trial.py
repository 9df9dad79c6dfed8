"""Decoding prompts for real: several shapes of proposal over the same ones, compared and timed."""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from headstart.data.rows.row import Row
from headstart.eval.decoding.speculate import Generated, Timer, generate
from headstart.eval.decoding.typical import Typical
from headstart.eval.measures.counts import Counts, summarise
from headstart.eval.measures.speedup import predicted_speedup
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

    The measured one is total time without / with drafts over the same prompts, its interval by
    bootstrap over prompts. A prediction needs c and v_N, which come from the same runs' timers;
    c is the cost of one draft step, and a tree takes one step a level.
    """
    plain = {id(d.row): d for d in timed if d.shape is None}
    passes = sum(d.timer.rounds for d in plain.values())
    if not passes:  # nothing was timed, or every answer ended in prefill
        return []
    pass_seconds = sum(d.timer.verification for d in plain.values()) / passes
    entries = []
    for shape in shapes:
        drafted = [d for d in timed if d.name == shape.name]
        without = torch.tensor([plain[id(d.row)].seconds for d in drafted])
        seconds = torch.tensor([d.seconds for d in drafted])
        generator = torch.Generator().manual_seed(0)
        sample = torch.randint(len(drafted), (1000, len(drafted)), generator=generator)
        resampled = without[sample].sum(1) / seconds[sample].sum(1)
        rounds = max(sum(d.timer.rounds for d in drafted), 1)
        drafting = sum(d.timer.proposal + d.timer.upkeep for d in drafted)
        cost_ratio = drafting / rounds / shape.depth / pass_seconds
        verification = sum(d.timer.verification for d in drafted) / rounds
        overhead = verification / pass_seconds - 1
        measures = summarise([d.counts() for d in drafted])
        length = measures["acceptance_length"]["value"]
        always = all(d.output.drafted[0] >= d.output.rounds for d in drafted)
        if shape.branches or not always:  # the closed form wants K drafts in every round
            predicted = (length or 1.0) / (1 + shape.depth * cost_ratio + overhead)
        else:
            alpha = measures["acceptance_rate"]["value"] or 0.0
            predicted = predicted_speedup(alpha, shape.depth, cost_ratio, overhead)
        entries.append(
            {
                "draft_length": shape.depth,
                "shape": shape.name if shape.branches else "chain",
                "measured": float(without.sum() / seconds.sum()),
                "low": float(resampled.quantile(0.025)) if len(drafted) > 1 else None,
                "high": float(resampled.quantile(0.975)) if len(drafted) > 1 else None,
                "median": float((without / seconds).median()),
                "predicted": predicted,
                "cost_ratio": cost_ratio,
                "verify_overhead": overhead,
                "acceptance_length": length,
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
