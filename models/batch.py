"""What a drafter is trained and measured on: a batch, which of its slots count, and a loss.

Legend: B rows, T slots, H verifier's hidden size, L feature layers.
"""

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor


class Batch(TypedDict, total=False):
    """Rows ready for the drafter. The last two come from the verifier (featurize)."""

    input_ids: Tensor  # [B, T] long
    loss_mask: Tensor  # [B, T] long: 0, or the number (1, 2, …) of the assistant turn it belongs to
    position_ids: Tensor  # [B, T] long, from 0 in each document
    document_ids: Tensor  # [B, T] long: 0, 1, … by packed document; -1 for padding
    features: Tensor  # [B, T, L*H]
    last_hidden: Tensor  # [B, T, H]


class Loss(NamedTuple):
    """A weighted sum, ready for backward, and metrics as (sum, count) pairs."""

    value: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]


def supervised(batch: Batch, step: int) -> Tensor:
    """Which (t, step) are trained and measured: bool [B, T].

    True where x_{t+1} … x_{t+2+step} lie in one assistant turn and x_t in the same document: the
    pairs that serving can reach. Step -1 is the verifier's own: x_{t+1} of an answer.
    """
    turns, documents = batch["loss_mask"], batch["document_ids"]
    reach = step + 2
    mask = torch.zeros_like(turns, dtype=torch.bool)
    if turns.shape[1] > reach:
        first, last = turns[:, 1 : 1 + turns.shape[1] - reach], turns[:, reach:]
        same_document = documents[:, :-reach] == documents[:, reach:]
        mask[:, :-reach] = (first == last) & (last > 0) & same_document
    return mask
