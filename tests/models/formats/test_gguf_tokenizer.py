"""A tokenizer in a GGUF file: read back it splits text as before, and what cannot be is refused."""

import json
from pathlib import Path

import pytest
import tiny
from gguf import GGUFReader, GGUFWriter
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headstart.models.formats import gguf_tokenizer

DIGITS = pre_tokenizers.Digits(individual_digits=True)
TEXT = "Add 12 to 345: it's a  test,\n\tdon't 文 🙂 <|im_start|>user w1<|im_end|>"


def entries(write, file: Path) -> dict[str, object]:
    """What lies in a file that has `write`'s entries alone."""
    writer = GGUFWriter(file, "llama")
    write(writer)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


def test_tokens_types_and_merges_are_those_of_the_tokenizer(tmp_path):
    made = tiny.byte_level(300)
    found = entries(lambda w: gguf_tokenizer.write(made, 304, w), tmp_path / "a")
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    vocab = made.get_vocab()
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert [vocab[token] for token in tokens[:300]] == list(range(300))
    assert tokens[300:] == ["[PAD300]", "[PAD301]", "[PAD302]", "[PAD303]"]
    assert types == [3, 3, 3] + [1] * 297 + [5] * 4  # control, normal, unused
    merges = json.loads(made.backend_tokenizer.to_str())["model"]["merges"]
    assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    ids = [found[f"tokenizer.ggml.{name}_token_id"] for name in ("unknown", "bos", "eos")]
    assert ids == [0, 1, 2] and found["tokenizer.ggml.add_bos_token"] is False
    assert found["tokenizer.chat_template"] == tiny.TEMPLATE


def test_a_copied_tokenizer_is_the_same_entry_by_entry(tmp_path):
    first = entries(lambda w: gguf_tokenizer.write(tiny.byte_level(), 300, w), tmp_path / "a")
    source = str(tmp_path / "a")
    second = entries(lambda w: gguf_tokenizer.copy(source, 300, w), tmp_path / "b")
    assert first == second
    with pytest.raises(ValueError, match="has 300 tokens, the drafter 301; pass the verifier's"):
        entries(lambda w: gguf_tokenizer.copy(source, 301, w), tmp_path / "c")
    with pytest.raises(ValueError, match="has no tokens"):
        entries(lambda w: w.add_name("x"), tmp_path / "none")
        entries(lambda w: gguf_tokenizer.copy(str(tmp_path / "none"), 300, w), tmp_path / "c")
    for name in ("nowhere", "text"):
        (tmp_path / "text").write_text("no model")
        with pytest.raises(ValueError, match="is no GGUF file that can be read"):
            entries(
                lambda w, n=name: gguf_tokenizer.copy(str(tmp_path / n), 300, w), tmp_path / "d"
            )


def with_steps(*steps: pre_tokenizers.PreTokenizer) -> dict:
    made = tiny.byte_level().backend_tokenizer
    made.pre_tokenizer = pre_tokenizers.Sequence(list(steps)) if len(steps) > 1 else steps[0]
    return json.loads(made.to_str())


def byte_steps(regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "steps, name",
    [
        ([byte_steps(True)], "gpt-2"),
        ([DIGITS, byte_steps(True)], "smollm"),
        ([split(LLAMA3), byte_steps(False)], "llama-bpe"),
        ([split(LLAMA3.replace("{1,3}", "")), byte_steps(False)], "qwen2"),
    ],
)
def test_rules_have_llama_cpp_s_names(steps, name):
    assert gguf_tokenizer.rules_of(with_steps(*steps)) == name


@pytest.mark.parametrize(
    "steps",
    [
        [split("a|b"), byte_steps(False)],
        [split(LLAMA3), byte_steps(True)],
        [split(LLAMA3), DIGITS, byte_steps(False)],
        [byte_steps(False)],
        [pre_tokenizers.ByteLevel(add_prefix_space=True)],
        [pre_tokenizers.Whitespace()],
    ],
)
def test_rules_without_a_name_are_refused(steps):
    with pytest.raises(ValueError, match="pass --tokenizer with the verifier's own GGUF"):
        gguf_tokenizer.rules_of(with_steps(*steps))


def test_other_kinds_of_tokenizer_are_refused(tmp_path):
    words = tiny.tokenizer()
    unigram = Tokenizer(models.Unigram([("a", 0.0), ("b", 0.0)], 0))
    for made in (words, PreTrainedTokenizerFast(tokenizer_object=unigram)):
        with pytest.raises(ValueError, match="it is no byte-level BPE"):
            entries(lambda w, t=made: gguf_tokenizer.write(t, 64, w), tmp_path / "a")


def test_transformers_reads_a_tokenizer_that_splits_text_as_before(tmp_path):
    from gguf_files import exported  # a file with a model in it, which transformers wants

    made = tiny.byte_level(300)
    file = exported(tmp_path, tokenizer=made)
    back = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = made(TEXT).input_ids
    assert back(TEXT).input_ids == ids and back.decode(ids) == TEXT
