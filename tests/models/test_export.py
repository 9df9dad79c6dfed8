"""Drafters in the layouts of other programs, and back."""

import json
import sys
from pathlib import Path

import foreign
import pytest
import tiny
import torch
from by_hand import loud as loud_eagle3
from by_hand import made_loud
from imported import VERIFIER, imported
from layout_drafters import COUNTS, LOSS

from headstart.models import export
from headstart.models.drafter import Drafter, TrainableDrafter, fingerprint
from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.medusa import Medusa, MedusaConfig
from headstart.models.export import Export, converted, write
from headstart.models.formats import imports
from headstart.script import run_script


def medusa(**settings) -> Medusa:
    drafter = Medusa.create(VERIFIER, MedusaConfig(**settings), LOSS, COUNTS)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.normal_()
    return drafter


PAIRS = [
    ("speculators", lambda: loud_eagle3(draft_vocab_size=40)),
    ("speculators", lambda: loud_eagle3(feature_layers=(1, 8), norm_output=True, fc_norm=True)),
    ("sglang", lambda: loud_eagle3(draft_vocab_size=40)),
    ("sglang", lambda: loud_eagle3(feature_layers=(1, 4, 8))),
    ("eagle", lambda: loud_eagle3(draft_vocab_size=40)),
    ("eagle", lambda: loud_eagle3()),
    ("eagle", lambda: made_loud(Eagle1.create(VERIFIER, Eagle1Config(), LOSS))),
    ("medusa", lambda: medusa(num_layers=2, shared_projection=False)),
]


def exported(drafter: TrainableDrafter, to: str, out: Path, dtype=torch.float32) -> Path:
    write(*converted(drafter, to, "some/verifier", 4), out, dtype)
    return out


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_there_and_back_is_the_same_bit_by_bit(number, tmp_path):
    to, make = PAIRS[number]
    drafter = make()
    back = imports.load(exported(drafter, to, tmp_path / "there"), VERIFIER, LOSS)
    assert fingerprint(back) == fingerprint(drafter)
    assert back.feature_layers == drafter.feature_layers
    drafter.save(tmp_path / "before")
    back.save(tmp_path / "after")
    left, right = ((tmp_path / n / "config.json").read_text() for n in ("before", "after"))
    assert json.loads(left) == json.loads(right)
    first, second = (tmp_path / n / "model.safetensors" for n in ("before", "after"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "name, to",
    [
        ("eagle3, original", "eagle"),
        ("eagle3, speculators", "speculators"),
        ("eagle3, speculators, normed, own embeddings", "speculators"),
        ("eagle1, original", "eagle"),
        ("eagle1, original, bias", "eagle"),
        ("medusa, original", "medusa"),
    ],
)
def test_what_others_saved_is_written_back_bit_by_bit(name, to, tmp_path):
    drafter = imported(name, tmp_path / "theirs")
    before, after = (
        foreign.tensors_in(f)
        for f in (tmp_path / "theirs", exported(drafter, to, tmp_path / "again"))
    )
    extra = {} if to != "eagle" else {"embed_tokens.weight"}  # that code looks for it there
    shared = {} if "own" in name or "eagle3" not in name else {"embed_tokens.weight"}
    assert before.keys() - after.keys() <= set(shared)
    assert after.keys() - before.keys() <= set(extra)
    for tensor_name in before.keys() & after.keys():
        assert before[tensor_name].dtype == after[tensor_name].dtype
        assert torch.equal(before[tensor_name], after[tensor_name]), tensor_name


def test_a_shared_projection_becomes_one_of_each_head(tmp_path):
    drafter = medusa()
    tensors = foreign.tensors_in(exported(drafter, "medusa", tmp_path))
    assert set(tensors) == {
        f"{head}.{rest}"
        for head in range(3)
        for rest in ("0.linear.weight", "0.linear.bias", "1.weight")
    }
    back = imports.load(tmp_path, VERIFIER, LOSS)
    hidden = torch.randn(5, 32)
    for s in range(3):
        ours, theirs = (d.logits(d.blocks[s](hidden), s) for d in (drafter, back))
        assert torch.equal(ours, theirs)


def test_speculators_config_has_what_vllm_reads(tmp_path):
    """The keys are those of vLLM 0.32's reader of this format."""
    drafter = imported("eagle3, speculators, normed, own embeddings", tmp_path / "theirs")
    config = json.loads(
        (exported(drafter, "speculators", tmp_path / "out") / "config.json").read_text()
    )
    assert config["speculators_model_type"] == "eagle3"
    inner = config["speculators_config"]
    assert inner["proposal_methods"][0]["speculative_tokens"] == 4
    assert inner["verifier"]["name_or_path"] == "some/verifier"
    expected = {
        "draft_vocab_size": 16,
        "target_hidden_size": 32,
        "norm_before_residual": True,  # vLLM takes true where nothing is said, others false
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 8],
    }
    assert {key: config[key] for key in expected} == expected
    layer = config["transformer_layer_config"]
    expected = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "vocab_size": 64, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "num_aux_hidden_states": 3, "tie_word_embeddings": False,
    }  # fmt: skip
    assert {key: layer[key] for key in expected} == expected
    assert layer["rope_parameters"]["rope_theta"] == 10000.0
    names = foreign.tensors_in(tmp_path / "out")
    assert not [name for name in names if "midlayer" in name]
    assert "layers.0.hidden_norm.weight" in names and "embed_tokens.weight" in names


