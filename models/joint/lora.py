"""A verifier that is trained with its drafter: Medusa-2 (Cai et al. 2024, arXiv 2401.10774 §2.2.2).

The verifier learns by LoRA to keep its own law while its hidden states become easier to draft from:
L = L_LM + 0.2 · Σ_{s≥0} 0.8^{s+1} L_s, where every teacher is the original verifier, L_LM too. The
heads are trained alone first, and at a higher rate. What drafts are accepted by afterwards is the
tuned verifier: its text is no longer the original's.

A checkpoint is the drafter's folder with the adapter in it.

Legend: B rows, T slots, S steps, H verifier's hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from headstart.models import losses
from headstart.models.batch import Batch, Loss
from headstart.models.drafter import TrainableDrafter
from headstart.models.losses import LossConfig
from headstart.models.verifier.adapter import import_peft
from headstart.models.verifier.outline import Outline, first_line
from headstart.models.verifier.verifier import Verifier
from headstart.models.verifier.weights import follow_umask

ADAPTER = "verifier_adapter"


@dataclass
class JointConfig:
    """Training the verifier too, by LoRA (Hu et al. 2021)."""

    rank: int = 16
    """Of the two factors that are added to each linear layer of the decoder's layers."""
    alpha: float = 32.0
    """LoRA's scale, divided by rank."""
    scale: float = 0.1
    """The adapter's learning rate, as a share of training.learning_rate, which the heads have."""
    warmup: float = 0.3
    """Share of the run in which only the heads are trained."""
    heads_weight: float = 0.2
    """Of the heads' loss, beside the verifier's own."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"joint.rank must be 1 or more, got {self.rank}")
        for name in ("alpha", "scale", "heads_weight"):
            if getattr(self, name) <= 0:
                raise ValueError(f"joint.{name} must be greater than 0, got {getattr(self, name)}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"joint.warmup must be in [0, 1), got {self.warmup}")

    def check(self, verifier: Verifier | Outline) -> None:
        """Raise a ValueError for factors that are larger than what they are added to."""
        if self.rank > verifier.hidden_size:
            raise ValueError(
                f"joint.rank must be in 1 … {verifier.hidden_size} (the hidden size of "
                f"{verifier.name}), got {self.rank}"
            )


class OwnPrediction:
    """The verifier's prediction of x_{t+1}, in the shape the losses know: step -1 of slot t."""

    draft_ids = None
    one_head = True

    def __init__(self, verifier: Verifier, loss: LossConfig):
        self.verifier, self.loss = verifier, loss

    def parameters(self) -> list[Tensor]:
        return list(self.verifier.head.parameters())  # trained or not

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.verifier.logits(hidden)


