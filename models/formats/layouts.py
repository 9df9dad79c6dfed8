"""The tensors that engines look for in a drafter's folder, and how other programs name them.

The tables are those of vLLM, which loads what headstart saves as it is. Several engines load a
folder with missing tensors silently, so it is compared with its table before it is served.

Legend: H verifier's hidden size, I the layer's intermediate size, V and V' verifier's and draft
vocabulary, L feature layers, q and kv width of queries and of keys.
"""

import re
from typing import Any

from headstart.models.drafters.eagle3 import layer_ids

Shapes = dict[str, tuple[int, ...]]

LLAMA_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_act", "attention_bias",
    "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""What a layer is, apart from its positions, as transformers' Llama config names it."""


def required(kind: str, config: dict[str, Any]) -> Shapes | None:
    """Name and shape of each tensor that a drafter of this kind must have; None: no table.

    Args:
        kind: eagle3, eagle1 or medusa.
        config: its config.json, in the keys that headstart writes.
    """
    if kind == "medusa":
        return _medusa(config)
    if kind not in ("eagle3", "eagle1"):
        return None
    width = config["hidden_size"]
    if kind == "eagle1":
        shapes = {"fc.weight": (width, 2 * width)} | _layer("layers.0", config, width)
        return shapes | ({"fc.bias": (width,)} if config.get("bias") else {})
    count, size = len(layer_ids(config)), config["draft_vocab_size"]
    target = config["target_hidden_size"]
    shapes = {
        "fc.weight": (width, count * target),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        **_layer("midlayer", config, 2 * width),
        "norm.weight": (width,),
        "lm_head.weight": (size, width),
    }
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(count)}
    if size != config["vocab_size"]:
        shapes["d2t"] = (size,)
    return shapes


def optional(kind: str, config: dict[str, Any]) -> Shapes:
    """Tensors that a drafter of this kind may have."""
    shapes: Shapes = {}
    if kind in ("eagle3", "eagle1"):
        shapes["embed_tokens.weight"] = (config["vocab_size"], config["hidden_size"])
    if kind == "eagle3" and config["draft_vocab_size"] != config["vocab_size"]:
        shapes["t2d"] = (config["vocab_size"],)
    return shapes


def _layer(prefix: str, config: dict[str, Any], inputs: int) -> Shapes:
    """A decoder layer whose attention reads `inputs` columns."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (q, inputs),
        "self_attn.k_proj": (kv, inputs),
        "self_attn.v_proj": (kv, inputs),
        "self_attn.o_proj": (width, q),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def _medusa(config: dict[str, Any]) -> Shapes:
    width = config["hidden_size"]
    size = config.get("truncated_vocab_size") or config["vocab_size"]
    shapes: Shapes = {}
    for head in range(config["num_heads"]):
        for layer in range(config["num_hidden_layers"]):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (width, width)
            shapes[f"blocks.{head}.layers.{layer}.bias"] = (width,)
        if not config["original_lm_head"]:
            shapes[f"lm_heads.{head}.weight"] = (size, width)
    if config["original_lm_head"]:
        shapes["lm_head.weight"] = (size, width)
    if size != config["vocab_size"]:
        shapes["token_map"] = (size,)
    return shapes


# ---- names elsewhere ---------------------------------------------------------------------------


def eagle3_name(name: str) -> str:
    """Of any EAGLE-3 layout -> ours: some say layers.0 for the layer, and some model. first."""
    return re.sub(r"^(model\.)?(layers\.0\.)?", lambda m: "midlayer." if m[2] else "", name)


def eagle1_name(name: str) -> str:
    return name.removeprefix("model.")


def speculators_name(name: str) -> str:
    """Ours -> of an EAGLE-3 drafter in speculators format."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def medusa_name(name: str, num_layers: int) -> str:
    """Of the original Medusa layout -> ours, which is vLLM's; ours stays as it is.

    There, `{head}.{layer}.linear` are the blocks of a head, and `{head}.{number of layers}` its
    projection.
    """
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    block = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name)
    if block:
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    head = re.fullmatch(rf"(\d+)\.{num_layers}\.weight", name)
    return f"lm_heads.{head[1]}.weight" if head else name


def original_medusa_name(name: str, num_layers: int) -> str:
    """Ours -> the original Medusa layout."""
    block = re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name)
    if block:
        return f"{block[1]}.{block[2]}.linear.{block[3]}"
    head = re.fullmatch(r"lm_heads\.(\d+)\.weight", name)
    assert head, name
    return f"{head[1]}.{num_layers}.weight"
