"""Exported drafters in a real llama.cpp process: the text is the verifier's own, with and without
them, and as large a share of the drafts is accepted as in our chain loop.

Needs the environments of `make engine`. Verifier and drafters are written by models/export.py;
drafters are trained on the spot, far enough to be right often and wrong often. llama.cpp counts
drafts near an answer's end otherwise than vLLM, so shares are compared, not counts.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from overfit import answered_rows, learn

from headstart.eval.decoding.lossless import compare
from headstart.eval.engines.parity import TIE, own_answer
from headstart.models import export
from headstart.models.drafter import TrainableDrafter
from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.export import Export
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier
from headstart.script import ROOT

ENGINE = ROOT / ".venv-llama-cpp"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not (ENGINE / "installed").exists(),
        reason="needs llama.cpp in .venv-llama-cpp: make engine",
    ),
]
K, LENGTH = 3, 32
LOSS = LossConfig("hard_ce", num_steps=K, gamma=1.0)
Maker = Callable[[Verifier], TrainableDrafter]
DRAFTERS: dict[str, tuple[str, Maker]] = {
    "eagle3": (
        "draft-eagle3",
        lambda v: Eagle3.create(v, Eagle3Config(), LOSS, torch.ones(v.vocab_size)),
    ),
    "eagle3, draft vocabulary": (
        "draft-eagle3",
        lambda v: Eagle3.create(v, Eagle3Config(draft_vocab_size=280), LOSS, torch.arange(300)),
    ),
    "draft_lm": ("draft-simple", lambda v: DraftLM.create(v, DraftLMConfig("layers:0,7"), LOSS)),
}


def written(drafter: str, verifier: str, out: Path) -> str:
    export.run(Export(drafter, "gguf", str(out), verifier))
    return str(out)


def run(folder: Path, job: dict) -> list[list[dict]]:
    (folder / "job.json").write_text(json.dumps(job))
    script = ROOT / "tests" / "support" / "llama_process.py"
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [ENGINE / "bin" / "python", script, folder / "job.json", folder / "result.json"],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    assert done.returncode == 0, (folder / "log").read_text()[-4000:]
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[float, list[dict], list[str]]]:
    """Of each drafter, and without any: the share of drafts that our loop accepts, what llama.cpp
    did of each prompt, and how its text compares with ours."""
    folder = tmp_path_factory.mktemp("llama")
    made = tiny.verifier(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    model = tiny.save(Verifier(made.model, tiny.byte_level(300), "tiny"), folder / "verifier")
    verifier = Verifier.load(model)
    verifier.terminator_ids = ()
    random = torch.Generator().manual_seed(8)
    prompts = torch.randint(3, 300, (4, 6), generator=random).tolist()
    rows = answered_rows(verifier, prompts, LENGTH)
    drafters, shares = [None], {"none": 0.0}
    for number, (name, (kind, maker)) in enumerate(DRAFTERS.items()):
        torch.manual_seed(number)
        drafter = maker(verifier)
        learn(drafter, rows, 5e-3, enough=0.8)
        drafter.save(folder / str(number))
        file = written(str(folder / str(number)), model, folder / f"{number}.gguf")
        drafters.append([file, kind])
        answers = [own_answer(verifier, drafter, prompt, K, LENGTH) for prompt in prompts]
        accepted = sum(sum(a.accepted) for a in answers)
        shares[name] = accepted / (K * sum(len(a.accepted) for a in answers))
    job = {"model": written(model, model, folder / "verifier.gguf"), "drafters": drafters,
           "prompts": prompts, "max_tokens": LENGTH, "draft_length": K}  # fmt: skip
    found = {}
    for name, done in zip(shares, run(folder, job), strict=True):
        verdicts = [
            compare(verifier, prompt, row.input_ids[len(prompt) :], one["tokens"], TIE)
            for prompt, row, one in zip(prompts, rows, done, strict=True)
        ]
        found[name] = shares[name], done, verdicts
    return found


def test_llama_cpp_s_verifier_writes_the_text_of_ours(runs):
    _, done, verdicts = runs["none"]
    assert set(verdicts) <= {"identical", "tie"} and verdicts.count("identical") >= 3
    assert all(one["drafted"] == 0 for one in done)


@pytest.mark.parametrize("name", DRAFTERS)
def test_llama_cpp_s_text_is_the_same_with_drafts_and_without(name, runs):
    (_, plain, _), (_, done, _) = runs["none"], runs[name]
    assert [one["tokens"] for one in done] == [one["tokens"] for one in plain]


@pytest.mark.parametrize("name", DRAFTERS)
def test_llama_cpp_accepts_as_large_a_share_as_our_loop(name, runs):
    ours, done, _ = runs[name]
    share = sum(one["accepted"] for one in done) / sum(one["drafted"] for one in done)
    print(f"{name}: llama.cpp accepts {share:.3f} of its drafts, our loop {ours:.3f}")
    assert 0.3 < ours < 0.97 and abs(share - ours) < 0.1
