"""Drafters as other programs save them, made from names and an order written down here, not taken
from headstart's own tables. All for the tiny Llama: width 32, 4 heads, 2 of keys, 64 ids."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 64, "num_hidden_layers": 1, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
}  # fmt: skip
MIDLAYER = {
    "mlp.down_proj.weight": (32, 48),
    "self_attn.v_proj.weight": (16, 64),
    "hidden_norm.weight": (32,),
    "self_attn.q_proj.weight": (32, 64),
    "mlp.up_proj.weight": (48, 32),
    "post_attention_layernorm.weight": (32,),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (48, 32),
    "self_attn.k_proj.weight": (16, 64),
    "input_layernorm.weight": (32,),
}
IDS = [0, 1, 2, 3, 5, 8, 9, 13, 20, 21, 34, 40, 41, 42, 55, 63]
"""A draft vocabulary, with the tiny tokenizer's special ids in it."""


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Random tensors, in a random order."""
    names = list(shapes)
    random.Random(seed).shuffle(names)
    torch.manual_seed(seed)
    tensors = {}
    for name in names:
        shape = shapes[name]
        if len(shape) == 1:
            tensors[name] = torch.rand(shape) + 0.5
        else:
            tensors[name] = torch.randn(shape) * 1.2 / shape[1] ** 0.5
    return tensors


def write(folder: Path, config: dict[str, Any], file: str, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def eagle3_tensors(prefix: str = "midlayer.", seed: int = 3) -> dict[str, Tensor]:
    shapes = {"lm_head.weight": (16, 32), "norm.weight": (32,), "fc.weight": (32, 96)}
    shapes |= {prefix + name: shape for name, shape in MIDLAYER.items()}
    tensors = drawn(shapes, seed)
    tensors["d2t"] = torch.tensor([token - i for i, token in enumerate(IDS)])
    tensors["t2d"] = torch.tensor([i in IDS for i in range(64)])
    return tensors


def original_eagle3(folder: Path, **config: Any) -> Path:
    """Of the original EAGLE code: no word on layers or norms, positions in old keys."""
    settings = SHAPE | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 16,
        "rope_theta": 10000.0, "rope_scaling": None, "pad_token_id": 0, "torch_dtype": "float32",
    }  # fmt: skip
    return write(folder, settings | config, "pytorch_model.bin", eagle3_tensors())


def original_eagle1(folder: Path, embeddings: Tensor, bias: bool) -> Path:
    shapes = {f"layers.0.{name}": shape for name, shape in MIDLAYER.items()}
    for name in ("hidden_norm", "input_layernorm"):
        del shapes[f"layers.0.{name}.weight"]
    for name, width in (("q", 32), ("k", 16), ("v", 16)):
        shapes[f"layers.0.self_attn.{name}_proj.weight"] = (width, 32)
    shapes["fc.weight"] = (32, 64)
    if bias:
        shapes["fc.bias"] = (32,)
    tensors = drawn(shapes, 4) | {"embed_tokens.weight": embeddings.clone()}
    config = SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": bias}
    return write(folder, config, "pytorch_model.bin", tensors)


def speculators_eagle3(folder: Path, norm_before_residual: bool, embeddings: Tensor) -> Path:
    layer = SHAPE | {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "somewhere/else", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": 16,
        "norm_before_residual": norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 8],
    }
    tensors = eagle3_tensors("layers.0.", seed=5) | {"embed_tokens.weight": embeddings}
    return write(folder, config, "model.safetensors", tensors)


def original_medusa(folder: Path, heads: int = 3, layers: int = 2) -> Path:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        shapes[f"{head}.{layers}.weight"] = (64, 32)
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = (32, 32)
            shapes[f"{head}.{layer}.linear.bias"] = (32,)
    config = {  # published ones name fewer heads than their file has
        "medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "some/model",
    }  # fmt: skip
    return write(folder, config, "medusa_lm_head.pt", drawn(shapes, 6))


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Whatever the one file of weights there is called."""
    (file,) = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt")]
    if file.suffix == ".safetensors":
        return load_file(file)
    return torch.load(file, weights_only=True)
