"""What a drafter is: the contracts that training, replay, decoding and checkpoints rely on.

One alignment for every drafter. Slot t holds the verifier's states of token x_t and the next
token x_{t+1}, which the verifier has chosen already. Step s = 0, 1, … of slot t predicts x_{t+2+s};
its teacher is the verifier's distribution q_{t+1+s}. Supervision, loss, metrics and replay are
written once, on this alignment, outside the drafters.

Legend: B rows, T slots, n new tokens, K draft length, H verifier's hidden size, H' the drafter's,
V verifier's vocabulary, V' the drafter's, L feature layers.
"""

import abc
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from headstart.models import losses
from headstart.models.batch import Batch, Loss
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom
from headstart.models.proposal.trees import Shape
from headstart.models.verifier.verifier import States, Verifier
from headstart.models.verifier.weights import save_tensors


class Drafter(abc.ABC):
    """What decoding needs. A state belongs to one batch of texts and grows with it."""

    feature_layers: tuple[int, ...] = ()
    """Layers whose residual stream `States.features` must hold for `advance`; none by default."""
    context_length: int | None = None
    """Longest text it can draft for, in tokens; None: whatever the verifier can read."""
    max_depth: int | None = None
    """Most drafts in a row it can make, such as its number of heads; None: any."""

    @abc.abstractmethod
    def start(self, first_tokens: Tensor) -> Any:
        """A fresh state for B texts that begin with `first_tokens [B]` (x_0 of each)."""

    @abc.abstractmethod
    def advance(self, state: Any, tokens: Tensor, lengths: Tensor, states: States) -> None:
        """Take in verified slots.

        Args:
            tokens: [B, n]; `tokens[:, i]` is x_{t+1} where `states[:, i]` belongs to x_t. The
                last one of a row is the pending token.
            lengths: [B]; how many of the n are real, 0 allowed.
            states: the verifier's, `[B, n, …]`.
        """

    @abc.abstractmethod
    def propose(
        self, state: Any, shape: Shape, drafting: Drafting, random: RowRandom | None
    ) -> Proposal:
        """Draft on top of the pending token. Leaves the state as it was.

        Args:
            random: of B rows, used when `drafting.sampled`.
        """

    @abc.abstractmethod
    def select_rows(self, state: Any, rows: Tensor) -> None:
        """Keep only `rows` of the batch."""

    def observe(self, state: Any, proposal: Proposal, node_logits: Tensor) -> None:  # noqa: B027
        """See the verifier's logits `[B, N+1, V]` after the root and after each node, rejected ones
        too (for lookahead, which learns from them)."""


class TrainableDrafter(Drafter, nn.Module):
    """A drafter with weights, trained on the verifier's states.

    Subclasses set `feature_layers` and `draft_ids` ([V'] verifier ids, or None for V' = V) and
    define `unroll` and `logits`.
    """

    feature_layers: tuple[int, ...]
    draft_ids: Tensor | None
    config: PretrainedConfig
    """What `save` writes; its `headstart` entry says for which verifier it was made."""
    serving: str | None = None
    """vLLM's name of the method that loads a saved folder; None: no engine does."""
    unserved: str = "No engine loads this kind of drafter; headstart's own decoding loop does."
    """What its model card then says."""
    one_head: bool = True
    """Whether `logits` is the same for every step, so that losses may project all steps at once."""

    def __init__(self, verifier: Verifier, loss: losses.LossConfig):
        nn.Module.__init__(self)
        self._held = (verifier,)  # in a tuple: its weights are not ours, to save or to train
        self.loss = loss

    @property
    def verifier(self) -> Verifier:
        return self._held[0]

    @abc.abstractmethod
    def unroll(self, batch: Batch, num_steps: int) -> Iterator[Tensor]:
        """Hidden states [B, T, H'] of step 0, 1, …: row t of step s is for x_{t+2+s}."""

    @abc.abstractmethod
    def logits(self, hidden: Tensor, step: int) -> Tensor:
        """Of hidden states of one step (any, with `one_head`): [..., H'] -> [..., V']."""

    def loss_steps(self) -> range:
        """Steps that the loss has terms for, 0 … S-1. A model whose verifier is trained too begins
        at -1: the verifier's own prediction of x_{t+1}."""
        return range(self.loss.num_steps)

    def loss_weights(self, progress: float) -> Tensor:
        """Of each of `loss_steps`, at this share (0 … 1) of the run."""
        return self.loss.step_weights()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What is trained: `params`, and `scale`, their share of the learning rate."""
        return [{"params": [p for p in self.parameters() if p.requires_grad], "scale": 1.0}]

    def forward(self, batch: Batch, weights: Tensor) -> Loss:
        """The batch's share of the optimizer step's loss.

        Args:
            weights: one for each of `loss_steps`; it counts that × the sum over its supervised
                slots. The caller has divided by the slots of the whole optimizer step.
        """
        hidden = list(self.unroll(batch, len(weights)))
        return losses.unrolled_loss(self, batch, hidden, weights)

    def with_vocabulary(self, draft_ids: Tensor) -> "TrainableDrafter":
        """This drafter with another draft vocabulary of the same size: rows of the ids that both
        have are kept, the others begin as the verifier's. Itself, where it cannot have another.
        """
        return self

    def file_tensors(self) -> dict[str, Tensor]:
        """What `save` writes: the drafter's own tensors, and what else the engine needs in them."""
        return self.state_dict()

    def save(self, folder: Path) -> None:
        """`config.json` and `model.safetensors`, as vLLM loads them."""
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config.to_dict() | {"torch_dtype": "float32"}  # its name before dtype
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.file_tensors().items()}
        save_tensors(tensors, folder / "model.safetensors", {"format": "pt"})


def fingerprint(drafter: TrainableDrafter) -> str:
    """16 hex digits over every saved tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def check_depth(max_depth: int | None, depth: int, field: str) -> None:
    """Raise a ValueError where a drafter of `max_depth` cannot make so many drafts in a row."""
    if max_depth is not None and depth > max_depth:
        raise ValueError(
            f"{field} is {depth}, but this drafter makes {max_depth} drafts in a row at most; pass "
            f"{max_depth} or less"
        )
