"""Tiny runs of every train script."""

import copy
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch
from accelerate.state import AcceleratorState

from headstart.models.drafters.draft_lm import DraftLMConfig
from headstart.models.drafters.eagle3 import Eagle3Config
from headstart.models.drafters.hydra_heads import HydraHeadsConfig
from headstart.models.drafters.medusa import MedusaConfig
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.joint.lora import JointConfig
from headstart.models.losses import LossConfig
from headstart.train import draft_lm, eagle1, eagle3, hydra_heads, medusa, mtp
from headstart.train.run.settings import CommonRecipe, DataConfig, TrainingConfig

ONES = torch.ones(64)


FOUR_HEADS = {"loss": LossConfig(num_steps=4)}


SCRIPTS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "eagle3": (eagle3, {"drafter": Eagle3Config(draft_vocab_size=32)}),
    "eagle1": (eagle1, {}),
    "draft_lm": (
        draft_lm,
        {"drafter": DraftLMConfig("layers:0,1,7"), "loss": LossConfig(num_steps=1)},
    ),
    "medusa": (medusa, {"drafter": MedusaConfig(shared_projection=False), **FOUR_HEADS}),
    "medusa, shared projection": (
        medusa,
        {"drafter": MedusaConfig(num_layers=2, draft_vocab_size=32), **FOUR_HEADS},
    ),
    "hydra_heads": (
        hydra_heads,
        {"drafter": HydraHeadsConfig(num_layers=2, draft_vocab_size=32), **FOUR_HEADS},
    ),
    "mtp": (mtp, {"drafter": MTPConfig(num_modules=2)}),
}


# its adapter lies apart, see tests/models/joint/test_lora.py
JOINT = {"medusa-2": (medusa, {"joint": JointConfig(rank=2), **FOUR_HEADS})}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tiny.verifier(), tmp_path_factory.mktemp("verifier"))


def write_conversations(path: Path, count: int, seed: int) -> str:
    words = random.Random(seed)

    def text(least: int, most: int) -> str:
        return " ".join(f"w{words.randrange(50)}" for _ in range(words.randint(least, most)))

    with path.open("w") as file:
        for number in range(count):
            turns = [
                {"role": "user", "content": text(2, 6)},
                {"role": "assistant", "content": text(4, 12)},
            ] * 2
            file.write(json.dumps({"id": f"{seed}-{number}", "messages": turns}) + "\n")
    return str(path)


def recipe(folder: Path, verifier: str, kind: str = "eagle3", **training: Any) -> CommonRecipe:
    data = DataConfig(
        write_conversations(folder / "train.jsonl", 12, seed=1),
        write_conversations(folder / "eval.jsonl", 5, seed=2),
        max_length=64,
        batch_tokens=128,
        eval_limit=3,
    )
    training = {"max_steps": 4, "mixed_precision": "no", "validate_every": 2} | training
    script, settings = (SCRIPTS | JOINT)[kind]
    training = TrainingConfig(str(folder / "run"), **training)
    settings = {"loss": LossConfig(num_steps=2)} | copy.deepcopy(settings)
    return script.Recipe(data, training, verifier, **settings)


def run(recipe: CommonRecipe) -> None:
    AcceleratorState._reset_state()
    script = next(s for s, _ in SCRIPTS.values() if isinstance(recipe, s.Recipe))
    script.run(recipe)
