"""What can be told of a verifier before its weights are loaded."""

import os
from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig, PretrainedConfig
from transformers.utils import cached_file

from headstart.models.verifier import adapter, embedded, mimo, names, rotary

mimo.register()
TRUST = "HEADSTART_TRUST_CODE"


class Outline(NamedTuple):
    """What a verifier's config says: enough to check settings before its weights are loaded."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    longer: str = ""
    """How to have longer texts, where that is possible."""

    @classmethod
    def read(cls, name: str) -> "Outline":
        """Of `embedded/smollm2-135m`, a local folder, or a Hub name.

        Raises:
            ValueError: no such model.
        """
        path = locate(name)
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trusted(name))
            config = config.get_text_config()
            sizes = (config.num_hidden_layers, config.hidden_size, config.vocab_size)
        except (AttributeError, OSError, ValueError) as error:
            raise not_loaded(name, error) from error
        length = length_of(name, config)
        longer = rotary.longer(config, length)
        return cls(name, *sizes, rotary.context_length(config, length), longer)


def trusted(name: str) -> bool:
    """Whether the code that this model brings along may be run: its name, without length or
    adapter, is in the environment variable HEADSTART_TRUST_CODE, a list with commas."""
    name, _ = names.split_length(adapter.split(name)[0])
    return name in [part.strip() for part in os.environ.get(TRUST, "").split(",")]


def needs_trust(error: Exception) -> bool:
    """Whether transformers refused to run a model's own code."""
    return "trust_remote_code" in str(error)


def locate(name: str) -> str | Path:
    """Where transformers finds the model of this name, which may have a length and an adapter.

    Raises:
        ValueError: no such folder.
    """
    name, _ = names.split_length(adapter.split(name)[0])
    names.check_there("verifier", name)
    return embedded.folder(name) if names.is_embedded(name) else name


def folder(name: str) -> Path:
    """The folder on this machine that holds the files of the model of this name.

    Raises:
        ValueError: no such folder.
    """
    path = locate(name)
    return Path(path) if Path(path).is_dir() else Path(cached_file(path, "config.json")).parent


def not_loaded(name: str, error: Exception, quantised: str | None = None) -> ValueError:
    """`quantised`: the method that its weights are quantised by, if they are."""
    if needs_trust(error):
        return ValueError(
            f"verifier {name!r} brings code of its own, which is not run unasked: read its .py "
            f"files, and where you trust them set the environment variable {TRUST} to that name"
        )
    what = f" is quantised ({quantised}) and" if quantised else ""
    hint = "Pass the model it was made from." if quantised else names.HINT
    reason = first_line(error).rstrip(".")
    return ValueError(f"verifier {name!r}{what} cannot be loaded: {reason}. {hint}")


def length_of(name: str, config: PretrainedConfig) -> int | None:
    """TOKENS of a verifier named MODEL@TOKENS.

    Raises:
        ValueError: a length that it cannot have.
    """
    length = names.split_length(adapter.split(name)[0])[1]
    rotary.check(name, config, length)
    return length


def first_line(error: Exception) -> str:
    """The first sentence-like line of a library's error, for our own one-line errors."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
