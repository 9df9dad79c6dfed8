"""From the name of a drafter to the drafter: a checkpoint of ours, another model, or a lookup."""

import json
from pathlib import Path

from headstart.models import saved
from headstart.models.drafter import Drafter, TrainableDrafter
from headstart.models.drafters.draft_lm import (
    DraftLM,
    DraftLMConfig,
    check_layers,
    load_lm,
    parse_cut,
    parse_layers,
)
from headstart.models.drafters.eagle1 import Eagle1
from headstart.models.drafters.eagle3 import Eagle3
from headstart.models.drafters.hydra_heads import HydraHeads
from headstart.models.drafters.lookup import (
    Lookahead,
    LookaheadConfig,
    PromptLookup,
    PromptLookupConfig,
)
from headstart.models.drafters.medusa import Medusa
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.formats import imports, mtp_native
from headstart.models.joint.lora import tune
from headstart.models.joint.mtp import VERIFIER
from headstart.models.losses import LossConfig
from headstart.models.saved import explained, made_for, read_config
from headstart.models.verifier.names import is_path
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import Verifier
from headstart.script import named, options

CLASSES: dict[str, type[TrainableDrafter]] = {
    "eagle3": Eagle3,
    "eagle1": Eagle1,
    "medusa": Medusa,
    "hydra_heads": HydraHeads,
    "mtp": MTP,
    "draft_lm": DraftLM,
}
LOOKUPS = {
    "prompt-lookup": (PromptLookup, PromptLookupConfig),
    "lookahead": (Lookahead, LookaheadConfig),
}


def load(name: str, verifier: Verifier, allow_verifier: bool = False) -> Drafter:
    """The drafter of this name, ready to draft.

    Args:
        name: the folder of a checkpoint that headstart saved, or of a drafter that another program
            did (see `imports`); prompt-lookup or lookahead, options behind a colon
            (prompt-lookup:max_ngram=4); layers:0-5, the verifier itself with only these of its
            layers; or any causal language model, as a folder, a Hub name or embedded/smollm2-135m.
        allow_verifier: accept a checkpoint for a verifier with another fingerprint.

    Raises:
        ValueError: no such drafter, one that cannot be read, one made for another verifier, or one
            whose verifier was trained with it (see `load_pair`).
    """
    kind = name.partition(":")[0]
    if kind in LOOKUPS:
        lookup, config = LOOKUPS[kind]
        with named(f"drafter {name!r}"):
            return lookup(options(name, config))
    if kind == "layers":
        return DraftLM(parse_cut(name, verifier, "drafter"), verifier, LossConfig()).eval()
    dtype = str(verifier.dtype).removeprefix("torch.")
    if saved.kind_in(name) is not None:
        return imports.load(name, verifier, LossConfig()).eval()
    if not is_checkpoint(name):
        return DraftLM(load_lm(name, dtype, verifier), verifier, LossConfig()).eval()
    if "adapter" in read_config(name)["headstart"]:
        raise ValueError(
            f"drafter {name!r} drafts for a verifier that was trained with it, which no other "
            "drafter shares; measure it alone, with eval/acceptance.py"
        )
    return load_checkpoint(name, verifier, allow_verifier, dtype).eval()


def check_name(name: str, verifier: str) -> None:
    """Raise a ValueError for options or layers in a drafter's name that this verifier lacks:
    its config alone is read."""
    kind = name.partition(":")[0]
    with named(f"drafter {name!r}"):
        if kind in LOOKUPS:
            lookup, config = LOOKUPS[kind]
            lookup(options(name, config))
        elif kind == "layers":
            check_layers(parse_layers(name), Outline.read(verifier))


def is_checkpoint(name: str) -> bool:
    """Whether this names a folder that headstart should have saved: no lookup, no model, no drafter
    of another program."""
    folder = Path(name)
    if name.partition(":")[0] in (*LOOKUPS, "layers") or saved.kind_in(folder) is not None:
        return False
    if not folder.exists():  # a link or a path that leads nowhere, or a name of the Hub
        return folder.is_symlink() or is_path(name)
    try:
        config = json.loads((folder / "config.json").read_text())
        return "headstart" in config or "model_type" not in config
    except (OSError, TypeError, ValueError):
        return True


