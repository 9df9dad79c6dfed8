"""Which rows share a batch, and which batches a rank has."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

WINDOW = 1024  # rows that are packed, or sorted by length, among themselves


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit: indices into `lengths`, bin by bin; each goes into the first bin with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        assert length <= capacity, f"a document of {length} tokens in bins of {capacity}"
        place = next((b for b, free in enumerate(room) if free >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(index)
        room[place] -= length
    return bins


def rounded(length: int, multiple: int) -> int:
    """`length`, up to the next multiple."""
    return -(-length // multiple) * multiple


def by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in groups of like length, longest first, for batches of little padding.

    A group, padded, has at most `batch_tokens` slots (one that is longer is a group of its own),
    and ends where more than an eighth of it would be padding and it has half of its slots.
    """
    groups: list[list[int]] = []
    used = 0  # tokens of the last group
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        slots = (len(groups[-1]) + 1) * lengths[groups[-1][0]] if groups else 0
        wasteful = 2 * slots > batch_tokens and 8 * (used + length) < 7 * slots
        if not groups or slots > batch_tokens or wasteful:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += length
    return groups


def grouped(
    lengths: Sequence[int],
    batch_tokens: int,
    max_length: int,
    packed: bool,
    multiple: int,
    random: torch.Generator | None,
) -> list[list[int]]:
    """Indices of the rows of each batch, from the lengths of a window of rows.

    Args:
        random: shuffles what is packed; None: longest first.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])  # packs tighter, pads less
    lengths = [lengths[i] for i in order]
    if packed:
        bins = pack(lengths, max_length)
        if random is not None:
            bins = [bins[i] for i in torch.randperm(len(bins), generator=random).tolist()]
        size = batch_tokens // max_length
        # collate's first fit over the rows of these bins never needs more bins than these
        groups = [list(chain(*bins[i : i + size])) for i in range(0, len(bins), size)]
    else:
        groups = by_length([rounded(length, multiple) for length in lengths], batch_tokens)
    return [[order[i] for i in group] for group in groups]


def slots_of(lengths: Sequence[int], multiple: int) -> Callable[[list[int]], int]:
    """Of a batch of unpacked rows of these lengths, as indices: its slots, padding included."""

    def slots(batch: list[int]) -> int:
        return len(batch) * rounded(max(lengths[i] for i in batch), multiple)

    return slots


def dealt(
    batches: list[list[int]],
    ranks: int,
    before: Sequence[tuple[int, int]] = (),
    slots: Callable[[list[int]], int] | None = None,
    random: torch.Generator | None = None,
) -> list[list[int]]:
    """The same rows in a multiple of `ranks` batches; rank r has batches r, r + ranks, …

    The largest batches are halved until they come out even. Fewer rows than ranks do not.

    Args:
        before: other numbers of ranks that these batches were dealt out to first, and how many
            batches each of them had by then: what is left is dealt out anew.
        slots: of a batch. Batches of like size run together then, so that ranks finish together.
        random: shuffles what runs together; None leaves the smallest first.
    """
    for others, had in before:
        batches = dealt(batches, others, (), slots, random)[others * had :]
    batches = list(batches)
    while len(batches) % ranks and max(map(len, batches)) > 1:
        largest = max(range(len(batches)), key=lambda i: len(batches[i]))
        half = len(batches[largest]) // 2
        batches[largest : largest + 1] = batches[largest][:half], batches[largest][half:]
    if slots is None or ranks == 1:
        return batches
    batches.sort(key=slots)
    groups = [batches[i : i + ranks] for i in range(0, len(batches), ranks)]
    if random is not None:
        groups = [groups[i] for i in torch.randperm(len(groups), generator=random).tolist()]
    return list(chain.from_iterable(groups))


def check_holds(batch_tokens: int, max_length: int) -> None:
    """Raise a ValueError for packed batches that cannot hold a row."""
    if batch_tokens < max_length:
        raise ValueError(
            f"batch_tokens = {batch_tokens} cannot hold a row of max_length = {max_length} "
            "tokens; raise the one or lower the other"
        )


def check_identity(now: dict[str, Any], state: dict[str, Any]) -> None:
    """Raise a ValueError for data or settings that are not those of a saved state."""
    for name, value in now.items():
        if state.get(name) != value:
            raise ValueError(
                f"the run was begun with {name} = {state.get(name)} of its training data, now it "
                f"is {value}; resume with the same data and settings, or begin a new run"
            )
