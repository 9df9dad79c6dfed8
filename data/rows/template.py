"""The chat template's ids, and where in them an assistant's answer lies.

An answer is what follows the prompt that serving would give: the template over the turns before
it, with the generation prompt. The template's `{% generation %}` marks say what it is, else the
difference between the template with and without the answer.
"""

import re
import warnings
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from headstart.data.conversations.bad import REFUSED, BadRow
from headstart.data.conversations.conversation import Conversation
from headstart.models.verifier.outline import first_line

OUR_FIELDS = ("token_ids", "truncated", "context_only")
"""Of a message; no business of the template's."""
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
UNSTABLE = (
    "the chat template rewrites earlier assistant turns (it may drop their reasoning): such "
    "conversations become one row per assistant turn, each as the verifier saw it"
)


def template_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    kwargs: dict[str, Any] | None = None,
    prompt: bool = True,
) -> list[int]:
    """Ids of the chat template's text; with `prompt`, up to where the assistant begins to write.

    A base model has no template: the turns' texts, a line each.
    """
    if not tokenizer.chat_template:
        text = "\n".join(message["content"] for message in messages)
        return one_bos(tokenizer, tokenizer(text).input_ids)
    text = template_text(tokenizer, messages, tools, kwargs, prompt)
    # the template writes its own BOS, or none
    return one_bos(tokenizer, tokenizer(text, add_special_tokens=False).input_ids)


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns as a template expects them, without our own fields."""
    return [{k: v for k, v in m.items() if k not in OUR_FIELDS} for m in messages]


def template_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any] | None,
    prompt: bool,
) -> str:
    """What the chat template writes; with `prompt`, the generation prompt at its end."""
    return tokenizer.apply_chat_template(
        plain(messages), tools=tools, add_generation_prompt=prompt, tokenize=False, **(kwargs or {})
    )


def refused(row_id: str, error: Exception) -> BadRow:
    """Of what a chat template raises."""
    return BadRow(f"row {row_id!r}", REFUSED, f": {first_line(error)}")


def one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Without the second BOS that a tokenizer adds where the text begins with one already."""
    bos = tokenizer.bos_token_id
    count = len(list(takewhile(lambda i: i == bos, ids)))
    return ids[max(0, count - 1) :]


def written_turn(
    conversation: Conversation,
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    terminators: set[int],
    kwargs: dict[str, Any],
) -> tuple[list[int], list[int]]:
    """Prompt and answer ids of assistant turn `index`, from its text.

    The answer ends with all that the template writes after it.

    Raises:
        ValueError: no template.
        BadRow: the answer cannot be told from what comes before it.
    """
    messages, tools = conversation.messages, conversation.tools
    if not tokenizer.chat_template:
        raise ValueError(
            f"row {conversation.id!r}: the verifier has no chat template; give it rows of plain "
            "text, or answers that data/regenerate.py wrote with it"
        )
    if _MARK.search(tokenizer.get_chat_template(None, tools)) and tokenizer.is_fast:
        return _marked(conversation, index, tokenizer, terminators, kwargs)
    prompt = template_ids(tokenizer, messages[:index], tools, kwargs)
    whole = template_ids(tokenizer, messages[: index + 1], tools, kwargs, prompt=False)
    if whole[: len(prompt)] == prompt:
        return prompt, whole[len(prompt) :]
    prompt_text = template_text(tokenizer, messages[:index], tools, kwargs, True)
    whole_text = template_text(tokenizer, messages[: index + 1], tools, kwargs, False)
    if whole_text.startswith(prompt_text):  # a token reaches over the border: serving splits it
        text = whole_text[len(prompt_text) :]
        return prompt, tokenizer(text, add_special_tokens=False).input_ids
    # the generation prompt opens what the finished turn leaves out, e.g. a block of reasoning
    shared = _shared(whole, prompt)
    before = template_ids(tokenizer, messages[:index], tools, kwargs, prompt=False)
    if shared < _shared(before, prompt):
        raise BadRow(
            f"row {conversation.id!r}",
            "the chat template rewrites the turns before an answer",
            ", so the answer's tokens cannot be found; regenerate the answers with this verifier",
        )
    warnings.warn(UNSTABLE, stacklevel=5)
    return whole[:shared], whole[shared:]


def _shared(a: list[int], b: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


def _marked(
    conversation: Conversation,
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    terminators: set[int],
    kwargs: dict[str, Any],
) -> tuple[list[int], list[int]]:
    """As the template's generation marks say, with the end of turn they may leave out."""
    messages = plain(conversation.messages[: index + 1])
    encoded = tokenizer.apply_chat_template(
        messages,
        tools=conversation.tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **kwargs,
    )
    raw, marks = encoded["input_ids"], encoded["assistant_masks"]
    ids = one_bos(tokenizer, raw)
    marks = marks[len(raw) - len(ids) :]
    end = max((i for i, mark in enumerate(marks, 1) if mark), default=0)
    start = end - len(list(takewhile(bool, reversed(marks[:end]))))
    before = template_ids(tokenizer, messages[:index], conversation.tools, kwargs, prompt=False)
    if start < _shared(before, ids):  # an earlier turn's mark: this turn has none
        return ids, []
    if ids[end - 1] not in terminators:
        rest = ids[end:]
        stop = next((i for i, token in enumerate(rest) if token in terminators), None)
        if stop is not None and not tokenizer.decode(rest[:stop]).strip():
            end += stop + 1
    return ids[:start], ids[start:end]


def check_ids(
    row_id: str, message: dict, tokenizer: PreTrainedTokenizerBase, terminators: set[int]
) -> None:
    """Stored ids must be the message's text: those of another tokenizer would train garbage."""
    ids = message["token_ids"]
    text = tokenizer.decode(ids[:-1] if ids and ids[-1] in terminators else ids)
    if message["content"] and "".join(text.split()) != "".join(message["content"].split()):
        raise BadRow(
            f"row {row_id!r}",
            "token_ids and content of an assistant turn differ under this verifier's tokenizer",
            "; another verifier wrote it: regenerate it, or remove token_ids",
        )
