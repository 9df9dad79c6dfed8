"""Drafters that other programs saved: known, read bit by bit, refused by name, used, trained."""

from pathlib import Path

import foreign
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from by_hand import eagle3_by_hand
from imported import EMBEDDINGS, MAKERS, OTHERS, VERIFIER, imported
from runs import ONES, write_conversations
from served import GREEDY, Serving, batch_of, close, texts

from headstart.eval.decoding.speculate import generate
from headstart.models import saved
from headstart.models.drafter import fingerprint
from headstart.models.drafters.draft_lm import DraftLM
from headstart.models.loading import load, load_checkpoint
from headstart.models.losses import LossConfig
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain
from headstart.models.verifier.outline import Outline
from headstart.train import draft_lm, eagle1, eagle3, medusa
from headstart.train.run.settings import DataConfig, TrainingConfig
from headstart.train.run.start import check_checkpoint, initial_drafter

torch.set_num_threads(1)

LOSS = LossConfig(num_steps=3)
SCRIPTS = {"eagle3": eagle3, "eagle1": eagle1, "medusa": medusa, "draft_lm": draft_lm}


@pytest.mark.parametrize("name", MAKERS)
def test_every_tensor_comes_in_with_its_bits(name, tmp_path):
    drafter = imported(name, tmp_path)
    assert saved.kind_in(tmp_path) == name.split(",")[0]
    held = [t for t in drafter.state_dict().values()]
    theirs = foreign.tensors_in(tmp_path)
    if torch.equal(theirs.get("embed_tokens.weight", OTHERS), EMBEDDINGS):
        assert "embed_tokens.weight" not in drafter.state_dict()  # shared, as without it
        del theirs["embed_tokens.weight"]
    assert len(held) == len(theirs)
    for theirs_name, tensor in theirs.items():
        same = [t for t in held if t.shape == tensor.shape and torch.equal(t, tensor)]
        assert len(same) == 1, theirs_name


@pytest.mark.parametrize("name", MAKERS)
def test_it_drafts_as_it_would_be_trained_and_leaves_the_text_alone(name, tmp_path):
    drafter = imported(name, tmp_path)
    serving = Serving(drafter, texts(2, 20))
    with torch.no_grad():
        for seed, lengths in enumerate([[4, 7], [1, 3], [2, 0]]):
            serving.advance(lengths)
            serving.check(serving.propose(seed, chain(min(3, drafter.max_depth or 3))))
    settings = {"sampling": Sampling(), "drafting": GREEDY, "max_new_tokens": 12}
    (got,) = generate(VERIFIER, drafter, [[5, 9, 11]], shape=chain(3), **settings)
    (alone,) = generate(VERIFIER, None, [[5, 9, 11]], shape=None, **settings)
    assert got.tokens == alone.tokens and sum(got.drafted) > 0


@pytest.mark.parametrize("normed", [False, True])
@torch.no_grad()
def test_the_equations_of_both_residuals_worked_by_hand(normed, tmp_path):
    drafter = load(str(foreign.speculators_eagle3(tmp_path, normed, OTHERS)), VERIFIER)
    assert drafter.feature_layers == (1, 4, 8)
    ids = texts(1, 9)
    batch = batch_of(VERIFIER, ids, drafter.feature_layers)
    expected = eagle3_by_hand(drafter, ids[0].tolist(), batch["features"][0])
    for s, hidden in enumerate(drafter.unroll(batch, 4)):
        for t, output in enumerate(expected[s][: 9 - 2 - s]):
            close(hidden[0, t].double(), output)


@torch.no_grad()
def test_a_bias_of_eagle1_is_added(tmp_path):
    drafter = imported("eagle1, original, bias", tmp_path)
    batch = batch_of(VERIFIER, texts(1, 8))
    (with_bias,) = drafter.unroll(batch, 1)
    drafter.fc.bias.zero_()
    (without,) = drafter.unroll(batch, 1)
    assert (with_bias - without).abs().max() > 0.1