def load_pair(
    verifier: str | None, drafter: str, dtype: str, device: str, allow_verifier: bool = False
) -> tuple[Verifier, Drafter]:
    """A drafter, ready to draft, and its verifier: the one it was trained for when not given. A
    verifier's folder with MTP modules in it is both.

    Raises:
        ValueError: either cannot be loaded, they do not belong together, or a drafter that was
            made for no verifier came without one.
    """
    name = verifier
    if name is None and is_checkpoint(drafter):
        name = read_config(drafter)["headstart"]["verifier"]
        together = Path(drafter) / VERIFIER
        name = str(together) if together.is_dir() else name
    if verifier in (None, drafter) and mtp_native.holds_modules(drafter):
        own = Verifier.load(drafter, dtype, device)
        return own, mtp_native.create(own, MTPConfig(), LossConfig()).eval()
    if name is None:
        raise ValueError(
            f"verifier: {drafter} was made for none in particular; pass --verifier, such as "
            "embedded/smollm2-135m"
        )
    check_name(drafter, name)
    loaded = Verifier.load(name, dtype, device)
    if tunes_verifier(drafter):
        made = load_checkpoint(drafter, loaded, None).eval()  # its adapter does not go with a copy
        tune(loaded, Path(drafter))
        return loaded, made
    return loaded, load(drafter, loaded, allow_verifier)


def tunes_verifier(name: str) -> bool:
    """Whether this is a drafter whose verifier was trained with it."""
    return is_checkpoint(name) and "adapter" in read_config(name)["headstart"]


def class_of(name: str) -> type[Drafter] | None:
    """The class that `load` makes of this name, told without loading anything; None: unknown.

    Raises:
        ValueError: a damaged checkpoint.
    """
    kind = name.partition(":")[0]
    if kind in LOOKUPS:
        return LOOKUPS[kind][0]
    if kind == "layers":
        return DraftLM
    if (theirs := saved.kind_in(name)) is not None:
        return imports.CLASSES.get(theirs)
    if is_checkpoint(name):
        return CLASSES.get(read_config(name)["headstart"]["type"])
    return MTP if mtp_native.holds_modules(name) else DraftLM


def load_to_train(folder: str, verifier: Verifier, loss: LossConfig) -> TrainableDrafter:
    """A drafter to start from: a checkpoint, perhaps for another verifier, one that another program
    saved, or any causal language model.

    Raises:
        ValueError: none of these, or one that cannot be read.
    """
    if saved.kind_in(folder) is not None:
        return imports.load(folder, verifier, loss)
    if not is_checkpoint(folder):
        return DraftLM.create(verifier, DraftLMConfig(folder), loss)
    drafter = load_checkpoint(folder, verifier, allow_verifier=True)
    drafter.loss = loss
    return drafter


def kind_of(drafter: Drafter) -> str:
    """What a report calls it."""
    classes = CLASSES | {name: lookup for name, (lookup, _) in LOOKUPS.items()}
    kinds = {made: name for name, made in classes.items()}
    return kinds[type(drafter)]


def load_checkpoint(
    folder: str | Path,
    verifier: Verifier,
    allow_verifier: bool | None = False,
    dtype: str = "float32",
) -> TrainableDrafter:
    """Read a drafter that headstart saved. It drafts for this verifier from now on.

    Args:
        allow_verifier: accept a verifier with another fingerprint, such as a quantised copy;
            None: do not, and name no such option in the message, where there is none.
        dtype: of a draft model; the weights of any other drafter are float32.

    Raises:
        ValueError: no drafter there, one that cannot be read, or one made for another verifier.
    """
    config = read_config(folder)
    entry = config["headstart"]
    if not allow_verifier and entry["fingerprint"] != verifier.fingerprint():
        hint = (
            "" if allow_verifier is None else ", or --allow_verifier true for a copy of the model"
        )
        raise ValueError(
            f"drafter {str(folder)!r} was trained for {entry['verifier']} (fingerprint "
            f"{entry['fingerprint']}), the verifier is {verifier.name} ({verifier.fingerprint()}"
            f"); pass its own verifier{hint}"
        )
    if entry["type"] not in CLASSES:
        raise ValueError(
            f"drafter {str(folder)!r} has type {entry['type']!r}; this version of headstart "
            f"knows {', '.join(CLASSES)}"
        )
    arguments = (Path(folder), config, verifier, LossConfig())
    with explained(folder):
        if entry["type"] == "draft_lm":
            return DraftLM.load(*arguments, dtype)
        drafter = CLASSES[entry["type"]].load(*arguments)
    # an adapter is its old verifier's; whoever trains on with one says so again
    kept = {key: value for key, value in entry.items() if key != "adapter"}
    drafter.config.headstart = kept | made_for(verifier, entry["type"])
    return drafter
