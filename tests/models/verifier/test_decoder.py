"""A decoder's states and caches, over many families, against transformers itself."""

import pytest
import torch
from tiny import COMMON, FAMILIES, tokenizer
from tiny import verifier as tiny_verifier
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.models.verifier.decoder import Decoder
from headstart.models.verifier.verifier import Verifier

IDS = torch.randint(3, 60, (2, 14), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=FAMILIES)
def verifier(request: pytest.FixtureRequest) -> Verifier:
    return tiny_verifier(request.param)


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=2e-5)


def last_hidden(verifier: Verifier, row: list[int]) -> Tensor:
    """The reference: one text, alone, no cache. [T, H]"""
    output = verifier.decoder(input_ids=torch.tensor([row]), use_cache=False)
    return output.last_hidden_state[0].detach()


# ---- states ----------------------------------------------------------------------------------


def test_features_equal_an_independent_recording(verifier: Verifier) -> None:
    n = verifier.num_layers
    calls = []
    hook = verifier.layers[-1].register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    own = verifier.model(input_ids=IDS, use_cache=False, output_hidden_states=True)
    hook.remove()
    args, kwargs = calls[0]
    with torch.no_grad():  # hidden_states[n] is after the final norm: run the last layer by hand
        last = verifier.layers[-1](*args, **kwargs)
    expected = [*own.hidden_states[:n], last[0] if isinstance(last, tuple) else last]
    states = verifier.states(IDS, tuple(range(n + 1)))
    for feature, hidden in zip(states.features.chunk(n + 1, dim=-1), expected, strict=True):
        close(feature, hidden.detach())
    close(states.last_hidden, own.hidden_states[n])
    assert not torch.allclose(expected[n], own.hidden_states[n], atol=1e-3)


def test_features_lie_side_by_side_in_the_order_asked_for(verifier: Verifier) -> None:
    features = verifier.states(IDS, (5, 2)).features
    close(features[..., : verifier.hidden_size], verifier.states(IDS, (5,)).features)
    close(features[..., verifier.hidden_size :], verifier.states(IDS, (2,)).features)


def test_layer_zero_is_the_embedding(verifier: Verifier) -> None:
    feature = verifier.states(IDS, (0,)).features
    ratio = feature / verifier.embed(IDS)  # Gemma and Granite scale embeddings on the way in
    close(ratio, ratio[0, 0, 0].expand_as(ratio))


def test_a_decoder_reads_embeddings_in_place_of_tokens(verifier: Verifier) -> None:
    decoder = Decoder(verifier.decoder, verifier.config, verifier.name)
    got, expected = decoder.states(verifier.embed(IDS), (3,)), verifier.states(IDS, (3,))
    close(got.features, expected.features)
    close(got.last_hidden, expected.last_hidden)


@pytest.mark.parametrize("layer", [-1, 9])
def test_layer_out_of_range_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=rf"layer {layer} is out of range.*0 … 8"):
        tiny_verifier().states(IDS, (1, layer))


# ---- packing ---------------------------------------------------------------------------------


def test_packed_documents_equal_separate_ones(verifier: Verifier) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [[9, 8, 5], [3, 12, 1]]
    rows, positions, documents, alone = [], [], [], []
    for row in lengths:
        texts = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in row]
        padding = 24 - sum(row)
        rows.append([token for text in texts for token in text] + [0] * padding)
        positions.append([p for n in row for p in range(n)] + [0] * padding)
        documents.append([d for d, n in enumerate(row) for _ in range(n)] + [-1] * padding)
        alone.append(torch.cat([last_hidden(verifier, text) for text in texts]))
    packed = verifier.states(
        torch.tensor(rows), (), torch.tensor(positions), torch.tensor(documents)
    ).last_hidden
    assert packed.isfinite().all()
    for got, expected in zip(packed, alone, strict=True):
        close(got[: len(expected)], expected)


# ---- caches ----------------------------------------------------------------------------------


