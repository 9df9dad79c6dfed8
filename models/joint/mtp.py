"""A verifier that is trained in full with its MTP modules, as in DeepSeek-V3's pretraining.

L = L_main + (λ/D) Σ_k L_k (arXiv 2412.19437 §2.2), all of them cross entropy with the token.
Gradients of the modules reach the verifier: its hidden states, and the embedding and head that all
share. Without λ the modules are not run, and the verifier learns exactly as it would alone.

A checkpoint is the drafter's folder with the verifier's folder in it.

Legend: B rows, T slots, D steps, H verifier's hidden size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headstart.models import losses
from headstart.models.batch import Batch, Loss
from headstart.models.drafters.mtp import MTP
from headstart.models.joint.lora import OwnPrediction
from headstart.models.losses import LossConfig
from headstart.models.saved import made_for
from headstart.models.verifier.verifier import Verifier
from headstart.models.verifier.weights import follow_umask

VERIFIER = "verifier"  # its folder, in a checkpoint's


def check_loss(loss: LossConfig) -> None:
    """Raise a ValueError for a loss that needs a teacher."""
    if loss.kind != "hard_ce":
        raise ValueError(
            f"loss.kind is {loss.kind!r}, but a verifier that is trained has no teacher; set "
            "loss.kind to hard_ce"
        )


class JointMTP(nn.Module):
    """Verifier and modules as the one module that is trained. It stands in for the drafter in the
    loop; batches come without the verifier's states."""

    max_depth, serving = None, None

    def __init__(self, drafter: MTP):
        """Raises:
        ValueError: a loss that needs a teacher, or a verifier too coarse to be trained.
        """
        super().__init__()
        verifier = drafter.verifier
        check_loss(drafter.loss)
        if verifier.dtype != torch.float32:
            raise ValueError(
                f"verifier_dtype: its weights are trained in float32, not {verifier.dtype}; "
                "set verifier_dtype to float32"
            )
        self.drafter = drafter
        self.model = verifier.model.requires_grad_(True)

    # ---- what the loop asks of a drafter -----------------------------------------------------

    @property
    def verifier(self) -> Verifier:
        return self.drafter.verifier

    @property
    def loss(self) -> LossConfig:
        return self.drafter.loss

    @property
    def unserved(self) -> str:
        return self.drafter.unserved

    def loss_steps(self) -> range:
        return range(-1, self.loss.num_steps)

    def loss_weights(self, progress: float) -> Tensor:
        """1 for L_main, λ/D for each L_k."""
        return torch.cat([torch.ones(1), self.drafter.loss_weights(progress)])

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.parameters()), "scale": 1.0}]

    def forward(self, batch: Batch, weights: Tensor) -> Loss:
        """The batch's share of the loss."""
        states = self.verifier.states(
            batch["input_ids"],
            self.drafter.feature_layers,
            batch["position_ids"],
            batch["document_ids"],
        )
        seen = Batch(**batch, features=states.features, last_hidden=states.last_hidden)
        hidden, idle = [states.last_hidden], 0.0
        if bool(weights[1:].any()):
            hidden += self.drafter.unroll(seen, len(weights) - 1)
        else:  # data parallelism waits for them
            idle = sum(weight.sum() for weight in self.drafter.parameters()) * 0
        own = OwnPrediction(self.verifier, self.loss)
        weights = weights[: len(hidden)]
        loss = losses.unrolled_loss(own, seen, hidden, weights, first=-1)
        return Loss(loss.value + idle, self.renamed(loss.metrics, weights))

    def renamed(
        self, metrics: dict[str, tuple[Tensor, Tensor]], weights: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """The verifier's own as main_…, the modules' by their steps, and λ and D beside them."""
        named = {}
        for key, pair in metrics.items():
            name, number = key.split("/")
            named[f"{name}/{int(number) - 1}" if int(number) else f"main_{name}"] = pair
        return named | self.drafter.settings_now(len(weights) - 1, weights.device)

    def original(self, featurize: Callable[[Batch], Batch]) -> Callable[[Batch], Batch]:
        """What adds nothing: the states are part of the training step."""
        return lambda batch: batch

    # ---- checkpoint --------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """The drafter's folder, and in it the verifier's, as transformers writes it."""
        self.drafter.config.headstart |= made_for(self.verifier, "mtp")
        self.drafter.save(folder)
        self.model.save_pretrained(folder / VERIFIER)
        follow_umask(*(folder / VERIFIER).glob("*.safetensors"))
        self.verifier.tokenizer.save_pretrained(folder / VERIFIER)
