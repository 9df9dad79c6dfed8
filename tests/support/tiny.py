"""Tiny random verifiers of many families, and a tiny tokenizer, made on the spot."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from headstart.models.verifier.verifier import Verifier

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}"
    "<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "phi3": {"pad_token_id": 0},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
}


def tokenizer(vocab_size: int = 64) -> PreTrainedTokenizerFast:
    """Words "w0", "w1", … and the chat template's special tokens, `vocab_size` in all."""
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    words = ["system", "user", "assistant", "tool"]
    vocab = special + words + [f"w{i}" for i in range(vocab_size - len(special) - len(words))]
    vocab = vocab[:vocab_size]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocab)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        additional_special_tokens=special[1:2] if vocab_size > 2 else [],
        eos_token="<|im_end|>" if vocab_size > 2 else None,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def verifier(family: str = "llama", seed: int = 0, vocab_size: int = 64, **overrides) -> Verifier:
    """A random verifier with weights large enough that its text neither loops nor ties."""
    settings = COMMON | FAMILIES.get(family, {}) | {"vocab_size": vocab_size} | overrides
    settings = {k: v for k, v in settings.items() if v is not None}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **(ids | settings))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.0 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5)
    return Verifier(model, tokenizer(vocab_size), f"tiny/{family}")


def save(verifier: Verifier, folder: Path) -> str:
    """The verifier's folder, as transformers writes it."""
    verifier.model.save_pretrained(folder)
    verifier.tokenizer.save_pretrained(folder)
    return str(folder)


def byte_level(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits text as GPT-2's does: three special tokens, 256 bytes, merges of
    this file."""
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    raw.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token=special[0], bos_token=special[1], eos_token=special[2]
    )
    wrapped.chat_template = TEMPLATE
    return wrapped
