"""A stack of decoder layers of transformers, with its final norm, as our caches and masks run it.

Legend: B rows, T tokens, H hidden size, L feature layers.
"""

import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from headstart.models.verifier.cache import RaggedCache, visible

_TOLD_BY_SLOT = {"local"}  # GPT-Neo counts its window in slots of the cache, not in positions


class States(NamedTuple):
    """What the verifier computed for each token."""

    features: Tensor | None  # [B, T, L*H] residual stream after each asked layer, side by side
    last_hidden: Tensor  # [B, T, H] after the final norm


class Decoder:
    """The decoder of a causal language model.

    Layer l means "after l decoder layers": 0 is the embeddings, `num_layers` the residual stream
    before the final norm. (`hidden_states[num_layers]` of transformers is after that norm.)
    """

    def __init__(self, decoder: nn.Module, config: PretrainedConfig, name: str):
        self.decoder, self.config, self.name = decoder, config, name
        self._cache_argument = self._read_arguments()
        self.layers = self._decoder_layers()
        self.num_layers = len(self.layers)
        self.hidden_size = config.hidden_size
        self._attention_kinds = self._read_attention_kinds()

    @property
    def device(self) -> torch.device:
        return next(self.layers.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.layers.parameters()).dtype

    @property
    def last_layer_config(self) -> PretrainedConfig:
        """The config as the last layer reads it: layers may differ in it (Gemma 4)."""
        several = getattr(self.config, "is_heterogeneous", False)
        return self.config.per_layer_config[-1] if several else self.config

    def _read_arguments(self) -> str:
        """The decoder's name for its cache: transformers 5.24 renamed past_key_values."""
        taken = inspect.signature(self.decoder.forward).parameters
        names = [name for name in ("cache", "past_key_values") if name in taken]
        if not names or "position_ids" not in taken:
            raise ValueError(
                f"verifier {self.name!r}: {type(self.decoder).__name__} takes no position_ids or "
                "no cache, so its rows cannot be cut back; this architecture is not supported"
            )
        return names[0]

    def _decoder_layers(self) -> nn.ModuleList:
        wanted = self.config.num_hidden_layers
        for module in self.decoder.children():
            if isinstance(module, nn.ModuleList) and len(module) == wanted:
                return module
        raise ValueError(
            f"verifier {self.name!r}: no list of {wanted} decoder layers in "
            f"{type(self.decoder).__name__}; this architecture is not supported"
        )

    def _read_attention_kinds(self) -> dict[str, int | None]:
        """Attention kind -> its sliding window (None: sees everything before)."""
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        kinds = kinds or _TOLD_BY_SLOT & set(getattr(self.config, "attention_layers", ()))
        if not kinds:
            kinds = ["sliding_attention" if window else "full_attention"]
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(
                f"verifier {self.name!r}: layers of kind {', '.join(sorted(unknown))} are not "
                "supported; only full_attention and sliding_attention can be cut back"
            )
        return {
            kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))
        }

    def states(
        self,
        input_ids: Tensor,
        layers: tuple[int, ...] = (),
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: RaggedCache | None = None,
        mask: Tensor | None = None,
    ) -> States:
        """Run the decoder over `input_ids [B, T]`, or over embeddings `[B, T, H]` in their place.

        Args:
            layers: ids of the residual streams wanted, 0 … num_layers.
            position_ids: [B, T]; when not given, from 0, or from each row's last one in the cache.
                With a cache, -1 marks padding, which is never seen later.
            document_ids: [B, T]; tokens see only their own document. Not with a cache.
            cache: keys and values of the tokens before; these tokens are appended.
            mask: bool [B, T, M], which of the last M ≥ T slots each token may see, for the nodes
                of a tree; positions alone decide when not given. With a cache.
        """
        if cache is None:
            return self._run(input_ids, layers, position_ids, self._packed(document_ids), None)
        if position_ids is None:
            steps = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = cache.next_positions()[:, None] + steps
        cache.append_positions(position_ids)
        prefix_only = input_ids.shape[1] == 1 or cache.positions.shape[1] == input_ids.shape[1]
        windowed = "sliding_attention" in self._attention_kinds
        if mask is None and prefix_only and not cache.has_holes and not windowed:
            masks = None  # plain causal attention: the model's own fast path
        else:
            masks = {}
            for kind, window in self._attention_kinds.items():
                seen = visible(position_ids, cache.positions, window)
                if mask is not None:
                    seen[..., -mask.shape[-1] :] &= mask
                masks[kind] = seen
        return self._run(input_ids, layers, position_ids.clamp(min=0), masks, cache)

    def _packed(self, document_ids: Tensor | None) -> dict[str, Tensor] | None:
        if document_ids is None or bool((document_ids == document_ids[:, :1]).all()):
            return None
        slots = torch.arange(document_ids.shape[1], device=document_ids.device)
        slots = slots.expand_as(document_ids)
        same = document_ids[:, :, None] == document_ids[:, None, :]
        return {k: same & visible(slots, slots, w) for k, w in self._attention_kinds.items()}

    def _run(
        self,
        input_ids: Tensor,
        layers: tuple[int, ...],
        position_ids: Tensor | None,
        masks: dict[str, Tensor] | None,
        cache: Cache | None,
    ) -> States:
        recorded: dict[int, Tensor] = {}
        hooks = []
        for layer in layers:
            if not 0 <= layer <= self.num_layers:
                raise ValueError(
                    f"layer {layer} is out of range: {self.name} has layers 0 … {self.num_layers}"
                )
            if layer == 0:
                hook = self.layers[0].register_forward_pre_hook(
                    lambda _, args, kwargs: recorded.update(
                        {0: args[0] if args else kwargs["hidden_states"]}
                    ),
                    with_kwargs=True,
                )
            else:
                hook = self.layers[layer - 1].register_forward_hook(
                    lambda _, __, output, layer=layer: recorded.update(
                        {layer: output[0] if isinstance(output, tuple) else output}
                    )
                )
            hooks.append(hook)
        attention_mask = None
        if masks is not None:
            prepared = {kind: self._model_mask(seen) for kind, seen in masks.items()}
            attention_mask = prepared if len(prepared) > 1 else next(iter(prepared.values()))
        try:
            output = self.decoder(
                **{"inputs_embeds" if input_ids.is_floating_point() else "input_ids": input_ids},
                position_ids=position_ids,
                attention_mask=attention_mask,
                use_cache=cache is not None,
                **{self._cache_argument: cache},
            )
        finally:
            for hook in hooks:
                hook.remove()
        last = output.last_hidden_state
        wanted = [recorded[layer].to(last.device) for layer in layers]  # it may be spread over GPUs
        return States(torch.cat(wanted, dim=-1) if wanted else None, last)

    def _model_mask(self, seen: Tensor) -> Tensor:
        """bool [B, n, S] -> additive [B, 1, n, S], which every attention implementation takes."""
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[:, None]