def test_cached_equals_uncached_with_ragged_rows_and_holes(verifier: Verifier) -> None:
    """Random rounds: every row takes in a few tokens, and then loses some from its end."""
    generator = torch.Generator().manual_seed(2)

    def integers(high: int) -> list[int]:
        return torch.randint(high, (3,), generator=generator).tolist()

    cache = verifier.new_cache(3)
    texts: list[list[int]] = [[], [], []]
    for _ in range(8):
        width = 1 + max(integers(5))
        counts = [1 + c % width for c in integers(5)]
        tokens = torch.randint(3, 60, (3, width), generator=generator)
        positions = torch.full((3, width), -1)
        for row, count in enumerate(counts):
            positions[row, :count] = torch.arange(count) + len(texts[row])
            texts[row] += tokens[row, :count].tolist()
        states = verifier.states(tokens, (2,), positions, cache=cache)
        for row, count in enumerate(counts):
            expected = last_hidden(verifier, texts[row])[-count:]
            close(states.last_hidden[row, :count], expected)
        dropped = integers(3)
        texts = [t[: max(1, len(t) - d)] for t, d in zip(texts, dropped, strict=True)]
        lengths = torch.tensor([len(t) for t in texts])
        cache.keep((cache.positions >= 0) & (cache.positions < lengths[:, None]))


def test_cached_equals_uncached_after_rows_leave(verifier: Verifier) -> None:
    cache = verifier.new_cache(2)
    positions = torch.stack([torch.arange(14), torch.arange(14).where(torch.arange(14) < 9, -1)])
    verifier.states(IDS, (), positions, cache=cache)
    cache.select_rows(torch.tensor([1]))
    assert cache.positions.tolist() == [list(range(9))]
    states = verifier.states(IDS[1:, 9:11], cache=cache)
    close(states.last_hidden[0], last_hidden(verifier, IDS[1, :11].tolist())[9:])


def test_positions_go_on_after_holes() -> None:
    verifier = tiny_verifier()
    cache = verifier.new_cache(2)
    positions = torch.stack([torch.arange(14), torch.arange(14).where(torch.arange(14) < 9, -1)])
    verifier.states(IDS, (), positions, cache=cache)
    verifier.states(IDS[:, :2], cache=cache)
    assert cache.positions[:, -2:].tolist() == [[14, 15], [9, 10]]


def test_a_masked_tree_equals_its_paths(verifier: Verifier) -> None:
    """Two branches after a common text, in one pass: each sees its own ancestors only."""
    cache = verifier.new_cache(1)
    prefix = IDS[:1, :7]
    verifier.states(prefix, cache=cache)
    branches = torch.tensor([[11, 12, 21, 22]])  # 11 → 12 and 21 → 22
    sees = torch.zeros(1, 4, 11, dtype=torch.bool)
    sees[..., :7] = True
    for node, ancestor in [(0, 0), (1, 0), (1, 1), (2, 2), (3, 2), (3, 3)]:
        sees[0, node, 7 + ancestor] = True
    states = verifier.states(branches, (), torch.tensor([[7, 8, 7, 8]]), cache=cache, mask=sees)
    for begin, path in ((0, [11, 12]), (2, [21, 22])):
        expected = last_hidden(verifier, prefix[0].tolist() + path)[7:]
        close(states.last_hidden[0, begin : begin + 2], expected)


@pytest.mark.parametrize("family", ["phi3", "starcoder2", "qwen2"])
def test_a_sliding_window_in_the_config_alone_is_respected(family: str) -> None:
    """Families without layer_types, and one where only some layers slide."""
    extra = {"use_sliding_window": True, "max_window_layers": 4} if family == "qwen2" else {}
    settings = COMMON | {"vocab_size": 64, "sliding_window": 4, "pad_token_id": 0} | extra
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    verifier = Verifier(model, tokenizer(64), family)
    documents = torch.tensor([[0] * 5 + [1] * 9])
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None]
    packed = verifier.states(IDS[:1], (), positions, documents).last_hidden[0]
    close(packed[5:], last_hidden(verifier, IDS[0, 5:].tolist()))
    cache = verifier.new_cache(1)
    verifier.states(IDS[:1, :9], cache=cache)
    cached = verifier.states(IDS[:1, 9:], cache=cache).last_hidden[0]
    close(cached, last_hidden(verifier, IDS[0].tolist())[9:])
