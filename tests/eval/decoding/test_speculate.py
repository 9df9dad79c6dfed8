"""Decoding gives the verifier's own output: token by token when greedy, in law when sampled."""

import random as python_random
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from small_texts import END, PROMPT, PROMPTS, ROWS, WIDTH, endless, exact_law, plain, small
from tiny import verifier

from headstart.eval.decoding import rejection
from headstart.eval.decoding.lossless import chi_square
from headstart.eval.decoding.speculate import Timer, generate
from headstart.eval.decoding.typical import Typical
from headstart.eval.measures.counts import summarise
from headstart.models.drafter import Drafter
from headstart.models.proposal.growth import grow
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import Sampling, draw
from headstart.models.proposal.trees import Dynamic, cartesian, chain, static
from headstart.models.verifier.cache import RaggedCache

FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss", "gpt_neox"]
GREEDY: dict[str, Any] = {"sampling": Sampling(), "drafting": Drafting(False, Sampling())}


class Script(Drafter):
    """Knows the texts to come and drafts from them, each token right with a given probability.

    What it drafts depends on the text alone. `ragged` varies the number of drafts, 0 included.
    """

    def __init__(self, model, prompts, count, accuracy, ragged=False):
        self.answers = {tuple(p): plain(model, p, count) for p in prompts}
        self.texts = [list(p) + a + a for p, a in zip(prompts, self.answers.values(), strict=True)]
        self.accuracy, self.ragged = accuracy, ragged
        self.asked: list[int] = []

    def start(self, first_tokens):
        return [[token] for token in first_tokens.tolist()]

    def advance(self, state, tokens, lengths, states):
        assert states.last_hidden.shape[:2] == tokens.shape
        for text, row, length in zip(state, tokens.tolist(), lengths.tolist(), strict=True):
            text += row[:length]

    def propose(self, state, shape, drafting, random):
        draft_length = shape.depth
        self.asked.append(draft_length)
        tokens, lengths = [], []
        for text in state:
            dice = python_random.Random(str(text))
            lengths.append(min(dice.randint(0, 4) if self.ragged else 99, draft_length))
            follow = next(t for t in self.texts if t[: len(text)] == text)[len(text) :]
            drafts = [t if dice.random() < self.accuracy else t ^ 1 for t in follow[:draft_length]]
            tokens.append(drafts)
        width = max(lengths)
        tokens = torch.tensor(tokens)[:, :width]
        parents = torch.arange(-1, width - 1).expand_as(tokens)
        real = torch.arange(width) < torch.tensor(lengths)[:, None]
        return Proposal(tokens, parents, real, None, None)

    def select_rows(self, state, rows):
        state[:] = [state[row] for row in rows.tolist()]


# ---- greedy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_verifiers_alone_and_in_a_ragged_batch(family, ragged):
    model = endless(family)
    drafter = Script(model, PROMPTS, 30, accuracy=0.6, ragged=ragged)
    batch = generate(model, drafter, PROMPTS, shape=chain(4), max_new_tokens=30, **GREEDY)
    for prompt, got in zip(PROMPTS, batch, strict=True):
        (alone,) = generate(model, drafter, [prompt], shape=chain(4), max_new_tokens=30, **GREEDY)
        assert got.tokens == drafter.answers[tuple(prompt)]
        assert got == alone
        assert 0 < sum(got.accepted) < sum(got.examined) < sum(got.drafted)


def test_without_a_drafter_it_is_plain_decoding():
    model = endless()
    batch = generate(model, None, PROMPTS, shape=None, max_new_tokens=12, **GREEDY)
    for prompt, got in zip(PROMPTS, batch, strict=True):
        assert got.tokens == plain(model, prompt, 12)
        assert (got.rounds, got.drafted) == (11, [])


