"""Attention of drafters against dense attention: values and gradients, masks, caches, memory."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.models.parts.attention import (
    _fused_forward,
    cached_attention,
    packed_mask,
    ttt_attention,
)
from headstart.models.verifier.cache import RaggedCache

ONE = torch.zeros(2, 13, dtype=torch.long)
PACKED = torch.tensor([[0] * 5 + [1] * 1 + [2] * 7, [0] * 6 + [1] * 4 + [-1] * 3])
PADDED = torch.tensor([[0] * 13, [0] * 9 + [-1] * 4])


def inputs(steps: int, heads: int = 4, kv_heads: int = 2, size: int = 8, slots: int = 13, **kwargs):
    """Queries, keys and values of every step."""
    torch.manual_seed(1)
    shapes = (heads, kv_heads, kv_heads)
    return [
        [torch.randn(2, h, slots, size, **kwargs).requires_grad_() for _ in range(steps)]
        for h in shapes
    ]


def dense(query: Tensor, keys: list[Tensor], values: list[Tensor], documents: Tensor) -> Tensor:
    """Step s by one softmax over all T·(s+1) keys, head by head, in float64."""
    rows, heads, slots, size = query.shape
    groups = heads // keys[0].shape[1]
    seen = torch.zeros(rows, slots, len(keys) * slots, dtype=torch.bool, device=query.device)
    for row in range(rows):
        for t in range(slots):
            for j in range(t + 1):
                seen[row, t, j] = documents[row, j] == documents[row, t]
            for step in range(1, len(keys)):
                seen[row, t, step * slots + t] = True
    outputs = []
    for head in range(heads):
        key = torch.cat([k[:, head // groups] for k in keys], dim=1).double()
        value = torch.cat([v[:, head // groups] for v in values], dim=1).double()
        scores = query[:, head].double() @ key.mT / math.sqrt(size)
        outputs.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value)
    return torch.stack(outputs, dim=1)


def unrolled(attention, given, *arguments) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Outputs of every step, and the gradients of queries, keys, values of every step."""
    queries, keys, values = given
    steps = range(len(queries))
    outputs = [attention(queries[s], keys[: s + 1], values[: s + 1], *arguments) for s in steps]
    torch.manual_seed(2)
    shape = outputs[0].shape
    loss = sum((o * torch.randn(shape).to(o.device)).sum() for o in outputs)
    flat = [tensor for part in given for tensor in part]
    grads = torch.autograd.grad(loss, flat)
    return outputs, [list(grads[i : i + len(queries)]) for i in range(0, len(flat), len(queries))]


def compare(given, documents: Tensor, tolerance: float = 1e-5) -> None:
    mask = packed_mask(documents, given[0][0].dtype)
    outputs, grads = unrolled(ttt_attention, given, mask)
    expected, expected_grads = unrolled(dense, given, documents)
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
    for got_steps, want_steps in zip(grads, expected_grads, strict=True):
        for got, want in zip(got_steps, want_steps, strict=True):
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


# ---- training-time test ------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("documents", [ONE, PACKED], ids=["one document", "packed"])
def test_seven_steps_equal_dense_attention_in_values_and_gradients(documents, kv_heads):
    compare(inputs(7, kv_heads=kv_heads), documents)


def test_double_precision_is_kept():
    compare(inputs(7, dtype=torch.double), PACKED, tolerance=1e-10)


def test_padding_at_the_end_changes_nothing_before_it():
    given = inputs(3)
    assert packed_mask(PADDED, torch.float32) is None
    outputs, _ = unrolled(ttt_attention, given)
    expected, _ = unrolled(dense, given, PADDED)
    for got, want in zip(outputs, expected, strict=True):
        real = PADDED >= 0
        got, want = got.transpose(1, 2)[real], want.transpose(1, 2)[real]
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_merging_without_a_backward_of_its_own_would_be_caught():
    """The fused kernel's log-sum-exp has no gradient: values come out right, gradients wrong."""

    def naive(query, keys, values, mask):
        block, log_sum, *_ = _fused_forward(query, keys[0], values[0], mask)
        if len(keys) == 1:
            return block
        scores = (query * torch.stack(keys[1:])).sum(-1) / math.sqrt(query.shape[-1])
        merged = torch.logaddexp(log_sum, scores.logsumexp(0))
        own = ((scores - merged).exp()[..., None] * torch.stack(values[1:])).sum(0)
        return block * (log_sum - merged).exp()[..., None] + own

    given = inputs(3, kv_heads=4)
    outputs, grads = unrolled(naive, given, None)
    expected, expected_grads = unrolled(dense, given, ONE)
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    query, key, value = (
        (got[0 if part else 2] - want[0 if part else 2]).abs().max()
        for part, (got, want) in enumerate(zip(grads, expected_grads, strict=True))
    )
    assert query > 1e-2 and key > 1e-2 and value < 1e-5


