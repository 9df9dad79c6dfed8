"""The verifier answers in this process: batched decoding with a cache."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from headstart.data.answers.turns import Asking, Turns, count_refused, reply_of
from headstart.data.conversations.bad import BadRow
from headstart.data.conversations.conversation import Conversation
from headstart.data.rows.row import check_ids
from headstart.models.proposal.sampling import RowRandom, Sampling, draw
from headstart.models.verifier.verifier import Verifier


def generate(
    verifier: Verifier,
    prompts: list[list[int]],
    sampling: Sampling,
    max_new_tokens: int,
    random: RowRandom,
    advance: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """Continue each prompt until a terminator (kept in the answer) or `max_new_tokens`.

    Args:
        prompts: ids, each at least one.
        random: one row per prompt.
        advance: told the number of tokens written, after every pass.
    """
    device = verifier.device
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    positions = torch.full_like(ids, -1)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        positions[row, : len(prompt)] = torch.arange(len(prompt))
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    cache = verifier.new_cache(len(prompts))
    hidden = verifier.states(ids.to(device), position_ids=positions.to(device), cache=cache)
    last = hidden.last_hidden[torch.arange(len(prompts), device=device), lengths - 1]
    answers: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))  # cache row -> prompt
    finished: set[int] = set()
    terminators = set(verifier.terminator_ids)
    while True:
        logits = verifier.logits(last)
        if sampling.greedy:
            tokens = logits.argmax(-1)
        else:
            uniform = random.uniform()[:, 0].to(device)
            tokens = draw(sampling.probs(logits), uniform)
        written = 0
        for row, token in enumerate(tokens.tolist()):
            if row not in finished:
                written += 1
                answers[alive[row]].append(token)
                if token in terminators or len(answers[alive[row]]) == max_new_tokens:
                    finished.add(row)
        advance(written)
        if len(finished) == len(alive):
            return answers
        if len(finished) > len(alive) // 8:  # copying the cache costs less than dead rows do
            kept = [row for row in range(len(alive)) if row not in finished]
            index = torch.tensor(kept, device=device)
            cache.select_rows(index)
            random.select_rows(kept)
            alive = [alive[row] for row in kept]
            tokens, lengths = tokens[index], lengths[index]
            finished = set()
        step = verifier.states(tokens[:, None], position_ids=lengths[:, None], cache=cache)
        last = step.last_hidden[:, 0]
        lengths = lengths + 1


def user_prefix(verifier: Verifier, kwargs: dict[str, Any]) -> list[int]:
    """Ids of everything the template writes before a first user turn's text.

    Raises:
        ValueError: the verifier has no chat template.
    """
    tokenizer = verifier.tokenizer
    if not tokenizer.chat_template:
        raise ValueError(
            f"self_prompt needs an instruct verifier: {verifier.name!r} has no chat template; "
            "pass prompts instead"
        )
    mark = "headstart-user-text"
    messages = [{"role": "user", "content": mark}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    prefix = text[: text.index(mark)]
    return tokenizer(prefix, add_special_tokens=False).input_ids


def self_prompts(
    verifier: Verifier, prefix: list[int], count: int, batch_size: int, seed: int
) -> Iterator[list[Conversation]]:
    """Batches of conversations, `count` in all, each a user turn that the verifier wrote.

    It is sampled after `prefix`, at temperature 1. Turns that were cut off, are empty or repeat an
    earlier one are dropped.
    """
    seen: set[str] = set()
    made = tried = 0
    while made < count:
        rows = list(range(tried, tried + batch_size))
        tried += batch_size
        random = RowRandom(seed + 1, rows)
        sampled = generate(verifier, [prefix] * len(rows), Sampling(1.0), 96, random)
        batch = []
        for row, ids in zip(rows, sampled, strict=True):
            text = verifier.tokenizer.decode(ids, skip_special_tokens=True).strip()
            finished = ids[-1] in verifier.terminator_ids
            if finished and text and text not in seen and made + len(batch) < count:
                seen.add(text)
                messages = [{"role": "user", "content": text}]
                batch.append(Conversation(f"self-{row:06d}", messages, category="self-prompted"))
        made += len(batch)
        if not batch and tried > 20 * count + 1000:
            raise ValueError(
                f"self_prompt: {verifier.name!r} wrote only {made} usable prompts in {tried} tries"
            )
        yield batch


def answer(
    verifier: Verifier,
    batch: list[Conversation],
    asking: Asking,
    advance: Callable[[int], None],
    skipped: Counter[str],
) -> list[Conversation]:
    """Write every assistant turn of `batch`.

    Prompts that are too long, or that the chat template refuses, are left out, and counted in
    `skipped` by the reason.
    """
    progress = [Turns(conversation) for conversation in batch]
    done: list[Conversation] = []
    while progress:
        ready: list[tuple[Turns, list[int]]] = []
        for turns in progress:
            try:
                ids = turns.ask(verifier.tokenizer, asking.chat_template_kwargs)
            except BadRow as error:
                count_refused(skipped, error)
                continue
            check_ids(f"row {turns.conversation.id!r}", ids, verifier.num_embeddings)
            excess = asking.limits.excess(len(ids))
            if excess:
                skipped[excess] += 1
            else:
                ready.append((turns, ids))
        if not ready:
            break
        answers = generate(
            verifier,
            [ids for _, ids in ready],
            asking.sampling,
            asking.limits.max_new_tokens,
            RowRandom(asking.seed, [turns.seed() for turns, _ in ready]),
            advance,
        )
        progress = []
        for (turns, _), ids in zip(ready, answers, strict=True):
            if turns.reply(reply_of(ids, verifier.tokenizer, verifier.terminator_ids)):
                progress.append(turns)
            else:
                done.append(turns.answered(asking))
    return done
