"""A verifier without most of its layers: all that training reads of it when its states are cached.

Embeddings, final norm and output head, and the last decoder layer, which drafters start from. It
is read from safetensors files, tensor by tensor, so that the rest is never in memory.
"""

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file

from headstart.models.verifier import mimo
from headstart.models.verifier.names import HINT
from headstart.models.verifier.outline import (
    first_line,
    length_of,
    locate,
    needs_trust,
    not_loaded,
    trusted,
)
from headstart.models.verifier.verifier import Verifier

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class PartialVerifier(Verifier):
    """It embeds and projects; it has no states of its own."""

    _path: str | Path

    @classmethod
    def read(cls, name: str, dtype: str, device: torch.device | str) -> "PartialVerifier":
        """Read what is needed of a local folder, a Hub name or `embedded/smollm2-135m`.

        Args:
            dtype: float32 or bfloat16.

        Raises:
            ValueError: no such model, or one that is not stored in safetensors under its own names.
        """
        path = locate(name)
        try:
            trust = {"trust_remote_code": trusted(name)}
            config = AutoConfig.from_pretrained(path, **trust)
            tokenizer = AutoTokenizer.from_pretrained(path, **trust)
            with init_empty_weights(include_buffers=False):  # Gemma's embedding has one
                model = mimo.from_config(config, getattr(torch, dtype), **trust)
            wanted = needed(model)
            tensors = read_tensors(path, wanted, getattr(torch, dtype), device)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            if needs_trust(error):
                raise not_loaded(name, error) from error
            raise ValueError(
                f"verifier {name!r} cannot be read in part: {first_line(error)} {HINT}"
            ) from error
        model.load_state_dict(tensors, strict=False, assign=True)
        model.tie_weights()
        for module in model.modules():
            for own, buffer in module.named_buffers(recurse=False):
                module._buffers[own] = buffer.to(device)
        missing = [n for n in wanted if model.state_dict()[n].is_meta]
        if missing:
            raise ValueError(
                f"verifier {name!r} lacks {len(missing)} of its tensors, {min(missing)} for one"
            )
        with suppress(OSError):  # not every model has one
            model.generation_config = GenerationConfig.from_pretrained(path)
        verifier = cls(model, tokenizer, name, length_of(name, model.config.get_text_config()))
        verifier._path = path
        return verifier

    def _check_logits(self) -> None:
        """It was checked when the states were written, by the whole verifier."""

    def _rows(self, name: str, weight: torch.Tensor, which: slice) -> torch.Tensor:
        """Of a layer that is not here, from its file."""
        if not weight.is_meta:
            return super()._rows(name, weight, which)
        try:
            with safe_open(file_of(self._path, name), framework="pt") as tensors:
                part = tensors.get_slice(name)
                rows = [part[i : i + 1] for i in range(*which.indices(len(weight)))]
        except (KeyError, OSError, SafetensorError) as error:
            raise ValueError(
                f"verifier {self.name!r} cannot be told by its files: {name}: {first_line(error)}"
            ) from error
        stacked = torch.cat(rows)
        return stacked if stacked.dim() > 1 else stacked[:, None]


def needed(model: Any) -> list[str]:
    """Names of all tensors but those of the decoder layers before the last."""
    count = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder()  # a model that reads images has other lists of layers, too
    of_text = [m for m in decoder.children() if isinstance(m, torch.nn.ModuleList)]
    layers = next(
        name
        for name, module in model.named_modules()
        if any(module is found for found in of_text) and len(module) == count
    )
    before = tuple(f"{layers}.{i}." for i in range(count - 1))
    return [name for name in model.state_dict() if not name.startswith(before)]


def file_of(path: str | Path, name: str) -> str:
    """The safetensors file of the model that has the tensor of this name, if any has."""
    return cached_file(path, _weight_map(str(path)).get(name, _SINGLE))


@lru_cache(maxsize=8)
def _weight_map(path: str) -> dict[str, str]:
    index = cached_file(path, _INDEX, _raise_exceptions_for_missing_entries=False)
    return {} if index is None else json.loads(Path(index).read_text())["weight_map"]


def read_tensors(
    path: str | Path, names: list[str], dtype: torch.dtype, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Those of `names` that the model's safetensors files have; tied ones may lack."""
    files = _weight_map(str(path)) or dict.fromkeys(names, _SINGLE)
    found: dict[str, torch.Tensor] = {}
    for file in sorted({files[name] for name in names if name in files}):
        with safe_open(cached_file(path, file), framework="pt") as tensors:
            here = set(tensors.keys())
            for name in names:
                if files.get(name) == file and name in here:
                    found[name] = tensors.get_tensor(name).to(device, dtype)
    return found