class Largest(TorchDispatchMode):
    """The most elements of any tensor made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def test_nothing_of_the_size_of_a_score_matrix_is_made():
    slots, steps = 128, 5
    given = inputs(steps, heads=2, kv_heads=1, size=4, slots=slots)
    with Largest() as largest:
        unrolled(ttt_attention, given, None)
    rows_and_heads = 2 * 2
    assert 0 < largest.elements <= rows_and_heads * slots * 4 * (steps - 1)
    assert largest.elements < rows_and_heads * slots * slots


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [ONE, PACKED], ids=["one document", "packed"])
def test_seven_steps_equal_dense_attention_on_cuda(documents):
    given = inputs(7, size=16, device="cuda")
    compare(given, documents.cuda(), tolerance=1e-4)


# ---- masks -------------------------------------------------------------------------------------


def test_packed_mask_lets_a_slot_see_its_own_document_up_to_itself():
    documents = torch.tensor([[0, 0, 1, 1, -1]])
    mask = packed_mask(documents, torch.float32)
    seen = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    ).bool()
    assert mask.shape == (1, 1, 5, 5)
    assert ((mask[0, 0] == 0) == seen).all()
    assert mask[0, 0][~seen].max() < -1e30 and mask.isfinite().all()


def test_rows_of_a_packed_mask_are_aligned():
    """CUDA's fused kernel refuses a mask whose rows begin elsewhere than at 16-byte borders."""
    for dtype in (torch.float32, torch.bfloat16):
        mask = packed_mask(PACKED, dtype)
        assert mask.stride(-1) == 1 and mask.stride(-2) * mask.itemsize % 16 == 0


@pytest.mark.parametrize("documents", [ONE, PADDED])
def test_rows_of_one_document_need_no_mask(documents):
    assert packed_mask(documents, torch.float32) is None


# ---- decoding ----------------------------------------------------------------------------------


def attend_in_rounds(kept_in_round: list[list[int]], widths: list[int], heads: int, kv_heads: int):
    """Rows grow by `widths[i]` slots and then keep only some; every output against plain loops."""
    torch.manual_seed(4)
    rows, size = len(kept_in_round[0]), 8
    cache = RaggedCache(rows)
    held = [[] for _ in range(rows)]  # (key, value) of every slot that is left, by row
    for width, kept in zip(widths, kept_in_round, strict=True):
        query = torch.randn(rows, heads, width, size)
        key, value = (torch.randn(rows, kv_heads, width, size) for _ in range(2))
        lengths = [max(k, 0) for k in kept]
        positions = torch.full((rows, width), -1)
        for row, length in enumerate(lengths):
            positions[row, :length] = len(held[row]) + torch.arange(length)
        output = cached_attention(query, key, value, positions, cache)
        assert output.isfinite().all()
        for row, length in enumerate(lengths):
            for i in range(length):
                held[row].append((key[row, :, i], value[row, :, i]))
                for head in range(heads):
                    group = head // (heads // kv_heads)
                    scores = [float(query[row, head, i] @ k[group]) for k, _ in held[row]]
                    weights = (torch.tensor(scores) / math.sqrt(size)).softmax(0)
                    expected = sum(
                        w * v[group] for w, (_, v) in zip(weights, held[row], strict=True)
                    )
                    torch.testing.assert_close(output[row, head, i], expected)
    return cache


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cached_attention_equals_plain_loops_over_ragged_rounds(kv_heads):
    rounds = [[5, 2, 4], [1, 3, 2], [1, 1, 1], [0, 2, 4], [3, 3, 3], [1, 0, 1], [1, 1, 1]]
    cache = attend_in_rounds(rounds, [5, 3, 1, 4, 3, 1, 1], 4, kv_heads)
    assert cache.has_holes


def test_cached_attention_of_one_row_needs_no_holes():
    cache = attend_in_rounds([[5], [3], [1], [1], [2]], [5, 3, 1, 1, 2], 4, 2)
    assert not cache.has_holes and cache.positions.tolist() == [list(range(12))]


def test_slots_cut_from_the_cache_are_not_seen():
    torch.manual_seed(5)
    query, key, value = (torch.randn(2, 2, 9, 8) for _ in range(3))
    cache = RaggedCache(2)

    def run(slots: slice, positions: list[list[int]]) -> Tensor:
        parts = (tensor[:, :, slots] for tensor in (query, key, value))
        return cached_attention(*parts, torch.tensor(positions), cache)

    run(slice(0, 6), [list(range(6))] * 2)
    cache.keep(torch.tensor([[True] * 4 + [False] * 2, [True] * 6]))  # row 0 takes two slots back
    output = run(slice(6, 9), [[4, 5, 6], [6, 7, 8]])
    for row, slots in enumerate([[0, 1, 2, 3, 6], [0, 1, 2, 3, 4, 5, 6]]):
        scores = query[row, :, 6:7] @ key[row][:, slots].mT / math.sqrt(8)
        expected = scores.softmax(-1) @ value[row][:, slots]
        torch.testing.assert_close(output[row, :, 0], expected[:, 0])
