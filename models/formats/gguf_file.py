"""A draft model or an EAGLE-3 drafter as a GGUF file, which llama.cpp loads.

A draft model is written as any model is; so is a verifier. EAGLE-3 has an architecture of its own
there, with the layer ids that vLLM has, too, and a map of the draft vocabulary that holds ids. It
reads embeddings, and nothing else, from the verifier's file.

Legend: H hidden size, D head size, n heads.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, RopeScalingType, quants
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headstart.models.drafters.draft_lm import DraftLM
from headstart.models.drafters.eagle3 import Eagle3
from headstart.models.formats import gguf_tokenizer

FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_PAIRED = ("llama", "eagle3")  # rotate neighbours, not halves: queries and keys are reordered
_OUTSIDE = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "embed_tokens": "token_embd", "norm": "output_norm", "fc": "fc",
}  # fmt: skip
_INSIDE = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_TYPES = {
    torch.float32: (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    torch.float16: (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}
_YARN = {"rope_type", "rope_theta", "factor", "original_max_position_embeddings"}


def check_file(out: Path) -> None:
    """Raise a ValueError for a name that no new file can have."""
    if out.is_dir():
        raise ValueError(f"out: {str(out)!r} is a folder; name a file, such as drafter.gguf")
    if out.exists():
        raise ValueError(f"out: {str(out)!r} is there already; pass another")


def write(drafter: DraftLM | Eagle3, out: Path, dtype: torch.dtype, tokenizer: str | None) -> int:
    """The file; norms stay float32.

    Args:
        tokenizer: GGUF file to copy the tokenizer from; None: it is made from the verifier's.

    Returns:
        The number of tensors.

    Raises:
        ValueError: a family, a setting or a tokenizer that llama.cpp has not; `out` cannot be
            written.
    """
    check_file(out)
    model = drafter.lm if isinstance(drafter, DraftLM) else drafter.verifier
    family = architecture(drafter)
    config = model.config if isinstance(drafter, DraftLM) else drafter.config
    tensors = dict(named(drafter, family, config))
    partial = out.with_name(f".{out.name}.partial")
    writer = GGUFWriter(partial, family)
    describe(writer, config, _TYPES[dtype][1], model.name)
    if isinstance(drafter, Eagle3):
        describe_eagle3(writer, drafter)
    if tokenizer is None:
        gguf_tokenizer.write(model.tokenizer, config.vocab_size, writer)
    else:
        gguf_tokenizer.copy(tokenizer, config.vocab_size, writer)
    for name, tensor in tensors.items():
        kind = _TYPES[dtype][0] if tensor.dim() > 1 else GGMLQuantizationType.F32
        add(writer, name, tensor, kind)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(partial, out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"out: {str(out)!r} cannot be written: {error}") from error
    return len(tensors)


def architecture(drafter: DraftLM | Eagle3) -> str:
    """llama.cpp's name of it.

    Raises:
        ValueError: it has none, or none for such settings.
    """
    if isinstance(drafter, Eagle3):
        return _eagle3(drafter)
    config = drafter.lm.config
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"to: gguf: model {drafter.lm.name!r} is not written: it is of the family "
            f"{config.model_type}, not {', '.join(FAMILIES)}"
        )
    reasons = {
        "its weights are quantised": hasattr(drafter.model.config, "quantization_config"),
        f"its activation is {config.hidden_act}, not silu": config.hidden_act != "silu",
        "its attention has a sliding window": getattr(config, "sliding_window", None) is not None,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise ValueError(f"to: gguf: model {drafter.lm.name!r} is not written: {reason}")
    return FAMILIES[config.model_type]


def _eagle3(drafter: Eagle3) -> str:
    for field in ("norm_output", "fc_norm"):
        if getattr(drafter.config, field):
            raise ValueError(f"to: gguf: llama.cpp does not know {field}, which this drafter has")
    if len(drafter.feature_layers) != 3:
        raise ValueError(
            f"to: gguf: llama.cpp fuses three features, this drafter has "
            f"{len(drafter.feature_layers)}; train one with three drafter.feature_layers"
        )
    return "eagle3"


# ---- entries -----------------------------------------------------------------------------------


def describe(
    writer: GGUFWriter, config: PretrainedConfig, file_type: LlamaFileType, name: str
) -> None:
    """The model's shape and positions."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name.rstrip("/").rpartition("/")[2])
    writer.add_file_type(file_type)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(size)
    _positions(writer, config.rope_parameters)