def test_sglang_counts_layers_from_the_output_of_the_first(tmp_path):
    drafter = loud_eagle3(draft_vocab_size=40)
    assert drafter.feature_layers == (2, 4, 5)
    config = json.loads((exported(drafter, "sglang", tmp_path) / "config.json").read_text())
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [1, 3, 4]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["rope_theta"], config["rope_scaling"]) == (10000.0, None)
    tensors = foreign.tensors_in(tmp_path)
    assert "midlayer.hidden_norm.weight" in tensors
    assert torch.equal(tensors["d2t"] + torch.arange(40), drafter.draft_ids)


def test_sglang_finds_an_eagle1_by_its_name_and_a_bias_in_it(tmp_path):
    """SGLang 0.5.23: `models/llama_eagle.py` has one, of random numbers where the file has none."""
    drafter = made_loud(Eagle1.create(VERIFIER, Eagle1Config(), LOSS))
    folder = exported(drafter, "sglang", tmp_path)
    config, tensors = json.loads((folder / "config.json").read_text()), foreign.tensors_in(folder)
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert torch.equal(tensors.pop("fc.bias"), torch.zeros(32))
    own = drafter.file_tensors()
    assert tensors.keys() == own.keys() and all(torch.equal(t, own[n]) for n, t in tensors.items())
    back = imports.load(folder, VERIFIER, LOSS)
    assert torch.equal(back.fc.weight, drafter.fc.weight) and not back.fc.bias.any()


@pytest.mark.parametrize("name", ["eagle3, speculators, normed, own embeddings"])
def test_sglang_has_no_place_for_other_embeddings(name, tmp_path):
    """It puts the verifier's in their place."""
    with pytest.raises(ValueError, match="verifier's embeddings, and this drafter has its own"):
        converted(imported(name, tmp_path), "sglang", "some/verifier")


@pytest.mark.parametrize("to", ["speculators", "sglang"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
         "original_max_position_embeddings": 128},
        {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=["yarn", "llama3"],
)  # fmt: skip
def test_scaled_positions_go_along(rope, to, tmp_path):
    verifier = tiny.verifier(rope_parameters=rope, max_position_embeddings=4096)
    drafter = Eagle3.create(verifier, Eagle3Config(), LOSS, COUNTS)
    back = imports.load(exported(drafter, to, tmp_path), verifier, LOSS)
    positions = torch.tensor([[0, 1, 63, 64, 127, 128, 2047, 2048, 4095]])
    hidden = torch.zeros(1, 9, 32)
    expected = verifier.decoder.rotary_emb(hidden, positions)
    for made in (drafter, back):
        assert made.config.max_position_embeddings == 4096
        for ours, theirs in zip(made.rotary(hidden, positions), expected, strict=True):
            assert torch.equal(ours, theirs)
    if to == "sglang":
        config = json.loads((tmp_path / "config.json").read_text())
        scaling = config["rope_scaling"]
        assert config["rope_theta"] == 5000.0 and scaling["type"] == scaling["rope_type"]
        assert scaling["factor"] == rope["factor"]


def test_weights_may_be_written_in_half(tmp_path):
    drafter = loud_eagle3(draft_vocab_size=40)
    tensors = foreign.tensors_in(exported(drafter, "sglang", tmp_path, torch.bfloat16))
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    back = imports.load(tmp_path, VERIFIER, LOSS)
    assert torch.equal(back.fc.weight, drafter.fc.weight.bfloat16().float())


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 128}  # fmt: skip


