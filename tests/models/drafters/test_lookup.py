"""Prompt lookup and lookahead: what they find, and what they learn."""

import random as python_random

import pytest
import torch
from small_texts import endless, plain

from headstart.eval.decoding.speculate import generate
from headstart.models.drafters.lookup import (
    Lookahead,
    LookaheadConfig,
    PromptLookup,
    PromptLookupConfig,
    continuation,
)
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import Dynamic, cartesian, chain, tree_attention_mask
from headstart.models.verifier.verifier import States

GREEDY = Drafting(False, Sampling())


def states_of(rows: int, count: int) -> States:
    return States(None, torch.zeros(rows, count, 4))


def begun(drafter, texts: list[list[int]]):
    """The drafter's state after `texts`, whose last token is pending."""
    state = drafter.start(torch.tensor([text[0] for text in texts]))
    width = max(len(text) for text in texts) - 1
    tokens = torch.tensor([text[1:] + [63] * (width + 1 - len(text)) for text in texts])
    lengths = torch.tensor([len(text) - 1 for text in texts])
    drafter.advance(state, tokens, lengths, states_of(len(texts), width))
    return state


def chain_of(drafter, texts: list[list[int]], length: int) -> list[list[int]]:
    proposal = drafter.propose(begun(drafter, texts), chain(length), GREEDY, None)
    rows = zip(proposal.tokens, proposal.real, strict=True)
    return [tokens[real].tolist() for tokens, real in rows]


def slow_lookup(text: list[int], config: PromptLookupConfig, length: int) -> list[int]:
    """The continuation of the latest earlier occurrence of the longest suffix."""
    for n in range(config.max_ngram, config.min_ngram - 1, -1):
        for begin in range(len(text) - 1, n - 1, -1):
            if n < len(text) and text[begin - n : begin] == text[len(text) - n :]:
                found = text[begin:]
                return [found[i % len(found)] for i in range(length)]
    return []


# ---- prompt lookup -----------------------------------------------------------------------------


def test_a_chain_follows_the_longest_then_the_latest_match():
    text = [1, 2, 3, 40, 9, 2, 3, 41, 8, 1, 2, 3]
    assert chain_of(PromptLookup(), [text], 2) == [[40, 9]]  # three tokens, though two were later
    assert chain_of(PromptLookup(PromptLookupConfig(2, 1)), [text], 2) == [[41, 8]]
    assert chain_of(PromptLookup(), [[5, 6, 7]], 3) == [[]]


@pytest.mark.parametrize("config", [PromptLookupConfig(), PromptLookupConfig(4, 2)])
def test_chains_equal_a_search_in_plain_loops(config):
    dice = python_random.Random(0)
    texts = [[dice.randint(0, 4) for _ in range(dice.randint(1, 30))] for _ in range(60)]
    texts = [text for text in texts if len(text) > 1]
    found = chain_of(PromptLookup(config), texts, 5)
    assert found == [slow_lookup(text, config, 5) for text in texts]
    assert {len(f) for f in found} == {0, 5}


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    assert continuation([1, 2, 3, 4], 2, 5) == [3, 4, 3, 4, 3]
    assert chain_of(PromptLookup(), [[7, 8, 7, 8]], 5) == [[7, 8, 7, 8, 7]]


def test_a_tree_holds_several_continuations_and_shares_their_beginnings():
    text = [1, 2, 5, 6, 1, 2, 5, 7, 3, 2, 9, 1, 2]
    state = begun(PromptLookup(PromptLookupConfig(2, 1)), [text])
    proposal = PromptLookup(PromptLookupConfig(2, 1)).propose(state, Dynamic(2, 5, 6), GREEDY, None)
    # two tokens match twice: 5 7 (the later), 5 6; then one token: 9 1
    assert proposal.tokens.tolist() == [[5, 7, 6, 9, 1]]
    assert proposal.parents.tolist() == [[-1, 0, 0, -1, 3]]
    small = PromptLookup(PromptLookupConfig(2, 1)).propose(state, Dynamic(2, 5, 3), GREEDY, None)
    assert small.tokens.tolist() == [[5, 7, 6]]
    assert PromptLookup().propose(begun(PromptLookup(), [[1, 2]]), cartesian(2, 2), GREEDY,
                                  None).tokens.shape == (1, 0)  # fmt: skip


def test_rows_of_a_batch_find_their_own():
    texts = [[1, 2, 1], [3, 4, 5, 6], [7, 7, 7]]
    drafter = PromptLookup()
    state = begun(drafter, texts)
    proposal = drafter.propose(state, chain(2), GREEDY, None)
    assert proposal.tokens.tolist() == [[2, 1], [0, 0], [7, 7]]
    assert proposal.real.tolist() == [[True] * 2, [False] * 2, [True] * 2]
    drafter.select_rows(state, torch.tensor([2, 0]))
    assert drafter.propose(state, chain(1), GREEDY, None).tokens.tolist() == [[7], [2]]


