"""The losses of draft training, on supervised slots only, in chunks.

q is the verifier's distribution over V, p the drafter's over V' ⊆ V, q̃ is q renormalised on V'.
Logits over a vocabulary are never held for more than one chunk of positions: the verifier's are
made from its last hidden states, the drafter's from its own, inside the chunk.

Legend: n rows, S steps, H verifier's hidden size, H' the drafter's, V and V' vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from headstart.models.drafter import Batch, Loss, TrainableDrafter

METRICS = ("loss", "accuracy", "expected_acceptance", "outside_vocabulary")


@dataclass
class LossConfig:
    """What is learned from each supervised slot."""

    kind: Literal["ce", "hard_ce", "lk", "lk_hybrid"] = "ce"
    """ce: cross entropy with q̃; hard_ce: with the token; lk: minus the log of the acceptance rate;
    lk_hybrid: KL far from the verifier, total variation near it."""
    num_steps: int = 4
    """Steps unrolled in training (training-time test)."""
    gamma: float = 0.8
    """Step s weighs gamma^s, normalised over the steps."""
    eta: float = 3.0
    """lk_hybrid: how fast the weight moves from KL to total variation as acceptance grows."""
    chunk_positions: int = 512
    """Positions whose logits are held at once; more than one chunk is recomputed in backward."""

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"loss.num_steps must be 1 or more, got {self.num_steps}")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"loss.gamma must be in (0, 1], got {self.gamma}")
        if self.chunk_positions < 1:
            raise ValueError(f"loss.chunk_positions must be 1 or more, got {self.chunk_positions}")

    def step_weights(self) -> Tensor:
        """[S], summing to 1."""
        weights = self.gamma ** torch.arange(self.num_steps, dtype=torch.float32)
        return weights / weights.sum()


class Teacher:
    """The verifier's logits of some rows, and what the losses need of them."""

    def __init__(self, logits: Tensor, draft_ids: Tensor | None):
        logits = logits.float()
        self.best = logits.argmax(-1)  # [n]
        self.log_total = logits.logsumexp(-1, keepdim=True)  # [n, 1]
        self.logits = logits if draft_ids is None else logits[:, draft_ids]  # [n, V']

    def rows(self, index: Tensor) -> Teacher:
        picked = object.__new__(Teacher)
        picked.best, picked.log_total = self.best[index], self.log_total[index]
        picked.logits = self.logits[index]
        return picked


