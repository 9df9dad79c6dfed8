"""What an engine is asked to serve: a drafter's kind and its verifier, told from configs alone.

A name of the Hub is told by the config.json that it resolves to, as a folder is by its own. Where
that cannot be read, or says too little, nobody guesses: the user names the method.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from huggingface_hub import hf_hub_download
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headstart.models import loading
from headstart.models.formats import imports, mtp_native
from headstart.models.saved import config_in, kind_in, read_config
from headstart.models.verifier import embedded
from headstart.models.verifier.adapter import check_merged
from headstart.models.verifier.names import check_there, is_embedded, is_path, split_length
from headstart.models.verifier.outline import Outline

LOOKUP = "prompt-lookup"
NATIVE = "native"  # an MTP module in its verifier's own folder
METHODS = {"eagle3": "eagle3", "eagle": "eagle1", "medusa": "medusa", "mtp": NATIVE,
           "draft_model": "draft_lm"}  # fmt: skip
"""vLLM's names of methods, and ours of kinds."""
Method = Literal["eagle3", "eagle", "medusa", "mtp", "draft_model"]

_PLAIN = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())  # architectures of plain models
_MARKS = ("eagle_config", "draft_vocab_size", "dflash_config")  # of drafters
_MODULES = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


class Found(NamedTuple):
    """A drafter, as its config tells."""

    name: str
    """A folder, an embedded model, a name of the Hub, or a lookup with its options."""
    kind: str
    """eagle3, eagle1, medusa, hydra_heads, mtp, draft_lm, native, prompt-lookup, lookahead, layers,
    or what only others know."""
    config: dict[str, Any]
    """Its config.json; empty of a lookup, and where it cannot be read."""

    @property
    def ours(self) -> bool:
        """Whether headstart saved it."""
        return "headstart" in self.config

    @property
    def for_sglang(self) -> bool:
        """Whether headstart wrote it for SGLang, which other engines read wrongly."""
        names = self.config.get("architectures") or []
        sglang = self.config.get("layer_ids_of") == imports.SGLANG_IDS
        return sglang or imports.SGLANG_EAGLE in names


def find(drafter: str, method: str | None = None) -> Found:
    """The drafter of this name.

    Args:
        drafter: as `loading.load` takes it, or the folder or Hub name of a verifier with an MTP
            module in it.
        method: one of `METHODS`, for a name whose config does not tell.

    Raises:
        ValueError: no such folder, or a kind that cannot be told, or is another than `method`.
    """
    kind, config = drafter.partition(":")[0], {}
    if kind not in (*loading.LOOKUPS, "layers"):
        kind, config = _read(drafter)
    if kind is None and method is None:
        why = "its config.json says too little" if config else "its config.json cannot be read"
        raise ValueError(
            f"drafter {drafter!r}: its kind cannot be told ({why}); pass --method, one of "
            f"{', '.join(METHODS)}"
        )
    if method is not None and kind not in (None, METHODS[method]):
        raise ValueError(f"method is {method!r}, but {drafter!r} is of kind {kind}; leave it out")
    return Found(drafter, METHODS[method] if kind is None else kind, config)


def _read(drafter: str) -> tuple[str | None, dict[str, Any]]:
    """Kind, None where it cannot be told, and config."""
    if loading.is_checkpoint(drafter):
        config = read_config(drafter)
        return config["headstart"]["type"], config
    check_there("drafter", drafter)
    folder = folder_of(drafter)
    config = None if folder is None else config_in(folder)
    if config is None:
        return None, {}
    return _kind(folder, config), config


