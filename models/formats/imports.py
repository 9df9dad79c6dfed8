"""Drafters that other programs saved, read as headstart's own.

Known by their config and tensor names: speculators' EAGLE-3 folders, EAGLE-3 and EAGLE-1 in the
layout of the original code (which vLLM and SGLang load too), and Medusa in its original layout or
vLLM's. Tensors keep their bits; a missing piece is refused by its name. What they do not say is
for which verifier they were made: only shapes can be checked, and the measured acceptance.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from headstart.models import vocab
from headstart.models.drafter import TrainableDrafter
from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.drafters.eagle3 import LAYERS, Eagle3, check_layers, with_layer_ids
from headstart.models.drafters.medusa import Medusa, MedusaLayout
from headstart.models.formats import layouts
from headstart.models.losses import LossConfig
from headstart.models.saved import check_shape, config_in, explained, kind_in, made_for, unreadable
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import Verifier

CLASSES: dict[str, type[TrainableDrafter]] = {"eagle3": Eagle3, "eagle1": Eagle1, "medusa": Medusa}
SGLANG_EAGLE = "LlamaForCausalLMEagle"  # SGLang's name of an EAGLE-1
SGLANG_IDS = "sglang"  # `layer_ids_of` in a config that headstart wrote for SGLang
_FILES = (
    "model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt",
)  # fmt: skip


def load(folder: str | Path, verifier: Verifier, loss: LossConfig) -> TrainableDrafter:
    """The drafter, for this verifier from now on.

    Raises:
        ValueError: a kind that headstart has not, a setting it cannot follow, a tensor that is
            missing, or a verifier of another shape.
    """
    kind, config, tensors = read(folder, verifier)
    with explained(folder):
        return CLASSES[kind].load(Path(folder), config, verifier, loss, tensors)


def read(folder: str | Path, verifier: Verifier) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Its kind, its config in headstart's keys, its tensors in headstart's names.

    Raises:
        ValueError: as `load`.
    """
    kind, config, tensors = translate(folder, verifier)
    check_shape(folder, config, verifier)
    check_tensors(Path(folder), kind, config, tensors)
    if "d2t" in tensors and not is_map(tensors["d2t"], config["vocab_size"]):
        raise ValueError(
            f"drafter {str(folder)!r}: d2t, read as offsets, gives no ascending ids below "
            f"{config['vocab_size']}; see what is wrong with eval/doctor.py"
        )
    return kind, config, tensors


