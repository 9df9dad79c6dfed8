"""Text that every machine has, and an untrained model for it: the sources of Python's own library.

    python data/sources.py --out outputs/sources

Writes `train.jsonl`, plain text; `eval.jsonl`, pieces of other files, each as a prompt and what
follows; and `verifier/`, a tiny Llama with random weights and a tokenizer that was trained on the
training text. Its chat template only joins the turns, and ends the text after an answer.
"""

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.models.proposal.sampling import check_seed
from headstart.models.verifier.weights import follow_umask
from headstart.script import run_script

END = "<|endoftext|>"
HELD_OUT = 20  # one file in so many
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}" + END + "{% endif %}{% endfor %}"
)


@dataclass
class Sources:
    """What to write, and where."""

    out: str
    """Folder for the texts and the model."""
    characters: int = 800
    """Longest piece of a file, which is a document of its own."""
    vocab_size: int = 2048
    """Of the tokenizer."""
    hidden_size: int = 128
    """Of the model, in heads of 32."""
    num_layers: int = 4
    """Decoder layers of the model."""
    context_length: int = 512
    """Longest text of the model, in tokens."""
    seed: int = 0
    """Of the model's weights."""

    def __post_init__(self) -> None:
        if self.hidden_size < 32 or self.hidden_size % 32:
            raise ValueError(f"hidden_size must be a multiple of 32, got {self.hidden_size}")
        alphabet = len(pre_tokenizers.ByteLevel.alphabet()) + 1  # bytes, and the end of a text
        for name, least in (
            ("vocab_size", alphabet), ("characters", 1), ("num_layers", 1), ("context_length", 2),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}")
        check_seed(self.seed)


def pieces(text: str, characters: int) -> Iterator[str]:
    """The text's paragraphs, as many together as fit; a longer one is cut at a line's end."""
    piece = ""
    for line in text.splitlines(keepends=True):
        full = len(piece) + len(line) > characters
        paragraph = not line.strip() and len(piece) > characters // 2
        if piece.strip() and (full or paragraph):
            yield piece.strip("\n")
            piece = ""
        piece += line
    if piece.strip():
        yield piece.strip("\n")


def standard_library() -> list[Path]:
    """Modules of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
    files = [p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts)]
    return sorted(files)


def train_tokenizer(texts: list[str], settings: Sources) -> PreTrainedTokenizerFast:
    """Byte-level BPE."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=END, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def untrained(tokenizer: PreTrainedTokenizerFast, settings: Sources) -> LlamaForCausalLM:
    """A Llama with random weights."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.hidden_size * 8 // 3 // 32 * 32,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.hidden_size // 32,
        num_key_value_heads=settings.hidden_size // 32,
        max_position_embeddings=settings.context_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def run(settings: Sources) -> None:
    """Write the three of them.

    Raises:
        ValueError: the folder holds something already, or cannot be made.
    """
    out = Path(settings.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ValueError(f"out: {settings.out!r} holds something already; pass another folder")
    except OSError as error:
        raise ValueError(
            f"out: {settings.out!r} cannot be written to ({error.strerror}); pass another folder"
        ) from error
    training, held_out = [], []
    for number, file in enumerate(standard_library()):
        text = file.read_text(encoding="utf-8", errors="ignore")
        kept = held_out if number % HELD_OUT == 0 else training
        kept += pieces(text, settings.characters)
    with (out / "train.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in training)
    with (out / "eval.jsonl").open("w", encoding="utf-8") as file:
        for text in held_out:
            lines = text.splitlines(keepends=True)
            if len(lines) < 4:
                continue
            parts = "".join(lines[: len(lines) // 3]), "".join(lines[len(lines) // 3 :])
            roles = ("user", "assistant")
            turns = [
                {"role": role, "content": part} for role, part in zip(roles, parts, strict=True)
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    tokenizer = train_tokenizer(training, settings)
    model = untrained(tokenizer, settings)
    tokenizer.save_pretrained(out / "verifier")
    model.save_pretrained(out / "verifier")
    follow_umask(*(out / "verifier").glob("*.safetensors"))
    print(
        f"{len(training)} pieces to train on, {len(held_out)} held out, {len(tokenizer)} tokens, "
        f"{model.num_parameters() / 1e6:.1f} M parameters; written to {out}"
    )


if __name__ == "__main__":
    run_script(Sources, run)
