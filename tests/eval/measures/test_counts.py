"""Sums first, one division, and intervals over prompts."""

import json
import math

import pytest

from headstart.eval.measures.counts import Counts, summarise
from headstart.eval.measures.intervals import LEAST_PROMPTS

TWO = [
    # rounds: 3 drafts, all accepted; 3 drafts, second rejected
    Counts("a", "chat", 7, 2, [2, 2, 2], [2, 2, 1], [2, 1, 1]),
    # one round of 2 drafts (the limit was near), first rejected
    Counts("b", "code", 2, 1, [1, 1, 0], [1, 0, 0], [0, 0, 0]),
]


def test_each_measure_is_its_definition():
    measured = summarise(TWO)
    assert (measured["prompts"], measured["tokens"], measured["rounds"]) == (2, 9, 3)
    assert measured["acceptance_length"]["value"] == pytest.approx(1 + 4 / 3)
    assert measured["tokens_per_round"] == pytest.approx(7 / 3)
    assert measured["acceptance_rate"]["value"] == pytest.approx(4 / 6)
    assert measured["draft_efficiency"] == pytest.approx(4 / 8)
    assert measured["conditional"] == pytest.approx([2 / 3, 1 / 2, 1])
    assert measured["joint"] == pytest.approx([2 / 3, 1 / 3, 1 / 3])


def test_texts_without_a_round_count_as_prompts_only():
    measured = summarise([*TWO, Counts("c", "chat", 1, 0, [0, 0, 0], [0, 0, 0], [0, 0, 0])])
    assert measured["prompts"] == 3 and measured["tokens"] == 10
    assert measured["acceptance_length"]["value"] == pytest.approx(1 + 4 / 3)
    assert measured["tokens_per_round"] == pytest.approx(7 / 3)


@pytest.mark.parametrize("counts", [[], [Counts("a", "chat", 1, 0, [0, 0], [0, 0], [0, 0])]])
def test_what_cannot_be_divided_is_none(counts):
    measured = summarise(counts)
    nothing = {"value": None, "low": None, "high": None}
    assert measured["acceptance_length"] == measured["acceptance_rate"] == nothing
    assert measured["tokens_per_round"] is measured["draft_efficiency"] is None
    assert all(value is None for value in measured["conditional"] + measured["joint"])
    json.dumps(measured, allow_nan=False)


def test_plain_decoding_has_length_one_and_no_rate():
    measured = summarise([Counts("a", "chat", 5, 4), Counts("b", "chat", 3, 2)])
    assert measured["acceptance_length"] == {"value": 1.0, "low": None, "high": None}
    assert measured["acceptance_rate"]["value"] is None and measured["conditional"] == []


def test_texts_with_fewer_positions_are_filled_with_zeros():
    short = Counts("c", "chat", 3, 1, [1], [1], [1])
    assert summarise([*TWO, short])["conditional"] == pytest.approx([3 / 4, 1 / 2, 1])


def test_interval_is_the_normal_one_on_many_prompts():
    counts = [Counts(str(i), "chat", 9, 4, [4], [4], [i % 5]) for i in range(400)]
    interval = summarise(counts)["acceptance_length"]
    # accepted / 4 has mean 0.5 and deviation sqrt(2) / 4
    half = 1.96 * math.sqrt(2) / 4 / math.sqrt(400)
    assert interval["value"] == 1.5
    assert interval["low"] == pytest.approx(1.5 - half, abs=0.006)
    assert interval["high"] == pytest.approx(1.5 + half, abs=0.006)


def test_turns_of_one_conversation_are_resampled_together():
    turns = [Counts(f"{i % 8}", "chat", 9, 4, [4], [4], [i % 4]) for i in range(400)]
    apart = [Counts(f"{i}", "chat", 9, 4, [4], [4], [i % 4]) for i in range(400)]
    together, separate = summarise(turns), summarise(apart)
    assert together["prompts"] == 8 and separate["prompts"] == 400
    assert together["acceptance_length"]["value"] == separate["acceptance_length"]["value"]
    width = {m["prompts"]: m["acceptance_length"]["high"] - m["acceptance_length"]["low"]
             for m in (together, separate)}  # fmt: skip
    assert width[8] > 5 * width[400]


def test_same_seed_same_interval():
    counts = [Counts(str(i), "chat", 9, 4, [4], [4], [i % 5]) for i in range(30)]
    assert summarise(counts, seed=1) == summarise(counts, seed=1)
    assert summarise(counts, seed=1) != summarise(counts, seed=2)


def test_acceptance_rate_of_a_text_by_position_and_by_draft_length():
    counts = Counts("a", "all", 9, 4, [4, 4, 4], [4, 2, 0], [2, 1, 0])
    assert counts.acceptance_rate(1) == counts.acceptance_rate(2) == 0.5
    assert counts.acceptance_rate() == 0.5 and counts.acceptance_rate(3) is None
    falling = Counts("a", "all", 9, 4, [4, 4], [4, 3], [3, 0])
    assert falling.acceptance_rate(2) == 0 and falling.acceptance_rate_of_length(2) == 3 / 7
    assert falling.acceptance_rate_of_length(1) == falling.acceptance_rate(1) == 3 / 4
    with pytest.raises(ValueError, match="k must be a position in 1 … 3, got 0"):
        counts.acceptance_rate(0)
    with pytest.raises(ValueError, match="length must be a draft length in 1 … 3, got 4"):
        counts.acceptance_rate_of_length(4)


def test_length_and_tokens_a_pass_differ_where_a_text_ends_inside_a_round():
    """A round of 3 drafts, all accepted, the second of them the terminator: 2 tokens, where τ
    counts the verifier's own token too."""
    ended = Counts("a", "all", 1 + 2, 1, [3], [2], [2])
    measured = summarise([ended])
    assert measured["acceptance_length"]["value"] == 3
    assert measured["tokens_per_round"] == 2


def test_too_few_prompts_have_no_interval():
    counts = [Counts(str(i), "chat", 9, 4, [4], [4], [i % 5]) for i in range(LEAST_PROMPTS)]
    assert summarise(counts)["acceptance_rate"]["low"] is not None
    assert summarise(counts[1:])["acceptance_rate"]["low"] is None


def test_bounds_stay_where_the_measure_can_be():
    """Two prompts of twenty on which anything is accepted, and the other way round."""
    for most in (0, 4):
        counts = [Counts(str(i), "chat", 9, 4, [4], [4], [most if i > 3 else 2]) for i in range(20)]
        measured = summarise(counts)
        low, high = (measured["acceptance_rate"][bound] for bound in ("low", "high"))
        assert 0 < low < measured["acceptance_rate"]["value"] < high < 1
        assert measured["acceptance_length"]["low"] >= 1
