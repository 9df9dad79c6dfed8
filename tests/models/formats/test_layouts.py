"""The tables of tensors that engines load: what headstart saves is what they say, for all kinds."""

import json

import pytest
import tiny
import torch
from layout_drafters import COUNTS, DRAFTERS, LOSS, SCALED
from safetensors.torch import load_file

from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.hydra_heads import HydraHeads
from headstart.models.drafters.medusa import MedusaConfig
from headstart.models.formats import layouts
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig

VERIFIER = tiny.verifier()
# head_dim * heads is not the width, and more heads than keys
WIDE = tiny.verifier(head_dim=16, num_attention_heads=8, num_key_value_heads=4)


@pytest.mark.parametrize("verifier", [VERIFIER, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_saved_drafter_is_its_table(name, verifier, tmp_path):
    DRAFTERS[name](verifier).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kind = config["headstart"]["type"]
    found = {n: tuple(t.shape) for n, t in load_file(tmp_path / "model.safetensors").items()}
    required = layouts.required(kind, config)
    assert required.items() <= found.items()
    assert found.items() <= (required | layouts.optional(kind, config)).items()


@pytest.mark.parametrize("scaling", SCALED)
@pytest.mark.parametrize("name", ["eagle3", "eagle1", "draft_lm"])
def test_scaled_positions_of_the_verifier_are_written_and_followed(name, scaling, tmp_path):
    rope = SCALED[scaling]
    verifier = tiny.verifier(rope_parameters=rope, max_position_embeddings=4096)
    make = DRAFTERS.get(name) or (
        lambda v: DraftLM.create(v, DraftLMConfig("layers:0,7"), LossConfig(num_steps=1))
    )
    make(verifier).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert rope.items() <= config["rope_parameters"].items()
    assert config["max_position_embeddings"] == 4096
    loaded = load_checkpoint(tmp_path, verifier)
    rotary = loaded.lm.decoder.rotary_emb if name == "draft_lm" else loaded.rotary
    positions = torch.tensor([[0, 1, 63, 255, 256, 2047, 2048, 4095]])
    hidden = torch.zeros(1, 8, 32)
    expected = verifier.decoder.rotary_emb(hidden, positions)
    for ours, theirs in zip(rotary(hidden, positions), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_draft_model_is_a_whole_model_of_the_verifiers_vocabulary(tmp_path):
    DraftLM.create(VERIFIER, DraftLMConfig("layers:0,7"), LOSS).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 2
    assert config["vocab_size"] == VERIFIER.vocab_size
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= names
    assert {name.split(".")[2] for name in names if name.startswith("model.layers.")} == {"0", "1"}
    assert (tmp_path / "tokenizer.json").is_file()


def test_eagle1_says_that_it_has_no_bias(tmp_path):
    """The original code adds one where config.json does not say."""
    DRAFTERS["eagle1"](VERIFIER).save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["bias"] is False


def test_kinds_that_no_engine_loads_have_no_table(tmp_path):
    HydraHeads.create(VERIFIER, MedusaConfig(), LOSS, COUNTS).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert layouts.required("hydra_heads", config) is None


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("midlayer.self_attn.q_proj.weight", "midlayer.self_attn.q_proj.weight"),
        ("layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"),
        ("model.fc.weight", "fc.weight"),
        ("d2t", "d2t"),
        ("layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
    ],
)
def test_names_of_eagle3(theirs, ours):
    assert layouts.eagle3_name(theirs) == ours


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("0.0.linear.weight", "blocks.0.layers.0.weight"),
        ("11.1.linear.bias", "blocks.11.layers.1.bias"),
        ("3.2.weight", "lm_heads.3.weight"),
        ("medusa_heads.1.0.linear.bias", "blocks.1.layers.0.bias"),
        ("blocks.0.layers.0.weight", "blocks.0.layers.0.weight"),
        ("3.1.weight", "3.1.weight"),  # not the last of two layers: no projection
    ],
)
def test_names_of_medusa(theirs, ours):
    assert layouts.medusa_name(theirs, 2) == ours


def test_names_written_are_read_back():
    for head in (0, 12):
        for name in (f"blocks.{head}.layers.1.bias", f"lm_heads.{head}.weight"):
            assert layouts.medusa_name(layouts.original_medusa_name(name, 2), 2) == name
    for name in layouts.required("eagle3", Eagle3.create(
        VERIFIER, Eagle3Config(draft_vocab_size=40), LOSS, COUNTS
    ).config.to_dict()):  # fmt: skip
        assert layouts.eagle3_name(layouts.speculators_name(name)) == name
