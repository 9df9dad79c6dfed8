"""Medusa-1: its equations by hand, serving = training, what is learned, checkpoints, families."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from served import (
    COUNTS,
    GREEDY,
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
from headstart.models.drafters.medusa import Medusa, MedusaConfig
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import Dynamic, chain
from headstart.train.run.checkpoint import model_card
from headstart.train.run.start import check_depths

VERIFIER = tiny_verifier()
VARIANTS = {
    "shared": {},
    "shared, draft vocabulary": {"draft_vocab_size": 40, "num_layers": 2},
    "own": {"shared_projection": False, "num_layers": 2},
    "own, draft vocabulary": {"shared_projection": False, "draft_vocab_size": 40},
}


def make(verifier=VERIFIER, num_heads: int = 4, **settings) -> Medusa:
    loss = LossConfig(num_steps=num_heads)
    return Medusa.create(verifier, MedusaConfig(**settings), loss, COUNTS)


# ---- the equations -----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_unroll_equals_the_equations_worked_by_hand(variant):
    drafter = loud(make(**VARIANTS[variant]))
    batch = batch_of(VERIFIER, texts(2, 9))
    w = {name: tensor.double() for name, tensor in drafter.file_tensors().items()}
    for s, got in enumerate(drafter.unroll(batch, 4)):
        projection = w["lm_head.weight" if drafter.one_head else f"lm_heads.{s}.weight"]
        assert projection.shape == (40 if "vocabulary" in variant else 64, 32)
        for row in range(2):
            for t in range(9):
                x = batch["last_hidden"][row, t].double()
                for j in range(drafter.config.num_hidden_layers):
                    name = f"blocks.{s}.layers.{j}"
                    z = w[f"{name}.weight"] @ x + w[f"{name}.bias"]
                    x = x + z / (1 + (-z).exp())
                close(got[row, t].double(), x)
                close(drafter.logits(got[row, t], s).double(), projection @ x)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_head_starts_as_the_verifiers_own_guess(family, variant):
    """Its scaling and capping in; where there is a draft vocabulary, of its tokens."""
    verifier = tiny_verifier(family)
    drafter = make(verifier, **VARIANTS[variant])
    batch = batch_of(verifier, texts(1, 6))
    expected = verifier.logits(batch["last_hidden"], drafter.draft_ids)
    for s, hidden in enumerate(drafter.unroll(batch, 4)):
        assert torch.equal(hidden, batch["last_hidden"])
        close(drafter.logits(hidden, s), expected, 1e-6)


def test_the_rows_of_a_shared_projection_are_gathered_once(monkeypatch):
    drafter = make(draft_vocab_size=40)
    hidden = torch.randn(3, 32)
    expected = VERIFIER.logits(hidden, drafter.draft_ids)
    monkeypatch.setattr(type(VERIFIER), "head_rows", None)
    assert torch.equal(drafter.logits(hidden, 2), expected)


def test_no_two_blocks_are_one_module():
    """The original trainer repeated one block in a list."""
    drafter = loud(make(num_layers=3))
    layers = [layer for blocks in drafter.blocks for layer in blocks.layers]
    assert len({id(layer) for layer in layers}) == len(layers) == 12
    check_every_layer_learns_by_itself(drafter, layers)


def test_each_head_learns_from_its_own_step_alone():
    drafter = loud(make(shared_projection=False))
    batch = batch_of(VERIFIER, texts(2, 12))
    for s in range(4):
        drafter.zero_grad()
        weights = torch.zeros(4).index_fill(0, torch.tensor([s]), 0.1)
        drafter(batch, weights).value.backward()
        for name, weight in drafter.named_parameters():
            assert (weight.grad.abs().max() > 0) == (name.split(".")[1] == str(s)), (s, name)


@pytest.mark.parametrize("shared", [True, False])
def test_prompts_are_not_supervised(shared):
    check_prompts_are_not_learned(loud(make(shared_projection=shared)))


def test_verifier_weights_are_neither_trained_nor_saved():
    drafter = make(draft_vocab_size=40)
    assert {name.split(".")[0] for name in drafter.state_dict()} == {"blocks", "token_map"}
    drafter(batch_of(VERIFIER, texts(1, 8)), torch.ones(4)).value.backward()
    assert all(p.grad is None for p in VERIFIER.model.parameters())
    assert all(p.grad is not None for p in drafter.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_bfloat16_verifier_gives_close_gradients(variant):
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        verifier = tiny_verifier()
        verifier.model.to(dtype)
        drafter = loud(make(verifier, **VARIANTS[variant]))
        drafter(batch_of(verifier, texts(2, 12)), torch.full((4,), 0.05)).value.backward()
        results.append(drafter.blocks[1].layers[0].weight.grad)
    exact, rounded = results
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()


# ---- serving = training ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [chain(4), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_serving_equals_training_over_ragged_rounds(variant, shape):
    check_rounds(loud(make(**VARIANTS[variant])), shape)


@torch.no_grad()
def test_a_dynamic_tree_holds_the_likeliest_products():
    """Heads see no draft, so a path's probability is a product of fixed laws, one a depth."""
    drafter = loud(make(draft_vocab_size=40))
    batch = batch_of(VERIFIER, texts(1, 6))
    state = drafter.start(batch["input_ids"][:, 0])
    drafter.advance(
        state, batch["input_ids"][:, 1:], torch.tensor([5]), VERIFIER.states(texts(1, 6)[:, :5])
    )
    laws = [drafter.logits(h[0, 4], s).softmax(-1) for s, h in enumerate(drafter.unroll(batch, 4))]
    proposal = drafter.propose(state, Dynamic(3, 3, 9), GREEDY, None)
    values: list[float] = []
    for token, parent in zip(proposal.tokens[0], proposal.parents[0].tolist(), strict=True):
        depth, above = 0, parent
        while above >= 0:
            depth, above = depth + 1, int(proposal.parents[0, above])
        column = drafter.draft_ids.tolist().index(int(token))
        values.append(float(laws[depth][column]) * (1.0 if parent < 0 else values[parent]))
    one, two, three = (law.topk(3).values.tolist() for law in laws[:3])
    pairs = sorted((a * b for a in one for b in two), reverse=True)
    pool = one + pairs + [a * b for a in pairs[:3] for b in three]
    assert sorted(values) == pytest.approx(sorted(pool)[-9:])


