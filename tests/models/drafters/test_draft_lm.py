"""A distilled draft model: its unroll, its own weights, padded vocabularies, texts of its own."""

import json

import pytest
import tiny
import torch
from tiny_run import batch as random_batch
from transformers import AutoModelForCausalLM

from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding.speculate import generate
from headstart.models.batch import Batch, supervised
from headstart.models.drafter import fingerprint
from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.loading import is_checkpoint, kind_of, load, load_checkpoint
from headstart.models.losses import LossConfig
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain
from headstart.models.verifier.verifier import Verifier
from headstart.script import parse
from headstart.train.draft_lm import OnPolicy, Recipe

VERIFIER = tiny.verifier()
LOSS = LossConfig(num_steps=1)


def make(verifier: Verifier = VERIFIER, init: str = "layers:0,3,7") -> DraftLM:
    return DraftLM.create(verifier, DraftLMConfig(init), LOSS)


def featurized(drafter: DraftLM, given: Batch) -> Batch:
    return Featurizer(drafter.verifier, drafter.feature_layers)(given)


@torch.no_grad()
def test_step_s_of_slot_t_is_the_models_law_after_x_t_1_s():
    drafter = make()
    given = random_batch(2, width=12)
    own = drafter.model(given["input_ids"]).logits
    for s, hidden in enumerate(drafter.unroll(given, 4)):
        logits = drafter.logits(hidden, s)
        for t in range(12 - 1 - s):
            torch.testing.assert_close(logits[:, t], own[:, t + 1 + s], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other():
    drafter = make()
    texts = random_batch(2, width=10)["input_ids"]
    packed = Batch(
        input_ids=texts.reshape(1, 20),
        position_ids=torch.arange(10).repeat(2)[None],
        document_ids=torch.arange(2).repeat_interleave(10)[None],
        loss_mask=torch.ones(1, 20, dtype=torch.long),
    )
    (hidden,) = drafter.unroll(packed, 1)
    for row, text in enumerate(texts):
        own = drafter.model(text[None]).logits[0, 1:]
        got = drafter.logits(hidden[0, row * 10 : row * 10 + 9], 0)
        torch.testing.assert_close(got, own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ce", "reverse_kl", "jsd", "lk"])
def test_loss_is_the_divergence_of_the_two_models_after_each_answer_token(kind):
    drafter = make()
    drafter.loss = LossConfig(kind, num_steps=1, beta=0.3)
    given = featurized(drafter, random_batch(3, seed=4))
    with torch.no_grad():
        drafted = drafter.model(given["input_ids"]).logits.double().softmax(-1)
        wanted = VERIFIER.model(given["input_ids"]).logits.double().softmax(-1)
    expected, mask = 0.0, supervised(given, 0)
    for row, slot in mask.nonzero().tolist():
        q, p = wanted[row, slot + 1], drafted[row, slot + 1]
        m = 0.3 * q + 0.7 * p
        expected += {
            "ce": -(q * p.log()).sum(),
            "reverse_kl": (p * (p / q).log()).sum(),
            "jsd": 0.3 * (q * (q / m).log()).sum() + 0.7 * (p * (p / m).log()).sum(),
            "lk": -torch.minimum(q, p).sum().log(),
        }[kind]
    loss = drafter(given, torch.tensor([1.0]))
    torch.testing.assert_close(loss.value.double(), expected, rtol=1e-4, atol=1e-4)
    loss.value.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in drafter.parameters())


def test_training_a_cut_leaves_the_verifier_as_it_is():
    verifier = tiny.verifier()
    before = verifier.fingerprint(), [w.clone() for w in verifier.model.parameters()]
    drafter = make(verifier)
    given = featurized(drafter, random_batch(3))
    optimizer = torch.optim.SGD(drafter.parameters(), lr=1.0)
    drafter(given, torch.tensor([1.0])).value.backward()
    optimizer.step()
    assert verifier.fingerprint() == before[0]
    for weight, old in zip(verifier.model.parameters(), before[1], strict=True):
        assert torch.equal(weight, old) and not weight.requires_grad and weight.grad is None


def test_a_checkpoint_is_an_ordinary_models_folder(tmp_path):
    drafter = make()
    drafter.save(tmp_path)
    assert is_checkpoint(str(tmp_path))
    loaded = load_checkpoint(tmp_path, VERIFIER)
    assert kind_of(loaded) == "draft_lm" and fingerprint(loaded) == fingerprint(drafter)
    assert all(weight.requires_grad for weight in loaded.parameters())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_batch(1)["input_ids"]
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, drafter.model(ids).logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == VERIFIER.vocab_size and config["num_hidden_layers"] == 3
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"drafter .* cannot be loaded"):
        load_checkpoint(tmp_path, VERIFIER)


def test_a_checkpoint_for_another_verifier_is_refused(tmp_path):
    make().save(tmp_path)
    with pytest.raises(ValueError, match="was trained for tiny/llama"):
        load(str(tmp_path), tiny.verifier(seed=1))
    with pytest.raises(ValueError, match="for a verifier of hidden size 32 and 64 tokens"):
        load(str(tmp_path), tiny.verifier(vocab_size=72), allow_verifier=True)


