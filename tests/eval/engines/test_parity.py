"""Our chain loop's rounds as vLLM counts them, and what a difference comes from."""

import pytest
import tiny
import torch
from overfit import answered_rows, learn
from steps import in_steps

from headstart.data.rows.row import Row
from headstart.eval.decoding.speculate import generate
from headstart.eval.engines.metrics import EngineCounts
from headstart.eval.engines.parity import (
    TIE,
    Answer,
    Deviation,
    deviations,
    engine_answer,
    judge,
    margins,
    own_answer,
)
from headstart.models.drafter import TrainableDrafter
from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.medusa import Medusa, MedusaConfig
from headstart.models.losses import LossConfig
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain

K, LENGTH = 3, 24
LOSS = LossConfig("hard_ce", num_steps=K, gamma=1.0)
MAKERS = {
    "eagle3": lambda v: Eagle3.create(v, Eagle3Config(draft_vocab_size=40), LOSS, torch.arange(64)),
    "medusa": lambda v: Medusa.create(v, MedusaConfig(), LOSS, torch.ones(64)),
    "draft_lm": lambda v: DraftLM.create(v, DraftLMConfig("layers:0,7"), LOSS),
}


@pytest.fixture(scope="module", params=MAKERS)
def half_trained(request) -> tuple[TrainableDrafter, list[Row]]:
    """A drafter that is right often and wrong often on the rows."""
    verifier = tiny.verifier(hidden_size=64, intermediate_size=128)
    verifier.terminator_ids = ()
    random = torch.Generator().manual_seed(8)
    prompts = torch.randint(3, 64, (3, 5), generator=random).tolist()
    rows = answered_rows(verifier, prompts, LENGTH + K + 1)
    torch.manual_seed(0)
    drafter = MAKERS[request.param](verifier)
    learn(drafter, rows, 5e-3, enough=0.6)
    return drafter, rows


def counts_of(answer: Answer) -> EngineCounts:
    rounds = len(answer.accepted)
    return EngineCounts(rounds, K * rounds, [float(a) for a in answer.by_position(K)], LENGTH)


def test_rounds_are_those_of_the_loop(half_trained):
    """An answer that ends with a round is counted alike by both."""
    drafter, rows = half_trained
    greedy = {"sampling": Sampling(), "drafting": Drafting(False, Sampling())}
    for row in rows:
        prompt = row.input_ids[:5]
        answer = own_answer(drafter.verifier, drafter, prompt, K, LENGTH)
        assert LENGTH <= len(answer.tokens) <= LENGTH + K
        assert answer.tokens == row.input_ids[5 : 5 + len(answer.tokens)]
        (loop,) = generate(drafter.verifier, drafter, [prompt], shape=chain(K),
                           max_new_tokens=len(answer.tokens), **greedy)  # fmt: skip
        assert (loop.accepted, loop.rounds) == (answer.by_position(K), len(answer.accepted))
        (cut,) = generate(drafter.verifier, drafter, [prompt], shape=chain(K),
                          max_new_tokens=LENGTH, **greedy)  # fmt: skip
        assert cut.rounds == len(answer.accepted)


def test_terminators_do_not_end_an_answer_and_are_there_afterwards(half_trained):
    drafter, rows = half_trained
    verifier = drafter.verifier
    verifier.terminator_ids = (rows[0].input_ids[7],)
    try:
        answer = own_answer(verifier, drafter, rows[0].input_ids[:5], K, LENGTH)
        assert verifier.terminator_ids == (rows[0].input_ids[7],)
    finally:
        verifier.terminator_ids = ()
    assert answer.tokens == rows[0].input_ids[5 : 5 + len(answer.tokens)]


def test_margins_tell_every_round(half_trained):
    """A draft is accepted where its margin is above 0: walked in plain loops."""
    drafter, rows = half_trained
    rejected = 0
    for row in rows:
        prompt, text = row.input_ids[:5], row.input_ids[5:]
        table = margins(drafter, prompt, text, K)
        answer = own_answer(drafter.verifier, drafter, prompt, K, LENGTH)
        written = 1
        for accepted in answer.accepted:
            slot = 5 + written - 2
            right = [bool(table[slot, i] > 0) for i in range(K)]
            assert accepted == [*right, False].index(False)
            rejected += accepted < K
            written += accepted + 1
        assert deviations(answer, table, 5, K) == []
    assert rejected  # and so not all of them are the same


