"""One more decoder layer of the verifier's own class, with a final norm: any family, MoE too.

It reads hidden states where the verifier would read embeddings. Run several times over the same
slots, each time on its own output of the time before (training-time test, as EAGLE-3 does), the
query of slot t sees the first run's keys of slots ≤ t, and its own slot's keys of the runs since.

Legend: B rows, T slots, h heads, D head size, H hidden size, r runs before this one.
"""

import copy
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import sdpa_mask

from headstart.models.parts.attention import ttt_attention
from headstart.models.verifier import rotary
from headstart.models.verifier.cache import visible
from headstart.models.verifier.decoder import Decoder, States
from headstart.models.verifier.outline import first_line
from headstart.models.verifier.verifier import Verifier

_FUSED = "headstart_runs"  # our attention, among those that transformers knows


class Runs:
    """Keys and values of a block's runs over the same slots.

    A layer may attend more than once a run (DiffLlama does twice): each time has its own.
    """

    def __init__(self) -> None:
        self.count = 0
        self.calls = 0  # of attention, in the current run
        self.keys: list[list[Tensor]] = []  # of each call, [B, h, T, D] of each run
        self.values: list[list[Tensor]] = []
        self.cache = DynamicCache()  # in their place, where a family has attention of its own


_RUNS: ContextVar[Runs] = ContextVar("headstart_runs")


class Block(Decoder):
    """A copy, in float32, of the verifier's last layer and final norm."""

    def __init__(self, verifier: Verifier):
        config = copy.deepcopy(verifier.last_layer_config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[-1:]
        config.vocab_size, config.pad_token_id = 1, 0  # of an embedding that nothing reads
        decoder = type(verifier.decoder)(config).eval()
        rotary.fix(decoder, verifier.long_rotary)
        name = norm_name(verifier.decoder, verifier.hidden_size)
        self.fresh_norm: nn.Module = getattr(decoder, name)
        self.norm = copy.deepcopy(getattr(verifier.decoder, name)).float()
        layer = copy.deepcopy(verifier.layers[-1]).float()  # what kind it is may hang on its number
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0
            if hasattr(module, "config"):
                module.config = config
        setattr(decoder, name, self.norm)
        super().__init__(decoder, config, f"a layer of {verifier.name}")
        self.layers[0] = layer
        decoder.to(verifier.device).requires_grad_(True)
        self.fused = False
        own = self._runs_twice()
        plain = self._attention_kinds == {"full_attention": None}
        same_sizes = not hasattr(config, "v_head_dim")  # of keys and values
        if config._attn_implementation == "sdpa" and plain and same_sizes and own is not None:
            # some layers call no attention that transformers knows (Falcon), or ask for more
            self.fused = True
            apart = (self._runs_twice() - own).abs().max()
            self.fused = bool(apart < 0.01 * own.abs().max())

    @property
    def layer(self) -> nn.Module:
        return self.layers[0]

    @torch.no_grad()
    def _runs_twice(self) -> Tensor | None:
        """Output of two runs over three slots, [B, T, H]: 1, 3; None where nothing can be computed.

        Raises:
            ValueError: the layer needs more than hidden states (Gemma 4: embeddings of its own).
        """
        if self.device.type == "meta":  # only planned
            return None
        positions = torch.arange(3, device=self.device)[None]
        inputs = torch.arange(3 * self.hidden_size, device=self.device).sin().view(1, 3, -1)
        runs = Runs()
        try:
            first = self.again(inputs, positions, None, runs)
            return self.again(first.last_hidden, positions + 1, None, runs).last_hidden
        except Exception as error:  # a family's own code fails in as many ways as there are
            raise ValueError(
                f"{self.name} cannot be run on its own, as an MTP module is: {first_line(error)}; "
                "train another drafter, such as medusa"
            ) from error

    def again(
        self, inputs: Tensor, positions: Tensor, document_ids: Tensor | None, runs: Runs
    ) -> States:
        """One more run over the same slots: `inputs [B, T, H]` at `positions [B, T]`.

        Returns:
            residual stream after the layer, and its norm.
        """
        number, runs.count, runs.calls = runs.count, runs.count + 1, 0
        if not self.fused:
            masks = self._masks(inputs, document_ids, number)
            return self._run(inputs, (1,), positions, masks, runs.cache)
        implementation, token = self.config._attn_implementation, _RUNS.set(runs)
        self.config._attn_implementation = _FUSED
        try:
            return self._run(inputs, (1,), positions, self._packed(document_ids), None)
        finally:
            self.config._attn_implementation = implementation
            _RUNS.reset(token)

    def _masks(self, inputs: Tensor, document_ids: Tensor | None, number: int) -> dict[str, Tensor]:
        """Which keys of all runs, `[B, T, T * (r + 1)]`, each slot sees in run r = `number`."""
        rows, width = inputs.shape[:2]
        slots = torch.arange(width, device=inputs.device).expand(rows, -1)
        same = visible(slots, slots)
        if document_ids is not None:
            same &= document_ids[:, :, None] == document_ids[:, None, :]
        own = slots[:, :, None] == slots[:, None, :]
        masks = {}
        for kind, window in self._attention_kinds.items():
            parts = [same & visible(slots + number, slots, window)]
            for run in range(1, number + 1):
                parts.append(own & visible(slots + number, slots + run, window))
            masks[kind] = torch.cat(parts, -1)
        return masks


def norm_name(decoder: nn.Module, width: int) -> str:
    """The decoder's name for its final norm, which may have no weight (nanochat, OLMo).

    Raises:
        ValueError: it has none.
    """
    for name, module in decoder.named_children():
        weight = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ if weight is None else weight.shape == (width,):
            return name
    raise ValueError(
        f"{type(decoder).__name__} ends without a norm, which an MTP module needs; train another "
        "drafter, such as medusa"
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of the current run, in the shape that transformers' layers call."""
    runs, width = _RUNS.get(), query.shape[-1]
    query, key = query.to(value.dtype), key.to(value.dtype)  # a norm may have made them float32
    if runs.calls == len(runs.keys):
        runs.keys.append([])
        runs.values.append([])
    keys, values = runs.keys[runs.calls], runs.values[runs.calls]
    runs.calls += 1
    keys.append(key)
    values.append(value)
    if scaling is not None and scaling != width**-0.5:
        query = query * (scaling * width**0.5)
    if attention_mask is not None:  # CUDA's kernel wants rows that begin at 16-byte borders
        length = attention_mask.shape[-1]
        attention_mask = pad(attention_mask.to(query.dtype), (0, -length % 16))[..., :length]
    attended = ttt_attention(query, keys, values, attention_mask)  # [B, h, T, D]
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(_FUSED, _attention)
AttentionMaskInterface.register(_FUSED, sdpa_mask)
