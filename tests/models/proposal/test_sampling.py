"""Warping, drawing, residuals and random streams against plain loops."""

import math

import numpy as np
import pytest
import torch

from headstart.models.proposal.sampling import RowRandom, Sampling, draw, residual


def warp(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The definition, one token at a time."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    kept = order[:top_k] if top_k else order
    total = sum(weights[i] for i in kept)
    nucleus, reached = [], 0.0
    for i in kept:
        if reached >= top_p:
            break
        nucleus.append(i)
        reached += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 4, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.05])
def test_warping_equals_a_plain_loop(temperature, top_k, top_p):
    logits = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(1)) * 2
    probs = Sampling(temperature, top_k, top_p).probs(logits)
    for got, row in zip(probs.flatten(0, 1), logits.flatten(0, 1), strict=True):
        wanted = warp(row.tolist(), temperature, top_k, top_p)
        torch.testing.assert_close(got, torch.tensor(wanted), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("width", [3000, 5000])
@pytest.mark.parametrize("scale", [0.1, 6.0])
def test_nucleus_of_a_large_vocabulary_equals_a_plain_loop(width, scale):
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(2)) * scale
    probs = Sampling(1.0, 0, 0.9).probs(logits)
    for got, row in zip(probs, logits, strict=True):
        wanted = torch.tensor(warp(row.tolist(), 1.0, 0, 0.9))
        differing = (got > 0) != (wanted > 0)
        assert differing.sum() <= 1  # the last token of the nucleus, by rounding
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)


def test_greedy_is_a_point_mass_on_the_best():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert Sampling().probs(logits).tolist() == [[0.0, 1.0, 0.0]]
    assert Sampling().greedy and not Sampling(0.5).greedy


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1},
     {"top_p": 0.0}, {"top_p": 1.5}],
)  # fmt: skip
def test_senseless_settings_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampling(**settings)


def test_draw_inverts_the_cumulative_distribution():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.double)
    drawn = draw(probs.expand(6, -1), uniform)
    assert drawn.tolist() == [1, 1, 3, 3, 4, 4]


def test_draw_follows_its_law():
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    uniform = (torch.arange(10_000, dtype=torch.double) + 0.5) / 10_000
    drawn = draw(probs.expand(10_000, -1), uniform)
    assert drawn.bincount(minlength=4).tolist() == [1000, 0, 6000, 3000]


def test_residual_is_the_normalised_positive_part():
    q, p = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    torch.testing.assert_close(residual(q, p), torch.tensor([0.75, 0.25, 0.0]))


def test_residual_takes_arrays_and_lists():
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    for one, other in ((q, p), (q.tolist(), p.tolist()), (q, torch.tensor(p))):
        assert residual(one, other).tolist() == pytest.approx([0.75, 0.25, 0.0])


def test_residual_of_equal_laws_is_the_law_itself():
    q = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    p = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    assert residual(q, p).tolist() == q.tolist()


def test_a_row_draws_the_same_whatever_runs_beside_it():
    together, alone = RowRandom(3, [10, 11, 12]), RowRandom(3, [11])
    assert torch.equal(together.uniform(5)[1:2], alone.uniform(5))
    together.select_rows([1, 2])
    assert torch.equal(together.uniform(2)[:1], alone.uniform(2))


def test_draws_one_by_one_equal_draws_at_once():
    at_once, singly = RowRandom(0, [4]), RowRandom(0, [4])
    one_by_one = torch.cat([singly.uniform() for _ in range(40)], 1)
    assert torch.equal(at_once.uniform(40), one_by_one)


def test_forks_differ_and_do_not_shift_their_parent():
    random, untouched = RowRandom(0, [0, 1]), RowRandom(0, [0, 1])
    first, second = random.fork(1).uniform(3), random.fork(2).uniform(3)
    assert not torch.equal(first, second)
    assert torch.equal(random.fork(1).uniform(3), first)
    draws = random.uniform(3)
    assert torch.equal(draws, untouched.uniform(3)) and not torch.equal(draws, first)
    random.select_rows([1])
    assert torch.equal(random.fork(1).uniform(3), first[1:])
