"""A drafter's folder as it is examined, and what is found."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor


class Finding(NamedTuple):
    """Something about a drafter that its user should know."""

    severity: Literal["defect", "note"]
    check: str
    """One of `CHECKS`."""
    what: str
    effect: str
    """What it does to acceptance."""
    mend: str


@dataclass
class Patient:
    """A drafter's folder, as an engine reads it, whole or not."""

    folder: str
    kind: str
    config: dict[str, Any]
    """In the keys that headstart writes."""
    tensors: dict[str, Tensor]
    """In the names that headstart writes."""
    ours: bool
    """Whether headstart saved it."""
    recorded: dict[str, Any] | None = None
    """The measures of its last validation in training, if they lie beside it."""
    data: dict[str, Any] | None = None
    """The settings of data that it was trained with; of use with `recorded` only."""
    written: dict[str, Any] = field(default_factory=dict)
    """The config as it lies in the folder."""
    trained_layers: list[int] | None = None
    """Of EAGLE-3: the layer ids of the recipe beside it, if there is one."""


CHECKS = (
    "fingerprint", "tensors", "never trained", "layer ids", "norms", "norm_before_residual",
    "rope", "embed_tokens", "vocabulary map", "terminators", "template", "mask", "acceptance",
)  # fmt: skip