def test_rows_can_be_dropped_before_the_first_round():
    drafter = make()
    state = drafter.start(torch.tensor([3, 4, 5]))
    drafter.select_rows(state, torch.tensor([2]))


def test_more_drafts_in_a_row_than_heads_are_refused():
    drafter = make(num_heads=3)
    settings = {"sampling": Sampling(), "drafting": GREEDY, "max_new_tokens": 8}
    for shape in (chain(4), Dynamic(5, 2, 8)):
        with pytest.raises(ValueError, match=r"makes 3 drafts in a row at most; pass 3") as error:
            generate(VERIFIER, drafter, [[5, 9]], shape=shape, **settings)
        assert "\n" not in str(error.value)
    generate(VERIFIER, drafter, [[5, 9]], shape=chain(3), **settings)
    with pytest.raises(ValueError, match=r"training.draft_length is 4, but this drafter makes 3"):
        check_depths(drafter.max_depth, 4, LossConfig(num_steps=3))
    with pytest.raises(ValueError, match=r"loss.num_steps is 4, but this drafter makes 3"):
        check_depths(drafter.max_depth, 3, LossConfig(num_steps=4))
    with pytest.raises(ValueError, match=r"loss.num_steps is 2, but this drafter has 3 heads"):
        check_depths(drafter.max_depth, 2, LossConfig(num_steps=2))


