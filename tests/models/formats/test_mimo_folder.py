"""A verifier and its graft as a MiMo: nothing of either is lost, and both compute what they did."""

import json
import sys
from pathlib import Path

import pytest
import tiny
import torch
from loud_mtp import loud
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from headstart.eval.decoding.speculate import generate
from headstart.models import export
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import LAYOUTS, MTPConfig
from headstart.models.export import Export
from headstart.models.formats import mimo_folder, mtp_native
from headstart.models.losses import LossConfig
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain
from headstart.models.verifier.verifier import Verifier
from headstart.script import run_script

LOSS = LossConfig("ce", num_steps=1, gamma=1.0)
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0,
        "original_max_position_embeddings": 128}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
VERIFIERS = {
    "llama": ("llama", {}),
    "llama, head is the embedding": ("llama", {"tie_word_embeddings": True}),
    "llama, llama3 positions": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn positions": ("llama", {"rope_parameters": YARN, "rms_norm_eps": 1e-3}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, head is the embedding": ("qwen2", {"tie_word_embeddings": True}),
    "mimo": ("mimo", {"num_nextn_predict_layers": 1}),
}


def saved(folder: Path, name: str = "llama", shard: str = "1GB") -> Verifier:
    """A verifier, read from its folder."""
    family, settings = VERIFIERS[name]
    made = tiny.verifier(family, **settings)
    with torch.no_grad():
        made.decoder.norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(9))
        for parameter, weight in made.model.named_parameters():
            if parameter.endswith("bias"):
                weight.normal_()
    if family == "mistral":
        made.config.sliding_window = None
    made.model.save_pretrained(folder, max_shard_size=shard)
    made.tokenizer.save_pretrained(folder)
    return Verifier.load(str(folder))


def graft(verifier: Verifier, folder: Path, **settings) -> MTP:
    drafter = loud(verifier=verifier, **settings)
    drafter.save(folder)
    return drafter


def exported(drafter: Path, out: Path, **settings) -> None:
    export.run(Export(str(drafter), "mimo", str(out), **settings))


def native(folder: Path) -> tuple[Verifier, MTP]:
    verifier = Verifier.load(str(folder))
    return verifier, mtp_native.create(verifier, MTPConfig(), LOSS).eval()


def test_no_report_of_unexpected_tensors_when_it_is_loaded(tmp_path, caplog):
    graft(saved(tmp_path / "verifier"), tmp_path / "drafter")
    exported(tmp_path / "drafter", tmp_path / "out")
    caplog.clear()
    verifier = Verifier.load(str(tmp_path / "out"))
    assert not caplog.text and verifier.config.model_type == "qwen2"


@pytest.mark.parametrize("name, shard", [*((n, "1GB") for n in VERIFIERS), ("qwen2", "40KB")])
@torch.no_grad()
def test_the_folder_is_the_same_verifier_and_module(name, shard, tmp_path):
    verifier = saved(tmp_path / "verifier", name, shard)
    drafter = graft(verifier, tmp_path / "drafter")
    exported(tmp_path / "drafter", tmp_path / "out")
    again, module = native(tmp_path / "out")
    before, after = drafter.state_dict(), module.state_dict()
    added = {n for n in after if n.endswith("_proj.bias")} - before.keys()
    assert after.keys() - added == before.keys()
    assert all(torch.equal(tensor, after[n]) for n, tensor in before.items())
    assert not any(after[n].any() for n in added)
    assert module.wiring == LAYOUTS["mimo"] == drafter.wiring
    ids = torch.randint(3, 60, (2, 200), generator=torch.Generator().manual_seed(0))
    left, right = (v.model(ids).logits for v in (verifier, again))
    assert torch.equal(left, right)
    settings = {"sampling": Sampling(), "drafting": Drafting(False, Sampling())}
    texts = [
        generate(v, d, [[5, 9, 3, 40], [7]], shape=chain(3), max_new_tokens=24, **settings)
        for v, d in ((verifier, drafter), (again, module))
    ]
    assert [t.tokens for t in texts[0]] == [t.tokens for t in texts[1]]
    assert [t.counts("") for t in texts[0]] == [t.counts("") for t in texts[1]]


