"""From rows to batches, in an order that can be resumed.

Legend: B rows of a batch, T slots, H verifier's hidden size, L feature layers. A document is one
`Row`; a packed batch holds several of them in a row.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headstart.data.rows import packing
from headstart.data.rows.packing import pack, rounded
from headstart.data.rows.row import Row
from headstart.models.batch import Batch


def collate(
    rows: Sequence[Row], max_length: int, packed: bool, pad_id: int = 0, multiple: int = 1
) -> Batch:
    """One batch, on the CPU, without the verifier's states.

    Padded: row b of the batch is `rows[b]`. Packed: first fit of whole documents in rows of
    `max_length`. Either is padded at the right, to the longest row, rounded up to a `multiple`.
    Positions begin anew in each document; padding has document id -1, loss mask 0 and position 0.
    """
    lengths = [len(row.input_ids) for row in rows]
    bins = pack(lengths, max_length) if packed else [[index] for index in range(len(rows))]
    longest = max(sum(lengths[index] for index in indices) for indices in bins)
    shape = len(bins), rounded(longest, multiple)
    batch = Batch(
        input_ids=torch.full(shape, pad_id),
        loss_mask=torch.zeros(shape, dtype=torch.long),
        position_ids=torch.zeros(shape, dtype=torch.long),
        document_ids=torch.full(shape, -1),
    )
    for b, indices in enumerate(bins):
        start = 0
        for document, index in enumerate(indices):
            part = slice(start, start + lengths[index])
            batch["input_ids"][b, part] = torch.tensor(rows[index].input_ids)
            batch["loss_mask"][b, part] = torch.tensor(rows[index].loss_mask)
            batch["position_ids"][b, part] = torch.arange(lengths[index])
            batch["document_ids"][b, part] = document
            start += lengths[index]
    return batch


class Loader:
    """Batches of whole rows, epoch after epoch; iterating gives the rest of the current epoch.

    The order depends on (seed, epoch) alone. Batches are dealt out to the ranks in turn, the same
    number to each: where they do not come out even, the largest are halved, so no row is left out
    or repeated. Unpacked ones of like size are dealt together, so that ranks finish together;
    packed ones are full. `state_dict` after a batch continues with the next one; with another
    number of ranks, the rest of the epoch is dealt out anew.

    Args:
        batch_tokens: slots of a micro-batch, padding included.
        max_length: no row is longer; packed rows have this many slots.
        multiple: widths are rounded up to it, so that few shapes occur.

    Raises:
        ValueError: fewer rows than ranks, or a batch that cannot hold `max_length` tokens.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        batch_tokens: int,
        max_length: int,
        packed: bool = True,
        pad_id: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        multiple: int = 1,
    ):
        if packed:
            packing.check_holds(batch_tokens, max_length)
        if len(rows) < world_size:
            raise ValueError(f"{len(rows)} rows cannot be shared by {world_size} processes")
        self.rows = rows
        self.lengths = [len(row.input_ids) for row in rows]
        self.batch_tokens, self.max_length, self.packed = batch_tokens, max_length, packed
        self.pad_id, self.seed, self.shuffle, self.multiple = pad_id, seed, shuffle, multiple
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.index = 0  # batches of this epoch that this rank has had
        self.dealt: list[tuple[int, int]] = []  # of this epoch: other numbers of ranks, and their
        # batches by then
        self._order: tuple[int, list[list[int]]] = (-1, [])

    def order(self, epoch: int) -> list[list[int]]:
        """Row indices of every batch of an epoch; rank r has batches r, r + world_size, …"""
        if self._order[0] != epoch:
            random = torch.Generator().manual_seed((self.seed << 20) + epoch)
            order = packing.dealt(
                self._make_order(epoch),
                self.world_size,
                self.dealt,
                None if self.packed else packing.slots_of(self.lengths, self.multiple),
                random if self.shuffle else None,
            )
            self._order = epoch, order
        return self._order[1]

    def _make_order(self, epoch: int) -> list[list[int]]:
        random = torch.Generator().manual_seed((self.seed << 20) + epoch)
        count = len(self.rows)
        order = torch.randperm(count, generator=random).tolist() if self.shuffle else range(count)
        batches: list[list[int]] = []
        for first in range(0, count, packing.WINDOW):
            window = order[first : first + packing.WINDOW]
            lengths = [self.lengths[i] for i in window]
            groups = packing.grouped(
                lengths,
                self.batch_tokens,
                self.max_length,
                self.packed,
                self.multiple,
                random if self.shuffle else None,
            )
            batches += [[window[i] for i in group] for group in groups]
        if self.shuffle:
            batches = [batches[i] for i in torch.randperm(len(batches), generator=random).tolist()]
        return batches

    def __len__(self) -> int:
        """Batches of this rank in an epoch such as the current one, when it has them all."""
        return -(-len(self._make_order(self.epoch)) // self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        mine = self.order(self.epoch)[self.rank :: self.world_size]
        for index in range(self.index, len(mine)):
            last = index + 1 == len(mine)
            self.epoch, self.index = (self.epoch + 1, 0) if last else (self.epoch, index + 1)
            if last:
                self.dealt = []
            rows = [self.rows[i] for i in mine[index]]
            yield collate(rows, self.max_length, self.packed, self.pad_id, self.multiple)

    def _identity(self) -> dict[str, Any]:
        names = ("batch_tokens", "max_length", "packed", "multiple", "seed", "shuffle")
        numbers = {"rows": len(self.rows), "tokens": sum(self.lengths)}
        return numbers | {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        place = ("epoch", "index", "dealt", "world_size")
        return {name: getattr(self, name) for name in place} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was taken, with any number of ranks.

        Raises:
            ValueError: other data or settings: the batches would not be the same.
        """
        packing.check_identity(self._identity(), state)
        self.epoch, self.index, self.dealt = state["epoch"], state["index"], list(state["dealt"])
        if state["world_size"] != self.world_size and self.index:
            self.dealt.append((state["world_size"], self.index))
            self.index = 0
        self._order = (-1, [])
        left = sum(map(len, self.order(self.epoch)))
        if left < self.world_size:
            warnings.warn(
                f"{left} rows are left of epoch {self.epoch}, too few for {self.world_size} "
                "processes: the next one begins",
                stacklevel=2,
            )
            self.epoch, self.dealt = self.epoch + 1, []
