"""EAGLE-1: its equations and its loss by hand, noise, serving = training, checkpoints."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from test_eagle3 import ROUNDS, SAMPLED, Serving, batch_of, close, rms, rotated, texts
from tiny import verifier as tiny_verifier
from torch import Tensor
from torch.nn.functional import silu

from headstart.models.drafter import fingerprint
from headstart.models.eagle1 import Eagle1, Eagle1Config
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig
from headstart.models.sampling import RowRandom
from headstart.models.trees import static

VERIFIER = tiny_verifier()


def make(verifier=VERIFIER, **settings) -> Eagle1:
    return Eagle1.create(verifier, Eagle1Config(**settings), LossConfig(num_steps=3))


def loud(**settings) -> Eagle1:
    """Weights large enough that every one of them shows in the output, norms included."""
    drafter = make(**settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.2 / weight.shape[1] ** 0.5)
            else:
                weight.uniform_(0.5, 1.5)
    return drafter.eval()


def by_hand(drafter: Eagle1, ids: list[int], last_hidden: Tensor, steps: int) -> list[list[Tensor]]:
    """Output of every slot and step of one text, one slot at a time, in float64."""
    w = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    embedding = drafter.verifier.model.get_input_embeddings().weight.double()
    size, theta = drafter.config.head_dim, drafter.config.rope_parameters["rope_theta"]
    layer = "layers.0.self_attn."
    outputs, keys, values = [], [], []
    hidden = list(last_hidden.double())
    for s in range(steps):
        step_outputs, step_keys, step_values = [], [], []
        for t in range(len(ids) - 1 - s):
            x = w["fc.weight"] @ torch.cat([embedding[ids[t + 1 + s]], hidden[t]])
            q, k, v = ((w[f"{layer}{n}_proj.weight"] @ x).view(-1, size) for n in "qkv")
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
            x = x + w[layer + "o_proj.weight"] @ torch.cat(heads)
            normed = rms(x, w["layers.0.post_attention_layernorm.weight"])
            gate = silu(w["layers.0.mlp.gate_proj.weight"] @ normed)
            up = w["layers.0.mlp.up_proj.weight"] @ normed
            step_outputs.append(x + w["layers.0.mlp.down_proj.weight"] @ (gate * up))
        outputs.append(step_outputs)
        keys.append(step_keys)
        values.append(step_values)
        hidden = step_outputs
    return outputs


@torch.no_grad()
def test_unroll_equals_the_equations_worked_by_hand():
    drafter = loud()
    batch = batch_of(drafter, texts(1, 9))
    expected = by_hand(drafter, batch["input_ids"][0].tolist(), batch["last_hidden"][0], 4)
    for got, want in zip(drafter.unroll(batch, 4), expected, strict=True):
        for t, hidden in enumerate(want):
            close(got[0, t].double(), hidden)
    hidden = torch.randn(3, 32)
    close(drafter.logits(hidden, 0), hidden @ VERIFIER.head.weight.T)  # no norm before the head


def test_loss_is_the_distance_and_a_tenth_of_the_cross_entropy():
    drafter = loud(noise=0.0)
    batch = batch_of(drafter, texts(2, 8))
    weights = torch.tensor([0.05, 0.03])
    expected = torch.zeros((), dtype=torch.double)
    for row in range(2):
        ids, last_hidden = batch["input_ids"][row].tolist(), batch["last_hidden"][row].double()
        outputs = by_hand(drafter, ids, last_hidden, 2)
        for s in range(2):
            for t in range(len(ids) - 2 - s):  # x_{t+2+s} is in the text
                away = (outputs[s][t] - last_hidden[t + 1 + s]).abs()
                distance = torch.where(away < 1, away**2 / 2, away - 0.5).mean()
                head = VERIFIER.head.weight.double()
                q = (head @ last_hidden[t + 1 + s]).softmax(-1)
                cross_entropy = -(q * (head @ outputs[s][t]).log_softmax(-1)).sum()
                expected += float(weights[s]) * (distance + 0.1 * cross_entropy)
    loss = drafter(batch, weights)
    close(loss.value.double(), expected)
    assert loss.metrics["distance/0"][1] == 2 * 6 and loss.metrics["distance/1"][1] == 2 * 5
    loss.value.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in drafter.parameters())
    assert VERIFIER.head.weight.grad is None


def test_without_a_loss_on_tokens_it_is_the_distance_alone():
    drafter = loud(noise=0.0, token_weight=0.0)
    batch = batch_of(drafter, texts(1, 8))
    (hidden,) = drafter.unroll(batch, 1)
    loss = drafter(batch, torch.tensor([1.0]))
    total = sum(
        torch.nn.functional.smooth_l1_loss(hidden[0, t], batch["last_hidden"][0, t + 1])
        for t in range(6)
    )
    close(loss.value, total)


def test_noise_is_on_the_verifiers_states_in_training_only():
    drafter = loud(noise=0.1)
    hidden = torch.zeros(2, 500, 32)
    assert torch.equal(drafter.first(None, hidden), hidden)
    noise = drafter.train().first(None, hidden)
    assert 0.099 < noise.max() <= 0.1 and -0.1 <= noise.min() < -0.099
    assert abs(noise.std() - 0.1 / 3**0.5) < 0.002
    assert torch.equal(loud(noise=0.0).train().first(None, hidden), hidden)


@torch.no_grad()
def test_serving_equals_training_over_ragged_rounds_and_in_trees():
    serving = Serving(loud(), texts(3, 32))
    tree = static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 0, 0)])
    for seed, lengths in enumerate(ROUNDS):
        serving.advance(lengths)
        serving.check(serving.propose(seed))
        random = RowRandom(seed, [0, 1, 2])
        serving.check_tree(serving.drafter.propose(serving.state, tree, SAMPLED, random))


def test_it_starts_from_the_verifiers_last_layer_if_told():
    drafter = make(init="verifier")
    last = dict(VERIFIER.layers[-1].named_parameters())
    for name, weight in drafter.layer.named_parameters():
        assert torch.equal(weight, last[name]), name
    close(drafter.fc.weight[:, 32:], torch.eye(32), 0.2)
    other = make(init="random")
    assert other.layer.mlp.up_proj.weight.std() < 0.03


def test_a_saved_drafter_comes_back_bit_by_bit_in_the_names_that_engines_load(tmp_path):
    drafter = loud(noise=0.05, token_weight=0.2)
    drafter.save(tmp_path)
    loaded = load_checkpoint(tmp_path, VERIFIER)
    assert fingerprint(loaded) == fingerprint(drafter)
    assert (loaded.noise, loaded.token_weight) == (0.05, 0.2)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (32, 64),
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.post_attention_layernorm.weight": (32,),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 1 and config["vocab_size"] == VERIFIER.vocab_size
    assert config["max_position_embeddings"] == VERIFIER.config.max_position_embeddings


@pytest.mark.parametrize("field, value", [("init", "zero"), ("noise", -1), ("token_weight", -0.1)])
def test_settings_without_meaning_are_refused(field, value):
    with pytest.raises(ValueError, match=f"drafter.{field} must be .* got"):
        Eagle1Config(**{field: value})
