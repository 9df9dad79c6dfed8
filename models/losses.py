"""The losses of draft training, on supervised slots only, in chunks.

q is the verifier's distribution over V, p the drafter's over V' ⊆ V, q̃ is q renormalised on V'.
Logits over a vocabulary are never held for more than one chunk of positions: the verifier's are
made from its last hidden states, the drafter's from its own, inside the chunk.

Legend: n rows, S steps, H verifier's hidden size, H' the drafter's, V and V' vocabularies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from headstart.models import vocab
from headstart.models.batch import Batch, Loss, supervised
from headstart.models.verifier.verifier import Verifier

_ROWS = 64
_MOST_STEPS = 100  # beyond any use: a slip of the keyboard would fill memory
METRICS = ("loss", "accuracy", "outside_vocabulary")  # accuracy: the best draft is the token


@dataclass
class LossConfig:
    """What is learned from each supervised slot."""

    kind: Literal["ce", "hard_ce", "reverse_kl", "jsd", "lk", "lk_hybrid"] = "ce"
    """ce: cross entropy with q̃, whose gradient is forward KL's; hard_ce: with the token;
    reverse_kl: KL from p to q̃; jsd: Jensen-Shannon of both; lk: minus the log of the acceptance
    rate; lk_hybrid: KL far from the verifier, total variation near it."""
    num_steps: int = 4
    """Steps unrolled in training (training-time test)."""
    gamma: float = 0.8
    """Step s weighs gamma^s, normalised over the steps."""
    beta: float = 0.5
    """jsd: share of q̃ in the mixture, in (0, 1); near 0 it is like forward KL, near 1 like
    reverse KL."""
    eta: float = 3.0
    """lk_hybrid: how fast the weight moves from KL to total variation as acceptance grows."""
    chunk_positions: int = 256
    """Positions whose logits, of all steps, are held at once."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_steps <= _MOST_STEPS:
            raise ValueError(f"loss.num_steps must be in 1 … {_MOST_STEPS}, got {self.num_steps}")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"loss.gamma must be in (0, 1], got {self.gamma}")
        if not 0 < self.beta < 1:
            raise ValueError(f"loss.beta must be in (0, 1), got {self.beta}")
        if self.chunk_positions < 1:
            raise ValueError(f"loss.chunk_positions must be 1 or more, got {self.chunk_positions}")

    def step_weights(self) -> Tensor:
        """[S], summing to 1."""
        weights = self.gamma ** torch.arange(self.num_steps, dtype=torch.float32)
        return weights / weights.sum()


class Learner(Protocol):
    """What the losses ask of a drafter."""

    loss: LossConfig
    one_head: bool
    draft_ids: Tensor | None

    @property
    def verifier(self) -> Verifier: ...
    def logits(self, hidden: Tensor, step: int) -> Tensor: ...
    def parameters(self) -> Iterator[Tensor]: ...


class Teacher:
    """What the losses need of the verifier's logits at m positions, for n rows taught there."""

    def __init__(self, log_q: Tensor, index: Tensor | None = None):
        """`log_q [m, V']`, not renormalised on V'; row i is taught at `index[i]` ([n]), or at i."""
        self.index = index
        self.log_q = log_q
        self.log_mass = log_q.logsumexp(-1, keepdim=True)  # [m, 1], what V' holds of q
        self.q_tilde = (log_q - self.log_mass).exp()  # [m, V']; the mass itself may underflow

    @classmethod
    def of(cls, drafter: Learner, last_hidden: Tensor, index: Tensor | None = None) -> Teacher:
        """Of the verifier's `last_hidden [m, H]`.

        q̃ needs no logits outside V', so only `lk` and `lk_hybrid`, whose q is not renormalised, pay
        for all of them; else `log_q` is log q̃.
        """
        verifier, draft_ids = drafter.verifier, drafter.draft_ids
        if drafter.loss.kind not in ("lk", "lk_hybrid"):
            return cls(verifier.logits(last_hidden, draft_ids).float().log_softmax(-1), index)
        log_q = verifier.logits(last_hidden).float().log_softmax(-1)
        return cls(log_q if draft_ids is None else log_q[:, draft_ids], index)

    def rows(self, name: str) -> Tensor:
        """One of the tensors, row by row: [n, …]."""
        tensor = getattr(self, name)
        return tensor if self.index is None else tensor[self.index]


class RowLosses(NamedTuple):
    """Losses of n rows of logits, and their gradient."""

    loss: Tensor  # [n]
    gradient: Tensor  # [n, V'], of each loss with respect to its row of logits


