"""Multi-token prediction: how modules are wired in each layout that is served, and settings.

All four switches fit any weights, and cost acceptance where they are not those of training.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from headstart.models.parts.feature_drafter import check_init


class Wiring(NamedTuple):
    """Where the weights in use differ from each other."""

    hidden_first: bool
    """The projection reads [hidden; embedding], as the paper writes; else [embedding; hidden]."""
    normed_input: bool
    """The first module reads the verifier's state after its final norm; else before."""
    normed_feedback: bool
    """The next step reads a module's output after the module's final norm; else before."""
    zero_first: bool
    """The embedding at position 0 is zeros: the first token of a text is not read there."""


LAYOUTS = {  # as vLLM serves them
    "mimo": Wiring(True, False, True, True),
    "deepseek_v3": Wiring(False, True, True, True),
    "glm4_moe": Wiring(False, True, False, True),
    "qwen3_next": Wiring(False, True, True, False),
}


@dataclass
class MTPConfig:
    """The modules, and how much their loss weighs."""

    num_modules: int = 1
    """D: decoder layers in a row. Steps beyond use the last one again, so 1 is shared by all. In
    mode native the verifier's folder decides it, and the layout."""
    layout: Literal["mimo", "deepseek_v3", "glm4_moe", "qwen3_next"] = "mimo"
    """Whose weights these are like; it decides the next four where they are not given."""
    hidden_first: bool | None = None
    """Projection of [hidden; embedding], not [embedding; hidden]."""
    normed_input: bool | None = None
    """First module on the verifier's state after its final norm, not before."""
    normed_feedback: bool | None = None
    """Next step on the output after the module's final norm, not before."""
    zero_first: bool | None = None
    """Zeros for the embedding at position 0."""
    init: str = "verifier"
    """verifier: start from its last decoder layer and final norm; random: its norms alone."""
    lambda_start: float = 0.3
    """λ, what the loss of all steps is multiplied with, in the first part of the run."""
    lambda_end: float = 0.1
    """λ in the rest of the run."""
    switch: float = 0.676
    """Where the first part ends, as a share of the run."""
    switch_tokens: int | None = None
    """The same in tokens, where training.max_tokens is given; it replaces switch."""

    def __post_init__(self) -> None:
        check_init(self.init)
        if self.num_modules < 1:
            raise ValueError(f"drafter.num_modules must be 1 or more, got {self.num_modules}")
        for name in ("lambda_start", "lambda_end"):
            if getattr(self, name) < 0:
                raise ValueError(f"drafter.{name} must not be below 0, got {getattr(self, name)}")
        if not 0 <= self.switch <= 1:
            raise ValueError(f"drafter.switch must be in 0 … 1, got {self.switch}")

    @property
    def wiring(self) -> Wiring:
        given = {name: getattr(self, name) for name in Wiring._fields}
        return LAYOUTS[self.layout]._replace(**{n: v for n, v in given.items() if v is not None})
