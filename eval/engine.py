"""Drafters in engines: serve one, read what it is accepted, hold the engine against our own loop.

    python eval/engine.py serve outputs/quickstart/best
    python eval/engine.py metrics http://localhost:8000 --seconds 60
    python eval/engine.py compare outputs/quickstart/best --out outputs/engine

`serve` prints the command with which vLLM, SGLang or llama.cpp serves a drafter, after the exports
that it needs, or runs vLLM's. `metrics` reads α, τ and acceptance by position from a running
server, or from a saved page. `compare` starts vLLM with and without the drafter, asks both for the
same prompts in turn, and puts texts, accepted drafts and times beside those of our loop. It ends
with code 1 where they differ without a reason.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from headstart.data.rows.row import Row
from headstart.eval.decoding.prompts import read_prompts
from headstart.eval.decoding.trial import pick, prompt_of
from headstart.eval.engines import commands, metrics
from headstart.eval.engines import report as engine_report
from headstart.eval.engines import server as engine_server
from headstart.eval.engines.kinds import Method, verifier_of
from headstart.eval.engines.metrics import EngineCounts, Metrics
from headstart.eval.engines.parity import Compared, judge
from headstart.eval.engines.server import Reply, complete, model_name
from headstart.eval.reports import report
from headstart.lock import only_writer
from headstart.models.drafter import TrainableDrafter, check_depth
from headstart.models.loading import load_pair
from headstart.models.verifier.verifier import Verifier
from headstart.script import named

SETTLING_SECONDS = 10  # a server's counters follow its answer


@dataclass
class Served:
    """A drafter and the vLLM that serves it."""

    drafter: str
    """A checkpoint's folder, prompt-lookup, or a model with the verifier's tokenizer."""
    verifier: str | None = None
    """Default: the verifier the drafter was trained for; needed for any other drafter."""
    draft_length: int = 2
    """K, drafts a round."""
    engine: str = ".venv-engine"
    """Folder of the environment that has vLLM; else the vllm on PATH."""


@dataclass
class Serve(Served):
    """The command to print or to run."""

    arguments: list[str] = field(default_factory=list)
    """Further words for the engine, such as [--dtype, float32, --port, "8001"]."""
    engine_name: Literal["vllm", "sglang", "llama.cpp"] = "vllm"
    """Whose command."""
    method: Method | None = None
    """vLLM's name of the drafter's kind, for a name of the Hub whose config.json does not tell."""
    run: bool = False
    """Run the command, too; vLLM's alone."""

    def __post_init__(self) -> None:
        if self.run and self.engine_name != "vllm":
            raise ValueError(
                f"run is for vllm alone, engine_name is {self.engine_name}; type what is printed"
            )


def serve(settings: Serve) -> None:
    """Print the commands; run vLLM's where asked to, in place of this program."""
    lines = commands.lines(
        settings.engine_name,
        settings.drafter,
        settings.verifier,
        settings.draft_length,
        settings.arguments,
        settings.method,
    )
    asked = (settings.drafter, settings.verifier, settings.method)
    for note in commands.notes(settings.engine_name, *asked):
        print(f"note: {note}", file=sys.stderr)
    if not settings.run:
        print("\n".join(engine_server.shown(words, {}) for words in lines))
        return
    (words,) = lines
    program = engine_server.executable(settings.engine)
    environment = engine_server.cpu_environment(program)
    print(engine_server.shown([program, *words[1:]], environment), flush=True)
    os.execve(program, [program, *words[1:]], os.environ | environment)


@dataclass
class Compare(Served):
    """What is compared."""

    out: str | None = None
    """Folder for engine.json, engine.md and the servers' logs; needed where they are started."""
    allow_verifier: bool = False
    """Accept a verifier with another fingerprint, such as a quantised copy of the drafter's."""
    server: str | None = None
    """Address of a running vLLM with this drafter, of K drafts, in float32 and eager; default: one
    is started, and one without drafts."""
    plain: str | None = None
    """Address of one without drafts, beside `server`: for losslessness and speed."""
    prompts: str = "data/smollm2/eval.jsonl"
    """Conversations, answered or not; what comes before their first answer is continued."""
    num_prompts: int = 20
    """Dealt evenly over the categories; 0: all."""
    categories: list[str] | None = None
    """Only prompts of these; default: all."""
    max_new_tokens: int = 64
    """Length of every answer: terminators do not end it."""
    max_length: int = 1024
    """Longest conversation read, in tokens."""

    def __post_init__(self) -> None:
        if self.num_prompts < 0:
            raise ValueError(f"num_prompts must be 0 (all) or more, got {self.num_prompts}")
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens must be 2 or more, a round's worth, got {self.max_new_tokens}"
            )
        if self.plain is not None and self.server is None:
            raise ValueError("plain is the server without drafts; name the one with them as server")
        for name in ("server", "plain"):
            metrics.check_url(name, getattr(self, name) or "http://")
        if self.server is None and self.out is None:
            raise ValueError("out: name a folder, where the started servers may write their logs")


def started(settings: Compare, stack: ExitStack, verifier: str) -> tuple[str, str]:
    """Servers of our own with and without the drafter, until `stack` ends: their addresses."""
    config = commands.speculative_config(settings.drafter, settings.draft_length)
    arguments = ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"]
    arguments += commands.loader_arguments(settings.drafter)
    arguments += commands.length_arguments("vllm", settings.drafter, settings.verifier)
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    addresses = []
    for name, given in (("drafted", config), ("plain", None)):
        log = Path(settings.out) / f"{name}.log"
        print(f"starting vLLM, {name}; log in {log}", flush=True)
        server = engine_server.serving(verifier, given, settings.engine, arguments, log)
        addresses.append(stack.enter_context(server))
    return addresses[0], addresses[1]


