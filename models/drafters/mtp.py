"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437 §2.2): decoder layers one after the other.

Module k = 0 … D-1 makes step k: h^k_t = Block_k(M_k [norm(h^{k-1}_t); norm(E(x_{t+1+k}))]), where
h^{-1}_t is the verifier's hidden state; logits are the verifier's own head of norm(h^k_t). Steps
from D on use the last module again. Embedding and head are the verifier's. What the checkpoints in
use do differently from each other is in `LAYOUTS`.

Module k attends to its own keys of slots ≤ t. Slot j of it reads x_{j+1+k}: once x_{t+1} is the
last token known, it is complete up to slot t-k. So `advance` runs each module as far as that, and
`propose` runs module k over the k slots behind with the drafts that they read, for each node of a
tree with those of its own path. Slots are placed at the position of the token they read, less one,
so that the module's row of a token has the same position in all modules.

Legend: B rows, T slots, n new slots, D modules, m nodes of one level, M nodes of all levels so far,
H verifier's hidden size.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PretrainedConfig

from headstart.models.batch import Batch, Loss
from headstart.models.drafter import TrainableDrafter
from headstart.models.drafters.mtp_layouts import LAYOUTS, MTPConfig, Wiring
from headstart.models.losses import LossConfig
from headstart.models.parts.block import Block, Runs
from headstart.models.proposal.growth import Nodes, grow
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom
from headstart.models.proposal.trees import Shape
from headstart.models.saved import (
    load_weights,
    made_for,
    tensors_for,
)
from headstart.models.verifier.cache import HOLE, RaggedCache
from headstart.models.verifier.verifier import States, Verifier


class MTPLayout(PretrainedConfig):
    """The config that is saved."""

    model_type = "headstart_mtp"


class Module(nn.Module):
    """Norms, projection, one decoder layer of the verifier's class, and a final norm."""

    def __init__(self, verifier: Verifier):
        super().__init__()
        block = Block(verifier)
        self._held = (block,)  # it is made of the layer and norm below
        self.embedding_norm, self.hidden_norm = copy.deepcopy(block.fresh_norm), block.fresh_norm
        self.projection = nn.Linear(2 * verifier.hidden_size, verifier.hidden_size, bias=False)
        self.layer, self.norm = block.layer, block.norm

    @property
    def block(self) -> Block:
        return self._held[0]


def check_all_trained(num_modules: int, loss: LossConfig) -> None:
    """Raise a ValueError for more modules than steps that are trained."""
    if num_modules > loss.num_steps:
        raise ValueError(
            f"loss.num_steps is {loss.num_steps}, but there are {num_modules} MTP modules, which "
            f"would not all be trained; pass {num_modules} or more"
        )


class State:
    """Decoding state: each module's keys of its verified slots, and its output at the last one."""

    def __init__(self, num_modules: int, batch_size: int, width: int, device: torch.device):
        self.caches = [RaggedCache(batch_size, device) for _ in range(num_modules)]
        self.slots = torch.zeros(batch_size, dtype=torch.long, device=device)  # [B] of module 0
        self.fed_back = [torch.zeros(batch_size, width, device=device) for _ in self.caches]
        self.output: Tensor | None = None  # [B, H] of module 0, normed


