"""The ragged cache against plain lists that do the same, token by token."""

import random
from collections.abc import Iterator

import pytest
import torch

from headstart.models.verifier.cache import HOLE, RaggedCache, visible

LAYERS, HEADS, WIDTH = 2, 3, 4


class Plain:
    """The reference: each row a list of (position, number), holes included where they lie."""

    def __init__(self, batch_size: int):
        self.rows: list[list[tuple[int, float]]] = [[] for _ in range(batch_size)]

    def texts(self) -> list[list[tuple[int, float]]]:
        """What each row holds, holes left out."""
        return [[slot for slot in row if slot[0] != HOLE] for row in self.rows]


def append(cache: RaggedCache, plain: Plain, positions: torch.Tensor, numbers: Iterator) -> None:
    """Every key is filled with a number of its own, every value with its negative, per layer."""
    marks = torch.tensor([[next(numbers) for _ in row] for row in positions.tolist()])
    cache.append_positions(positions)
    for layer in range(LAYERS):
        keys = (marks + 0.25 * layer)[:, None, :, None].expand(-1, HEADS, -1, WIDTH).clone()
        held_keys, held_values = cache.update(keys, -keys, layer)
        assert held_keys.shape == held_values.shape
        assert held_keys.shape[2] == cache.positions.shape[1]
    for row, where, mark in zip(plain.rows, positions.tolist(), marks.tolist(), strict=True):
        row += zip(where, mark, strict=True)


def held(cache: RaggedCache) -> list[list[tuple[int, float]]]:
    """What the cache holds, read from keys and values of every layer, which must agree."""
    used = cache.positions != HOLE
    for index, layer in enumerate(cache.layers):
        assert layer.keys.shape[2] == cache.positions.shape[1] == cache.get_seq_length()
        keys = layer.keys - 0.25 * index
        first = cache.layers[0].keys[:, :1, :, :1].expand_as(keys)
        picked = used[:, None, :, None].expand_as(keys)
        assert torch.equal(keys[picked], first[picked])
        assert torch.equal(layer.values[picked], -layer.keys[picked])
    numbers = cache.layers[0].keys[:, 0, :, 0]
    return [
        [(p, n) for p, n in zip(where, row, strict=True) if p != HOLE]
        for where, row in zip(cache.positions.tolist(), numbers.tolist(), strict=True)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_random_use_equals_plain_lists(seed: int) -> None:
    rng = random.Random(seed)
    numbers = iter(range(1, 1_000_000))
    batch = rng.choice([1, 2, 5])
    cache, plain = RaggedCache(batch), Plain(batch)
    for _ in range(60):
        width = rng.choice([1, 1, 3, 5, 40])
        starts = [1 + max([p for p, _ in row], default=-1) for row in plain.rows]
        positions = torch.full((len(plain.rows), width), HOLE)
        for row, start in enumerate(starts):
            count = rng.randint(0 if width > 1 else 1, width)
            positions[row, :count] = torch.arange(start, start + count)
        append(cache, plain, positions, numbers)
        assert cache.next_positions().tolist() == [
            1 + max([p for p, _ in row], default=-1) for row in plain.rows
        ]
        action = rng.random()
        if action < 0.5:  # a verdict: cut something off each row's end
            kept = [row[: max(1, len(row) - rng.randint(0, 6))] for row in plain.texts()]
            ends = torch.tensor([row[-1][0] if row else HOLE for row in kept])
            if (ends < 0).all():
                continue
            cache.keep(cache.positions <= ends[:, None])
            for row, end in enumerate(ends.tolist()):
                plain.rows[row] = [s for s in plain.rows[row] if s[0] <= end]
        elif action < 0.65:  # holes anywhere
            dropped = {n for row in plain.texts() for _, n in row[1:] if rng.random() < 0.3}
            marks = cache.layers[0].keys[:, 0, :, 0]
            cache.keep(~torch.isin(marks, torch.tensor(sorted(dropped), dtype=marks.dtype)))
            plain.rows = [[s for s in row if s[1] not in dropped] for row in plain.rows]
        elif action < 0.75 and len(plain.rows) > 1:  # rows leave, and change places
            kept = rng.sample(range(len(plain.rows)), len(plain.rows) - 1)
            cache.select_rows(torch.tensor(kept))
            plain.rows = [plain.rows[row] for row in kept]
        assert held(cache) == plain.texts()
        assert cache.has_holes == bool((cache.positions == HOLE).any())


def test_truncate_forgets_the_last_slots_of_all_rows() -> None:
    cache, plain = RaggedCache(2), Plain(2)
    append(cache, plain, torch.arange(10).expand(2, -1), iter(range(100)))
    cache.truncate(4)
    assert held(cache) == [row[:4] for row in plain.rows]
    append(cache, plain, torch.tensor([[4], [4]]), iter(range(100, 200)))
    assert [row[-1][1] for row in held(cache)] == [100, 101]


def test_shared_trailing_holes_are_cut_off() -> None:
    cache, plain = RaggedCache(2), Plain(2)
    append(cache, plain, torch.arange(10).expand(2, -1), iter(range(100)))
    cache.keep(torch.arange(10).expand(2, -1) < torch.tensor([[3], [6]]))
    assert cache.positions.tolist() == [[0, 1, 2, HOLE, HOLE, HOLE], list(range(6))]
    assert cache.has_holes


def test_many_holes_are_squeezed_out() -> None:
    """A batch in which one row gains five tokens a round and another one must not grow by five."""
    cache, plain, numbers = RaggedCache(2), Plain(2), iter(range(100_000))
    lengths = [0, 0]
    for turn in range(100):
        positions = torch.stack([torch.arange(5) + n for n in lengths])
        append(cache, plain, positions, numbers)
        lengths[turn % 2] += 5
        lengths[1 - turn % 2] += 1
        cache.keep(cache.positions < torch.tensor(lengths)[:, None])
    assert lengths == [300, 300]
    assert cache.positions.shape[1] <= 1.25 * 300 + 64
    assert [sorted(p for p in row if p != HOLE) for row in cache.positions.tolist()] == [
        list(range(300))
    ] * 2


def test_appending_does_not_disturb_keys_handed_out_before() -> None:
    """Attention may still read what an earlier `update` returned."""
    cache, plain = RaggedCache(1), Plain(1)
    append(cache, plain, torch.arange(3)[None], iter(range(10)))
    first = cache.layers[0].keys
    before = first.clone()
    append(cache, plain, torch.arange(3, 6)[None], iter(range(10, 20)))
    assert torch.equal(first, before)


def test_visible_is_causal_windowed_and_blind_to_holes() -> None:
    queries, keys = torch.tensor([[3, 4]]), torch.tensor([[0, 1, HOLE, 2, 3, 4]])
    assert visible(queries, keys).int().tolist() == [[[1, 1, 0, 1, 1, 0], [1, 1, 0, 1, 1, 1]]]
    assert visible(queries, keys, 2).int().tolist() == [[[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]]