def test_an_oracle_is_accepted_k_of_k_every_round():
    model = endless()
    drafter = Script(model, PROMPTS, 21, accuracy=1.0)
    batch = generate(model, drafter, PROMPTS, shape=chain(4), max_new_tokens=21, **GREEDY)
    for prompt, got in zip(PROMPTS, batch, strict=True):
        assert got.tokens == drafter.answers[tuple(prompt)]
        assert got.rounds == 4
        assert got.drafted == got.examined == got.accepted == [4, 4, 4, 4]
    measured = summarise([got.counts(str(i)) for i, got in enumerate(batch)])
    assert measured["acceptance_length"]["value"] == measured["tokens_per_round"] == 5


def test_noise_is_never_accepted_and_changes_nothing():
    model = endless()
    drafter = Script(model, PROMPTS, 20, accuracy=0.0)
    batch = generate(model, drafter, PROMPTS, shape=chain(3), max_new_tokens=20, **GREEDY)
    for prompt, got in zip(PROMPTS, batch, strict=True):
        assert got.tokens == drafter.answers[tuple(prompt)]
        assert (got.rounds, sum(got.accepted)) == (19, 0)


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("accuracy", [1.0, 0.5])
def test_max_new_tokens_is_exact_and_nothing_is_drafted_beyond_it(count, accuracy):
    model = endless()
    drafter = Script(model, PROMPTS, 9, accuracy)
    batch = generate(model, drafter, PROMPTS, shape=chain(3), max_new_tokens=count, **GREEDY)
    for prompt, got in zip(PROMPTS, batch, strict=True):
        assert got.tokens == drafter.answers[tuple(prompt)][:count]
    drafter.asked.clear()
    (alone,) = generate(model, drafter, PROMPTS[:1], shape=chain(3), max_new_tokens=count, **GREEDY)
    assert alone == batch[0]
    if accuracy == 1.0:  # the last round drafts what is left, and no more
        left = [count - 1 - 4 * i for i in range((count + 2) // 4)]
        asked = [min(3, tokens) for tokens in left]
        assert alone.rounds == len(left)
        assert drafter.asked == asked
        assert sum(alone.drafted) == sum(alone.accepted) == sum(asked)


def test_a_terminator_inside_an_accepted_block_ends_the_output():
    model = endless()
    drafter = Script(model, PROMPTS[:1], 20, accuracy=1.0)
    answer = drafter.answers[tuple(PROMPTS[0])]
    # block 0 is prefill's token, then come blocks of five; the terminator: third of the second
    stop = next(i for i in range(6, 10) if answer[i] not in answer[:i])
    model.terminator_ids = (answer[stop], 63 if answer[stop] != 63 else 62)
    (got,) = generate(model, drafter, PROMPTS[:1], shape=chain(4), max_new_tokens=20, **GREEDY)
    inside = stop - 5
    assert got.tokens == answer[: stop + 1]
    assert got.rounds == 2
    assert got.drafted == [2, 2, 2, 2]
    assert got.examined == got.accepted == [1 + (i < inside) for i in range(4)]


def test_the_first_of_several_terminators_ends_each_row():
    model = endless()
    drafter = Script(model, PROMPTS, 25, accuracy=0.7)
    stops = {answer[3 + 4 * i] for i, answer in enumerate(drafter.answers.values())}
    model.terminator_ids = tuple(stops)
    batch = generate(model, drafter, PROMPTS, shape=chain(4), max_new_tokens=25, **GREEDY)
    for prompt, got in zip(PROMPTS, batch, strict=True):
        answer = drafter.answers[tuple(prompt)]
        end = next(i for i, token in enumerate(answer) if token in stops)
        assert got.tokens == answer[: end + 1]
    assert len({len(got.tokens) for got in batch}) > 1


def test_a_terminator_out_of_prefill_has_no_round():
    model = endless()
    drafter = Script(model, PROMPTS, 8, accuracy=1.0)
    model.terminator_ids = (drafter.answers[tuple(PROMPTS[1])][0],)
    batch = generate(model, drafter, PROMPTS, shape=chain(2), max_new_tokens=8, **GREEDY)
    assert batch[1].tokens == list(model.terminator_ids)
    assert batch[1].rounds == 0 and batch[0].rounds > 0


# ---- caches ------------------------------------------------------------------------------------


class Checking(Script):
    """Compares the verifier's cache and the states it is handed with a fresh pass."""

    feature_layers = (1, 3)

    def watch(self, model, monkeypatch):
        self.model, self.caches = model, []
        new_cache = model.new_cache

        def recorded(batch_size):
            self.caches.append(new_cache(batch_size))
            return self.caches[-1]

        monkeypatch.setattr(model, "new_cache", recorded)

    def advance(self, state, tokens, lengths, states):
        super().advance(state, tokens, lengths, states)
        (cache,) = self.caches
        for row, text in enumerate(state):
            fresh = type(cache)(1)
            ids = torch.tensor([text[:-1]])
            wanted = self.model.states(ids, self.feature_layers, cache=fresh)
            new = slice(len(text) - 1 - int(lengths[row]), len(text) - 1)
            for got, want in zip(states, wanted, strict=True):
                torch.testing.assert_close(
                    got[row, : lengths[row]], want[0, new], atol=1e-4, rtol=1e-4
                )
            order = cache.positions[row].argsort(stable=True)
            order = order[int((cache.positions[row] < 0).sum()) :]
            assert cache.positions[row, order].tolist() == list(range(len(text) - 1))
            for held, made in zip(cache.layers, fresh.layers, strict=True):
                for name in ("keys", "values"):
                    got, want = getattr(held, name)[row][:, order], getattr(made, name)[0]
                    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)

    def check(self, model, prompts, count, monkeypatch):
        self.watch(model, monkeypatch)
        return generate(model, self, prompts, shape=chain(4), max_new_tokens=count, **GREEDY)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "ragged"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_cache_and_states_equal_a_fresh_pass_after_every_round(family, prompts, monkeypatch):
    model = endless(family)
    drafter = Checking(model, prompts, 24, accuracy=0.6)
    batch = drafter.check(model, prompts, 24, monkeypatch)
    assert [got.tokens for got in batch] == list(drafter.answers.values())
    if len(prompts) == 1:
        assert not drafter.caches[0].has_holes


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "ragged"])
def test_a_skipped_rollback_is_seen_in_the_cache(prompts, monkeypatch):
    model = endless()
    drafter = Checking(model, prompts, 12, accuracy=0.6)
    monkeypatch.setattr(RaggedCache, "keep_path", lambda *_: None)
    with pytest.raises(AssertionError):
        drafter.check(model, prompts, 12, monkeypatch)


