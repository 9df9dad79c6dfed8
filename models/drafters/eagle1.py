"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077): the verifier's next hidden state, guessed.

f̂_{t+1} = Layer(W [E(x_{t+1}); f_t]), where f_t is the verifier's last hidden state h_t at
the first step and the drafter's own output after. Logits are the verifier's own head of f̂, frozen.
Trained to be near h_{t+1} (smooth L1) and to give its tokens (a tenth of the cross entropy).

EAGLE-2 (arXiv 2406.16858) is the same weights with a dynamic tree. Several unrolled steps, each fed
the output before, align training with drafting as HASS does (Zhang et al. 2024, arXiv 2408.15766);
HASS itself also distils the verifier's top tokens and cuts the gradient between steps, which is not
built here. Modules are named as vLLM loads them: its layer has no input norm, and there is no norm
before the head.

Legend: B rows, T slots, n new slots, H verifier's hidden size, V its vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import LlamaConfig

from headstart.models import losses
from headstart.models.batch import Batch, Loss, supervised
from headstart.models.losses import LossConfig
from headstart.models.parts.feature_drafter import (
    DraftLayer,
    FeatureDrafter,
    check_init,
    llama_config,
    rotary_of,
)
from headstart.models.saved import (
    load_weights,
    made_for,
    tensors_for,
)
from headstart.models.verifier.verifier import Verifier


@dataclass
class Eagle1Config:
    """How it starts and is trained; its shape is the verifier's."""

    init: str = "random"
    """random: small weights; verifier: its last decoder layer where the shapes allow, which learns
    more slowly: that layer is used to another input."""
    noise: float = 0.1
    """Uniform noise in ± so much on the verifier's hidden states while training."""
    token_weight: float = 0.1
    """Of the loss on tokens, beside the distance of hidden states, which has 1."""

    def __post_init__(self) -> None:
        check_init(self.init)
        for name in ("noise", "token_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"drafter.{name} must be 0 or more, got {getattr(self, name)}")


class Layer(DraftLayer):
    """Decoder layer without a norm before its attention."""

    def project(
        self, embedded: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        return self.self_attn.project(residual, rotary)


class Eagle1(FeatureDrafter):
    """The drafter. Make one with `create`, read one with `load`."""

    feature_layers = ()
    draft_ids = None
    serving = "eagle"

    def __init__(
        self,
        config: LlamaConfig,
        verifier: Verifier,
        loss: LossConfig,
        own_embeddings: bool = False,
    ):
        super().__init__(config, verifier, loss, own_embeddings)
        self.noise = config.headstart["noise"]
        self.token_weight = config.headstart["token_weight"]
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([Layer(config, config.hidden_size)])
        self.rotary = rotary_of(config, verifier)
        self.to(verifier.device)

    @classmethod
    def create(cls, verifier: Verifier, config: Eagle1Config, loss: LossConfig) -> "Eagle1":
        """A new drafter."""
        about = {"noise": config.noise, "token_weight": config.token_weight}
        saved = llama_config(
            verifier,
            architectures=["LlamaForCausalLM"],
            target_hidden_size=verifier.hidden_size,
            bias=False,  # of fc; the original code takes true where nothing is said
            headstart=made_for(verifier, "eagle1") | about,
        )
        drafter = cls(saved, verifier, loss)
        drafter.initialise(config.init)
        return drafter

    # ---- one step ----------------------------------------------------------------------------

    @property
    def layer(self) -> Layer:
        return self.layers[0]

    def first(self, features: Tensor | None, last_hidden: Tensor) -> Tensor:
        hidden = last_hidden.to(self.fc.weight.dtype)
        if self.training and self.noise:
            hidden = hidden + self.noise * (2 * torch.rand_like(hidden) - 1)
        return hidden

    def enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat([embedded, hidden], dim=-1))

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.verifier.logits(hidden.to(self.verifier.dtype))

    def forward(self, batch: Batch, weights: Tensor) -> Loss:
        """Σ of smooth L1 to the verifier's hidden states, means over H, and of the token loss."""
        hidden = list(self.unroll(batch, len(weights)))
        value, metrics = losses.unrolled_loss(self, batch, hidden, self.token_weight * weights)
        for s, output in enumerate(hidden):
            row, slot = supervised(batch, s).nonzero().T
            wanted = batch["last_hidden"][row, slot + 1 + s].to(output.dtype)
            distance = smooth_l1_loss(output[row, slot], wanted, reduction="none").mean(-1).sum()
            value = value + weights[s] * distance
            metrics[f"distance/{s}"] = (distance.detach(), metrics[f"loss/{s}"][1])
        return Loss(value, metrics)

    # ---- checkpoint --------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        folder: Path,
        config: dict,
        verifier: Verifier,
        loss: LossConfig,
        tensors: dict[str, Tensor] | None = None,
    ) -> "Eagle1":
        """Read a saved drafter, every tensor of it; or take `tensors`, named as it saves them.

        Raises:
            ValueError: damaged weights, or a verifier of another shape.
        """
        tensors = tensors_for(folder, config, verifier, tensors)
        config = {"bias": False} | config  # not written by the first versions of headstart
        own = "embed_tokens.weight" in tensors
        drafter = cls(LlamaConfig(**config), verifier, loss, own)
        load_weights(drafter, folder, tensors)
        return drafter
