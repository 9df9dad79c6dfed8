"""Speculative decoding without a model: what is exact, what is gained, and what the tail pays.

    python eval/simulate.py --vocab 64 --alpha 0.75 --k 4 --samples 50000
    python main.py --vocab 64 --alpha 0.75 --k 4 --samples 50000

Draws random laws of a verifier and a drafter and runs the decoding loop's own rejection rule on
them: its tokens follow the verifier's law, and its acceptance length follows the closed form. Then
draws a tree mask, and simulates the latency between tokens. Ends with code 1 where the rule's
tokens do not follow the verifier's law.

Names: q is the verifier's law, p the drafter's.
Legend: V vocabulary, K draft length, B rounds of a chunk, S samples.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.eval.decoding.lossless import LEAST_EXPECTED, ChiSquare, chi_square
from headstart.eval.decoding.rejection import verify_chain
from headstart.eval.measures.speedup import (
    breakeven_acceptance_rate,
    expected_tokens_per_verify,
    simulate_tail,
)
from headstart.models.proposal.sampling import check_seed, draw
from headstart.models.proposal.trees import tree_attention_mask

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Like `verify_chain`: (q, drafts, lengths, uniform, p) -> (accepted, token)."""

SIGNIFICANCE = 0.001  # a p-value below it says that tokens do not follow q
TREE = (-1, -1, 0, 0, 1, 2)
TAIL_TOKENS = 10_000
_CHUNK = 2**20  # numbers that a tensor of one chunk may have: 8 MB
_SWEEP_VOCAB = 64  # only the laws' overlap matters to τ; more tokens would only take longer
# the upper ends are beyond any use: a slip of the keyboard would fill memory, or take days
_RANGES = {
    "vocab": (2, 1_000_000), "k": (1, 100), "samples": (1, 1_000_000_000), "c": (0, 1000),
    "verify_overhead": (0, 1000),
}  # fmt: skip


@dataclass
class Simulation:
    """Settings of the simulation."""

    vocab: int = 32
    """V, tokens in the vocabulary; 2 or more."""
    alpha: float = 0.75
    """Acceptance rate, the overlap Σ min(q, p) of the two laws; in (0, 1]."""
    k: int = 4
    """K, drafts a round; 1 or more."""
    samples: int = 20_000
    """Rounds drawn for the test, and for each line of the sweep; 1 or more."""
    c: float = 0.05
    """Cost ratio: time of one draft step, in verifier passes of one token."""
    verify_overhead: float = 0.2
    """What a pass over K + 1 tokens takes beyond a pass of one, in passes of one."""
    seed: int = 0
    """Of everything drawn."""

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} must be in [{least}, {most}], got {value}")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha must be in (0, 1], got {self.alpha}")
        check_seed(self.seed)


# ---- rounds without a model ----------------------------------------------------------------------


