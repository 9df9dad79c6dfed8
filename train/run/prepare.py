"""What a run needs: the verifier, rows, batches, the drafter, validation."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from headstart.data.conversations import reading
from headstart.data.conversations.law import Law
from headstart.data.conversations.law import check as check_law
from headstart.data.conversations.mixture import Mixture
from headstart.data.rows.collate import Loader
from headstart.data.rows.rendering import render_all
from headstart.data.rows.row import Row, check_ids
from headstart.data.rows.selection import Selection
from headstart.data.rows.stream import StreamLoader
from headstart.data.states.cache import Cache, CachedFeaturizer
from headstart.data.states.featurize import Featurizer
from headstart.eval.measures.counts import summarise
from headstart.eval.measures.replay import replay_rows
from headstart.models import vocab
from headstart.models.batch import Batch
from headstart.models.drafter import TrainableDrafter
from headstart.models.joint.lora import JointModel
from headstart.models.joint.mtp import VERIFIER, JointMTP
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.verifier.adapter import join
from headstart.models.verifier.partial import PartialVerifier
from headstart.models.verifier.verifier import Verifier
from headstart.script import named
from headstart.train.run.checkpoint import Saved
from headstart.train.run.settings import CommonRecipe, DataConfig, Featurize, Script, TrainingConfig
from headstart.train.run.sharding import check_whole, collect, in_bf16
from headstart.train.run.start import first_drafter

STREAMED_FIRST = 4096
"""Conversations whose tokens choose the draft vocabulary, where not all can be counted."""
_WAY_OUT = (
    "validation replays greedy answers; write them anew with data/regenerate.py at temperature 0, "
    "or pass --data.eval null"
)


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
        ValueError: no such data, nothing in it to learn from, or evaluation answers that are not
            greedy.
    """
    arguments = (
        verifier.tokenizer,
        verifier.terminator_ids,
        config.max_length,
        config.chat_template_kwargs,
    )
    if config.eval is not None:
        with named(f"data.eval {config.eval!r}"):
            # what cannot be read is counted below
            there = reading.read(config.eval, refuse=lambda row: None)
            check_law(there, Law(0.0), lambda law: _WAY_OUT)
    eval_rows: list[Row] = []
    rows, most = verifier.num_embeddings, config.max_bad_rows
    selection = Selection(
        *arguments, config.min_tokens, config.longer, num_embeddings=rows, max_bad_rows=most
    )
    if config.eval in config.weights:
        warnings.warn(
            f"data.eval {config.eval!r} is trained on: its τ says nothing about other prompts",
            stacklevel=2,
        )
    elif config.eval is not None:
        with named("data.eval"):
            selection.hold_out(reading.read(config.eval, refuse=lambda row: None))
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
            eval_rows, audit = render_all(
                config.eval, *arguments, config.eval_limit, spread=True, max_bad_rows=most
            )
            for row in eval_rows:
                check_ids(f"row {row.id!r}", row.input_ids, rows)
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


class Needs(NamedTuple):
    """What the loop runs on."""

    model: TrainableDrafter | JointModel | JointMTP
    """What is trained: the drafter, or both it and its verifier."""
    loader: Loader | StreamLoader
    featurize: Featurize
    """Adds the verifier's states to a batch of training."""
    validate: Callable[[], dict[str, Any]] | None


def prepare(
    recipe: CommonRecipe, script: Script, accelerator: Accelerator, resumed: Saved | None
) -> Needs:
    """Load the verifier, render the data, make the drafter and what feeds it.

    Raises:
        ValueError: no such model or data, or what does not go together.
    """
    name = join(recipe.verifier, recipe.adapter)
    if resumed is not None and (resumed.folder / VERIFIER).is_dir():
        name = str(resumed.folder / VERIFIER)  # as far as it has been trained
    whole = script.joint is not None or recipe.adapter is not None or script.kind == "draft_lm"
    verifier = load_verifier(
        name, recipe.verifier_dtype, accelerator, None if whole else recipe.data.features
    )
    data = render_data(recipe.data, verifier, accelerator)
    drafter = first_drafter(recipe, script, verifier, data.token_counts, resumed)
    if resumed is not None:
        accelerator.print(f"resuming from {resumed.folder}")
    if drafter.draft_ids is not None:
        covered = vocab.coverage(data.token_counts, drafter.draft_ids.cpu())
        accelerator.print(
            f"draft vocabulary: {len(drafter.draft_ids)} of {verifier.vocab_size} ids, which are "
            f"{covered:.2%} of the supervised tokens"
        )
    training = recipe.training
    model, loader = drafter, make_loader(recipe.data, data, verifier, training, accelerator)
    featurize = make_featurizer(recipe.data, data, drafter, accelerator)
    validating = featurize
    if script.joint is not None:
        model = script.joint(drafter, resumed and resumed.folder)
        featurize = model.original(featurize)
        # of the verifier as it is by then: its states cannot be kept
        validating = Featurizer(verifier, drafter.feature_layers)
    elif script.rewrite is not None:
        featurize = script.rewrite(drafter, featurize)
        if featurize is not validating:
            check_whole(accelerator, "on_policy")
    validate = make_validation(data, drafter, validating, training.draft_length, accelerator)
    return Needs(model, loader, featurize, validate)
