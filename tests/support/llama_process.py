"""Greedy decoding in a real llama.cpp, in this process: `python llama_process.py JOB RESULT`.

Run by the Python of an environment with xllamacpp, which has no headstart. The job (JSON) has the
verifier's GGUF file, `drafters` (null, or a file and its kind), `prompts` as token ids,
`max_tokens` and `draft_length`. The result is a list with, for each of the drafters, what became of
each prompt: its tokens, and how many drafts were made and accepted.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp


def started(job: dict[str, Any], drafter: list[str] | None) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_ctx, params.n_parallel, params.port = 512, 1, 0
    params.warmup = params.cache_prompt = False
    whole = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_k = params.cache_type_v = whole
    threads = [params.cpuparams, params.cpuparams_batch]
    if drafter is not None:
        file, kind = drafter
        draft = params.speculative.draft
        draft.mparams.path = file
        draft.cache_type_k = draft.cache_type_v = whole
        draft.n_max, draft.n_min, draft.p_min = job["draft_length"], 0, 0.0
        threads += [draft.cpuparams, draft.cpuparams_batch]
        name = f"COMMON_SPECULATIVE_TYPE_{kind.upper().replace('-', '_')}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    for cpu in threads:
        cpu.n_threads = 1
    return xllamacpp.Server(params)


def complete(address: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    asked = {
        "prompt": prompt,
        "n_predict": max_tokens,
        "temperature": 0,
        "return_tokens": True,
        "cache_prompt": False,
    }
    body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}/completion", body, kind)
    ) as answer:
        found = json.load(answer)
    times = found["timings"]
    return {
        "tokens": found["tokens"],
        "drafted": times.get("draft_n", 0),
        "accepted": times.get("draft_n_accepted", 0),
    }


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for drafter in job["drafters"]:
        server = started(job, drafter)
        address = server.listening_address
        results.append([complete(address, p, job["max_tokens"]) for p in job["prompts"]])
        del server
    Path(sys.argv[2]).write_text(json.dumps(results))
