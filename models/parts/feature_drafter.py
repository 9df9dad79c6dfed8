"""What drafters on the verifier's features share: one decoder layer that is fed its own output.

At step s slot t reads a hidden state and E(x_{t+1+s}): the verifier's features at s = 0, its own
output of step s - 1 after (training-time test, as in EAGLE-3). The query of slot t sees the step-0
keys of slots ≤ t and its own slot's keys of steps 1 … s, which is what serving sees: verified slots
come from the verifier's features, drafts from the drafter's own.

Legend: B rows, T slots, n new slots, H verifier's hidden size, L feature layers, D head size, V'
draft vocabulary.
"""

import abc
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from headstart.models.batch import Batch
from headstart.models.drafter import TrainableDrafter
from headstart.models.losses import LossConfig
from headstart.models.parts.attention import cached_attention, packed_mask, ttt_attention
from headstart.models.proposal.growth import Nodes, grow
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom
from headstart.models.proposal.trees import Shape
from headstart.models.verifier.cache import RaggedCache
from headstart.models.verifier.rotary import fix, whole_length
from headstart.models.verifier.verifier import States, Verifier


class Attention(nn.Module):
    """Grouped-query attention; its input may be wider than its output."""

    def __init__(self, config: LlamaConfig, input_width: int):
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(input_width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)

    def project(self, inputs: Tensor, rotary: tuple[Tensor, Tensor]) -> list[Tensor]:
        """[B, n, input_width] -> rotated query, rotated key, value, each [B, heads, n, D]."""
        query, key, value = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return [*apply_rotary_pos_emb(query, key, *rotary), value]