def test_the_original_medusa_is_computed_as_its_paper_says(tmp_path):
    drafter = imported("medusa, original", tmp_path)
    assert (drafter.max_depth, drafter.one_head) == (3, False)  # the file decides, not its config
    theirs = foreign.tensors_in(tmp_path)
    hidden = torch.randn(32)
    for head in range(3):
        x = hidden
        for layer in range(2):
            weight, bias = (theirs[f"{head}.{layer}.linear.{n}"] for n in ("weight", "bias"))
            y = weight @ x + bias
            x = x + y * y.sigmoid()
        close(drafter.logits(drafter.blocks[head](hidden), head), theirs[f"{head}.2.weight"] @ x)


@pytest.mark.parametrize(
    "ids, read",
    [
        ([1, 3, 4], (2, 4, 5)),  # the usual ones, as SGLang and what is trained for it counts them
        ([2, 4, 5], (2, 4, 5)),
        ([1, 4, 8], (1, 4, 8)),
        (None, (2, 4, 5)),
    ],
)
def test_layer_ids_are_read_as_vllm_does_or_as_sglang_where_that_is_sure(ids, read, tmp_path):
    config = {} if ids is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    foreign.original_eagle3(tmp_path, **config)
    assert load(str(tmp_path), VERIFIER).feature_layers == read


def test_scaling_of_positions_in_old_keys_is_followed(tmp_path):
    rope = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    foreign.original_eagle3(tmp_path, rope_theta=5000.0, rope_scaling=rope)
    drafter = load(str(tmp_path), VERIFIER)
    asked = {k: v for k, v in rope.items() if k != "type"}
    wanted = asked | {"rope_type": "llama3", "rope_theta": 5000.0}
    scaled = tiny.verifier(rope_parameters=wanted).decoder.rotary_emb.inv_freq
    assert torch.equal(drafter.rotary.inv_freq, scaled)


# ---- refused -----------------------------------------------------------------------------------


def changed(folder: Path, **config) -> str:
    foreign.original_eagle3(folder, **config)
    return str(folder)


