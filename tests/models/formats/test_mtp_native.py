"""MTP modules in verifiers' own folders: found, loaded, trained, written back, in four layouts."""

import copy
from pathlib import Path

import pytest
import tiny
import torch
from runs import recipe, run
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from headstart.eval.decoding.speculate import generate
from headstart.models.drafter import fingerprint
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import LAYOUTS, MTPConfig
from headstart.models.formats import mtp_native
from headstart.models.loading import load_pair
from headstart.models.losses import LossConfig
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain
from headstart.models.verifier.verifier import Verifier

N, H = 3, 32
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = EXPERTS | {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES = {
    "mimo": ("mimo", {}),
    "deepseek_v3": ("deepseek_v3", GROUPS | LATENT),
    "glm4_moe": ("glm4_moe", GROUPS),
    "qwen3_next": (
        "qwen3_next",
        EXPERTS
        | {"num_experts": 4, "shared_expert_intermediate_size": 16}
        | {"layer_types": ["full_attention"] * N},
    ),
}
OWN = {  # as engines read them
    "mimo": {
        "model.mtp_layers.0.token_layernorm.weight": (H,),
        "model.mtp_layers.0.hidden_layernorm.weight": (H,),
        "model.mtp_layers.0.input_proj.weight": (H, 2 * H),
        "model.mtp_layers.0.final_layernorm.weight": (H,),
    },
    "deepseek_v3": {
        "model.layers.3.enorm.weight": (H,),
        "model.layers.3.hnorm.weight": (H,),
        "model.layers.3.eh_proj.weight": (H, 2 * H),
        "model.layers.3.shared_head.norm.weight": (H,),
    },
    "qwen3_next": {
        "mtp.pre_fc_norm_embedding.weight": (H,),
        "mtp.pre_fc_norm_hidden.weight": (H,),
        "mtp.fc.weight": (H, 2 * H),
        "mtp.norm.weight": (H,),
    },
}
OWN["glm4_moe"] = OWN["deepseek_v3"]
LAYER = {
    "mimo": "model.mtp_layers.0.", "deepseek_v3": "model.layers.3.",
    "glm4_moe": "model.layers.3.", "qwen3_next": "mtp.layers.0.",
}  # fmt: skip
COPIES = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
LOSS = LossConfig("ce", num_steps=1, gamma=1.0)
CONFIG = MTPConfig(lambda_end=0.2)


def write(folder: Path, layout: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A verifier's folder with a module; the module's tensors, by the names of the file."""
    family, settings = FAMILIES[layout]
    verifier = tiny.verifier(family, num_hidden_layers=N, **settings)
    verifier.model.save_pretrained(folder)
    verifier.tokenizer.save_pretrained(folder)
    random = torch.Generator().manual_seed(5)

    def made(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return (0.5 + torch.rand(shape, generator=random)).to(dtype)
        return (1.2 * torch.randn(shape, generator=random) / shape[-1] ** 0.5).to(dtype)

    tensors = load_file(folder / "model.safetensors")
    module = {name: made(shape) for name, shape in OWN[layout].items()}
    last = f"model.layers.{N - 1}."
    for name, tensor in tensors.items():
        if name.startswith(last):
            module[LAYER[layout] + name.removeprefix(last)] = made(tuple(tensor.shape))
    copies = {}
    if layout in ("deepseek_v3", "glm4_moe"):
        heads = (tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])
        copies = dict(zip(COPIES, (head.clone() for head in heads), strict=True))
    save_file(tensors | module | copies, folder / "model.safetensors", {"format": "pt"})
    return module


def opened(folder: Path) -> tuple[Verifier, MTP]:
    verifier = Verifier.load(str(folder))
    return verifier, mtp_native.create(verifier, CONFIG, LOSS).eval()


@pytest.mark.parametrize("layout", FAMILIES)
def test_load_save_load_is_bit_equal(tmp_path, layout):
    module = write(tmp_path / "verifier", layout)
    native = mtp_native.find(str(tmp_path / "verifier"))
    assert (native.layout, native.num_modules) == (layout, 1)
    assert native.places.keys() == module.keys()
    _, drafter = opened(tmp_path / "verifier")
    assert drafter.wiring == LAYOUTS[layout] and drafter.schedule["end"] == 0.2
    drafter.save(tmp_path / "drafter")
    saved = load_file(tmp_path / "drafter" / "model.safetensors")
    mtp_native.write_back(saved, native, tmp_path / "again")
    before = load_file(tmp_path / "verifier" / "model.safetensors")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    _, again = opened(tmp_path / "again")
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_only_files_with_modules_are_written_anew(tmp_path):
    source, target = tmp_path / "verifier", tmp_path / "again"
    module = write(source, "mimo")
    tensors = load_file(source / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if name not in module}
    save_file(rest, source / "model.safetensors", {"format": "pt"})
    save_file(module, source / "modules.safetensors", {"format": "pt"})
    native = mtp_native.find(str(source))
    _, drafter = opened(source)
    with torch.no_grad():
        drafter.blocks[0].norm.weight.zero_()
    mtp_native.write_back(drafter.state_dict(), native, target)
    assert {file.name for file in target.iterdir()} == {file.name for file in source.iterdir()}
    assert [file.name for file in target.iterdir() if not file.is_symlink()] == [
        "modules.safetensors"
    ]
    _, again = opened(target)
    assert not again.blocks[0].norm.weight.any()


@pytest.mark.parametrize("layout", FAMILIES)
def test_training_changes_the_modules_tensors_alone(tmp_path, layout):
    module = write(tmp_path / "verifier", layout, torch.float32)
    settings = recipe(tmp_path, str(tmp_path / "verifier"), "mtp", learning_rate=1e-2, warmup=0.0)
    settings.mode, settings.drafter = "native", copy.copy(CONFIG)
    run(settings)
    before = load_file(tmp_path / "verifier" / "model.safetensors")
    after = load_file(tmp_path / "run" / "verifier" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    still = {name for name in module if "experts" in name or "correction_bias" in name}
    assert set(module) - still <= changed <= set(module)
    verifier, _ = opened(tmp_path / "run" / "verifier")
    assert verifier.fingerprint() == Verifier.load(str(tmp_path / "verifier")).fingerprint()


@pytest.mark.parametrize("layout", FAMILIES)
def test_greedy_output_is_the_verifiers(tmp_path, layout):
    write(tmp_path, layout)
    verifier, drafter = opened(tmp_path)
    settings = {"sampling": Sampling(), "drafting": Drafting(False, Sampling())}
    prompts = [[5, 9, 3, 40], [7]]
    alone = generate(verifier, None, prompts, shape=None, max_new_tokens=16, **settings)
    got = generate(verifier, drafter, prompts, shape=chain(3), max_new_tokens=16, **settings)
    assert [g.tokens for g in got] == [a.tokens for a in alone]


@pytest.mark.parametrize("layout", ["deepseek_v3", "glm4_moe", "qwen3_next"])
@torch.no_grad()
def test_the_module_computes_what_transformers_does(tmp_path, layout):
    """Which feeds every module normed states, and zeroes no embedding."""
    write(tmp_path, layout, torch.float32)
    verifier = Verifier.load(str(tmp_path))
    settings = MTPConfig(zero_first=False, normed_feedback=True)
    drafter = mtp_native.create(verifier, settings, LOSS).eval()
    ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))
    states = verifier.states(ids)
    verifier.config.num_mtp_layers = 1
    if layout == "qwen3_next":
        verifier.config.mtp_layer_types = ["full_attention"]
    else:  # it looks for them where the published model has them
        verifier.model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]
    theirs = MtpModel.from_pretrained(verifier.model)
    cache = MtpCache(config=verifier.config.get_mtp_config())
    positions = torch.arange(11)[None]
    expected = theirs.forward_layer(
        0, states.last_hidden[:, :-1], positions, cache, input_ids=ids[:, 1:]
    )
    batch = {
        "input_ids": ids, "position_ids": torch.arange(12)[None],
        "document_ids": torch.zeros_like(ids), "last_hidden": states.last_hidden,
    }  # fmt: skip
    (got,) = drafter.unroll(batch, 1)
    torch.testing.assert_close(got[:, :-1], expected, rtol=1e-4, atol=1e-4)


def test_a_folder_with_modules_is_verifier_and_drafter(tmp_path):
    write(tmp_path / "both", "glm4_moe")
    folder = str(tmp_path / "both")
    _, expected = opened(tmp_path / "both")
    for given in (None, folder):
        verifier, drafter = load_pair(given, folder, "float32", "cpu")
        assert verifier.name == folder and not drafter.training
        assert fingerprint(drafter) == fingerprint(expected)
    plain = tiny.save(tiny.verifier(), tmp_path / "plain")
    for name in (plain, str(tmp_path), "some/model", "prompt-lookup"):
        assert not mtp_native.holds_modules(name)


def test_a_verifier_without_modules_is_refused(tmp_path):
    verifier = tiny.verifier()
    verifier.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no MTP modules of a known layout .* mode graft"):
        mtp_native.find(str(tmp_path))


@pytest.mark.parametrize("fault", ["missing", "shape", "unknown", "quantised"])
def test_modules_that_cannot_be_read_whole_are_refused(tmp_path, fault):
    write(tmp_path, "deepseek_v3")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.3.mlp.experts.2.up_proj.weight"
    match fault:
        case "missing":
            del tensors[name]
        case "shape":
            tensors[name] = tensors[name][:4].clone()
        case "unknown":
            tensors["model.layers.3.strange.weight"] = torch.ones(3)
        case "quantised":
            tensors["model.layers.3.eh_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    said = {
        "missing": "gate_up_proj is missing", "shape": "up_proj.weight is", "unknown": "strange",
        "quantised": "are quantised",
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"mode native: .*{said[fault]}"):
        opened(tmp_path)
