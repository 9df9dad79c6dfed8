"""Medusa-2: the loss by hand, what is trained when, checkpoints, and the report on what moved."""

import json
import random
from pathlib import Path

import pytest
import tiny
import torch
from tiny_run import batch as random_batch
from torch import Tensor

from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.eval.measures.quality import Quality, compare_verifiers
from headstart.models.batch import Batch, supervised
from headstart.models.drafters.medusa import Medusa, MedusaConfig
from headstart.models.joint.lora import ADAPTER, JointConfig, JointModel, linear_layers, tune
from headstart.models.loading import load, load_pair
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier
from headstart.train.run.checkpoint import model_card
from headstart.train.run.start import initial_drafter

LOSS = LossConfig(num_steps=2)


def make(verifier: Verifier, **settings) -> JointModel:
    torch.manual_seed(0)
    drafter = Medusa.create(verifier, MedusaConfig(), LOSS, torch.ones(64))
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.normal_(0, 0.2)
    return JointModel(drafter, JointConfig(**({"rank": 2} | settings)))


def moved(verifier: Verifier, **settings) -> JointModel:
    """With an adapter that has been trained."""
    model = make(verifier, **settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.adapter:
            weight.normal_(0, 0.1)
    return model


def featurized(model: JointModel, given: Batch) -> Batch:
    return model.original(Featurizer(model.verifier, ()))(given)


def test_the_teacher_is_the_verifier_as_it_was():
    given = random_batch(2)
    original = tiny.verifier().states(given["input_ids"]).last_hidden
    model = moved(tiny.verifier())
    batch = featurized(model, given)
    torch.testing.assert_close(batch["last_hidden"], original)
    tuned = model.verifier.states(given["input_ids"]).last_hidden
    assert (tuned - original).abs().max() > 0.1


def test_loss_is_the_verifiers_own_and_the_heads_worked_out_slot_by_slot():
    model = moved(tiny.verifier())
    batch = featurized(model, random_batch(2, seed=3))
    weights = torch.tensor([0.05, 0.03, 0.02])
    verifier = model.verifier
    with torch.no_grad():
        tuned = verifier.states(batch["input_ids"]).last_hidden
        head = verifier.head.weight.double()
        total, turns = torch.zeros((), dtype=torch.double), batch["loss_mask"]
        for row in range(2):
            for t in range(turns.shape[1] - 1):
                for step in (-1, 0, 1):
                    span = turns[row, t + 1 : t + 3 + step]
                    if len(span) < 2 + step or not bool((span == span[0]).all() and span[0] > 0):
                        continue
                    hidden = tuned[row, t]
                    if step >= 0:
                        hidden = model.drafter.blocks[step](hidden)
                    q = (head @ batch["last_hidden"][row, t + 1 + step].double()).softmax(-1)
                    p = (head @ hidden.double()).log_softmax(-1)
                    total -= float(weights[step + 1]) * (q * p).sum()
    loss = model(batch, weights)
    torch.testing.assert_close(loss.value.double(), total, rtol=1e-4, atol=1e-4)
    loss.value.backward()
    for weight in [*model.adapter, *model.drafter.parameters()]:
        assert weight.grad.abs().sum() > 0
    assert verifier.head.weight.grad is None
    assert loss.metrics["verifier_loss"][1] == supervised(batch, -1).sum()


def test_weights_are_those_of_the_paper_and_the_verifiers_begin_after_warmup():
    model = make(tiny.verifier(), warmup=0.3)
    heads = [0.2 * 0.8, 0.2 * 0.64]
    assert model.loss_weights(0.29).tolist() == pytest.approx([0.0, *heads])
    assert model.loss_weights(0.3).tolist() == pytest.approx([1.0, *heads])
    assert list(model.loss_steps()) == [-1, 0, 1]


def test_heads_alone_are_trained_first():
    model = make(tiny.verifier())
    batch = featurized(model, random_batch(2))
    loss = model(batch, torch.tensor([0.0, 0.03, 0.02]))
    loss.value.backward()
    assert all(weight.grad.abs().sum() == 0 for weight in model.adapter)
    assert all(weight.grad.abs().sum() > 0 for weight in model.drafter.parameters())


def test_the_adapter_learns_at_a_lower_rate_and_nothing_else_of_the_verifier_does():
    verifier = tiny.verifier()
    before = {name: weight.clone() for name, weight in verifier.model.named_parameters()}
    model = make(verifier, scale=0.1)
    heads, adapter = model.parameter_groups()
    assert (heads["scale"], adapter["scale"]) == (1.0, 0.1)
    trained = {id(p) for group in (heads, adapter) for p in group["params"]}
    assert trained == {id(p) for p in model.parameters() if p.requires_grad}
    names = {n for n, p in verifier.model.named_parameters() if p.requires_grad}
    assert names and all("lora_" in name for name in names)
    batch = featurized(model, random_batch(2))
    optimizer = torch.optim.SGD([p for g in (heads, adapter) for p in g["params"]], lr=0.5)
    for _ in range(2):
        model(batch, torch.tensor([0.05, 0.03, 0.02])).value.backward()
        optimizer.step()
    for name, weight in verifier.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(weight, before[name.replace("base_layer.", "")]), name


def test_every_linear_layer_of_the_decoder_is_adapted():
    assert linear_layers(tiny.verifier()) == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip


# ---- checkpoints -------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Tensor]:
    """A verifier's folder, a checkpoint beside it, and the tuned verifier's hidden states."""
    verifier = tiny.verifier()
    tiny.save(verifier, tmp_path / "verifier")
    verifier.name = str(tmp_path / "verifier")
    model = moved(verifier)
    model.save(tmp_path / "drafter")
    return tmp_path, verifier.states(random_batch(1)["input_ids"]).last_hidden


@torch.no_grad()
def test_a_checkpoint_brings_its_tuned_verifier_back(saved):
    folder, tuned = saved
    verifier, drafter = load_pair(None, str(folder / "drafter"), "float32", "cpu")
    got = verifier.states(random_batch(1)["input_ids"]).last_hidden
    torch.testing.assert_close(got, tuned, atol=1e-4, rtol=1e-4)
    assert verifier.name == f"{folder}/verifier tuned by {folder}/drafter"
    assert drafter.verifier is verifier
    assert not any(weight.requires_grad for weight in verifier.model.parameters())
    assert verifier.fingerprint() != tiny.verifier().fingerprint()
    assert not any("lora" in name for name in drafter.state_dict())


def test_training_goes_on_from_the_adapter(saved):
    folder, tuned = saved
    verifier = tiny.verifier()
    drafter = Medusa.create(verifier, MedusaConfig(), LOSS, torch.ones(64))
    model = JointModel(drafter, JointConfig(rank=2), folder / "drafter" / ADAPTER)
    got = verifier.states(random_batch(1)["input_ids"]).last_hidden
    torch.testing.assert_close(got, tuned, atol=1e-5, rtol=1e-5)
    assert all(weight.requires_grad for weight in model.adapter) and len(model.adapter) > 0


def test_it_shares_its_verifier_with_no_other_drafter_and_goes_with_no_copy(saved):
    folder, _ = saved
    with pytest.raises(ValueError, match="drafts for a verifier that was trained with it"):
        load(str(folder / "drafter"), tiny.verifier())
    other = tiny.verifier(seed=1)
    tiny.save(other, folder / "other")
    with pytest.raises(ValueError, match="was trained for"):
        load_pair(str(folder / "other"), str(folder / "drafter"), "float32", "cpu", True)


def test_a_damaged_adapter_is_refused(saved):
    folder, _ = saved
    (folder / "drafter" / ADAPTER / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"drafter .*: its verifier_adapter cannot be read"):
        tune(tiny.verifier(), folder / "drafter")


def test_a_model_card_names_no_engine_for_a_tuned_verifier():
    state = {"step": 1, "tokens": 2, "validation": None}
    card = model_card({"verifier": "v"}, state, make(tiny.verifier()))
    assert "verifier that was trained with it" in card
    assert "vllm serve" not in card


def test_without_peft_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install 'headstart\[joint\]'"):
        make(tiny.verifier())


@pytest.mark.parametrize(
    "field, value", [("rank", 0), ("alpha", 0), ("scale", -1), ("warmup", 1.0), ("heads_weight", 0)]
)
def test_settings_without_meaning_are_refused(field, value):
    with pytest.raises(ValueError, match=f"joint.{field} must be .*, got {value}"):
        JointConfig(**{field: value})


def test_a_rank_beyond_the_hidden_size_is_refused():
    with pytest.raises(ValueError, match=r"joint.rank must be in 1 … 32 .*tiny/llama.*, got 33"):
        make(tiny.verifier(), rank=33)


# ---- what moved --------------------------------------------------------------------------------


def rows(count: int = 3) -> list[Row]:
    words = random.Random(5)
    return [
        Row([words.randrange(3, 64) for _ in range(9)], [0] * 3 + [1] * 6, str(i))
        for i in range(count)
    ]


@torch.no_grad()
def test_quality_is_kl_and_perplexity_over_answer_tokens(saved):
    folder, _ = saved
    original = tiny.verifier()
    tuned, _ = load_pair(None, str(folder / "drafter"), "float32", "cpu")
    got = compare_verifiers(original, tuned, rows())
    kl = surprisal = tuned_surprisal = same = 0.0
    for row in rows():
        laws = [
            v.model(torch.tensor([row.input_ids])).logits[0].double() for v in (original, tuned)
        ]
        for t in range(2, 8):
            q, r = (law[t].log_softmax(-1) for law in laws)
            kl += float((q.exp() * (q - r)).sum())
            same += float(q.argmax() == r.argmax())
            surprisal -= float(q[row.input_ids[t + 1]])
            tuned_surprisal -= float(r[row.input_ids[t + 1]])
    assert got.tokens == 18
    assert got.kl == pytest.approx(kl / 18, rel=1e-4)
    assert got.agreement == pytest.approx(same / 18)
    expected = [torch.tensor(s / 18).exp().item() for s in (surprisal, tuned_surprisal)]
    assert [got.perplexity_original, got.perplexity_tuned] == pytest.approx(expected, rel=1e-4)
    unmoved = compare_verifiers(original, tiny.verifier(), rows())
    assert unmoved.kl == pytest.approx(0, abs=1e-9) and unmoved.agreement == 1


def test_a_verifier_that_moved_is_warned_of():
    assert "WARNING" not in Quality(9, 0.019, 0.99, 3.0, 3.0).line()
    assert "WARNING: quality moved" in Quality(9, 0.021, 0.99, 3.0, 3.0).line()
    assert "WARNING: quality moved" in Quality(9, 0.0, 0.99, 3.0, 3.1).line()
    assert "lossless means the tuned verifier's own" in Quality(9, 0.0, 1.0, 3.0, 3.0).line()


def test_the_config_says_that_the_verifier_was_tuned(saved):
    folder, _ = saved
    config = json.loads((folder / "drafter" / "config.json").read_text())
    assert config["headstart"]["adapter"] == ADAPTER
    assert config["headstart"]["fingerprint"] == tiny.verifier().fingerprint()


def test_a_drafter_to_start_from_leaves_the_adapter_of_its_old_verifier_behind(saved, tmp_path):
    folder, _ = saved
    start = str(folder / "drafter")
    counts = torch.ones(64)
    with pytest.warns(UserWarning, match="was trained with it, whose adapter is left behind"):
        drafter = initial_drafter(start, tiny.verifier(), LOSS, counts)
    drafter.save(tmp_path / "again")
    load(str(tmp_path / "again"), tiny.verifier())
