"""Every drafter with weights learns eight conversations by heart, and is then accepted in decoding:
training, replay and serving see the same thing.

A new drafter adds itself to `DRAFTERS`.
"""

import pytest
import tiny
import torch
from overfit import DRAFTERS, answered_rows, learn
from replayed import assert_equal

from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding.speculate import generate
from headstart.eval.measures.counts import summarise
from headstart.eval.measures.replay import replay_rows
from headstart.models.parts.heads import HeadsDrafter
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain

LENGTH = 1 + 5 * 6  # of an answer: six rounds in which all is accepted, after prefill's token


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_is_learned_by_heart_is_accepted_in_decoding(name):
    verifier = tiny.verifier(hidden_size=64, intermediate_size=128)
    verifier.terminator_ids = ()
    random = torch.Generator().manual_seed(8)
    prompts = torch.randint(3, 64, (8, 4), generator=random).tolist()
    rows = answered_rows(verifier, prompts, LENGTH)
    torch.manual_seed(0)
    drafter = DRAFTERS[name](verifier)
    rate = 1e-2 if isinstance(drafter, HeadsDrafter) else 5e-3
    assert learn(drafter, rows, rate, enough=0.99) > 0.98
    greedy, drafting = Sampling(), Drafting(False, Sampling())
    decoding = {"sampling": greedy, "drafting": drafting, "max_new_tokens": LENGTH}
    drafted = generate(verifier, drafter, prompts, shape=chain(4), **decoding)
    assert [p + got.tokens for p, got in zip(prompts, drafted, strict=True)] == [
        row.input_ids for row in rows
    ]
    decoded = [got.counts(str(i)) for i, got in enumerate(drafted)]
    assert summarise(decoded)["acceptance_length"]["value"] > 4.5
    featurize = Featurizer(verifier, drafter.feature_layers)
    replayed = replay_rows(drafter, rows, featurize, 4, greedy, drafting, LENGTH)
    for left, right in zip(replayed, decoded, strict=True):
        assert_equal(left, right)
