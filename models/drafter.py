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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from headstart.models import losses
from headstart.models.proposal.sampling import RowRandom, Sampling
from headstart.models.proposal.trees import Shape
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import States, Verifier
from headstart.models.verifier.weights import save_tensors


class Batch(TypedDict, total=False):
    """Rows ready for the drafter. The last two come from the verifier (featurize)."""

    input_ids: Tensor  # [B, T] long
    loss_mask: Tensor  # [B, T] long: 0, or the number (1, 2, …) of the assistant turn it belongs to
    position_ids: Tensor  # [B, T] long, from 0 in each document
    document_ids: Tensor  # [B, T] long: 0, 1, … by packed document; -1 for padding
    features: Tensor  # [B, T, L*H]
    last_hidden: Tensor  # [B, T, H]


class Loss(NamedTuple):
    """A weighted sum, ready for backward, and metrics as (sum, count) pairs."""

    value: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]


class Proposal(NamedTuple):
    """Drafts for one round. The root, the pending token, is not among them."""

    tokens: Tensor  # [B, N] verifier ids
    parents: Tensor  # [B, N] index of each node's parent, -1 for the root; after its parent, and
    # after the siblings that are tried before it
    real: Tensor  # bool [B, N] which of the N there are; a lookup may find none
    log_probs: Tensor | None  # [B, N, V'] the law each was drawn from, given the siblings drawn
    # before (without replacement: they are taken out of it); None: point masses
    vocabulary: Tensor | None  # [V'] verifier id of each column of log_probs, ascending; None:
    # V' = V
    scratch: int = 0  # so many nodes at the end are no drafts: never accepted, only observed


class Drafting(NamedTuple):
    """How a drafter chooses its drafts: greedily (point masses), or drawn from p."""

    sampled: bool
    sampling: Sampling
    """Warps the drafter's logits; not used when greedy."""


def supervised(batch: Batch, step: int) -> Tensor:
    """Which (t, step) are trained and measured: bool [B, T].

    True where x_{t+1} … x_{t+2+step} lie in one assistant turn and x_t in the same document: the
    pairs that serving can reach. Step -1 is the verifier's own: x_{t+1} of an answer.
    """
    turns, documents = batch["loss_mask"], batch["document_ids"]
    reach = step + 2
    mask = torch.zeros_like(turns, dtype=torch.bool)
    if turns.shape[1] > reach:
        first, last = turns[:, 1 : 1 + turns.shape[1] - reach], turns[:, reach:]
        same_document = documents[:, :-reach] == documents[:, reach:]
        mask[:, :-reach] = (first == last) & (last > 0) & same_document
    return mask


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


def made_for(verifier: Verifier, kind: str) -> dict[str, str]:
    """The `headstart` entry of a saved config."""
    return {"type": kind, "verifier": verifier.name, "fingerprint": verifier.fingerprint()}


def check_depth(max_depth: int | None, depth: int, field: str) -> None:
    """Raise a ValueError where a drafter of `max_depth` cannot make so many drafts in a row."""
    if max_depth is not None and depth > max_depth:
        raise ValueError(
            f"{field} is {depth}, but this drafter makes {max_depth} drafts in a row at most; pass "
            f"{max_depth} or less"
        )


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


def load_weights(drafter: TrainableDrafter, folder: Path, tensors: dict[str, Tensor]) -> None:
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
