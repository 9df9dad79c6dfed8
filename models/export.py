"""Write a drafter in the layout of another program.

    python models/export.py outputs/run/best --to speculators --out outputs/run/speculators
    python -m headstart.models.export outputs/run/best --to sglang --out outputs/run/sglang

vLLM needs no export but for MTP: it loads a checkpoint as it is. `mimo` is a folder of the
verifier and its MTP module in one, which vLLM serves as a MiMo. `speculators` is a folder that
names its verifier, so that `vllm serve FOLDER` needs nothing else (EAGLE-3); `sglang` has the
names, the layer ids and the tensors that SGLang reads (EAGLE-3 and EAGLE-1); `eagle` is the
original EAGLE code's layout (EAGLE-3 and EAGLE-1), `medusa` the original Medusa code's; `gguf` is
a file for llama.cpp (a draft model or EAGLE-3). What a layout cannot say is refused by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headstart.models.drafter import Drafter
from headstart.models.drafters.draft_lm import DraftLM
from headstart.models.drafters.eagle1 import Eagle1
from headstart.models.drafters.eagle3 import LAYERS, Eagle3, check_layers
from headstart.models.drafters.medusa import Medusa
from headstart.models.drafters.mtp import MTP
from headstart.models.formats import gguf_file, layouts, mimo_folder
from headstart.models.formats.imports import SGLANG_EAGLE, SGLANG_IDS
from headstart.models.loading import class_of, is_checkpoint, load_pair, tunes_verifier
from headstart.models.saved import read_config
from headstart.models.verifier import embedded
from headstart.models.verifier.adapter import check_merged
from headstart.models.verifier.names import is_embedded, split_length
from headstart.models.verifier.weights import save_tensors


@dataclass
class Export:
    """What is written, and where."""

    drafter: str
    """Folder of a checkpoint, or of a drafter in another layout; may be the first word alone."""
    to: Literal["speculators", "sglang", "eagle", "medusa", "mimo", "gguf"]
    """Layout: that of the speculators package, of SGLang, of the original EAGLE or Medusa code, of
    MiMo, verifier and MTP module in one, or llama.cpp's."""
    out: str
    """Folder to write to, with gguf a file; it must not hold anything yet."""
    verifier: str | None = None
    """Default: the verifier the drafter was trained for."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the written weights; with mimo of the module's, the verifier's stay as they are."""
    tokenizer: str | None = None
    """With gguf: the verifier's GGUF file, to copy the tokenizer from; default: it is made."""
    num_speculative_tokens: int = 2
    """Drafts in a row that speculators' config, or a printed command, asks for."""
    allow_verifier: bool = False
    """Accept a verifier with another fingerprint, such as a quantised copy of the drafter's."""

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens must be 1 or more, got {self.num_speculative_tokens}"
            )
        if self.tokenizer is not None and self.to != "gguf":
            raise ValueError(f"tokenizer is for gguf files alone; leave it out with to {self.to}")


def check_kind(kind: type[Drafter], to: str) -> None:
    """Raise a ValueError for a kind of drafter that the layout `to` is not for."""
    fitting = {
        "speculators": (Eagle3,), "sglang": (Eagle3, Eagle1), "eagle": (Eagle3, Eagle1),
        "medusa": (Medusa,), "mimo": (MTP,), "gguf": (DraftLM, Eagle3),
    }  # fmt: skip
    if not issubclass(kind, fitting[to]):
        names = " or ".join(kind.__name__ for kind in fitting[to])
        raise ValueError(f"to: {to} is a layout for {names}; this drafter is {kind.__name__}")


def check_empty(out: Path) -> None:
    """Raise a ValueError for a folder that holds something already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: {str(out)!r} holds something already; pass another folder")


def converted(
    drafter: Drafter, to: str, verifier: str, num_speculative_tokens: int = 2
) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Config, tensors and name of their file, in the layout `to`, any but mimo and gguf.

    Args:
        verifier: what the folder says it is for: a name of the Hub, or a folder's path.

    Raises:
        ValueError: a kind or a setting that the layout has no place for.
    """
    check_kind(type(drafter), to)
    if to == "speculators":
        config = _speculators_config(drafter, verifier, num_speculative_tokens)
        tensors = drafter.file_tensors()
        named = {layouts.speculators_name(name): tensor for name, tensor in tensors.items()}
        return config, named, "model.safetensors"
    if to == "sglang":
        return _sglang_config(drafter), _sglang_tensors(drafter), "model.safetensors"
    if to == "eagle":
        return _eagle_config(drafter), _with_embeddings(drafter), "pytorch_model.bin"
    return (*_medusa(drafter, verifier), "medusa_lm_head.pt")


