"""Typical acceptance: drafts are kept where the verifier finds them likely enough. Lossy.

Medusa's rule (Cai et al. 2024, arXiv 2401.10774, section 2.3.1). It accepts more than rejection
sampling and gives up what that is for: the text is not distributed as the verifier's.

Legend: B rows, N nodes of a round's proposal, D its depth, V verifier's vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.decoding.rejection import Verdict
from headstart.models.proposal.proposal import Proposal
from headstart.models.proposal.sampling import draw
from headstart.models.proposal.trees import ROOT, tree_attention_mask


@dataclass(frozen=True)
class Typical:
    """Thresholds of typical acceptance; the defaults are Medusa's.

    exp(−H) is at most the greatest probability of a law, so that with delta below 1 its likeliest
    token is always accepted; epsilon below 1 leaves it so for a point mass.
    """

    epsilon: float = 0.09
    """A draft of more than this probability is accepted."""
    delta: float = 0.3
    """So is one of more than delta · exp(−H), H the law's entropy in nats."""

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            value, medusas = getattr(self, name), getattr(Typical, name)
            if not 0 < value < 1:
                raise ValueError(
                    f"typical_{name} must be above 0 and below 1, got {value}; "
                    f"Medusa's is {medusas}"
                )


def verify_typical(
    q: Tensor, proposal: Proposal, uniform: Tensor, depth: int, settings: Typical
) -> Verdict:
    """A draft x after law q is kept if q(x) > min(epsilon, delta · exp(−H(q))); lossy.

    Of the paths whose drafts are all kept the longest wins, of equally long ones the likeliest to
    the verifier (as in the authors' code), of equally likely ones that whose end comes first. The
    token after it is drawn from the law there. How drafts were drawn plays no
    part. At temperature 0 laws are point masses, and only the argmax passes: the exact rule.

    Args:
        q: [B, N+1, V] the verifier's laws, warped: of the root, then of each node.
        uniform: [B, N+1] or wider, in [0, 1): the last column draws the token.
        depth: D, the longest path that the proposal may have.
    """
    rows = torch.arange(len(q), device=q.device)
    entropy = torch.special.entr(q).sum(-1)
    least = (settings.delta * (-entropy).exp()).clamp(max=settings.epsilon)  # [B, N+1]
    above = proposal.parents + 1
    drafted = q[rows[:, None], above, proposal.tokens]  # [B, N]
    likely = drafted > least.gather(1, above)
    kept = torch.cat([torch.ones_like(rows, dtype=torch.bool)[:, None], likely & proposal.real], 1)

    upwards = tree_attention_mask(proposal.parents)  # a node sees itself and its ancestors
    levels = upwards.sum(-1) - 1  # [B, N+1] 0 for the root
    whole = (kept[:, None] | ~upwards).all(-1)
    lengths = levels.masked_fill(~whole, 0)
    # an impossible draft is on no whole path; the clamp keeps 0 · log 0 out of the sums
    surprisal = torch.nn.functional.pad(
        -drafted.clamp(min=torch.finfo(q.dtype).tiny).log(), (1, 0)
    )  # [B, N+1]
    along = (upwards * surprisal[:, None]).sum(-1)
    longest = lengths == lengths.max(1, keepdim=True).values
    end = along.masked_fill(~longest, torch.inf).argmin(1)  # the first of equals
    numbers = torch.arange(ROOT, q.shape[1] - 1, device=q.device).expand_as(levels)
    # a node of the path goes to its level's column, every other one to the root's, which is cut off
    column = levels.masked_fill(~upwards[rows, end], 0)
    path = numbers.new_full((len(q), depth + 1), ROOT).scatter(1, column, numbers)[:, 1:]
    return Verdict(path, lengths[rows, end], draw(q[rows, end], uniform[:, -1]))