@torch.no_grad()
def row_losses(
    config: LossConfig, teacher: Teacher | None, logits: Tensor, columns: Tensor
) -> RowLosses:
    """Losses and gradients, written out: each is p minus what it should be, by some measure.

    With p = softmax(logits), the gradient of −Σ_v a_v log p_v is (Σ a) p − a, that of
    −Σ_v min(q, p) is p S − p·1[p < q], where S = Σ p·1[p < q], and that of any f(p) is
    p (g − Σ_v p_v g_v) with g = ∂f/∂p up to a constant: log(p/q̃) for reverse KL, and
    (1−β) log(p/m), m = βq̃ + (1−β)p, for β·KL(q̃‖m) + (1−β)·KL(p‖m) (Agarwal et al. 2024, arXiv
    2306.13649). `lk` and `lk_hybrid` are from the LK losses (2026); the weight of `lk_hybrid` is
    held constant.

    Args:
        teacher: None for `hard_ce`, which has none.
        logits: the drafter's, [n, V'].
        columns: [n], the target's column in V', or -1 where it is outside.
    """
    log_p = logits.float().log_softmax(-1)
    p = log_p.exp()
    if config.kind == "hard_ce":
        inside = (columns >= 0).float()[:, None]
        picked = columns.clamp(min=0)[:, None]
        loss = -(log_p.gather(-1, picked) * inside)[:, 0]
        return RowLosses(loss, (p * inside).scatter_add_(-1, picked, -inside))
    if config.kind == "ce":
        q_tilde = teacher.rows("q_tilde")
        return RowLosses(-torch.linalg.vecdot(q_tilde, log_p), p.sub_(q_tilde))
    if config.kind in ("reverse_kl", "jsd"):
        log_q_tilde = teacher.rows("log_q") - teacher.rows("log_mass")
        return _divergence(config, log_q_tilde, log_p)
    log_q = teacher.rows("log_q")
    # in logarithms: the acceptance may be far too small for float32
    log_acceptance = torch.minimum(log_q, log_p).logsumexp(-1, keepdim=True)
    below = torch.where(log_p < log_q, (log_p - log_acceptance).exp(), 0)
    to_acceptance = p * below.sum(-1, keepdim=True) - below  # gradient of −log acceptance
    if config.kind == "lk":
        return RowLosses(-log_acceptance[:, 0], to_acceptance)
    q_tilde = teacher.rows("q_tilde")
    divergence = torch.linalg.vecdot(q_tilde, log_q - teacher.rows("log_mass") - log_p)
    acceptance = log_acceptance.exp()
    weight = torch.exp(-config.eta * acceptance)
    loss = weight[:, 0] * divergence + (1 - weight[:, 0]) * (1 - acceptance[:, 0])
    gradient = weight * (p - q_tilde) + (1 - weight) * acceptance * to_acceptance
    return RowLosses(loss, gradient)


def _divergence(config: LossConfig, log_q: Tensor, log_p: Tensor) -> RowLosses:
    """Reverse KL and Jensen-Shannon of p and the renormalised q."""
    p = log_p.exp()
    if config.kind == "reverse_kl":
        slope = log_p - log_q
        loss = torch.linalg.vecdot(p, slope)
    else:
        beta = config.beta
        log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
        slope = (1 - beta) * (log_p - log_m)
        loss = beta * torch.linalg.vecdot(log_q.exp(), log_q - log_m)
        loss = loss + torch.linalg.vecdot(p, slope)
    return RowLosses(loss, p * (slope - torch.linalg.vecdot(p, slope)[:, None]))


def unrolled_loss(
    drafter: Learner,
    batch: Batch,
    hidden: list[Tensor],
    weights: Tensor,
    first: int = 0,
) -> Loss:
    """Weighted sum of the losses of every supervised (t, s), and metrics per step.

    Args:
        hidden: S tensors [B, T, H'].
        weights: [S].
        first: step of the first of them.
    """

    steps = range(first, first + len(hidden))
    slots = [supervised(batch, s).flatten().nonzero()[:, 0] for s in steps]
    weighted = [w for w in drafter.parameters() if w.requires_grad]
    value, sums = _FusedLoss.apply(
        drafter, batch, slots, weights, len(hidden), first, *hidden, *weighted
    )
    metrics = {}
    for s, slot in enumerate(slots):
        count = torch.tensor(float(len(slot)), device=sums.device)
        for column, name in enumerate(METRICS):
            metrics[f"{name}/{s}"] = (sums[s, column], count)
    return Loss(value, metrics)


