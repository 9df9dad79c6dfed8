"""The verifier: any Hugging Face causal language model, frozen, as drafters need to see it.

Legend: B rows, T tokens, H verifier's hidden size, V its vocabulary, L feature layers.
"""

import hashlib
import inspect
import json
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from headstart.models.cache import RaggedCache, visible
from headstart.models.outline import context_length, first_line, locate, not_loaded

# What the weights do not show. Not the whole config: a new release of transformers adds fields.
_IDENTITY = (
    "model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "rope_parameters",
)  # fmt: skip


class States(NamedTuple):
    """What the verifier computed for each token."""

    features: Tensor | None  # [B, T, L*H] residual stream after each asked layer, side by side
    last_hidden: Tensor  # [B, T, H] after the final norm


class Verifier:
    """A causal language model in `eval()`, frozen unless its model is also what is trained.

    Layer l means "after l decoder layers": 0 is the embeddings, `num_layers` the residual stream
    before the final norm. (`hidden_states[num_layers]` of transformers is after that norm.)
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        self._cache_argument = self._read_arguments()
        self.layers = self._decoder_layers()
        self.num_layers = len(self.layers)
        self.hidden_size = self.config.hidden_size
        self.head = model.get_output_embeddings()
        self.vocab_size = self.head.weight.shape[0]
        self.context_length = context_length(self.config)
        self._attention_kinds = self._read_attention_kinds()
        self._check_logits()
        self.terminator_ids = self._find_terminators()

    @classmethod
    def load(
        cls, name: str, dtype: str = "float32", device: torch.device | str = "cpu"
    ) -> "Verifier":
        """Load `embedded/smollm2-135m`, a local folder, or a Hub name.

        Args:
            dtype: float32 or bfloat16.

        Raises:
            ValueError: no such model or device, or a model that cannot be drafted for.
        """
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"verifier dtype {dtype!r} is not supported; use float32 or bfloat16")
        check_device(device)
        path = locate(name)
        disable_progress_bar()  # one for a load of seconds, in between our own lines
        try:
            config = AutoConfig.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
            model, loaded = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=getattr(torch, dtype), output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise not_loaded(name, error) from error
        if loaded["missing_keys"]:  # transformers would go on with random weights
            raise ValueError(
                f"verifier {name!r} lacks {len(loaded['missing_keys'])} of its tensors, "
                f"{min(loaded['missing_keys'])} for one; is it a whole model, not a drafter?"
            )
        return cls(model.to(device), tokenizer, name)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    def _read_arguments(self) -> str:
        """The decoder's name for its cache: transformers 5.24 renamed past_key_values."""
        if getattr(self.model, "_is_stateful", False):
            raise ValueError(
                f"verifier {self.name!r}: {type(self.model).__name__} keeps a recurrent state, "
                "which cannot be cut back after a rejection; use one with attention layers only"
            )
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

    # ---- states and logits -------------------------------------------------------------------

    def states(
        self,
        input_ids: Tensor,
        layers: tuple[int, ...] = (),
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: RaggedCache | None = None,
        mask: Tensor | None = None,
    ) -> States:
        """Run the decoder over `input_ids [B, T]`.

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
        cache: RaggedCache | None,
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
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                use_cache=cache is not None,
                **{self._cache_argument: cache},
            )
        finally:
            for hook in hooks:
                hook.remove()
        features = torch.cat([recorded[layer] for layer in layers], dim=-1) if layers else None
        return States(features, output.last_hidden_state)

    def _model_mask(self, seen: Tensor) -> Tensor:
        """bool [B, n, S] -> additive [B, 1, n, S], which every attention implementation takes."""
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[:, None]

    def logits(self, last_hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """The model's own logits of `last_hidden [..., H]`: `[..., V]`, capping and scaling in.

        With `ids [V']`, only of these tokens: `[..., V']`.
        """
        if ids is None:
            return self.scaled(self.head(last_hidden))
        return self.scaled(functional.linear(last_hidden, *self.head_rows(ids)))

    def head_rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight `[V', H]` and bias `[V']`, if any, of the head for these tokens: a copy."""
        bias = self.head.bias
        return self.head.weight[ids], None if bias is None else bias[ids]

    def scaled(self, logits: Tensor) -> Tensor:
        """What the model does to its head's output: scaling and capping."""
        config = self.config
        if getattr(config, "logits_scaling", None):  # Granite divides
            logits = logits / config.logits_scaling
        if getattr(config, "logit_scale", None):  # Cohere multiplies
            logits = logits * config.logit_scale
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _check_logits(self) -> None:
        """An architecture with another way from hidden state to logits must not pass silently."""
        ids = torch.tensor([[0, 1]], device=self.device) % self.vocab_size
        with torch.no_grad():
            own = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self.logits(self.states(ids).last_hidden).float()
        if not torch.allclose(own, ours, rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"verifier {self.name!r}: {type(self.model).__name__} computes its logits in a way "
                "headstart does not know; this architecture is not supported"
            )

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the input embedding: `[...]` -> `[..., H]`."""
        return self.model.get_input_embeddings()(ids)

    def new_cache(self, batch_size: int) -> RaggedCache:
        return RaggedCache(batch_size, self.device)

    # ---- identity ----------------------------------------------------------------------------

    def _find_terminators(self) -> tuple[int, ...]:
        """Every id that ends an answer: the model's, the tokenizer's, and the template's."""
        found: set[int] = set()
        for source in (self.model.generation_config, self.config, self.tokenizer):
            for field in ("eos_token_id",):
                ids = getattr(source, field, None)
                if ids is not None:
                    found.update([ids] if isinstance(ids, int) else ids)
        if self.tokenizer.chat_template:
            found.update(end_of_turn_ids(self.tokenizer))
        return tuple(sorted(i for i in found if i < self.vocab_size))

    def fingerprint(self) -> str:
        """16 hex digits over architecture, vocabulary and sampled weight rows.

        Weights enter rounded to bfloat16, so that one checkpoint gives one fingerprint in both
        precisions it can be loaded in.
        """
        digest = hashlib.sha256()
        config = self.config.to_dict()
        known = {field: config.get(field) for field in _IDENTITY} | self._attention_kinds
        digest.update(json.dumps(known, sort_keys=True, default=str).encode())
        digest.update(json.dumps(sorted(self.tokenizer.get_vocab().items())).encode())
        for _, weight in sorted(self.model.named_parameters()):
            rows = weight.detach().reshape(weight.shape[0], -1)
            picked = rows[:: max(1, len(rows) // 4), :64].to(torch.bfloat16).contiguous()
            digest.update(picked.cpu().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The special token that the chat template writes right after an assistant's text, if any."""
    mark = "headstart"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template that needs more than two plain turns says nothing here
        return set()
    after = text[text.rfind(mark) + len(mark) :]
    ids = tokenizer(after, add_special_tokens=False).input_ids
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return {ids[0]} if ids and ids[0] in special else set()


def check_device(device: torch.device | str) -> None:
    """Nothing may be loaded for a device that is not there.

    Raises:
        ValueError: torch does not know the device, was built without it, or finds none.
    """
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"device {str(device)!r} cannot be used: {first_line(error)}; pass cpu, or cuda where "
            "torch finds a GPU"
        ) from error
