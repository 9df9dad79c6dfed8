"""The verifier answers prompts: the data a drafter learns from.

    python data/regenerate.py --verifier embedded/smollm2-135m --prompts my-prompts.jsonl \\
        --out outputs/answers.jsonl

A drafter is trained on what its verifier really writes. Every assistant turn of the prompts is
written anew, after the same earlier turns, and stored as text and as the token ids themselves
(text does not always encode back to the ids that made it). `--self-prompt N` needs no prompts: an
instruct model, given only its template's user prefix, writes N user turns first.

A stopped run is continued by the same command: answered prompts are kept, and no answer is ever
removed; a prompt whose turns have changed is answered anew. An answer depends on (seed, prompt)
alone, not on what else is in its batch.
"""

import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from headstart.data import conversations
from headstart.data.answers import AnswerFile
from headstart.data.conversations import Conversation
from headstart.data.template import template_ids
from headstart.models.sampling import RowRandom, Sampling, check_seed, draw
from headstart.models.verifier import Verifier
from headstart.script import named


@dataclass
class Regenerate:
    """Settings of a run."""

    out: str
    """JSONL file to write (or to continue)."""
    verifier: str = "embedded/smollm2-135m"
    """Embedded name, local folder or Hub name."""
    prompts: str | None = None
    """JSONL file, folder or Hub data set with the prompts."""
    split: str = "train"
    """Split of a Hub data set."""
    limit: int | None = None
    """Answer only the first so many prompts."""
    self_prompt: int = 0
    """Let the verifier write so many prompts itself."""
    max_new_tokens: int = 192
    """Longest answer, in tokens."""
    max_prompt_tokens: int = 1024
    """Longer prompts are skipped and counted."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """1 is off."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template, e.g. {"enable_thinking": false}; recorded with the answers."""
    seed: int = 0
    batch_size: int = 64
    """Prompts answered at once."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    device: str = "cpu"


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
    verifier: Verifier, prefix: list[int], settings: Regenerate
) -> Iterator[list[Conversation]]:
    """Batches of conversations whose user turn the verifier sampled after `prefix`.

    The temperature is 1. Turns that were cut off, are empty or repeat an earlier one are dropped.
    """
    seen: set[str] = set()
    made = tried = 0
    while made < settings.self_prompt:
        rows = list(range(tried, tried + settings.batch_size))
        tried += settings.batch_size
        random = RowRandom(settings.seed + 1, rows)
        sampled = generate(verifier, [prefix] * len(rows), Sampling(1.0), 96, random)
        batch = []
        for row, ids in zip(rows, sampled, strict=True):
            text = verifier.tokenizer.decode(ids, skip_special_tokens=True).strip()
            finished = ids[-1] in verifier.terminator_ids
            if finished and text and text not in seen and made + len(batch) < settings.self_prompt:
                seen.add(text)
                messages = [{"role": "user", "content": text}]
                batch.append(Conversation(f"self-{row:06d}", messages, category="self-prompted"))
        made += len(batch)
        if not batch and tried > 20 * settings.self_prompt + 1000:
            raise ValueError(
                f"self_prompt: {verifier.name!r} wrote only {made} usable prompts in {tried} tries"
            )
        yield batch


def answer(
    verifier: Verifier,
    batch: list[Conversation],
    settings: Regenerate,
    bar: tqdm,
    skipped: Counter[str],
) -> list[Conversation]:
    """Write every assistant turn of `batch`.

    Prompts that are too long are left out, and counted in `skipped` by the reason.
    """
    kwargs = settings.chat_template_kwargs or {}
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    progress: list[tuple[Conversation, list[dict], list[dict]]] = []
    progress += [(conversation, [], conversation.asked()) for conversation in batch]
    done: list[Conversation] = []
    while progress:
        ready = []
        for conversation, written, waiting in progress:
            while waiting:  # up to and with the next user or tool turn that wants a reply
                written.append(waiting.pop(0))
                following = waiting[0]["role"] if waiting else None
                if written[-1]["role"] in ("user", "tool") and following != "tool":
                    break
            ids = template_ids(verifier.tokenizer, written, conversation.tools, kwargs)
            if len(ids) > settings.max_prompt_tokens:
                skipped[f"longer than max_prompt_tokens ({settings.max_prompt_tokens})"] += 1
            elif len(ids) + settings.max_new_tokens > verifier.context_length:
                skipped[
                    f"too long for the context of {verifier.context_length} tokens, with an "
                    f"answer of {settings.max_new_tokens}"
                ] += 1
            else:
                ready.append((conversation, written, waiting, ids))
        if not ready:
            break
        seeds = [zlib.crc32(json.dumps(written).encode()) for _, written, _, _ in ready]
        answers = generate(
            verifier,
            [ids for *_, ids in ready],
            sampling,
            settings.max_new_tokens,
            RowRandom(settings.seed, seeds),
            bar.update,
        )
        progress = []
        for (conversation, written, waiting, _), ids in zip(ready, answers, strict=True):
            finished = ids[-1] in verifier.terminator_ids
            text = verifier.tokenizer.decode(ids[:-1] if finished else ids)
            reply = {"role": "assistant", "content": text, "token_ids": ids}
            written.append(reply if finished else reply | {"truncated": True})
            if waiting and finished:
                progress.append((conversation, written, waiting))
                continue
            done.append(
                Conversation(
                    conversation.id,
                    written,
                    tools=conversation.tools,
                    category=conversation.category,
                    temperature=settings.temperature,
                    chat_template_kwargs=settings.chat_template_kwargs,
                )
            )
    return done


SPEED_ONLY = ("out", "batch_size", "device", "limit", "self_prompt")


def read_prompts(settings: Regenerate) -> list[Conversation]:
    """The rows that have a turn to answer.

    Raises:
        ValueError: there is none, or two have the same id.
    """
    if settings.prompts is None:
        return []
    with named("prompts"):
        rows = list(conversations.read(settings.prompts, settings.split, settings.limit))
    if not rows:
        raise ValueError(f"prompts {settings.prompts!r}: nothing to answer, it holds no rows")
    prompts = [c for c in rows if c.asked()]
    if not prompts:
        raise ValueError(
            f"prompts {settings.prompts!r}: nothing to answer, none of {len(rows)} rows has a "
            "user turn"
        )
    if len({c.id for c in prompts}) < len(prompts):
        raise ValueError(f"prompts {settings.prompts!r}: two rows have the same id")
    return prompts


def batches(prompts: list[Conversation], batch_size: int) -> Iterator[list[Conversation]]:
    """Prompts of like length together: little padding; windows keep any prefix of them mixed."""
    window = 4 * batch_size
    for start in range(0, len(prompts), window):
        part = sorted(prompts[start : start + window], key=lambda c: len(json.dumps(c.messages)))
        for first in range(0, len(part), batch_size):
            yield part[first : first + batch_size]


def run(settings: Regenerate) -> None:
    """Answer all prompts that `settings.out` has no answer for yet."""
    for name in ("max_new_tokens", "max_prompt_tokens", "batch_size", "limit"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    if settings.prompts is not None and settings.self_prompt < 0:
        raise ValueError(f"self_prompt must be 0 or more, got {settings.self_prompt}")
    if settings.prompts is None and settings.self_prompt < 1:
        raise ValueError("nothing to answer: pass --prompts FILE or --self_prompt N")
    Sampling(settings.temperature, settings.top_k, settings.top_p)
    check_seed(settings.seed)
    prompts = read_prompts(settings)
    with AnswerFile.open(Path(settings.out), settings.prompts) as answers:
        write(settings, prompts, answers)


def write(settings: Regenerate, prompts: list[Conversation], answers: AnswerFile) -> None:
    """Add the answers that are missing, and say what was done."""
    verifier = Verifier.load(settings.verifier, settings.dtype, settings.device)
    if settings.max_new_tokens >= verifier.context_length:
        raise ValueError(
            f"max_new_tokens {settings.max_new_tokens} leaves no room for a prompt: the context "
            f"of {verifier.name!r} is {verifier.context_length} tokens; pass a smaller one"
        )
    sources = [batches(prompts, settings.batch_size)]
    if settings.self_prompt > 0:
        prefix = user_prefix(verifier, settings.chat_template_kwargs or {})
        sources.append(self_prompts(verifier, prefix, settings))
    fixed = {k: v for k, v in asdict(settings).items() if k not in SPEED_ONLY}
    answers.begin(fixed | {"fingerprint": verifier.fingerprint()})

    began, skipped = time.monotonic(), Counter[str]()
    order = [c.id for c in prompts]  # of the file; then as the verifier wrote them
    bar = tqdm(
        unit=" tokens",
        desc=f"{len(answers)} answered before",
        smoothing=0.1,
        mininterval=0.1 if sys.stderr.isatty() else 10,
    )
    with bar:
        for batch in chain(*sources):
            todo = [c for c in batch if not answers.has(c)]
            if todo:
                answers.add(answer(verifier, todo, settings, bar, skipped))
            order += [c.id for c in batch]
            bar.set_description_str(f"{len(answers)} conversations")
    answers.finish(order)
    tokens = int(bar.n)
    facts = [
        f"{len(answers)} conversations",
        f"{tokens} tokens written in this run "
        f"({tokens / max(time.monotonic() - began, 1e-9):.0f} tokens/s)",
        *(f"{count} prompts skipped as {reason}" for reason, count in skipped.items()),
    ]
    if answers.replaced:
        facts.append(f"{answers.replaced} answered anew, as their prompts have changed")
    if answers.others:
        facts.append(f"{answers.others} kept that answer none of this run's prompts")
    print(f"{settings.out}: {', '.join(facts)}", file=sys.stderr)


if __name__ == "__main__":
    from headstart.script import run_script

    run_script(Regenerate, run)