class _FusedLoss(torch.autograd.Function):
    """The loss, with its gradients computed on the way.

    Autograd would keep every chunk's logits until backward, or make them twice. Here a chunk's
    gradients with respect to hidden states and weights are taken while its logits are at hand.
    """

    @staticmethod
    def forward(ctx, drafter, batch, slots, weights, num_steps, first, *tensors):
        hidden, parameters = tensors[:num_steps], tensors[num_steps:]
        needed = any(ctx.needs_input_grad)
        taught = [slot + 1 + first + s for s, slot in enumerate(slots)]
        value, sums, gradients = _chunked(
            drafter, batch, slots, taught, weights, hidden, parameters, needed
        )
        ctx.gradients = gradients
        ctx.mark_non_differentiable(sums)
        return value, sums

    @staticmethod
    def backward(ctx, grad_value, _):
        gradients, ctx.gradients = ctx.gradients, None  # backward runs once: in place
        scaled = (None if g is None else g.mul_(grad_value) for g in gradients)
        return None, None, None, None, None, None, *scaled


def _chunked(
    drafter: Learner,
    batch: Batch,
    slots: list[Tensor],
    taught: list[Tensor],
    weights: Tensor,
    hidden: tuple[Tensor, ...],
    parameters: tuple[Tensor, ...],
    needed: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Value, metric sums [S, metrics], gradients of `hidden` and `parameters` if they are needed.

    The verifier's logits at a position serve every step that is taught there, so the work is cut
    into chunks of positions, and a chunk holds all its steps. `slots` and `taught` are flat: where
    a step's hidden states lie, and the positions of their teachers.
    """
    positions = torch.cat(taught).unique()
    last_hidden, input_ids = batch["last_hidden"].flatten(0, 1), batch["input_ids"].flatten()
    sums = weights.new_zeros(len(hidden), len(METRICS))
    value = weights.new_zeros(())
    flat = [h.detach().flatten(0, 1) for h in hidden]
    flat_gradients = [torch.zeros_like(h) for h in flat]
    gradients: list[Tensor | None] = [None] * len(parameters)
    for chunk in positions.split(drafter.loss.chunk_positions):
        if not len(chunk):
            continue
        reach = chunk[[0, -1]] + chunk.new_tensor([0, 1])
        bounds = [torch.searchsorted(at, reach).tolist() for at in taught]
        here = [slot[begin:end] for slot, (begin, end) in zip(slots, bounds, strict=True)]
        where = torch.cat([at[begin:end] for at, (begin, end) in zip(taught, bounds, strict=True)])
        counts = [len(slot) for slot in here]
        steps = torch.arange(len(hidden), device=chunk.device).repeat_interleave(
            torch.tensor(counts, device=chunk.device)
        )
        rows = torch.cat([f[slot] for f, slot in zip(flat, here, strict=True)])
        rows = _padded(rows).requires_grad_()
        teacher = None
        if drafter.loss.kind != "hard_ce":
            index = torch.searchsorted(chunk, where)
            teacher = Teacher.of(drafter, _padded(last_hidden[chunk]), index)
        columns = vocab.columns(input_ids[where + 1], drafter.draft_ids)
        with torch.set_grad_enabled(needed):
            logits = _project(drafter, rows, counts)
        real = logits.detach()[: len(where)]
        found = row_losses(drafter.loss, teacher, real, columns)
        value += (found.loss * weights[steps]).sum()
        accurate = real.argmax(-1) == columns  # a token outside V' can only be rejected
        table = torch.stack([found.loss, accurate.float(), (columns < 0).float()], dim=1)
        sums.index_add_(0, steps, table)
        if needed:
            gradient = _padded((found.gradient * weights[steps, None]).to(logits.dtype))
            to_rows, *to_parameters = torch.autograd.grad(
                logits, [rows, *parameters], gradient, allow_unused=True
            )
            parts = to_rows[: len(where)].split(counts)
            for f, slot, part in zip(flat_gradients, here, parts, strict=True):
                f[slot] = part
            for i, part in enumerate(to_parameters):
                gradients[i] = part if gradients[i] is None else gradients[i].add_(part)
    if not len(positions):  # data parallelism waits for every weight's gradient on every rank
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
    shaped = [f.view_as(h) for f, h in zip(flat_gradients, hidden, strict=True)]
    return value, sums, [*shaped, *gradients]


def _project(drafter: Learner, rows: Tensor, counts: list[int]) -> Tensor:
    """Logits of rows that are in order of their steps: `counts[s]` of step s, then padding."""
    if drafter.one_head:
        return drafter.logits(rows, 0)
    parts = rows.split([*counts, len(rows) - sum(counts)])
    last = len(counts) - 1  # padding goes with any step
    return torch.cat([drafter.logits(part, min(s, last)) for s, part in enumerate(parts)])


def _padded(rows: Tensor) -> Tensor:
    """Zero rows behind, up to a multiple: oneDNN compiles a kernel for every new shape."""
    return functional.pad(rows, (0, 0, 0, -len(rows) % _ROWS))
