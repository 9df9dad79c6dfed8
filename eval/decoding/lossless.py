"""Is a text the verifier's own? Greedy texts token by token, sampled ones against its law.

Legend: M outcomes, V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headstart.eval.decoding.trial import Decoded, prompt_of
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import Shape
from headstart.models.verifier.verifier import Verifier

SIGNIFICANCE = 0.001  # a p-value below it says that samples do not follow the law
_LEAST_DRAWS = 50  # of a law, for a test of it
LEAST_EXPECTED = 5.0  # below it the statistic is not chi-square distributed (Cochran 1954)


class ChiSquare(NamedTuple):
    """Pearson's test of counts against a law."""

    statistic: float
    p_value: float
    degrees: int


def chi_square(observed: Tensor | Sequence[float], expected: Tensor | Sequence[float]) -> ChiSquare:
    """How likely counts at least as far off as `observed` are, if they were drawn from a law.

    Outcomes that expect fewer than five draws are pooled into one, with the next rarest if the pool
    expects fewer than five itself. An outcome that was seen though its probability is zero makes
    the p-value zero.

    Args:
        observed: [M] how often each outcome was seen.
        expected: [M] the law, as probabilities or as counts; normalised here.

    Raises:
        ValueError: different lengths, or a negative number.
    """
    observed = torch.as_tensor(observed, dtype=torch.double)
    law = torch.as_tensor(expected, dtype=torch.double)
    if observed.shape != law.shape or observed.dim() != 1:
        raise ValueError(
            "observed and expected must be two lists of one length, got shapes "
            f"{tuple(observed.shape)} and {tuple(law.shape)}"
        )
    if bool((observed < 0).any() | (law < 0).any()):
        raise ValueError("observed and expected must not be negative")
    if bool(((law == 0) & (observed > 0)).any()):
        return ChiSquare(float("inf"), 0.0, 0)
    expected = law / law.sum() * observed.sum()
    order = expected.argsort()
    observed, expected = observed[order], expected[order]
    pooled = int((expected < LEAST_EXPECTED).sum())
    if 0 < float(expected[:pooled].sum()) < LEAST_EXPECTED:
        pooled += 1  # a pool that is rare itself takes in the next outcome
    observed = torch.cat([observed[:pooled].sum(0, keepdim=True), observed[pooled:]])
    expected = torch.cat([expected[:pooled].sum(0, keepdim=True), expected[pooled:]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return _chi_square(float(statistic), len(expected) - 1)


def together(tests: Sequence[ChiSquare]) -> ChiSquare:
    """Independent tests as one: statistics and degrees of freedom add up."""
    return _chi_square(sum(t.statistic for t in tests), sum(t.degrees for t in tests))


def _chi_square(statistic: float, degrees: int) -> ChiSquare:
    if degrees <= 0:
        return ChiSquare(statistic, 0.0 if statistic == float("inf") else 1.0, degrees)
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.double)
    return ChiSquare(statistic, float(torch.special.gammaincc(*half)), degrees)


def compare(
    verifier: Verifier, prompt: list[int], a: list[int], b: list[int], tolerance: float = 1e-4
) -> Literal["identical", "tie", "different"]:
    """Are `a` and `b` the same greedy continuation of `prompt`?

    A tie: where they first differ, the verifier's logits of both tokens lie within `tolerance` of
    its best, so that rounding chose between them.
    """
    if a == b:
        return "identical"
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if same is None:  # one goes on where the other has ended
        return "different"
    ids = torch.tensor([prompt + a[:same]], device=verifier.device)
    logits = verifier.logits(verifier.states(ids).last_hidden[0, -1]).float()
    worse = torch.minimum(logits[a[same]], logits[b[same]])
    return "tie" if bool(logits.max() - worse < tolerance) else "different"


def judge(verifier: Verifier, done: list[Decoded], shape: Shape) -> dict[str, Any]:
    """Each prompt's text with drafts against its text without, decoded in the same run."""
    plain = {id(d.row): d.output.tokens for d in done if d.shape is None}
    drafted = [d for d in done if d.name == shape.name]
    verdicts = [
        compare(verifier, prompt_of(d.row), plain[id(d.row)], d.output.tokens) for d in drafted
    ]
    return {
        "identical": verdicts.count("identical"),
        "ties": verdicts.count("tie"),
        "different": verdicts.count("different"),
        "prompts": len(drafted),
    }


@torch.no_grad()
def next_token_test(
    verifier: Verifier, prompt: list[int], texts: list[list[int]], sampling: Sampling, last: int = 3
) -> ChiSquare:
    """Whether sampled continuations follow the verifier's law, token by token.

    The tokens that follow the same beginning are draws from one law, which a pass of the verifier
    tells exactly: a chi-square for every beginning that enough texts share, added up. The first
    token is left out: the verifier draws it in prefill, before there are drafts.

    Args:
        texts: continuations of `prompt`, drawn independently.
        last: the last token tested, from 1 on; 2 or more.
    """
    tests = []
    for length in range(1, last):
        followed: dict[tuple[int, ...], Counter[int]] = {}
        for text in texts:
            if len(text) > length:
                followed.setdefault(tuple(text[:length]), Counter())[text[length]] += 1
        for beginning, counts in followed.items():
            if counts.total() < _LEAST_DRAWS:
                continue
            ids = torch.tensor([prompt + list(beginning)], device=verifier.device)
            logits = verifier.logits(verifier.states(ids).last_hidden[0, -1])
            law = sampling.probs(logits).cpu()
            observed = torch.zeros(len(law), dtype=torch.double)
            observed[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.double)
            tests.append(chi_square(observed, law))
    return together(tests)
