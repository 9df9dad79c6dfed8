"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer on fused verifier features.

f_t = W_fc [g^(l1); g^(l2); g^(l3)]_t, no bias. The layer's attention reads [norm(E(x)); norm(f)],
its residual stream is f. Its output o gives logits head'(norm(o)) over the draft vocabulary, and
is itself the f of the next step (training-time test). Modules are named as vLLM loads them.

Legend: B rows, T slots, n new slots, H verifier's hidden size, L feature layers, V and V'
verifier's and draft vocabulary.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headstart.models import vocab
from headstart.models.losses import LossConfig
from headstart.models.parts.feature_drafter import (
    DraftLayer,
    FeatureDrafter,
    check_init,
    llama_config,
    rotary_of,
)
from headstart.models.saved import (
    check_draft_ids,
    load_weights,
    made_for,
    tensors_for,
)
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import Verifier
from headstart.script import named

LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Eagle3Config:
    """The drafter's shape; what is not here is the verifier's."""

    feature_layers: tuple[int, ...] | None = None
    """Residual streams to fuse, ascending, after layer l = 1 … n; default 2, n // 2, n - 3."""
    draft_vocab_size: int | None = None
    """Ids the drafter can propose; default: the verifier's whole vocabulary."""
    init: str = "verifier"
    """verifier: start from its last decoder layer where the shapes allow; random: do not."""
    norm_output: bool = False
    """EAGLE-3.1: feed back the normed output instead of the output itself."""
    fc_norm: bool = False
    """EAGLE-3.1: norm each fused feature first."""

    def __post_init__(self) -> None:
        check_init(self.init)
        size, layers = self.draft_vocab_size, self.feature_layers
        if size is not None and size < 1:
            raise ValueError(f"drafter.draft_vocab_size must be 1 or more, got {size}")
        if layers is not None:
            layers = list(layers)
            if not layers or layers[0] < 1 or layers != sorted(set(layers)):
                raise ValueError(
                    "drafter.feature_layers must be distinct, ascending ids from 1 on, "
                    f"got {layers}"
                )

    def check(self, verifier: Outline) -> None:
        """Raise a ValueError for what this verifier does not allow."""
        check_layers(self.feature_layers, verifier.num_layers)
        vocab.check_size(self.draft_vocab_size, verifier)


def check_layers(
    layers: tuple[int, ...] | None, num_layers: int, field: str = "drafter.feature_layers"
) -> tuple[int, ...]:
    """The layer ids, or the default ones; `field` named them.

    Raises:
        ValueError: ids out of 1 … n, not ascending, or no default for so shallow a verifier.
    """
    if layers is None:
        if num_layers < 7:
            raise ValueError(
                f"{field}: the default (2, n // 2, n - 3) needs a verifier of 7 "
                f"layers or more, this one has {num_layers}; pass ids such as [{num_layers}]"
            )
        return 2, num_layers // 2, num_layers - 3
    layers = tuple(layers)
    in_range = all(1 <= layer <= num_layers for layer in layers)
    if not layers or not in_range or list(layers) != sorted(set(layers)):
        raise ValueError(
            f"{field} must be distinct, ascending ids in 1 … {num_layers}, got {list(layers)}"
        )
    return layers


def layer_ids(config: dict[str, Any]) -> list[int]:
    """Of a config.json: layers whose residual stream is fused, as vLLM reads them: those of the top
    level, else those of eagle_config.

    Raises:
        KeyError: neither says.
        ValueError: they differ.
    """
    outer, inner = config.get(LAYERS), (config.get("eagle_config") or {}).get(LAYERS)
    if outer and inner and outer != inner:
        raise ValueError(
            f"{LAYERS} is {outer} at the top level and {inner} in eagle_config; write those of "
            "training to both"
        )
    if not (outer or inner):
        raise KeyError(LAYERS)
    return outer or inner