class JointModel(nn.Module):
    """Verifier and drafter as the one module that is trained. It stands in for the drafter in the
    loop; batches come with the *original* verifier's states, see `original`."""

    serving = None
    unserved = (
        "It drafts for the verifier that was trained with it, the original with the adapter in "
        "`verifier_adapter`. An engine would serve the original one, so none is named here; "
        "headstart's own decoding loop takes the tuned one."
    )

    def __init__(self, drafter: TrainableDrafter, config: JointConfig, adapter: Path | None = None):
        """Attach a new adapter to the drafter's verifier, or that of a checkpoint."""
        super().__init__()
        config.check(drafter.verifier)
        peft = import_peft("joint")
        self.drafter, self.joint = drafter, config
        verifier = drafter.verifier
        self._held = (verifier,)  # all but its adapter is frozen, and saved elsewhere
        if adapter is not None:
            adapted = peft.PeftModel.from_pretrained(verifier.model, adapter, is_trainable=True)
        else:
            settings = peft.LoraConfig(
                r=config.rank, lora_alpha=config.alpha, target_modules=linear_layers(verifier)
            )
            adapted = peft.get_peft_model(verifier.model, settings)
        self._adapted = (adapted,)
        trained = [p for p in verifier.model.parameters() if p.requires_grad]
        self.adapter = nn.ParameterList(trained)

    # ---- what the loop asks of a drafter -----------------------------------------------------

    @property
    def verifier(self) -> Verifier:
        return self._held[0]

    @property
    def loss(self) -> LossConfig:
        return self.drafter.loss

    @property
    def max_depth(self) -> int | None:
        return self.drafter.max_depth

    def loss_steps(self) -> range:
        return range(-1, self.loss.num_steps)

    def loss_weights(self, progress: float) -> Tensor:
        """Of L_LM, and of each head's loss: 0.2 × gamma^{s+1}, not normalised."""
        steps = torch.arange(1, self.loss.num_steps + 1, dtype=torch.float32)
        heads = self.joint.heads_weight * self.loss.gamma**steps
        own = 0.0 if progress < self.joint.warmup else 1.0
        return torch.cat([torch.tensor([own]), heads])

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [
            *self.drafter.parameter_groups(),
            {"params": list(self.adapter), "scale": self.joint.scale},
        ]

    def forward(self, batch: Batch, weights: Tensor) -> Loss:
        """The batch's share of the loss. While L_LM has no weight only the drafter is trained."""
        if weights[0] == 0:
            hidden = list(self.drafter.unroll(batch, self.loss.num_steps))
            loss = losses.unrolled_loss(self.drafter, batch, hidden, weights[1:])
            idle = sum(weight.sum() for weight in self.adapter) * 0  # data parallelism waits for it
            return Loss(loss.value + idle, loss.metrics)
        states = self.verifier.states(
            batch["input_ids"],
            self.drafter.feature_layers,
            batch["position_ids"],
            batch["document_ids"],
        )
        seen = {**batch, "features": states.features, "last_hidden": states.last_hidden}
        hidden = list(self.drafter.unroll(seen, self.loss.num_steps))
        heads = losses.unrolled_loss(self.drafter, batch, hidden, weights[1:])
        own = OwnPrediction(self.verifier, self.loss)
        verifier = losses.unrolled_loss(own, batch, [states.last_hidden], weights[:1], first=-1)
        metrics = {f"verifier_{name.partition('/')[0]}": m for name, m in verifier.metrics.items()}
        return Loss(heads.value + verifier.value, heads.metrics | metrics)

    def original(self, featurize: Callable[[Batch], Batch]) -> Callable[[Batch], Batch]:
        """`featurize` with the verifier as it was."""

        def of_original(batch: Batch) -> Batch:
            with self._adapted[0].disable_adapter():
                return featurize(batch)

        return of_original

    # ---- checkpoint --------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """The drafter's folder, and the adapter in it, as peft writes it."""
        self.drafter.config.headstart |= {"adapter": ADAPTER}
        self.drafter.save(folder)
        self._adapted[0].save_pretrained(folder / ADAPTER)
        follow_umask(*(folder / ADAPTER).glob("*.safetensors"))
        (folder / ADAPTER / "README.md").unlink(missing_ok=True)  # a form that nobody filled in


def linear_layers(verifier: Verifier) -> list[str]:
    """Names of the linear modules within a decoder layer."""
    modules = verifier.layers.named_modules()
    return sorted({name.rpartition(".")[2] for name, m in modules if isinstance(m, nn.Linear)})


def tune(verifier: Verifier, folder: Path) -> None:
    """Turn the verifier, in place, into the one that was trained with the drafter in `folder`.

    Raises:
        ValueError: the adapter is not there or damaged.
    """
    peft = import_peft("joint")
    try:
        adapted = peft.PeftModel.from_pretrained(verifier.model, folder / ADAPTER)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"drafter {str(folder)!r}: its {ADAPTER} cannot be read: {first_line(error)}; use "
            "another checkpoint"
        ) from error
    adapted.merge_and_unload()
    verifier.model.requires_grad_(False)
    verifier.name += f" tuned by {folder}"
