"""The draft vocabulary: the few ids a drafter can propose, so that its head stays small.

Legend: V verifier's vocabulary, V' the drafter's.
"""

import torch
from torch import Tensor

from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import Verifier


def choose(token_counts: Tensor, size: int, verifier: Verifier) -> Tensor:
    """The `size` most frequent ids, always with every special and terminator id; sorted.

    Args:
        token_counts: [V], how often each id was supervised. Where fewer than `size` ids occur,
            the lowest unused ids fill up.

    Raises:
        ValueError: a size that is not in 1 … V, or too small for the special ids.
    """
    total = verifier.vocab_size
    check_size(size, verifier)
    tokenizer = verifier.tokenizer
    special = set(tokenizer.all_special_ids) | set(verifier.terminator_ids)
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = {i for i in special if i < total}
    if len(special) > size:
        raise ValueError(
            f"drafter.draft_vocab_size {size} cannot hold the {len(special)} special ids; "
            f"pass {len(special)} or more"
        )
    rank = token_counts.double().clone()
    rank[list(special)] = torch.inf
    order = torch.sort(rank, descending=True, stable=True).indices  # ties: the lowest id first
    return order[:size].sort().values


def check_size(size: int | None, verifier: Verifier | Outline) -> None:
    """Raise a ValueError for a size that is neither None nor in 1 … V."""
    total = verifier.vocab_size
    if size is not None and not 1 <= size <= total:
        raise ValueError(
            f"drafter.draft_vocab_size must be in 1 … {total} (the verifier's vocabulary), "
            f"got {size}"
        )


def is_ascending(ids: Tensor, vocab_size: int) -> bool:
    """Whether these are ids of the verifier, at least one, each greater than the one before."""
    if not len(ids) or ids.is_floating_point():
        return False
    return bool((ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < vocab_size)


def adapt(old_ids: Tensor, token_counts: Tensor, verifier: Verifier) -> Tensor:
    """A vocabulary of the size of `old_ids [V']` for other data: its ids, then the old ones."""
    was = torch.zeros(len(token_counts), dtype=torch.double)
    was[old_ids] = 0.5  # after every id that occurs, before every other
    return choose(torch.maximum(token_counts.double(), was), len(old_ids), verifier)


def exchanged_rows(weight: Tensor, old_ids: Tensor, new_ids: Tensor, fresh: Tensor) -> Tensor:
    """Rows of a projection for another vocabulary: [V', H].

    Args:
        weight: [V', H] rows of `old_ids`.
        fresh: [V', H] what the row of each new id begins as where it is not among the old.
    """
    at = columns(new_ids, old_ids)
    return torch.where((at >= 0)[:, None], weight[at.clamp(min=0)], fresh)


def coverage(token_counts: Tensor, draft_ids: Tensor) -> float:
    """Share of supervised tokens that the draft vocabulary holds: a ceiling on accuracy."""
    return float(token_counts[draft_ids].sum() / token_counts.sum().clamp(min=1))


def columns(ids: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Column in the draft vocabulary of each verifier id, -1 where it has none: `[...]`.

    Args:
        draft_ids: [V'] ascending; None: V' = V.
    """
    if draft_ids is None:
        return ids
    at = torch.searchsorted(draft_ids, ids).clamp(max=len(draft_ids) - 1)
    return at.masked_fill(draft_ids[at] != ids, -1)