def test_answer_of_the_engine_is_put_together_from_steps_and_counters(half_trained):
    drafter, rows = half_trained
    for row in rows:
        ours = own_answer(drafter.verifier, drafter, row.input_ids[:5], K, LENGTH)
        found = engine_answer(in_steps(ours, LENGTH), counts_of(ours))
        assert found.accepted == ours.accepted
        assert found.tokens == ours.tokens[:LENGTH]


def test_steps_that_came_in_one_piece_are_noticed():
    steps, counts = [[5], [6, 7], [8]], EngineCounts(2, 6, [1.0, 0.0, 0.0], 4)
    assert engine_answer(steps, counts).accepted == [1, 0]
    assert engine_answer([[5], [6, 7, 8]], counts) is None
    assert engine_answer([[5, 6, 7], [8]], EngineCounts(1, 3, [0.0, 0.0, 0.0], 4)) is None


def test_equal_answers_are_equal(half_trained):
    drafter, rows = half_trained
    for row in rows:
        prompt = row.input_ids[:5]
        ours = own_answer(drafter.verifier, drafter, prompt, K, LENGTH)
        text = ours.tokens[:LENGTH]
        found = judge(drafter, row, prompt, in_steps(ours, LENGTH), counts_of(ours), text)
        assert (found.text, found.lossless) == ("identical", "identical")
        assert found.equal and found.explained and found.deviations is None
        assert found.ours == found.engine == ours.by_position(K)


def one_less(ours: Answer, at: int, table: torch.Tensor) -> Answer:
    """What an engine writes that accepts one draft less in round `at`, and goes on rightly."""
    accepted = [*ours.accepted[:at], ours.accepted[at] - 1]
    while (written := sum(accepted) + len(accepted) + 1) < LENGTH:
        right = [bool(table[5 + written - 2, i] > 0) for i in range(K)]
        accepted.append([*right, False].index(False))
    return Answer(ours.tokens, accepted)


def test_a_rejected_draft_that_was_right_has_no_explanation(half_trained):
    drafter, rows = half_trained
    prompt = rows[0].input_ids[:5]
    ours = own_answer(drafter.verifier, drafter, prompt, K, LENGTH)
    table = margins(drafter, prompt, rows[0].input_ids[5:], K)
    changed = [(at, one_less(ours, at, table)) for at, a in enumerate(ours.accepted[:-1]) if a]
    at, engine = next(
        (at, engine)
        for at, engine in changed
        if engine.by_position(K) != ours.by_position(K)  # else nothing would be looked for
    )
    found = judge(drafter, rows[0], prompt, in_steps(engine, LENGTH), counts_of(engine), None)
    assert (found.text, found.lossless) == ("identical", None)
    assert not found.equal and not found.explained
    (deviation,) = found.deviations
    assert deviation.position == ours.accepted[at]
    assert deviation.token == sum(ours.accepted[: at + 1]) + at
    assert deviation.margin > TIE


def test_ties_and_drafts_past_the_limit_are_explained():
    assert Deviation(3, 1, TIE / 2).explained and Deviation(3, 1, -TIE / 2).explained
    assert not Deviation(3, 1, 2 * TIE).explained and not Deviation(3, 1, -torch.inf).explained
    assert Deviation(3, 1, None).explained


def test_another_text_is_different_and_its_own_rounds_are_checked(half_trained):
    drafter, rows = half_trained
    prompt = rows[0].input_ids[:5]
    ours = own_answer(drafter.verifier, drafter, prompt, K, LENGTH)
    other = [(token + 9) % 64 for token in ours.tokens]
    engine = Answer(other, ours.accepted)
    steps = in_steps(engine, LENGTH)
    found = judge(drafter, rows[0], prompt, steps, counts_of(engine), ours.tokens[:LENGTH])
    assert (found.text, found.lossless) == ("different", "different")
