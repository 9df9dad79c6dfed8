"""GGUF files: what transformers and gguf's reader find in them is the model that was written."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from by_hand import made_loud
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_files import LOSS, draft_lm, exported, verifier
from torch import Tensor
from transformers import AutoModelForCausalLM

from headstart.models import export
from headstart.models.drafters.draft_lm import DraftLM
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.export import Export
from headstart.models.formats import gguf_file
from headstart.models.verifier.verifier import Verifier
from headstart.script import run_script

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0,
        "original_max_position_embeddings": 128}  # fmt: skip


def eagle3(target: Verifier, **settings) -> Eagle3:
    return made_loud(Eagle3.create(target, Eagle3Config(**settings), LOSS, torch.ones(300)))


def tensors_of(file: Path) -> dict[str, Tensor]:
    """As the reader finds them, in torch's order of dimensions."""
    found = {}
    for t in GGUFReader(file).tensors:
        data = t.data if t.data.dtype == np.int64 else dequantize(t.data, t.tensor_type)
        found[t.name] = torch.from_numpy(np.array(data))
    return found


def fields_of(file: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_model_back(family, tmp_path):
    # of a Qwen3 transformers' reader takes the head's size for granted
    target = verifier(family, **({"head_dim": 128} if family == "qwen3" else {}))
    drafter = draft_lm(target)
    assert gguf_file.write(drafter, tmp_path / "draft.gguf", torch.float32, None) > 20
    back = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="draft.gguf", dtype=torch.float32
    )
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    assert back.config.num_hidden_layers == 3
    assert torch.equal(back(ids).logits, drafter.model(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_left_to_the_embedding(tied, tmp_path):
    names = set(tensors_of(exported(tmp_path, tie_word_embeddings=tied)))
    assert ("output.weight" in names) == (not tied)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrices_may_be_written_in_half_and_norms_stay(dtype, tmp_path):
    found = tensors_of(exported(tmp_path, dtype=dtype))
    model = draft_lm(verifier()).model
    inside = dict(model.named_parameters())
    for name, ours in {
        "blk.1.ffn_up.weight": inside["model.layers.1.mlp.up_proj.weight"].to(dtype).float(),
        "blk.1.ffn_norm.weight": inside["model.layers.1.post_attention_layernorm.weight"],
        "token_embd.weight": inside["model.embed_tokens.weight"].to(dtype).float(),
    }.items():
        assert torch.equal(found[name], ours), name


def neighbours(weight: Tensor, heads: int) -> Tensor:
    """Queries' or keys' rows, reordered in plain loops."""
    size = len(weight) // heads
    rows = []
    for head in range(heads):
        for i in range(size // 2):
            rows += [weight[head * size + i], weight[head * size + size // 2 + i]]
    return torch.stack(rows)


@pytest.mark.parametrize("own", [False, True], ids=["verifier's embeddings", "own embeddings"])
@pytest.mark.parametrize("size", [40, None], ids=["draft vocabulary", "whole vocabulary"])
def test_eagle3_has_the_names_and_entries_that_llama_cpp_reads(size, own, tmp_path):
    drafter = eagle3(verifier(), draft_vocab_size=size)
    if own:
        drafter.embed_tokens = torch.nn.Embedding(300, 32)
    gguf_file.write(drafter, tmp_path / "e.gguf", torch.float32, None)
    found, fields, state = (
        tensors_of(tmp_path / "e.gguf"), fields_of(tmp_path / "e.gguf"), drafter.state_dict(),
    )  # fmt: skip
    same = {
        "fc": "fc", "output": "lm_head", "output_norm": "norm",
        "blk.0.attn_norm": "midlayer.input_layernorm",
        "blk.0.attn_norm_2": "midlayer.hidden_norm",
        "blk.0.ffn_norm": "midlayer.post_attention_layernorm",
        "blk.0.attn_v": "midlayer.self_attn.v_proj",
        "blk.0.attn_output": "midlayer.self_attn.o_proj",
        "blk.0.ffn_gate": "midlayer.mlp.gate_proj", "blk.0.ffn_up": "midlayer.mlp.up_proj",
        "blk.0.ffn_down": "midlayer.mlp.down_proj",
    }  # fmt: skip
    same |= {"token_embd": "embed_tokens"} if own else {}
    expected = {f"{a}.weight": state[f"{b}.weight"] for a, b in same.items()}
    for a, b, heads in (("q", "q_proj", 4), ("k", "k_proj", 2)):
        weight = state[f"midlayer.self_attn.{b}.weight"]
        expected[f"blk.0.attn_{a}.weight"] = neighbours(weight, heads)
    if size is not None:
        expected["d2t"] = drafter.draft_ids  # ids, where our file has offsets
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    wanted = {
        "general.architecture": "eagle3", "eagle3.target_layers": [2, 4, 5],
        "eagle3.target_hidden_size": 32, "eagle3.norm_before_residual": False,
        "eagle3.block_count": 1, "eagle3.attention.head_count": 4, "eagle3.vocab_size": 300,
        "eagle3.attention.head_count_kv": 2, "eagle3.context_length": 512,
        "eagle3.rope.freq_base": 10000.0,
    }  # fmt: skip
    assert {name: fields[name] for name in wanted} == wanted
    assert len(fields["tokenizer.ggml.tokens"]) == 300


@pytest.mark.parametrize("make", [draft_lm, eagle3])
def test_llama3_s_positions_go_along_as_divisors(make, tmp_path):
    drafter = make(verifier(rope_parameters=LLAMA3, max_position_embeddings=512))
    gguf_file.write(drafter, tmp_path / "a.gguf", torch.float32, None)
    expected = []
    for i in range(4):  # of a head of 8, as the formula has it
        wavelength = 2 * math.pi * 5e3 ** (2 * i / 8)
        share = (64 / wavelength - 1.0) / (4.0 - 1.0)
        share = min(max(share, 0.0), 1.0)
        expected.append(1 / ((1 - share) / 8.0 + share))
    found = tensors_of(tmp_path / "a.gguf")["rope_freqs.weight"]
    assert found.tolist() == pytest.approx(expected, rel=1e-5) and len(set(expected)) > 2


@pytest.mark.parametrize("make", [draft_lm, eagle3])
def test_yarn_s_and_linear_positions_go_along_as_entries(make, tmp_path):
    drafter = make(verifier(rope_parameters=YARN | {"beta_fast": 16.0}))
    gguf_file.write(drafter, tmp_path / "a.gguf", torch.float32, None)
    kind = "llama" if make is draft_lm else "eagle3"
    fields = fields_of(tmp_path / "a.gguf")
    wanted = {
        "freq_base": 5e3, "scaling.type": "yarn", "scaling.factor": 4.0,
        "scaling.original_context_length": 128, "scaling.yarn_beta_fast": 16.0,
    }  # fmt: skip
    assert {name: fields[f"{kind}.rope.{name}"] for name in wanted} == wanted
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    gguf_file.write(
        make(verifier(rope_parameters=linear)), tmp_path / "b.gguf", torch.float32, None
    )
    fields = fields_of(tmp_path / "b.gguf")
    assert fields[f"{kind}.rope.scaling.type"] == "linear"
    assert fields[f"{kind}.rope.scaling.factor"] == 2.0


def swapped(**entry) -> DraftLM:
    drafter = draft_lm(verifier())
    for name, value in entry.items():
        setattr(drafter.model.config, name, value)
    return drafter


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: draft_lm(verifier("gemma2")), "it is of the family gemma2, not llama"),
        (lambda: draft_lm(verifier("mistral")), "its attention has a sliding window"),
        (lambda: swapped(hidden_act="gelu"), "its activation is gelu, not silu"),
        (lambda: eagle3(verifier(), norm_output=True), "llama.cpp does not know norm_output"),
        (lambda: eagle3(verifier(), fc_norm=True), "llama.cpp does not know fc_norm"),
        (lambda: eagle3(verifier(), feature_layers=(1, 8)), "fuses three features, .* has 2"),
        (
            lambda: eagle3(verifier(rope_parameters=YARN | {"attention_factor": 1.5})),
            "positions are .*attention_factor 1.5",
        ),
        (
            lambda: draft_lm(verifier(rope_parameters={"rope_type": "dynamic", "factor": 2.0,
                                                       "rope_theta": 1e4})),
            "positions are .*rope_type dynamic",
        ),
    ],
)  # fmt: skip
def test_what_llama_cpp_has_not_is_refused(make, said, tmp_path):
    with pytest.raises(ValueError, match=said) as error:
        gguf_file.write(make(), tmp_path / "a.gguf", torch.float32, None)
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


def told(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["export.py", *words])
    try:
        run_script(Export, export.run, first="drafter")
    except SystemExit as stop:
        return stop.code
    return 0


def test_script_writes_a_file_and_says_how_to_serve_it(tmp_path, monkeypatch, capsys):
    target = Verifier.load(tiny.save(verifier(), tmp_path / "verifier"))
    eagle3(target, draft_vocab_size=40).save(tmp_path / "e")
    draft_lm(target).save(tmp_path / "d")
    for name, kind in (("e", "draft-eagle3"), ("d", "draft-simple")):
        out = str(tmp_path / f"{name}.gguf")
        assert told(monkeypatch, str(tmp_path / name), "--to", "gguf", "--out", out) == 0
        assert f"-md {out} --spec-type {kind} --spec-draft-n-max 2" in capsys.readouterr().out
    words = [str(tmp_path / "d"), "--to", "gguf", "--out"]
    assert told(monkeypatch, *words, str(tmp_path / "d.gguf")) == 2
    assert "is there already" in capsys.readouterr().err
    assert told(monkeypatch, *words, str(tmp_path)) == 2
    assert "is a folder; name a file" in capsys.readouterr().err
    words += [str(tmp_path / "copied.gguf"), "--tokenizer", str(tmp_path / "e.gguf")]
    assert told(monkeypatch, *words) == 0
    copied, made = fields_of(tmp_path / "copied.gguf"), fields_of(tmp_path / "d.gguf")
    assert copied == made
    words = [
        str(tmp_path / "e"),
        "--to",
        "sglang",
        "--out",
        str(tmp_path / "s"),
        "--tokenizer",
        "x",
    ]
    assert told(monkeypatch, *words) == 2
    assert "tokenizer is for gguf files alone" in capsys.readouterr().err