@pytest.mark.parametrize(
    "missing", ["fc.weight", "midlayer.mlp.up_proj.weight", "lm_head.weight", "d2t", "norm.weight"]
)
def test_a_missing_tensor_is_named(missing, tmp_path):
    foreign.original_eagle3(tmp_path)
    tensors = foreign.tensors_in(tmp_path)
    del tensors[missing]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"lacks 1 of its 14 tensors: {missing};") as error:
        load(str(tmp_path), VERIFIER)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"hidden_size": None}, "hidden_size is missing from its config.json"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2 .* have 1 there"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"norm_before_fc": True}, "norm_before_fc is True"),
        (
            {"draft_vocab_size": 15},
            r"lm_head.weight is \[16, 32\], its config.json asks for \[15, 32\]",
        ),
        ({"vocab_size": 80}, "80 tokens; tiny/llama has 32 and 64"),
        ({"speculators_model_type": "dflash"}, "of type 'dflash', which headstart does not read"),
        ({"speculators_model_type": "eagle3"}, "norm_before_residual is missing"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(config, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        load(changed(tmp_path, **config), VERIFIER)
    assert "\n" not in str(error.value)


def test_a_tensor_without_a_place_is_named(tmp_path):
    foreign.original_eagle3(tmp_path)
    tensors = foreign.tensors_in(tmp_path) | {"mask_hidden": torch.zeros(96)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no place for its tensor mask_hidden"):
        load(str(tmp_path), VERIFIER)


def test_a_map_that_is_no_offsets_is_refused(tmp_path):
    foreign.original_eagle3(tmp_path)
    tensors = foreign.tensors_in(tmp_path) | {"d2t": torch.tensor(foreign.IDS)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"d2t, read as offsets.*eval/doctor.py"):
        load(str(tmp_path), VERIFIER)


def test_a_folder_without_weights_or_with_damaged_ones_is_refused(tmp_path):
    foreign.original_eagle3(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"cannot be read .*pytorch_model.bin"):
        load(str(tmp_path), VERIFIER)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"has no weights: none of model\.safetensors"):
        load(str(tmp_path), VERIFIER)


def test_an_ordinary_model_and_a_checkpoint_are_no_imports(tmp_path):
    tiny.save(VERIFIER, tmp_path / "model")
    assert saved.kind_in(tmp_path / "model") is None
    assert isinstance(load(str(tmp_path / "model"), VERIFIER), DraftLM)
    imported("eagle3, original", tmp_path / "theirs").save(tmp_path / "ours")
    assert saved.kind_in(tmp_path / "ours") is None
    assert saved.kind_in(tmp_path / "nowhere") is None


# ---- trained -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_it_is_trained_for_ten_steps_from_where_it_was(name, tmp_path):
    kind = name.split(",")[0]
    verifier = tiny.save(VERIFIER, tmp_path / "verifier")
    MAKERS[name](tmp_path / "theirs")
    before = load(str(tmp_path / "theirs"), VERIFIER)
    script, steps = SCRIPTS[kind], before.max_depth or 2
    data = DataConfig(
        write_conversations(tmp_path / "train.jsonl", 6, seed=1), max_length=64, batch_tokens=128
    )
    training = TrainingConfig(
        str(tmp_path / "run"), max_steps=10, mixed_precision="no", validate_every=0,
        draft_length=steps, learning_rate=1e-3,
    )  # fmt: skip
    AcceleratorState._reset_state()
    script.run(
        script.Recipe(
            data, training, verifier, loss=LossConfig(num_steps=steps),
            init_from=str(tmp_path / "theirs"),
        )
    )  # fmt: skip
    after = load_checkpoint(tmp_path / "run" / "checkpoints" / "step-000010", VERIFIER)
    for weight_name, weight in before.named_parameters():
        trained = after.get_parameter(weight_name)
        assert torch.equal(weight, trained) == (not weight.requires_grad)
        if kind != "eagle3" or weight_name != "lm_head.weight":  # some rows are other ids'
            assert (weight - trained).abs().max() < 0.1  # from there, not from anew
    if kind != "medusa":
        assert after.config.rope_parameters == before.config.rope_parameters
        assert (after.embed_tokens is None) == (before.embed_tokens is None)


def test_a_saved_import_comes_back_bit_by_bit(tmp_path):
    for name in MAKERS:
        drafter = imported(name, tmp_path / name / "theirs")
        drafter.save(tmp_path / name / "ours")
        again = load_checkpoint(tmp_path / name / "ours", VERIFIER)
        assert fingerprint(again) == fingerprint(drafter)
        again.save(tmp_path / name / "again")
        for file in ("config.json", "model.safetensors"):
            first, second = (tmp_path / name / folder / file for folder in ("ours", "again"))
            assert first.read_bytes() == second.read_bytes()


def test_its_draft_vocabulary_makes_room_for_the_data(tmp_path):
    foreign.speculators_eagle3(tmp_path, True, OTHERS)
    counts = ONES.clone()
    counts[44] = 100
    drafter = initial_drafter(str(tmp_path), VERIFIER, LOSS, counts)
    assert 44 in drafter.draft_ids and len(drafter.draft_ids) == 16
    assert torch.equal(drafter.embed_tokens.weight, OTHERS)


OUTLINE = Outline("tiny", 8, 32, 64, 512)


def test_another_kind_than_the_script_trains_is_refused(tmp_path):
    foreign.original_medusa(tmp_path)
    with pytest.raises(ValueError, match="is a drafter of type medusa, this script trains eagle3"):
        check_checkpoint(str(tmp_path), "eagle3", OUTLINE, "init_from")


def test_what_is_wrong_with_it_is_told_before_the_verifier_is_loaded(tmp_path):
    foreign.original_medusa(tmp_path / "medusa")
    assert check_checkpoint(tmp_path / "medusa", "medusa", OUTLINE, "init_from")["num_heads"] == 3
    foreign.original_eagle3(tmp_path / "eagle3")
    other = OUTLINE._replace(vocab_size=65)
    with pytest.raises(ValueError, match=r"init_from.*64 tokens; tiny has 32 and 65"):
        check_checkpoint(tmp_path / "eagle3", "eagle3", other, "init_from")


def test_an_ordinary_model_starts_a_draft_model(tmp_path):
    small = tiny.save(tiny.verifier(num_hidden_layers=2, seed=1), tmp_path / "small")
    assert check_checkpoint(small, "draft_lm", OUTLINE, "init_from") == {}
    drafter = initial_drafter(small, VERIFIER, LOSS, ONES)
    assert isinstance(drafter, DraftLM) and drafter.lm.num_layers == 2
    assert all(weight.requires_grad for weight in drafter.parameters())