def translate(
    folder: str | Path, verifier: Verifier
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """What `read` gives, whether or not it is whole.

    Raises:
        ValueError: a kind that headstart has not, or a setting it cannot follow.
    """
    kind, config, tensors = describe(folder, verifier)
    if kind != "medusa":
        drop_shared_embeddings(tensors, verifier)
    config["headstart"] = made_for(verifier, kind)
    if kind == "eagle1":
        settings = Eagle1Config()
        config["headstart"] |= {"noise": settings.noise, "token_weight": settings.token_weight}
    return kind, config, tensors


def describe(
    folder: str | Path, verifier: Verifier | Outline
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Its kind, its config in headstart's keys with the kind as `headstart` entry, and its tensors
    in headstart's names.

    Raises:
        ValueError: a kind that headstart has not, or a setting it cannot follow.
    """
    folder, kind = Path(folder), kind_in(folder)
    if kind not in CLASSES:
        raise ValueError(
            f"drafter {str(folder)!r} is of type {kind!r}, which headstart does not read; it reads "
            f"{', '.join(CLASSES)}"
        )
    found, tensors = config_in(folder), read_any(folder)
    with explained(folder):
        if kind == "medusa":
            config, tensors = _medusa(folder, found, tensors, verifier)
        elif kind == "eagle1":
            tensors = {layouts.eagle1_name(name): tensor for name, tensor in tensors.items()}
            config = _eagle1_config(folder, found, tensors)
        else:
            tensors = {layouts.eagle3_name(name): tensor for name, tensor in tensors.items()}
            config = _eagle3_config(folder, found, tensors, verifier.num_layers)
    return kind, config | {"headstart": {"type": kind}}, tensors


def read_any(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, whatever its file is called.

    Raises:
        ValueError: no such file, or a damaged one.
    """
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(
            f"drafter {str(folder)!r} has no weights: none of {', '.join(_FILES)} is there; "
            "download the whole folder"
        )
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        return {name: tensor.contiguous() for name, tensor in tensors.items()}
    except Exception as error:  # whatever a damaged file makes its reader raise
        raise unreadable(folder, f"{file.name}: {error}") from error


def check_tensors(
    folder: Path, kind: str, config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Raise a ValueError that names what is missing, of another shape, or has no place."""
    required, optional = layouts.required(kind, config), layouts.optional(kind, config)
    missing = [name for name in required if name not in tensors]
    if missing:
        raise ValueError(
            f"drafter {str(folder)!r} lacks {len(missing)} of its {len(required)} tensors: "
            f"{', '.join(missing[:4])}; is the folder complete?"
        )
    for name, tensor in tensors.items():
        wanted = required.get(name) or optional.get(name)
        if wanted is None:
            raise ValueError(
                f"drafter {str(folder)!r}: headstart's {kind} has no place for its tensor {name}; "
                "what it does would be left out"
            )
        if tuple(tensor.shape) != wanted:
            raise ValueError(
                f"drafter {str(folder)!r}: {name} is {list(tensor.shape)}, its config.json asks "
                f"for {list(wanted)}; they do not belong together"
            )


def is_map(offsets: Tensor, vocab_size: int) -> bool:
    """Whether i + offsets[i] are ascending ids of the verifier's vocabulary."""
    return vocab.is_ascending(offsets + torch.arange(len(offsets)), vocab_size)


def members(offsets: Tensor, vocab_size: int) -> Tensor:
    """t2d of a map: which of the verifier's ids it has, bool [V]."""
    ids = offsets + torch.arange(len(offsets))
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)


def drop_shared_embeddings(tensors: dict[str, Tensor], verifier: Verifier) -> None:
    """Leave out embeddings that are the verifier's own: engines share them all the same."""
    own = tensors.get("embed_tokens.weight")
    theirs = verifier.model.get_input_embeddings().weight.cpu()
    if own is not None and own.shape == theirs.shape and torch.equal(own, theirs.to(own.dtype)):
        del tensors["embed_tokens.weight"]


# ---- configs -----------------------------------------------------------------------------------


def _llama_config(folder: Path, found: dict[str, Any], **own: Any) -> dict[str, Any]:
    """A whole config of one Llama layer, with rope settings in today's keys."""
    for field in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if found.get(field) is None:
            raise ValueError(f"drafter {str(folder)!r}: {field} is missing from its config.json")
    wanted = {
        "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "norm_before_fc": False,
    }  # fmt: skip
    for field, value in wanted.items():
        if found.get(field, value) != value:
            raise ValueError(
                f"drafter {str(folder)!r}: {field} is {found[field]!r} in its config.json; "
                f"headstart's drafters have {value!r} there"
            )
    fields = (*layouts.LLAMA_FIELDS, "rope_parameters", "rope_theta", "rope_scaling")
    kept = {field: found[field] for field in fields if found.get(field) is not None}
    layer = LlamaConfig(**kept, num_hidden_layers=1, tie_word_embeddings=False, dtype="float32")
    return layer.to_dict() | own


def _eagle3_config(
    folder: Path, found: dict[str, Any], tensors: dict[str, Tensor], num_layers: int
) -> dict[str, Any]:
    layer = found.get("transformer_layer_config", found)
    speculators = "speculators_model_type" in found
    if speculators and found.get("norm_before_residual") is None:
        raise ValueError(
            f"drafter {str(folder)!r}: norm_before_residual is missing from its config.json, and "
            "programs differ in what they take then; write true or false there"
        )
    ids = found.get(LAYERS) or (found.get("eagle_config") or {}).get(LAYERS)
    layers = check_layers(_as_ours(ids, found, num_layers), num_layers)
    size = found.get("draft_vocab_size") or layer.get("draft_vocab_size") or layer["vocab_size"]
    if size == layer["vocab_size"]:
        for name in ("d2t", "t2d"):
            tensors.pop(name, None)  # a map that says nothing
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].long()
        if "t2d" not in tensors and is_map(tensors["d2t"], layer["vocab_size"]):
            tensors["t2d"] = members(tensors["d2t"], layer["vocab_size"])
    return _llama_config(
        folder,
        layer | {"norm_before_fc": bool(found.get("norm_before_fc"))},
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=size,
        num_aux_hidden_states=len(layers),
        **with_layer_ids({}, list(layers)),
        target_hidden_size=found.get("target_hidden_size") or layer["hidden_size"],
        norm_before_residual=bool(found.get("norm_before_residual")),
        norm_output=bool(found.get("norm_output")),
        fc_norm=bool(found.get("fc_norm")),
    )


def _as_ours(ids: list[int] | None, found: dict[str, Any], num_layers: int) -> Any:
    """Layer ids as vLLM and we count them: l is the residual stream after l layers.

    SGLang, and what is trained for it, writes l - 1: the number of the layer whose output it is.
    That can be told where the ids are then the usual ones, or headstart wrote them.
    """
    usual = [1, num_layers // 2 - 1, num_layers - 4]
    if ids is not None and (ids == usual or found.get("layer_ids_of") == SGLANG_IDS):
        return [layer + 1 for layer in ids]
    return ids


def _eagle1_config(
    folder: Path, found: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    # the original code takes true where nothing is said, but wrote some without
    bias = found.get("bias", "fc.bias" in tensors)
    return _llama_config(
        folder,
        found,
        architectures=["LlamaForCausalLM"],
        target_hidden_size=found.get("target_hidden_size") or found.get("hidden_size"),
        bias=bias,
    )


def _medusa(
    folder: Path, found: dict[str, Any], tensors: dict[str, Tensor], verifier: Verifier | Outline
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors. The file decides how many heads there are: published configs differ from
    their files in that."""
    layers = found.get("medusa_num_layers", found.get("num_hidden_layers", 1))
    named = {layouts.medusa_name(name, layers): tensor for name, tensor in tensors.items()}
    heads = len({name.split(".")[1] for name in named if name.startswith("blocks.")})
    truncated = {"truncated_vocab_size": len(named["token_map"])} if "token_map" in named else {}
    config = MedusaLayout(
        architectures=["MedusaModel"],
        dtype="float32",
        hidden_size=found.get("hidden_size") or verifier.hidden_size,
        vocab_size=found.get("vocab_size") or verifier.vocab_size,
        num_heads=heads,
        num_hidden_layers=layers,
        medusa_fc_bias=True,
        original_lm_head="lm_head.weight" in named,
        **truncated,
    )
    if not heads:
        raise ValueError(
            f"drafter {str(folder)!r} lacks the blocks of its heads; its tensors begin with "
            f"{', '.join(sorted(tensors)[:3])}"
        )
    return config.to_dict(), named


# ---- files -------------------------------------------------------------------------------------