# ---- replay = decoding -------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["shared", "own, draft vocabulary"])
def test_replay_equals_decoding_at_temperature_zero(variant):
    check_replay(Medusa, MedusaConfig(**VARIANTS[variant]))


# ---- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_drafter_comes_back_bit_by_bit(variant, tmp_path):
    check_comes_back(loud(make(**VARIANTS[variant])), tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_folder_has_the_names_shapes_and_settings_engines_load(variant, tmp_path):
    settings = VARIANTS[variant]
    drafter = make(num_heads=3, **settings)
    drafter.save(tmp_path)
    layers, size = settings.get("num_layers", 1), settings.get("draft_vocab_size")
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        for layer in range(layers):
            expected[f"blocks.{head}.layers.{layer}.weight"] = (32, 32)
            expected[f"blocks.{head}.layers.{layer}.bias"] = (32,)
        if not drafter.one_head:
            expected[f"lm_heads.{head}.weight"] = (size or 64, 32)
    if drafter.one_head:
        expected["lm_head.weight"] = (size or 64, 32)
    if size:
        expected["token_map"] = (size,)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    if size:
        assert tensors["token_map"].dtype == torch.int64
        assert torch.equal(tensors["token_map"], drafter.draft_ids)  # ids, not offsets
    if drafter.one_head:
        rows = VERIFIER.head.weight
        rows = rows if drafter.draft_ids is None else rows[drafter.draft_ids]
        assert torch.equal(tensors["lm_head.weight"], rows)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": 64,
        "num_heads": 3,
        "num_hidden_layers": layers,
        "medusa_fc_bias": True,
        "original_lm_head": drafter.one_head,
        "torch_dtype": "float32",
    }
    assert {key: config.get(key) for key in settings} == settings
    assert config.get("truncated_vocab_size") == size
    # vLLM takes any key with num and heads, or num and layers, for these two
    counted = {key for key in config if "num" in key and ("heads" in key or "layers" in key)}
    assert counted == {"num_heads", "num_hidden_layers"}
    assert config["headstart"] == {
        "type": "medusa",
        "verifier": "tiny/llama",
        "fingerprint": VERIFIER.fingerprint(),
    }


def test_the_card_asks_for_no_more_drafts_than_there_are_heads():
    """vLLM would run heads that have no weights."""
    for heads, drafts in ((1, 1), (4, 2)):
        state = {"step": 1, "tokens": 2, "validation": None}
        card = model_card({"verifier": "v"}, state, make(num_heads=heads))
        assert (
            f'"method": "medusa", "model": "THIS-FOLDER", "num_speculative_tokens": {drafts}'
            in card
        )


def test_the_card_serves_what_vllm_loads():
    """A draft vocabulary needs an option, and heads of their own over one are not loaded."""
    state = {"step": 1, "tokens": 2, "validation": None}
    option = "--model-loader-extra-config"
    assert option not in model_card({"verifier": "v"}, state, make())
    assert option in model_card({"verifier": "v"}, state, make(draft_vocab_size=40))
    own = make(draft_vocab_size=40, shared_projection=False)
    assert "No engine loads this kind" in model_card({"verifier": "v"}, state, own)


def test_a_drafter_of_a_rounded_copy_of_the_verifier_is_its_own(tmp_path):
    """One checkpoint read in bfloat16 and in float32 has one fingerprint, and one head."""
    make(draft_vocab_size=40).save(tmp_path)
    rounded = tiny_verifier()
    rounded.model.bfloat16()
    assert load_checkpoint(tmp_path, rounded).one_head


