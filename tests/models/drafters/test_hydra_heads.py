"""Hydra heads: their equations by hand, serving = training, what is learned, checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file
from served import (
    COUNTS,
    GREEDY,
    SAMPLED,
    TREE,
    batch_of,
    check_another_shape_is_refused,
    check_comes_back,
    check_every_layer_learns_by_itself,
    check_prompts_are_not_learned,
    check_replay,
    check_rounds,
    check_trains_and_drafts,
    close,
    loud,
    texts,
)
from tiny import FAMILIES
from tiny import verifier as tiny_verifier

from headstart.eval.decoding.speculate import generate
from headstart.models.batch import Batch
from headstart.models.drafters.hydra_heads import HydraHeads, HydraHeadsConfig
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig
from headstart.models.proposal.sampling import RowRandom, Sampling
from headstart.models.proposal.trees import chain, static
from headstart.train.run.checkpoint import model_card

VERIFIER = tiny_verifier()
VARIANTS = {
    "shared": {},
    "shared, draft vocabulary": {"draft_vocab_size": 40, "num_layers": 3},
    "own, draft vocabulary": {"shared_projection": False, "draft_vocab_size": 40, "num_layers": 2},
}


def make(verifier=VERIFIER, num_heads: int = 4, **settings) -> HydraHeads:
    loss = LossConfig(num_steps=num_heads)
    return HydraHeads.create(verifier, HydraHeadsConfig(**settings), loss, COUNTS)


# ---- the equations -----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_unroll_equals_the_equations_worked_by_hand(variant):
    drafter = loud(make(**VARIANTS[variant]))
    batch = batch_of(VERIFIER, texts(2, 9))
    w = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    embedding = VERIFIER.model.get_input_embeddings().weight.double()
    shared = drafter.verifier_rows().double()
    for s, got in enumerate(drafter.unroll(batch, 4)):
        projection = shared if drafter.one_head else w[f"lm_heads.{s}.weight"]
        assert w[f"heads.{s}.entry.weight"].shape == (32, (s + 2) * 32)
        for row in range(2):
            ids = batch["input_ids"][row].tolist()
            for t in range(9 - 1 - s):  # beyond, slots have no token
                h = batch["last_hidden"][row, t].double()
                read = torch.cat([h, *(embedding[ids[t + 1 + i]] for i in range(s + 1))])
                z = w[f"heads.{s}.entry.weight"] @ read + w[f"heads.{s}.entry.bias"]
                x = h + z / (1 + (-z).exp())
                for j in range(drafter.config.num_hidden_layers - 1):
                    name = f"heads.{s}.blocks.layers.{j}"
                    z = w[f"{name}.weight"] @ x + w[f"{name}.bias"]
                    x = x + z / (1 + (-z).exp())
                close(got[row, t].double(), x)
                close(drafter.logits(got[row, t], s).double(), projection @ x)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_head_starts_as_the_verifiers_own_guess(family):
    verifier = tiny_verifier(family)
    drafter = make(verifier, draft_vocab_size=40, num_layers=2)
    batch = batch_of(verifier, texts(1, 6))
    for s, hidden in enumerate(drafter.unroll(batch, 4)):
        assert torch.equal(hidden, batch["last_hidden"])
        expected = verifier.logits(hidden, drafter.draft_ids)
        close(drafter.logits(hidden, s), expected, 1e-6)


@torch.no_grad()
def test_slot_t_at_step_s_reads_h_t_and_tokens_up_to_x_t_1_s():
    drafter = loud(make())
    batch = batch_of(VERIFIER, texts(1, 10))
    before = list(drafter.unroll(batch, 4))
    for changed in range(10):
        ids, hidden = batch["input_ids"].clone(), batch["last_hidden"].clone()
        ids[0, changed] = (ids[0, changed] + 1) % 64
        for s, new in enumerate(drafter.unroll(Batch(**{**batch, "input_ids": ids}), 4)):
            differs = (before[s] - new)[0, : 9 - s].abs().amax(-1) > 0
            assert differs.tolist() == [t < changed <= t + 1 + s for t in range(9 - s)]
        hidden[0, changed] += 1
        for s, new in enumerate(drafter.unroll(Batch(**{**batch, "last_hidden": hidden}), 4)):
            differs = (before[s] - new)[0].abs().amax(-1) > 0
            assert differs.tolist() == [t == changed for t in range(10)]


def test_no_two_layers_are_one_module():
    drafter = loud(make(num_layers=3))
    layers = [module for module in drafter.modules() if isinstance(module, torch.nn.Linear)]
    assert len(layers) == 12
    check_every_layer_learns_by_itself(drafter, layers)


@pytest.mark.parametrize("shared", [True, False])
def test_prompts_are_not_supervised(shared):
    check_prompts_are_not_learned(loud(make(shared_projection=shared)))


def test_verifier_weights_are_neither_trained_nor_saved():
    drafter = make(draft_vocab_size=40)
    assert {name.split(".")[0] for name in drafter.file_tensors()} == {"heads", "token_map"}
    drafter(batch_of(VERIFIER, texts(1, 8)), torch.ones(4)).value.backward()
    assert all(p.grad is None for p in VERIFIER.model.parameters())
    assert all(p.grad is not None for p in drafter.parameters())


# ---- serving = training ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [chain(4), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_serving_equals_training_over_ragged_rounds(variant, shape):
    check_rounds(loud(make(**VARIANTS[variant])), shape)


@torch.no_grad()
def test_nodes_of_one_depth_have_laws_of_their_own():
    """Medusa's have not."""
    drafter, ids = loud(make()), texts(1, 6)
    state = drafter.start(ids[:, 0])
    drafter.advance(state, ids[:, 1:], torch.tensor([5]), VERIFIER.states(ids[:, :5]))
    tree = static([(0,), (1,), (0, 0), (1, 0)])
    proposal = drafter.propose(state, tree, SAMPLED, RowRandom(0, [0]))
    assert (proposal.log_probs[0, 2] - proposal.log_probs[0, 3]).abs().max() > 0.1


