"""Several sources as one, by weight.

The next conversation is always of the source that is furthest behind its share, so every prefix
has the shares as closely as whole rows can, and where a mixture stands follows from its counts.
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from headstart.data.conversations.bad import BadRow
from headstart.data.conversations.conversation import Conversation
from headstart.data.conversations.reading import Reader


class Mixture:
    """Conversations of several sources; iterating gives the rest of the current pass.

    A pass ends when every source has been read to its end: the smaller ones begin anew meanwhile,
    so no row is left out, and some come more than once. A single source is read once. In place of a
    row that cannot be read comes a `BadRow`, which counts as one of its source.

    Args:
        weights: of each source, relative to each other.
        limit: conversations of a pass; None: all.

    Raises:
        ValueError: no such source, or a weight that is no positive number.
    """

    def __init__(self, weights: dict[str, float], limit: int | None = None):
        check_weights(weights)
        total = sum(weights.values())
        self.shares = [weight / total for weight in weights.values()]
        self.readers = [Reader(source) for source in weights]
        self.limit = limit
        self.restart()

    def restart(self) -> None:
        """The next conversation is the first of a pass."""
        for reader in self.readers:
            reader.restart()
        self.taken = [0] * len(self.readers)  # conversations of each in this pass
        self.read_whole = [False] * len(self.readers)

    def __iter__(self) -> Iterator[Conversation | BadRow]:
        left = None if self.limit is None else self.limit - sum(self.taken)
        return islice(self._mixed(), left)

    def _mixed(self) -> Iterator[Conversation | BadRow]:
        rows = [iter(reader) for reader in self.readers]
        while not all(self.read_whole):
            count = sum(self.taken) + 1
            behind = [
                share * count - taken for share, taken in zip(self.shares, self.taken, strict=True)
            ]
            source = behind.index(max(behind))
            conversation = next(rows[source], None)
            if conversation is None:
                self.read_whole[source] = True
                if self.readers[source].number == 0:
                    raise ValueError(f"{self.readers[source].source!r}: it has no rows")
                if not all(self.read_whole):
                    self.readers[source].restart()
                    rows[source] = iter(self.readers[source])
                continue
            self.taken[source] += 1
            if len(rows) > 1 and not isinstance(conversation, BadRow):
                # ids of different sources may be the same
                conversation.id = f"{self.readers[source].source}:{conversation.id}"
            yield conversation

    def state_dict(self) -> dict[str, Any]:
        return {
            "taken": self.taken.copy(),
            "read_whole": self.read_whole.copy(),
            "readers": [reader.state_dict() for reader in self.readers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, in its order of the sources, however they are listed now.

        Raises:
            ValueError: it is of other sources, or one has changed.
        """
        if len(state["readers"]) != len(self.readers):
            raise ValueError(
                f"there are {len(self.readers)} sources, and were {len(state['readers'])} when the "
                "run was begun; resume with the same, or begin a new run"
            )
        names = [reader.source for reader in self.readers]
        before = [saved["source"] for saved in state["readers"]]
        if sorted(names) == sorted(before):
            order = [names.index(name) for name in before]
            self.readers = [self.readers[i] for i in order]
            self.shares = [self.shares[i] for i in order]
        for reader, saved in zip(self.readers, state["readers"], strict=True):
            reader.load_state_dict(saved)
        self.taken, self.read_whole = state["taken"].copy(), state["read_whole"].copy()


def check_weights(weights: dict[str, float]) -> None:
    """Raise a ValueError for no source, or a weight that is no positive number."""
    if not weights:
        raise ValueError("no source is named; pass a file, or {SOURCE: WEIGHT, …}")
    for source, weight in weights.items():
        if source.startswith("["):
            raise ValueError(
                f"{source!r} is a list; several sources are {{SOURCE: WEIGHT, …}}, such as "
                "'{a.jsonl: 1, b.jsonl: 1}', or a folder that holds them"
            )
        if source.startswith("{"):
            raise ValueError(f"{source!r}: every weight must be a number above 0")
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight of {source!r} is {weight}; it must be a number above 0")
