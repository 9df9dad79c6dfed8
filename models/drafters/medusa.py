"""Medusa-1 (Cai et al. 2024, arXiv 2401.10774): heads that each guess from h_t alone.

Head s, block j: x = x + SiLU(W_sj x + b_sj), from x = h_t; its logits for x_{t+2+s} are the
projection of x. W and b are zero at start, so that every head begins as the verifier's own guess
of x_{t+1}. The heads see no draft: all nodes of a tree at one depth have the same law. The
verifier stays frozen (Medusa-2 trains it too). Modules are named as vLLM loads them.

Legend: B rows, T slots, m nodes of one level, D depth of a proposal, H verifier's hidden size, V'
draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from headstart.models.batch import Batch
from headstart.models.losses import LossConfig
from headstart.models.parts.heads import HeadsConfig, HeadsDrafter, ResidualBlocks, State
from headstart.models.proposal.growth import Nodes, grow
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom
from headstart.models.proposal.trees import Shape
from headstart.models.saved import unreadable
from headstart.models.verifier.verifier import Verifier


@dataclass
class MedusaConfig(HeadsConfig):
    """The heads' shape. How many there are is `loss.num_steps`, one for each step trained."""


class MedusaLayout(PretrainedConfig):
    """The config that is saved."""

    model_type = "medusa"


class Medusa(HeadsDrafter):
    """The drafter. Make one with `create`, read one with `load`."""

    serving = "medusa"
    kind = "medusa"
    architecture = "MedusaModel"
    config_class = MedusaLayout
    config_flags: ClassVar = {"medusa_fc_bias": True}  # vLLM skips biases silently without it

    def __init__(
        self,
        config: PretrainedConfig,
        verifier: Verifier,
        loss: LossConfig,
        draft_ids: Tensor | None,
    ):
        super().__init__(config, verifier, loss, draft_ids)
        if self.one_head and verifier.head.bias is not None:
            raise ValueError(
                f"drafter.shared_projection: the output head of {verifier.name!r} has a bias, for "
                "which engines' Medusa has no place; pass false"
            )
        if draft_ids is not None and not self.one_head:
            self.serving = None  # vLLM wants heads of its own over the whole vocabulary
        self.blocks = nn.ModuleList(
            ResidualBlocks(config.hidden_size, config.num_hidden_layers)
            for _ in range(config.num_heads)
        )

    def unroll(self, batch: Batch, num_steps: int) -> Iterator[Tensor]:
        assert num_steps <= len(self.blocks)
        hidden = batch["last_hidden"].float()
        for blocks in self.blocks[:num_steps]:
            yield blocks(hidden)

    def propose(
        self, state: State, shape: Shape, drafting: Drafting, random: RowRandom | None
    ) -> Proposal:
        laws = self._laws(state.hidden, shape.depth)

        def step(nodes: Nodes) -> Tensor:
            return laws[:, nodes.depth, None].expand(-1, nodes.tokens.shape[1], -1)

        return grow(laws[:, 0], step, shape, drafting, random, self.draft_ids)

    def _laws(self, hidden: Tensor, depth: int) -> Tensor:
        """Logits of the first D heads: [B, H] -> [B, D, V']."""
        outputs = torch.stack([blocks(hidden) for blocks in self.blocks[:depth]], dim=1)
        if self.one_head:  # reads the projection's weights once, which is what it costs
            return self.logits(outputs, 0)
        return torch.stack([self.logits(outputs[:, s], s) for s in range(depth)], dim=1)

    # ---- checkpoint --------------------------------------------------------------------------

    def file_tensors(self) -> dict[str, Tensor]:
        """The engine finds the shared projection, the verifier's, in the file too."""
        shared = {"lm_head.weight": self.verifier_rows()} if self.one_head else {}
        return super().file_tensors() | shared

    def restore(self, folder: Path, tensors: dict[str, Tensor], same_verifier: bool) -> None:
        """Where this is the verifier it was trained for, the shared projection must be its own."""
        if self.one_head:
            saved, own = tensors.pop("lm_head.weight", None), self.verifier_rows().cpu()
            # of one checkpoint, the verifier may have been loaded in another precision
            if saved is None or (
                same_verifier and not torch.equal(saved.bfloat16(), own.bfloat16())
            ):
                raise unreadable(folder, f"lm_head.weight is not the head of {self.verifier.name}")
        super().restore(folder, tensors, same_verifier)
