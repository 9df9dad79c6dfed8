"""MTP: its equations and its loss by hand, the layouts' wiring, serving = training, checkpoints."""

import math
from pathlib import Path

import pytest
import torch
from by_hand import batch_of, rms, rotated
from loud_mtp import VERIFIER, loud, make
from runs import recipe, run
from served import (
    CHAIN,
    TREE,
    check_another_shape_is_refused,
    check_comes_back,
    check_rounds,
    check_trains_and_drafts,
    close,
    texts,
)
from tiny import FAMILIES
from tiny import save as save_verifier
from tiny import verifier as tiny_verifier
from tiny_run import lines
from torch import Tensor
from torch.nn.functional import silu

from headstart.data.rows.collate import collate
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.models.batch import Batch
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.loading import load_checkpoint
from headstart.script import parse
from headstart.train import mtp
from headstart.train.run.checkpoint import model_card
from headstart.train.run.settings import TrainingConfig

with torch.no_grad():  # a norm without weights of its own is not seen through another norm
    VERIFIER.decoder.norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(9))
FACTS = {  # hidden first, state after the verifier's norm, output after its own, zeros at 0
    "mimo": (True, False, True, True),
    "deepseek_v3": (False, True, True, True),
    "glm4_moe": (False, True, False, True),
    "qwen3_next": (False, True, True, False),
}
TRAPS = ("hidden_first", "normed_input", "normed_feedback", "zero_first")


# ---- the equations -----------------------------------------------------------------------------


def by_hand(
    drafter: MTP, batch: Batch, row: int, steps: int, facts: tuple[bool, ...]
) -> list[list[Tensor]]:
    """Normed output of every slot and step of one text, one slot at a time, in float64."""
    hidden_first, normed_input, normed_feedback, zero_first = facts
    w = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    embedding = drafter.verifier.model.get_input_embeddings().weight.double()
    config, ids = drafter.verifier.config, batch["input_ids"][row].tolist()
    size, theta = config.head_dim, config.rope_parameters["rope_theta"]
    hidden = list((batch["last_hidden"] if normed_input else batch["features"])[row].double())
    outputs, runs = [], {}  # keys and values of each run of each module
    for s in range(steps):
        k = min(s, len(drafter.blocks) - 1)
        block = f"blocks.{k}."
        run_keys, run_values, raw, normed = [], [], [], []
        runs.setdefault(k, []).append((run_keys, run_values))
        for t in range(len(ids) - 1 - s):
            e = embedding[ids[t + 1 + s]]
            if zero_first and t + s == 0:
                e = torch.zeros_like(e)
            parts = [rms(e, w[f"{block}embedding_norm.weight"])]
            parts.insert(0 if hidden_first else 1, rms(hidden[t], w[f"{block}hidden_norm.weight"]))
            x = w[f"{block}projection.weight"] @ torch.cat(parts)
            inner = rms(x, w[f"{block}layer.input_layernorm.weight"])
            q, k_, v = (
                (w[f"{block}layer.self_attn.{n}_proj.weight"] @ inner).view(-1, size) for n in "qkv"
            )
            q, k_ = rotated(q, t + s, theta), rotated(k_, t + s, theta)
            run_keys.append(k_)
            run_values.append(v)
            first, *later = runs[k]
            seen = [*first[0][: t + 1], *(keys[t] for keys, _ in later)]
            seen_values = [*first[1][: t + 1], *(values[t] for _, values in later)]
            heads = []
            for head in range(len(q)):
                group = head // (len(q) // len(k_))
                scores = torch.stack([q[head] @ key[group] for key in seen]) / math.sqrt(size)
                pairs = zip(scores.softmax(0), seen_values, strict=True)
                heads.append(sum(m * value[group] for m, value in pairs))
            x = x + w[f"{block}layer.self_attn.o_proj.weight"] @ torch.cat(heads)
            inner = rms(x, w[f"{block}layer.post_attention_layernorm.weight"])
            gate = silu(w[f"{block}layer.mlp.gate_proj.weight"] @ inner)
            up = w[f"{block}layer.mlp.up_proj.weight"] @ inner
            raw.append(x + w[f"{block}layer.mlp.down_proj.weight"] @ (gate * up))
            normed.append(rms(raw[-1], w[f"{block}norm.weight"]))
        outputs.append(normed)
        hidden = normed if normed_feedback else raw
    return outputs


