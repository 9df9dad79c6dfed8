"""What must hold for every drafter, whatever it drafts: the output is the verifier's own.

A new drafter adds itself to `DRAFTERS`.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from small_texts import PROMPT, PROMPTS, ROWS, WIDTH, endless, exact_law, plain, small
from tiny import FAMILIES, tokenizer
from tiny import verifier as tiny_verifier

from headstart.data.rows.rendering import render_all
from headstart.eval.decoding.lossless import chi_square, compare
from headstart.eval.decoding.speculate import generate
from headstart.eval.decoding.trial import drafting_for, pick, prompt_of
from headstart.models.drafter import Drafter
from headstart.models.drafters.draft_lm import DraftLM, cut
from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.hydra_heads import HydraHeads
from headstart.models.drafters.lookup import Lookahead, LookaheadConfig, PromptLookup
from headstart.models.drafters.medusa import Medusa
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.loading import LOOKUPS
from headstart.models.losses import LossConfig
from headstart.models.parts.heads import HeadsConfig, HeadsDrafter
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import Dynamic, cartesian, chain
from headstart.models.verifier.verifier import Verifier

GREEDY = Drafting(False, Sampling())
SHAPES = {"chain": chain(4), "static": cartesian(3, 2, 1), "dynamic": Dynamic(4, 3, 14)}
FAMILY_NAMES = sorted(FAMILIES)


def some_of(verifier: Verifier) -> int:
    """Size of a draft vocabulary that lacks some of the verifier's."""
    return verifier.vocab_size * 3 // 4 + 1


def eagle3(verifier: Verifier) -> Eagle3:
    """Its answers are mostly wrong, as its weights are random; some draft ids are missing."""
    torch.manual_seed(1)
    layers = tuple(sorted({1, 2, verifier.num_layers}))
    config = Eagle3Config(layers, draft_vocab_size=some_of(verifier), init="random")
    drafter = Eagle3.create(verifier, config, LossConfig(), torch.arange(verifier.vocab_size))
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
    return drafter.eval()


def eagle1(verifier: Verifier) -> Eagle1:
    torch.manual_seed(1)
    drafter = Eagle1.create(verifier, Eagle1Config("random"), LossConfig())
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
    return drafter.eval()


def half(verifier: Verifier) -> DraftLM:
    """The verifier's own first layers."""
    return DraftLM(cut(verifier, tuple(range(verifier.num_layers - 1))), verifier, LossConfig())


def heads(
    kind: type[HeadsDrafter], verifier: Verifier, shared: bool, vocab: int | None = 0
) -> HeadsDrafter:
    """Four heads; their answers are mostly wrong, as their weights are random."""
    torch.manual_seed(1)
    size = some_of(verifier) if vocab == 0 else vocab
    config = HeadsConfig(num_layers=2, shared_projection=shared, draft_vocab_size=size)
    drafter = kind.create(
        verifier, config, LossConfig(num_steps=4), torch.arange(verifier.vocab_size)
    )
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.5 / weight.shape[-1] ** 0.5)
    return drafter.eval()


def modules(verifier: Verifier, num_modules: int, layout: str) -> MTP:
    torch.manual_seed(1)
    config = MTPConfig(num_modules, layout, init="random")
    drafter = MTP.create(verifier, config, LossConfig(num_steps=3))
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
    return drafter.eval()


DRAFTERS: dict[str, Callable[[Verifier], Drafter]] = {
    "eagle3": eagle3,
    "eagle1": eagle1,
    "draft_lm": half,
    "medusa": lambda verifier: heads(Medusa, verifier, shared=False),
    "medusa, shared projection": lambda verifier: heads(Medusa, verifier, shared=True),
    "hydra_heads": lambda verifier: heads(HydraHeads, verifier, shared=True),
    "mtp": lambda verifier: modules(verifier, 3, "mimo"),
    "mtp, one module": lambda verifier: modules(verifier, 1, "glm4_moe"),
    "prompt-lookup": lambda verifier: PromptLookup(),
    "lookahead": lambda verifier: Lookahead(LookaheadConfig(window=4, ngram=3)),
}


