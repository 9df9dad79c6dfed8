"""Serving a drafter with vLLM: the command, the process, and a request to it.

What vLLM accepts in silence and serves badly is refused here: a method told by the folder's name,
more Medusa heads than there are, a drafter of a kind that it does not know.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.data.answers.request_law import LeftOut, law_fields, refused_fields
from headstart.models import loading
from headstart.models.drafters.lookup import PromptLookupConfig
from headstart.models.formats import imports, mtp_native
from headstart.models.proposal.sampling import Sampling
from headstart.models.saved import kind_in, read_config
from headstart.models.verifier import embedded
from headstart.models.verifier.adapter import check_merged
from headstart.models.verifier.names import check_there, is_embedded
from headstart.script import options

START_SECONDS = 600  # to wait for a server: loading and compiling a large model takes minutes
LOOKUP = "prompt-lookup"


def speculative_config(drafter: str, draft_length: int) -> dict[str, Any]:
    """What vLLM is told of a drafter.

    Args:
        drafter: the folder of a checkpoint; prompt-lookup, options behind a colon (vLLM calls it
            ngram); a verifier's folder with an MTP module in it; or any causal language model with
            the verifier's tokenizer.

    Raises:
        ValueError: a drafter that vLLM cannot serve, or not with so many drafts.
    """
    if draft_length < 1:
        raise ValueError(f"draft_length must be 1 or more, got {draft_length}")
    kind = drafter.partition(":")[0]
    if kind == LOOKUP:
        lookup = options(drafter, PromptLookupConfig)
        return {
            "method": "ngram",
            "num_speculative_tokens": draft_length,
            "prompt_lookup_max": lookup.max_ngram,
            "prompt_lookup_min": lookup.min_ngram,
        }
    if kind in loading.LOOKUPS:
        raise ValueError(
            f"drafter {drafter!r}: vLLM knows no {kind}; pass {LOOKUP} or a checkpoint"
        )
    if kind == "layers":
        raise ValueError(
            f"drafter {drafter!r}: vLLM needs a folder; train one from these layers with "
            f"train/draft_lm.py --drafter.init {drafter} and serve its checkpoint"
        )
    if mtp_native.holds_modules(drafter):  # vLLM reads them where it reads the verifier
        return {"method": "mtp", "num_speculative_tokens": draft_length}
    if kind_in(drafter) is not None:
        method = imported_method(drafter, draft_length)
    elif loading.is_checkpoint(drafter):
        method = method_of(drafter, draft_length)
    else:
        check_there("drafter", drafter)
        method = "draft_model"
    folder = str(embedded.folder(drafter)) if is_embedded(drafter) else drafter
    return {"method": method, "model": folder, "num_speculative_tokens": draft_length}


def method_of(drafter: str, draft_length: int) -> str:
    """vLLM's name of a checkpoint's method.

    Raises:
        ValueError: it has none, or drafts less in a row.
    """
    config = read_config(drafter)
    entry = config["headstart"]
    if entry["type"] == "mtp":
        if entry.get("num_modules", 1) > 1:
            raise ValueError(
                f"drafter {drafter!r} has {entry['num_modules']} MTP modules, of which vLLM runs "
                "one; train one with drafter.num_modules 1, or decode with headstart's own loop"
            )
        raise ValueError(
            f"drafter {drafter!r} is an MTP module, which vLLM reads from its verifier's folder; "
            f"write both as one with models/export.py {drafter} --to mimo --out FOLDER, then serve "
            "FOLDER"
        )
    known = loading.CLASSES.get(entry["type"])
    if known is None:
        raise ValueError(
            f"drafter {drafter!r} is of type {entry['type']!r}, which this version of headstart "
            f"does not know; it knows {', '.join(loading.CLASSES)}"
        )
    if known.serving is None:
        raise ValueError(
            f"drafter {drafter!r} is of type {entry['type']}, which vLLM does not load; "
            "headstart's own loop decodes with it (eval/acceptance.py)"
        )
    if "adapter" in entry:
        raise ValueError(
            f"drafter {drafter!r} drafts for a verifier that was trained with it, by an adapter; "
            "vLLM would serve the original one: merge the adapter into a copy of the verifier first"
        )
    check_heads(drafter, config.get("num_heads"), draft_length)
    if "truncated_vocab_size" in config and not config["original_lm_head"]:
        raise ValueError(
            f"drafter {drafter!r} has heads of its own over a draft vocabulary, which vLLM does "
            "not load; train it with drafter.shared_projection true, or without draft_vocab_size"
        )
    if entry["type"] == "draft_lm" and config["vocab_size"] != entry["target_vocab_size"]:
        raise ValueError(
            f"drafter {drafter!r} has {config['vocab_size']} tokens, its verifier "
            f"{entry['target_vocab_size']}, and vLLM wants the same number; pad its embeddings"
        )
    return known.serving


def imported_method(drafter: str, draft_length: int) -> str:
    """vLLM's name of the method of a drafter that another program saved.

    Raises:
        ValueError: a kind that headstart does not know, or one written for another engine.
    """
    kind, config = (
        kind_in(drafter),
        json.loads(Path(drafter, "config.json").read_text()),
    )
    if kind not in imports.CLASSES:
        raise ValueError(
            f"drafter {drafter!r} is of speculators' kind {kind}, which headstart does not know; "
            "see vLLM's documentation for its command"
        )
    if config.get("layer_ids_of") == imports.SGLANG_IDS:
        raise ValueError(
            f"drafter {drafter!r} was written for SGLang, which numbers layers otherwise than "
            "vLLM; serve the checkpoint that it was made from"
        )
    check_heads(drafter, config.get("medusa_num_heads", config.get("num_heads")), draft_length)
    return imports.CLASSES[kind].serving


def check_heads(drafter: str, heads: int | None, draft_length: int) -> None:
    """Raise a ValueError for more drafts than a drafter with heads has of them."""
    if heads is not None and draft_length > heads:
        raise ValueError(
            f"draft_length is {draft_length}, but {drafter!r} has {heads} heads, and vLLM would "
            f"draft with heads of random weights; pass {heads} or less"
        )


def loader_arguments(drafter: str) -> list[str]:
    """What `vllm serve` must be told besides."""
    if not loading.is_checkpoint(drafter) and kind_in(drafter) is None:
        return []
    return unchecked(json.loads(Path(drafter, "config.json").read_text()))


def unchecked(config: dict[str, Any]) -> list[str]:
    """Words that let vLLM load a Medusa with a draft vocabulary: it takes that for a tensor which
    it has not loaded, and ends, unless it is told not to check. Config is the checkpoint's."""
    value = json.dumps({"enable_weights_track": False})
    return ["--model-loader-extra-config", value] if "truncated_vocab_size" in config else []