def apart(drafter: MTP, batch: Batch, expected: list[list[Tensor]]) -> float:
    """Largest distance of the unroll from outputs worked by hand."""
    pairs = zip(drafter.unroll(batch, len(expected)), expected, strict=True)
    return max(float((got[0, : len(want)] - torch.stack(want)).abs().max()) for got, want in pairs)


@pytest.mark.parametrize("num_modules", [1, 2, 3])
@torch.no_grad()
def test_unroll_equals_the_equations_worked_by_hand(num_modules):
    """Three modules and four steps: the last one is used twice; one: four times."""
    drafter = loud(num_modules)
    batch = batch_of(drafter, texts(1, 9))
    assert apart(drafter, batch, by_hand(drafter, batch, 0, 4, FACTS["mimo"])) < 1e-4
    hidden = torch.randn(3, 32)
    close(drafter.logits(hidden, 0), hidden @ VERIFIER.head.weight.T)


@pytest.mark.parametrize("layout", FACTS)
@torch.no_grad()
def test_each_layout_is_wired_as_it_is_served_and_any_other_way_shows(layout):
    drafter = loud(2, layout=layout)
    assert drafter.feature_layers == (() if FACTS[layout][1] else (8,))
    batch = batch_of(drafter, texts(1, 9))
    batch["features"] = VERIFIER.states(batch["input_ids"], (8,)).features
    expected = by_hand(drafter, batch, 0, 3, FACTS[layout])
    assert apart(drafter, batch, expected) < 1e-4
    for trap, fact in zip(TRAPS, FACTS[layout], strict=True):
        flipped = loud(2, layout=layout, **{trap: not fact})
        flipped.load_state_dict(drafter.state_dict())
        assert apart(flipped, batch, expected) > 1e-2, trap


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_loss_is_lambda_over_depth_times_the_sum_of_the_steps(steps):
    drafter = loud(steps, steps=steps)
    batch = batch_of(drafter, texts(2, 8))
    counts = torch.tensor([2.0 * (6 - s) for s in range(steps)])
    expected = torch.zeros((), dtype=torch.double)
    head = VERIFIER.head.weight.double()
    for row in range(2):
        outputs = by_hand(drafter, batch, row, steps, FACTS["mimo"])
        for s in range(steps):
            for t in range(8 - 2 - s):  # x_{t+2+s} is in the text
                q = (head @ batch["last_hidden"][row, t + 1 + s].double()).softmax(-1)
                cross_entropy = -(q * (head @ outputs[s][t]).log_softmax(-1)).sum()
                expected += 0.3 / steps * cross_entropy / counts[s]
    loss = drafter(batch, drafter.loss_weights(0.0) / counts)
    close(loss.value.double(), expected)
    assert [float(loss.metrics[f"loss/{s}"][1]) for s in range(steps)] == counts.tolist()
    assert loss.metrics["lambda"][0] == pytest.approx(0.3) and loss.metrics["depth"][0] == steps
    loss.value.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in drafter.parameters())
    assert all(weight.grad is None for weight in VERIFIER.model.parameters())


# ---- lambda ------------------------------------------------------------------------------------


def test_lambda_changes_after_its_share_of_the_run():
    drafter = make(2, steps=2)
    assert drafter.loss_weights(0.676).tolist() == pytest.approx([0.15, 0.15])
    assert drafter.loss_weights(0.6761).tolist() == pytest.approx([0.05, 0.05])
    drafter = make(lambda_start=1.0, lambda_end=0.5, switch=0.25)
    assert drafter.loss_weights(0.25).sum() == pytest.approx(1.0)
    assert drafter.loss_weights(0.26).sum() == pytest.approx(0.5)


