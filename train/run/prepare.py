"""What every training script prepares before the loop: verifier, rows, batches, validation."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor

from headstart.data.conversations import reading
from headstart.data.conversations.mixture import Mixture, check_weights
from headstart.data.rows.collate import Loader
from headstart.data.rows.rendering import render_all
from headstart.data.rows.row import Row
from headstart.data.rows.selection import Selection
from headstart.data.rows.stream import StreamLoader
from headstart.data.states.cache import Cache, CachedFeaturizer
from headstart.data.states.featurize import Featurizer
from headstart.eval.measures.counts import summarise
from headstart.eval.measures.replay import replay_rows
from headstart.models import saved, vocab
from headstart.models.batch import Batch
from headstart.models.drafter import TrainableDrafter, check_depth
from headstart.models.formats import imports
from headstart.models.loading import is_checkpoint, load_to_train
from headstart.models.losses import LossConfig
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.saved import check_shape, read_config
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.partial import PartialVerifier
from headstart.models.verifier.verifier import Verifier
from headstart.script import named
from headstart.train.run.loop import TrainingConfig
from headstart.train.run.sharding import collect, in_bf16

STREAMED_FIRST = 4096
"""Conversations whose tokens choose the draft vocabulary, where not all can be counted."""


@dataclass
class DataConfig:
    """What is trained on, and what validation replays."""

    train: str | dict[str, float]
    """JSONL or Parquet file, folder or Hub data set: conversations that the verifier answered.
    Several are mixed by weight: {SOURCE: WEIGHT, …}."""
    eval: str | None = None
    """The same, greedy answers to other prompts; default: no validation."""
    max_length: int = 2048
    """Longer rows are cut, in tokens."""
    batch_tokens: int = 4096
    """Slots of a micro-batch, padding included."""
    packed: bool = True
    """Several documents in a row of max_length slots; else one, padded."""
    min_tokens: int = 0
    """Training rows with fewer tokens are left out."""
    longer: Literal["cut", "drop"] = "cut"
    """Training rows over max_length: cut there, or left out."""
    streaming: bool = False
    """Read the training data while training, window by window: for more than memory holds."""
    limit: int | None = None
    """Train on the first so many conversations."""
    eval_limit: int | None = None
    """Replay so many conversations, evenly spread over the file."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template; default: those recorded with the answers."""
    keep_states: bool = True
    """Keep the verifier's states in memory over epochs, where they fit; not when streaming."""
    features: str | None = None
    """Folder of states that data/features.py wrote; default: the verifier computes them."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_length", 2), ("batch_tokens", 1), ("limit", 1), ("eval_limit", 1),
            ("min_tokens", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"data.{name} is {value}; it must be {least} or more")
        if self.features is not None and self.streaming:
            raise ValueError(
                f"data.features is {self.features!r}, but what is streamed has no states on disk; "
                "pass --data.streaming false, or --data.features null"
            )
        with named("data.train"):
            check_weights(self.weights)

    @property
    def weights(self) -> dict[str, float]:
        """Of each source that is trained on."""
        return {self.train: 1.0} if isinstance(self.train, str) else self.train


@dataclass
class Data:
    """Rendered rows."""

    train: list[Row]
    """None where they are read while training."""
    eval: list[Row]
    token_counts: Tensor
    """[V], how often each id is supervised; when streaming, in the first conversations."""
    selection: Selection | None = None
    """Which rows are trained on; needed to stream them."""


def check_data(config: DataConfig, verifier: Outline) -> None:
    """Raise a ValueError for files that are not there, or rows longer than the verifier reads."""
    held_out = [] if config.eval is None else [config.eval]
    for name, sources in (("train", config.weights), ("eval", held_out)):
        for source in sources:
            with named(f"data.{name}"):
                reading.find(source)
    if config.max_length > verifier.context_length:
        raise ValueError(
            f"data.max_length is {config.max_length}; it must be in 2 … {verifier.context_length}, "
            f"the context of {verifier.name}"
        )


def load_verifier(
    name: str, dtype: str, accelerator: Accelerator, features: str | None = None
) -> Verifier:
    """The frozen verifier on this process's device; dtype auto follows the mixed precision.

    Args:
        features: folder of its cached states; then no more of it is loaded than they leave out.
    """
    if dtype == "auto":
        dtype = "bfloat16" if in_bf16(accelerator) else "float32"
    with accelerator.main_process_first():  # which fetches it, where it is not here yet
        if features is None:
            return Verifier.load(name, dtype, accelerator.device)
        Cache(features).check_there()
        return PartialVerifier.read(name, dtype, accelerator.device)


def render_data(config: DataConfig, verifier: Verifier, accelerator: Accelerator) -> Data:
    """Render both data sets and print the audit.

    Raises:
        ValueError: no such data, or nothing in it to learn from.
    """
    arguments = (
        verifier.tokenizer,
        verifier.terminator_ids,
        config.max_length,
        config.chat_template_kwargs,
    )
    eval_rows: list[Row] = []
    selection = Selection(*arguments, config.min_tokens, config.longer)
    if config.eval in config.weights:
        warnings.warn(
            f"data.eval {config.eval!r} is trained on: its τ says nothing about other prompts",
            stacklevel=2,
        )
    elif config.eval is not None:
        with named("data.eval"):
            selection.hold_out(reading.read(config.eval))
    limit = config.limit
    if config.streaming:
        limit = STREAMED_FIRST if limit is None else min(limit, STREAMED_FIRST)
    sources = ", ".join(config.weights)
    with named("data.train"):
        train = [row for c in Mixture(config.weights, limit) for row in selection.rows(c)]
        selection.audit.check(sources, config.max_length)
    accelerator.print(f"{'the first of ' * config.streaming}{sources}: {selection.audit}")
    if config.eval is not None:
        with named("data.eval"):
            eval_rows, audit = render_all(config.eval, *arguments, config.eval_limit, spread=True)
        accelerator.print(f"{config.eval}: {audit}; {len(eval_rows)} rows are replayed")
    counts = count_tokens(train, verifier.vocab_size)
    return Data([] if config.streaming else train, eval_rows, counts, selection)


def count_tokens(rows: list[Row], vocab_size: int) -> Tensor:
    """How often each id is supervised: long [V]."""
    supervised = [
        token
        for row in rows
        for token, turn in zip(row.input_ids, row.loss_mask, strict=True)
        if turn
    ]
    return torch.tensor(supervised).bincount(minlength=vocab_size)


def check_checkpoint(
    folder: str | Path, kind: str, verifier: Outline, field: str
) -> dict[str, Any]:
    """The config of a drafter to start from.

    Raises:
        ValueError: none there, one of another type than this script trains, or one for a verifier
            of another shape.
    """
    with named(field):
        if saved.kind_in(folder) is not None:
            _, config, _ = imports.describe(folder, verifier)
        elif kind == "draft_lm" and not is_checkpoint(str(folder)):
            return {}  # any causal language model
        else:
            config = read_config(folder)
    refuse_other_kind(folder, config, kind, field)
    with named(field):
        check_shape(folder, config, verifier)
    return config


def check_kind(folder: str | Path, kind: str, field: str) -> None:
    """Raise a ValueError for a checkpoint of another type than this script trains."""
    with named(field):
        config = read_config(folder)
    refuse_other_kind(folder, config, kind, field)


def refuse_other_kind(folder: str | Path, config: dict[str, Any], kind: str, field: str) -> None:
    """Raise a ValueError for a config of another type than this script trains."""
    found = config["headstart"]["type"]
    if found != kind:
        raise ValueError(
            f"{field}: {folder} is a drafter of type {found}, this script trains {kind}; use "
            f"train/{found}.py"
        )


def initial_drafter(
    folder: str, verifier: Verifier, loss: LossConfig, token_counts: Tensor
) -> TrainableDrafter:
    """A trained drafter to start from, perhaps another verifier's or another program's.

    Its draft vocabulary makes room for the tokens of the data: what it cannot draft, no training
    mends.

    Raises:
        ValueError: none there, or one for a verifier of another shape.
    """
    drafter = load_to_train(folder, verifier, loss)
    made = read_config(folder)["headstart"] if is_checkpoint(folder) else None
    if made is not None and made["fingerprint"] != verifier.fingerprint():
        warnings.warn(
            f"init_from: {folder} was trained for {made['verifier']}, which is not this "
            f"{verifier.name}; its acceptance starts lower",
            stacklevel=2,
        )
    if made is not None and "adapter" in made:
        warnings.warn(
            f"init_from: {folder} drafts for a verifier that was trained with it, whose adapter is "
            f"left behind; its acceptance starts lower for {verifier.name} itself",
            stacklevel=2,
        )
    before = drafter.draft_ids
    if before is not None:
        drafter = drafter.with_vocabulary(vocab.adapt(before.cpu(), token_counts, verifier))
        added = int((~torch.isin(drafter.draft_ids, before)).sum())
        print(f"init_from: {added} ids of its draft vocabulary make room for others of the data")
    return drafter


def check_depths(max_depth: int | None, draft_length: int, loss: LossConfig) -> None:
    """Raise a ValueError for more steps than the drafter has, or fewer: heads without training."""
    check_depth(max_depth, draft_length, "training.draft_length")
    check_depth(max_depth, loss.num_steps, "loss.num_steps")
    if max_depth is not None and loss.num_steps < max_depth:
        raise ValueError(
            f"loss.num_steps is {loss.num_steps}, but this drafter has {max_depth} heads, which "
            f"would not all be trained; pass {max_depth}"
        )


def make_loader(
    config: DataConfig,
    data: Data,
    verifier: Verifier,
    training: TrainingConfig,
    accelerator: Accelerator,
) -> Loader | StreamLoader:
    """This rank's batches of the training rows."""
    shape = {
        "packed": config.packed,
        "pad_id": verifier.terminator_ids[0] if verifier.terminator_ids else 0,
        "seed": training.seed,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "multiple": 32,  # few shapes: oneDNN compiles a kernel for every new one
    }
    if not config.streaming:
        return Loader(data.train, config.batch_tokens, config.max_length, **shape)
    mixture = Mixture(config.weights, config.limit)
    return StreamLoader(
        mixture, data.selection, config.batch_tokens, **shape, say=accelerator.print
    )


