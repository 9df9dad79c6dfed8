"""Growing a chain: what is drawn, from which law, in whose ids."""

import torch
from torch import Tensor

from headstart.models.drafter import Drafting
from headstart.models.sampling import RowRandom, Sampling, draw
from headstart.models.trees import grow_chain

IDS = torch.tensor([1, 4, 5, 9])
TABLE = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)) * 2  # by verifier id


class Steps:
    """A drafter of bigrams; remembers what it was asked."""

    def __init__(self):
        self.asked: list[list[int]] = []

    def __call__(self, tokens: Tensor) -> Tensor:
        self.asked.append(tokens.tolist())
        return TABLE[tokens]


def test_a_greedy_chain_follows_the_best_column_in_verifier_ids():
    steps = Steps()
    last, expected = torch.tensor([2, 7]), []
    for _ in range(3):
        last = IDS[TABLE[last].argmax(-1)]
        expected.append(last.tolist())
    greedy = Drafting(False, Sampling())
    proposal = grow_chain(TABLE[[2, 7]], steps, 3, greedy, None, IDS)
    assert proposal.tokens.T.tolist() == expected
    assert steps.asked == expected[:2]  # the last draft needs no step
    assert proposal.parents.tolist() == [[-1, 0, 1]] * 2 and proposal.lengths.tolist() == [3, 3]
    assert proposal.log_probs is None and proposal.vocabulary is None


def test_a_sampled_chain_carries_the_warped_law_each_draft_was_drawn_from():
    sampling = Sampling(0.7, 3)
    proposal = grow_chain(
        TABLE[[2, 7]], Steps(), 3, Drafting(True, sampling), RowRandom(5, [0, 1]), IDS
    )
    uniform = RowRandom(5, [0, 1]).uniform(3)
    for row, last in enumerate([2, 7]):
        for i in range(3):
            law = sampling.probs(TABLE[last])
            torch.testing.assert_close(proposal.log_probs[row, i].exp(), law)
            last = int(IDS[draw(law, uniform[row, i])])
            assert proposal.tokens[row, i] == last
    assert torch.equal(proposal.vocabulary, IDS)


def test_sampled_drafts_have_their_law():
    count = 20_000
    random = RowRandom(1, list(range(count)))
    drafting = Drafting(True, Sampling(1.0))
    logits = TABLE[2].expand(count, 4)
    proposal = grow_chain(logits, Steps(), 1, drafting, random, IDS)
    shares = proposal.tokens[:, 0].bincount(minlength=10)[IDS] / count
    torch.testing.assert_close(shares, TABLE[2].softmax(-1), atol=0.015, rtol=0)


def test_without_a_draft_vocabulary_columns_are_verifier_ids():
    table = torch.eye(4).roll(1, 1)  # 0 -> 1 -> 2 -> 3
    greedy = Drafting(False, Sampling())
    proposal = grow_chain(table[[0, 2]], lambda t: table[t], 2, greedy, None, None)
    assert proposal.tokens.tolist() == [[1, 2], [3, 0]]


def test_a_chain_of_one_needs_no_step():
    steps = Steps()
    proposal = grow_chain(TABLE[[2]], steps, 1, Drafting(False, Sampling()), None, IDS)
    assert steps.asked == [] and proposal.tokens.shape == (1, 1)
