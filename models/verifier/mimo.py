"""MiMo (arXiv 2505.07608): Qwen2's layers under another name, which transformers does not know.

Known here, its folders load without the code that they bring along.
"""

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)


class MiMoConfig(Qwen2Config):
    """Qwen2's; `num_nextn_predict_layers` MTP modules lie beside the model."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The model without its MTP modules."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = (r"model\.mtp_layers\..*",)


def register() -> None:
    """Make the auto classes of transformers load it."""
    AutoConfig.register(MiMoConfig.model_type, MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)


def class_for(config: PretrainedConfig) -> type:
    """What loads a causal language model, or a model that reads images too, of which the language
    model is used. A MiMo's config may call itself a Qwen2 for engines whose transformers knows no
    MiMo; as such, its module would be reported as unexpected."""
    if MiMoForCausalLM.__name__ in (config.architectures or []):
        return MiMoForCausalLM
    kind = type(config)
    sees = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def from_config(config: PretrainedConfig, dtype: torch.dtype, **trust: bool) -> PreTrainedModel:
    """A causal language model whose weights nobody has loaded."""
    made_by = class_for(config)
    if made_by is MiMoForCausalLM:
        return made_by._from_config(config, dtype=dtype)
    return made_by.from_config(config, dtype=dtype, **trust)