@pytest.mark.parametrize("given", [(0, 0), (2, 3), (3, 0)])
def test_ngrams_that_cannot_match_are_refused(given):
    with pytest.raises(ValueError, match="needs 1 ≤ min_ngram ≤ max_ngram"):
        PromptLookupConfig(*given)


def test_repeated_text_is_drafted_well():
    model = endless()
    text = plain(model, [5, 9, 11], 20)
    prompt = [5, 9, 11, *text, 5, 9, 11]  # what it wrote before, then the same beginning
    model.terminator_ids = ()
    (got,) = generate(model, PromptLookup(), [prompt], shape=chain(4), sampling=Sampling(),
                      drafting=GREEDY, max_new_tokens=12)  # fmt: skip
    assert got.tokens == plain(model, prompt, 12) and sum(got.drafted) > 0


# ---- lookahead ---------------------------------------------------------------------------------


class Bigrams:
    """A verifier that writes `token + 1` after a token, as logits of a proposal's nodes."""

    @staticmethod
    def logits(root: list[int], proposal: Proposal) -> torch.Tensor:
        tokens = torch.cat([torch.tensor(root)[:, None], proposal.tokens], 1)
        return torch.nn.functional.one_hot((tokens + 1) % 64, 64).float()


def test_the_window_hangs_from_a_chain_of_guesses():
    """Three levels of W = 3: a chain, and below each of its nodes a chain of two."""
    drafter = Lookahead(LookaheadConfig(window=3, ngram=4))
    state = begun(drafter, [[10, 20, 30]])
    state[0].levels = [[1, 2, 3], [11, 12, 13], [21, 22, 23]]
    proposal = drafter.propose(state, chain(2), GREEDY, None)
    window = proposal.tokens[0, -9:].tolist()
    assert window == [1, 2, 3, 11, 12, 13, 21, 22, 23] and proposal.scratch == 9
    mask = tree_attention_mask(proposal.parents)[0]
    first = proposal.tokens.shape[1] - 9 + 1  # 1: the root's column
    seen = [[window[j - first] for j in range(first, first + 9) if mask[first + i, j]]
            for i in range(9)]  # fmt: skip
    assert seen[2] == [1, 2, 3] and seen[4] == [1, 2, 12] and seen[8] == [1, 2, 3, 13, 23]


def test_the_window_fills_and_its_ngrams_enter_the_pool():
    drafter = Lookahead(LookaheadConfig(window=3, ngram=3))
    state = begun(drafter, [[10, 20, 30]])
    assert state[0].levels == [[10, 20, 30]]
    for expected in ([[10, 20, 30], [11, 21, 31]], [[11, 21, 31], [12, 22, 32]],
                     [[12, 22, 32], [13, 23, 33]]):  # fmt: skip
        proposal = drafter.propose(state, chain(2), GREEDY, None)
        drafter.observe(state, proposal, Bigrams.logits([30], proposal))
        assert state[0].levels == expected
    assert state[0].pool[11] == [(12, 13)] and state[0].pool[21] == [(22, 23)]
    assert state[0].pool[10] == [(20, 30), (11,), (11, 12)]  # the text's, then the window's


def test_drafts_come_from_the_pool_latest_first_and_go_on_as_it_knows():
    drafter = Lookahead(LookaheadConfig(window=2, ngram=3, guesses=2))
    state = begun(drafter, [[1, 2, 3, 1, 4, 5, 1]])
    chained = drafter.propose(state, chain(4), GREEDY, None)
    assert chained.tokens[0, : -chained.scratch].tolist() == [4, 5]  # nothing is known to follow 5
    drafter._learn(state[0], [5, 1, 6])
    chained = drafter.propose(state, chain(5), GREEDY, None)
    assert chained.tokens[0, : -chained.scratch].tolist() == [4, 5, 1, 6]
    tree = drafter.propose(state, Dynamic(2, 3, 4), GREEDY, None)
    assert tree.tokens[0, :4].tolist() == [4, 5, 2, 3] and tree.parents[0, :4].tolist() == [
        -1,
        0,
        -1,
        2,
    ]
    for token in (7, 8, 9):
        drafter._learn(state[0], [1, token, token])
    assert state[0].pool[1] == [(8, 8), (9, 9)]  # two guesses are kept


def test_the_window_is_never_accepted_nor_counted():
    """A verifier that writes the guesses themselves: only pool drafts count."""
    model = endless()
    drafter = Lookahead(LookaheadConfig(window=4, ngram=3))
    (got,) = generate(model, drafter, [[5, 9, 11]], shape=chain(3), sampling=Sampling(),
                      drafting=GREEDY, max_new_tokens=20)  # fmt: skip
    assert got.tokens == plain(model, [5, 9, 11], 20)
    assert max(got.drafted) <= got.rounds


@pytest.mark.parametrize("given", [(0, 3, 1), (1, 1, 1), (1, 2, 0)])
def test_a_window_of_nothing_is_refused(given):
    with pytest.raises(ValueError, match="window ≥ 1, ngram ≥ 2 and guesses ≥ 1"):
        LookaheadConfig(*given)
