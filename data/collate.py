"""From rows to batches, in an order that can be resumed, and the verifier's states for them.

Legend: B rows of a batch, T slots, H verifier's hidden size, L feature layers. A document is one
`Row`; a packed batch holds several of them in a row.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.data import packing
from headstart.data.packing import by_length, pack, rounded
from headstart.data.rows import Row
from headstart.models.drafter import Batch
from headstart.models.verifier import Verifier

_GROUP_TOKENS = 2048  # slots that the verifier runs over at once, where documents come in groups


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
    or repeated. `state_dict` after a batch continues with the next one.

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
        self._order: tuple[int, list[list[int]]] = (-1, [])

    def order(self, epoch: int) -> list[list[int]]:
        """Row indices of every batch of an epoch; rank r has batches r, r + world_size, …"""
        if self._order[0] != epoch:
            self._order = epoch, self._make_order(epoch)
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
        return packing.dealt(batches, self.world_size)

    def __len__(self) -> int:
        """Batches of this rank in the current epoch."""
        return len(self.order(self.epoch)) // self.world_size

    def __iter__(self) -> Iterator[Batch]:
        mine = self.order(self.epoch)[self.rank :: self.world_size]
        for index in range(self.index, len(mine)):
            last = index + 1 == len(mine)
            self.epoch, self.index = (self.epoch + 1, 0) if last else (self.epoch, index + 1)
            rows = [self.rows[i] for i in mine[index]]
            yield collate(rows, self.max_length, self.packed, self.pad_id, self.multiple)

    def _identity(self) -> dict[str, Any]:
        names = (
            "batch_tokens",
            "max_length",
            "packed",
            "multiple",
            "seed",
            "shuffle",
            "world_size",
        )
        numbers = {"rows": len(self.rows), "tokens": sum(self.lengths)}
        return numbers | {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "index": self.index} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was taken.

        Raises:
            ValueError: other data or settings: the batches would not be the same.
        """
        packing.check_identity(self._identity(), state)
        self.epoch, self.index = state["epoch"], state["index"]


# ---- the verifier's states -------------------------------------------------------------------


