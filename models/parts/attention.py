"""Attention that drafters share: training-time test, and decoding with a ragged cache.

Training-time test (EAGLE-3, Li et al. 2025): at step s, the query of slot t sees the step-0 keys
of slots ≤ t, and its own slot's keys of steps 1 … s. Block 0 is ordinary causal attention; the
rest is one dot product per earlier step, so nothing of size T × T·S is ever made.

Legend: B rows, h heads, T slots, D head size, s earlier steps.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.models.verifier.cache import RaggedCache, visible


def ttt_attention(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of step s = len(keys) - 1.

    Args:
        query: [B, h, T, D], rotated for step s.
        keys, values: one [B, h_kv, T, D] a step, 0 … s; h is a multiple of h_kv.
        mask: additive [B, 1, T, T] for block 0, causality in it; None: plain causal.

    Returns:
        [B, h, T, D].
    """
    groups = query.shape[1] // keys[0].shape[1]
    if groups > 1:
        keys = [key.repeat_interleave(groups, dim=1) for key in keys]
        values = [value.repeat_interleave(groups, dim=1) for value in values]
    if len(keys) == 1:
        return F.scaled_dot_product_attention(
            query, keys[0], values[0], attn_mask=mask, is_causal=mask is None
        )
    own_keys, own_values = torch.stack(keys[1:]), torch.stack(values[1:])
    return _MergedAttention.apply(query, keys[0], values[0], own_keys, own_values, mask)


class _MergedAttention(torch.autograd.Function):
    """Softmax over block 0 and the diagonal together, from a fused kernel's log-sum-exp.

    The kernel's log-sum-exp carries no gradient, so autograd through the merge would be wrong for
    queries and keys. The kernel's own backward, given the *merged* output and log-sum-exp, is
    exact for block 0; the diagonal's gradient is written out.
    """

    @staticmethod
    def forward(ctx, query, keys, values, own_keys, own_values, mask):
        scale = query.shape[-1] ** -0.5
        block, log_sum, *kernel_state = _fused_forward(query, keys, values, mask)
        scores = (query * own_keys).sum(-1).to(log_sum.dtype) * scale  # [s, B, h, T]
        merged = torch.logaddexp(log_sum, scores.logsumexp(0))  # [B, h, T]
        weights = (scores - merged).exp().to(query.dtype)  # [s, B, h, T]
        output = block * (log_sum - merged).exp().to(query.dtype)[..., None]
        output = output + (weights[..., None] * own_values).sum(0)
        ctx.save_for_backward(
            query, keys, values, own_keys, own_values, mask, output, merged, weights, *kernel_state
        )
        return output

    @staticmethod
    def backward(ctx, grad):
        query, keys, values, own_keys, own_values, mask, output, merged, weights, *kernel_state = (
            ctx.saved_tensors
        )
        scale = query.shape[-1] ** -0.5
        grad = grad.contiguous()
        d_query, d_keys, d_values = _fused_backward(
            grad, query, keys, values, mask, output, merged, kernel_state
        )
        through_values = (grad * own_values).sum(-1) - (grad * output).sum(-1)
        d_scores = (weights * through_values)[..., None] * scale  # [s, B, h, T, 1]
        d_query = d_query + (d_scores * own_keys).sum(0)
        return d_query, d_keys, d_values, d_scores * query, weights[..., None] * grad, None


def _fused_forward(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple:
    """Output [B, h, T, D], log-sum-exp [B, h, T] float32, and what the backward kernel needs."""
    causal = mask is None
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, attn_mask=mask
        )
    bias = None if mask is None else mask.expand(-1, query.shape[1], -1, -1)
    output, log_sum, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, bias, True, 0.0, causal
    )
    return output, log_sum[..., : query.shape[2]], log_sum, seed, offset


def _fused_backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    output: Tensor,
    merged: Tensor,
    kernel_state: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    causal = mask is None
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, keys, values, output, merged, 0.0, causal, attn_mask=mask
        )
    padded, seed, offset = kernel_state  # this kernel pads its log-sum-exp
    padded = padded.clone()
    padded[..., : merged.shape[-1]] = merged
    bias = None if mask is None else mask.expand(-1, query.shape[1], -1, -1)
    needed = [True, True, True, False]
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, query, keys, values, bias, output, padded, seed, offset, 0.0, needed, causal
    )[:3]


def packed_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Additive causal mask [B, 1, T, T] that keeps documents apart; None where each row is one."""
    real = document_ids.masked_fill(document_ids < 0, 0)
    if bool((real == real[:, :1]).all()):
        return None  # padding lies at the end, where causality hides it
    slots = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    seen = (document_ids[:, :, None] == document_ids[:, None, :]) & visible(slots, slots)
    rows, width = document_ids.shape
    aligned = -(-width // 16) * 16  # CUDA's kernel wants rows that begin at 16-byte borders
    mask = torch.zeros(rows, width, aligned, dtype=dtype, device=seen.device)[..., :width]
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cache: RaggedCache,
    seen: Tensor | None = None,
) -> Tensor:
    """Attention of n new slots over the cache and each other; appends them to the cache.

    Args:
        query, key, value: [B, h or h_kv, n, D].
        positions: [B, n] the slots' numbers, -1 for padding.
        seen: bool [B, n, m] which of the last m slots, the new ones among them, each new slot may
            see, for the nodes of a tree; None: all, as far as positions allow.

    Returns:
        [B, h, n, D].
    """
    cache.append_positions(positions)
    keys, values = cache.update(key, value, 0)
    mask = None
    several = positions.shape[1] > 1 and keys.shape[2] > positions.shape[1]
    if cache.has_holes or several or seen is not None:
        mask = visible(positions, cache.positions)
        if seen is not None:
            mask[..., -seen.shape[-1] :] &= seen
        mask = (mask | (positions < 0)[..., None])[:, None]  # padding sees all: no empty softmax
    causal = mask is None and positions.shape[1] > 1
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True
    )
