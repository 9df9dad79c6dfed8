"""Replay against every path worked out one by one, and against real decoding."""

import pytest
import torch
from replayed import (
    GREEDY,
    LIMIT,
    PROMPTS,
    answered,
    assert_equal,
    decoded_and_replayed,
    flat,
    verifier_of,
)

from headstart.data.rows.collate import collate
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding.speculate import generate
from headstart.eval.measures.counts import summarise
from headstart.eval.measures.replay import (
    acceptance_table,
    count_turn,
    rank_acceptance,
    replay,
    replay_rows,
    turns,
)
from headstart.models.batch import Batch
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.losses import LossConfig
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain
from headstart.models.verifier.verifier import Verifier

# ---- counting ----------------------------------------------------------------------------------


class Walk:
    """Every way that rounds can go over one answer, by plain recursion."""

    def __init__(self, table, first, last, draft_length, limit):
        self.table, self.last, self.length, self.limit = table, last, draft_length, limit
        self.rounds = 0.0
        self.drafted, self.examined, self.accepted = ([0.0] * draft_length for _ in range(3))
        self.round(first, 1.0)

    def round(self, known: int, chance: float) -> None:
        """A round that begins when the token at `known` is the last one written."""
        if known >= self.last:
            return
        self.rounds += chance
        for i in range(self.length):
            if known + 1 + i <= self.limit:
                self.drafted[i] += chance
        self.draft(known, 0, chance)

    def draft(self, known: int, i: int, chance: float) -> None:
        position = known + 1 + i
        if position > self.last:  # all there was to write came from drafts
            return
        if i == self.length:  # all accepted: the verifier adds a token
            self.round(position, chance)
            return
        a = self.table[known - 1][i]
        self.examined[i] += chance
        self.accepted[i] += chance * a
        if a > 0:
            self.draft(known, i + 1, chance * a)
        if a < 1:
            self.round(position, chance * (1 - a))


