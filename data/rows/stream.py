"""Batches from data that is read while it is trained on: memory does not grow with the data."""

import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch

from headstart.data.conversations.mixture import Mixture
from headstart.data.rows import packing
from headstart.data.rows.collate import collate
from headstart.data.rows.row import Audit, Row
from headstart.data.rows.selection import Selection
from headstart.models.batch import Batch


class StreamLoader:
    """Batches of whole rows, pass after pass; iterating gives the rest of the current pass.

    The contract is `collate.Loader`'s, but rows are packed and shuffled in windows of a thousand,
    in the order of the data: what lies sorted in a file is trained on sorted. Each rank reads all
    rows and has every `world_size`-th batch. `state_dict` after a batch continues with the next
    one, by reading its window again; with another number of ranks, the rest of the window is dealt
    out anew.

    Args:
        mixture: where conversations come from, and `selection` which of their rows are kept.
        say: told what became of the data, after each pass.
        others: as of `collate.Loader`.

    Raises:
        ValueError: a batch that cannot hold `max_length` tokens; when iterating, fewer rows than
            ranks, or too many that cannot be used.
    """

    def __init__(
        self,
        mixture: Mixture,
        selection: Selection,
        batch_tokens: int,
        packed: bool = True,
        pad_id: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        multiple: int = 1,
        say: Callable[[str], Any] = print,
    ):
        self.mixture, self.selection = mixture, selection
        self.batch_tokens, self.max_length = batch_tokens, selection.max_length
        self.packed, self.pad_id, self.seed, self.multiple = packed, pad_id, seed, multiple
        self.rank, self.world_size, self.say = rank, world_size, say
        if packed:
            packing.check_holds(batch_tokens, self.max_length)
        self.epoch = 0
        self._begin_pass()

    def _begin_pass(self) -> None:
        self.window = self.index = 0  # batches of this window that this rank has had
        self.dealt: list[tuple[int, int]] = []  # of this window: as of `collate.Loader`
        self.mixture.restart()
        self.begin = {"mixture": self.mixture.state_dict(), "audit": asdict(Audit())}

    def __len__(self) -> int:
        raise ValueError(
            "data.streaming: the number of batches is not known before they are read; give the "
            "run's length as training.max_steps or training.max_tokens, and training.num_epochs "
            "as null"
        )

    def __iter__(self) -> Iterator[Batch]:
        self.mixture.load_state_dict(self.begin["mixture"])
        self.selection.audit = Audit(**deepcopy(self.begin["audit"]))
        for begin, rows in self._windows():
            self.begin = begin
            if len(rows) < self.world_size:
                raise ValueError(
                    f"data.train: {len(rows)} rows cannot be shared by {self.world_size} processes"
                )
            batches = self._batches(rows)
            if sum(map(len, batches)) < self.world_size:
                batches = []  # too few are left of a window that fewer ranks began
            mine = batches[self.rank :: self.world_size]
            for index in range(self.index, len(mine)):
                self.index = index + 1
                chosen = [rows[i] for i in mine[index]]
                yield collate(chosen, self.max_length, self.packed, self.pad_id, self.multiple)
            self.window, self.index, self.dealt = self.window + 1, 0, []
        self.epoch += 1
        self.say(f"pass {self.epoch} over the training data: {self.selection.audit}")
        self._begin_pass()

    def _windows(self) -> Iterator[tuple[dict[str, Any], list[Row]]]:
        """Where each window begins, and its rows.

        One ends where it has `packing.WINDOW` rows and enough come after it: so the last one has a
        row for every rank, and windows are the same for any number of ranks up to a quarter of it.
        """
        least = max(packing.WINDOW // 4, self.world_size)
        begin, rows = self.begin, []
        border, size = None, 0  # where the next window begins, and the rows before that
        for conversation in self.mixture:
            rows += self.selection.rows(conversation)
            if border is not None and len(rows) - size >= least:
                yield begin, rows[:size]
                begin, rows, border = border, rows[size:], None
            if border is None and len(rows) >= packing.WINDOW:
                audit = asdict(self.selection.audit)
                border, size = {"mixture": self.mixture.state_dict(), "audit": audit}, len(rows)
        yield begin, rows

    def _batches(self, rows: list[Row]) -> list[list[int]]:
        # torch's generator looks at 32 bits of a seed
        place = f"{self.seed} {self.epoch} {self.window}"
        random = torch.Generator().manual_seed(zlib.crc32(place.encode()))
        lengths = [len(row.input_ids) for row in rows]
        groups = packing.grouped(
            lengths, self.batch_tokens, self.max_length, self.packed, self.multiple, random
        )
        groups = [groups[i] for i in torch.randperm(len(groups), generator=random).tolist()]
        slots = None if self.packed else packing.slots_of(lengths, self.multiple)
        return packing.dealt(groups, self.world_size, self.dealt, slots, random)

    def _identity(self) -> dict[str, Any]:
        names = ("batch_tokens", "max_length", "packed", "multiple", "seed")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        place = ("epoch", "window", "index", "begin", "dealt", "world_size")
        return {name: getattr(self, name) for name in place} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was taken, with any number of ranks.

        Raises:
            ValueError: other data or settings: the batches would not be the same.
        """
        packing.check_identity(self._identity(), state)
        self.mixture.load_state_dict(state["begin"]["mixture"])  # checks the sources
        self.epoch, self.window, self.index, self.begin = (
            state[name] for name in ("epoch", "window", "index", "begin")
        )
        self.dealt = list(state["dealt"])
        if state["world_size"] != self.world_size and self.index:
            self.dealt.append((state["world_size"], self.index))
            self.index = 0
