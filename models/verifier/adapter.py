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

from headstart.models.verifier.names import check_there


def split(name: str) -> tuple[str, str | None]:
    """MODEL+ADAPTER -> its parts; of anything else, the name and None."""
    if "+" not in name or Path(name).exists():
        return name, None
    model, _, adapter = name.rpartition("+")
    return model, adapter


def join(model: str, adapter: str | None) -> str:
    """What `split` takes apart."""
    return model if adapter is None else f"{model}+{adapter}"


def check_merged(verifier: str, drafter: str) -> None:
    """Raise a ValueError for a verifier with an adapter, which no engine loads as one model."""
    model, adapter = split(verifier)
    if adapter is not None:
        raise ValueError(
            f"verifier: {drafter} drafts for {model} with the adapter {adapter}, and an engine "
            "serves one model: write the two as one (docs/distributed.md) and pass its folder as "
            "--verifier"
        )


def merge(model: nn.Module, adapter: str) -> nn.Module:
    """The model with the adapter's changes in its weights.

    Raises:
        ValueError: no such adapter, one that is not LoRA, or one of another model.
    """
    peft = import_peft("adapter")
    hint = "Pass the folder or the Hub name of a LoRA adapter."
    if not adapter:
        raise ValueError(f"adapter: its name is empty. {hint}")
    check_there("adapter", adapter, hint)
    try:
        kind = str(getattr(peft.PeftConfig.from_pretrained(adapter).peft_type, "value", ""))
        if kind != "LORA":
            raise ValueError(f"it is of type {kind}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*missing adapter keys.*")  # our own error
            adapted = peft.PeftModel.from_pretrained(model, adapter)
        places = set(peft.get_peft_model_state_dict(adapted))
        tensors = set(peft.utils.load_peft_weights(adapter, device="cpu"))
        odd = sorted(places ^ tensors)
        if odd:
            whose = "the adapter lacks" if odd[0] in places else "the verifier has no place for"
            raise ValueError(f"{whose} {len(odd)} tensors, {odd[0]} for one")
        return adapted.merge_and_unload()
    except (
        AttributeError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError,
    ) as error:  # fmt: skip
        lines = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        raise ValueError(
            f"adapter {adapter!r} cannot be read, or is not this verifier's: "
            f"{lines or type(error).__name__}; pass the folder of a LoRA adapter "
            "(adapter_config.json) of the same model"
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
