"""LoRA adapters: a verifier may be a model and an adapter that was never merged into it.

Such a verifier is named MODEL+ADAPTER, each a folder or a Hub name. It is merged in memory; what
lies on disk stays as it is.
"""

import importlib
import warnings
from pathlib import Path
from types import ModuleType

from safetensors import SafetensorError
from torch import nn


def split(name: str) -> tuple[str, str | None]:
    """MODEL+ADAPTER -> its parts; of anything else, the name and None."""
    if "+" not in name or Path(name).exists():
        return name, None
    model, _, adapter = name.rpartition("+")
    return model, adapter


def join(model: str, adapter: str | None) -> str:
    """What `split` takes apart."""
    return model if adapter is None else f"{model}+{adapter}"


def merge(model: nn.Module, adapter: str) -> nn.Module:
    """The model with the adapter's changes in its weights.

    Raises:
        ValueError: no such adapter, or one of another model.
    """
    peft = import_peft("adapter")
    try:
        return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"adapter {adapter!r} cannot be read, or is not this verifier's: {lines[0]}; pass the "
            "folder of a LoRA adapter (adapter_config.json) of the same model"
        ) from error


def import_peft(field: str) -> ModuleType:
    """peft, which only adapters need.

    Raises:
        ValueError: it is not installed; `field` asked for it.
    """
    # peft 0.21 asks transformers 5.24 for a name that is to go
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ValueError(
            f"{field}: LoRA needs the package peft; pip install 'headstart[joint]'"
        ) from error