@pytest.mark.parametrize("size", [None, 40])
def test_another_verifiers_drafter_takes_this_ones_head(size, tmp_path):
    """Where it is allowed: a start for a tuned verifier, say; saved again, it is this one's."""
    loud(make(draft_vocab_size=size)).save(tmp_path / "first")
    other = tiny_verifier(seed=1)
    with pytest.raises(ValueError, match=r"was trained for tiny/llama .*--allow_verifier") as error:
        load_checkpoint(tmp_path / "first", other)
    assert "\n" not in str(error.value)
    drafter = load_checkpoint(tmp_path / "first", other, allow_verifier=True)
    hidden = torch.randn(2, 32)
    close(drafter.logits(hidden, 0), other.logits(hidden, drafter.draft_ids))
    drafter.save(tmp_path / "second")
    assert load_checkpoint(tmp_path / "second", other).verifier is other


@pytest.mark.parametrize("overrides", [{"vocab_size": 48}, {"hidden_size": 64}])
def test_a_verifier_of_another_shape_is_refused_even_when_allowed(tmp_path, overrides):
    check_another_shape_is_refused(make(draft_vocab_size=40), overrides, tmp_path)


@pytest.mark.parametrize(
    "damage", ["missing", "cut", "heads", "map", "ids", "projection", "row", "width"]
)
def test_a_checkpoint_whose_weights_are_damaged_is_refused(damage, tmp_path):
    make(draft_vocab_size=40).save(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    if damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:700])
    elif damage == "heads":
        make(num_heads=3, draft_vocab_size=40).save(tmp_path / "other")
        shutil.copy(tmp_path / "other" / "model.safetensors", weights)
    else:
        if damage == "map":
            del tensors["token_map"]
        elif damage == "ids":
            tensors["token_map"] -= 5
        elif damage == "projection":
            del tensors["lm_head.weight"]
        elif damage == "row":
            tensors["lm_head.weight"][7, 3] += 0.5
        else:
            tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :30].contiguous()
        save_file(tensors, weights)
    with pytest.raises(ValueError, match=r"model.safetensors") as error:
        load_checkpoint(tmp_path, VERIFIER)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


# ---- making one --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [65, 1000])
def test_a_draft_vocabulary_outside_of_the_verifiers_is_refused(size):
    with pytest.raises(ValueError, match=f"draft_vocab_size must be in 1 … 64 .* got {size}"):
        make(draft_vocab_size=size)


@pytest.mark.parametrize("field", ["num_layers", "draft_vocab_size"])
def test_settings_that_no_verifier_could_take_are_refused_at_once(field):
    with pytest.raises(ValueError, match=rf"drafter.{field} must be 1 or more, got 0"):
        MedusaConfig(**{field: 0})


def test_an_output_head_with_a_bias_is_not_shared():
    """The format has no place for it: engines would draft by another law than was trained."""
    verifier = tiny_verifier()
    verifier.head.bias = torch.nn.Parameter(torch.ones(64), requires_grad=False)
    with pytest.raises(ValueError, match=r"drafter.shared_projection: .* has a bias.*pass false"):
        make(verifier)
    assert not make(verifier, shared_projection=False).one_head


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_drafted_for(family, tmp_path):
    check_trains_and_drafts(make(tiny_verifier(family), draft_vocab_size=40), tmp_path)


# ---- another vocabulary ------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_with_another_vocabulary_the_rows_of_known_ids_stay(shared):
    before = loud(make(shared_projection=shared, draft_vocab_size=40))
    old = before.draft_ids.tolist()
    new = sorted(old[:30] + [i for i in range(64) if i not in old][:10])
    after = before.with_vocabulary(torch.tensor(new))
    assert after.draft_ids.tolist() == new
    for name, weight in before.named_parameters():
        assert name.startswith("lm_heads") or torch.equal(weight, after.get_parameter(name))
    hidden = torch.randn(3, 32)
    left, right = before.logits(hidden, 1), after.logits(hidden, 1)
    for token in old[:30]:
        close(left[:, old.index(token)], right[:, new.index(token)])
    fresh = next(token for token in new if token not in old)
    close(right[:, new.index(fresh)], VERIFIER.logits(hidden)[:, fresh])