# ---- sampled: the loop -------------------------------------------------------------------------


class Bigram(Drafter):
    """Drafts from a table: the law of a token given the one before, over `vocabulary`."""

    def __init__(self, width: int, vocabulary: torch.Tensor | None = None, seed: int = 0):
        self.vocabulary = vocabulary
        columns = width if vocabulary is None else len(vocabulary)
        self.table = torch.randn(width, columns, generator=torch.Generator().manual_seed(seed))

    def start(self, first_tokens):
        return {"last": first_tokens}

    def advance(self, state, tokens, lengths, states):
        state["last"] = tokens[torch.arange(len(tokens)), lengths - 1]

    def propose(self, state, shape, drafting, random):
        first = self.table[state["last"]]
        return grow(first, lambda nodes: self.table[nodes.tokens], shape, drafting, random,
                    self.vocabulary)  # fmt: skip

    def select_rows(self, state, rows):
        state["last"] = state["last"][rows]


THREE = chain(3)


def loop_p_value(
    sampling, drafting, shape=THREE, vocabulary=None, law_of=None, acceptance=None
) -> float:
    """Chi-square of the first three tokens of 20,000 rows through the real loop."""
    model = small()
    law = exact_law(model, law_of or sampling)
    drafter = None if drafting is None else Bigram(WIDTH, vocabulary)
    if shape == "mixed":
        drafter, shape = Mixed(WIDTH), cartesian(3, 2)
    batch = generate(
        model,
        drafter,
        [PROMPT] * ROWS,
        shape=shape,
        sampling=sampling,
        drafting=drafting,
        max_new_tokens=4,
        seed=1,
        acceptance=acceptance,
    )
    texts = torch.full((ROWS, 3), WIDTH)
    for row, got in enumerate(batch):
        first = torch.tensor(got.tokens[:3])
        texts[row, : len(first)] = first
    cells = (texts * torch.tensor([49, 7, 1])).sum(1)
    return chi_square(cells.bincount(minlength=343), law.flatten()).p_value