def with_layer_ids(config: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """The config with these ids in both places: vLLM's newer GPU runner looks at the top level
    alone, and other programs in eagle_config."""
    nested = (config.get("eagle_config") or {}) | {LAYERS: ids, "use_aux_hidden_state": True}
    return config | {LAYERS: ids, "eagle_config": nested}


class Layer(DraftLayer):
    """Decoder layer: attention on [norm(E(x)); norm(f)], residual f, or norm(f) where the config
    has `norm_before_residual`."""

    def __init__(self, config: LlamaConfig):
        width, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, 2 * width)
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_norm = LlamaRMSNorm(width, eps)

    def project(
        self, embedded: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        normed = residual if self.norm_before_residual else self.hidden_norm(residual)
        inputs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return self.self_attn.project(inputs, rotary)


class Eagle3(FeatureDrafter):
    """The drafter. Make one with `create`, read one with `load`."""

    serving = "eagle3"

    def __init__(
        self,
        config: LlamaConfig,
        verifier: Verifier,
        loss: LossConfig,
        draft_ids: Tensor | None,
        own_embeddings: bool = False,
    ):
        super().__init__(config, verifier, loss, own_embeddings)
        verifier.check_streams()
        self.feature_layers = tuple(getattr(config, LAYERS))
        width, count = config.hidden_size, len(self.feature_layers)
        self.fc = nn.Linear(count * width, width, bias=False)
        self.fc_norm = (
            nn.ModuleList(LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(count))
            if config.fc_norm
            else None
        )
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = rotary_of(config, verifier)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        if draft_ids is not None:
            offsets = draft_ids - torch.arange(len(draft_ids))
            self.register_buffer("d2t", offsets)  # vLLM's convention: target id = i + d2t[i]
            member = torch.zeros(config.vocab_size, dtype=torch.bool)
            self.register_buffer("t2d", member.index_fill(0, draft_ids, True))
        self.to(verifier.device)

    @classmethod
    def create(
        cls, verifier: Verifier, config: Eagle3Config, loss: LossConfig, token_counts: Tensor
    ) -> "Eagle3":
        """A new drafter; `token_counts [V]` (supervised tokens) choose its vocabulary."""
        layers = check_layers(config.feature_layers, verifier.num_layers)
        size = config.draft_vocab_size or verifier.vocab_size
        if config.draft_vocab_size is not None:
            draft_ids = vocab.choose(token_counts, config.draft_vocab_size, verifier)
        if size == verifier.vocab_size:
            draft_ids = None
        drafter = cls(draft_config(verifier, config, layers, size), verifier, loss, draft_ids)
        drafter.initialise(config.init)
        return drafter

    @torch.no_grad()
    def initialise(self, init: str) -> bool:
        """Head rows from the verifier too, and with its last layer its final norm."""
        copied, verifier = super().initialise(init), self.verifier
        rows = verifier.head.weight.float()
        self.lm_head.weight.copy_(rows if self.draft_ids is None else rows[self.draft_ids])
        if not copied:
            return False
        norm = [
            m for m in verifier.decoder.children() if hasattr(m, "weight") and m.weight.dim() == 1
        ]
        if len(norm) == 1 and norm[0].weight.shape == self.norm.weight.shape:
            self.norm.weight.copy_(norm[0].weight)
        return True

    @torch.no_grad()
    def with_vocabulary(self, draft_ids: Tensor) -> "Eagle3":
        own = self.embed_tokens is not None
        drafter = Eagle3(self.config, self.verifier, self.loss, draft_ids, own)
        mine = self.state_dict()
        kept = {n: t for n, t in mine.items() if n not in ("d2t", "t2d", "lm_head.weight")}
        drafter.load_state_dict(kept, strict=False)
        fresh = self.verifier.head.weight[draft_ids].float()
        rows = vocab.exchanged_rows(self.lm_head.weight, self.draft_ids, draft_ids, fresh)
        drafter.lm_head.weight.copy_(rows)
        return drafter

    # ---- one step ----------------------------------------------------------------------------

    @property
    def layer(self) -> Layer:
        return self.midlayer

    def first(self, features: Tensor | None, last_hidden: Tensor) -> Tensor:
        """[B, n, L*H] -> f [B, n, H]."""
        if self.fc_norm is not None:
            parts = features.split(self.config.hidden_size, dim=-1)
            pairs = zip(self.fc_norm, parts, strict=True)
            features = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        return self.fc(features.to(self.fc.weight.dtype))

    def enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.midlayer.hidden_norm(hidden) if self.config.norm_before_residual else hidden

    def fed_back(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.config.norm_output else output

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.lm_head(self.norm(hidden))

    # ---- checkpoint --------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        folder: Path,
        config: dict,
        verifier: Verifier,
        loss: LossConfig,
        tensors: dict[str, Tensor] | None = None,
    ) -> "Eagle3":
        """Read a saved drafter, every tensor of it; or take `tensors`, named as it saves them.

        Raises:
            ValueError: damaged weights, or a verifier of another shape.
        """
        tensors = tensors_for(folder, config, verifier, tensors)
        with named(f"drafter {str(folder)!r}: config.json"):
            layers = layer_ids(config)
            check_layers(layers, verifier.num_layers)
        if not config.get(LAYERS):
            warnings.warn(
                f"drafter {str(folder)!r}: {LAYERS} is in eagle_config alone, and vLLM on GPUs "
                "looks for it at the top level of config.json: there it drafts from its default "
                f"layers. Saved again it has both; or write {layers} there",
                stacklevel=2,
            )
        config = with_layer_ids(config, layers)
        draft_ids = None
        if "d2t" in tensors:
            draft_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
            told = ("d2t (offsets)", config, "draft_vocab_size")
            check_draft_ids(folder, draft_ids, *told, verifier)
        own = "embed_tokens.weight" in tensors
        drafter = cls(LlamaConfig(**config), verifier, loss, draft_ids, own)
        load_weights(drafter, folder, tensors)
        return drafter


def draft_config(
    verifier: Verifier, config: Eagle3Config, layers: tuple[int, ...], draft_vocab_size: int
) -> LlamaConfig:
    """The config that is saved: the verifier's shape and positions, and explicit flags."""
    return llama_config(
        verifier,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=draft_vocab_size,
        num_aux_hidden_states=len(layers),
        **with_layer_ids({}, list(layers)),
        target_hidden_size=verifier.hidden_size,
        norm_before_residual=False,
        norm_output=config.norm_output,
        fc_norm=config.fc_norm,
        headstart=made_for(verifier, "eagle3"),
    )
