"""EAGLE-3's layer in plain loops, and loud tiny drafters."""

import math
from collections.abc import Callable

import served
import torch
from served import COUNTS
from tiny import verifier as tiny_verifier
from torch import Tensor

from headstart.models.batch import Batch
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.losses import LossConfig
from headstart.models.parts.feature_drafter import FeatureDrafter

VERIFIER = tiny_verifier()


def make(verifier=VERIFIER, **settings) -> Eagle3:
    return Eagle3.create(verifier, Eagle3Config(**settings), LossConfig(num_steps=3), COUNTS)


def loud(**settings) -> Eagle3:
    return made_loud(make(**settings))


def made_loud(drafter: FeatureDrafter) -> FeatureDrafter:
    """Weights large enough that every one of them shows in the output, norms included."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.2 / weight.shape[1] ** 0.5)
            else:
                weight.uniform_(0.5, 1.5)
    return drafter


def batch_of(drafter: FeatureDrafter, ids: Tensor) -> Batch:
    return served.batch_of(drafter.verifier, ids, drafter.feature_layers)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-6).sqrt() * weight


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """Heads [h, D]; the first half of D pairs with the second."""
    half = x.shape[-1] // 2
    angle = position / theta ** (torch.arange(half, dtype=torch.double) / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def double(drafter: FeatureDrafter) -> dict[str, Tensor]:
    """Its weights, and the embedding as "embedding"."""
    shared = drafter.verifier.model.get_input_embeddings()
    embedding = (drafter.embed_tokens or shared).weight
    tensors = {**drafter.state_dict(), "embedding": embedding}
    return {name: tensor.double() for name, tensor in tensors.items()}


def by_hand(
    drafter: FeatureDrafter,
    layer: str,
    hidden: list[Tensor],
    steps: int,
    enter: Callable[[int, int, Tensor], tuple[Tensor, Tensor]],
    fed_back: Callable[[Tensor], Tensor] = lambda output: output,
) -> list[list[Tensor]]:
    """The layer's output at every slot and step of one text, one slot at a time, in float64.

    Args:
        layer: prefix of its weights' names.
        hidden: of step 0, one a slot.
        enter: slot t, step s, hidden state -> residual, attention's input.
    """
    w, config = double(drafter), drafter.config
    size, theta = config.head_dim, config.rope_parameters["rope_theta"]
    outputs, keys, values = [], [], []
    for s in range(steps):
        step_outputs, step_keys, step_values = [], [], []
        for t in range(len(hidden) - 1):  # the slots before had one more
            x, inputs = enter(t, s, hidden[t])
            q, k, v = (
                (w[f"{layer}.self_attn.{n}_proj.weight"] @ inputs).view(-1, size) for n in "qkv"
            )
            q, k = rotated(q, t + s, theta), rotated(k, t + s, theta)
            step_keys.append(k)
            step_values.append(v)
            seen_k = [(keys[0] if s else step_keys)[j] for j in range(t + 1)]
            seen_v = [(values[0] if s else step_values)[j] for j in range(t + 1)]
            seen_k += [keys[i][t] for i in range(1, s)] + ([k] if s else [])
            seen_v += [values[i][t] for i in range(1, s)] + ([v] if s else [])
            heads = []
            for head in range(len(q)):
                group = head // (len(q) // len(k))
                scores = torch.stack([q[head] @ key[group] for key in seen_k]) / math.sqrt(size)
                mix = scores.softmax(0)
                heads.append(sum(m * value[group] for m, value in zip(mix, seen_v, strict=True)))
            x = x + w[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(heads)
            normed = rms(x, w[f"{layer}.post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(w[f"{layer}.mlp.gate_proj.weight"] @ normed)
            up = w[f"{layer}.mlp.up_proj.weight"] @ normed
            step_outputs.append(x + w[f"{layer}.mlp.down_proj.weight"] @ (gate * up))
        outputs.append(step_outputs)
        keys.append(step_keys)
        values.append(step_values)
        hidden = [fed_back(output) for output in step_outputs]
    return outputs


def eagle3_by_hand(drafter: Eagle3, ids: list[int], features: Tensor) -> list[list[Tensor]]:
    """o of four steps."""
    w, config = double(drafter), drafter.config
    hidden = []
    for feature in features.double():
        parts = feature.split(config.hidden_size)
        if config.fc_norm:
            parts = [rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        hidden.append(w["fc.weight"] @ torch.cat(list(parts)))

    def enter(t: int, s: int, f: Tensor) -> tuple[Tensor, Tensor]:
        embedded = rms(w["embedding"][ids[t + 1 + s]], w["midlayer.input_layernorm.weight"])
        normed = rms(f, w["midlayer.hidden_norm.weight"])
        return normed if config.norm_before_residual else f, torch.cat([embedded, normed])

    def fed_back(output: Tensor) -> Tensor:
        return rms(output, w["norm.weight"]) if config.norm_output else output

    return by_hand(drafter, "midlayer", hidden, 4, enter, fed_back)


ROUNDS = [[4, 7, 1], [1, 1, 1], [6, 1, 3], [2, 5, 1], [1, 6, 4], [3, 1, 1], [1, 1, 1]]
