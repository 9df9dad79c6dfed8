"""Growing a proposal from a drafter's steps."""

from collections.abc import Callable

import torch
from torch import Tensor

from headstart.models.drafter import Drafting, Proposal
from headstart.models.sampling import RowRandom, draw


def grow_chain(
    logits: Tensor,
    step: Callable[[Tensor], Tensor],
    draft_length: int,
    drafting: Drafting,
    random: RowRandom | None,
    draft_ids: Tensor | None,
) -> Proposal:
    """A chain of `draft_length` drafts, the same length in every row.

    This is the one place where draft-vocabulary ids become verifier ids.

    Args:
        logits: [B, V'] the law of the first draft, before warping.
        step: tokens [B] (verifier ids) just drafted -> logits [B, V'] of the next.
        random: used when drafts are sampled.
        draft_ids: [V'] verifier id of each column; None: V' = V.
    """
    tokens, log_probs = [], []
    uniform = random.uniform(draft_length).to(logits.device) if drafting.sampled else None
    for i in range(draft_length):
        if uniform is None:
            column = logits.argmax(-1)
        else:
            probs = drafting.sampling.probs(logits)
            column = draw(probs, uniform[:, i])
            log_probs.append(probs.log())
        tokens.append(column if draft_ids is None else draft_ids[column])
        if i + 1 < draft_length:
            logits = step(tokens[-1])
    rows = len(logits)
    parents = torch.arange(-1, draft_length - 1, device=logits.device).expand(rows, -1)
    return Proposal(
        torch.stack(tokens, dim=1),
        parents,
        torch.full((rows,), draft_length, device=logits.device),
        torch.stack(log_probs, dim=1) if log_probs else None,
        draft_ids if log_probs else None,
    )