class MTP(TrainableDrafter):
    """The drafter. Make one with `create`, read one with `load`."""

    draft_ids = None

    def __init__(self, config: MTPLayout, verifier: Verifier, loss: LossConfig):
        super().__init__(verifier, loss)
        verifier.check_streams()
        self.config = config
        about = config.headstart
        self.wiring = Wiring(**about["wiring"])
        self.schedule: dict[str, float] = about["lambda"]
        self.weight = self.schedule["start"]  # λ now
        self.feature_layers = () if self.wiring.normed_input else (verifier.num_layers,)
        self.blocks = nn.ModuleList(Module(verifier) for _ in range(about["num_modules"]))
        self.to(verifier.device)

    @classmethod
    def create(cls, verifier: Verifier, config: MTPConfig, loss: LossConfig) -> "MTP":
        """A new drafter.

        Raises:
            ValueError: more modules than steps that are trained.
        """
        check_all_trained(config.num_modules, loss)
        about = {
            "num_modules": config.num_modules,
            "layout": config.layout,
            "wiring": config.wiring._asdict(),
            "lambda": {
                "start": config.lambda_start, "end": config.lambda_end, "switch": config.switch
            },
        }  # fmt: skip
        saved = MTPLayout(
            architectures=["MTPModel"],
            dtype="float32",
            hidden_size=verifier.hidden_size,
            vocab_size=verifier.vocab_size,
            headstart=made_for(verifier, "mtp") | about,
        )
        drafter = cls(saved, verifier, loss)
        drafter.initialise(config.init)
        return drafter

    @torch.no_grad()
    def initialise(self, init: str) -> None:
        """Small random projections; with "verifier", they pass the hidden half through."""
        width = self.verifier.hidden_size
        for block in self.blocks:
            nn.init.normal_(block.projection.weight, std=0.02)
            if init == "verifier":
                start = 0 if self.wiring.hidden_first else width
                eye = torch.eye(width, device=block.projection.weight.device)
                block.projection.weight[:, start : start + width].add_(eye)
                continue
            for weight in block.layer.parameters():
                if weight.dim() >= 2:
                    nn.init.normal_(weight, std=0.02)

    @property
    def unserved(self) -> str:
        """What its model card says: vLLM runs one module, of the verifier's own folder."""
        if len(self.blocks) > 1:
            return (
                f"Not servable in vLLM, which would use the first of its {len(self.blocks)} "
                "modules for every draft; headstart's own decoding loop runs each."
            )
        if self.wiring != LAYOUTS["mimo"]:
            return (
                "No engine loads this folder: vLLM reads an MTP module from its verifier's own, "
                "which `mode: native` of train/mtp.py writes, and for a grafted module with "
                "drafter.layout mimo models/export.py. headstart's own decoding loop loads it."
            )
        return (
            "vLLM reads an MTP module from its verifier's own folder. Where `mode: native` of "
            "train/mtp.py has not written one, write this module and its verifier as one model:\n\n"
            "    python models/export.py THIS-FOLDER --to mimo --out FOLDER\n"
            "    vllm serve FOLDER --speculative-config "
            '\'{"method": "mtp", "num_speculative_tokens": 2}\''
        )

    # ---- one step ----------------------------------------------------------------------------

    def first(self, features: Tensor | None, last_hidden: Tensor) -> Tensor:
        """The verifier's hidden state that the first module reads: [B, n, H]."""
        return last_hidden if self.wiring.normed_input else features

    def enter(self, module: int, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """What the module's layer reads, [B, n, H], from the tokens and hidden states of slots."""
        block = self.blocks[module]
        dtype = block.projection.weight.dtype
        embedded = self.verifier.embed(tokens).to(dtype)
        if self.wiring.zero_first:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0.0)
        parts = [block.embedding_norm(embedded), block.hidden_norm(hidden.to(dtype))]
        if self.wiring.hidden_first:
            parts.reverse()
        return block.projection(torch.cat(parts, dim=-1))

    def next_input(self, output: States) -> Tensor:
        """What the next step reads of a module's output."""
        return output.last_hidden if self.wiring.normed_feedback else output.features

    def unroll(self, batch: Batch, num_steps: int) -> Iterator[Tensor]:
        hidden = self.first(batch.get("features"), batch["last_hidden"])
        tokens, positions = batch["input_ids"], batch["position_ids"]
        documents: Tensor | None = batch["document_ids"]
        if bool((documents.clamp(min=0) == documents[:, :1].clamp(min=0)).all()):
            documents = None  # padding lies at the end, where causality hides it
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        last = len(self.blocks) - 1
        runs = Runs()  # of the last module, where it is used again
        for s in range(num_steps):
            tokens = torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1)  # x_{t+1+s} at slot t
            module = min(s, last)
            block, inputs = self.blocks[module].block, (tokens, hidden, positions + s)
            entered = self.enter(module, *inputs)
            if module == last and num_steps - 1 > last:
                output = block.again(entered, positions + s, documents, runs)
            else:
                output = block.states(entered, (1,), positions + s, documents)
            yield output.last_hidden
            hidden = self.next_input(output)

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.verifier.logits(hidden.to(self.verifier.dtype))

    # ---- loss --------------------------------------------------------------------------------

    def loss_weights(self, progress: float) -> Tensor:
        """λ/D for each of D steps, where loss.gamma is 1."""
        early = progress <= self.schedule["switch"]
        self.weight = self.schedule["start" if early else "end"]
        return self.weight * self.loss.step_weights()

    def forward(self, batch: Batch, weights: Tensor) -> Loss:
        loss = super().forward(batch, weights)
        return Loss(loss.value, loss.metrics | self.settings_now(len(weights), weights.device))

    def settings_now(self, depth: int, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        """λ and D, as metrics."""
        numbers = torch.tensor([self.weight, depth], dtype=torch.double, device=device)
        one = torch.ones((), device=device)
        return {"lambda": (numbers[0], one), "depth": (numbers[1], one)}

    # ---- decoding ----------------------------------------------------------------------------

    def start(self, first_tokens: Tensor) -> State:
        width = self.verifier.hidden_size
        return State(len(self.blocks), len(first_tokens), width, first_tokens.device)

    def advance(self, state: State, tokens: Tensor, lengths: Tensor, states: States) -> None:
        rows = torch.arange(len(tokens), device=tokens.device)
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        placed = state.slots[:, None] + steps  # [B, n] positions, in whatever module
        placed = placed.masked_fill(steps >= lengths[:, None], HOLE)
        last, some = (lengths - 1).clamp(min=0), (lengths > 0)[:, None]
        hidden = self.first(*states)
        for module, cache in enumerate(state.caches):
            positions = placed.masked_fill(placed < module, HOLE)  # a slot before the text's first
            entered = self.enter(module, tokens, hidden, positions)
            output = self.blocks[module].block.states(entered, (1,), positions, cache=cache)
            if cache.has_holes:
                cache.keep(cache.positions >= 0)  # squeezes them out once they are many
            if module == 0:
                normed = output.last_hidden[rows, last]
                if state.output is not None:
                    normed = torch.where(some, normed, state.output)
                state.output = normed
            fed, before = self.next_input(output), state.fed_back[module]
            hidden = torch.cat([before[:, None], fed[:, :-1]], 1)  # the next module's, of one slot
            state.fed_back[module] = torch.where(some, fed[rows, last], before)  # behind
        state.slots = state.slots + lengths

    def propose(
        self, state: State, shape: Shape, drafting: Drafting, random: RowRandom | None
    ) -> Proposal:
        kept = [(cache.positions.shape[1], cache.has_holes) for cache in state.caches]
        last = len(self.blocks) - 1
        so_far: Nodes | None = None  # all nodes stepped
        placed = state.slots.new_empty(len(state.slots), 0)  # [B, M] their positions
        outputs = state.fed_back[0][:, None, :][:, :0]  # [B, M, H] of the module that ran last

        def step(nodes: Nodes) -> Tensor:
            nonlocal so_far, placed, outputs
            module, root = min(nodes.depth, last), state.fed_back[min(nodes.depth - 1, last)]
            above = torch.cat([root[:, None], outputs], 1)
            here = (state.slots + nodes.depth - 1)[:, None].expand_as(nodes.tokens)
            so_far, placed = joined(so_far, nodes), torch.cat([placed, here], 1)
            stepped, positions = nodes, here
            if nodes.depth <= last:  # a module's first run: over the slots of all nodes above too
                stepped, positions = so_far, placed
            positions = positions.masked_fill(positions < module, HOLE)
            index = (stepped.parents + 1)[..., None].expand(-1, -1, above.shape[-1])
            entered = self.enter(module, stepped.tokens, above.gather(1, index), positions)
            output = self.blocks[module].block.states(
                entered, (1,), positions, cache=state.caches[module], mask=stepped.seen
            )
            fed = self.next_input(output)
            outputs = fed if nodes.depth <= last else torch.cat([outputs, fed], 1)
            return self.logits(output.last_hidden[:, -nodes.tokens.shape[1] :], nodes.depth)

        first = self.logits(state.output, 0)
        proposal = grow(first, step, shape, drafting, random, None)
        # what was computed from drafts must not outlive the proposal: `advance` computes it again
        for cache, (slots, had_holes) in zip(state.caches, kept, strict=True):
            cache.truncate(slots)
            cache.has_holes = had_holes
        return proposal

    def select_rows(self, state: State, rows: Tensor) -> None:
        for cache in state.caches:
            cache.select_rows(rows)
        state.slots = state.slots[rows]
        state.fed_back = [output[rows] for output in state.fed_back]
        if state.output is not None:  # a text may end before its first round
            state.output = state.output[rows]

    # ---- checkpoint --------------------------------------------------------------------------

    @classmethod
    def load(cls, folder: Path, config: dict, verifier: Verifier, loss: LossConfig) -> "MTP":
        """Read a saved drafter, every tensor of it.

        Raises:
            ValueError: damaged weights, or a verifier of another shape.
        """
        tensors = tensors_for(folder, config, verifier)
        drafter = cls(MTPLayout(**config), verifier, loss)
        load_weights(drafter, folder, tensors)
        return drafter


def joined(before: Nodes | None, nodes: Nodes) -> Nodes:
    """All nodes stepped so far, whose `seen` is then square: [B, M, M]."""
    if before is None:
        return nodes
    seen = None
    if nodes.seen is not None:
        count = nodes.tokens.shape[1]
        seen = torch.cat([pad(before.seen, (0, count)), nodes.seen], 1)
    return Nodes(
        torch.cat([before.tokens, nodes.tokens], 1),
        torch.cat([before.parents, nodes.parents], 1),
        nodes.depth,
        seen,
    )
