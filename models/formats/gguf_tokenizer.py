"""A verifier's tokenizer in a GGUF file, copied from another one or made from a byte-level BPE.

llama.cpp splits text by rules that it knows by name, so of tokenizers only those can be written
whose rules are among the names here. Any other is copied from the verifier's own GGUF file, which
whoever serves it with llama.cpp has.
"""

import json
from typing import Any

from gguf import GGUFReader, GGUFWriter, TokenType
from transformers import PreTrainedTokenizerBase

_TAIL = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_RULES = {  # regular expression of a split before the bytes -> llama.cpp's name
    _SUFFIXES + _TAIL % "{1,3}": "llama-bpe",
    _SUFFIXES + _TAIL % "": "qwen2",
}


def copy(source: str, vocab_size: int, writer: GGUFWriter) -> None:
    """The tokenizer of another GGUF file, entry by entry.

    Args:
        vocab_size: tokens that it must have.

    Raises:
        ValueError: no GGUF file there, one without a tokenizer or with another one.
    """
    try:
        fields = GGUFReader(source).fields
    except (OSError, ValueError, IndexError) as error:
        raise ValueError(
            f"tokenizer {source!r} is no GGUF file that can be read: {error}"
        ) from error
    found = {name: f for name, f in fields.items() if name.startswith("tokenizer.")}
    tokens = found.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens.data) != vocab_size:
        count = "no tokens" if tokens is None else f"{len(tokens.data)} tokens"
        raise ValueError(
            f"tokenizer {source!r} has {count}, the drafter {vocab_size}; pass the verifier's file"
        )
    for name, field in found.items():
        kind, of = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), kind, of)


def write(tokenizer: PreTrainedTokenizerBase, vocab_size: int, writer: GGUFWriter) -> None:
    """The tokenizer as entries of the file.

    Raises:
        ValueError: it is no byte-level BPE, or one whose rules have no name.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    name = rules_of(described)
    model, added = described["model"], {t["id"]: t for t in described["added_tokens"]}
    ids = model["vocab"] | {t["content"]: number for number, t in added.items()}
    known = {number: token for token, number in ids.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([known.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types([_kind(i, known, added) for i in range(vocab_size)])
    pairs = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_token_merges(pairs)
    for role in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{role}_token_id")
        if number is not None:
            getattr(writer, f"add_{role}_token_id")(number)
    begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(begins)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def rules_of(described: dict[str, Any]) -> str:
    """llama.cpp's name of a tokenizer's rules, as tokenizer.json has them.

    Raises:
        ValueError: it has none.
    """
    if described.get("model", {}).get("type") != "BPE":
        raise refused("it is no byte-level BPE with a tokenizer.json")
    steps = described["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    if steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise refused("it is no byte-level BPE")
    if described["model"].get("byte_fallback") or len(steps) > 2:
        raise refused("its rules for splitting text are not known")
    first, regex = steps[0], steps[-1]["use_regex"]
    if len(steps) == 1 and regex:
        return "gpt-2"
    if first.get("type") == "Digits" and first["individual_digits"] and regex:
        return "smollm"
    pattern = (first.get("pattern") or {}).get("Regex")
    whole = first.get("type") == "Split" and first["behavior"] == "Isolated"
    if whole and not first["invert"] and not regex and pattern in _RULES:
        return _RULES[pattern]
    raise refused("its rules for splitting text are not known")


def refused(reason: str) -> ValueError:
    return ValueError(
        f"to: gguf: the verifier's tokenizer cannot be written: {reason}; pass --tokenizer with "
        "the verifier's own GGUF file, to copy it from there"
    )


def _kind(number: int, known: dict[int, str], added: dict[int, dict[str, Any]]) -> TokenType:
    if number not in known:
        return TokenType.UNUSED  # of a padded vocabulary
    if number not in added:
        return TokenType.NORMAL
    return TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
