"""What drafters with a head for each step share: their projection, their state, their folder.

Head s of slot t reads the verifier's last hidden state h_t, after the final norm, and predicts
x_{t+2+s}. Its layers turn h_t into another hidden state, which is projected on the vocabulary by
the verifier's own head, frozen, or by one of its own. There are `loss.num_steps` heads, one for
each step that is trained, and so many drafts in a row at most.

Legend: B rows, n new slots, H verifier's hidden size, V and V' verifier's and draft vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from headstart.models import vocab
from headstart.models.drafter import TrainableDrafter
from headstart.models.losses import LossConfig
from headstart.models.saved import (
    check_draft_ids,
    load_weights,
    made_for,
    tensors_for,
)
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import States, Verifier


@dataclass
class HeadsConfig:
    """The heads' shape. How many there are is `loss.num_steps`."""

    num_layers: int = 1
    """Residual blocks of each head."""
    shared_projection: bool = True
    """true: the verifier's own output head, frozen, projects all heads; false: each has one of its
    own, started from the verifier's rows and trained."""
    draft_vocab_size: int | None = None
    """Ids the drafter can propose; default: the verifier's whole vocabulary."""

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"drafter.num_layers must be 1 or more, got {self.num_layers}")
        size = self.draft_vocab_size
        if size is not None and size < 1:
            raise ValueError(f"drafter.draft_vocab_size must be 1 or more, got {size}")

    def check(self, verifier: Outline) -> None:
        """Raise a ValueError for what this verifier does not allow."""
        vocab.check_size(self.draft_vocab_size, verifier)


