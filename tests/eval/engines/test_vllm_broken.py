"""Broken checkpoints in a real vLLM process: each accepts as little as the doctor says, or does not
run, and the doctor names what is broken.

Needs the engine's environment (`make engine`). One EAGLE-3 drafter is trained on the spot until it
knows a tiny verifier's answers, and broken in the ways that other trainers' users met. Beside vLLM
each broken folder is read by our loop as the doctor reads it: the counts are the same.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from broken import (
    Change,
    absolute_map,
    flipped_norm,
    other_theta,
    shifted_layers,
    without_map,
)
from overfit import answered_rows, learn
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm_runs import LENGTH, LOSS, K, answered, counted
from vllm_runs import pytestmark as engine_marks

from headstart.data.conversations import reading
from headstart.eval import doctor
from headstart.eval.doctor import Diagnosis, Doctor
from headstart.eval.engines.commands import speculative_config
from headstart.eval.engines.parity import own_answer
from headstart.eval.health import probe
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.verifier.verifier import Verifier

pytestmark = [*engine_marks, pytest.mark.slow]
NUM_PROMPTS = 6


def random_embeddings(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    random = torch.Generator().manual_seed(0)
    tensors["embed_tokens.weight"] = torch.randn(64, 64, generator=random) * 0.02


BROKEN: dict[str, tuple[str, Change, float]] = {
    # check that names it, what is done, and how much of τ - 1 may be left
    "missing d2t": ("vocabulary map", without_map, 0.5),
    "layer ids one too low": ("layer ids", shifted_layers(-1), 0.85),
    "layer ids one too high": ("layer ids", shifted_layers(1), 0.85),
    "norm_before_residual flipped": ("norm_before_residual", flipped_norm, 0.5),
    "random embed_tokens": ("embed_tokens", random_embeddings, 0.5),
    "rope theta wrong": ("rope", other_theta, 0.5),
    "absolute d2t": ("vocabulary map", absolute_map, 0.0),  # vLLM does not run it
}


class Served(NamedTuple):
    """A folder, as the doctor and vLLM found it."""

    diagnosis: Diagnosis
    error: str | None
    """vLLM's, where it ended with one."""
    rounds: int
    accepted: list[int]
    """By position, in vLLM."""
    ours: tuple[int, list[int]] | None
    """The same of our loop; None: the doctor says that it cannot be run."""
    texts: list[list[int]]

    @property
    def length(self) -> float:
        return 1 + sum(self.accepted) / self.rounds


def changed(source: Path, folder: Path, change: Change) -> str:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def prompts_of(folder: Path, verifier: Verifier) -> tuple[Doctor, list[list[int]]]:
    """The doctor's settings, with prompts of a word each, and these as tokens."""
    with (folder / "prompts.jsonl").open("w") as file:
        for i in range(NUM_PROMPTS):
            row = {"messages": [{"role": "user", "content": f"w{i} w{7 + 3 * i}"}]}
            file.write(json.dumps(row) + "\n")
    asked = [c.asked() for c in reading.read(str(folder / "prompts.jsonl"))]
    ids = [
        verifier.tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False)
        for one in asked
    ]
    path = str(folder / "prompts.jsonl")
    settings = Doctor("", prompts=path, num_prompts=NUM_PROMPTS, max_new_tokens=LENGTH)
    settings.draft_length = K
    return settings, ids


def ours(drafter: str, verifier: Verifier, prompts: list[list[int]]) -> tuple | None:
    """Rounds and accepted drafts of our loop, with the folder as the doctor reads it."""
    made = probe.drafter_of(doctor.admit(drafter, verifier), verifier)
    if made is None:
        return None
    answers = [own_answer(verifier, made, prompt, K, LENGTH) for prompt in prompts]
    positions = [sum(column) for column in zip(*(a.by_position(K) for a in answers), strict=True)]
    return sum(len(a.accepted) for a in answers), positions


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> dict[str, Served]:
    folder = tmp_path_factory.mktemp("doctor")
    made = tiny.verifier(
        hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    model = tiny.save(made, folder / "verifier")
    verifier = Verifier.load(model)
    settings, prompts = prompts_of(folder, verifier)
    rows, _, _ = doctor.texts(settings, SimpleNamespace(recorded=None), verifier)
    terminators, verifier.terminator_ids = verifier.terminator_ids, ()
    rows += answered_rows(verifier, prompts, LENGTH + K + 1)  # vLLM writes over terminators
    verifier.terminator_ids = terminators
    torch.manual_seed(0)
    # the ids that are left out are the first, so that without a map all are off
    config = Eagle3Config(draft_vocab_size=60, init="random")
    drafter = Eagle3.create(verifier, config, LOSS, torch.arange(64))
    learn(drafter, rows, 5e-3, enough=0.99)
    drafter.save(folder / "sound")
    folders = {"sound": str(folder / "sound")} | {
        name: changed(folder / "sound", folder / f"broken-{number}", change)
        for number, (name, (_, change, _)) in enumerate(BROKEN.items())
    }
    engines = [
        {"model": model, "max_model_len": 256, "speculative_config": speculative_config(drafter, K)}
        for drafter in folders.values()
    ]
    found = {}
    for (name, path), done in zip(
        folders.items(), answered(folder, engines, prompts, may_fail=True), strict=True
    ):
        diagnosis = doctor.diagnose(settings, doctor.admit(path, verifier), verifier)
        here = ours(path, verifier, prompts)
        if isinstance(done, str):
            found[name] = Served(diagnosis, done, 0, [], here, [])
            continue
        pages = [counted(one["after"]).since(counted(one["before"])) for one in done]
        accepted = [round(sum(c)) for c in zip(*(page.accepted for page in pages), strict=True)]
        texts = [[token for step in one["steps"] for token in step] for one in done]
        rounds = round(sum(page.rounds for page in pages))
        found[name] = Served(diagnosis, None, rounds, accepted, here, texts)
    print(f"\n{table(found)}")
    return found


def table(found: dict[str, Served]) -> str:
    sound = found["sound"].length
    rows = ["| defect | the doctor | τ in vLLM, sound | broken |", "|---|---|---|---|"]
    for name, one in found.items():
        says = "; ".join(f"{f.check}: {f.what}" for f in one.diagnosis.defects) or "no defect"
        broken = f"{one.length:.2f}" if one.error is None else f"ends with {one.error[:60]}"
        rows.append(f"| {name} | {says} | {sound:.2f} | {broken} |")
    return "\n".join(rows)


def test_a_sound_checkpoint_has_no_defect_and_is_accepted(served):
    one = served["sound"]
    assert one.diagnosis.defects == [] and one.error is None
    assert one.length > 3.0 and (one.rounds, one.accepted) == one.ours


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_named_and_accepted_as_little_as_the_doctor_says(name, served):
    check, _, left = BROKEN[name]
    sound, one = served["sound"], served[name]
    assert check in {finding.check for finding in one.diagnosis.defects}
    if one.error is not None:
        assert one.ours is None and one.diagnosis.measured is None  # the doctor: cannot be run
        return
    assert (one.rounds, one.accepted) == one.ours
    assert one.length - 1 < left * (sound.length - 1)
    assert one.texts == sound.texts  # of all this the text shows nothing