@pytest.mark.parametrize("certain", [False, True], ids=["chances", "zeros and ones"])
@pytest.mark.parametrize("draft_length", [1, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_counts_equal_the_sum_over_all_paths(length, draft_length, certain):
    torch.manual_seed(length * 10 + draft_length)
    first, last = 4, 4 + length - 1
    table = torch.rand(16, draft_length, dtype=torch.double)
    if certain:
        table = table.round()
    for spare in (0, 2, 100):
        limit = last + spare
        got = count_turn(table.tolist(), first, last, draft_length, limit)
        walk = Walk(table.tolist(), first, last, draft_length, limit)
        assert got.tokens == length
        assert got.rounds == pytest.approx(walk.rounds)
        for name in ("drafted", "examined", "accepted"):
            assert getattr(got, name) == pytest.approx(getattr(walk, name)), name


def test_a_one_token_answer_has_no_round():
    counts = count_turn([[1.0, 1.0]] * 4, 2, 2, 2)
    assert (counts.tokens, counts.rounds, counts.examined) == (1, 0, [0, 0])


def test_without_a_limit_every_round_drafts_k():
    counts = count_turn([[1.0] * 3] * 9, 2, 6, 3)
    assert counts.rounds == 1 and counts.drafted == [1, 1, 1]
    counts = count_turn([[1.0] * 3] * 9, 2, 4, 3, limit=4)
    assert counts.drafted == counts.examined == counts.accepted == [1, 1, 0]


@pytest.mark.parametrize(
    "mask, documents, expected",
    [
        ([0, 0, 1, 1, 0, 2, 2, 2], [0] * 8, [(0, 2, 3), (0, 5, 7)]),
        ([0, 1, 1, 2, 2, 0], [0] * 6, [(0, 1, 2), (0, 3, 4)]),  # turns that touch
        ([1, 1, 1, 1], [0] * 4, [(0, 1, 3)]),  # plain text: nothing to draft its first from
        ([0, 1, 1, 1, 1, 0, 1], [0, 0, 0, 1, 1, 1, 1], [(0, 1, 2), (1, 4, 4), (1, 6, 6)]),
        ([0, 1, 1, 0, 0], [0, 0, 0, -1, -1], [(0, 1, 2)]),
        ([0, 0, 0], [0, 0, 0], []),
    ],
)
def test_turns_are_found(mask, documents, expected):
    assert turns(mask, documents) == expected


# ---- against decoding --------------------------------------------------------------------------


def trained(verifier: Verifier, rows: list[Row], steps: int, draft_vocab_size=None) -> Eagle3:
    """A drafter that knows part of `rows`."""
    counts = torch.zeros(64)
    for row in rows:
        counts += torch.tensor(row.input_ids).bincount(minlength=64)
    config = Eagle3Config(draft_vocab_size=draft_vocab_size)
    torch.manual_seed(0)
    drafter = Eagle3.create(verifier, config, LossConfig("ce", num_steps=3), counts)
    batch = with_states(drafter, collate(rows, 64, packed=False))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    weights = drafter.loss.step_weights() / batch["loss_mask"].sum()
    for _ in range(steps):
        optimizer.zero_grad()
        drafter(batch, weights).value.backward()
        optimizer.step()
    return drafter


def with_states(drafter: Eagle3, batch: Batch) -> Batch:
    """As `Featurizer`, at once; right where rows are single documents."""
    states = drafter.verifier.states(batch["input_ids"], drafter.feature_layers)
    return Batch(**batch, features=states.features, last_hidden=states.last_hidden)


@pytest.fixture(scope="module", params=[None, 48], ids=["whole", "draft vocabulary"])
def partly_trained(request) -> Eagle3:
    verifier = verifier_of()
    settings = {"shape": None, "sampling": Sampling(), "drafting": GREEDY}
    texts = generate(verifier, None, PROMPTS, max_new_tokens=LIMIT, **settings)
    rows = [answered(p, t.tokens) for p, t in zip(PROMPTS, texts, strict=True)]
    return trained(verifier, rows, 28, request.param)


@pytest.fixture
def stopping(partly_trained):
    """With terminators: tokens that some of the answers have."""
    partly_trained.verifier.terminator_ids = (17, 40, 44)
    yield partly_trained
    partly_trained.verifier.terminator_ids = ()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("draft_length", [1, 2, 4])
def test_replay_equals_decoding_at_temperature_zero(partly_trained, draft_length, packed):
    decoded, replayed = decoded_and_replayed(partly_trained, draft_length, LIMIT, packed)
    if not packed:
        for got, expected in zip(replayed, decoded, strict=True):
            assert_equal(got, expected)
    whole = summarise(replayed)["acceptance_length"]["value"]
    assert whole == pytest.approx(summarise(decoded)["acceptance_length"]["value"], abs=1e-12)
    assert 1.2 < whole < 1 + 0.95 * draft_length  # neither hopeless nor perfect
    for name in ("rounds", "tokens"):
        assert sum(getattr(c, name) for c in replayed) == sum(getattr(c, name) for c in decoded)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 9])
def test_replay_equals_decoding_where_the_limit_cuts(partly_trained, limit):
    decoded, replayed = decoded_and_replayed(partly_trained, 4, limit, packed=False)
    for got, expected in zip(replayed, decoded, strict=True):
        assert got.tokens == limit
        assert_equal(got, expected)


def test_replay_equals_decoding_where_terminators_end_answers(stopping):
    decoded, replayed = decoded_and_replayed(stopping, 4, LIMIT, packed=False)
    for got, expected in zip(replayed, decoded, strict=True):
        assert_equal(got, expected)
    assert len({counts.tokens for counts in decoded}) > 2
    assert any(c.examined != c.drafted and sum(c.accepted) for c in decoded)


