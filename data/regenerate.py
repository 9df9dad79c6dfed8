"""The verifier answers prompts: the data a drafter learns from.

    python data/regenerate.py --verifier embedded/smollm2-135m --prompts my-prompts.jsonl \\
        --out outputs/answers.jsonl

A drafter is trained on what its verifier really writes. Every assistant turn of the prompts is
written anew, after the same earlier turns, and stored as text and as the token ids themselves
(text does not always encode back to the ids that made it), with the law they were drawn from:
temperature, top_k, top_p. A call of a tool stays as it is where its result is recorded, and is not
trained on; one without a result is written anew, and ends its conversation. `--self-prompt N` needs
no prompts: an instruct model, given only its template's user prefix, writes N user turns first.

A stopped run is continued by the same command: answered prompts are kept, and no answer is ever
removed; a prompt whose turns have changed is answered anew. An answer depends on (seed, prompt)
alone, not on what else is in its batch.

Large verifiers answer faster in an inference engine, such as one started by `vllm serve MODEL`:

    python data/regenerate.py --verifier MODEL --prompts my-prompts.jsonl \\
        --out outputs/answers.jsonl --server http://localhost:8000
"""

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from headstart.data.answers.answer_file import AnswerFile
from headstart.data.answers.decoding import answer, self_prompts, user_prefix
from headstart.data.answers.remote import RemoteVerifier
from headstart.data.answers.turns import Asking, Limits, Turns
from headstart.data.conversations import bad, reading
from headstart.data.conversations.bad import BadRow
from headstart.data.conversations.conversation import Conversation
from headstart.data.rows.rendering import load_tokenizer
from headstart.models.proposal.sampling import Sampling, check_seed
from headstart.models.verifier.adapter import join
from headstart.models.verifier.verifier import Verifier
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
    max_bad_rows: float = bad.MAX_BAD_ROWS
    """Fraction of unreadable rows, which are left out, that ends the run; after 1000 rows."""
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
    """Prompts answered at once; of a server, requests in flight."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    device: str = "cpu"
    """cpu, cuda, or auto: its layers on all GPUs of this machine."""
    adapter: str | None = None
    """LoRA adapter of the verifier, a folder or a Hub name."""
    server: str | None = None
    """URL of an OpenAI-compatible server of the verifier; default: it runs in this process."""
    server_model: str | None = None
    """The verifier's name on the server, where that serves several models."""
    timeout: float = 600.0
    """Seconds after which a request without a reply is sent again."""
    patience: float = 900.0
    """Seconds without any answer of the server after which the run ends."""


# of the settings, those that no answer depends on
SPEED_ONLY = (
    "out",
    "batch_size",
    "device",
    "limit",
    "max_bad_rows",
    "self_prompt",
    "server",
    "timeout",
    "patience",
)


def read_prompts(settings: Regenerate) -> list[Conversation]:
    """The rows that have a turn to answer.

    Raises:
        ValueError: there is none, or too many cannot be read.
    """
    if settings.prompts is None:
        return []
    unusable: bad.Bad = {}
    rows = []

    def check() -> None:
        bad.check(unusable, len(rows) + bad.total(unusable), settings.max_bad_rows)

    def refuse(row: BadRow) -> None:
        bad.count(unusable, row)
        check()

    with named("prompts"):
        for row in reading.read(settings.prompts, settings.split, settings.limit, refuse=refuse):
            rows.append(row)
            check()
    if not rows:
        why = (
            f"no row of it can be read: {bad.summary(unusable)}" if unusable else "it holds no rows"
        )
        raise ValueError(f"prompts {settings.prompts!r}: nothing to answer, {why}")
    if unusable:
        said = bad.summary(unusable)
        warnings.warn(f"prompts {settings.prompts!r}: left out: {said}", stacklevel=2)
    prompts = [c for c in rows if c.asked()]
    if not prompts:
        raise ValueError(
            f"prompts {settings.prompts!r}: nothing to answer, none of {len(rows)} rows has a "
            "user turn"
        )
    return prompts


def batches(prompts: list[Conversation], batch_size: int) -> Iterator[list[Conversation]]:
    """Prompts of like length together: little padding; windows keep any prefix of them mixed."""
    window = 4 * batch_size
    for start in range(0, len(prompts), window):
        part = sorted(prompts[start : start + window], key=lambda c: len(json.dumps(c.messages)))
        for first in range(0, len(part), batch_size):
            yield part[first : first + batch_size]


class Progress:
    """A bar over prompts, with tokens a second and the time left; and what is said at the end."""

    def __init__(self, total: int, before: int):
        self.tokens = 0  # written in this run
        self.skipped = Counter[str]()  # reason -> prompts
        self.began = time.monotonic()
        self.bar = tqdm(
            total=total,
            initial=before,
            unit=" prompts",
            desc=f"{before} answered before",
            smoothing=0.1,
            miniters=0,  # tokens come between prompts, and are shown
            mininterval=0.1 if sys.stderr.isatty() else 10,
        )

    def advance(self, tokens: int) -> None:
        self.tokens += tokens
        self.bar.set_postfix_str(f"{self.rate:.0f} tokens/s", refresh=False)
        self.bar.update(0)

    def answered(self, conversations: int) -> None:
        """So many prompts are done with: answered, or skipped."""
        self.bar.set_description("answered", refresh=False)
        self.bar.update(conversations)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / max(time.monotonic() - self.began, 1e-9)

    def facts(self) -> list[str]:
        return [
            f"{self.tokens} tokens written in this run ({self.rate:.0f} tokens/s)",
            *(f"{count} prompts skipped as {why}" for why, count in self.skipped.items()),
        ]