class Mixed(Bigram):
    """Two children drawn without replacement, the likeliest of the rest; below the first, the
    likeliest and one drawn from what is left. Five nodes, of which two are point masses."""

    def propose(self, state, shape, drafting, random):
        first, rows = self.table[state["last"]], len(state["last"])
        uniform, probs = random.uniform(3), drafting.sampling.probs
        law = probs(first)
        a = draw(law, uniform[:, 0])
        without_a = norm(law.scatter(1, a[:, None], 0.0))
        b = draw(without_a, uniform[:, 1])
        c = without_a.scatter(1, b[:, None], 0.0).argmax(-1)
        below = probs(self.table[a])
        d = below.argmax(-1)
        without_d = norm(below.scatter(1, d[:, None], 0.0))
        e = draw(without_d, uniform[:, 2])
        c_point, d_point = (torch.nn.functional.one_hot(t, self.table.shape[1]) for t in (c, d))
        tokens = torch.stack([a, b, c, d, e], 1)
        log_probs = torch.stack([law, without_a, c_point, d_point, without_d], 1).float().log()
        parents = torch.tensor([-1, -1, -1, 0, 0]).expand(rows, -1)
        keep = [i for i, depth in enumerate((1, 1, 1, 2, 2)) if depth <= shape.depth]
        real = torch.ones(rows, len(keep), dtype=torch.bool)
        return Proposal(tokens[:, keep], parents[:, keep], real, log_probs[:, keep], None)


def norm(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)


WARM, SEVEN = (
    Drafting(True, Sampling(1.0)),
    static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
)
NUCLEUS = Sampling(1.0, 0, 0.9)
LOOPS = {
    "sampled": (Sampling(1.0), WARM),
    "sampled hotter": (Sampling(0.8), Drafting(True, Sampling(1.5))),
    "greedy drafts": (Sampling(1.2), GREEDY["drafting"]),
    "draft vocabulary": (Sampling(1.0), WARM, THREE, torch.tensor([0, 2, 3, 5])),
    "top-k, top-p": (Sampling(1.5, 5, 0.9), Drafting(True, Sampling(1.0, 3))),
    "no drafter": (Sampling(1.0), None),
    "sampled tree at 0.7": (Sampling(0.7), Drafting(True, Sampling(0.7)), SEVEN),
    "sampled tree at 1.3": (Sampling(1.3), Drafting(True, Sampling(1.3)), SEVEN),
    "sampled tree, top-p": (NUCLEUS, Drafting(True, NUCLEUS), SEVEN),
    "sampled tree, draft vocabulary": (Sampling(1.3), WARM, SEVEN, torch.tensor([0, 2, 3, 5])),
    "deterministic tree at 0.7": (Sampling(0.7), GREEDY["drafting"], SEVEN),
    "deterministic tree at 1.3": (Sampling(1.3), GREEDY["drafting"], SEVEN),
    "deterministic tree, top-p": (NUCLEUS, GREEDY["drafting"], SEVEN),
    "dynamic tree at 1.3": (Sampling(1.3), GREEDY["drafting"], Dynamic(3, 2, 7)),
    "dynamic tree, top-p": (Sampling(0.7, 0, 0.9), GREEDY["drafting"], Dynamic(3, 2, 7)),
    "mixed tree at 0.7": (Sampling(0.7), Drafting(True, Sampling(0.7)), "mixed"),
    "mixed tree at 1.3": (Sampling(1.3), WARM, "mixed"),
    "mixed tree, top-p": (NUCLEUS, WARM, "mixed"),
}


