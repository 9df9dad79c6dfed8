"""Look at what will be learned: a row with its supervised tokens, and an audit of the data.

    python data/render.py --verifier embedded/smollm2-135m --data data/smollm2/train.jsonl --row 3

Only the tokenizer is loaded; data/rows/rendering.py says what the mask holds.
"""

import sys
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from headstart.data.conversations import reading
from headstart.data.conversations.bad import BadRow
from headstart.data.rows.rendering import load_tokenizer, render
from headstart.data.rows.row import Audit, Row
from headstart.script import named


@dataclass
class Render:
    """Settings of the script."""

    data: str
    """JSONL file, folder or Hub data set."""
    verifier: str = "embedded/smollm2-135m"
    """Embedded name, local folder or Hub name."""
    row: int = 0
    """Which conversation to print, from 0."""
    split: str = "train"
    """Split of a Hub data set."""
    limit: int | None = None
    """Audit only the first so many conversations."""
    max_length: int = 2048
    """Rows are cut at so many tokens."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template; the ones recorded in the rows when not given."""


def painted(row: Row, tokenizer: PreTrainedTokenizerBase, colour: bool) -> str:
    """The row's text, its supervised tokens in colour (turns alternate) or in [[…]]."""
    parts = []
    start = 0
    for end in range(1, len(row.input_ids) + 1):
        turn = row.loss_mask[start]
        if end == len(row.input_ids) or row.loss_mask[end] != turn:
            text = tokenizer.decode(row.input_ids[start:end])
            if turn and colour:
                text = f"\x1b[1;{32 if turn % 2 else 36}m{text}\x1b[0m"
            parts.append(f"[[{text}]]" if turn and not colour else text)
            start = end
    return "".join(parts)


def run(settings: Render) -> None:
    """Print one conversation's rows and the audit of all."""
    for name, least in (("max_length", 1), ("limit", 1), ("row", 0)):
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ValueError(f"{name} must be {least} or more, got {value}")
    tokenizer, terminator_ids = load_tokenizer(settings.verifier)
    arguments = (tokenizer, terminator_ids, settings.max_length, settings.chat_template_kwargs)
    audit = Audit()
    shown = False
    source = reading.read(settings.data, settings.split, settings.limit, refuse=audit.refuse)
    with named("data"):
        for number, conversation in enumerate(source):
            try:
                rows = render(conversation, *arguments)
            except BadRow as error:
                if number == settings.row:
                    raise
                audit.refuse(error)
                continue
            audit.add(rows)
            for row in rows if number == settings.row else ():
                shown = True
                note = ", truncated" if row.truncated else ""
                print(f"{row.id} ({row.category}, {len(row.input_ids)} tokens{note})")
                print(painted(row, tokenizer, sys.stdout.isatty()), end="\n\n")
        print(audit)
        audit.check(settings.data, settings.max_length)
    if not shown:
        raise ValueError(f"row {settings.row} does not exist: {audit.conversations} rows were read")


if __name__ == "__main__":
    from headstart.script import run_script

    run_script(Render, run)