@pytest.mark.parametrize("sizes", [(72, 68), (68, 72)])
@pytest.mark.parametrize("kind", ["ce", "jsd", "lk"])
def test_padded_vocabularies_of_other_sizes_train_and_draft(sizes, kind, tmp_path):
    """64 tokens in both tokenizers; verifier and draft model have other numbers of rows."""
    verifier = tiny.verifier(vocab_size=sizes[0], num_hidden_layers=2)
    small = tiny.verifier(vocab_size=sizes[1], num_hidden_layers=2, seed=1)
    verifier.tokenizer = small.tokenizer = tiny.tokenizer(64)
    tiny.save(small, tmp_path / "small")
    verifier.terminator_ids = ()
    drafter = make(verifier, str(tmp_path / "small"))
    drafter.loss = LossConfig(kind, num_steps=1)
    given = featurized(drafter, random_batch(2))
    loss = drafter(given, torch.tensor([0.1]))
    loss.value.backward()
    assert loss.value.isfinite()
    assert all(weight.grad.isfinite().all() for weight in drafter.parameters())
    drafter.save(tmp_path / "saved")
    loaded = load_checkpoint(tmp_path / "saved", verifier).eval()
    settings = {"sampling": Sampling(), "drafting": Drafting(False, Sampling())}
    (got,) = generate(verifier, loaded, [[5, 9]], shape=chain(3), max_new_tokens=12, **settings)
    (alone,) = generate(verifier, None, [[5, 9]], shape=None, max_new_tokens=12, **settings)
    assert got.tokens == alone.tokens


# ---- texts of its own --------------------------------------------------------------------------


def test_answers_go_on_in_the_drafters_words_and_the_verifier_scores_them():
    verifier = tiny.verifier()
    drafter = make(verifier)
    given = random_batch(4)
    own = OnPolicy(drafter, Featurizer(verifier, ()), 1.0)
    torch.manual_seed(0)
    got = own(given)
    for name in ("loss_mask", "position_ids", "document_ids"):
        assert torch.equal(got[name], given[name])  # so the loop's counts of slots still hold
    changed = got["input_ids"] != given["input_ids"]
    assert changed.any(1).all()
    assert not changed[given["loss_mask"] == 0].any()
    assert not changed[:, -1].any()  # the last token of an answer stays
    first = (given["loss_mask"] > 0).long().argmax(1)
    assert not changed[torch.arange(4), first].any()
    states = verifier.states(got["input_ids"], ())
    torch.testing.assert_close(got["last_hidden"], states.last_hidden, atol=1e-5, rtol=1e-5)
    written = got["input_ids"][changed]
    assert not set(written.tolist()) & set(verifier.terminator_ids)
    torch.manual_seed(0)
    assert torch.equal(own(given)["input_ids"], got["input_ids"])  # and so after a resume


def test_what_it_writes_is_what_the_draft_model_would_write():
    """Greedy by a sharp head: batched writing equals one text after another, whole passes."""
    verifier = tiny.verifier()
    verifier.terminator_ids = ()
    drafter = make(verifier)
    with torch.no_grad():
        drafter.lm.head.weight.mul_(1000)
    prefixes = [torch.tensor([5, 9, 11]), torch.tensor([7]), torch.tensor([20, 4, 33, 34, 35])]
    written = OnPolicy(drafter, Featurizer(verifier, ()), 1.0).write(prefixes, 6)
    for prefix, text in zip(prefixes, written, strict=True):
        ids = prefix.tolist()
        for token in text.tolist():
            with torch.no_grad():
                assert int(drafter.model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


def test_a_share_of_batches_is_rewritten():
    drafter = make()
    given = random_batch(1)
    kept = OnPolicy(drafter, Featurizer(VERIFIER, ()), 0.3)
    torch.manual_seed(0)
    rewritten = sum(
        not torch.equal(kept(given)["input_ids"], given["input_ids"]) for _ in range(100)
    )
    assert 15 < rewritten < 45


def test_a_document_without_an_answer_is_left_alone():
    drafter = make()
    given = random_batch(2, supervised=False)
    got = OnPolicy(drafter, Featurizer(VERIFIER, ()), 1.0)(given)
    assert torch.equal(got["input_ids"], given["input_ids"])


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("on_policy", "1.5", "on_policy must be in 0 … 1, got 1.5"),
        ("loss.num_steps", "3", "loss.num_steps is 3; a language model has one step"),
        ("loss.beta", "0", r"loss.beta must be in \(0, 1\), got 0"),
    ],
)
def test_bad_settings_are_refused_in_one_line(option, value, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(Recipe, ["--config", "recipes/draft_lm/tiny.yaml", f"--{option}", value])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("init", ["layers:0-9", "layers:x", "nowhere/nothing"])
def test_a_start_that_is_not_there_is_refused(init):
    with pytest.raises(ValueError, match=rf"^drafter\.init( |: drafter )'{init}'") as error:
        make(init=init)
    assert "prompt-lookup" not in str(error.value)