TRAINABLE = [name for name in DRAFTERS if name not in LOOKUPS]


@cache
def answered(family: str) -> tuple[Verifier, list[list[int]]]:
    """A verifier with several terminators, and its answers to `PROMPTS`."""
    model = endless(family)
    answers = [plain(model, prompt, 24) for prompt in PROMPTS]
    model.terminator_ids = tuple({answers[0][9], answers[1][17], answers[2][5]})
    expected = []
    for answer in answers:
        stop = next((i for i, t in enumerate(answer) if t in model.terminator_ids), len(answer))
        expected.append(answer[: stop + 1])
    return model, expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_greedy_output_is_the_verifiers(family, name, shape):
    """Alone and in a ragged batch, one prompt of which has one token; several terminators."""
    model, expected = answered(family)
    drafter = DRAFTERS[name](model)
    settings = {
        "shape": SHAPES[shape], "sampling": Sampling(), "drafting": GREEDY, "max_new_tokens": 24,
    }  # fmt: skip
    batch = generate(model, drafter, PROMPTS, **settings)
    assert [got.tokens for got in batch] == expected
    for prompt, got in zip(PROMPTS[:2], batch, strict=False):
        (alone,) = generate(model, drafter, [prompt], **settings)
        assert alone.tokens == got.tokens
        assert (alone.rounds, alone.accepted) == (got.rounds, got.accepted)
    assert sum(sum(got.drafted) for got in batch) > 0


