"""The verifier's states for a batch, computed while training.

Legend: B rows of a batch, T slots, H verifier's hidden size, L feature layers. A document is one
row of the data; a packed batch holds several of them in a row.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from headstart.data.rows.packing import by_length
from headstart.data.rows.row import check_ids
from headstart.models.batch import Batch
from headstart.models.verifier.verifier import Verifier

_GROUP_TOKENS = 2048  # slots that the verifier runs over at once, where documents come in groups


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
        if layers:
            verifier.check_streams()
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
        check_ids("a document", [int(ids.max())], self.verifier.num_embeddings)
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
        states = self.find(dict(zip(keys, documents, strict=True)), ids.numel())
        names = ("features", "last_hidden") if self.layers else ("last_hidden",)
        device = self.verifier.device
        made: dict[str, Tensor] = {}
        for key, (b, start, end) in zip(keys, places, strict=True):
            for name, part in zip(names, states[key], strict=True):
                if name not in made:
                    dtype = self.verifier.dtype if self.dtype else part.dtype
                    shape = (*ids.shape, part.shape[-1])
                    made[name] = torch.zeros(shape, dtype=dtype, device=device)
                made[name][b, start:end] = part.to(device)
        return Batch(**{name: tensor.to(device) for name, tensor in batch.items()}, **made)

    def find(self, documents: dict[bytes, Tensor], slots: int) -> dict[bytes, list[Tensor]]:
        """The states of documents, by their ids' bytes: of each token, features and last hidden.

        Args:
            slots: of the batch that they are in, which the verifier may run over at once.
        """
        wanted = {k: d for k, d in documents.items() if k not in self.kept}
        states: dict[bytes, list[Tensor]] = {}
        for key in wanted:
            if key in self.groups and key not in states:
                group = self.groups[key]
                run = self.run(group, [list(range(len(group)))])
                states |= zip([d.numpy().tobytes() for d in group], run, strict=True)
        rest = [document for key, document in wanted.items() if key not in states]
        alone = [[i] for i in range(len(rest))]
        groups = alone if self.alone else by_length([len(d) for d in rest], slots)
        run = self.run(rest, groups)
        states |= zip([d.numpy().tobytes() for d in rest], run, strict=True)
        for key, tensors in states.items():
            if self.dtype is not None:
                states[key] = tensors = [t.to(self.dtype) for t in tensors]
            size = sum(t.numel() * t.element_size() for t in tensors)
            if size <= self.room:
                self.kept[key] = [t.cpu() for t in tensors]
                self.room -= size
        return {key: states[key] if key in states else self.kept[key] for key in documents}

    def run(self, documents: list[Tensor], groups: list[list[int]]) -> list[list[Tensor]]:
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