def _kind(folder: Path, config: dict[str, Any]) -> str | None:
    if "headstart" in config:
        return read_config(folder)["headstart"]["type"]
    if (theirs := kind_in(folder)) is not None:
        return theirs
    whole = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if whole and mtp_native.holds_modules(str(folder)):
        return NATIVE
    if not whole and any(config.get(key) for key in _MODULES):
        return NATIVE
    names = set(config.get("architectures") or [])
    if not names or not names <= _PLAIN or any(key in config for key in _MARKS):
        return None
    # without tensors an EAGLE-1 is a Llama of one layer, and a Qwen3-Next has a module or not
    told = config.get("num_hidden_layers", 1) > 1 and config.get("model_type") != "qwen3_next"
    return "draft_lm" if whole or told else None


def folder_of(name: str) -> Path | None:
    """Where the config.json of a model or drafter lies on this machine, fetched from the Hub if it
    is not here yet; None: nowhere."""
    if is_embedded(name):
        return embedded.folder(name)
    if is_path(name):
        return Path(name)
    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except (OSError, ValueError):  # no such name, none of its files, or no network
        return None


def verifier_of(verifier: str | None, drafter: str, method: str | None = None) -> str:
    """The folder or Hub name to serve: the drafter's own verifier when none is given.

    Raises:
        ValueError: neither tells, or both.
    """
    verifier = verifier_name(verifier, drafter, method)
    check_merged(verifier, drafter)
    model, _ = split_length(verifier)
    check_there("verifier", model)
    return str(embedded.folder(model)) if is_embedded(model) else model


def longest_text(verifier: str | None, drafter: str, method: str | None = None) -> int | None:
    """How many tokens an engine must be told to be prepared for, where it chooses rotary factors by
    that: those that the drafter was trained with. None: it need not be told."""
    name = verifier_name(verifier, drafter, method)
    length = split_length(name)[1]
    if length is None:
        with suppress(ValueError):  # a model that is not here
            outline = Outline.read(name)
            length = outline.context_length if outline.longer else None
    return length


def verifier_name(verifier: str | None, drafter: str, method: str | None = None) -> str:
    """MODEL or MODEL@TOKENS: as it was given, or as the drafter's config has it.

    Raises:
        ValueError: neither tells, or both.
    """
    found = find(drafter, method)
    if found.kind == NATIVE:
        if verifier not in (None, drafter):
            raise ValueError(
                f"verifier: {drafter!r} is a verifier with an MTP module of its own, which drafts "
                "for no other; leave it out"
            )
        return drafter
    if verifier is None and found.ours:
        verifier = found.config["headstart"]["verifier"]
    if verifier is None:
        raise ValueError(
            f"verifier: {drafter} was made for none in particular; pass --verifier, such as "
            f"{embedded.NAME}"
        )
    return verifier


def check_fit(found: Found, verifier: str, engine: str) -> None:
    """Raise a ValueError for a drafter of a verifier of another shape, as far as configs tell, and
    for a draft model of another vocabulary, where the engine asks for the same."""
    folder = folder_of(verifier)
    theirs = None if folder is None else config_in(folder)
    if theirs is None or found.kind == NATIVE:
        return
    (width, size), (wide, total) = _sizes(found.config), _sizes(theirs)
    if found.kind == "draft_lm":
        if engine != "llama.cpp" and None not in (size, total) and size != total:
            raise ValueError(
                f"drafter {found.name!r} has {size} tokens, the verifier {verifier!r} {total}, and "
                f"{engine} wants the same number; pad the embeddings of one of them"
            )
        return
    for what, own, other in (("hidden size", width, wide), ("tokens", size, total)):
        if None not in (own, other) and own != other:
            raise ValueError(
                f"drafter {found.name!r} is for a verifier of other {what}: {own}, and "
                f"{verifier!r} has {other}; pass the one it was made for"
            )


def _sizes(config: dict[str, Any]) -> tuple[int | None, int | None]:
    """Hidden size and vocabulary of a verifier, or of the one that a drafter is for."""
    inner = config.get("transformer_layer_config") or config.get("text_config") or config
    width = config.get("target_hidden_size") or inner.get("hidden_size")
    return width, inner.get("vocab_size")