def verifier_of(verifier: str | None, drafter: str) -> str:
    """The folder or Hub name to serve: the drafter's own verifier when none is given.

    Raises:
        ValueError: neither tells, or both.
    """
    if mtp_native.holds_modules(drafter):
        if verifier not in (None, drafter):
            raise ValueError(
                f"verifier: {drafter!r} is a verifier with an MTP module of its own, which drafts "
                "for no other; leave it out"
            )
        return drafter
    if verifier is None and loading.is_checkpoint(drafter):
        verifier = read_config(drafter)["headstart"]["verifier"]
    if verifier is None:
        raise ValueError(
            f"verifier: {drafter} was made for none in particular; pass --verifier, such as "
            f"{embedded.NAME}"
        )
    check_merged(verifier, drafter)
    check_there("verifier", verifier)
    return str(embedded.folder(verifier)) if is_embedded(verifier) else verifier


def command(verifier: str, config: dict[str, Any] | None, arguments: list[str]) -> list[str]:
    """`vllm serve …`, without drafts where `config` is None."""
    words = ["vllm", "serve", verifier, *arguments]
    return words if config is None else [*words, "--speculative-config", json.dumps(config)]


def executable(engine: str) -> str:
    """vLLM's console command.

    Args:
        engine: folder of the environment that vLLM is installed in.

    Raises:
        ValueError: there is none.
    """
    found = shutil.which("vllm", path=str(Path(engine, "bin"))) or shutil.which("vllm")
    if found is None:
        raise ValueError(
            f"engine: no vllm in {engine!r}, nor on PATH; make one with `make engine`, or pass the "
            "folder of the environment that has it"
        )
    return str(Path(found).absolute())