def answer_here(
    settings: Regenerate, prompts: list[Conversation], answers: AnswerFile
) -> tuple[Progress, list[str]]:
    """The verifier runs in this process; its own prompts come after the others."""
    name = join(settings.verifier, settings.adapter)
    verifier = Verifier.load(name, settings.dtype, settings.device)
    asking = asked(settings, verifier.context_length)
    asking.limits.check(verifier.name)
    sources = [batches(prompts, settings.batch_size)]
    if settings.self_prompt > 0:
        prefix = user_prefix(verifier, settings.chat_template_kwargs or {})
        shape = settings.self_prompt, settings.batch_size, settings.seed
        sources.append(self_prompts(verifier, prefix, *shape))
    answers.begin(record(settings) | {"fingerprint": verifier.fingerprint()})
    before = sum(map(answers.has, prompts))
    progress = Progress(len(prompts) + settings.self_prompt, before)
    order = [c.id for c in prompts]  # of the file; then as the verifier wrote them
    with progress.bar:
        for batch in chain(*sources):
            todo = [c for c in batch if not answers.has(c)]
            if todo:
                answers.add(answer(verifier, todo, asking, progress.advance, progress.skipped))
            progress.answered(len(todo))
            order += [c.id for c in batch]
    return progress, order


def answer_there(
    settings: Regenerate, prompts: list[Conversation], answers: AnswerFile
) -> tuple[Progress, list[str]]:
    """A server runs the verifier; each answer is on disk as soon as it is here."""
    server = RemoteVerifier(
        settings.server,
        settings.server_model,
        *load_tokenizer(settings.verifier),
        settings.timeout,
        settings.patience,
    )
    asking = asked(settings, server.context_length)
    asking.limits.check(server.model)
    # another server of the same model may go on with the file
    answers.begin(record(settings) | {"server_model": server.model, "dtype": None})
    todo = [Turns(c, answers.first_turns(c)) for c in prompts if not answers.has(c)]
    progress = Progress(len(prompts), len(prompts) - len(todo))
    replies = server.answers(todo, asking, settings.batch_size, before=len(answers))
    with progress.bar, closing(replies) as outcomes:
        for outcome in outcomes:
            if outcome.conversation is not None:
                answers.add([outcome.conversation], whole=not outcome.more)
                progress.advance(outcome.tokens)
            else:
                progress.skipped[outcome.skipped] += 1
            progress.answered(not outcome.more)
    if server.without_ids:
        warnings.warn(
            f"the server gave no token ids for {server.without_ids} answers: they are stored as "
            "text alone, which may encode to other ids than the verifier wrote",
            stacklevel=2,
        )
    return progress, [c.id for c in prompts]


def asked(settings: Regenerate, context_length: int | None = None) -> Asking:
    """How answers are to be written, by whoever writes them."""
    return Asking(
        Limits(settings.max_prompt_tokens, settings.max_new_tokens, context_length),
        Sampling(settings.temperature, settings.top_k, settings.top_p),
        settings.seed,
        settings.chat_template_kwargs,
    )


def record(settings: Regenerate) -> dict[str, Any]:
    """What the answers in a file have in common."""
    return {k: v for k, v in asdict(settings).items() if k not in SPEED_ONLY}


def run(settings: Regenerate) -> None:
    """Answer all prompts that `settings.out` has no answer for yet."""
    for name in ("max_new_tokens", "max_prompt_tokens", "batch_size", "limit"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    if settings.prompts is not None and settings.self_prompt < 0:
        raise ValueError(f"self_prompt must be 0 or more, got {settings.self_prompt}")
    for name in ("timeout", "patience"):
        if getattr(settings, name) <= 0:
            raise ValueError(f"{name} must be above 0 seconds, got {getattr(settings, name)}")
    if settings.server and settings.self_prompt:
        raise ValueError(
            "self_prompt needs the verifier in this process: a server continues no half turns; "
            "leave --server out, or pass --prompts alone"
        )
    if settings.server and settings.adapter:
        raise ValueError(
            "adapter: a server has it already; leave --adapter out, and name the adapter that the "
            "server gave it by --server_model"
        )
    if settings.prompts is None and settings.self_prompt < 1:
        raise ValueError("nothing to answer: pass --prompts FILE or --self_prompt N")
    bad.check_limit(settings.max_bad_rows, "max_bad_rows")
    asked(settings)
    check_seed(settings.seed)
    prompts = read_prompts(settings)
    with AnswerFile.open(Path(settings.out), settings.prompts) as answers:
        write(settings, prompts, answers)


def write(settings: Regenerate, prompts: list[Conversation], answers: AnswerFile) -> None:
    """Add the answers that are missing, and say what was done."""
    answer_all = answer_there if settings.server else answer_here
    progress, order = answer_all(settings, prompts, answers)
    answers.finish(order)
    facts = [f"{len(answers)} conversations", *progress.facts()]
    if answers.replaced:
        facts.append(f"{answers.replaced} answered anew, as their prompts have changed")
    if answers.begun:
        facts.append(f"{answers.begun} without the answers to their last turns")
    if answers.others:
        facts.append(f"{answers.others} kept that answer none of this run's prompts")
    print(f"{settings.out}: {', '.join(facts)}", file=sys.stderr)
    refused = [why for why in progress.skipped if why.startswith(bad.REFUSED)]
    if not len(answers) and sum(progress.skipped[why] for why in refused) == len(prompts) > 0:
        raise ValueError(
            f"prompts {settings.prompts!r}: none is answered: {refused[0]}; choose other prompts"
        )


if __name__ == "__main__":
    from headstart.script import run_script

    run_script(Regenerate, run)
