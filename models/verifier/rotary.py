"""Rotary positions that change with the length of the text, fixed for a whole run.

longrope (Phi-3, Phi-4-mini; Ding et al. 2024, arXiv 2402.13753) has factors for texts up to a
border and others for longer ones; dynamic NTK has new frequencies for each length above its border.
The keys of a cache, or of a tree's nodes, cannot have both. So a verifier has one set for all
texts: those below the border, or, if longrope's name is MODEL@TOKENS with more tokens than that,
those above, for short texts too, as vLLM does with `--max-model-len TOKENS`. docs/losslessness.md
says why.
"""

from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def scalings(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The settings of rotary positions: one, or one for each kind of attention."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)]
    return kinds or [rope]


def border(config: PretrainedConfig) -> int | None:
    """Longest text, in tokens, before rotary positions change; None: they never do."""
    found = []
    for rope in scalings(config):
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            found.append(rope["original_max_position_embeddings"])
        elif "dynamic" in kind:
            found.append(config.max_position_embeddings)
    return min(found, default=None)


def is_long(config: PretrainedConfig, length: int | None) -> bool:
    """Whether texts up to this length need longrope's factors for long ones."""
    return length is not None and length > (border(config) or length)


def longer(config: PretrainedConfig, length: int | None) -> str:
    """The way to texts above the border, in words that end a message; empty: there is no border."""
    limit = border(config)
    if limit is None or length is not None:
        return ""
    if limit == config.max_position_embeddings:
        return f"; beyond {limit} its rotary positions change with every token"
    return (
        "; its rotary factors change there: for longer texts end the model's name with their "
        f"length, MODEL@{config.max_position_embeddings} or less (docs/losslessness.md)"
    )


def whole_length(config: PretrainedConfig) -> int:
    """Longest text in tokens; beyond any use where the config does not say."""
    return getattr(config, "max_position_embeddings", None) or 1 << 30


def context_length(config: PretrainedConfig, length: int | None) -> int:
    """Longest text in tokens with the rotary positions of this run."""
    whole = whole_length(config)
    return length or min(whole, border(config) or whole)


def check(name: str, config: PretrainedConfig, length: int | None) -> None:
    """Raise a ValueError for a length that this model cannot have."""
    if length is None:
        return
    whole = whole_length(config)
    if not 2 <= length <= whole:
        raise ValueError(
            f"verifier {name!r}: @{length} must be a length of 2 … {whole} tokens, beyond which "
            "its positions are not defined"
        )


def fix(model: nn.Module, long: bool) -> None:
    """Give every rotary embedding in `model` one set of frequencies for texts of any length.

    Args:
        long: longrope's factors of texts above the border.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None:
            continue
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            prefix = "" if layer_type is None else f"{layer_type}_"
            if kind == "longrope":
                rope = module.config.rope_parameters
                limit = (rope[layer_type] if layer_type else rope)[
                    "original_max_position_embeddings"
                ]
                held = getattr(module, f"{prefix}inv_freq")
                chosen, _ = ROPE_INIT_FUNCTIONS[kind](
                    module.config, held.device, seq_len=limit + long, layer_type=layer_type
                )
                held.copy_(chosen)
                # what transformers would choose from by the longest position of a batch
                setattr(module, f"{prefix}original_inv_freq", chosen)
                setattr(module, f"{prefix}long_inv_freq", chosen)
            elif "dynamic" in kind:
                setattr(module, f"{prefix}max_seq_len_cached", float("inf"))