def overlapping_laws(vocab: int, alpha: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random laws q and p of which a token drafted from p is accepted with probability `alpha`.

    Both share α·m, of a random law m on all tokens, and each has the rest on tokens that the other
    has no rest on: so min(q, p) = α·m, and the acceptance rate Σ min(q, p) is α (Leviathan et al.
    2023, corollary 3.6). At α = 1 the two are equal.

    Returns:
        q [V], p [V], double.
    """

    def law(tokens: int) -> Tensor:
        # no token much rarer than the others, else chi-square could not test it
        weights = 0.5 + torch.rand(tokens, generator=generator, dtype=torch.double)
        return weights / weights.sum()

    order = torch.randperm(vocab, generator=generator)
    shared, half = alpha * law(vocab), vocab // 2
    q, p = shared.clone(), shared.clone()
    q[order[:half]] += (1 - alpha) * law(half)
    p[order[half:]] += (1 - alpha) * law(vocab - half)
    return q, p


class Rounds(NamedTuple):
    """What came of independent rounds."""

    accepted: Tensor  # [S] drafts accepted
    first: Tensor  # [S] the first token emitted


def play(
    q: Tensor,
    p: Tensor,
    draft_length: int,
    samples: int,
    generator: torch.Generator,
    rule: Rule = verify_chain,
) -> Rounds:
    """`samples` rounds of drafts from p, judged by `rule` against q: the same laws all along.

    Args:
        q, p: [V].
    """
    vocab, chunks = len(q), []
    most = max(1, _CHUNK // (vocab * draft_length))  # the rule's own tensors are [B, K, V]
    for start in range(0, samples, most):
        rows = min(most, samples - start)
        uniform = torch.rand(rows, 2 * draft_length + 1, generator=generator, dtype=torch.double)
        drafts = draw(p, uniform[:, :draft_length])  # [B, K]
        accepted, token = rule(
            q.expand(rows, draft_length + 1, vocab),
            drafts,
            torch.full((rows,), draft_length),
            uniform[:, draft_length:],
            p.expand(rows, draft_length, vocab),
        )
        chunks.append(Rounds(accepted, torch.where(accepted > 0, drafts[:, 0], token)))
    return Rounds(*map(torch.cat, zip(*chunks, strict=True)))


def emit_afresh(
    q: Tensor, drafts: Tensor, lengths: Tensor, uniform: Tensor, p: Tensor
) -> tuple[Tensor, Tensor]:
    """A wrong rule, to show that the test can fail: at a rejection a token of q, not of (q − p)₊.

    Accepted drafts already give min(q, p), so the likeliest drafts come too often.
    """
    accepted, _ = verify_chain(q, drafts, lengths, uniform, p)
    return accepted, draw(q[torch.arange(len(q)), accepted], uniform[:, -1])


def first_token_test(rounds: Rounds, q: Tensor) -> ChiSquare | None:
    """Chi-square of the first token of each round against q; None where there are too few rounds.

    Args:
        q: [V].
    """
    found = chi_square(torch.bincount(rounds.first, minlength=len(q)), q)
    return found if found.degrees or found.p_value == 0 else None  # all in one pool: no test


class Length(NamedTuple):
    """Acceptance length τ, simulated and in closed form."""

    simulated: float
    low: float
    high: float
    closed_form: float

    @property
    def agree(self) -> bool:
        slack = 1e-9  # at α = 1 nothing varies, and the interval is a point
        return self.low - slack <= self.closed_form <= self.high + slack


def acceptance_length(accepted: Tensor, alpha: float, draft_length: int) -> Length:
    """τ of simulated rounds with its 95 % interval, beside E = Σ α^i.

    The interval's width comes from the known law P(A ≥ i) = α^i, not from the sample: a sample of
    a few equal rounds would claim to be certain.

    Args:
        accepted: [S].
    """
    simulated = 1 + float(accepted.double().mean())
    mean = expected_tokens_per_verify(alpha, draft_length) - 1
    square = sum((2 * i - 1) * alpha**i for i in range(1, draft_length + 1))  # E[A²]
    half = 1.96 * math.sqrt(max(square - mean**2, 0) / len(accepted))
    return Length(simulated, simulated - half, simulated + half, 1 + mean)


# ---- the four parts ------------------------------------------------------------------------------


def rejection_part(settings: Simulation, generator: torch.Generator) -> tuple[str, bool]:
    """The rule and a wrong one, each tested against q; False where the rule fails."""
    q, p = overlapping_laws(settings.vocab, settings.alpha, generator)
    right, wrong = (
        first_token_test(play(q, p, settings.k, settings.samples, generator, rule), q)
        for rule in (verify_chain, emit_afresh)
    )
    lines = [
        "1. The rejection rule keeps the verifier's law q",
        f"   {settings.samples:,} rounds of {settings.k} drafts from p; {settings.vocab:,} tokens, "
        f"Σ min(q, p) = {float(torch.minimum(q, p).sum()):.4g}",
        "   chi-square of each round's first token; a p-value below "
        f"{SIGNIFICANCE:g} says that it does not follow q",
        "",
    ]
    if right is None or wrong is None:
        likeliest = float(q.max())
        needed = math.ceil(1.001 * LEAST_EXPECTED / min(likeliest, 1 - likeliest))
        lines.append(f"   too few samples to say; --samples {needed} will do")
        return "\n".join(lines), True
    kept, caught = right.p_value >= SIGNIFICANCE, wrong.p_value < SIGNIFICANCE
    if settings.alpha == 1:
        missed = "not caught: at α = 1 nothing is rejected"
    else:
        missed = "not caught: too few samples, or α too near 1"
    lines += [
        "   at a rejection, a token of   statistic  degrees    p-value",
        _test_line("(q − p)₊: the rule", right, "follows q" if kept else "DOES NOT FOLLOW q"),
        _test_line("q: wrong on purpose", wrong, "caught" if caught else missed),
    ]
    if not kept:
        lines.append(
            "   The rule fails its test. One seed in 1000 does so by chance; if another fails too, "
            "the rule is wrong."
        )
    return "\n".join(lines), kept


def _test_line(name: str, test: ChiSquare, verdict: str) -> str:
    numbers = f"{test.statistic:>11.1f}  {test.degrees:>7}  {test.p_value:>9.2g}"
    return f"   {name:<26} {numbers}  {verdict}"


def sweep_part(settings: Simulation, generator: torch.Generator) -> str:
    """τ against the closed form, over α."""
    lines = [
        f"2. Acceptance length τ by α, K = {settings.k}, {settings.samples:,} rounds each",
        "",
        "        α  simulated   95 % interval      1 + α + … + α^K",
    ]
    outside = 0
    alphas = sorted({round(0.1 * i, 1) for i in range(1, 11)} | {settings.alpha})
    for alpha in alphas:
        q, p = overlapping_laws(min(settings.vocab, _SWEEP_VOCAB), alpha, generator)
        accepted = play(q, p, settings.k, settings.samples, generator).accepted
        length = acceptance_length(accepted, alpha, settings.k)
        outside += not length.agree
        lines.append(
            f"   {alpha:>6.4g}  {length.simulated:>9.4f}   [{length.low:.4f}, {length.high:.4f}]"
            f"  {length.closed_form:>9.4f}  {'within' if length.agree else 'OUTSIDE'}"
            f"{'  <- --alpha' if alpha == settings.alpha else ''}"
        )
    lines.append(
        f"   {outside} of {len(alphas)} outside; 1 in 20 is by chance, more than 3 would be a fault"
    )
    return "\n".join(lines)


def tree_part() -> str:
    """A tree of drafts and the mask that one verifier pass over it needs."""
    names = ["root", *(chr(ord("a") + i) for i in range(len(TREE)))]
    mask = tree_attention_mask(TREE)  # [N+1, N+1]
    lines = [
        f"3. Tree mask, parents {TREE}: a row's node sees the nodes marked x",
        "",
        f"   {'node':<6}{'parent':<8}{''.join(f'{name:>5}' for name in names)}",
    ]
    for row, (name, parent) in enumerate(zip(names, ["", *TREE], strict=True)):
        above = names[parent + 1] if row else "-"
        cells = "".join(f"{'x' if seen else '.':>5}" for seen in mask[row].tolist())
        lines.append(f"   {name:<6}{above:<8}{cells}")
    return "\n".join(lines)


def tail_part(settings: Simulation) -> str:
    """Inter-token latency with and without drafting."""
    alpha, k, c, overhead = settings.alpha, settings.k, settings.c, settings.verify_overhead
    tail = simulate_tail(alpha, k, c, overhead, TAIL_TOKENS, settings.seed)
    lines = [
        f"4. Time between tokens, in plain verifier passes ({TAIL_TOKENS:,} tokens)",
        f"   a round takes 1 + {k}·{c:g} + {overhead:g} = {1 + k * c + overhead:g}; its tokens "
        "arrive together at its end",
        "",
        f"   {'':<18}{'mean':>8}{'P50':>8}{'P95':>8}{'P99':>8}",
    ]
    for name, latency in (("with drafting", tail.drafted), ("without", tail.plain)):
        lines.append(f"   {name:<18}" + "".join(f"{value:>8.3f}" for value in latency))
    rate = breakeven_acceptance_rate(k * c + overhead, k)
    lines += [
        f"   Speedup {tail.plain.mean / tail.drafted.mean:.2f}, break-even at "
        + (f"α = {rate:.3f}." if rate <= 1 else f"no α: the overhead is above K = {k}."),
        f"   The tail pays: {100 * (1 - alpha):.3g} % of rounds reject their first draft, take the "
        "whole round and give one token.",
    ]
    return "\n".join(lines)


def run(settings: Simulation) -> None:
    """Print the four parts; exit code 1 where the rejection rule fails its test."""
    generator = torch.Generator().manual_seed(settings.seed)
    part, kept = rejection_part(settings, generator)
    print(part, flush=True)
    for part in (sweep_part(settings, generator), tree_part(), tail_part(settings)):
        print(f"\n{part}")
    if not kept:
        sys.exit(1)


if __name__ == "__main__":
    from headstart.script import run_script

    run_script(Simulation, run)
