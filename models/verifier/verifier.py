"""The verifier: any Hugging Face causal language model, frozen, as drafters need to see it.

Legend: B rows, T tokens, H verifier's hidden size, V its vocabulary, L feature layers.
"""

import hashlib
import json

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoHfQuantizer
from transformers.utils.logging import disable_progress_bar

from headstart.models.verifier import adapter, rotary
from headstart.models.verifier.cache import RaggedCache
from headstart.models.verifier.decoder import Decoder, States
from headstart.models.verifier.mimo import class_for
from headstart.models.verifier.outline import (
    first_line,
    length_of,
    locate,
    not_loaded,
    trusted,
)

# What the weights do not show. Not the whole config: a new release of transformers adds fields.
_IDENTITY = (
    "model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "rope_parameters",
)  # fmt: skip

__all__ = ["States", "Verifier"]


class Verifier(Decoder):
    """A causal language model in `eval()`, frozen unless its model is also what is trained."""

    stream_shape: tuple[int, ...] | None = None  # of a layer's states of one text of two tokens

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        length: int | None = None,
    ):
        """`length`: of the longest text, in tokens, where it decides rotary positions."""
        self.model = model.eval().requires_grad_(False)
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["recurrent"])
        if getattr(model, "_is_stateful", False) and kinds != {"full_attention"}:
            raise ValueError(
                f"verifier {name!r}: {type(model).__name__} keeps a recurrent state, which cannot "
                "be cut back after a rejection; use one with attention layers only"
            )
        super().__init__(model.get_decoder(), model.config.get_text_config(), name)
        self.tokenizer = tokenizer
        self.head = model.get_output_embeddings()
        self.vocab_size = self.head.weight.shape[0]
        self.length, self.longer = length, rotary.longer(self.config, length)
        self.context_length = rotary.context_length(self.config, length)
        self.long_rotary = rotary.is_long(self.config, length)
        rotary.fix(self.model, self.long_rotary)
        self._check_logits()
        self.terminator_ids = self._find_terminators()

    @classmethod
    def load(
        cls, name: str, dtype: str = "float32", device: torch.device | str = "cpu"
    ) -> "Verifier":
        """Load `embedded/smollm2-135m`, a local folder, or a Hub name; or MODEL+ADAPTER, and with
        the length of its texts, MODEL@TOKENS.

        Args:
            dtype: float32 or bfloat16.
            device: auto: layer by layer on all GPUs of this machine, one GPU at work at a time.

        Raises:
            ValueError: no such model or device, or a model that cannot be drafted for.
        """
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"verifier dtype {dtype!r} is not supported; use float32 or bfloat16")
        spread = device == "auto"
        if not spread:
            check_device(device)
        path = locate(name)
        disable_progress_bar()  # one for a load of seconds, in between our own lines
        quantised = None
        try:
            trust = {"trust_remote_code": trusted(name)}
            config = AutoConfig.from_pretrained(path, **trust)
            quantised = quantisation(config)
            tokenizer = AutoTokenizer.from_pretrained(path, **trust)
            model, loaded = class_for(config).from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, dtype),
                output_loading_info=True,
                device_map="auto" if spread else None,
                **trust,
            )
        except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise not_loaded(name, error, quantised) from error
        length = length_of(name, model.config.get_text_config())
        if loaded["missing_keys"]:  # transformers would go on with random weights
            raise ValueError(
                f"verifier {name!r} lacks {len(loaded['missing_keys'])} of its tensors, "
                f"{min(loaded['missing_keys'])} for one; is it a whole model, not a drafter?"
            )
        _, adapter_name = adapter.split(name)
        if adapter_name is not None:
            model = adapter.merge(model, adapter_name)
        if any(weight.is_meta for weight in model.parameters()):  # put off to main memory or disk
            raise ValueError(f"device 'auto': {name!r} does not fit on the GPUs of this machine")
        return cls(model if spread else model.to(device), tokenizer, name, length)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    # ---- logits ------------------------------------------------------------------------------

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
        if self.device.type == "meta":  # only planned: there is nothing to compute
            return
        ids = torch.tensor([[0, 1]], device=self.device) % self.vocab_size
        with torch.no_grad():
            own = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self.logits(self.states(ids).last_hidden).float()
        if not torch.allclose(own, ours, rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"verifier {self.name!r}: {type(self.model).__name__} computes its logits in a way "
                "headstart does not know; this architecture is not supported"
            )
        try:
            same = self._same_in_two_passes()
        except Exception as error:  # a family's own code fails in as many ways as there are
            what = first_line(error)
            raise ValueError(
                f"verifier {self.name!r}: {type(self.model).__name__} cannot read a text in two "
                f"passes, the second over a cache that is cut back ({what}); this architecture is "
                "not supported"
            ) from error
        if not same:
            raise ValueError(
                f"verifier {self.name!r}: {type(self.model).__name__} sees other tokens before a "
                "token than its config says, or others with a cache than without; this "
                "architecture is not supported"
            )

    @torch.no_grad()
    def _same_in_two_passes(self) -> bool:
        """Whether a text read in two passes, with drafts rejected between them, comes out as the
        model alone reads it at once: for most tokens, since in bfloat16 another order of sums may
        choose other experts. Windows are made so short that the text is longer."""
        ids = torch.arange(min(8, self.context_length), device=self.device)[None] % self.vocab_size
        window, kinds = getattr(self.config, "sliding_window", None), self._attention_kinds
        try:
            if window:
                self.config.sliding_window = 3
                self._attention_kinds = {kind: w and 3 for kind, w in kinds.items()}
            own = self.model(input_ids=ids, use_cache=False).logits[0].float()
            cache = self.new_cache(1)
            parts = [self.states(ids[:, :2], (1,), cache=cache)]
            self.stream_shape = tuple(parts[0].features.shape)
            self.states(ids[:, :2].flip(1), cache=cache)
            cache.keep(cache.positions < 2)
            parts.append(self.states(ids[:, 2:], cache=cache))
        finally:
            if window:
                self.config.sliding_window, self._attention_kinds = window, kinds
        ours = self.logits(torch.cat([part.last_hidden for part in parts], 1))[0].float()
        own, ours = own - own.mean(-1, keepdim=True), ours - ours.mean(-1, keepdim=True)
        errors = (own - ours).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-6)  # [T]
        return bool(errors.median() < 0.05)

    def check_streams(self) -> None:
        """Raise a ValueError where a layer gives more than one vector a token (Gemma 3n four), for
        whoever reads it."""
        if self.stream_shape not in (None, (1, 2, self.hidden_size)):
            raise ValueError(
                f"verifier {self.name!r}: a layer of {type(self.decoder).__name__} gives states of "
                f"shape {list(self.stream_shape)} for 2 tokens, not a vector a token, which this "
                "drafter reads; train eagle1 or medusa, which read those after the last one"
            )

    @property
    def num_embeddings(self) -> int:
        """Rows of the input embedding; the head may have more."""
        return self.model.get_input_embeddings().weight.shape[0]

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
        if self.long_rotary:
            digest.update(b"long rotary factors")
        digest.update(json.dumps(sorted(self.tokenizer.get_vocab().items())).encode())
        for name, weight in sorted(self.model.named_parameters()):
            rows = self._rows(name, weight, slice(None, None, max(1, len(weight) // 4)))
            picked = rows.flatten(1)[:, :64].to(torch.bfloat16).contiguous()
            digest.update(picked.cpu().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _rows(self, name: str, weight: Tensor, which: slice) -> Tensor:
        """Rows of a weight: `[k, …]`."""
        rows = weight.detach()[which]
        return rows if rows.dim() > 1 else rows[:, None]


def quantisation(config: PretrainedConfig) -> str | None:
    """The method that the weights are quantised by, if they are.

    Raises:
        ValueError: transformers does not know it, and would take the weights for missing.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(settings["quant_method"], "value", settings["quant_method"]))
    if not AutoHfQuantizer.supports_quant_method(settings):
        raise ValueError(f"transformers does not know the quantisation {method!r}.")
    return method


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
