"""The verifier's states, logits and caches, over many families, against transformers itself."""

import json
from pathlib import Path

import pytest
import torch
from tiny import COMMON, FAMILIES, tokenizer
from tiny import save as save_verifier
from tiny import verifier as tiny_verifier
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.models.verifier import Verifier, end_of_turn_ids

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


# ---- states and logits -----------------------------------------------------------------------


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


def test_logits_equal_the_models_own(verifier: Verifier) -> None:
    own = verifier.model(input_ids=IDS, use_cache=False).logits
    close(verifier.logits(verifier.states(IDS).last_hidden), own)
    assert own.shape[-1] == verifier.vocab_size


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_capping_and_scaling_change_the_logits(family: str) -> None:
    verifier = tiny_verifier(family)
    hidden = verifier.states(IDS).last_hidden
    assert not torch.allclose(verifier.logits(hidden), verifier.head(hidden), atol=1e-2)


def test_layer_zero_is_the_embedding(verifier: Verifier) -> None:
    feature = verifier.states(IDS, (0,)).features
    ratio = feature / verifier.embed(IDS)  # Gemma and Granite scale embeddings on the way in
    close(ratio, ratio[0, 0, 0].expand_as(ratio))


@pytest.mark.parametrize("layer", [-1, 9])
def test_layer_out_of_range_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=rf"layer {layer} is out of range.*0 … 8"):
        tiny_verifier().states(IDS, (1, layer))


def test_nothing_of_the_verifier_is_trained(verifier: Verifier) -> None:
    states = verifier.states(IDS, (1,))
    assert not states.last_hidden.requires_grad and not states.features.requires_grad
    assert not any(p.requires_grad for p in verifier.model.parameters())
    assert not verifier.model.training


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


# ---- identity --------------------------------------------------------------------------------


def saved(verifier: Verifier, folder: Path) -> Path:
    save_verifier(verifier, folder)
    return folder


def test_fingerprint_is_the_same_in_both_precisions(verifier: Verifier, tmp_path: Path) -> None:
    folder = str(saved(verifier, tmp_path / "model"))
    whole, half = (Verifier.load(folder, dtype) for dtype in ("float32", "bfloat16"))
    assert half.dtype == torch.bfloat16
    assert whole.fingerprint() == half.fingerprint()
    assert len(whole.fingerprint()) == 16


def test_fingerprint_survives_saving(tmp_path: Path) -> None:
    verifier = tiny_verifier()
    loaded = Verifier.load(str(saved(verifier, tmp_path)))
    assert loaded.fingerprint() == verifier.fingerprint()


def test_fingerprint_differs_for_other_weights_vocabulary_or_positions() -> None:
    prints = [
        tiny_verifier().fingerprint(),
        tiny_verifier(seed=1).fingerprint(),
        tiny_verifier(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).fingerprint(),
        Verifier(tiny_verifier().model, tokenizer(60), "other").fingerprint(),
    ]
    assert len(set(prints)) == len(prints)
    assert tiny_verifier().fingerprint() == prints[0]


def test_terminators_are_all_that_end_an_answer() -> None:
    verifier = tiny_verifier()
    assert verifier.terminator_ids == (2,)
    verifier.model.generation_config.eos_token_id = [9, 5]
    assert Verifier(verifier.model, verifier.tokenizer, "x").terminator_ids == (2, 5, 9)


def test_end_of_turn_of_the_template_is_a_terminator() -> None:
    """Here the model's and the tokenizer's eos is <unk>, and turns end with <|im_end|>."""
    model = tiny_verifier(eos_token_id=0).model
    model.generation_config.eos_token_id = 0
    words = tokenizer()
    words.eos_token = "<unk>"
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    assert end_of_turn_ids(words) == {2}
    assert Verifier(model, words, "x").terminator_ids == (0, 2)


def test_an_ordinary_word_after_the_answer_is_no_terminator() -> None:
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} w1 {% endfor %}"
    assert end_of_turn_ids(words) == set()


# ---- what is refused -------------------------------------------------------------------------


def one_line(caught: pytest.ExceptionInfo) -> str:
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize(
    "family, extra",
    [
        ("mamba", {}),
        ("jamba", {}),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 4}),
        ("bloom", {"n_layer": 8, "n_head": 4}),
    ],
)
def test_a_cache_that_cannot_be_cut_back_is_refused_by_name(family: str, extra: dict) -> None:
    settings = COMMON | {"vocab_size": 64, "pad_token_id": 0} | extra
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    with pytest.raises(ValueError, match=f"tiny/{family}.*cut back") as caught:
        Verifier(model, tokenizer(64), f"tiny/{family}")
    one_line(caught)


@pytest.mark.parametrize("name", ["nobody/nothing", "./no-such-folder", "embedded/other"])
def test_missing_verifier_is_a_one_line_error(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        Verifier.load(name)
    assert name in one_line(caught)
    assert "embedded/smollm2-135m" in one_line(caught)


@pytest.mark.parametrize(
    "name", ["/nope/model", "./nope", "../nope", "~/nope", "outputs/nope/best"]
)
def test_a_path_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ValueError, match=f"^verifier '{name}': no such folder") as caught:
        Verifier.load(name)
    one_line(caught)


def test_a_file_is_no_verifier(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="a file, not a folder"):
        Verifier.load(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_named_before_anything_is_loaded(device: str) -> None:
    with pytest.raises(ValueError, match=f"^device '{device}' cannot be used: ") as caught:
        Verifier.load("nobody/nothing", device=device)
    one_line(caught)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_gpu_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^device 'cuda' cannot be used: .*; pass cpu") as caught:
        Verifier.load("embedded/smollm2-135m", device=torch.device("cuda"))
    one_line(caught)


def test_folder_without_all_tensors_is_refused(tmp_path: Path) -> None:
    """transformers would fill in random ones; a drafter's folder looks just like this."""
    folder = saved(tiny_verifier(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    with pytest.raises(ValueError, match="lacks 9 of its tensors"):
        Verifier.load(str(folder))


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    folder = saved(tiny_verifier(), tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        Verifier.load(str(folder))
    one_line(caught)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="'float16' is not supported; use float32 or bfloat16"):
        Verifier.load("embedded/smollm2-135m", "float16")


def test_unknown_way_to_logits_is_refused() -> None:
    model = tiny_verifier().model
    head = model.lm_head.forward
    calls = []

    def odd(hidden: Tensor) -> Tensor:  # the model's own first call differs from ours after it
        calls.append(1)
        return head(hidden) * (1 if len(calls) > 1 else 2)

    model.lm_head.forward = odd
    with pytest.raises(ValueError, match="computes its logits in a way"):
        Verifier(model, tokenizer(64), "odd")