def available_memory() -> int:
    """Bytes of main memory this process could still take."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    else:  # no such file on macOS; half of what is built in is a safe guess
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    group = Path("/sys/fs/cgroup")  # a container's limit
    if (group / "memory.max").exists() and (group / "memory.current").exists():
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
    return max(0, free)


class Featurizer:
    """Adds the verifier's states to a batch: `features [B, T, L*H]` and `last_hidden [B, T, H]`.

    The verifier runs over documents, whatever batch they came in: one by one on a CPU, where that
    is as fast and makes the states bitwise those of the document alone, in groups of like length
    elsewhere. With `keep`, states stay in main memory by document, as far as they fit, and each
    such document is run only once. States of padding are zero. Where all documents are known and
    fit, a missing one is run with its whole group, a fixed batch of documents of like length: a CPU
    takes in a batch twice as fast, and the groups are the same after a resume.

    Args:
        layers: ids of the residual streams wanted.
        keep: keep states over epochs.
        num_tokens: of all documents that will come, for the estimate that is printed.
        documents: all of them, where this process will need them all.
        memory_limit: bytes that the kept states of this process may take; half of the available
            memory, shared by the processes of this machine, when not given.
        dtype: states are rounded to it and kept in it; as computed when not given. bfloat16 takes
            half of float32's memory.
        autocast_dtype: run the verifier under autocast; the caller's own setting when not given.
        alone: run documents one by one; on a CPU when not given.
    """

    def __init__(
        self,
        verifier: Verifier,
        layers: tuple[int, ...],
        keep: bool = False,
        num_tokens: int = 0,
        documents: Sequence[list[int]] = (),
        memory_limit: int | None = None,
        dtype: torch.dtype | None = None,
        autocast_dtype: torch.dtype | None = None,
        alone: bool | None = None,
        verbose: bool = True,
    ):
        self.verifier, self.layers = verifier, layers
        self.dtype, self.autocast_dtype = dtype, autocast_dtype
        self.alone = verifier.device.type == "cpu" if alone is None else alone
        width = (len(layers) + 1) * verifier.hidden_size
        self.bytes_needed = num_tokens * width * (dtype or verifier.dtype).itemsize
        if memory_limit is None:
            memory_limit = available_memory() // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self.room = memory_limit if keep else 0  # bytes
        self.kept: dict[bytes, list[Tensor]] = {}  # by the document's ids
        self.groups: dict[bytes, list[Tensor]] = {}  # a document's ids -> all of its group
        if self.bytes_needed <= self.room:
            # each once: one that is in two groups would get its states from whichever ran last
            unique = {d.numpy().tobytes(): d for d in map(torch.tensor, documents)}
            different = list(unique.values())
            for group in by_length([len(d) for d in different], _GROUP_TOKENS):
                together = [different[i] for i in group]
                self.groups |= {d.numpy().tobytes(): together for d in together}
        if keep and verbose:
            share = min(1.0, self.room / max(1, self.bytes_needed))
            rest = "" if share == 1 else f" for {share:.0%} of them, the rest computed every epoch"
            print(
                f"verifier states: kept in memory{rest} ({self.bytes_needed / 1e9:.1f} GB for "
                f"{num_tokens} tokens, {self.room / 1e9:.1f} GB may be used)",
                file=sys.stderr,
            )

    def __call__(self, batch: Batch) -> Batch:
        """The batch on the verifier's device, with its states."""
        ids, document_ids = batch["input_ids"].cpu(), batch["document_ids"].cpu()
        places: list[tuple[int, int, int]] = []  # row, first slot, slot after the last
        for b, row in enumerate(document_ids):
            values, counts = torch.unique_consecutive(row, return_counts=True)
            end = 0
            for value, length in zip(values.tolist(), counts.tolist(), strict=True):
                end += length
                if value >= 0:
                    places.append((b, end - length, end))
        documents = [ids[b, start:end] for b, start, end in places]
        keys = [document.numpy().tobytes() for document in documents]
        wanted = {k: d for k, d in zip(keys, documents, strict=True) if k not in self.kept}
        states: dict[bytes, list[Tensor]] = {}
        for key in wanted:
            if key in self.groups and key not in states:
                group = self.groups[key]
                run = self._run(group, [list(range(len(group)))])
                states |= zip([d.numpy().tobytes() for d in group], run, strict=True)
        rest = [document for key, document in wanted.items() if key not in states]
        lengths = [len(document) for document in rest]
        alone = [[i] for i in range(len(rest))]
        run = self._run(rest, alone if self.alone else by_length(lengths, ids.numel()))
        states |= zip([d.numpy().tobytes() for d in rest], run, strict=True)
        for key, tensors in states.items():
            if self.dtype is not None:
                states[key] = tensors = [t.to(self.dtype) for t in tensors]
            size = sum(t.numel() * t.element_size() for t in tensors)
            if size <= self.room:
                self.kept[key] = [t.cpu() for t in tensors]
                self.room -= size
        names = ("features", "last_hidden") if self.layers else ("last_hidden",)
        device = self.verifier.device
        made: dict[str, Tensor] = {}
        for key, (b, start, end) in zip(keys, places, strict=True):
            tensors = states[key] if key in states else self.kept[key]
            for name, part in zip(names, tensors, strict=True):
                if name not in made:
                    dtype = self.verifier.dtype if self.dtype else part.dtype
                    shape = (*ids.shape, part.shape[-1])
                    made[name] = torch.zeros(shape, dtype=dtype, device=device)
                made[name][b, start:end] = part.to(device)
        return Batch(**{name: tensor.to(device) for name, tensor in batch.items()}, **made)

    def _run(self, documents: list[Tensor], groups: list[list[int]]) -> list[list[Tensor]]:
        """States of each document, in order; the documents of a group are run together."""
        states: list[list[Tensor]] = [[] for _ in documents]
        device = self.verifier.device
        autocast = nullcontext()
        if self.autocast_dtype is not None:
            autocast = torch.autocast(device.type, self.autocast_dtype)
        for group in groups:
            lengths = [len(documents[i]) for i in group]
            ids = torch.zeros(len(group), max(lengths), dtype=torch.long)
            for b, i in enumerate(group):
                ids[b, : lengths[b]] = documents[i]  # padding at the right: causal, never seen
            with autocast:
                run = self.verifier.states(ids.to(device), self.layers)
            for b, i in enumerate(group):
                # copies: a view would hold on to the whole group
                states[i] = [t[b, : lengths[b]].clone() for t in run if t is not None]
        return states
