"""EAGLE-3: its equations by hand, serving = training, initialisation, checkpoints, all families."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from by_hand import ROUNDS, VERIFIER, batch_of, eagle3_by_hand, loud, make, rms
from safetensors.torch import load_file, save_file
from served import SAMPLED, Serving, check_comes_back, check_trains_and_drafts, close, texts
from tiny import FAMILIES
from tiny import verifier as tiny_verifier
from torch import Tensor

from headstart.data.rows.collate import collate
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.models.batch import Batch
from headstart.models.drafters.eagle3 import Eagle3Config, check_layers
from headstart.models.loading import load_checkpoint, load_pair
from headstart.models.parts.feature_drafter import State
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import RowRandom, Sampling
from headstart.models.proposal.trees import chain, static
from headstart.models.verifier.cache import RaggedCache
from headstart.models.verifier.verifier import States

VARIANTS = {
    "plain": {},
    "draft vocabulary": {"draft_vocab_size": 40},
    "normed output": {"norm_output": True},
    "normed features": {"fc_norm": True},
    "two layers": {"feature_layers": (1, 8), "norm_output": True, "fc_norm": True},
}


# ---- the equations -----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_unroll_equals_the_equations_worked_by_hand(variant):
    drafter = loud(**VARIANTS[variant])
    batch = batch_of(drafter, texts(1, 9))
    expected = eagle3_by_hand(drafter, batch["input_ids"][0].tolist(), batch["features"][0])
    for got, want in zip(drafter.unroll(batch, 4), expected, strict=True):
        for t, hidden in enumerate(want):
            close(got[0, t].double(), hidden)
    hidden = torch.randn(3, 32)
    want = torch.stack([rms(h, drafter.norm.weight) for h in hidden]) @ drafter.lm_head.weight.T
    close(drafter.logits(hidden, 0), want)


def test_a_slot_sees_features_up_to_itself_of_its_own_document():
    drafter = loud()
    batch = batch_of(drafter, texts(1, 10))
    batch["document_ids"] = torch.tensor([[0] * 4 + [1] * 6])
    batch["features"].requires_grad_()
    for s, hidden in enumerate(drafter.unroll(batch, 3)):
        for t in (2, 7):
            (gradient,) = torch.autograd.grad(
                hidden[0, t].sum(), batch["features"], retain_graph=True
            )
            influence = gradient[0].abs().amax(-1) > 0
            seen = range(3) if t == 2 else range(4, 8)
            assert influence.nonzero()[:, 0].tolist() == list(seen), (s, t)


@torch.no_grad()
def test_slot_t_at_step_s_reads_tokens_up_to_x_t_1_s():
    drafter = loud()
    batch = batch_of(drafter, texts(1, 10))
    before = list(drafter.unroll(batch, 3))
    for changed in range(1, 10):
        ids = batch["input_ids"].clone()
        ids[0, changed] = (ids[0, changed] + 1) % 64
        after = drafter.unroll(Batch(**{**batch, "input_ids": ids}), 3)
        for s, (old, new) in enumerate(zip(before, after, strict=True)):
            differs = (old - new)[0, : 9 - s].abs().amax(-1) > 0  # beyond, slots have no token
            expected = [t + 1 + s >= changed for t in range(9 - s)]
            # slot t sees tokens of slots ≤ t at step 0, and its own at later ones
            assert differs.tolist() == expected, (changed, s)


def test_packed_equals_padded_in_loss_and_gradients():
    drafter = loud(draft_vocab_size=40)
    random = torch.Generator().manual_seed(3)
    rows = []
    for length, begin in [(9, 3), (14, 1), (6, 2), (11, 5), (4, 1)]:
        ids = torch.randint(3, 64, (length,), generator=random).tolist()
        rows.append(Row(ids, [0] * begin + [1] * (length - begin), "row"))
    featurize = Featurizer(VERIFIER, drafter.feature_layers)
    results = []
    for packed in (False, True):
        batch = featurize(collate(rows, 20, packed=packed))
        drafter.zero_grad()
        loss = drafter(batch, torch.tensor([0.04, 0.03, 0.02]))
        loss.value.backward()
        results.append((loss, [weight.grad for weight in drafter.parameters()], batch))
    (padded, padded_grads, wide), (packed, packed_grads, dense) = results
    assert len(wide["input_ids"]) == 5 and len(dense["input_ids"]) < 5
    close(packed.value, padded.value, 1e-5)
    for name, (total, count) in padded.metrics.items():
        close(packed.metrics[name][0], total)
        assert packed.metrics[name][1] == count
    for left, right in zip(packed_grads, padded_grads, strict=True):
        close(left, right, 1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_bfloat16_autocast_is_close_to_float32(packed):
    drafter = loud(draft_vocab_size=40)
    rows = [Row(texts(1, n)[0].tolist(), [0] * 3 + [1] * (n - 3), "row") for n in (9, 14, 6, 11)]
    batch = Featurizer(VERIFIER, drafter.feature_layers)(collate(rows, 20, packed=packed))
    results = []
    for enabled in (False, True):
        drafter.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = drafter(batch, torch.tensor([0.04, 0.03, 0.02]))
        loss.value.backward()
        results.append((loss.value.detach(), drafter.fc.weight.grad))
    (exact, exact_grad), (rounded, rounded_grad) = results
    assert rounded_grad.dtype == torch.float32 and rounded != exact
    close(rounded.float(), exact, 0.02)
    assert (rounded_grad - exact_grad).norm() < 0.05 * exact_grad.norm()


# ---- serving = training ------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_serving_equals_training_over_ragged_rounds(variant):
    serving = Serving(loud(**VARIANTS[variant]), texts(3, 32))
    for seed, lengths in enumerate(ROUNDS):
        serving.advance(lengths)
        serving.check(serving.propose(seed))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_every_node_of_a_tree_is_drafted_as_its_path_would_be(variant):
    serving = Serving(loud(**VARIANTS[variant]), texts(3, 32))
    tree = static(
        [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 1, 0)]
    )
    for seed, lengths in enumerate(ROUNDS[:4]):
        serving.advance(lengths)
        serving.check(serving.propose(seed, tree))
        serving.check(serving.propose(seed))  # and left the state as it was


@torch.no_grad()
def test_serving_equals_training_for_one_row():
    serving = Serving(loud(), texts(1, 32))
    for seed, length in enumerate([5, 1, 6, 2, 1]):
        serving.advance([length])
        serving.check(serving.propose(seed))
    assert not serving.state.cache.has_holes


@torch.no_grad()
def test_a_row_without_news_keeps_its_state():
    serving = Serving(loud(), texts(3, 32))
    for seed, lengths in enumerate([[4, 7, 1], [0, 3, 1], [2, 0, 0], [0, 0, 4], [1, 1, 1]]):
        serving.advance(lengths)
        serving.check(serving.propose(seed))


@torch.no_grad()
def test_one_row_may_come_padded():
    """The lengths say what is real, in a batch of one as in any other."""
    drafter, ids = loud(), texts(1, 12)
    states = drafter.verifier.states(ids, drafter.feature_layers)
    first = drafter.start(ids[:, 0])
    drafter.advance(first, ids[:, 1:9], torch.tensor([5]), States(states.features[:, :8], None))
    other = drafter.start(ids[:, 0])
    drafter.advance(other, ids[:, 1:6], torch.tensor([5]), States(states.features[:, :5], None))
    close(first.output, other.output)
    one, two = (drafter.propose(s, chain(4), SAMPLED, RowRandom(0, [0])) for s in (first, other))
    close(one.log_probs, two.log_probs)


def snapshot(state: State) -> list[Tensor]:
    (layer,) = state.cache.layers
    kept = [state.cache.positions, state.slots, state.output, layer.keys, layer.values]
    return [*(tensor.clone() for tensor in kept), torch.tensor(state.cache.has_holes)]


@torch.no_grad()
def test_propose_leaves_the_state_as_it_was():
    serving = Serving(loud(), texts(3, 32))
    for lengths in ROUNDS[:4]:
        serving.advance(lengths)
        before = snapshot(serving.state)
        proposal = serving.propose(7)
        for old, new in zip(before, snapshot(serving.state), strict=True):
            assert torch.equal(old, new)
        again = serving.propose(7)
        assert torch.equal(proposal.tokens, again.tokens)
        assert torch.equal(proposal.log_probs, again.log_probs)


@torch.no_grad()
def test_rows_of_the_drafters_own_features_that_stay_are_seen(monkeypatch):
    serving = Serving(loud(), texts(3, 32))
    monkeypatch.setattr(RaggedCache, "truncate", lambda *_: None)
    serving.advance(ROUNDS[0])
    serving.check(serving.propose(0))
    serving.advance(ROUNDS[1])
    with pytest.raises(AssertionError):
        serving.check(serving.propose(1))


@torch.no_grad()
def test_after_many_rounds_the_cache_equals_a_fresh_pass():
    serving = Serving(loud(), texts(3, 120))
    random = torch.Generator().manual_seed(5)
    for seed in range(20):
        serving.advance(torch.randint(1, 6, (3,), generator=random).tolist())
        serving.propose(seed)
    fresh = Serving(serving.drafter, serving.ids)
    fresh.advance(serving.slots)
    close(serving.state.output, fresh.state.output)
    assert serving.state.slots.tolist() == fresh.state.slots.tolist() == serving.slots
    for row, slots in enumerate(serving.slots):
        held = []
        for state in (serving.state, fresh.state):
            positions = state.cache.positions[row]
            order = torch.where(positions < 0, 1 << 30, positions).argsort()[:slots]
            assert positions[order].tolist() == list(range(slots))
            layer = state.cache.layers[0]
            held.append((layer.keys[row][:, order], layer.values[row][:, order]))
        for got, want in zip(*held, strict=True):
            close(got, want)


@torch.no_grad()
def test_holes_are_squeezed_out_once_they_are_many():
    serving = Serving(loud(), texts(3, 180))
    for _ in range(25):
        for lengths in ([5, 1, 1], [1, 5, 1], [1, 1, 5]):
            serving.advance(lengths)
        serving.propose(0)
    assert serving.slots == [175] * 3  # 375 slots with the holes
    assert serving.state.cache.positions.shape[1] <= 175 + 64
    serving.check(serving.propose(1, chain(3)))


@torch.no_grad()
def test_rows_can_be_dropped_on_the_way():
    serving = Serving(loud(), texts(3, 32))
    serving.advance(ROUNDS[0])
    serving.advance(ROUNDS[2])
    serving.select_rows([2, 0])
    for seed, lengths in enumerate([[1, 4], [3, 1]]):
        serving.check(serving.propose(seed))
        serving.advance(lengths)
    serving.check(serving.propose(9))


@torch.no_grad()
def test_rows_can_be_dropped_before_the_first_round():
    drafter, ids = loud(), texts(3, 8)
    state = drafter.start(ids[:, 0])
    drafter.select_rows(state, torch.tensor([2]))
    serving = Serving(drafter, ids[2:])
    serving.state = state
    serving.advance([4])
    serving.check(serving.propose(0))


@torch.no_grad()
def test_a_proposal_is_a_chain_of_verifier_ids():
    serving = Serving(loud(draft_vocab_size=40), texts(3, 16))
    serving.advance([4, 7, 1])
    ids = serving.drafter.draft_ids
    for drafting in (SAMPLED, Drafting(False, Sampling())):
        proposal = serving.propose(0, chain(4), drafting)
        assert proposal.tokens.shape == (3, 4) and torch.isin(proposal.tokens, ids).all()
        assert proposal.parents.tolist() == [[-1, 0, 1, 2]] * 3
        assert proposal.real.tolist() == [[True] * 4] * 3
        assert (proposal.log_probs is not None) == drafting.sampled
        if drafting.sampled:
            assert torch.equal(proposal.vocabulary, ids) and proposal.log_probs.shape == (3, 4, 40)
    logits = serving.drafter.logits(serving.state.output, 0)
    assert torch.equal(proposal.tokens[:, 0], ids[logits.argmax(-1)])


# ---- making one --------------------------------------------------------------------------------


def test_it_starts_from_the_verifiers_last_layer():
    drafter = make(draft_vocab_size=40)
    last = dict(VERIFIER.layers[-1].named_parameters())
    for name in "qkv":
        weight = drafter.midlayer.self_attn.get_parameter(f"{name}_proj.weight")
        assert torch.equal(weight[:, 32:], last[f"self_attn.{name}_proj.weight"])
        assert 0 < weight[:, :32].std() < 0.03  # the embedding half: small and random
    assert torch.equal(drafter.midlayer.hidden_norm.weight, last["input_layernorm.weight"])
    for name in ("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj"):
        assert torch.equal(drafter.midlayer.get_parameter(f"{name}.weight"), last[f"{name}.weight"])
    assert torch.equal(drafter.norm.weight, VERIFIER.decoder.norm.weight)
    assert torch.equal(drafter.lm_head.weight, VERIFIER.head.weight[drafter.draft_ids])
    noise = drafter.fc.weight[:, 64:] - torch.eye(32)
    assert drafter.fc.weight.shape == (32, 96) and noise.abs().max() < 0.15
    assert drafter.fc.weight[:, :64].abs().max() < 0.15


def test_a_layer_of_another_shape_gives_random_weights_and_says_so(capsys):
    make(tiny_verifier("qwen3"))
    assert "another shape" in capsys.readouterr().out
    make()
    assert capsys.readouterr().out == ""


def test_a_layer_of_another_arithmetic_gives_random_weights_and_says_so(monkeypatch, capsys):
    """Gemma's tensors have Llama's names and shapes, but its norms add one and its MLP is GELU."""
    monkeypatch.setitem(FAMILIES, "gemma", {"hidden_act": "gelu_pytorch_tanh"})
    drafter = make(tiny_verifier("gemma"))
    assert "random weights" in capsys.readouterr().out
    assert (drafter.midlayer.hidden_norm.weight == 1).all() and (drafter.norm.weight == 1).all()


def test_random_takes_only_the_heads_rows():
    drafter = make(init="random")
    assert torch.equal(drafter.lm_head.weight, VERIFIER.head.weight)
    assert drafter.midlayer.self_attn.q_proj.weight.std() < 0.03
    assert drafter.fc.weight.abs().max() < 0.15


def test_verifier_weights_are_neither_trained_nor_parameters():
    drafter = make()
    assert not {id(p) for p in drafter.parameters()} & {id(p) for p in VERIFIER.model.parameters()}
    drafter(batch_of(drafter, texts(1, 8)), torch.ones(3)).value.backward()
    assert all(p.grad is None for p in VERIFIER.model.parameters())
    assert all(p.grad is not None for p in drafter.parameters())


def test_default_layers_are_2_half_and_n_minus_3():
    assert check_layers(None, 30) == (2, 15, 27)
    assert check_layers(None, 7) == (2, 3, 4)
    assert check_layers([3, 8], 8) == (3, 8)


@pytest.mark.parametrize(
    "layers, count, message",
    [
        (None, 6, r"the default .* needs a verifier of 7 layers or more, this one has 6; pass ids"),
        ((0, 3), 8, r"in 1 … 8, got \[0, 3\]"),
        ((2, 9), 8, r"in 1 … 8, got \[2, 9\]"),
        ((5, 2), 8, r"ascending ids in 1 … 8, got \[5, 2\]"),
        ((2, 2), 8, r"distinct, .* got \[2, 2\]"),
        ((), 8, r"got \[\]"),
    ],
)
def test_layers_that_cannot_be_are_refused(layers, count, message):
    with pytest.raises(ValueError, match=f"drafter.feature_layers.*{message}"):
        check_layers(layers, count)


@pytest.mark.parametrize("size", [65, 1000])
def test_a_draft_vocabulary_outside_of_the_verifiers_is_refused(size):
    with pytest.raises(ValueError, match=f"draft_vocab_size must be in 1 … 64 .* got {size}"):
        make(draft_vocab_size=size)


@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_draft_vocabulary_is_refused_before_there_is_a_verifier(size):
    with pytest.raises(ValueError, match=rf"draft_vocab_size must be 1 or more, got {size}"):
        Eagle3Config(draft_vocab_size=size)


def test_an_unknown_initialisation_is_refused():
    with pytest.raises(ValueError, match=r"drafter.init must be verifier or random, got 'zero'"):
        Eagle3Config(init="zero")


# ---- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_drafter_comes_back_bit_by_bit(variant, tmp_path):
    check_comes_back(loud(**VARIANTS[variant]), tmp_path)


def test_tensors_have_the_names_and_shapes_engines_load(tmp_path):
    make(draft_vocab_size=40, fc_norm=True).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "fc.weight": (32, 96),
        "fc_norm.0.weight": (32,),
        "fc_norm.1.weight": (32,),
        "fc_norm.2.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
        "norm.weight": (32,),
        "lm_head.weight": (40, 32),
        "d2t": (40,),
        "t2d": (64,),
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    ids = make(draft_vocab_size=40).draft_ids
    assert torch.equal(tensors["d2t"] + torch.arange(40), ids)  # offsets, not ids
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()


def test_without_a_draft_vocabulary_there_is_no_map(tmp_path):
    make().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not {"d2t", "t2d", "embed_tokens.weight"} & tensors.keys()
    assert tensors["lm_head.weight"].shape == (64, 32)


def test_config_says_what_engines_read(tmp_path):
    make(draft_vocab_size=40).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "draft_vocab_size": 40,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "norm_before_residual": False,
        "norm_output": False,
        "fc_norm": False,
        "num_aux_hidden_states": 3,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
        "rms_norm_eps": VERIFIER.config.rms_norm_eps,
        "rope_parameters": VERIFIER.config.rope_parameters,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "use_aux_hidden_state": True,
        },
    }
    assert {key: config.get(key) for key in expected} == expected
    assert config["headstart"] == {
        "type": "eagle3",
        "verifier": "tiny/llama",
        "fingerprint": VERIFIER.fingerprint(),
    }


def test_scaled_positions_of_the_verifier_are_kept(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
            "original_max_position_embeddings": 128}  # fmt: skip
    verifier = tiny_verifier(rope_parameters=rope)
    drafter = make(verifier)
    drafter.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert rope.items() <= config["rope_parameters"].items()
    ours, theirs = drafter.rotary.inv_freq, verifier.decoder.rotary_emb.inv_freq
    assert torch.equal(ours, theirs)
    assert torch.equal(load_checkpoint(tmp_path, verifier).rotary.inv_freq, theirs)


def test_a_drafter_of_another_verifier_is_refused_unless_allowed(tmp_path):
    make(draft_vocab_size=40).save(tmp_path)
    other = tiny_verifier(seed=1)
    with pytest.raises(ValueError, match=r"was trained for tiny/llama .*--allow_verifier") as error:
        load_checkpoint(tmp_path, other)
    assert "\n" not in str(error.value) and VERIFIER.fingerprint() in str(error.value)
    assert load_checkpoint(tmp_path, other, allow_verifier=True).verifier is other


@pytest.mark.parametrize("overrides", [{"vocab_size": 48}, {"hidden_size": 64}])
def test_a_verifier_of_another_shape_is_refused_even_when_allowed(tmp_path, overrides):
    make(draft_vocab_size=40).save(tmp_path)
    other = tiny_verifier(**overrides)
    with pytest.raises(ValueError, match="hidden size 32 and 64 tokens") as error:
        load_checkpoint(tmp_path, other, allow_verifier=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [None, "{", "{}", "[]", '{"headstart": 3}', '{"headstart": {"type": "eagle3"}}'],
)
def test_a_folder_that_is_no_checkpoint_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="is not a checkpoint of headstart") as error:
        load_checkpoint(tmp_path, VERIFIER)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_a_checkpoint_whose_weights_are_damaged_is_refused(damage, tmp_path):
    make().save(tmp_path)
    weights: Path = tmp_path / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:2000])
    else:
        make(fc_norm=True).save(tmp_path / "other")
        weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"model.safetensors") as error:
        load_checkpoint(tmp_path, VERIFIER)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    make().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {
        name: t for name, t in tensors.items() if ".mlp." not in name and name != "fc.weight"
    }
    tensors |= {"extra": torch.zeros(1), "norm.weight": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        load_checkpoint(tmp_path, VERIFIER)
    said = (
        "it lacks 4 tensors (fc.weight, midlayer.mlp.down_proj.weight, "
        "midlayer.mlp.gate_proj.weight, …), it has beyond that 1 tensor (extra), of another shape "
        "1 tensor (norm.weight); use another checkpoint"
    )
    assert str(error.value).endswith(said)


def test_a_runs_folder_is_answered_with_a_checkpoint_in_it(tmp_path):
    for name in ("best", "checkpoints/step-000005", "checkpoints/step-000010"):
        make().save(tmp_path / name)
    for name in ("best", "checkpoints/step-000010"):
        with pytest.raises(ValueError, match=rf"; did you mean '{tmp_path / name}'\?$"):
            load_pair(None, str(tmp_path), "float32", "cpu")
        shutil.rmtree(tmp_path / "best", ignore_errors=True)


def test_a_drafter_of_an_unknown_type_is_refused(tmp_path):
    make().save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["headstart"]["type"] = "eagle9"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"type 'eagle9'.*eagle3"):
        load_checkpoint(tmp_path, VERIFIER)


# ---- all families ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_drafted_for(family, tmp_path):
    check_trains_and_drafts(make(tiny_verifier(family), draft_vocab_size=40), tmp_path)