def test_a_switch_in_tokens_needs_a_run_in_tokens():
    config = MTPConfig(switch_tokens=10_000)
    assert mtp.scheduled(config, TrainingConfig("out", max_tokens=14_800)).switch == 10 / 14.8
    assert mtp.scheduled(config, TrainingConfig("out", max_tokens=1000)).switch == 1.0
    with pytest.raises(ValueError, match=r"give training\.max_tokens, or"):
        mtp.scheduled(config, TrainingConfig("out", max_steps=10))


def test_lambda_of_each_step_is_that_of_its_tokens_after_a_resume_too(tmp_path: Path) -> None:
    verifier = save_verifier(tiny_verifier(), tmp_path / "verifier")
    settings = recipe(tmp_path, verifier, "mtp", max_steps=None, max_tokens=1600, save_every=1)
    settings.drafter.switch_tokens = 800
    settings.training.keep_last = 99
    settings.tracking.log_every = 1
    run(settings)
    whole = [(line["tokens"], line["lambda"]) for line in lines(tmp_path / "run")]
    assert {weight for _, weight in whole} == {0.3, 0.1}
    assert all(weight == (0.3 if tokens <= 800 else 0.1) for tokens, weight in whole)
    after = next(i for i, (_, weight) in enumerate(whole) if weight == 0.1)
    for kept in (after - 1, after + 1):  # steps finished before the break
        for folder in (tmp_path / "run" / "checkpoints").iterdir():
            if folder.name > f"step-{kept:06d}":
                (folder / "config.json").unlink(missing_ok=True)
        settings.training.resume = True
        with pytest.warns(UserWarning, match="skipping broken"):
            run(settings)
        assert [(line["tokens"], line["lambda"]) for line in lines(tmp_path / "run")] == whole


# ---- training ----------------------------------------------------------------------------------


def test_a_slot_sees_features_up_to_itself_of_its_own_document():
    for num_modules in (1, 3):
        drafter = loud(num_modules)
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


def rows_and_weights() -> tuple[list[Row], Tensor]:
    random = torch.Generator().manual_seed(3)
    rows = []
    for length, begin in [(9, 3), (14, 1), (6, 2), (11, 5), (4, 1)]:
        ids = torch.randint(3, 64, (length,), generator=random).tolist()
        rows.append(Row(ids, [0] * begin + [1] * (length - begin), "row"))
    return rows, torch.tensor([0.04, 0.03, 0.02])


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("num_modules", [1, 3])
def test_packed_equals_padded_in_loss_and_gradients(family, num_modules):
    verifier = tiny_verifier(family)
    drafter = loud(num_modules, verifier=verifier)
    rows, weights = rows_and_weights()
    featurize = Featurizer(verifier, drafter.feature_layers)
    results = []
    for packed in (False, True):
        batch = featurize(collate(rows, 20, packed=packed))
        drafter.zero_grad()
        loss = drafter(batch, weights)
        loss.value.backward()
        results.append((loss, [weight.grad for weight in drafter.parameters()]))
    (padded, padded_grads), (packed, packed_grads) = results
    close(packed.value, padded.value, 1e-5)
    for name, (total, count) in padded.metrics.items():
        close(packed.metrics[name][0], total)
        assert packed.metrics[name][1] == count
    for left, right in zip(packed_grads, padded_grads, strict=True):
        close(left, right, 1e-4)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("num_modules", [1, 2])