def test_a_limit_replays_the_beginning_of_longer_answers(partly_trained):
    decoded, _ = decoded_and_replayed(partly_trained, 4, 7, packed=False)
    settings = {"shape": None, "sampling": Sampling(), "drafting": GREEDY}
    texts = generate(partly_trained.verifier, None, PROMPTS, max_new_tokens=LIMIT, **settings)
    rows = [answered(p, t.tokens) for p, t in zip(PROMPTS, texts, strict=True)]
    batch = with_states(partly_trained, collate(rows, 64, packed=False))
    replayed = flat(replay(partly_trained, [batch], 4, Sampling(), GREEDY, max_new_tokens=7))
    for got, expected in zip(replayed, decoded, strict=True):
        assert_equal(got, expected)


def test_every_turn_of_a_conversation_is_replayed_after_its_own_context(partly_trained):
    settings = {"shape": chain(3), "sampling": Sampling(), "drafting": GREEDY}
    verifier, text, mask, decoded = partly_trained.verifier, [], [], []
    for turn, prompt in enumerate([[5, 9, 11], [7], [20, 4]], 1):
        text, mask = text + prompt, mask + [0] * len(prompt)
        (output,) = generate(verifier, partly_trained, [text], max_new_tokens=9, **settings)
        text, mask = text + output.tokens, mask + [turn] * 9
        decoded.append(output.counts("row"))
    featurize = Featurizer(verifier, partly_trained.feature_layers)
    other = answered([50, 51], [1, 3, 5, 8])
    batch = featurize(collate([Row(text, mask, "row"), other], 64, packed=True))
    assert len(batch["input_ids"]) == 1
    replayed = flat(replay(partly_trained, [batch], 3, Sampling(), GREEDY, max_new_tokens=9))
    assert len(replayed) == 4
    for got, expected in zip(replayed, decoded, strict=False):
        assert_equal(got, expected)


SAMPLED = Drafting(True, Sampling(1.0))
LAWS = {  # the verifier's, the drafts', draft vocabulary
    "sampled": (Sampling(1.0), SAMPLED, None),
    "draft vocabulary": (Sampling(1.0), SAMPLED, 40),
    "other laws": (Sampling(0.9, 12, 0.9), Drafting(True, Sampling(1.4, 20)), 40),
    "greedy drafts": (Sampling(0.3), GREEDY, 40),
    "greedy text, sampled drafts": (Sampling(), Drafting(True, Sampling(0.3)), None),
}


@pytest.mark.parametrize("law", LAWS)
def test_replay_lies_in_the_interval_of_sampled_decoding(law):
    sampling, drafting, draft_vocab_size = LAWS[law]
    verifier = verifier_of(0.35)
    count, limit = 1500, 9
    prompts = [[3 + i % 60, 5] for i in range(count)]
    settings = {"shape": chain(3), "sampling": sampling, "drafting": drafting}
    plain = generate(verifier, None, prompts[:60], max_new_tokens=limit, seed=5, **settings)
    texts = [answered(p, t.tokens) for p, t in zip(prompts, plain, strict=False)]
    drafter = trained(verifier, texts, 30, draft_vocab_size)
    verifier.terminator_ids = (3, 30)
    outputs = generate(verifier, drafter, prompts, max_new_tokens=limit, seed=1, **settings)
    decoded = summarise([o.counts(str(i)) for i, o in enumerate(outputs)])
    rows = [answered(p, o.tokens) for p, o in zip(prompts, outputs, strict=True)]
    parts = (rows[i : i + 250] for i in range(0, count, 250))
    batches = [with_states(drafter, collate(part, 64, packed=False)) for part in parts]
    replayed = summarise(flat(replay(drafter, batches, 3, sampling, drafting, limit)))
    for name in ("acceptance_length", "acceptance_rate"):
        interval = decoded[name]
        assert interval["low"] < replayed[name]["value"] < interval["high"], name
    assert interval["high"] - interval["low"] < 0.04 and interval["low"] > 0.03
    assert replayed["draft_efficiency"] == pytest.approx(decoded["draft_efficiency"], abs=0.02)
    assert replayed["tokens_per_round"] == pytest.approx(decoded["tokens_per_round"], rel=0.02)
    reached = decoded["rounds"]
    for i in range(3):
        got, expected = replayed["conditional"][i], decoded["conditional"][i]
        assert got == pytest.approx(expected, abs=4 * (0.25 / reached) ** 0.5)
        reached *= decoded["conditional"][i]