def counted(
    server: str, model: str, prompt: list[int], max_new_tokens: int
) -> tuple[Reply, EngineCounts]:
    """An answer, and what the server counted for it.

    Raises:
        ValueError: it counted more or less than this answer.
    """
    before = metrics.scrape(server)
    reply = complete(server, model, prompt, max_new_tokens)
    for _ in range(SETTLING_SECONDS * 10):
        counts = metrics.scrape(server).since(before)
        if counts.generated >= max_new_tokens:
            break
        time.sleep(0.1)
    if counts.generated != max_new_tokens or len(reply.tokens) != max_new_tokens:
        raise ValueError(
            f"server {server!r} counted {counts.generated:.0f} tokens for an answer of "
            f"{len(reply.tokens)}, {max_new_tokens} were asked for; compare needs it for itself"
        )
    return reply, counts


def chosen_rows(settings: Compare, verifier: Verifier) -> list[Row]:
    """The conversations to ask for.

    Raises:
        ValueError: data that cannot be read, or none of these categories.
    """
    with named("prompts"):
        rows = read_prompts(verifier, settings.prompts, settings.max_length)
    if settings.categories is not None:
        rows = [row for row in rows if row.category in settings.categories]
    if not rows:
        raise ValueError(f"categories: {settings.prompts} has no prompt of {settings.categories}")
    return pick(rows, settings.num_prompts)


def measure(
    settings: Compare, drafter: TrainableDrafter, rows: list[Row], server: str, plain: str | None
) -> Iterator[Compared]:
    """Ask both servers for every row in turn, our loop too."""
    limit = settings.max_new_tokens
    models = {address: model_name(address) for address in (server, plain) if address}
    if plain is not None:  # both are warmed up, and their counters at rest
        complete(plain, models[plain], prompt_of(rows[0]), limit)
    counted(server, models[server], prompt_of(rows[0]), limit)
    for row in rows:
        prompt = prompt_of(row)
        without = plain and complete(plain, models[plain], prompt, limit)
        reply, counts = counted(server, models[server], prompt, limit)
        if len(counts.accepted) != settings.draft_length:
            raise ValueError(
                f"server {server!r} drafts {len(counts.accepted)} tokens a round, draft_length is "
                f"{settings.draft_length}; pass the same"
            )
        found = judge(drafter, row, prompt, reply.steps, counts, without and without.tokens)
        found.seconds = without and (without.seconds, reply.seconds)
        yield found


def compare(settings: Compare) -> list[Compared]:
    """Ask, compare, print, write."""
    out = settings.out and report.folder(settings.out)
    lock = only_writer(out / ".engine.lock", f"out {settings.out!r}") if out else nullcontext()
    with lock:
        done = compare_all(settings)
        text = engine_report.summary(done)
        print(f"\n{text}")
        if out:
            write(done, text, settings, out)
    return done


def compare_all(settings: Compare) -> list[Compared]:
    """Every prompt, by the servers that run already or by those started for it."""
    commands.speculative_config(settings.drafter, settings.draft_length)  # or refused
    verifier, drafter = load_pair(
        settings.verifier, settings.drafter, "float32", "cpu", settings.allow_verifier
    )
    if not isinstance(drafter, TrainableDrafter):
        raise ValueError(
            f"drafter {settings.drafter!r}: vLLM looks up other matches than headstart, so there "
            "is nothing to compare; read its acceptance with eval/engine.py metrics"
        )
    check_depth(drafter.max_depth, settings.draft_length, "draft_length")
    rows, done = chosen_rows(settings, verifier), []
    with ExitStack() as stack:
        server, plain = settings.server, settings.plain
        if server is None:
            folder = verifier_of(settings.verifier, settings.drafter)
            server, plain = started(settings, stack, folder)
        for found in measure(settings, drafter, rows, server, plain):
            print(engine_report.line(found), flush=True)
            done.append(found)
    return done


def write(done: list[Compared], text: str, settings: Compare, out: Path) -> None:
    """engine.json and engine.md.

    Raises:
        ValueError: they cannot be written.
    """
    origin = report.provenance(asdict(settings))
    prompts = [asdict(c) | {"equal": c.equal, "explained": c.explained} for c in done]
    result = {"schema": 1, "prompts": prompts, "provenance": origin}
    page = f"# {settings.drafter} in vLLM and here\n\n{text}\n\n`{origin['command']}` at commit "
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "engine.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "engine.md").write_text(f"{page}{origin['commit']}, {origin['time']}.\n")
    except OSError as error:
        raise ValueError(f"out: {out} cannot be written to ({error.strerror})") from error
    print(f"wrote {out}/engine.json, engine.md")


def check(settings: Compare) -> None:
    """Compare; end with code 1 where something differs without a reason."""
    done = compare(settings)
    if not all(c.explained and "different" not in (c.text, c.lossless) for c in done):
        sys.exit(1)


if __name__ == "__main__":
    from headstart.script import run_commands

    run_commands(
        {
            "serve": (Serve, serve),
            "metrics": (Metrics, metrics.run),
            "compare": (Compare, check),
        }
    )