def test_bfloat16_autocast_is_close_to_float32(packed, num_modules):
    drafter = loud(num_modules)
    rows, weights = rows_and_weights()
    batch = Featurizer(VERIFIER, drafter.feature_layers)(collate(rows, 20, packed=packed))
    results = []
    for enabled in (False, True):
        drafter.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = drafter(batch, weights)
        loss.value.backward()
        results.append((loss.value.detach(), drafter.blocks[0].projection.weight.grad))
    (exact, exact_grad), (rounded, rounded_grad) = results
    assert rounded_grad.dtype == torch.float32 and rounded != exact
    close(rounded.float(), exact, 0.02)
    assert (rounded_grad - exact_grad).norm() < 0.1 * exact_grad.norm()


# ---- serving = training ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "layout, num_modules",
    [("mimo", 1), ("glm4_moe", 1), ("qwen3_next", 2), ("mimo", 3), ("deepseek_v3", 5)],
)
def test_serving_equals_training_over_ragged_rounds(layout, num_modules, shape):
    """Five drafts in a row: the last module is used again, for all of them where it is the only."""
    drafter = loud(num_modules, steps=num_modules, layout=layout)
    check_rounds(drafter, shape, tolerance=1e-5)


# ---- beginnings and checkpoints ----------------------------------------------------------------


def test_it_starts_from_the_verifiers_last_layer_if_told_and_shares_no_weight_with_it():
    drafter = make(2, init="verifier")
    last = dict(VERIFIER.layers[-1].named_parameters())
    for block in drafter.blocks:
        for name, weight in block.layer.named_parameters():
            assert torch.equal(weight, last[name]), name
            assert weight.data_ptr() != last[name].data_ptr()
        assert torch.equal(block.norm.weight, VERIFIER.decoder.norm.weight)
        close(block.projection.weight[:, :32], torch.eye(32), 0.2)  # mimo: hidden first
        assert (block.embedding_norm.weight == 1).all() and (block.hidden_norm.weight == 1).all()
    other = make(init="random")
    assert other.blocks[0].layer.mlp.up_proj.weight.std() < 0.03


@pytest.mark.parametrize("layout", FACTS)
def test_a_saved_drafter_comes_back_bit_by_bit(tmp_path, layout):
    drafter = loud(2, layout=layout, zero_first=False, lambda_start=0.5, switch=0.5)
    check_comes_back(drafter, tmp_path)
    loaded = load_checkpoint(tmp_path / "drafter", VERIFIER)
    assert loaded.wiring == drafter.wiring and not loaded.wiring.zero_first
    assert loaded.schedule == drafter.schedule


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_of_any_family_are_trained_saved_and_draft(family, tmp_path):
    check_trains_and_drafts(loud(2, verifier=tiny_verifier(family)), tmp_path)


def test_a_model_card_says_whether_an_engine_could_run_the_modules():
    state = {"step": 1, "tokens": 2, "validation": None}
    drafters = make(), make(3), make(layout="qwen3_next")
    served, several, other = (model_card({"verifier": "x"}, state, drafter) for drafter in drafters)
    assert "models/export.py THIS-FOLDER --to mimo" in served and '"method": "mtp"' in served
    assert "vllm serve" not in several and "Not servable in vLLM" in several
    assert "vllm serve" not in other and "`mode: native`" in other


def test_a_verifier_of_another_shape_is_refused(tmp_path):
    check_another_shape_is_refused(make(), {"hidden_size": 48}, tmp_path)


@pytest.mark.parametrize(
    "field, value",
    [("init", "zero"), ("num_modules", 0), ("lambda_start", -1.0), ("switch", 1.5)],
)
def test_settings_without_meaning_are_refused(field, value):
    with pytest.raises(ValueError, match=f"drafter.{field} must .*got"):
        MTPConfig(**{field: value})


def test_more_modules_than_are_trained_are_refused():
    with pytest.raises(ValueError, match=r"loss\.num_steps is 2, but there are 3 MTP modules"):
        make(3, steps=2)


def test_an_unknown_layout_is_refused():
    options = ["--config", "recipes/mtp/tiny.yaml", "--drafter.layout", "llama"]
    with pytest.raises(ValueError, match="layout"):
        parse(mtp.Recipe, options)
