"""What a run starts from: a new drafter, a given one, or a broken-off run's checkpoint."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.data.conversations import reading
from headstart.models import saved, vocab
from headstart.models.drafter import TrainableDrafter, check_depth
from headstart.models.formats import imports
from headstart.models.loading import is_checkpoint, load_checkpoint, load_to_train
from headstart.models.losses import LossConfig
from headstart.models.saved import check_shape, read_config
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import Verifier
from headstart.script import named
from headstart.train.run.checkpoint import Saved
from headstart.train.run.settings import CommonRecipe, DataConfig, Script


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
            f"the context of {verifier.name}{verifier.longer}"
        )


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


def check_before(
    recipe: CommonRecipe, script: Script, outline: Outline, resumed: Saved | None
) -> None:
    """What can be told before minutes are spent on weights and data.

    Raises:
        ValueError: data that is not there, a drafter to start from that does not fit, settings that
            this verifier does not allow.
    """
    check_data(recipe.data, outline)
    max_depth = script.max_depth
    start, field = recipe.init_from, "init_from"
    if resumed is not None:
        start, field = resumed.folder, "training.resume"
    if start is not None:
        max_depth = check_checkpoint(start, script.kind, outline, field).get("num_heads")
    elif script.check is not None:
        script.check(outline)
    check_depths(max_depth, recipe.training.draft_length, recipe.loss)


def first_drafter(
    recipe: CommonRecipe,
    script: Script,
    verifier: Verifier,
    token_counts: Tensor,
    resumed: Saved | None,
) -> TrainableDrafter:
    """The drafter as training finds it.

    Args:
        token_counts: [V], how often each id is supervised.

    Raises:
        ValueError: a checkpoint that cannot be read, or not for this verifier.
    """
    if resumed is not None:
        drafter = load_checkpoint(resumed.folder, verifier, allow_verifier=None)
        drafter.loss = recipe.loss
        return drafter
    if recipe.init_from is not None:
        return initial_drafter(recipe.init_from, verifier, recipe.loss, token_counts)
    return script.create(verifier, token_counts)