@pytest.mark.parametrize(
    "to, make, message",
    [
        ("sglang", medusa, "sglang is a layout for Eagle3 or Eagle1; this drafter is Medusa"),
        ("medusa", loud_eagle3, "medusa is a layout for Medusa; this drafter is Eagle3"),
        ("sglang", lambda: loud_eagle3(fc_norm=True), "sglang does not know fc_norm"),
        ("eagle", lambda: loud_eagle3(norm_output=True), "eagle does not know norm_output"),
        ("sglang", lambda: loud_eagle3(feature_layers=(1, 8)), "three features, .* has 2"),
        ("eagle", lambda: loud_eagle3(feature_layers=(1, 4, 8)), r"fuses layers \[2, 4, 5\]"),
        ("medusa", lambda: medusa(draft_vocab_size=40), "no draft vocabulary, .* 40 ids"),
        (
            "eagle",
            lambda: Eagle3.create(
                tiny.verifier(rope_parameters=YARN), Eagle3Config(), LOSS, COUNTS
            ),
            "does not scale positions the way yarn does",
        ),
    ],
)
def test_what_a_layout_cannot_say_is_refused(to, make, message):
    with pytest.raises(ValueError, match=message) as error:
        converted(make(), to, "some/verifier")
    assert "\n" not in str(error.value)


def saved(drafter: Drafter | str, folder: Path) -> str:
    if isinstance(drafter, str):
        return drafter
    drafter.save(folder)
    return str(folder)


@pytest.mark.parametrize(
    "make, to, kind",
    [
        (loud_eagle3, "mimo", "Eagle3"),
        (loud_eagle3, "medusa", "Eagle3"),
        (medusa, "sglang", "Medusa"),
        (lambda: DraftLM.create(VERIFIER, DraftLMConfig("layers:0"), LOSS), "mimo", "DraftLM"),
        (lambda: "prompt-lookup:max_ngram=4", "mimo", "PromptLookup"),
        (lambda: "layers:0-3", "eagle", "DraftLM"),
        (lambda: "some/model", "mimo", "DraftLM"),
    ],
)
def test_a_wrong_kind_is_refused_before_anything_is_loaded(make, to, kind, tmp_path, monkeypatch):
    drafter = saved(make(), tmp_path / "drafter")
    monkeypatch.setattr(export, "load_pair", None)
    with pytest.raises(ValueError, match=f"to: {to} is a layout for .* this drafter is {kind}"):
        export.run(Export(drafter, to, str(tmp_path / "out"), verifier="no/model"))


def test_another_program_s_kind_is_known_too(tmp_path, monkeypatch):
    exported(medusa(), "medusa", tmp_path / "theirs")
    monkeypatch.setattr(export, "load_pair", None)
    with pytest.raises(ValueError, match="this drafter is Medusa"):
        export.run(Export(str(tmp_path / "theirs"), "mimo", str(tmp_path / "out"), "no/model"))


def test_script_takes_the_drafter_as_its_first_word(tmp_path, monkeypatch, capsys):
    verifier = tiny.save(VERIFIER, tmp_path / "verifier")
    loud_eagle3(draft_vocab_size=40).save(tmp_path / "drafter")
    words = [str(tmp_path / "drafter"), "--to", "speculators", "--verifier", verifier]
    words += ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["export.py", *words])
    run_script(Export, export.run, first="drafter")
    output = capsys.readouterr().out
    assert f"vllm serve {tmp_path}/out" in output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == verifier
    with pytest.raises(SystemExit) as stop:  # what is there stays
        run_script(Export, export.run, first="drafter")
    assert stop.value.code == 2
    assert "holds something already" in capsys.readouterr().err
