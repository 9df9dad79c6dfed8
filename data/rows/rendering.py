"""From conversations to token ids and a mask of what the assistant wrote.

The mask holds turn numbers: 0 for text the assistant did not write, 1, 2, … for its turns, each
with the terminator that ends it. An answer is what follows the prompt that serving would give:
the chat template over the turns before it, with the generation prompt. Its ids are the stored
ones where the verifier wrote it (`token_ids`), else the template's `{% generation %}` marks say
what they are, else the difference between the template with and without the answer.

A conversation is one row as long as every prompt continues the row's ids so far. Where it does
not, because the template rewrites earlier turns (dropping their reasoning) or because an answer's
text does not encode back to the ids that the verifier wrote, a new row begins: so every answer
stands after exactly the tokens it was written after. What follows the last answer is left out.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from headstart.data.conversations import bad, reading
from headstart.data.conversations.bad import MAX_BAD_ROWS, BadRow
from headstart.data.conversations.conversation import Conversation
from headstart.data.rows.row import Audit, Row
from headstart.data.rows.template import (
    UNSTABLE,
    check_ids,
    one_bos,
    refused,
    template_ids,
    template_text,
    written_turn,
)
from headstart.models.verifier.outline import locate, not_loaded, trusted
from headstart.models.verifier.verifier import end_of_turn_ids


def load_tokenizer(name: str) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """A verifier's tokenizer and its terminator ids, without its weights.

    Raises:
        ValueError: no such verifier.
    """
    path = locate(name)
    try:
        trust = {"trust_remote_code": trusted(name)}
        tokenizer = AutoTokenizer.from_pretrained(path, **trust)
        config = AutoConfig.from_pretrained(path, **trust).get_text_config()
    except (OSError, ValueError) as error:
        raise not_loaded(name, error) from error
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # the file is optional
        generation = config
    found = end_of_turn_ids(tokenizer) if tokenizer.chat_template else set()
    for ids in (tokenizer.eos_token_id, config.eos_token_id, generation.eos_token_id):
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return tokenizer, tuple(sorted(i for i in found if i < config.vocab_size))


def render(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    terminator_ids: Iterable[int],
    max_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[Row]:
    """The rows of one conversation or plain text: one, unless its turns need several.

    Plain text is one turn, ended by the tokenizer's EOS. An assistant turn with nothing before it
    is context only, as there is no prompt that it could answer.

    Args:
        max_length: in tokens; what lies beyond is cut off, without a terminator made up.
        chat_template_kwargs: for the chat template; None takes those recorded in the row.

    Raises:
        ValueError: the row's answers were written with other chat_template_kwargs.
        BadRow: they were written with another tokenizer, or the chat template refuses it. Both
            name the row.
    """
    kwargs = _agreed_kwargs(conversation, chat_template_kwargs)
    terminators = set(terminator_ids)
    if conversation.text is not None:
        documents = [_plain_text(conversation.text, tokenizer, terminators)]
    else:
        try:
            documents = _chat(conversation, tokenizer, terminators, kwargs)
        except (TemplateError, TypeError) as error:
            raise refused(conversation.id, error) from error
    rows = []
    for number, document in enumerate(documents, 1):
        suffix = f"/{number}" if len(documents) > 1 else ""
        row = Row(
            document.ids[:max_length],
            document.mask[:max_length],
            conversation.id + suffix,
            conversation.category,
            conversation.law,
            kwargs,
            turns=document.turns,
            context_only=document.context_only,
            finished=sum(end <= max_length for end in document.finished),
            truncated=len(document.ids) > max_length,
        )
        while row.truncated and row.loss_mask and row.loss_mask[-1] == 0:
            row.input_ids.pop(), row.loss_mask.pop()  # a prompt whose answer was cut off
        pairs = zip(row.input_ids, row.loss_mask, strict=True)
        row.terminators = sum(turn > 0 and token in terminators for token, turn in pairs)
        rows.append(row)
    return rows


def render_all(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    terminator_ids: Iterable[int],
    max_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
    limit: int | None = None,
    split: str = "train",
    spread: bool = False,
    max_bad_rows: float = MAX_BAD_ROWS,
) -> tuple[list[Row], Audit]:
    """All rows of a data set that have something to learn from, and the audit.

    Conversations that cannot be used are left out, counted, and warned about.

    Args:
        max_bad_rows: fraction of them beyond which it is an error.

    Raises:
        ValueError: as `conversations.read` and `render`; too many that cannot be used; or not one
            supervised token.
    """
    kept: list[Row] = []
    audit = Audit()
    for conversation in reading.read(source, split, limit, spread, audit.refuse):
        try:
            rows = render(conversation, tokenizer, terminator_ids, max_length, chat_template_kwargs)
            audit.add(rows)
            kept += [row for row in rows if not row.empty]
        except BadRow as error:
            audit.refuse(error)
        audit.check_bad(max_bad_rows)
    audit.check(source, max_length)
    if audit.unusable:
        warnings.warn(f"{source}: left out: {bad.summary(audit.unusable)}", stacklevel=2)
    return kept, audit


@dataclass
class _Document:
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turns: int = 0
    context_only: int = 0
    finished: list[int] = field(default_factory=list)  # where each finished turn ends

    def extend(self, ids: list[int], turn: int) -> None:
        self.ids += ids
        self.mask += [turn] * len(ids)


def _agreed_kwargs(conversation: Conversation, asked: dict[str, Any] | None) -> dict[str, Any]:
    recorded = conversation.chat_template_kwargs
    if recorded is None and any("token_ids" in m for m in conversation.messages):
        recorded = {}  # regenerate.py records them where there are any
    if asked is not None and recorded is not None and asked != recorded:
        raise ValueError(
            f"row {conversation.id!r}: its answers were written with chat_template_kwargs "
            f"{recorded}, and {asked} is asked for; use the same, or regenerate the answers"
        )
    return (recorded if asked is None else asked) or {}


def _plain_text(text: str, tokenizer: PreTrainedTokenizerBase, terminators: set[int]) -> _Document:
    ids = one_bos(tokenizer, tokenizer(text).input_ids)
    if tokenizer.eos_token_id is not None and ids and ids[-1] not in terminators:
        ids = [*ids, tokenizer.eos_token_id]
    document = _Document()
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or (ids[end - 1] in terminators and end > 1):  # a BOS ends nothing
            document.turns += 1
            document.extend(ids[start:end], document.turns)
            document.finished.append(end)
            start = end
    return document


def _chat(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    terminators: set[int],
    kwargs: dict[str, Any],
) -> list[_Document]:
    messages, tools = conversation.messages, conversation.tools
    documents: list[_Document] = []
    turn, last = 0, 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:
            continue
        if "token_ids" in message:
            check_ids(conversation.id, message, tokenizer, terminators)
            prompt = template_ids(tokenizer, messages[:index], tools, kwargs)
            answer = message["token_ids"]
        else:
            prompt, answer = written_turn(conversation, index, tokenizer, terminators, kwargs)
        end = next((i for i, token in enumerate(answer) if token in terminators), len(answer))
        cut = bool(message.get("truncated"))
        answer = answer[:end] if cut else answer[: end + 1]
        if documents and prompt[: len(documents[-1].ids)] == documents[-1].ids:
            document, turn = documents[-1], turn + 1
        else:
            if documents and tokenizer.chat_template:
                before = template_text(tokenizer, messages[: last + 1], tools, kwargs, False)
                now = template_text(tokenizer, messages[:index], tools, kwargs, True)
                if not now.startswith(before.rstrip()):
                    warnings.warn(UNSTABLE, stacklevel=4)
            document, turn = _Document(), 1
            documents.append(document)
        document.extend(prompt[len(document.ids) :], 0)
        context_only = "context_only" in message
        document.extend(answer, 0 if context_only else turn)
        document.turns += 1
        document.context_only += context_only
        if not cut and not context_only:
            document.finished.append(len(document.ids))
        last = index
    if not documents:
        ids = template_ids(tokenizer, messages, tools, kwargs, prompt=False)
        documents.append(_Document(ids, [0] * len(ids)))
    return documents
