"""A key-value cache whose rows may differ in length.

Speculative decoding cuts a cache back after every round, by another amount in every row of a
batch. So each slot carries the position of the token it holds, or -1 for a hole, and attention
masks are made from positions. Holes are squeezed out when they become many.

Legend: B rows, S slots, n new tokens.
"""

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

HOLE = -1
_GROWTH = 256  # slots added at once: appending must not copy the whole cache every round


class _BufferedLayer(DynamicLayer):
    """One layer's keys and values, views `[B, heads, S, D]` of a buffer that grows in steps."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._key_buffer = self._value_buffer = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used = self.get_seq_length()
        total = used + key_states.shape[-2]
        if self._key_buffer is None or self._key_buffer.shape[-2] < total:
            self._key_buffer = self._grown(self.keys, key_states, total + _GROWTH)
            self._value_buffer = self._grown(self.values, value_states, total + _GROWTH)
        self._key_buffer[:, :, used:total] = key_states
        self._value_buffer[:, :, used:total] = value_states
        self.keys = self._key_buffer[:, :, :total]
        self.values = self._value_buffer[:, :, :total]
        return self.keys, self.values

    @staticmethod
    def _grown(old: Tensor, new: Tensor, capacity: int) -> Tensor:
        buffer = new.new_empty(*new.shape[:-2], capacity, new.shape[-1])
        if old.numel():
            buffer[:, :, : old.shape[-2]] = old
        return buffer

    def truncate(self, num_slots: int) -> None:
        self.keys = self.keys[:, :, :num_slots]
        self.values = self.values[:, :, :num_slots]

    def move(self, slots: Tensor, first: int) -> None:
        """Copy `slots [B, m]` to the places from `first` on."""
        for held in (self.keys, self.values):
            index = slots[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3])
            held[:, :, first : first + slots.shape[1]] = held.gather(2, index)

    def select_rows(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]
        self._key_buffer = self._value_buffer = None

    def gather(self, rows: Tensor, slots: Tensor) -> None:
        """Keep `slots [B', S']` of `rows [B']`."""
        for name in ("keys", "values"):
            held = getattr(self, name)[rows]
            index = slots[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3])
            setattr(self, name, held.gather(2, index))
        self._key_buffer = self._value_buffer = None


class RaggedCache(DynamicCache):
    """Keys and values of every layer, and `positions [B, S]` of the tokens they belong to."""

    def __init__(self, batch_size: int, device: torch.device | str = "cpu"):
        super().__init__()
        self.layer_class_to_replicate = _BufferedLayer
        self.positions = torch.empty(batch_size, 0, dtype=torch.long, device=device)
        self.has_holes = False

    def append_positions(self, positions: Tensor) -> None:
        """Announce the tokens `positions [B, n]` of the pass about to run; -1 marks padding."""
        self.has_holes = self.has_holes or bool((positions < 0).any())
        self.positions = torch.cat([self.positions, positions], dim=1)

    def next_positions(self) -> Tensor:
        """The position after each row's last token: `[B]`, 0 where there is none."""
        if not self.positions.shape[1]:
            return self.positions.new_zeros(len(self.positions))
        return self.positions.amax(1) + 1

    def truncate(self, num_slots: int) -> None:
        """Forget every slot from `num_slots` on, in all rows."""
        self.positions = self.positions[:, :num_slots]
        for layer in self.layers:
            if layer.is_initialized:
                layer.truncate(num_slots)

    def keep_path(self, width: int, path: Tensor, counts: Tensor, longest: int) -> None:
        """Of the last `width` slots of each row keep some, in order, and forget the others.

        Args:
            path: [B, m] which, numbered within the width; ascending in the first `counts` of each
                row. A chain's path is 0, 1, 2, …
            counts: [B] how many.
            longest: the largest count, m or less; `counts` need not be read for it.
        """
        first = self.positions.shape[1] - width
        order = torch.arange(longest, device=path.device)
        kept = order < counts[:, None]
        path = torch.where(kept, path[:, :longest], order)
        if bool((path != order).any()):
            for layer in self.layers:
                if layer.is_initialized:
                    layer.move(first + path, first)
        positions = self.positions[:, first:].gather(1, path).masked_fill(~kept, HOLE)
        before = self.positions[:, :first]
        self.truncate(first + longest)
        self.positions = torch.cat([before, positions], 1)
        if self.has_holes or not bool(kept.all()):
            self.keep(self.positions >= 0)  # squeezes holes out once they are many

    def keep(self, keep: Tensor) -> None:
        """Make holes of the slots where `keep [B, S]` is false; squeeze when it is worth it."""
        self.positions = self.positions.masked_fill(~keep, HOLE)
        used = self.positions >= 0
        longest = int((used * torch.arange(1, used.shape[1] + 1, device=used.device)).max())
        if longest < used.shape[1]:
            self.truncate(longest)
            used = used[:, :longest]
        self.has_holes = not bool(used.all())
        if self.has_holes:
            needed = int(used.sum(1).max())
            if longest - needed > 64 and longest > 1.25 * needed:
                self._squeeze(torch.arange(len(used), device=used.device))

    def select_rows(self, rows: Tensor, squeeze: bool = True) -> None:
        """Keep only `rows [B']`, without the holes that all of them share.

        Args:
            squeeze: False leaves every slot at its place.
        """
        if squeeze:
            self._squeeze(rows)
            return
        for layer in self.layers:
            if layer.is_initialized:
                layer.select_rows(rows)
        self.positions = self.positions[rows]

    def _squeeze(self, rows: Tensor) -> None:
        used = self.positions[rows] >= 0
        needed = int(used.sum(1).max())
        slots = (~used).to(torch.int8).argsort(dim=1, stable=True)[:, :needed]
        for layer in self.layers:
            if layer.is_initialized:
                layer.gather(rows, slots)
        self.positions = self.positions[rows].gather(1, slots)
        self.has_holes = bool((self.positions < 0).any())


def visible(
    query_positions: Tensor, key_positions: Tensor, sliding_window: int | None = None
) -> Tensor:
    """Which keys each query may see: `[B, n]`, `[B, S]` -> bool `[B, n, S]`.

    A key is seen at the query's own position or before, if its slot is no hole, and, with a
    sliding window of w tokens, if it lies fewer than w positions back.
    """
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    seen = (distance >= 0) & (key_positions >= 0)[:, None, :]
    if sliding_window is not None:
        seen &= distance < sliding_window
    return seen
