"""What drafting costs, fitted: a part whatever the draft length, and a part for each step.

A pass of plain decoding takes 1. A pass over N drafts of depth K takes 1 + a + K·c + v_N: drafting
costs `a` whatever its length (the drafter's reading of what was verified, cutting caches back) and
the cost ratio c a step; the verifier's pass over N + 1 tokens costs the verify overhead v_N more
than one over one token. A tree takes one step a level, of several nodes each, so it has a c of its
own beside the chains' a.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.models.proposal.trees import Shape


@dataclass
class Drafting:
    """In plain passes."""

    fixed: float | None
    """a; None where only one draft length was measured: then it is in c."""
    step: dict[str, float]
    """c, by the shape's name."""


def fit_drafting(costs: Mapping[str, float], shapes: Mapping[str, Shape]) -> Drafting:
    """From what drafting costs in a pass, in plain passes, by the shape's name.

    Chains lie on one line over their lengths, by least squares. Without chains of two lengths, a is
    not told apart.
    """
    chains = [name for name in costs if not shapes[name].branches]
    depths = [shapes[name].depth for name in chains]
    told = len(set(depths)) > 1
    fixed, slope = line(depths, [costs[name] for name in chains]) if chains else (0.0, 0.0)
    step = {
        name: slope if name in chains else max(cost - fixed, 0.0) / shapes[name].depth
        for name, cost in costs.items()
    }
    return Drafting(fixed if told else None, step)


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line, neither below 0; through the origin where
    there is one x only."""
    across, up = np.asarray(x, float), np.asarray(y, float)
    if len(set(x)) > 1:
        slope, intercept = np.polyfit(across, up, 1)
        if slope >= 0 and intercept >= 0:
            return float(intercept), float(slope)
        if slope < 0:
            return float(max(up.mean(), 0.0)), 0.0
    return 0.0, float(max((across * up).sum() / (across**2).sum(), 0.0))
