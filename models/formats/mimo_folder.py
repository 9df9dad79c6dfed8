"""A verifier and the module grafted onto it as one model's folder, in MiMo's layout.

vLLM takes an MTP module from its verifier's own folder, where it knows the family with one. MiMo is
the family nearest to Llama, Mistral and Qwen2: its layer is theirs, with biases on queries, keys
and values, and a head of its own. Zeros and a copy of the embedding are written where the verifier
lacks them. All else of it is copied bit by bit, file by file, so that no more than one is held.

Legend: H verifier's hidden size, q and kv width of queries and of keys.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import Qwen2Config

from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import LAYOUTS
from headstart.models.formats.mtp_native import mimo_name
from headstart.models.verifier import outline
from headstart.models.verifier.verifier import Verifier
from headstart.models.verifier.weights import save_tensors

_FAMILIES = ("llama", "mistral", "qwen2", "mimo")
_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
_BIASED = tuple(f".self_attn.{part}_proj.weight" for part in "qkv")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_INDEX = "model.safetensors.index.json"
_LEFT = (  # weights, in whatever format, code, and what describes the original
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json", ".py", ".md",
)  # fmt: skip


def check(drafter: MTP) -> None:
    """Raise a ValueError for a drafter or a verifier that MiMo's layout has no place for."""
    modules = len(drafter.blocks)
    if modules > 1:
        raise ValueError(
            f"to: mimo: vLLM would draft with the first of this drafter's {modules} modules alone; "
            "train one with drafter.num_modules 1"
        )
    for name, value in LAYOUTS["mimo"]._asdict().items():
        if getattr(drafter.wiring, name) != value:
            raise ValueError(
                f"to: mimo: this drafter was trained with {name} {not value}, a MiMo runs with "
                f"{value}; train one with drafter.layout mimo and no wiring of its own"
            )
    _check_verifier(drafter.verifier)


def _check_verifier(verifier: Verifier) -> None:
    reason = _hindrance(verifier)
    if reason is not None:
        raise ValueError(
            f"to: mimo: verifier {verifier.name!r} has no form as a MiMo: {reason}; train EAGLE-3 "
            "for it (train/eagle3.py), which vLLM serves beside any verifier"
        )


def _hindrance(verifier: Verifier) -> str | None:
    """What a MiMo cannot have, or its layer is not."""
    config = verifier.config
    if config.model_type not in _FAMILIES:
        return f"it is of the family {config.model_type}, not {', '.join(_FAMILIES)}"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    reasons = {
        "its weights are quantised": hasattr(verifier.model.config, "quantization_config"),
        f"its heads are {width} wide, not hidden size / heads": (
            width * config.num_attention_heads != config.hidden_size
        ),
        "its attention has a sliding window": getattr(config, "sliding_window", None) is not None,
        "its attention has a bias on the output": getattr(config, "attention_bias", False),
        "its MLP has biases": getattr(config, "mlp_bias", False),
        f"its activation is {config.hidden_act}, not silu": config.hidden_act != "silu",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def files_of(folder: Path) -> list[Path]:
    """The files that transformers reads a model's weights from.

    Raises:
        ValueError: there are none in safetensors.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    try:
        named = json.loads((folder / _INDEX).read_text())["weight_map"].values()
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"to: mimo: verifier {str(folder)!r} has no weights in safetensors; write it anew with "
            "save_pretrained of transformers"
        ) from error
    return [folder / name for name in sorted(set(named))]


def config_of(verifier: Verifier, dtype: torch.dtype) -> dict[str, Any]:
    """The folder's config.json. Transformers knows no `mimo`, so it says Qwen2, whose keys and
    layers these are; vLLM goes by `architectures`."""
    fields = {name: getattr(verifier.config, name, None) for name in _FIELDS}
    config = Qwen2Config(
        **fields,
        use_sliding_window=False,
        tie_word_embeddings=False,
        num_nextn_predict_layers=1,
        architectures=["MiMoForCausalLM"],
        dtype=dtype,
    )
    return config.to_dict()


def module_tensors(drafter: MTP, dtype: torch.dtype) -> dict[str, Tensor]:
    """The module's tensors, by the names of the file."""
    state = drafter.state_dict()
    tensors = {mimo_name(n): t.detach().cpu().to(dtype).contiguous() for n, t in state.items()}
    return tensors | _zero_biases(tensors)


def _zero_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """For each weight of queries, keys and values, `[q, H]` or `[kv, H]`, its bias."""
    weights = {n: t for n, t in tensors.items() if n.endswith(_BIASED)}
    biases = {n.removesuffix("weight") + "bias": t.new_zeros(len(t)) for n, t in weights.items()}
    return {name: bias for name, bias in biases.items() if name not in tensors}


def write(drafter: MTP, out: Path, dtype: torch.dtype) -> int:
    """The folder: the verifier in the precision of its files, the module in `dtype`.

    Returns:
        The number of files with weights.

    Raises:
        ValueError: as `check`; a verifier's folder without its tensors; `out` cannot be written.
    """
    check(drafter)
    verifier = drafter.verifier
    source = outline.folder(verifier.name)
    files, wanted = files_of(source), set(verifier.model.state_dict())
    tied = verifier.head.weight is verifier.model.get_input_embeddings().weight
    wanted -= {_HEAD} if tied else set()
    if lacking := sorted(wanted - _names(files)):
        raise ValueError(
            f"to: mimo: the files of verifier {str(source)!r} have no {lacking[0]}; write it anew "
            "with save_pretrained of transformers"
        )
    biased = any(name.endswith(".self_attn.q_proj.bias") for name in wanted)
    try:
        out.mkdir(parents=True, exist_ok=True)
        weights = _Weights(out, len(files) + 1)
        for file in files:
            with safe_open(file, framework="pt") as opened:
                names = [n for n in opened.keys() if n in wanted]  # noqa: SIM118  (no mapping)
                tensors = {name: opened.get_tensor(name) for name in names}
            if not biased:
                tensors |= _zero_biases(tensors)
            if tied and _EMBEDDING in tensors:
                tensors[_HEAD] = tensors[_EMBEDDING].clone()
            if _EMBEDDING in tensors:
                config = config_of(verifier, tensors[_EMBEDDING].dtype)
            weights.add(tensors)
        weights.add(module_tensors(drafter, dtype))
        weights.write_index()
        for file in sorted(source.iterdir()):  # tokenizer, template, generation config
            if file.is_file() and file.name != "config.json" and not file.name.endswith(_LEFT):
                shutil.copyfile(file, out / file.name)
        # last: without it, nothing takes the folder for a model
        (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"out: {str(out)!r} cannot be written: {error}") from error
    return weights.count


def _names(files: list[Path]) -> set[str]:
    """Of all their tensors.

    Raises:
        ValueError: a file that cannot be read.
    """
    found: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                found.update(opened.keys())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read: {outline.first_line(error)}") from error
    return found


class _Weights:
    """Files of weights, numbered, and their index."""

    def __init__(self, out: Path, count: int):
        self.out, self.count = out, count
        self.places: dict[str, str] = {}  # file of each tensor
        self.files, self.size = 0, 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        self.files += 1
        file = f"model-{self.files:05}-of-{self.count:05}.safetensors"
        save_tensors(tensors, self.out / file, {"format": "pt"})
        self.places |= dict.fromkeys(tensors, file)
        self.size += sum(tensor.nbytes for tensor in tensors.values())

    def write_index(self) -> None:
        index = {"metadata": {"total_size": self.size}, "weight_map": self.places}
        (self.out / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