def make_featurizer(
    config: DataConfig, data: Data, drafter: TrainableDrafter, accelerator: Accelerator
) -> Featurizer:
    """Adds the verifier's states: cached on disk, or kept over epochs if the recipe says so."""
    documents = [row.input_ids for row in data.train + data.eval]
    if config.features is not None:
        return CachedFeaturizer(
            config.features, drafter.verifier, drafter.feature_layers, documents
        )
    num_tokens = sum(map(len, documents))
    return Featurizer(
        drafter.verifier,
        drafter.feature_layers,
        keep=config.keep_states and not config.streaming,
        num_tokens=-(-num_tokens // accelerator.num_processes),
        documents=documents if accelerator.num_processes == 1 else (),
        verbose=accelerator.is_main_process,
    )


def make_validation(
    data: Data,
    drafter: TrainableDrafter,
    featurize: Callable[[Batch], Batch],
    draft_length: int,
    accelerator: Accelerator,
) -> Callable[[], dict[str, Any]] | None:
    """Greedy replay of the evaluation rows, dealt out to the ranks: the measures of a report."""
    if not data.eval:
        return None
    mine = data.eval[accelerator.process_index :: accelerator.num_processes]
    greedy = Sampling(temperature=0.0)

    def validate() -> dict[str, Any]:
        drafting = Drafting(False, greedy)
        counts = replay_rows(drafter, mine, featurize, draft_length, greedy, drafting)
        return summarise(collect(counts))

    return validate
