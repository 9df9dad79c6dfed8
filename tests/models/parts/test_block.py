"""A decoder layer of the verifier's class: it is the last layer, and runs again over its slots."""

import pytest
import torch
from served import close, texts
from tiny import FAMILIES
from tiny import verifier as tiny_verifier
from torch import Tensor

from headstart.models.parts.block import Block, Runs

SCALED = ("gemma2", "granite")  # multiply whatever they read in the place of embeddings


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SCALED])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@torch.no_grad()
def test_a_new_block_is_the_verifiers_last_layer_and_norm(family, packed):
    verifier = tiny_verifier(family)
    ids, n = texts(2, 14), verifier.num_layers
    positions, documents = None, None
    if packed:
        documents = torch.tensor([[0] * 5 + [1] * 9]).expand_as(ids)
        positions = torch.cat([torch.arange(5), torch.arange(9)]).expand_as(ids)
    expected = verifier.states(ids, (n - 1, n), positions, documents)
    before, after = expected.features.chunk(2, -1)
    block = Block(verifier)
    got = block.states(before, (1,), positions, documents)
    close(got.features, after)
    close(got.last_hidden, expected.last_hidden)
    if positions is None:
        positions = torch.arange(14).expand_as(ids)
    first = block.again(before, positions, documents, Runs())
    close(first.features, after)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_runs_by_a_fused_kernel_equal_runs_with_a_mask_over_all_keys(family, packed):
    """Three runs, each on the output of the one before; gradients through all of them."""
    block = Block(tiny_verifier(family))
    inputs = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0))
    positions, documents = torch.arange(10).expand(2, -1), None
    if packed:
        documents = torch.tensor([[0] * 4 + [1] * 6]).expand(2, -1)
    assert block.fused

    def run(fused: bool) -> list[Tensor]:
        block.fused = fused
        block.decoder.zero_grad()
        runs, outputs, given = Runs(), [], inputs.clone().requires_grad_()
        hidden = given
        for number in range(3):
            hidden = block.again(hidden, positions + number, documents, runs).last_hidden
            outputs.append(hidden)
        sum(o.square().sum() for o in outputs).backward()
        learned = [*block.layer.parameters(), *block.norm.parameters()]
        return [*outputs, given.grad, *(weight.grad for weight in learned)]

    for fused, dense in zip(run(True), run(False), strict=True):
        assert fused.abs().sum() > 0
        close(fused, dense)


def test_it_is_of_the_last_layers_kind():
    """A mixture of experts after dense layers, as its number in the verifier says."""
    verifier = tiny_verifier("qwen3_moe", mlp_only_layers=[0, 1])
    layer = Block(verifier).layer
    assert type(layer.mlp) is type(verifier.layers[-1].mlp)
    assert type(layer.mlp) is not type(verifier.layers[0].mlp)
