"""Hydra heads (Ankner et al. 2024, arXiv 2402.05109): each also reads the drafts before its own.

Head s reads h_t and E(x_{t+1}) … E(x_{t+1+s}), the verifier's frozen embeddings, side by side:
x = h_t + SiLU(W_s [h_t; E(x_{t+1}); …; E(x_{t+1+s})] + b_s), then residual blocks as Medusa's; its
logits for x_{t+2+s} are the projection of x. All W and b are zero at start. So a node of a tree has
a law of its own, and the heads run one after the other.

Legend: B rows, T slots, m nodes of one level, H verifier's hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from headstart.models.batch import Batch
from headstart.models.losses import LossConfig
from headstart.models.parts.heads import (
    HeadsConfig,
    HeadsDrafter,
    ResidualBlocks,
    State,
    zero_linear,
)
from headstart.models.proposal.growth import Nodes, grow
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom
from headstart.models.proposal.trees import Shape
from headstart.models.verifier.verifier import Verifier


@dataclass
class HydraHeadsConfig(HeadsConfig):
    """The heads' shape. How many there are is `loss.num_steps`, one for each step trained."""

    num_layers: int = 1
    """Layers of each head: the first reads the drafts, the others are residual blocks."""


class HydraHeadsLayout(PretrainedConfig):
    """The config that is saved."""

    model_type = "hydra_heads"


class Head(nn.Module):
    """One head: [h; E(x_{t+1}); …], (count + 1)·H wide, to a hidden state."""

    def __init__(self, width: int, count: int, num_layers: int):
        super().__init__()
        self.width = width
        self.entry = zero_linear((count + 1) * width, width)
        self.blocks = ResidualBlocks(width, num_layers - 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.blocks(inputs[..., : self.width] + functional.silu(self.entry(inputs)))


class HydraHeads(HeadsDrafter):
    """The drafter. Make one with `create`, read one with `load`."""

    kind = "hydra_heads"
    architecture = "HydraHeads"
    config_class = HydraHeadsLayout

    def __init__(
        self,
        config: PretrainedConfig,
        verifier: Verifier,
        loss: LossConfig,
        draft_ids: Tensor | None,
    ):
        super().__init__(config, verifier, loss, draft_ids)
        self.heads = nn.ModuleList(
            Head(config.hidden_size, s + 1, config.num_hidden_layers)
            for s in range(config.num_heads)
        )

    def unroll(self, batch: Batch, num_steps: int) -> Iterator[Tensor]:
        assert num_steps <= len(self.heads)
        inputs, tokens = batch["last_hidden"].float(), batch["input_ids"]
        for head in self.heads[:num_steps]:
            tokens = torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1)  # x_{t+1+s} at slot t
            inputs = self._with(inputs, tokens)  # [B, T, (s + 2)·H]
            yield head(inputs)

    def _with(self, inputs: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([inputs, self.verifier.embed(tokens).float()], dim=-1)

    def propose(
        self, state: State, shape: Shape, drafting: Drafting, random: RowRandom | None
    ) -> Proposal:
        inputs = self._with(state.hidden, state.token)[:, None]  # of the level stepped last
        begin = -1  # number of its first node

        def step(nodes: Nodes) -> Tensor:
            nonlocal inputs, begin
            above = (nodes.parents - begin)[..., None].expand(-1, -1, inputs.shape[-1])
            begin += inputs.shape[1]
            inputs = self._with(inputs.gather(1, above), nodes.tokens)
            return self.logits(self.heads[nodes.depth](inputs), nodes.depth)

        first = self.logits(self.heads[0](inputs[:, 0]), 0)
        return grow(first, step, shape, drafting, random, self.draft_ids)
