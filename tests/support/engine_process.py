"""Greedy decoding in a real vLLM, in this process: `python engine_process.py JOB RESULT`.

Run by the engine's own Python, whose environment has no headstart. The job (JSON) has prompts as
token ids, `max_tokens`, and `engines`: for each of them the arguments of an `LLM`. The result is a
list with, for each engine, the tokens of every step of every prompt, and what vLLM counted. With
`may_fail`, an engine that ends with an error has that error's text instead.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.sampling_params import RequestOutputKind

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def counted(llm: LLM) -> dict[str, Any]:
    """The process's counters so far; zeros where nothing was ever drafted."""
    found: dict[str, Any] = dict.fromkeys(COUNTERS, 0) | {"per_position": []}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in COUNTERS:
            found[name] += metric.value
        elif name == "num_accepted_tokens_per_pos":
            found["per_position"] = list(metric.values)
    return found


def steps_of(llm: LLM, number: int, prompt: list[int], max_tokens: int) -> list[list[int]]:
    """The tokens of each step, prefill's first. vLLM's last step may have been cut by the limit."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine, steps = llm.llm_engine, []
    engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        steps += [list(o.outputs[0].token_ids) for o in engine.step() if o.outputs[0].token_ids]
    return steps


def decode(job: dict[str, Any], arguments: dict[str, Any]) -> list[dict[str, Any]] | str:
    try:
        return decoded(job, arguments)
    except Exception as error:  # whatever a broken folder leads to
        if not job.get("may_fail"):
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        cleanup_dist_env_and_memory()
        gc.collect()


def decoded(job: dict[str, Any], arguments: dict[str, Any]) -> list[dict[str, Any]]:
    llm = LLM(
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        **arguments,
    )
    prompts = []
    for number, prompt in enumerate(job["prompts"]):
        before = counted(llm)
        steps = steps_of(llm, number, prompt, job["max_tokens"])
        prompts.append({"steps": steps, "before": before, "after": counted(llm)})
    return prompts


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    results = [decode(job, arguments) for arguments in job["engines"]]
    Path(sys.argv[2]).write_text(json.dumps(results))
