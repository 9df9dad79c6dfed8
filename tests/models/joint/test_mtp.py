"""A verifier that is trained with its MTP modules: loss and gradients by hand, resume, loading."""

import copy
from pathlib import Path

import pytest
import tiny
import torch
from runs import recipe, run
from tiny_run import batch as random_batch
from tiny_run import lines, losses
from torch.nn.functional import cross_entropy

from headstart.data.conversations.reading import resolve
from headstart.eval.decoding.speculate import generate
from headstart.models import losses as shared
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.joint.lora import OwnPrediction
from headstart.models.joint.mtp import VERIFIER, JointMTP
from headstart.models.loading import load_pair
from headstart.models.losses import LossConfig
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain
from headstart.models.verifier.verifier import Verifier
from headstart.train import mtp

LOSS = LossConfig("hard_ce", num_steps=2, gamma=1.0)


def make(verifier: Verifier, **settings) -> JointMTP:
    torch.manual_seed(0)
    return JointMTP(MTP.create(verifier, MTPConfig(2, init="random", **settings), LOSS))


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_all_steps_written_out(tied):
    """Cross entropy with the tokens, through autograd: head and embedding learn from every step."""
    model = make(tiny.verifier(num_hidden_layers=2, tie_word_embeddings=tied))
    verifier, batch = model.verifier, random_batch(2, seed=3)
    weights = torch.tensor([0.05, 0.03, 0.02])
    ids, turns = batch["input_ids"], batch["loss_mask"]
    states = verifier.states(ids, (2,), batch["position_ids"])
    seen = {**batch, "features": states.features, "last_hidden": states.last_hidden}
    hidden = [states.last_hidden, *model.drafter.unroll(seen, 2)]
    expected = torch.zeros(())
    for step, output in enumerate(hidden, -1):
        for row in range(2):
            for t in range(ids.shape[1] - 2 - step):
                span = turns[row, t + 1 : t + 3 + step]
                if bool((span == span[0]).all() and span[0] > 0):
                    logits = verifier.head(output[row, t])
                    loss = cross_entropy(logits, ids[row, t + 2 + step])
                    expected = expected + weights[step + 1] * loss
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    loss = model(batch, weights)
    torch.testing.assert_close(loss.value, expected, rtol=1e-5, atol=1e-5)
    loss.value.backward()
    for (name, weight), gradient in zip(model.named_parameters(), wanted, strict=True):
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-4, msg=name)
    assert {"main_loss", "main_accuracy", "loss/0", "loss/1", "lambda", "depth"} <= set(
        loss.metrics
    )


def test_without_lambda_the_verifier_learns_exactly_as_alone():
    alone = tiny.verifier(num_hidden_layers=2)
    alone.model.requires_grad_(True)
    batch, weights = random_batch(2, seed=3), torch.tensor([0.05])
    states = alone.states(batch["input_ids"], (), batch["position_ids"], batch["document_ids"])

    seen = {**batch, "last_hidden": states.last_hidden}
    only = OwnPrediction(alone, LOSS)
    shared.unrolled_loss(only, seen, [states.last_hidden], weights, first=-1).value.backward()
    model = make(tiny.verifier(num_hidden_layers=2), lambda_start=0.0, lambda_end=0.0)
    assert model.loss_weights(0.5).tolist() == [1.0, 0.0, 0.0]
    loss = model(batch, 0.05 * model.loss_weights(0.5))
    loss.value.backward()
    for left, right in zip(alone.model.parameters(), model.model.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad) and left.grad.abs().sum() > 0
    assert all(weight.grad.abs().sum() == 0 for weight in model.drafter.parameters())


def test_weights_are_one_for_the_verifier_and_lambda_over_depth_for_each_step():
    model = make(tiny.verifier(num_hidden_layers=2))
    assert list(model.loss_steps()) == [-1, 0, 1]
    assert model.loss_weights(0.5).tolist() == pytest.approx([1.0, 0.15, 0.15])
    assert model.loss_weights(0.9).tolist() == pytest.approx([1.0, 0.05, 0.05])


def joint_recipe(folder: Path, verifier: str, **training) -> mtp.Recipe:
    settings = recipe(folder, verifier, "mtp", **training)
    settings.mode, settings.loss = "joint", copy.copy(LOSS)
    return settings


def test_a_run_trains_both_and_its_checkpoint_holds_both(tmp_path: Path) -> None:
    verifier = tiny.save(tiny.verifier(num_hidden_layers=2), tmp_path / "verifier")
    run(joint_recipe(tmp_path, verifier, learning_rate=1e-2))
    numbers = lines(tmp_path / "run")[-1]
    assert {"main_loss", "loss/0", "loss/1", "lambda", "depth"} <= set(numbers)
    best = tmp_path / "run" / "best"
    trained, drafter = load_pair(None, str(best), "float32", "cpu")
    before = tiny.verifier(num_hidden_layers=2)
    assert trained.name == str(best / VERIFIER)
    assert trained.fingerprint() != before.fingerprint()
    weights = dict(before.model.named_parameters())
    for name, weight in trained.model.named_parameters():
        assert not torch.equal(weight, weights[name]), f"{name} is not trained"
    settings = {"sampling": Sampling(), "max_new_tokens": 12}
    greedy = Drafting(False, Sampling())
    (alone,) = generate(trained, None, [[5, 9, 3]], shape=None, drafting=greedy, **settings)
    (got,) = generate(trained, drafter, [[5, 9, 3]], shape=chain(3), drafting=greedy, **settings)
    assert got.tokens == alone.tokens
    with pytest.raises(ValueError, match="was trained for"):
        load_pair(verifier, str(best), "float32", "cpu")


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    verifier = tiny.save(tiny.verifier(num_hidden_layers=2), tmp_path / "verifier")
    broken = joint_recipe(tmp_path, verifier, max_steps=6, save_every=2, keep_last=9)
    broken.tracking.log_every = 1
    run(broken)
    whole = losses(tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        if folder.name > "step-000002":
            (folder / "config.json").unlink()
    broken.training.resume = True
    with pytest.warns(UserWarning, match="skipping broken"):
        run(broken)
    assert losses(tmp_path / "run") == whole and len(whole) == 6


def test_a_teacher_or_coarse_weights_are_refused():
    verifier = tiny.verifier(num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"loss\.kind is 'ce', .* set loss\.kind to hard_ce"):
        JointMTP(MTP.create(verifier, MTPConfig(), LossConfig(num_steps=1)))
    verifier.model.bfloat16()
    with pytest.raises(ValueError, match="set verifier_dtype to float32"):
        make(verifier)


def test_there_is_a_recipe_for_pretraining() -> None:
    assert resolve("recipes/mtp/pretrain-tiny.yaml")
