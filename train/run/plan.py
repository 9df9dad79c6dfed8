"""What a run would need, from its recipe and the verifier's config alone: nothing is loaded.

    python train/eagle3.py --config recipes/eagle3/llama-3.1-8b.yaml --plan ddp:8

The drafter is made without memory (on torch's meta device), and so is one micro-batch's pass
through it: what autograd saves there is counted, not guessed. The loss, which keeps nothing but
gradients, is added by arithmetic.

Legend: T slots of a micro-batch, S steps, H verifier's hidden size, L feature layers, V' draft
vocabulary.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, masking_utils

from headstart.models.batch import Batch
from headstart.models.drafter import TrainableDrafter
from headstart.models.losses import LossConfig
from headstart.models.parts.heads import HeadsDrafter
from headstart.models.verifier import mimo
from headstart.models.verifier.names import HINT
from headstart.models.verifier.outline import first_line, locate
from headstart.models.verifier.partial import needed
from headstart.models.verifier.verifier import Verifier
from headstart.train.run.settings import CommonRecipe, DataConfig, Script

# Tensors [rows, V'] that a chunk of the loss holds at once: of the drafter's rows logits, log p, p
# or the gradient, the teacher's for each row, the weighted gradient; of the teacher's positions
# logits, log q, q̃. A loss with unrestricted q has the last for the verifier's whole vocabulary.
_OF_ROWS, _OF_POSITIONS = 5, 3


class NoTokenizer:
    """The verifier's, as far as a drafter's size depends on it: not at all."""

    chat_template = None
    eos_token_id = None
    all_special_ids = ()

    def __init__(self) -> None:
        self.added_tokens_decoder: dict[int, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        return {}


class Weightless(Verifier):
    """A verifier without weights."""

    @classmethod
    def load(cls, name: str, dtype: str = "float32", device: Any = "meta") -> "Weightless":
        """From its config.json.

        Raises:
            ValueError: none can be read.
        """
        path = locate(name)
        try:
            config = AutoConfig.from_pretrained(path)
            with torch.device("meta"):
                model = mimo.from_config(config, getattr(torch, dtype))
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"verifier {name!r}: its config cannot be read: {first_line(error)} {HINT} A "
                "folder with no more than its config.json will do."
            ) from error
        return cls(model, NoTokenizer(), name)

    def fingerprint(self) -> str:
        return "none: a plan"


@dataclass
class Plan:
    """Bytes of one process, but for what says otherwise."""

    kind: str
    verifier_name: str
    launcher: str
    processes: int
    verifier_parameters: int
    drafter_parameters: int
    tokens_per_step: int
    """Slots of an optimizer step, all processes together."""
    feature_bytes: int
    """Of one token: features and last hidden state."""
    verifier: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Weights and gradients made whole for a step, where they are shared out between steps, and
    autocast's copies."""
    features: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        names = (
            "verifier", "weights", "gradients", "optimizer", "gathered", "features",
            "activations", "loss",
        )  # fmt: skip
        return sum(getattr(self, name) for name in names)

    def __str__(self) -> str:
        rows = [
            ("verifier's weights", self.verifier),
            ("drafter's weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer state", self.optimizer),
            ("copies for a step", self.gathered),
            ("the verifier's states of a micro-batch", self.features),
            ("activations", self.activations),
            ("loss", self.loss),
            ("total", self.total),
        ]
        unit, scale = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        lines = [
            f"{self.kind} for {self.verifier_name}, {self.launcher} on {self.processes} processes",
            f"parameters: verifier {self.verifier_parameters / 1e6:,.1f} million, drafter "
            f"{self.drafter_parameters / 1e6:,.1f} million",
            f"tokens per step: {self.tokens_per_step:,}",
            f"features: {self.feature_bytes:,} bytes a token; cached on disk "
            f"{self.feature_bytes * 1e6 / 1e9:.1f} GB for each million tokens",
            f"memory of each process, in {unit}:",
            *(f"  {name:<40}{size / scale:10.3f}" for name, size in rows if size),
        ]
        return "\n".join(lines)


def parse(text: str) -> tuple[str, int]:
    """`zero3:8` -> launcher and processes.

    Raises:
        ValueError: anything else.
    """
    found = re.fullmatch(r"(ddp|zero2|zero3|fsdp2):([1-9]\d*)", text)
    if not found:
        raise ValueError(
            f"plan is {text!r}; pass launcher and processes, such as ddp:1, zero2:8, zero3:8 or "
            "fsdp2:8"
        )
    return found[1], int(found[2])


