"""Which rows of the training data are trained on, and how many are not.

Left out are conversations that cannot be used or whose prompt is one of the evaluation prompts,
rows without anything to learn, and rows that are too short or too long. All are counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Literal
from unicodedata import normalize

from transformers import PreTrainedTokenizerBase

from headstart.data.conversations.bad import MAX_BAD_ROWS, BadRow
from headstart.data.conversations.conversation import Conversation
from headstart.data.rows.rendering import render
from headstart.data.rows.row import Audit, Row, check_ids

_FIRST = 3  # of what is left out as evaluation prompts, shown
_SHOWN = 60  # characters of each
_END_MARKS = ".…?!,;:。、؟۔،؛।॥"  # after NFKC, which writes wide ones as these


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
    max_bad_rows: float = MAX_BAD_ROWS
    """Fraction of conversations that cannot be used, beyond which it is an error."""
    audit: Audit = field(default_factory=Audit)

    def rows(self, conversation: Conversation | BadRow) -> list[Row]:
        """Those that are kept; the others are counted.

        Raises:
            ValueError: too many cannot be used.
        """
        try:
            if isinstance(conversation, BadRow):
                raise conversation
            found = self._of(conversation)
        except BadRow as error:
            self.audit.refuse(error)
            found = []
        self.audit.check_bad(self.max_bad_rows)
        return found

    def _of(self, conversation: Conversation) -> list[Row]:
        if prompt_key(conversation) in self.held_out:
            self.audit.contaminated += 1
            if len(self.audit.first_contaminated) < _FIRST:
                asked = " ".join(_asked(conversation).split())
                short = asked if len(asked) <= _SHOWN else asked[: _SHOWN - 1] + "…"
                self.audit.first_contaminated.append(f"{conversation.id} ({short!r})")
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
    """What two conversations share whose prompts are the same but for case, spaces and marks at
    the end, in Unicode's form NFKC.

    The prompt is what is asked before the first answer, without the system's turn; of plain text,
    all of it.
    """
    folded = normalize("NFKC", normalize("NFKC", _asked(conversation)).casefold())
    text = " ".join(folded.split())
    # a text without anything else, such as "?", is compared as it is
    return blake2b((text.rstrip(_END_MARKS + " ") or text).encode(), digest_size=16).digest()


def _asked(conversation: Conversation) -> str:
    if conversation.text is not None:
        return conversation.text
    first = takewhile(lambda m: m["role"] != "assistant", conversation.messages)
    return "\n".join(m["content"] for m in first if m["role"] != "system")