def row_losses(
    config: LossConfig, teacher: Teacher, logits: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss and expected acceptance of each row.

    Args:
        logits: the drafter's, [n, V'].
        columns: [n], the target's column in V', or -1 where it is outside.

    Returns:
        loss [n]; Σ_v min(q, p) [n], detached. Formulas: `lk` and `lk_hybrid` after the LK losses
        (2026), the rest is standard.
    """
    log_p = logits.float().log_softmax(-1)
    log_q = teacher.logits - teacher.log_total  # not renormalised on V'
    least = torch.minimum(log_q, log_p)
    with torch.no_grad():
        acceptance = least.exp().sum(-1)
    if config.kind == "hard_ce":
        picked = log_p.gather(-1, columns.clamp(min=0)[:, None])[:, 0]
        return -picked.masked_fill(columns < 0, 0), acceptance
    if config.kind == "lk":
        return -least.logsumexp(-1), acceptance
    q_tilde = log_q.softmax(-1)
    cross_entropy = -(q_tilde * log_p).sum(-1)
    if config.kind == "ce":
        return cross_entropy, acceptance
    entropy = -(q_tilde * log_q.log_softmax(-1)).sum(-1)
    total_variation = 1 - least.exp().sum(-1)
    weight = torch.exp(-config.eta * acceptance)
    return weight * (cross_entropy - entropy) + (1 - weight) * total_variation, acceptance


def unrolled_loss(
    drafter: TrainableDrafter, batch: Batch, hidden: list[Tensor], weights: Tensor
) -> Loss:
    """Weighted sum of the losses of every supervised (t, s), and metrics per step.

    The verifier's logits at a position serve every step that is taught there, so the work is cut
    into chunks of positions and each chunk holds all its steps.

    Args:
        hidden: S tensors [B, T, H'].
        weights: [S].
    """
    from headstart.models.drafter import Loss, supervised

    width = batch["input_ids"].shape[1]
    slots = [supervised(batch, s).flatten().nonzero()[:, 0] for s in range(len(hidden))]
    taught = [slot + 1 + s for s, slot in enumerate(slots)]  # flat positions of the teachers
    positions = torch.cat(taught).unique()
    device = batch["input_ids"].device
    sums = torch.zeros(len(hidden), len(METRICS), device=device)
    value = torch.zeros((), device=device) + sum(h.sum() * 0 for h in hidden)  # every rank has it
    if not len(positions):  # data parallelism waits for every weight's gradient on every rank
        value = value + drafter.logits(hidden[0][:1, :1]).sum() * 0
    flat_hidden = [h.flatten(0, 1) for h in hidden]
    last_hidden = batch["last_hidden"].flatten(0, 1)
    input_ids = batch["input_ids"].flatten()
    assert width * len(batch["input_ids"]) == len(input_ids)
    chunks = positions.split(drafter.loss.chunk_positions) if len(positions) else ()
    for chunk in chunks:
        rows, index, steps = [], [], []
        for s, (slot, at) in enumerate(zip(slots, taught, strict=True)):
            begin, end = torch.searchsorted(
                at, chunk[[0, -1]] + torch.tensor([0, 1], device=device)
            )
            rows.append(flat_hidden[s][slot[begin:end]])
            index.append(torch.searchsorted(chunk, at[begin:end]))
            steps.append(torch.full_like(at[begin:end], s))
        arguments = (
            torch.cat(rows),
            last_hidden[chunk],
            torch.cat(index),
            torch.cat(steps),
            input_ids[chunk + 1],
            weights,
            drafter,
        )
        if len(chunks) > 1 and torch.is_grad_enabled():
            part, part_sums = checkpoint(_chunk_loss, *arguments, use_reentrant=False)
        else:
            part, part_sums = _chunk_loss(*arguments)
        value = value + part
        sums = sums + part_sums
    metrics = {}
    for s, slot in enumerate(slots):
        count = torch.tensor(float(len(slot)), device=device)
        for column, name in enumerate(METRICS):
            metrics[f"{name}/{s}"] = (sums[s, column].detach(), count)
    return Loss(value, metrics)


def _chunk_loss(
    rows: Tensor,
    last_hidden: Tensor,
    index: Tensor,
    steps: Tensor,
    targets: Tensor,
    weights: Tensor,
    drafter: TrainableDrafter,
) -> tuple[Tensor, Tensor]:
    """Weighted loss (scalar) and metric sums [S, metrics] of one chunk.

    Args:
        rows: [n, H'] drafter's hidden states, of several steps.
        last_hidden: [m, H] the verifier's at the chunk's positions.
        index, steps: [n] the position (in the chunk) that teaches a row, and the row's step.
        targets: [m] the token after each position.
    """
    with torch.no_grad():
        teacher = Teacher(drafter.verifier.logits(last_hidden), drafter.draft_ids)
    teacher = teacher.rows(index)
    targets = targets[index]
    logits = drafter.logits(rows)
    columns = _columns(targets, drafter.draft_ids)
    loss, acceptance = row_losses(drafter.loss, teacher, logits, columns)
    with torch.no_grad():
        best = logits.argmax(-1)
        if drafter.draft_ids is not None:
            best = drafter.draft_ids[best]
        outside = columns < 0  # such a token can only be rejected
        accurate = (best == teacher.best) & ~outside
        table = torch.stack([loss.detach(), accurate.float(), acceptance, outside.float()], dim=1)
        sums = torch.zeros(len(weights), len(METRICS), device=table.device)
        sums.index_add_(0, steps, table)
    return (loss * weights[steps]).sum(), sums


def _columns(targets: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Column of each target in the drafter's vocabulary, -1 where it is not there."""
    if draft_ids is None:
        return targets
    at = torch.searchsorted(draft_ids, targets).clamp(max=len(draft_ids) - 1)
    return at.masked_fill(draft_ids[at] != targets, -1)