def _positions(writer: GGUFWriter, rope: dict[str, Any]) -> None:
    kind = rope["rope_type"]
    whole = rope.get("partial_rotary_factor", 1.0) == 1.0
    unusual = {k for k, v in rope.items() if v is not None} - _YARN - {"beta_fast", "beta_slow"}
    if kind not in ("default", "linear", "llama3", "yarn") or not whole or (
        kind == "yarn" and unusual - {"partial_rotary_factor", "type"}
    ):  # fmt: skip
        raise ValueError(
            f"to: gguf: positions are {', '.join(f'{k} {v}' for k, v in sorted(rope.items()))}, "
            "which is not written; known are default, linear, llama3 and plain yarn"
        )
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for field in ("beta_fast", "beta_slow"):
            if rope.get(field) is not None:
                getattr(writer, f"add_rope_scaling_yarn_{field}")(rope[field])


def describe_eagle3(writer: GGUFWriter, drafter: Eagle3) -> None:
    """What it reads of the verifier."""
    writer.add_array("eagle3.target_layers", list(drafter.feature_layers))
    writer.add_uint32("eagle3.target_hidden_size", drafter.config.target_hidden_size)
    writer.add_bool("eagle3.norm_before_residual", drafter.config.norm_before_residual)


# ---- tensors -----------------------------------------------------------------------------------


def named(
    drafter: DraftLM | Eagle3, family: str, config: PretrainedConfig
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the file.

    Raises:
        ValueError: a tensor that it has no name for.
    """
    tensors = dict(drafter.file_tensors() if isinstance(drafter, Eagle3) else _own(drafter))
    tensors.pop("t2d", None)
    offsets = tensors.pop("d2t", None)
    for name, tensor in tensors.items():
        if family in _PAIRED and ".q_proj." in name:
            tensor = paired(tensor, config.num_attention_heads)
        if family in _PAIRED and ".k_proj." in name:
            tensor = paired(tensor, config.num_key_value_heads)
        yield gguf_name(name), tensor
    if offsets is not None:
        yield "d2t", offsets + torch.arange(len(offsets), device=offsets.device)
    if config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", divisors(config)


def _own(drafter: DraftLM) -> Iterator[tuple[str, Tensor]]:
    tied = drafter.lm.head.weight is drafter.model.get_input_embeddings().weight
    for name, tensor in drafter.model.state_dict().items():
        if not (tied and name == "lm_head.weight"):  # llama.cpp takes the embedding then
            yield name, tensor


def gguf_name(name: str) -> str:
    """Of a tensor.

    Raises:
        ValueError: llama.cpp has none for it.
    """
    module, _, part = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{part}"
    block, inside = "0", module.removeprefix("midlayer.")
    if module.startswith("model.layers."):
        block, _, inside = module.removeprefix("model.layers.").partition(".")
    if inside not in _INSIDE:
        raise ValueError(f"to: gguf: llama.cpp has no name for tensor {name!r} of this model")
    return f"blk.{block}.{_INSIDE[inside]}.{part}"


def paired(tensor: Tensor, heads: int) -> Tensor:
    """Rows `[n*D, …]` of each head from halves (0 … D/2, D/2 …) to neighbours (0, D/2, 1, …)."""
    halves = tensor.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def divisors(config: PretrainedConfig) -> Tensor:
    """By which llama3's scaling divides each frequency: `[D/2]`."""
    theta, size = config.rope_parameters["rope_theta"], config.head_dim
    plain = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    return plain / LlamaRotaryEmbedding(config).inv_freq.float().cpu()


def add(writer: GGUFWriter, name: str, tensor: Tensor, kind: GGMLQuantizationType) -> None:
    if not tensor.is_floating_point():
        writer.add_tensor(name, tensor.cpu().numpy().astype(np.int64))
        return
    values = tensor.detach().float().cpu().contiguous().numpy()
    writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