def write(
    config: dict[str, Any], tensors: dict[str, Tensor], file: str, out: Path, dtype: torch.dtype
) -> None:
    """The folder; float tensors are cast to `dtype`.

    Raises:
        ValueError: `out` holds something already, or cannot be written.
    """
    check_empty(out)
    cast = {
        name: tensor.detach().cpu().to(dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
    cast = {name: tensor.contiguous() for name, tensor in cast.items()}
    config = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    try:
        out.mkdir(parents=True, exist_ok=True)
        if file.endswith(".safetensors"):
            save_tensors(cast, out / file, {"format": "pt"})
        else:
            torch.save(cast, out / file)
        (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    except (OSError, RuntimeError) as error:  # torch.save's of a full disk
        raise ValueError(f"out: {str(out)!r} cannot be written: {error}") from error


# ---- layouts -----------------------------------------------------------------------------------


def _speculators_config(
    drafter: Eagle3, verifier: str, num_speculative_tokens: int
) -> dict[str, Any]:
    config = drafter.config
    layer = _layer(drafter) | {
        "model_type": "llama",
        "rope_parameters": config.rope_parameters,
        # vLLM copies a few keys only from outside of this entry, and this is none of them
        "num_aux_hidden_states": len(drafter.feature_layers),
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}
            ],
            "verifier": {
                "name_or_path": verifier,
                "architectures": drafter.verifier.model.config.architectures or [],
            },
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        LAYERS: list(drafter.feature_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }


def _sglang_config(drafter: Eagle3 | Eagle1) -> dict[str, Any]:
    if drafter.embed_tokens is not None:
        raise ValueError(
            "to: sglang drafts with the verifier's embeddings, and this drafter has its own; pass "
            f"{'speculators' if isinstance(drafter, Eagle3) else 'eagle'}"
        )
    if isinstance(drafter, Eagle1):
        return _flat_config(drafter) | {"architectures": [SGLANG_EAGLE], "bias": True}
    _refuse_variants(drafter, "sglang")
    if len(drafter.feature_layers) != 3:
        raise ValueError(
            f"to: sglang reads three features, this drafter has {len(drafter.feature_layers)}; "
            "pass speculators"
        )
    ids = [layer - 1 for layer in drafter.feature_layers]
    return _flat_config(drafter) | {
        "eagle_config": {LAYERS: ids, "use_aux_hidden_state": True},
        "layer_ids_of": SGLANG_IDS,  # they count from the first layer's output
        "target_model_type": drafter.verifier.config.model_type,
    }


def _sglang_tensors(drafter: Eagle3 | Eagle1) -> dict[str, Tensor]:
    """Of EAGLE-1 with a bias in any case: SGLang's layer has one, of random numbers where the file
    has none."""
    tensors = drafter.file_tensors()
    if isinstance(drafter, Eagle1):
        tensors = {"fc.bias": torch.zeros(drafter.config.hidden_size)} | tensors
    return tensors


def _eagle_config(drafter: Eagle3 | Eagle1) -> dict[str, Any]:
    kind = drafter.config.rope_parameters["rope_type"]
    if kind != "default":
        raise ValueError(
            f"to: the original EAGLE code does not scale positions the way {kind} does, as this "
            "drafter's verifier asks for; pass speculators or sglang"
        )
    if isinstance(drafter, Eagle1):
        return _flat_config(drafter) | {"bias": drafter.config.bias}
    _refuse_variants(drafter, "eagle")
    usual = check_layers(None, drafter.verifier.num_layers)
    if drafter.feature_layers != usual:
        raise ValueError(
            f"to: the original EAGLE code fuses layers {list(usual)} of this verifier, this "
            f"drafter {list(drafter.feature_layers)}; pass speculators or sglang"
        )
    return _flat_config(drafter) | {"bias": False}


def _medusa(drafter: Medusa, verifier: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if drafter.draft_ids is not None:
        raise ValueError(
            f"to: the original Medusa code has no draft vocabulary, this drafter has one of "
            f"{len(drafter.draft_ids)} ids; train one without"
        )
    heads, layers = drafter.config.num_heads, drafter.config.num_hidden_layers
    tensors = {n: t for n, t in drafter.file_tensors().items() if n != "lm_head.weight"}
    if drafter.one_head:  # there every head has a projection of its own
        tensors |= {f"lm_heads.{i}.weight": drafter.verifier_rows() for i in range(heads)}
    config = {
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "base_model_name_or_path": verifier,
        "hidden_size": drafter.config.hidden_size,
        "vocab_size": drafter.config.vocab_size,
    }
    return config, {layouts.original_medusa_name(n, layers): t for n, t in tensors.items()}


def _layer(drafter: Eagle3 | Eagle1) -> dict[str, Any]:
    """The draft layer's shape."""
    config = drafter.config.to_dict()
    fields = (*layouts.LLAMA_FIELDS, "num_hidden_layers", "tie_word_embeddings")
    return {field: config[field] for field in fields if config.get(field) is not None}


def _flat_config(drafter: Eagle3 | Eagle1) -> dict[str, Any]:
    """A Llama config with positions in the keys that older programs read, too."""
    rope = dict(drafter.config.rope_parameters)
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope | {"type": rope["rope_type"]}
    config = _layer(drafter) | {
        "architectures": drafter.config.architectures,
        "model_type": "llama",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "target_hidden_size": drafter.config.target_hidden_size,
    }
    if isinstance(drafter, Eagle3):
        config["draft_vocab_size"] = drafter.config.draft_vocab_size
    return config


def _with_embeddings(drafter: Eagle3 | Eagle1) -> dict[str, Tensor]:
    """The original code looks for embeddings in the file, or in shards of the verifier."""
    own = drafter.verifier.model.get_input_embeddings().weight.float()
    return {"embed_tokens.weight": own} | drafter.file_tensors()


def _refuse_variants(drafter: Eagle3, to: str) -> None:
    for field in ("norm_before_residual", "norm_output", "fc_norm"):
        if getattr(drafter.config, field):
            raise ValueError(
                f"to: {to} does not know {field}, which this drafter has; pass speculators"
            )


# ---- script ------------------------------------------------------------------------------------


def run(settings: Export) -> None:
    """Read, convert, write.

    Raises:
        ValueError: a drafter whose verifier was trained with it, or as `converted` and `write`.
    """
    if tunes_verifier(settings.drafter):
        raise ValueError(
            f"drafter {settings.drafter!r} drafts for a verifier that was trained with it, for "
            "which no layout has a place; merge its adapter and train heads for the result"
        )
    out, dtype = Path(settings.out), getattr(torch, settings.dtype)
    (gguf_file.check_file if settings.to == "gguf" else check_empty)(out)
    kind = class_of(settings.drafter)
    if kind is not None:
        check_kind(kind, settings.to)  # before the verifier is loaded, which may be large
    if settings.to != "gguf" and (settings.verifier or is_checkpoint(settings.drafter)):
        made_for = settings.verifier or read_config(settings.drafter)["headstart"]["verifier"]
        check_merged(made_for, settings.drafter)
    # to write a MiMo the verifier is copied from its files, and in memory only looked at
    loaded = "bfloat16" if settings.to == "mimo" else "float32"
    verifier, drafter = load_pair(
        settings.verifier, settings.drafter, loaded, "cpu", settings.allow_verifier
    )
    check_kind(type(drafter), settings.to)
    if settings.to == "mimo":
        _write_mimo(settings, drafter, out, dtype)
        return
    if settings.to == "gguf":
        _write_gguf(settings, drafter, out, dtype)
        return
    name, _ = split_length(verifier.name)
    if is_embedded(name):
        name = str(embedded.folder(name))
    elif Path(name).is_dir():
        name = str(Path(name).resolve())  # a server may run anywhere
    found = converted(drafter, settings.to, name, settings.num_speculative_tokens)
    write(*found, out, dtype)
    print(f"wrote {settings.out}: {len(found[1])} tensors in {found[2]}, and config.json")
    if settings.to == "speculators":
        print(f"Serve it:\n    vllm serve {settings.out}")


def _write_mimo(settings: Export, drafter: MTP, out: Path, dtype: torch.dtype) -> None:
    count = mimo_folder.write(drafter, out, dtype)
    config = {"method": "mtp", "num_speculative_tokens": settings.num_speculative_tokens}
    print(f"wrote {out}: verifier and module in {count} files, and config.json")
    print(f"Serve it:\n    vllm serve {out} --speculative-config '{json.dumps(config)}'")


def _write_gguf(settings: Export, drafter: DraftLM | Eagle3, out: Path, dtype: torch.dtype) -> None:
    count = gguf_file.write(drafter, out, dtype, settings.tokenizer)
    kind = "draft-eagle3" if isinstance(drafter, Eagle3) else "draft-simple"
    print(f"wrote {out}: {count} tensors")
    print(
        f"Serve it:\n    llama-server -m VERIFIER.gguf -md {out} --spec-type {kind} "
        f"--spec-draft-n-max {settings.num_speculative_tokens}"
    )


if __name__ == "__main__":
    from headstart.script import run_script

    run_script(Export, run, first="drafter")