def plan(recipe: CommonRecipe, script: Script) -> Plan:
    """The plan of a recipe, as `recipe.plan` says it is launched.

    Raises:
        ValueError: the verifier's config cannot be read, or the drafter does not fit it.
    """
    launcher, processes = parse(recipe.plan)
    if script.joint is not None or script.kind == "draft_lm":
        what = (
            "the verifier too (joint)"
            if script.joint is not None
            else "a language model (draft_lm)"
        )
        raise ValueError(
            f"plan: a run that trains {what} cannot be planned; try three steps of it instead, "
            "--training.max_steps 3"
        )
    bf16 = recipe.training.mixed_precision == "bf16"
    dtype = recipe.verifier_dtype
    if dtype == "auto":
        dtype = "bfloat16" if bf16 else "float32"
    verifier = Weightless.load(recipe.verifier, dtype)
    with torch.device("meta"):
        counts = torch.zeros(verifier.vocab_size)
        drafter = script.create(verifier, counts)
    own = numel(drafter)
    held = nbytes(verifier.model)
    if recipe.data.features is not None:  # as prepare.load_verifier
        names = set(needed(verifier.model))
        held = sum(
            weight.numel() * weight.element_size()
            for name, weight in verifier.model.named_parameters()
            if name in names
        )
    rows, width = shape(recipe.data)
    state_bytes = (len(drafter.feature_layers) + 1) * verifier.hidden_size * verifier.dtype.itemsize
    shared = launcher in ("zero3", "fsdp2")
    weights = 4 * own // processes if shared else 4 * own
    shards = 1 if launcher == "ddp" else processes
    return Plan(
        kind=script.kind,
        verifier_name=recipe.verifier,
        launcher=launcher,
        processes=processes,
        verifier_parameters=numel(verifier.model),
        drafter_parameters=own,
        tokens_per_step=processes * recipe.training.accumulation * rows * width,
        feature_bytes=state_bytes,
        verifier=held,
        weights=weights,
        gradients=4 * own // shards,
        optimizer=8 * own // shards,
        gathered=(4 * own if shared else 0) + (4 * own if shards > 1 else 0) + 2 * own * bf16,
        features=rows * width * state_bytes,
        activations=saved_bytes(drafter, rows, width, recipe.loss.num_steps, bf16, recipe.data),
        loss=loss_bytes(drafter, rows * width, recipe.loss),
    )


def numel(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def nbytes(module: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def shape(config: DataConfig) -> tuple[int, int]:
    """Rows and width of a full micro-batch."""
    width = min(config.max_length, config.batch_tokens)
    return config.batch_tokens // width, width


def saved_bytes(
    drafter: TrainableDrafter, rows: int, width: int, steps: int, bf16: bool, data: DataConfig
) -> int:
    """What a micro-batch's pass keeps for its gradients, and the steps' hidden states."""
    drafter = drafter.to(torch.bfloat16) if bf16 else drafter  # as autocast would
    verifier, dtype = drafter.verifier, torch.bfloat16 if bf16 else torch.float32
    own = {weight.untyped_storage()._cdata for weight in drafter.parameters()}
    kept: dict[int, Tensor] = {}  # by storage; held, so that none is freed and counted anew

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        # without memory there is no fused attention, which keeps no table of all pairs of slots
        pairs = tensor.shape[-2:] == (width, width) and math.prod(tensor.shape[:-2]) > rows
        if storage not in own and not pairs:
            kept.setdefault(storage, tensor)
        return tensor

    meta = {"device": "meta"}
    slots = torch.zeros(rows, width, dtype=torch.long, **meta)
    states = torch.zeros(rows, width, verifier.hidden_size, dtype=dtype, **meta)
    features = torch.zeros(
        rows, width, len(drafter.feature_layers) * verifier.hidden_size, dtype=dtype, **meta
    )
    batch = Batch(
        input_ids=slots,
        loss_mask=slots,
        position_ids=slots,
        document_ids=torch.zeros(rows, width, dtype=torch.long),  # one document a row
        last_hidden=states,
        features=features,
    )
    given = {t.untyped_storage()._cdata for t in (slots, states, features)}
    with saved_tensors_hooks(pack, lambda tensor: tensor), _one_document_a_row():
        for hidden in drafter.unroll(batch, steps):
            pack(hidden)
    saved = sum(
        tensor.untyped_storage().nbytes()
        for storage, tensor in kept.items()
        if storage not in given
    )
    attends = not isinstance(drafter, HeadsDrafter)
    mask = rows * width * width * dtype.itemsize if data.packed and attends else 0
    return saved + mask


@contextmanager
def _one_document_a_row() -> Iterator[None]:
    """Keep transformers from looking for documents in positions, which have no values here."""
    looking = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looking


def loss_bytes(drafter: TrainableDrafter, slots: int, config: LossConfig) -> int:
    """The largest chunk, and the gradient of every step's hidden states."""
    vocab = drafter.verifier.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids)
    taught = drafter.verifier.vocab_size if config.kind in ("lk", "lk_hybrid") else vocab
    positions = min(config.chunk_positions, slots)
    hidden = drafter.config.hidden_size
    chunk = 4 * positions * (_OF_ROWS * config.num_steps * vocab + _OF_POSITIONS * taught)
    teacher = 4 * vocab * hidden if drafter.draft_ids is not None else 0  # its head's rows
    return chunk + teacher + 4 * slots * config.num_steps * hidden
