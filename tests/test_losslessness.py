"""The chi-square test, and the naming of ties."""

import math

import pytest
import torch
from tiny import verifier

from headstart.eval.losslessness import chi_square, compare


def test_chi_square_is_pearsons():
    got = chi_square(torch.tensor([18.0, 55.0, 27.0]), torch.tensor([0.2, 0.5, 0.3]))
    assert got.statistic == pytest.approx(4 / 20 + 25 / 50 + 9 / 30, rel=1e-6)
    assert got.degrees == 2
    assert got.p_value == pytest.approx(math.exp(-1.0 / 2), rel=1e-6)  # closed form of two degrees


def test_p_value_of_one_degree_is_the_normal_tail():
    got = chi_square(torch.tensor([5200.0, 4800.0]), torch.tensor([0.5, 0.5]))
    assert got.p_value == pytest.approx(math.erfc(math.sqrt(16 / 2)), rel=1e-6)


def test_rare_outcomes_are_pooled():
    observed = torch.tensor([50.0, 47.0, 2.0, 0.0, 1.0])
    got = chi_square(observed, torch.tensor([0.5, 0.46, 0.015, 0.01, 0.015]))
    pooled = chi_square(torch.tensor([50.0, 47.0, 3.0]), torch.tensor([50.0, 46.0, 4.0]))
    # the pool of 4 is expected too seldom itself, but nothing is left to pool it with
    assert got == pytest.approx(pooled) and got.degrees == 2


def test_an_impossible_outcome_gives_probability_zero():
    assert chi_square(torch.tensor([99.0, 1.0]), torch.tensor([1.0, 0.0])).p_value == 0.0
    assert chi_square(torch.tensor([99.0, 0.0]), torch.tensor([1.0, 0.0])).p_value == 1.0


def test_a_small_shift_is_seen_in_many_draws():
    law = torch.tensor([0.25, 0.25, 0.25, 0.25])
    shifted = torch.tensor([0.26, 0.25, 0.25, 0.24])
    assert chi_square(shifted * 200_000, law).p_value < 1e-10


def test_first_difference_is_a_tie_only_where_logits_are_close():
    model = verifier()
    prompt = [5, 9, 11]
    logits = model.logits(model.states(torch.tensor([prompt])).last_hidden[0, -1])
    first, second = logits.topk(2).indices.tolist()
    gap = float(logits[first] - logits[second])
    assert gap > 1e-4
    assert compare(model, prompt, [first, 3], [first, 3]) == "identical"
    assert compare(model, prompt, [first], [second]) == "different"
    assert compare(model, prompt, [first], [second], tolerance=gap * 1.01) == "tie"
    assert compare(model, prompt, [first, 3], [first]) == "different"


def test_equal_logits_are_a_tie_but_not_with_a_third_token():
    model = verifier()
    prompt = [5, 9, 11]
    best = int(model.logits(model.states(torch.tensor([prompt])).last_hidden[0, -1]).argmax())
    twin, other = (best + 1) % 64, (best + 2) % 64
    with torch.no_grad():
        model.head.weight[twin] = model.head.weight[best]
    assert compare(model, prompt, [best], [twin]) == "tie"
    assert compare(model, prompt, [best], [other]) == "different"