class ResidualBlocks(nn.Module):
    """x = x + SiLU(W x + b), one block after the other, each with a W and a b of its own."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.layers = nn.ModuleList(zero_linear(width, width) for _ in range(count))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(hidden))
        return hidden


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer of zeros: in a residual block, training starts from the block's input."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class State:
    """Decoding state: h_t of the last verified slot, and the pending token x_{t+1}."""

    hidden: Tensor | None = None  # [B, H]
    token: Tensor | None = None  # [B]


class HeadsDrafter(TrainableDrafter):
    """A drafter with heads. Subclasses add their layers, `unroll` and `propose`."""

    feature_layers = ()
    kind: str
    """Its name in checkpoints and recipes."""
    architecture: str
    config_class: type[PretrainedConfig]
    config_flags: ClassVar[dict[str, object]] = {}
    """Settings of every config of this kind."""

    def __init__(
        self,
        config: PretrainedConfig,
        verifier: Verifier,
        loss: LossConfig,
        draft_ids: Tensor | None,
    ):
        super().__init__(verifier, loss)
        self.config = config
        self.max_depth = config.num_heads
        self.one_head = config.original_lm_head
        if draft_ids is not None:
            draft_ids = draft_ids.to(verifier.device)
        self.register_buffer("token_map", draft_ids)
        self.lm_heads = None
        self._rows = ()  # of the verifier's head, gathered once; not ours, to save or to train
        if not self.one_head:
            size = config.vocab_size if draft_ids is None else len(draft_ids)
            self.lm_heads = nn.ModuleList(
                nn.Linear(config.hidden_size, size, bias=False) for _ in range(config.num_heads)
            )
        elif draft_ids is not None:
            self._rows = verifier.head_rows(draft_ids)

    @property
    def draft_ids(self) -> Tensor | None:
        return self.token_map

    @classmethod
    def create(
        cls, verifier: Verifier, config: HeadsConfig, loss: LossConfig, token_counts: Tensor
    ) -> "HeadsDrafter":
        """A new drafter; `token_counts [V]` (supervised tokens) choose its vocabulary.

        Raises:
            ValueError: a draft vocabulary of an impossible size.
        """
        draft_ids = None
        if config.draft_vocab_size is not None:
            draft_ids = vocab.choose(token_counts, config.draft_vocab_size, verifier)
        if draft_ids is not None and len(draft_ids) == verifier.vocab_size:
            draft_ids = None
        truncated = {} if draft_ids is None else {"truncated_vocab_size": len(draft_ids)}
        saved = cls.config_class(
            architectures=[cls.architecture],
            dtype="float32",
            hidden_size=verifier.hidden_size,
            vocab_size=verifier.vocab_size,
            num_heads=loss.num_steps,
            num_hidden_layers=config.num_layers,
            original_lm_head=config.shared_projection,
            headstart=made_for(verifier, cls.kind),
            **(cls.config_flags | truncated),
        )
        drafter = cls(saved, verifier, loss, draft_ids).to(verifier.device)
        with torch.no_grad():
            for head in drafter.lm_heads or ():
                head.weight.copy_(drafter.verifier_rows())
        return drafter

    @torch.no_grad()
    def with_vocabulary(self, draft_ids: Tensor) -> "HeadsDrafter":
        drafter = type(self)(self.config, self.verifier, self.loss, draft_ids)
        mine = self.state_dict()
        kept = {n: t for n, t in mine.items() if not n.startswith(("token_map", "lm_heads"))}
        drafter.load_state_dict(kept, strict=False)
        fresh = drafter.verifier_rows().float()
        pairs = () if self.one_head else zip(drafter.lm_heads, self.lm_heads, strict=True)
        for head, before in pairs:
            rows = vocab.exchanged_rows(before.weight, self.draft_ids, draft_ids, fresh)
            head.weight.copy_(rows)
        return drafter.to(self.verifier.device)

    def verifier_rows(self) -> Tensor:
        """The verifier's head for the draft vocabulary: [V', H]."""
        weight = self.verifier.head.weight
        return weight if self.draft_ids is None else weight[self.draft_ids]

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        if self.lm_heads is not None:
            return self.verifier.scaled(self.lm_heads[step](hidden))
        hidden = hidden.to(self.verifier.dtype)
        if self._rows:
            return self.verifier.scaled(functional.linear(hidden, *self._rows))
        return self.verifier.logits(hidden)

    # ---- decoding ----------------------------------------------------------------------------

    def start(self, first_tokens: Tensor) -> State:
        return State()

    def advance(self, state: State, tokens: Tensor, lengths: Tensor, states: States) -> None:
        rows, last = torch.arange(len(tokens), device=tokens.device), (lengths - 1).clamp(min=0)
        hidden, token = states.last_hidden[rows, last].float(), tokens[rows, last]
        if state.hidden is not None:
            hidden = torch.where((lengths > 0)[:, None], hidden, state.hidden)
            token = torch.where(lengths > 0, token, state.token)
        state.hidden, state.token = hidden, token

    def select_rows(self, state: State, rows: Tensor) -> None:
        if state.hidden is not None:  # a text may end before its first round
            state.hidden, state.token = state.hidden[rows], state.token[rows]

    # ---- checkpoint --------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        folder: Path,
        config: dict,
        verifier: Verifier,
        loss: LossConfig,
        tensors: dict[str, Tensor] | None = None,
    ) -> "HeadsDrafter":
        """Read a saved drafter, every tensor of it; or take `tensors`, named as it saves them.

        Raises:
            ValueError: damaged weights, or a verifier of another shape.
        """
        tensors = tensors_for(folder, config, verifier, tensors)
        draft_ids = tensors.get("token_map")
        check_draft_ids(folder, draft_ids, "token_map", config, "truncated_vocab_size", verifier)
        same_verifier = config["headstart"]["fingerprint"] == verifier.fingerprint()
        drafter = cls(cls.config_class(**config), verifier, loss, draft_ids)
        drafter.restore(folder, tensors, same_verifier)
        return drafter.to(verifier.device)

    def restore(self, folder: Path, tensors: dict[str, Tensor], same_verifier: bool) -> None:
        """Take the weights of a saved drafter's file, made for this verifier or another."""
        load_weights(self, folder, tensors)
