"""A draft model as a GGUF file."""

from pathlib import Path

import tiny
import torch
from transformers import PreTrainedTokenizerBase

from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.formats import gguf_file
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier

LOSS = LossConfig(num_steps=3)


def verifier(
    family: str = "llama", tokenizer: PreTrainedTokenizerBase | None = None, **settings
) -> Verifier:
    made = tiny.verifier(family, vocab_size=300, **settings)
    return Verifier(made.model, tokenizer or tiny.byte_level(300), made.name)


def draft_lm(target: Verifier) -> DraftLM:
    return DraftLM.create(target, DraftLMConfig("layers:0,3,7"), LOSS)


def exported(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **more
) -> Path:
    gguf_file.write(draft_lm(verifier(family, **more)), folder / "draft.gguf", dtype, None)
    return folder / "draft.gguf"
