"""Which rows of the training data are trained on, and how many are not.

Left out are conversations whose prompt is one of the evaluation prompts, rows without anything to
learn, and rows that are too short or too long. All are counted.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from headstart.data.conversations.conversation import Conversation
from headstart.data.rows.rendering import render
from headstart.data.rows.row import Audit, Row, check_ids


@dataclass
class Selection:
    """From a conversation to the rows of it that are trained on."""

    tokenizer: PreTrainedTokenizerBase
    terminator_ids: tuple[int, ...]
    max_length: int
    chat_template_kwargs: dict[str, Any] | None = None
    min_tokens: int = 0
    """Rows with fewer tokens are left out."""
    longer: Literal["cut", "drop"] = "cut"
    """What is done with rows of more than max_length tokens."""
    held_out: set[bytes] = field(default_factory=set)
    """Keys of the evaluation prompts."""
    num_embeddings: int | None = None
    """Rows of the verifier's embedding, where ids are to be checked against it."""
    audit: Audit = field(default_factory=Audit)

    def rows(self, conversation: Conversation) -> list[Row]:
        """Those that are kept; the others are counted."""
        if prompt_key(conversation) in self.held_out:
            self.audit.contaminated += 1
            return []
        rows = render(
            conversation,
            self.tokenizer,
            self.terminator_ids,
            self.max_length,
            self.chat_template_kwargs,
        )
        for row in rows if self.num_embeddings else []:
            check_ids(f"row {row.id!r}", row.input_ids, self.num_embeddings)
        self.audit.add(rows)
        return [row for row in rows if not row.empty and self._fits(row)]

    def _fits(self, row: Row) -> bool:
        long = row.truncated and self.longer == "drop"
        short = not long and len(row.input_ids) < self.min_tokens
        self.audit.long += long
        self.audit.short += short
        return not (long or short)

    def hold_out(self, conversations: Iterable[Conversation]) -> None:
        """Leave out what has the prompt of one of these."""
        self.held_out |= set(map(prompt_key, conversations))


def prompt_key(conversation: Conversation) -> bytes:
    """What two conversations share whose prompts are the same but for case, spaces and signs.

    The prompt is what is asked before the first answer, without the system's turn; of plain text,
    all of it.
    """
    text = conversation.text
    if text is None:
        first = takewhile(lambda m: m["role"] != "assistant", conversation.messages)
        text = "\n".join(m["content"] for m in first if m["role"] != "system")
    words = re.findall(r"\w+", text.casefold())
    # a text without a word, such as "?", is compared as it is
    return blake2b(" ".join(words or [text]).encode(), digest_size=16).digest()