def cpu_environment(program: str) -> dict[str, str]:
    """What vLLM's build for CPUs needs to be fast, as far as the caller has not set it; nothing of
    another build."""
    openmp = Path(program).parent.parent / "lib" / "libiomp5.so"
    if not openmp.is_file():
        return {}
    cores = sorted(os.sched_getaffinity(0))
    wanted = {
        "LD_PRELOAD": str(openmp),  # else a fraction of the speed
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # else one core is left idle
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; else a good part of the machine's memory
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def shown(words: list[str], environment: dict[str, str]) -> str:
    """A command as one would type it."""
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in environment.items()), shlex.join(words)])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(
    verifier: str, config: dict[str, Any] | None, engine: str, arguments: list[str], log: Path
) -> Iterator[str]:
    """A server of our own on loopback, for as long as the block lasts; yields its address.

    Raises:
        ValueError: it does not start; `log` says why.
    """
    program, port = executable(engine), free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), *arguments]
    words = [program, *command(verifier, config, arguments)[1:]]
    environment = os.environ | cpu_environment(program)
    with log.open("w") as file:
        process = subprocess.Popen(
            words, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(process, address, log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen, address: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ValueError(f"engine: vLLM ended at its start ({_reason(log)}); see {log}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise ValueError(f"engine: vLLM did not answer within {START_SECONDS} s; see {log}")


def _reason(log: Path) -> str:
    """The last line of a log that names an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return (named or lines or ["no output"])[-1]


@dataclass
class Reply:
    """What a server wrote."""

    steps: list[list[int]]
    """Tokens as they came: prefill's, then those of each round."""
    seconds: float

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step]


def model_name(server: str) -> str:
    """Of the model that is served.

    Raises:
        ValueError: no server there.
    """
    try:
        with urllib.request.urlopen(f"{server}/v1/models", timeout=30) as answer:
            return json.load(answer)["data"][0]["id"]
    except (OSError, urllib.error.URLError, LookupError, ValueError) as error:
        raise ValueError(
            f"server {server!r} does not answer as vLLM does ({error}); is it running there?"
        ) from error


def complete(server: str, model: str, prompt: list[int], max_new_tokens: int) -> Reply:
    """Continue a prompt greedily by exactly so many tokens.

    Raises:
        ValueError: the server refuses it, or goes away.
    """
    asked = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_new_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    } | law_fields(Sampling())
    left_out, refused = LeftOut(server), set[str]()
    while True:
        body = left_out.of(asked, refused)
        try:
            reply = _streamed(server, body)
        except urllib.error.HTTPError as error:
            told = error.read().decode(errors="replace")
            named = refused_fields(error.code, told, body)
            if not named:
                raise ValueError(f"server {server!r} did not complete a prompt: {told}") from error
            refused |= named
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"server {server!r} did not complete a prompt: {error}") from error
        else:
            left_out.settle(refused)
            return reply


def _streamed(server: str, body: dict[str, Any]) -> Reply:
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server}/v1/completions", json.dumps(body).encode(), kind)
    steps, began = [], time.monotonic()
    with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
        for line in answer:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                tokens = json.loads(data)["choices"][0]["token_ids"]
                steps += [tokens] if tokens else []
    return Reply(steps, time.monotonic() - began)
