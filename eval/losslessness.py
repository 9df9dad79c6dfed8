"""Is the output the verifier's? A test of distributions, and a comparison of greedy texts."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headstart.models.verifier import Verifier

_LEAST_EXPECTED = 5.0  # below it the statistic is not chi-square distributed (Cochran 1954)


class ChiSquare(NamedTuple):
    """Pearson's test of counts against a law."""

    statistic: float
    p_value: float
    degrees: int


def chi_square(observed: Tensor, law: Tensor) -> ChiSquare:
    """How likely counts at least as far off as `observed` are, if they were drawn from `law`.

    Outcomes that expect fewer than five draws are pooled into one. An outcome that was seen though
    its probability is zero makes the p-value zero.

    Args:
        observed: [M] how often each outcome was seen.
        law: [M] its probability; normalised here.
    """
    observed, law = observed.double(), law.double()
    if bool(((law == 0) & (observed > 0)).any()):
        return ChiSquare(float("inf"), 0.0, 0)
    expected = law / law.sum() * observed.sum()
    rare = expected < _LEAST_EXPECTED
    observed = torch.cat([observed[~rare], observed[rare].sum(0, keepdim=True)])
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    if degrees == 0:
        return ChiSquare(float(statistic), 1.0, 0)
    half = torch.tensor(degrees / 2, dtype=torch.double)
    return ChiSquare(float(statistic), float(torch.special.gammaincc(half, statistic / 2)), degrees)


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
