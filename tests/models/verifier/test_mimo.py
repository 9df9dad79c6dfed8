"""MiMo's folders, which bring code along, are read without running it."""

import json

import torch
from tiny import save, verifier
from transformers import AutoConfig

from headstart.models.verifier.mimo import MiMoConfig
from headstart.models.verifier.verifier import Verifier


def test_a_folder_that_brings_its_own_code_loads_without_it(tmp_path):
    written = verifier("mimo", num_nextn_predict_layers=1)
    folder = save(written, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(folder)
    assert type(read) is MiMoConfig and read.num_nextn_predict_layers == 1
    assert config["architectures"] == ["MiMoForCausalLM"]
    assert Verifier.load(folder).fingerprint() == written.fingerprint()


@torch.no_grad()
def test_it_computes_what_qwen2_does():
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    mimo, qwen2 = verifier("mimo"), verifier("qwen2")
    assert torch.equal(mimo.model(ids).logits, qwen2.model(ids).logits)
