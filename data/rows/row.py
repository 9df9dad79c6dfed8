"""A rendered document, and the count of what became of a data set."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from headstart.data.conversations import bad
from headstart.data.conversations.bad import BadRow
from headstart.data.conversations.law import Law


def check_ids(where: str, ids: Iterable[int], num_embeddings: int) -> None:
    """Raise a ValueError for a token id that the verifier has no embedding of.

    Args:
        where: what has it, such as "row 'a-1'".
    """
    largest = max(ids, default=0)
    if largest >= num_embeddings:
        raise ValueError(
            f"{where} has token id {largest}, and the verifier's embedding has {num_embeddings} "
            f"rows, 0 … {num_embeddings - 1}: its tokenizer has tokens that it was not trained "
            "with; resize the embedding and save the model anew, or take those tokens out"
        )


@dataclass
class Row:
    """One document, ready for `collate`."""

    input_ids: list[int]
    loss_mask: list[int]
    """0, or the number of the assistant turn the token belongs to."""
    id: str
    category: str = "all"
    law: Law | None = None
    """Under which the verifier wrote the answers; None where it is not known."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    """Assistant turns, whole, cut or cut away."""
    context_only: int = 0
    """Those that their data says not to train on."""
    finished: int = 0
    """Of the others, those that came to their end and were not cut: each should hold a
    terminator."""
    terminators: int = 0
    """Supervised terminators."""
    truncated: bool = False
    """Whether `max_length` cut something off."""

    @property
    def empty(self) -> bool:
        """Without a supervised slot: no turn holds two tokens after a first one."""
        mask = self.loss_mask[1:]
        return not any(a == b > 0 for a, b in pairwise(mask))


@dataclass
class Audit:
    """What became of a data set."""

    conversations: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    """Supervised tokens."""
    terminators: int = 0
    """Supervised terminators."""
    turns: int = 0
    """Assistant turns."""
    context_only: int = 0
    """Assistant turns not trained on, as the data says so."""
    finished: int = 0
    """Of the others, those not cut, neither when they were written nor by `max_length`."""
    truncated: int = 0
    """Rows cut at `max_length`."""
    empty: int = 0
    """Rows without a supervised slot; they are left out of training."""
    short: int = 0
    """Rows left out as shorter than data.min_tokens."""
    long: int = 0
    """Rows left out as longer than max_length."""
    contaminated: int = 0
    """Conversations left out, and not counted above, as their prompt is an evaluation prompt."""
    first_contaminated: list[str] = field(default_factory=list)
    """The first three of these, by id and prompt."""
    unusable: bad.Bad = field(default_factory=dict)
    """Conversations left out, and not counted above, as they cannot be used."""
    split: int = 0
    """Conversations that became more than one row."""

    def add(self, rows: list[Row]) -> None:
        self.conversations += 1
        self.split += len(rows) > 1
        for row in rows:
            self.rows += 1
            self.tokens += len(row.input_ids)
            self.supervised += sum(turn > 0 for turn in row.loss_mask)
            self.terminators += row.terminators
            self.turns += row.turns
            self.context_only += row.context_only
            self.finished += row.finished
            self.truncated += row.truncated
            self.empty += row.empty

    def refuse(self, row: BadRow) -> None:
        """Count a conversation that cannot be used."""
        bad.count(self.unusable, row)

    def check_bad(self, most: float) -> None:
        """Raise a ValueError where more than `most`, a fraction, cannot be used."""
        rows = self.conversations + self.contaminated + bad.total(self.unusable)
        bad.check(self.unusable, rows, most)

    def check(self, source: str, max_length: int) -> None:
        """Warn when turns lack their terminator.

        Raises:
            ValueError: there is nothing to learn from; says why.
        """
        if self.rows == self.empty + self.short + self.long:
            if self.unusable and not self.conversations:
                reason = "no row of it can be used"
            elif self.contaminated and not self.conversations:
                reason = f"all its {self.contaminated} prompts are evaluation prompts"
            elif self.conversations == 0:
                reason = "it has no rows"
            elif self.short or self.long:
                reason = (
                    f"{self.short} rows are shorter than data.min_tokens, {self.long} longer than "
                    f"max_length = {max_length} and dropped, the others without supervision"
                )
            elif self.turns == 0:
                reason = "no row has an assistant turn; let data/regenerate.py answer the prompts"
            elif self.turns == self.context_only:
                reason = "every assistant turn says loss, train or weight 0: not to be trained on"
            elif self.truncated:
                reason = f"the answers begin after max_length = {max_length}; raise it"
            else:
                reason = (
                    "nothing of its assistant turns is found in what the verifier's chat template "
                    "writes; see a row with data/render.py"
                )
            if self.unusable:
                reason += f"; left out: {bad.summary(self.unusable)}"
            raise ValueError(f"{source!r}: not one supervised token: {reason}")
        if self.terminators != self.finished:
            warnings.warn(
                f"data {source!r}: {self.terminators} supervised terminators for {self.finished} "
                "finished assistant turns; a drafter learns to stop only where the template ends a "
                "turn with one of the verifier's terminators. See a row with data/render.py.",
                stacklevel=2,
            )

    def __str__(self) -> str:
        return (
            f"{self.conversations} conversations, {self.rows} rows ({self.split} conversations "
            f"split over several), {self.tokens} tokens\n"
            f"{self.supervised} supervised tokens, {self.terminators} supervised terminators for "
            f"{self.finished} finished of {self.turns} assistant turns\n"
            f"{self.truncated} rows truncated, {self.empty} rows without supervision"
            + self.left_out()
        )

    def left_out(self) -> str:
        """What was left out, if anything was."""
        counts = (
            (self.short, "rows left out as too short"),
            (self.long, "rows left out as too long"),
            (self.contaminated, "conversations left out as evaluation prompts"),
            (self.context_only, "assistant turns not trained on, as the data says"),
        )
        found = ", ".join(f"{count} {what}" for count, what in counts if count)
        if self.first_contaminated:
            found += f": {', '.join(self.first_contaminated)}"
            found += ", …" * (self.contaminated > len(self.first_contaminated))
        unusable = f"left out: {bad.summary(self.unusable)}" if self.unusable else ""
        return "".join(f"\n{line}" for line in (found, unusable) if line)