def test_files_are_written_one_by_one(tmp_path):
    """Each holds what one of the verifier's does, the last the module."""
    saved(tmp_path / "verifier", "llama, head is the embedding", "40KB")
    graft(Verifier.load(str(tmp_path / "verifier")), tmp_path / "drafter")
    exported(tmp_path / "drafter", tmp_path / "out")
    before = mimo_folder.files_of(tmp_path / "verifier")
    after = mimo_folder.files_of(tmp_path / "out")
    assert len(after) == len(before) + 1 > 3
    for old, new in zip(before, after, strict=False):
        theirs, ours = load_file(old), load_file(new)
        assert theirs.keys() <= ours.keys()
        assert all(torch.equal(t, ours[n]) for n, t in theirs.items())
        added = {n for n in ours.keys() - theirs.keys() if not n.endswith("_proj.bias")}
        assert added == ({"lm_head.weight"} if "model.embed_tokens.weight" in theirs else set())
    assert all(name.startswith("model.mtp_layers.0.") for name in load_file(after[-1]))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = {name: file.name for file in after for name in load_file(file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for file in after for tensor in load_file(file).values()
    )


def test_tensors_and_config_are_those_that_vllm_reads(tmp_path):
    verifier = saved(tmp_path / "verifier", "llama, yarn positions")
    graft(verifier, tmp_path / "drafter")
    exported(tmp_path / "drafter", tmp_path / "out")
    h, inner, kv = 32, 48, 16
    expected = {
        "token_layernorm.weight": (h,), "hidden_layernorm.weight": (h,),
        "input_proj.weight": (h, 2 * h), "final_layernorm.weight": (h,),
        "input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (h, h), "self_attn.q_proj.bias": (h,),
        "self_attn.k_proj.weight": (kv, h), "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, h), "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (h, h), "mlp.gate_proj.weight": (inner, h),
        "mlp.up_proj.weight": (inner, h), "mlp.down_proj.weight": (h, inner),
    }  # fmt: skip
    module = load_file(mimo_folder.files_of(tmp_path / "out")[-1])
    found = {n.removeprefix("model.mtp_layers.0."): tuple(t.shape) for n, t in module.items()}
    assert found == expected
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "dtype": "float32",
        "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "use_sliding_window": False,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "rms_norm_eps": 1e-3, "max_position_embeddings": 512, "eos_token_id": 2,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert YARN.items() <= config["rope_parameters"].items()
    read = AutoConfig.from_pretrained(tmp_path / "out")
    assert read.rope_parameters == verifier.config.rope_parameters


def test_files_beside_the_weights_come_along(tmp_path):
    source, out = tmp_path / "verifier", tmp_path / "out"
    verifier = saved(source)
    for name in ("modeling_x.py", "pytorch_model.bin", "README.md"):
        (source / name).write_text("x")
    (source / "LICENSE").write_text("a licence")
    graft(verifier, tmp_path / "drafter")
    exported(tmp_path / "drafter", out)
    same = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"}
    assert all((source / n).read_bytes() == (out / n).read_bytes() for n in same)
    assert not {"modeling_x.py", "pytorch_model.bin", "README.md"} & {f.name for f in out.iterdir()}


def test_each_part_keeps_its_precision(tmp_path):
    made = tiny.verifier()
    made.model.bfloat16()
    tiny.save(made, tmp_path / "verifier")
    verifier = Verifier.load(str(tmp_path / "verifier"))
    drafter = graft(verifier, tmp_path / "drafter")
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        exported(tmp_path / "drafter", tmp_path / name, dtype=name)
        first, module = (load_file(f) for f in mimo_folder.files_of(tmp_path / name))
        assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
        assert {tensor.dtype for tensor in module.values()} == {dtype}
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["dtype"] == "bfloat16"
    _, rounded = native(tmp_path / "bfloat16")
    ours, theirs = drafter.blocks[0].projection.weight, rounded.blocks[0].projection.weight
    assert torch.equal(ours.bfloat16().float(), theirs)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_modules": 3}, "first of this drafter's 3 modules alone; .*num_modules 1"),
        ({"layout": "qwen3_next"}, "trained with hidden_first False, .* with True; .*layout mimo"),
        ({"zero_first": False}, "trained with zero_first False"),
    ],
)
def test_other_drafters_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"to: mimo: .*{message}") as error:
        mimo_folder.check(loud(**settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "family, settings, message",
    [
        ("qwen3", {}, "'tiny/qwen3' has no form as a MiMo: it is of the family qwen3"),
        ("gemma2", {}, "of the family gemma2"),
        ("llama", {"head_dim": 16}, "its heads are 16 wide"),
        ("llama", {"attention_bias": True}, "bias on the output"),
        ("llama", {"mlp_bias": True}, "its MLP has biases"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("mistral", {}, "sliding window"),
    ],
)
def test_verifiers_that_are_no_mimo_are_refused(family, settings, message):
    drafter = loud(verifier=tiny.verifier(family, **settings))
    with pytest.raises(ValueError, match=f"{message}.*train EAGLE-3") as error:
        mimo_folder.check(drafter)
    assert "\n" not in str(error.value)


def test_a_verifier_whose_files_are_not_its_tensors_is_refused(tmp_path):
    verifier = saved(tmp_path / "verifier")
    drafter = graft(verifier, tmp_path / "drafter")
    file = tmp_path / "verifier" / "model.safetensors"
    tensors = load_file(file)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"have no model\.embed_tokens.weight; write it anew"):
        mimo_folder.write(drafter, tmp_path / "out", torch.float32)
    file.write_bytes(b"no")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        mimo_folder.write(drafter, tmp_path / "out", torch.float32)
    file.unlink()
    with pytest.raises(ValueError, match="no weights in safetensors; write it anew"):
        mimo_folder.write(drafter, tmp_path / "out", torch.float32)
    assert not (tmp_path / "out").exists()


def test_script_prints_the_command_that_serves_it(tmp_path, monkeypatch, capsys):
    graft(saved(tmp_path / "verifier"), tmp_path / "drafter")
    words = [str(tmp_path / "drafter"), "--to", "mimo", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["export.py", *words, "--num_speculative_tokens", "2"])
    run_script(Export, export.run, first="drafter")
    said = capsys.readouterr().out
    assert f"vllm serve {tmp_path}/out --speculative-config" in said
    assert '{"method": "mtp", "num_speculative_tokens": 2}' in said
    with pytest.raises(SystemExit):  # what is there stays
        run_script(Export, export.run, first="drafter")
    assert "holds something already" in capsys.readouterr().err