def test_more_drafts_in_a_row_than_heads_are_refused():
    settings = {"sampling": Sampling(), "drafting": GREEDY, "max_new_tokens": 8}
    with pytest.raises(ValueError, match=r"makes 3 drafts in a row at most; pass 3") as error:
        generate(VERIFIER, make(num_heads=3), [[5, 9]], shape=chain(4), **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("variant", ["shared", "own, draft vocabulary"])
def test_replay_equals_decoding_at_temperature_zero(variant):
    check_replay(HydraHeads, HydraHeadsConfig(**VARIANTS[variant]))


# ---- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_drafter_comes_back_bit_by_bit(variant, tmp_path):
    check_comes_back(loud(make(**VARIANTS[variant])), tmp_path)


def test_the_folder_says_what_it_is_and_that_no_engine_loads_it(tmp_path):
    drafter = make(num_heads=2, draft_vocab_size=40, num_layers=2)
    drafter.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "heads.0.entry.weight": (32, 64),
        "heads.0.entry.bias": (32,),
        "heads.0.blocks.layers.0.weight": (32, 32),
        "heads.0.blocks.layers.0.bias": (32,),
        "heads.1.entry.weight": (32, 96),
        "heads.1.entry.bias": (32,),
        "heads.1.blocks.layers.0.weight": (32, 32),
        "heads.1.blocks.layers.0.bias": (32,),
        "token_map": (40,),
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["HydraHeads"], "hydra_heads")
    assert config["headstart"]["type"] == "hydra_heads" and config["num_heads"] == 2
    card = model_card({}, {"step": 1, "tokens": 2, "validation": None}, drafter)
    assert "No engine loads this kind of drafter" in card and "vllm" not in card


def test_a_drafter_of_another_verifier_is_refused_unless_allowed(tmp_path):
    make(draft_vocab_size=40).save(tmp_path / "first")
    other = tiny_verifier(seed=1)
    with pytest.raises(ValueError, match=r"was trained for tiny/llama .*--allow_verifier") as error:
        load_checkpoint(tmp_path / "first", other)
    assert "\n" not in str(error.value)
    drafter = load_checkpoint(tmp_path / "first", other, allow_verifier=True)
    drafter.save(tmp_path / "second")
    assert load_checkpoint(tmp_path / "second", other).verifier is other


@pytest.mark.parametrize("overrides", [{"vocab_size": 48}, {"hidden_size": 64}])
def test_a_verifier_of_another_shape_is_refused_even_when_allowed(tmp_path, overrides):
    check_another_shape_is_refused(make(draft_vocab_size=40), overrides, tmp_path)


@pytest.mark.parametrize("damage", ["missing", "cut", "heads", "map"])
def test_a_checkpoint_whose_weights_are_damaged_is_refused(damage, tmp_path):
    make(draft_vocab_size=40).save(tmp_path)
    weights = tmp_path / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:700])
    else:
        settings = {"num_heads": 3, "draft_vocab_size": 40} if damage == "heads" else {}
        make(**settings).save(tmp_path / "other")
        weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"model.safetensors") as error:
        load_checkpoint(tmp_path, VERIFIER)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_drafted_for(family, tmp_path):
    check_trains_and_drafts(
        make(tiny_verifier(family), draft_vocab_size=40, num_layers=2), tmp_path
    )
