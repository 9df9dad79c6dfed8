"""Reading and checking the folder of a saved drafter: what lies there, and whether it is whole."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from headstart.models import vocab
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import Verifier


def made_for(verifier: Verifier, kind: str) -> dict[str, str]:
    """The `headstart` entry of a saved config."""
    return {"type": kind, "verifier": verifier.name, "fingerprint": verifier.fingerprint()}


def check_shape(folder: str | Path, config: dict[str, Any], verifier: Verifier | Outline) -> None:
    """Raise a ValueError for a drafter, saved with this config, of a verifier of another shape."""
    sizes = config | config["headstart"]
    hidden_size = sizes.get("target_hidden_size", sizes.get("hidden_size"))
    vocab_size = sizes.get("target_vocab_size", sizes.get("vocab_size"))
    if (hidden_size, vocab_size) != (verifier.hidden_size, verifier.vocab_size):
        raise ValueError(
            f"drafter {str(folder)!r} is for a verifier of hidden size {hidden_size} and "
            f"{vocab_size} tokens; {verifier.name} has {verifier.hidden_size} and "
            f"{verifier.vocab_size}"
        )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The weights of a saved drafter.

    Raises:
        ValueError: they are missing or damaged.
    """
    try:
        return load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise unreadable(folder, error) from error


def tensors_for(
    folder: Path,
    config: dict[str, Any],
    verifier: Verifier,
    tensors: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The weights of a drafter that goes with this verifier: `tensors`, else those of its folder.

    Raises:
        ValueError: a verifier of another shape, or damaged weights.
    """
    check_shape(folder, config, verifier)
    return read_tensors(folder) if tensors is None else tensors


def check_draft_ids(
    folder: Path,
    ids: Tensor | None,
    name: str,
    config: dict[str, Any],
    field: str,
    verifier: Verifier,
) -> None:
    """Raise a ValueError for a draft vocabulary that is not what `config[field]` says, or no
    ascending ids of the verifier's.

    Args:
        ids: [V'] verifier ids; None: it has no draft vocabulary.
        name: of the tensor that they come from.
    """
    found = None if ids is None else len(ids)
    if found != config.get(field):
        raise unreadable(folder, f"{name} has {found} ids, {field} is {config.get(field)}")
    if ids is not None and not vocab.is_ascending(ids, verifier.vocab_size):
        raise unreadable(folder, f"{name} gives no ascending ids below {verifier.vocab_size}")


def load_weights(drafter: nn.Module, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Every tensor of `drafter`, no more and no less.

    Raises:
        ValueError: other tensors than those of its config.
    """
    own = drafter.state_dict()
    wrong = {
        "it lacks": own.keys() - tensors.keys(),
        "it has beyond that": tensors.keys() - own.keys(),
        "of another shape": {
            n for n in own.keys() & tensors.keys() if own[n].shape != tensors[n].shape
        },
    }
    said = [f"{what} {some(names)}" for what, names in wrong.items() if names]
    if said:
        raise unreadable(folder, ", ".join(said))
    check_finite(folder, tensors)
    drafter.load_state_dict(tensors)


def check_finite(folder: str | Path, tensors: dict[str, Tensor]) -> None:
    """Raise a ValueError for weights of which no training and no drafts come."""
    wrong = {n for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()}
    if wrong:
        raise ValueError(
            f"drafter {str(folder)!r}: not every number is finite in {some(wrong)}; use another "
            "checkpoint"
        )


@contextmanager
def explained(folder: str | Path) -> Iterator[None]:
    """Whatever a library raises for a config.json that makes no drafter becomes a ValueError that
    names the folder; one that speaks of the drafter already stays."""
    try:
        yield
    except Exception as error:  # a damaged config fails in as many ways as it is used
        if isinstance(error, ValueError) and str(error).startswith("drafter"):
            raise
        what = " ".join(str(error).split()) or type(error).__name__
        what = f"no such key or value: {what}" if isinstance(error, KeyError) else what
        raise ValueError(
            f"drafter {str(folder)!r} cannot be made as its config.json says: {what}; use another "
            "checkpoint"
        ) from error


def some(names: set[str]) -> str:
    """How many tensors, and the first three of them."""
    first = sorted(names)[:3]
    dots = ", …" if len(names) > 3 else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({', '.join(first)}{dots})"


def unreadable(folder: Path, error: Exception | str) -> ValueError:
    """The error for weights that do not go with their config."""
    return ValueError(
        f"drafter {str(folder)!r}: model.safetensors cannot be read or is not that of its "
        f"config.json: {' '.join(str(error).split())}; use another checkpoint"
    )


EAGLE3_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def kind_in(folder: str | Path) -> str | None:
    """eagle3, eagle1 or medusa, if the folder is such a drafter of another program; speculators
    names its own kinds. None: none, or a checkpoint of headstart's own."""
    config = config_in(Path(folder))
    if config is None or "headstart" in config:
        return None
    if "speculators_model_type" in config:
        return str(config["speculators_model_type"])
    architectures = config.get("architectures") or []
    if set(architectures) & set(EAGLE3_NAMES):
        return "eagle3"
    if "medusa_num_heads" in config or "MedusaModel" in architectures:
        return "medusa"
    names = _names(Path(folder))
    if not {"fc.weight", "model.fc.weight"} & names:
        return None
    return "eagle3" if any("hidden_norm" in name for name in names) else "eagle1"


def config_in(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _names(folder: Path) -> set[str]:
    """Names of the tensors of a folder with one file of them; empty where it cannot be read."""
    try:
        if (folder / "model.safetensors").is_file():
            with safe_open(folder / "model.safetensors", framework="pt") as file:
                return set(file.keys())
        if (folder / "pytorch_model.bin").is_file():
            path = folder / "pytorch_model.bin"
            return set(torch.load(path, map_location="meta", weights_only=True))
    except (OSError, RuntimeError, SafetensorError, EOFError):
        pass
    return set()


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config of a drafter that headstart saved.

    Raises:
        ValueError: no such drafter there, or one whose headstart entry is damaged.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        for key in ("type", "fingerprint", "verifier"):
            config["headstart"][key]
    except (OSError, KeyError, TypeError, ValueError) as error:
        if Path(folder).is_symlink() and not Path(folder).exists():
            raise ValueError(
                f"drafter {str(folder)!r} is a link that leads nowhere; copy a checkpoint with "
                "cp -rL, which follows links"
            ) from error
        found = "no readable config.json with a headstart entry"
        found = found if Path(folder).exists() else "no such folder"
        # of a run's folder, its best checkpoint, or else its newest
        inside = [Path(folder) / "best", *sorted(Path(folder).glob("checkpoints/step-*"))[::-1]]
        near = next((str(path) for path in inside if (path / "config.json").is_file()), None)
        hint = f"did you mean {near!r}?" if near else (
            "pass the folder of a checkpoint, such as outputs/run/best"
        )  # fmt: skip
        raise ValueError(
            f"drafter {str(folder)!r} is not a checkpoint of headstart: {found}; {hint}"
        ) from error
    for key in ("type", "fingerprint", "verifier"):
        if not isinstance(config["headstart"][key], str):
            raise ValueError(
                f"drafter {str(folder)!r}: config.json: headstart.{key} is "
                f"{config['headstart'][key]!r}, not a text; use another checkpoint"
            )
    return config