class DraftLayer(nn.Module, abc.ABC):
    """A decoder layer in two halves, so that training and serving put their attention between."""

    def __init__(self, config: LlamaConfig, input_width: int):
        """`input_width` is that of the attention's input."""
        super().__init__()
        self.self_attn = Attention(config, input_width)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    @abc.abstractmethod
    def project(
        self, embedded: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        """Query, key and value, [B, heads, n, D] each, of n slots whose residual is `[B, n, H]`."""

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """[B, n, H] residual and [B, heads, n, D] attention output -> [B, n, H]."""
        hidden = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class State:
    """Decoding state: keys of the verified slots, and the last slot's output."""

    def __init__(self, batch_size: int, device: torch.device):
        self.cache = RaggedCache(batch_size, device)
        self.slots = torch.zeros(batch_size, dtype=torch.long, device=device)  # [B]
        self.output: Tensor | None = None  # [B, H] of the last verified slot


class FeatureDrafter(TrainableDrafter):
    """A drafter whose one layer is unrolled. Subclasses set `fc` and `rotary`, define the rest."""

    fc: nn.Linear  # the last H columns of its input are the verifier's highest states
    rotary: nn.Module

    def __init__(
        self, config: LlamaConfig, verifier: Verifier, loss: LossConfig, own_embeddings: bool
    ):
        """With `own_embeddings`, those of its file, frozen, as engines do; else the verifier's."""
        super().__init__(verifier, loss)
        self.config = config
        self.embed_tokens = None
        if own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.embed_tokens.requires_grad_(False)

    def embed(self, tokens: Tensor) -> Tensor:
        """E(x): `[...]` -> `[..., H]`."""
        if self.embed_tokens is None:
            return self.verifier.embed(tokens)
        return self.embed_tokens(tokens)

    @torch.no_grad()
    def initialise(self, init: str) -> bool:
        """Small random weights; with "verifier", its last decoder layer, where the shapes allow.

        fc then passes the verifier's highest states through, and what else it reads starts small,
        so that training starts near a layer that already turns a late residual stream into the
        last one.

        Returns:
            whether the layer was copied.
        """
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        copied = init == "verifier" and copy_last_layer(self.verifier, self.layer)
        if copied:
            width = self.fc.weight.shape[0]
            self.fc.weight[:, -width:].add_(torch.eye(width, device=self.fc.weight.device))
        return copied

    @property
    @abc.abstractmethod
    def layer(self) -> DraftLayer: ...

    @abc.abstractmethod
    def first(self, features: Tensor | None, last_hidden: Tensor) -> Tensor:
        """The hidden state of step 0, from the verifier's states: [B, n, H]."""

    def enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The layer's residual stream, from E(x_{t+1+s}) and the hidden state: [B, n, H]."""
        return hidden

    def fed_back(self, output: Tensor) -> Tensor:
        """The hidden state of the next step, from this one's output."""
        return output

    def unroll(self, batch: Batch, num_steps: int) -> Iterator[Tensor]:
        hidden = self.first(batch.get("features"), batch["last_hidden"])
        mask = packed_mask(batch["document_ids"], hidden.dtype)
        tokens = batch["input_ids"]
        keys, values = [], []
        for s in range(num_steps):
            tokens = torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1)  # x_{t+1+s} at slot t
            embedded = self.embed(tokens).to(hidden.dtype)
            rotary = self.rotary(hidden, batch["position_ids"] + s)
            residual = self.enter(embedded, hidden)
            query, key, value = self.layer.project(embedded, residual, rotary)
            keys.append(key)
            values.append(value.to(key.dtype))
            attended = ttt_attention(query.to(key.dtype), keys, values, mask)
            hidden = self.layer.finish(residual, attended)
            yield hidden
            hidden = self.fed_back(hidden)

    # ---- decoding ----------------------------------------------------------------------------

    def start(self, first_tokens: Tensor) -> State:
        return State(len(first_tokens), first_tokens.device)

    def advance(self, state: State, tokens: Tensor, lengths: Tensor, states: States) -> None:
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = (state.slots[:, None] + steps).masked_fill(steps >= lengths[:, None], -1)
        output = self._run(state, self.first(*states), tokens, positions)
        last = output[torch.arange(len(tokens), device=tokens.device), (lengths - 1).clamp(min=0)]
        if state.output is not None:
            last = torch.where((lengths > 0)[:, None], last, state.output)
        state.output = last
        state.slots = state.slots + lengths
        if state.cache.has_holes:
            state.cache.keep(state.cache.positions >= 0)  # squeezes them out once they are many

    def propose(
        self, state: State, shape: Shape, drafting: Drafting, random: RowRandom | None
    ) -> Proposal:
        kept, had_holes = state.cache.positions.shape[1], state.cache.has_holes
        outputs = state.output[:, None]  # of the root, then of each node stepped

        def step(nodes: Nodes) -> Tensor:
            nonlocal outputs
            above = (nodes.parents + 1)[..., None].expand(-1, -1, outputs.shape[-1])
            hidden = self.fed_back(outputs.gather(1, above))
            positions = (state.slots + nodes.depth - 1)[:, None].expand_as(nodes.tokens)
            output = self._run(state, hidden, nodes.tokens, positions, nodes.seen)
            outputs = torch.cat([outputs, output], 1)
            return self.logits(output, nodes.depth)

        first = self.logits(state.output, 0)
        proposal = grow(first, step, shape, drafting, random, self.draft_ids)
        # the drafter's own features must not outlive the proposal: `advance` writes real ones
        state.cache.truncate(kept)
        state.cache.has_holes = had_holes
        return proposal

    def _run(
        self,
        state: State,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        seen: Tensor | None = None,
    ) -> Tensor:
        """The layer over n new slots, appended to the cache: [B, n, H]."""
        embedded = self.embed(tokens).to(hidden.dtype)
        rotary = self.rotary(hidden, positions.clamp(min=0))
        residual = self.enter(embedded, hidden)
        query, key, value = self.layer.project(embedded, residual, rotary)
        attended = cached_attention(query, key, value, positions, state.cache, seen)
        return self.layer.finish(residual, attended)

    def select_rows(self, state: State, rows: Tensor) -> None:
        state.cache.select_rows(rows)
        state.slots = state.slots[rows]
        if state.output is not None:  # a text may end before its first round
            state.output = state.output[rows]