@pytest.mark.parametrize("case", LOOPS)
def test_joint_law_of_three_tokens_through_the_loop_is_the_verifiers(case):
    assert loop_p_value(*LOOPS[case]) > 0.001


def test_a_soft_maxed_residual_is_seen_through_the_loop(monkeypatch):
    monkeypatch.setattr(rejection, "residual", lambda q, p: (q - p).clamp(min=0).softmax(-1))
    assert loop_p_value(*LOOPS["sampled"]) < 1e-6


def test_a_verifier_whose_temperature_is_ignored_is_seen_through_the_loop():
    # verification at temperature 1 where 0.8 was asked for
    _, drafting = LOOPS["sampled hotter"]
    assert loop_p_value(Sampling(1.0), drafting, law_of=Sampling(0.8)) < 1e-6


@pytest.mark.parametrize(
    "case", ["sampled", "greedy drafts", "sampled tree at 0.7", "dynamic tree at 1.3"]
)
def test_typical_acceptance_is_seen_to_be_lossy_through_the_loop(case):
    assert loop_p_value(*LOOPS[case], acceptance=Typical()) < 1e-6


def test_without_drafts_typical_acceptance_has_nothing_to_lose():
    assert loop_p_value(*LOOPS["no drafter"], acceptance=Typical()) > 0.001


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_a_rows_text_does_not_depend_on_its_batch(sampled):
    model, drafter = verifier(), Bigram(64, seed=4)
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    settings = {
        "shape": chain(3),
        "sampling": Sampling(1.0, 50, 0.95),
        "drafting": Drafting(sampled, Sampling(0.3)),
        "max_new_tokens": 16,
        "seed": 7,
    }
    batch = generate(model, drafter, PROMPTS, row_ids=[8, 6, 4, 2], **settings)
    for prompt, row, got in zip(PROMPTS, [8, 6, 4, 2], batch, strict=True):
        assert generate(model, drafter, [prompt], row_ids=[row], **settings) == [got]
    assert len({tuple(got.tokens) for got in batch}) == len(PROMPTS)


# ---- the rest ----------------------------------------------------------------------------------


def test_a_timer_accounts_for_the_whole_call():
    model = endless()
    drafter = Script(model, PROMPTS[:1], 16, accuracy=0.5)
    timer = Timer()
    (got,) = generate(
        model, drafter, PROMPTS[:1], shape=chain(3), max_new_tokens=16, timer=timer, **GREEDY
    )
    assert timer.rounds == got.rounds
    assert min(timer.prefill, timer.proposal, timer.verification, timer.upkeep) > 0
    assert timer.verification > timer.proposal


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0"),
        ({"max_new_tokens": 510}, "prompt 0 has 3 tokens.*context of 'tiny/llama', 512"),
        ({"prompts": [[4], []]}, "prompt 1 is empty"),
        ({"prompts": []}, "there is none"),
    ],
)
def test_what_cannot_be_decoded_is_refused_in_one_line(change, message):
    model = endless()
    arguments = {"prompts": PROMPTS[:1], "shape": chain(2), "max_new_tokens": 4} | GREEDY | change
    with pytest.raises(ValueError, match=message) as error:
        generate(model, Bigram(64), **arguments)
    assert "\n" not in str(error.value)


def test_a_prompt_may_fill_the_context_to_the_last_token():
    model = endless(max_position_embeddings=16)
    prompts = [list(range(3, 13)), [5]]
    drafter = Script(model, prompts, 6, accuracy=0.5)
    batch = generate(model, drafter, prompts, shape=chain(5), max_new_tokens=6, **GREEDY)
    assert [got.tokens for got in batch] == list(drafter.answers.values())
    assert all(a != b for a, b in pairwise(drafter.answers.values()))


def test_exact_law_sums_to_one():
    law = exact_law(small(), Sampling(1.0))
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)
    possible = [law[text] > 0 for text in product(range(6), repeat=3) if END not in text[:2]]
    assert all(possible)
