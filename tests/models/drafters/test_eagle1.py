"""EAGLE-1: its equations and its loss by hand, noise, serving = training, checkpoints."""

import json

import pytest
import torch
from by_hand import ROUNDS, batch_of, by_hand, double, made_loud
from safetensors.torch import load_file
from served import Serving, close, texts
from tiny import verifier as tiny_verifier
from torch import Tensor

from headstart.models.drafter import fingerprint
from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig
from headstart.models.proposal.trees import static

VERIFIER = tiny_verifier()


def make(verifier=VERIFIER, **settings) -> Eagle1:
    return Eagle1.create(verifier, Eagle1Config(**settings), LossConfig(num_steps=3))


def loud(**settings) -> Eagle1:
    return made_loud(make(**settings)).eval()


def eagle1_by_hand(
    drafter: Eagle1, ids: list[int], last_hidden: Tensor, steps: int
) -> list[list[Tensor]]:
    w = double(drafter)

    def enter(t: int, s: int, f: Tensor) -> tuple[Tensor, Tensor]:
        x = w["fc.weight"] @ torch.cat([w["embedding"][ids[t + 1 + s]], f])
        return x, x

    return by_hand(drafter, "layers.0", list(last_hidden.double()), steps, enter)


@torch.no_grad()
def test_unroll_equals_the_equations_worked_by_hand():
    drafter = loud()
    batch = batch_of(drafter, texts(1, 9))
    expected = eagle1_by_hand(drafter, batch["input_ids"][0].tolist(), batch["last_hidden"][0], 4)
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
        outputs = eagle1_by_hand(drafter, ids, last_hidden, 2)
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
        serving.check(serving.propose(seed, tree))


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