def test_a_table_is_zero_off_the_answer_and_a_chance_on_it(partly_trained):
    rows = [answered([5, 9, 11], [6, 7, 8, 9, 10, 12])]
    batch = with_states(partly_trained, collate(rows, 64, packed=False))
    table = acceptance_table(partly_trained, batch, 3, Sampling(1.0), Drafting(True, Sampling(1.0)))
    assert table.shape == (1, 9, 3) and table.dtype == torch.double
    assert (table >= 0).all() and (table <= 1).all()
    ids, known = rows[0].input_ids, partly_trained.draft_ids
    for s in range(3):
        answers = [t for t in range(9) if 3 <= t + 2 + s < 9]
        inside = [t for t in answers if known is None or ids[t + 2 + s] in known]
        assert table[0, :, s].nonzero()[:, 0].tolist() == inside


def test_rows_are_replayed_in_batches_of_like_length_under_their_names(partly_trained):
    """The rows in any order, a turn too short to draft for among them, give the same counts."""
    verifier = partly_trained.verifier
    ids = torch.randint(3, 64, (5, 20)).tolist()
    rows = [
        Row(row[:n], [0] * 3 + [1] * (n - 3), id=f"r{n}", category="even" if n % 2 == 0 else "odd")
        for row, n in zip(ids, (9, 20, 4, 14, 17), strict=True)
    ]
    rows.append(Row([5], [1], id="one token"))
    featurize = Featurizer(verifier, partly_trained.feature_layers)
    found = replay_rows(partly_trained, rows, featurize, 3, Sampling(), GREEDY)
    assert {count.id for count in found} == {row.id for row in rows} - {"one token"}
    for count in found:
        row = next(row for row in rows if row.id == count.id)
        (alone,) = replay_rows(partly_trained, [row], featurize, 3, Sampling(), GREEDY)
        assert alone == count and count.category == row.category


# ---- acceptance by rank ------------------------------------------------------------------------


@torch.no_grad()
def test_rank_acceptance_equals_counting_in_plain_loops(partly_trained):
    """Slot by slot: which choice of the drafter the text is, as long as it was among the first."""
    verifier, depth, ranks = partly_trained.verifier, 3, 4
    settings = {"shape": None, "sampling": Sampling(), "drafting": GREEDY}
    texts = generate(verifier, None, PROMPTS, max_new_tokens=LIMIT, **settings)
    rows = [answered(p, t.tokens) for p, t in zip(PROMPTS, texts, strict=True)]
    featurize = Featurizer(verifier, partly_trained.feature_layers)
    got = rank_acceptance(partly_trained, rows, featurize, depth, ranks)
    right, asked = torch.zeros(depth, ranks), torch.zeros(depth)
    for row in rows:
        batch = featurize(collate([row], len(row.input_ids), packed=False))
        laws = [partly_trained.logits(h, 0)[0] for h in partly_trained.unroll(batch, depth)]
        ids, mask = row.input_ids, row.loss_mask
        for t in range(len(ids)):
            for s in range(depth):
                if t + s + 2 >= len(ids) or not all(mask[t + 1 : t + s + 3]):
                    break
                asked[s] += 1
                choices = laws[s][t].argsort(descending=True)[:ranks]
                if partly_trained.draft_ids is not None:
                    choices = partly_trained.draft_ids[choices]
                if ids[t + s + 2] not in choices.tolist():
                    break
                right[s, choices.tolist().index(ids[t + s + 2])] += 1
    assert right.sum() > 20
    torch.testing.assert_close(got, (right / asked[:, None]).double())