EMBEDDED: list[Verifier] = []
FOR_EMBEDDED = DRAFTERS | {  # with its whole vocabulary
    "eagle3": lambda verifier: Eagle3.create(
        verifier, Eagle3Config(), LossConfig(), torch.arange(verifier.vocab_size)
    ),
    "eagle1": lambda verifier: Eagle1.create(verifier, Eagle1Config(), LossConfig()).eval(),
    "medusa": lambda verifier: heads(Medusa, verifier, shared=False, vocab=4096),
    "medusa, shared projection": lambda verifier: heads(Medusa, verifier, True, vocab=None),
    "hydra_heads": lambda verifier: heads(HydraHeads, verifier, True, vocab=None),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_of_the_embedded_verifier(name, shape):
    """Texts of four kinds, alone and in a ragged batch; equal, or a tie by name."""
    if not EMBEDDED:
        EMBEDDED.append(Verifier.load("embedded/smollm2-135m"))
    (model,) = EMBEDDED
    file = "data/smollm2/eval.jsonl"
    rows, _ = render_all(file, model.tokenizer, model.terminator_ids, 1024)
    prompts = [prompt_of(row) for row in pick(rows, 4)]
    drafter = FOR_EMBEDDED[name](model)
    settings = {"sampling": Sampling(), "drafting": GREEDY, "max_new_tokens": 24}
    batch = generate(model, drafter, prompts, shape=SHAPES[shape], **settings)
    for prompt, got in zip(prompts, batch, strict=True):
        (expected,) = generate(model, None, [prompt], shape=None, **settings)
        (alone,) = generate(model, drafter, [prompt], shape=SHAPES[shape], **settings)
        for text in (got.tokens, alone.tokens):
            assert compare(model, prompt, expected.tokens, text) != "different"


@pytest.mark.parametrize(
    "name, shape",
    [
        *((name, chain(3)) for name in DRAFTERS),
        *((name, cartesian(2, 2)) for name in TRAINABLE),
        ("eagle3", Dynamic(3, 2, 6)),
    ],
    ids=str,
)
def test_joint_law_of_three_tokens_is_the_verifiers(name, shape):
    """20,000 texts through the real loop, sampled drafts where the shape allows."""
    model = small()
    sampling = Sampling(1.3, top_p=0.9)
    drafting = drafting_for(shape, Drafting(True, Sampling(0.7)))
    texts = torch.full((ROWS, 3), WIDTH)
    outputs = generate(
        model, DRAFTERS[name](model), [PROMPT] * ROWS, shape=shape, sampling=sampling,
        drafting=drafting, max_new_tokens=4, seed=1,
    )  # fmt: skip
    for row, got in enumerate(outputs):
        texts[row, : len(got.tokens[:3])] = torch.tensor(got.tokens[:3])
    cells = (texts * torch.tensor([49, 7, 1])).sum(1)
    law = exact_law(model, sampling).flatten()
    assert chi_square(cells.bincount(minlength=343), law).p_value > 0.001
    assert sum(sum(got.drafted) for got in outputs) > 0


@pytest.mark.parametrize("name", TRAINABLE)
@pytest.mark.parametrize("shape", ["chain", "static"])
def test_a_sampled_text_does_not_depend_on_its_batch(name, shape):
    model = tiny_verifier(num_hidden_layers=4)
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    drafter = DRAFTERS[name](model)
    settings = {
        "shape": SHAPES[shape], "sampling": Sampling(1.0, 50, 0.95), "max_new_tokens": 12,
        "drafting": Drafting(True, Sampling(0.8)), "seed": 7,
    }  # fmt: skip
    batch = generate(model, drafter, PROMPTS, row_ids=[8, 6, 4, 2], **settings)
    for prompt, row, got in zip(PROMPTS, [8, 6, 4, 2], batch, strict=True):
        assert generate(model, drafter, [prompt], row_ids=[row], **settings) == [got]


# ---- caches over many rounds -------------------------------------------------------------------

ROUNDS = 500


class Recorded:
    """Keeps the verifier's cache and the drafter's state of a `generate`."""

    def __init__(self, model: Verifier, drafter: Drafter, monkeypatch):
        self.rounds = 0
        start, new_cache, propose = drafter.start, model.new_cache, drafter.propose
        self.model, self.drafter = model, drafter

        def started(first):
            self.state = start(first)
            return self.state

        def cached(rows):
            self.cache = new_cache(rows)
            return self.cache

        def proposed(*arguments):
            self.rounds += 1
            return propose(*arguments)

        monkeypatch.setattr(drafter, "start", started)
        monkeypatch.setattr(model, "new_cache", cached)
        monkeypatch.setattr(drafter, "propose", proposed)


def in_order(cache, row: int):
    """A row's keys and values by position, layer by layer; positions must have no gap."""
    used = (cache.positions[row] >= 0).nonzero()[:, 0]
    order = used[cache.positions[row, used].argsort()]
    assert cache.positions[row, order].tolist() == list(range(len(order)))
    layers = [layer for layer in cache.layers if layer.is_initialized]
    return len(order), [
        (layer.keys[row][:, order], layer.values[row][:, order]) for layer in layers
    ]


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("name", ["eagle3", "draft_lm"])
def test_after_500_rounds_the_caches_are_those_of_a_fresh_pass(name, shape, monkeypatch):
    """Random accept and reject, in a batch of three, for verifier and drafter."""
    model = endless("llama", num_hidden_layers=3, max_position_embeddings=4096)
    with torch.no_grad():
        model.head.weight.mul_(0.4)
    drafter = DRAFTERS[name](model)
    seen = Recorded(model, drafter, monkeypatch)
    sampling = Sampling(1.0)
    drafting = GREEDY if shape == "dynamic" else Drafting(True, sampling)
    count = 2400 if name == "draft_lm" and shape != "dynamic" else 1400  # right more often
    prompts = PROMPTS[:3]
    outputs = generate(
        model, drafter, prompts, shape=SHAPES[shape], sampling=sampling, drafting=drafting,
        max_new_tokens=count, seed=3,
    )  # fmt: skip
    assert seen.rounds >= ROUNDS
    assert all(sum(o.accepted) > 20 and o.rounds > sum(o.accepted) / 4 for o in outputs)
    # the last row to end is the one whose caches are left
    monkeypatch.undo()
    longest = max(range(3), key=lambda i: outputs[i].rounds)
    text = torch.tensor([prompts[longest] + outputs[longest].tokens])
    fresh = model.new_cache(1)
    states = model.states(text, drafter.feature_layers, cache=fresh)
    length, held = in_order(seen.cache, 0)
    assert length >= count - 10
    _, wanted = in_order(fresh, 0)
    for (keys, values), (fresh_keys, fresh_values) in zip(held, wanted, strict=True):
        torch.testing.assert_close(keys, fresh_keys[:, :length], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, fresh_values[:, :length], atol=1e-5, rtol=1e-5)
    state = drafter.start(text[:, 0])
    lengths = torch.tensor([text.shape[1] - 1])
    states = type(states)(*(None if t is None else t[:, :-1] for t in states))
    drafter.advance(state, text[:, 1:], lengths, states)
    if name == "draft_lm" and seen.state.nodes is not None:
        drafter._forget_nodes(seen.state)
    length, held = in_order(seen.state.cache, 0)
    _, wanted = in_order(state.cache, 0)
    assert length >= count - 20
    for (keys, values), (fresh_keys, fresh_values) in zip(held, wanted, strict=True):
        torch.testing.assert_close(keys, fresh_keys[:, :length], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, fresh_values[:, :length], atol=1e-5, rtol=1e-5)


# ---- tokenizers --------------------------------------------------------------------------------


def test_a_model_with_another_tokenizer_is_refused_with_the_reason():
    model = endless()
    other = endless()
    other.tokenizer = tokenizer(60)
    with pytest.raises(ValueError, match=r"another tokenizer .* 60 tokens against 64, 4 of"):
        DraftLM(other, model, LossConfig())


def test_a_draft_model_may_have_a_shorter_padded_vocabulary():
    """64 tokens in both tokenizers; the verifier's head has eight rows more, the drafter's 4."""
    model = tiny_verifier(vocab_size=72, num_hidden_layers=2)
    small = tiny_verifier(vocab_size=68, num_hidden_layers=2, seed=1)
    model.tokenizer = small.tokenizer = tokenizer(64)
    model.terminator_ids = ()
    drafter = DraftLM(small, model, LossConfig())
    settings = {"shape": chain(3), "sampling": Sampling(), "drafting": GREEDY}
    (got,) = generate(model, drafter, [[5, 9]], max_new_tokens=12, **settings)
    (alone,) = generate(model, None, [[5, 9]], max_new_tokens=12, **settings)
    assert got.tokens == alone.tokens
    drafter = DraftLM(model, small, LossConfig())  # and the other way round
    small.terminator_ids = ()
    (got,) = generate(small, drafter, [[5, 9]], max_new_tokens=12, **settings)
    (alone,) = generate(small, None, [[5, 9]], max_new_tokens=12, **settings)
    assert got.tokens == alone.tokens


def test_the_whole_verifier_as_drafter_is_always_right():
    model = endless(num_hidden_layers=3)
    drafter = DraftLM(cut(model, (0, 1, 2)), model, LossConfig())
    for shape in SHAPES.values():
        (got,) = generate(model, drafter, PROMPTS[:1], shape=shape, sampling=Sampling(),
                          drafting=GREEDY, max_new_tokens=21)  # fmt: skip
        assert got.examined == got.accepted
        if shape != SHAPES["dynamic"]:  # which may leave its deepest level out
            assert got.rounds == -(-20 // (shape.depth + 1))


@pytest.mark.parametrize("layers", [(), (0, 9), (-1,)])
def test_a_cut_to_layers_that_are_not_there_is_refused(layers):
    with pytest.raises(ValueError, match="layers must be ids in 0 … 3"):
        cut(endless(), layers)
