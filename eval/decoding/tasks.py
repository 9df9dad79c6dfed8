"""Tasks with right answers: are as many solved with drafts as without?

A check of quality that anyone understands. It sees less than losslessness.py's other parts do: a
wrong rule that changes texts, but not how often they are right, passes it.

Legend: R tasks, S texts of each.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from headstart.data.conversations import reading
from headstart.data.rows.row import Row
from headstart.data.rows.template import template_ids
from headstart.eval.decoding import trial
from headstart.models.drafter import Drafter
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling, mix
from headstart.models.proposal.trees import Shape
from headstart.models.verifier.verifier import Verifier

_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


@dataclass
class Task:
    """A prompt and its right answer."""

    row: Row
    answer: str


class Paired(NamedTuple):
    """Right texts without and with drafts, of as many each, and how likely a difference as large is
    where both are drawn from one law."""

    plain: int
    drafted: int
    texts: int
    p_value: float


def read(source: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Task]:
    """Conversations that end in the right answer, as their assistant's last turn.

    Raises:
        ValueError: data that cannot be read, a row without an answer, or no row short enough.
    """
    tasks = []
    for one in reading.read(source):
        if not one.messages or one.messages[-1]["role"] != "assistant" or len(one.messages) < 2:
            raise ValueError(f"row {one.id!r}: a task ends with its right answer, as assistant")
        kwargs = one.chat_template_kwargs or {}
        ids = template_ids(tokenizer, one.messages[:-1], one.tools, kwargs)
        if len(ids) <= max_length:
            row = Row(ids, [0] * len(ids), one.id, one.category)
            tasks.append(Task(row, one.messages[-1]["content"].strip()))
    if not tasks:
        raise ValueError(f"{source!r}: no task within max_length = {max_length}")
    return tasks


def is_right(text: str, answer: str) -> bool:
    """A number: the text's last one is it. Else: the text has it, as whole words, in any case."""
    if _NUMBER.fullmatch(answer):
        numbers = _NUMBER.findall(text)
        return bool(numbers) and _value(numbers[-1]) == _value(answer)
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def _value(number: str) -> float:
    return float(number.replace(",", "") if number.count(".") < 2 else number.replace(".", ""))


def paired_test(plain: list[int], drafted: list[int], samples: int) -> float:
    """Mantel and Haenszel's test (1959) over tasks: p-value of the difference of both scores, task
    by task, where each text is right with its task's probability, drafts or not.

    Args:
        plain, drafted: [R], right texts of `samples` each, drawn independently.
    """
    excess = variance = 0.0
    for a, b in zip(drafted, plain, strict=True):
        right, texts = a + b, 2 * samples
        excess += a - right / 2
        variance += right * (texts - right) / (4 * (texts - 1))
    if variance == 0:
        return 1.0  # every task is always right, or never
    return math.erfc(abs(excess) / math.sqrt(2 * variance))


def score(
    verifier: Verifier,
    drafter: Drafter,
    tasks: list[Task],
    shape: Shape,
    sampling: Sampling,
    drafting: Drafting,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    samples: int = 1,
) -> Paired:
    """Every task `samples` times without and with drafts, the draws independent of each other."""
    rows = [task.row for task in tasks for _ in range(samples)]
    right: dict[bool, list[int]] = {}
    for with_drafts in (False, True):
        done = trial.decode(
            verifier,
            drafter,
            rows,
            [shape if with_drafts else None],
            sampling,
            drafting,
            max_new_tokens,
            batch_size,
            mix(seed, int(with_drafts)),
        )
        texts = [verifier.tokenizer.decode(d.output.tokens, skip_special_tokens=True) for d in done]
        right[with_drafts] = [
            sum(is_right(text, task.answer) for text in texts[i * samples : (i + 1) * samples])
            for i, task in enumerate(tasks)
        ]
    p_value = paired_test(right[False], right[True], samples)
    return Paired(sum(right[False]), sum(right[True]), len(rows), p_value)
