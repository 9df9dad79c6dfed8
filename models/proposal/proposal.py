"""Drafts of one round, and how they are chosen.

Legend: B rows, N nodes, V verifier's vocabulary, V' the drafter's.
"""

from typing import NamedTuple

from torch import Tensor

from headstart.models.proposal.sampling import Sampling


class Proposal(NamedTuple):
    """Drafts for one round. The root, the pending token, is not among them."""

    tokens: Tensor  # [B, N] verifier ids
    parents: Tensor  # [B, N] index of each node's parent, -1 for the root; after its parent, and
    # after the siblings that are tried before it
    real: Tensor  # bool [B, N] which of the N there are; a lookup may find none
    log_probs: Tensor | None  # [B, N, V'] the law each was drawn from, given the siblings drawn
    # before (without replacement: they are taken out of it); None: point masses
    vocabulary: Tensor | None  # [V'] verifier id of each column of log_probs, ascending; None:
    # V' = V
    scratch: int = 0  # so many nodes at the end are no drafts: never accepted, only observed


class Drafting(NamedTuple):
    """How a drafter chooses its drafts: greedily (point masses), or drawn from p."""

    sampled: bool
    sampling: Sampling
    """Warps the drafter's logits; not used when greedy."""