def llama_config(verifier: Verifier, **own: object) -> LlamaConfig:
    """A Llama layer of the verifier's shape and positions, as far as one can have them; `own`
    settings come on top."""
    theirs, width = verifier.last_layer_config, verifier.hidden_size
    heads, kv_heads, head_dim = heads_of(theirs, width)
    inner = getattr(theirs, "intermediate_size", None) or 4 * width
    return LlamaConfig(
        dtype="float32",
        hidden_size=width,
        intermediate_size=inner if isinstance(inner, int) else inner[-1],  # one for each layer
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=verifier.vocab_size,
        rms_norm_eps=getattr(theirs, "rms_norm_eps", None) or 1e-5,
        rope_parameters=rope_of(theirs, head_dim),
        max_position_embeddings=whole_length(theirs),
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        **own,
    )


def rotary_of(config: LlamaConfig, verifier: Verifier) -> LlamaRotaryEmbedding:
    """The drafter's positions, fixed for texts of any length as the verifier's are."""
    rotary = LlamaRotaryEmbedding(config)
    fix(rotary, verifier.long_rotary)
    return rotary


def heads_of(theirs: PretrainedConfig, width: int) -> tuple[int, int, int]:
    """Heads, heads of keys and values, and head size of a Llama layer `width` wide.

    The verifier's own, unless its heads do not divide the width (GLM-4.5 has 96 in 4096): no engine
    takes a Llama layer like that, so it gets as many heads of that size as fit.
    """
    heads = theirs.num_attention_heads
    kv_heads = getattr(theirs, "num_key_value_heads", None) or heads
    head_dim = getattr(theirs, "head_dim", None) or max(width // heads, 2)
    if width % heads:
        heads = next(n for n in range(max(width // head_dim, 1), 0, -1) if width % n == 0)
    kv_heads = next(n for n in range(min(kv_heads, heads), 0, -1) if heads % n == 0)
    return heads, kv_heads, head_dim + head_dim % 2


def rope_of(theirs: PretrainedConfig, head_dim: int) -> dict[str, object]:
    """The verifier's rotary positions, for a layer that rotates whole heads.

    Plain ones where it has none (GPT-2 learns its positions) or its factors are for a part of
    the head (longrope with `partial_rotary_factor`).
    """
    rope = dict(getattr(theirs, "rope_parameters", None) or {})
    if rope and all(isinstance(kind, dict) for kind in rope.values()):  # one for each attention
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    for name in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        rope.pop(name, None)  # a Llama layer rotates the whole head, and knows no pictures
    factors = rope.get("short_factor")
    if not rope.get("rope_theta") or (factors and len(factors) != head_dim // 2):
        return {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10_000.0}
    return rope


def check_init(init: str) -> None:
    """Raise a ValueError for an unknown way to start."""
    if init not in ("verifier", "random"):
        raise ValueError(f"drafter.init must be verifier or random, got {init!r}")


@torch.no_grad()
def copy_last_layer(verifier: Verifier, layer: DraftLayer) -> bool:
    """Start a draft layer from the verifier's last decoder layer, if their shapes allow.

    Where the attention's input is [embedding; hidden], the copied weights act on the hidden half.

    Args:
        layer: its parameters are named like the verifier's. A norm that only one of the two has is
            left out.

    Returns:
        whether it was copied; if not, that is printed.
    """
    source = dict(verifier.layers[-1].named_parameters())
    wanted = {}
    for name, weight in layer.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weight = weight[:, -verifier.hidden_size :]
        wanted[name] = weight
    norms = {"input_layernorm.weight", "hidden_norm.weight"}
    same = {n: w.shape for n, w in source.items() if n not in norms} == {
        n: w.shape for n, w in wanted.items() if n not in norms
    }
    if not same or verifier.config.hidden_act != "silu":  # Gemma: same shapes, other arithmetic
        print(
            f"drafter.init: the last layer of {verifier.name} has another shape or arithmetic "
            "than the drafter's; starting from random weights"
        )
        return False
    for name, weight in source.items():
        if name == "input_layernorm.weight":
            name = "hidden_norm.weight"  # it normed a hidden state there
        if name in wanted:
            wanted[name].copy_(weight)
    return True
