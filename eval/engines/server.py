"""A vLLM of our own: its command line, the process, and a request to it."""

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
from headstart.models.proposal.sampling import Sampling

START_SECONDS = 600  # to wait for a server: loading and compiling a large model takes minutes


def unchecked(config: dict[str, Any]) -> list[str]:
    """Words that let vLLM load a Medusa with a draft vocabulary: it takes that for a tensor which
    it has not loaded, and ends, unless it is told not to check. Config is the checkpoint's."""
    value = json.dumps({"enable_weights_track": False})
    return ["--model-loader-extra-config", value] if "truncated_vocab_size" in config else []


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
