"""Our checkpoints in a real vLLM process: the text is the verifier's own, and as many drafts are
accepted at each position as by our chain loop.

Needs the engine's environment (`make engine`). Drafters are trained on the spot, far enough to be
right often and wrong often.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from overfit import answered_rows, learn
from vllm_runs import LENGTH, LOSS, K, answered, check, compared, counts
from vllm_runs import pytestmark as pytestmark

from headstart.data.rows.rendering import render_all
from headstart.eval.decoding.trial import pick, prompt_of
from headstart.eval.engines.commands import loader_arguments, speculative_config
from headstart.eval.engines.parity import Compared
from headstart.models.drafter import TrainableDrafter
from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.medusa import Medusa, MedusaConfig
from headstart.models.verifier import embedded
from headstart.models.verifier.verifier import Verifier

Maker = Callable[[Verifier], TrainableDrafter]


def eagle3(**settings: Any) -> Maker:
    config = Eagle3Config(**settings)
    return lambda verifier: Eagle3.create(verifier, config, LOSS, counts(verifier))


def medusa(**settings: Any) -> Maker:
    config = MedusaConfig(**settings)
    return lambda verifier: Medusa.create(verifier, config, LOSS, counts(verifier))


TINY: dict[str, Maker] = {
    "eagle3": eagle3(),
    "eagle3, two layers, draft vocabulary": eagle3(feature_layers=(3, 8), draft_vocab_size=48),
    "eagle3.1": eagle3(norm_output=True, fc_norm=True),
    "eagle1": lambda verifier: Eagle1.create(verifier, Eagle1Config("random", 0.0, 1.0), LOSS),
    "medusa": medusa(shared_projection=False),
    "medusa, shared projection, draft vocabulary": medusa(num_layers=2, draft_vocab_size=48),
    "draft_lm": lambda verifier: DraftLM.create(verifier, DraftLMConfig("layers:0,7"), LOSS),
}


def decoded(
    folder: Path, model: str, drafters: list[str], prompts: list[list[int]]
) -> list[list[dict[str, Any]]]:
    """What vLLM did, without drafts and then with each drafter, of each prompt."""
    engines: list[dict[str, Any]] = [{"model": model, "max_model_len": 256}]
    for drafter in drafters:
        given = {"speculative_config": speculative_config(drafter, K)}
        for name, value in batched(loader_arguments(drafter)):
            given[name.removeprefix("--").replace("-", "_")] = json.loads(value)
        engines.append(engines[0] | given)
    return answered(folder, engines, prompts)


def batched(words: list[str]) -> zip:
    return zip(words[::2], words[1::2], strict=True)


def measured(
    verifier: Verifier,
    makers: dict[str, Maker],
    prompts: list[list[int]],
    folder: Path,
    rate: float,
    model: str,
) -> dict[str, list[Compared]]:
    """Every drafter, half trained on the prompts' answers, here and in one vLLM process."""
    verifier.terminator_ids = ()
    rows = answered_rows(verifier, prompts, LENGTH)
    drafters = {}
    for number, (name, maker) in enumerate(makers.items()):
        torch.manual_seed(number)
        drafters[name] = maker(verifier)
        learn(drafters[name], rows, rate, enough=0.7)
        drafters[name].save(folder / str(number))
    folders = [str(folder / str(number)) for number in range(len(makers))]
    plain, *drafted = decoded(folder, model, folders, prompts)
    return {
        name: compared(drafters[name], rows, plain, one)
        for name, one in zip(makers, drafted, strict=True)
    }


@pytest.fixture(scope="module")
def tiny_runs(tmp_path_factory) -> dict[str, list[Compared]]:
    folder = tmp_path_factory.mktemp("tiny")
    verifier = tiny.verifier(
        hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32,
    )  # fmt: skip
    model = tiny.save(verifier, folder / "verifier")
    random = torch.Generator().manual_seed(8)
    prompts = torch.randint(3, 64, (3, 5), generator=random).tolist()
    return measured(verifier, TINY, prompts, folder, 5e-3, model)


@pytest.mark.parametrize("name", TINY)
def test_vllm_accepts_of_a_tiny_drafter_what_our_loop_does(name, tiny_runs):
    check(tiny_runs[name])


def embedded_runs(makers: dict[str, Maker], folder: Path) -> dict[str, list[Compared]]:
    verifier = Verifier.load(embedded.NAME)
    rows, _ = render_all(
        "data/smollm2/eval.jsonl", verifier.tokenizer, verifier.terminator_ids, 256
    )
    prompts = [prompt_of(row) for row in pick(rows, 3)]
    model = str(embedded.folder())
    return measured(verifier, makers, prompts, folder, 1e-3, model)


def test_vllm_accepts_of_the_embedded_verifiers_eagle3_what_our_loop_does(tmp_path):
    (found,) = embedded_runs({"eagle3": eagle3(draft_vocab_size=2048)}, tmp_path).values()
    check(found)


@pytest.mark.slow
def test_vllm_accepts_of_the_embedded_verifiers_others_what_our_loop_does(tmp_path):
    makers = {
        "eagle1": lambda verifier: Eagle1.create(verifier, Eagle1Config("random", 0.0, 1.0), LOSS),
        "medusa": medusa(draft_vocab_size=2048),
        "draft_lm": lambda v: DraftLM.create(v, DraftLMConfig("layers:0-3,28,29"), LOSS),
    }
    for found in embedded_runs(makers, tmp_path).values():
        check(found)
