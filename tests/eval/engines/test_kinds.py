"""A drafter's kind is told from the config that its name resolves to, or not at all."""

import json

import hub_cache
import pytest
import tiny
import torch

from headstart.eval.engines.commands import lines, speculative_config
from headstart.eval.engines.kinds import find, verifier_of
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.losses import LossConfig

VERIFIER = tiny.verifier()
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4,
         "vocab_size": 64, "hidden_size": 32}  # fmt: skip
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
DEEPSEEK = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
            "num_hidden_layers": 4, "num_nextn_predict_layers": 1}  # fmt: skip
CONFIGS = {
    "their/llama": LLAMA,
    "their/eagle3": EAGLE3,
    "their/speculator": {"speculators_model_type": "eagle3", "transformer_layer_config": LLAMA},
    "their/medusa": {"medusa_num_heads": 3, "medusa_num_layers": 1},
    "their/deepseek": DEEPSEEK,
    # these may be one thing or another
    "their/one-layer": LLAMA | {"num_hidden_layers": 1},
    "their/marked": LLAMA | {"draft_vocab_size": 16},
    "their/dflash": LLAMA | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"},
    "their/qwen": LLAMA | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
    "their/own-code": LLAMA | {"architectures": ["OursForCausalLM"]},
}
UNTOLD = ["their/one-layer", "their/marked", "their/dflash", "their/qwen", "their/own-code"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    Eagle3.create(VERIFIER, Eagle3Config(), LossConfig(), torch.ones(64)).save(tmp_path / "ours")
    ours = json.loads((tmp_path / "ours" / "config.json").read_text())
    hub_cache.fill(tmp_path / "hub", CONFIGS | {"their/checkpoint": ours})
    hub_cache.use(tmp_path / "hub", monkeypatch)


@pytest.mark.parametrize(
    "name, method",
    [
        ("their/llama", "draft_model"),
        ("their/eagle3", "eagle3"),
        ("their/speculator", "eagle3"),
        ("their/medusa", "medusa"),
        ("their/checkpoint", "eagle3"),
    ],
)
def test_a_hub_name_has_the_method_of_its_config(hub, name, method):
    wanted = {"method": method, "model": name, "num_speculative_tokens": 2}
    assert speculative_config(name, 2) == wanted


def test_a_hub_name_of_a_model_with_mtp_drafts_for_itself(hub):
    wanted = {"method": "mtp", "num_speculative_tokens": 2}
    assert speculative_config("their/deepseek", 2) == wanted
    assert verifier_of(None, "their/deepseek") == "their/deepseek"


def test_a_checkpoint_on_the_hub_names_its_verifier(hub):
    assert verifier_of(None, "their/checkpoint") == "tiny/llama"


@pytest.mark.parametrize("name", [*UNTOLD, "nobody/knows"])
def test_what_a_config_does_not_tell_is_asked_for(hub, name):
    with pytest.raises(
        ValueError, match=r"its kind cannot be told .*; pass --method, one of"
    ) as error:
        speculative_config(name, 2)
    assert "\n" not in str(error.value)
    for method, said in (("eagle", "eagle"), ("draft_model", "draft_model")):
        assert speculative_config(name, 2, method)["method"] == said


def test_a_method_that_the_config_contradicts_is_refused(hub):
    with pytest.raises(ValueError, match=r"method is .eagle., but .*eagle3. is of kind eagle3"):
        find("their/eagle3", "eagle")
    assert find("their/eagle3", "eagle3").kind == "eagle3"


def test_a_folder_of_an_unknown_kind_is_no_draft_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["their/dflash"]))
    with pytest.raises(ValueError, match="pass --method"):
        find(str(tmp_path))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_model_of_another_vocabulary_is_refused_before_anything_is_loaded(engine, tmp_path):
    small = tiny.save(VERIFIER, tmp_path / "small")
    padded = tiny.save(tiny.verifier(vocab_size=80), tmp_path / "padded")
    with pytest.raises(ValueError, match=r"64 tokens, the verifier .* 80, and .* the same number"):
        lines(engine, small, padded, 2, [])
    assert lines(engine, small, small, 2, [])
    assert lines("llama.cpp", small, padded, 2, [])  # which compares the tokens themselves


def test_a_drafter_of_a_verifier_of_another_shape_is_refused(tmp_path):
    Eagle3.create(VERIFIER, Eagle3Config(), LossConfig(), torch.ones(64)).save(tmp_path / "drafter")
    for field, said in (({"vocab_size": 80}, "other tokens"), ({"hidden_size": 64}, "hidden size")):
        other = tiny.save(tiny.verifier(**field), tmp_path / next(iter(field)))
        with pytest.raises(ValueError, match=said):
            lines("vllm", str(tmp_path / "drafter"), other, 2, [])
