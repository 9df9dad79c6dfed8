"""The verifier's logits and identity, and what is refused, over many families."""

import json
from pathlib import Path

import pytest
import torch
from tiny import COMMON, FAMILIES, tokenizer
from tiny import save as save_verifier
from tiny import verifier as tiny_verifier
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils
from transformers.utils import hub

from headstart.data.rows.rendering import load_tokenizer
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.partial import PartialVerifier
from headstart.models.verifier.verifier import Verifier, end_of_turn_ids

IDS = torch.randint(3, 60, (2, 14), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=FAMILIES)
def verifier(request: pytest.FixtureRequest) -> Verifier:
    return tiny_verifier(request.param)


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=2e-5)


# ---- logits ----------------------------------------------------------------------------------


def test_logits_equal_the_models_own(verifier: Verifier) -> None:
    own = verifier.model(input_ids=IDS, use_cache=False).logits
    close(verifier.logits(verifier.states(IDS).last_hidden), own)
    assert own.shape[-1] == verifier.vocab_size


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_capping_and_scaling_change_the_logits(family: str) -> None:
    verifier = tiny_verifier(family)
    hidden = verifier.states(IDS).last_hidden
    assert not torch.allclose(verifier.logits(hidden), verifier.head(hidden), atol=1e-2)


def test_nothing_of_the_verifier_is_trained(verifier: Verifier) -> None:
    states = verifier.states(IDS, (1,))
    assert not states.last_hidden.requires_grad and not states.features.requires_grad
    assert not any(p.requires_grad for p in verifier.model.parameters())
    assert not verifier.model.training


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


def test_layers_may_be_put_on_whatever_devices_there_are(tmp_path: Path) -> None:
    folder = save_verifier(tiny_verifier(), tmp_path / "model")
    one, spread = Verifier.load(folder), Verifier.load(folder, device="auto")
    assert spread.fingerprint() == one.fingerprint()
    ids = IDS % one.vocab_size
    for own, other in zip(one.states(ids, (1, 3)), spread.states(ids, (1, 3)), strict=True):
        close(own, other.to(own.device))


def test_layers_that_found_no_room_on_the_devices_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_verifier(tiny_verifier(), tmp_path / "model")
    load = AutoModelForCausalLM.from_pretrained

    def without_room(*args, device_map, **kwargs):
        assert device_map == "auto"
        model, loaded = load(*args, **kwargs)
        model.model.layers[1].to("meta")  # as accelerate leaves what it put off
        return model, loaded

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", without_room)
    with pytest.raises(ValueError, match=r"^device 'auto': .* does not fit on the GPUs of this"):
        Verifier.load(folder, device="auto")


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


# ---- code of its own -------------------------------------------------------------------------


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model's folder that brings its code along."""
    for module in (dynamic_module_utils, hub):
        monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = saved(tiny_verifier(), tmp_path / "own")
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "own", "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


READERS = {
    "verifier": Verifier.load,
    "part of it": lambda name: PartialVerifier.read(name, "float32", "cpu"),
    "config": Outline.read,
    "tokenizer": load_tokenizer,
}


@pytest.mark.parametrize("reader", READERS)
def test_code_that_a_model_brings_along_is_run_where_its_name_is_trusted(
    with_code: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for names in ("", "another/model"):
        monkeypatch.setenv("HEADSTART_TRUST_CODE", names)
        with pytest.raises(ValueError, match=r"^verifier .* code of its own.*_TRUST_CODE") as e:
            READERS[reader](with_code)
        one_line(e)
    monkeypatch.setenv("HEADSTART_TRUST_CODE", f"another/model, {with_code}")
    assert READERS[reader](with_code)


# ---- a family that is not as its config says -------------------------------------------------


def test_a_family_that_sees_more_than_its_window_is_refused() -> None:
    """Moshi's config has a window, which its masks leave out."""
    settings = COMMON | {"vocab_size": 64, "sliding_window": 6, "num_hidden_layers": 2}
    config = AutoConfig.for_model("moshi", **(settings | {"ffn_dim": 48}))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.3)
    with pytest.raises(ValueError, match="sees other tokens before a token than its config") as e:
        Verifier(model, tokenizer(64), "tiny/moshi")
    one_line(e)


def test_window_and_config_are_as_they_were_after_the_check() -> None:
    verifier = tiny_verifier("mistral")
    assert verifier.config.sliding_window == 6
    assert verifier._attention_kinds == {"sliding_attention": 6}
