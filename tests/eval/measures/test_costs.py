"""A fixed cost of drafting is told from the cost of a step."""

import pytest

from headstart.eval.measures import costs
from headstart.models.proposal import trees


def test_the_fixed_part_is_not_in_the_cost_of_a_step():
    """Over K alone, c would be 0.15, 0.1 and 0.075 here."""
    shapes = {f"chain:{k}": trees.chain(k) for k in (1, 2, 4)}
    found = costs.fit_drafting({f"chain:{k}": 0.1 + 0.05 * k for k in (1, 2, 4)}, shapes)
    assert found.fixed == pytest.approx(0.1)
    assert list(found.step.values()) == pytest.approx([0.05] * 3)


def test_a_tree_s_steps_cost_what_they_cost_beside_the_chains_fixed_part():
    shapes = {name: trees.parse(name) for name in ("chain:1", "chain:3", "static:4x2")}
    found = costs.fit_drafting({"chain:1": 0.15, "chain:3": 0.25, "static:4x2": 0.5}, shapes)
    assert found.fixed == pytest.approx(0.1)
    assert found.step["static:4x2"] == pytest.approx(0.2)


def test_of_one_draft_length_nothing_is_told_apart():
    found = costs.fit_drafting({"chain:4": 0.4}, {"chain:4": trees.chain(4)})
    assert found.fixed is None and found.step == pytest.approx({"chain:4": 0.1})
    assert costs.fit_drafting({}, {}).step == {}


def test_line_is_that_of_least_squares_and_never_negative():
    assert costs.line([1, 2, 4], [1.5, 2.0, 3.0]) == pytest.approx((1.0, 0.5))
    assert costs.line([3], [1.5]) == (0.0, 0.5)
    assert costs.line([1, 2], [0.5, 1.5]) == pytest.approx((0.0, 0.7))  # (0.5 + 2 · 1.5) / (1 + 4)
    assert costs.line([1, 2], [1.0, 0.0]) == (0.5, 0.0)
