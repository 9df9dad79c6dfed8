"""Prompts to continue: conversations, answered or not."""

from jinja2 import TemplateError

from headstart.data.conversations import reading
from headstart.data.rows import rendering
from headstart.data.rows.row import Row
from headstart.data.rows.template import template_ids
from headstart.models.verifier.outline import first_line
from headstart.models.verifier.verifier import Verifier


def read_prompts(verifier: Verifier, source: str, max_length: int) -> list[Row]:
    """The rows of every conversation; of one without an answer its prompt, nothing supervised.

    Raises:
        ValueError: data that cannot be read, or nothing in it to continue.
    """
    rows, tokenizer = [], verifier.tokenizer
    for one in reading.read(source):
        if one.messages and one.asked() == one.messages:
            kwargs = one.chat_template_kwargs or {}
            try:
                ids = template_ids(tokenizer, one.messages, one.tools, kwargs)
            except (TemplateError, TypeError) as error:
                raise ValueError(
                    f"row {one.id!r}: the chat template refuses it: {first_line(error)}"
                ) from error
            if len(ids) <= max_length:
                rows.append(Row(ids, [0] * len(ids), one.id, one.category))
        else:
            made = rendering.render(one, tokenizer, verifier.terminator_ids, max_length)
            rows += [row for row in made if not row.empty]
    if not rows:
        raise ValueError(
            f"{source!r}: nothing to continue, no conversation within max_length = {max_length}"
        )
    return rows
