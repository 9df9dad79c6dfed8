"""The draft vocabulary: what is always in it, what fills it up, what is refused."""

import pytest
import torch
from tiny import verifier

from headstart.models.vocab import choose, coverage

VERIFIER = verifier(num_hidden_layers=2)
SPECIAL = [0, 1, 2]  # unknown, start and end of a turn


def counts(**frequent: int) -> torch.Tensor:
    """[64] zeros, but `w7=3` makes id 7 occur three times."""
    made = torch.zeros(64, dtype=torch.long)
    for name, count in frequent.items():
        made[int(name[1:])] = count
    return made


def test_the_most_frequent_ids_are_chosen_and_sorted():
    ids = choose(counts(w40=5, w10=9, w33=1, w20=7), 6, VERIFIER)
    assert ids.tolist() == [*SPECIAL, 10, 20, 40]
    assert ids.dtype == torch.long


def test_special_and_terminator_ids_are_in_even_where_they_never_occur():
    for size in (3, 4, 20):
        assert set(SPECIAL) <= set(choose(torch.arange(64), size, VERIFIER).tolist())


def test_a_terminator_that_is_no_special_token_is_in():
    other = verifier(num_hidden_layers=2)
    other.terminator_ids = (2, 50)
    assert choose(counts(w10=9), 4, other).tolist() == [0, 1, 2, 50]


def test_the_lowest_unused_ids_fill_up():
    assert choose(counts(w40=5, w4=1), 8, VERIFIER).tolist() == [*SPECIAL, 3, 4, 5, 6, 40]


def test_equally_frequent_ids_are_taken_from_the_lowest():
    assert choose(torch.ones(64), 5, VERIFIER).tolist() == [0, 1, 2, 3, 4]


def test_the_whole_vocabulary_may_be_chosen():
    assert choose(counts(w5=1), 64, VERIFIER).tolist() == list(range(64))


def test_the_counts_are_left_as_they_were():
    given = counts(w5=1).float()
    choose(given, 8, VERIFIER)
    assert given.sum() == 1


@pytest.mark.parametrize("size", [65, 0, -1])
def test_a_size_outside_of_the_verifiers_vocabulary_is_refused(size):
    message = rf"draft_vocab_size must be in 1 … 64 \(the verifier's vocabulary\), got {size}"
    with pytest.raises(ValueError, match=message):
        choose(counts(), size, VERIFIER)


def test_a_size_too_small_for_the_special_ids_is_refused():
    with pytest.raises(
        ValueError, match="draft_vocab_size 2 cannot hold the 3 special ids; pass 3"
    ):
        choose(counts(), 2, VERIFIER)


def test_special_ids_beyond_the_models_vocabulary_are_left_out():
    """A tokenizer may know more tokens than the model has rows."""
    other = verifier(num_hidden_layers=2)
    other.tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert other.tokenizer.pad_token_id == 64
    assert choose(counts(w10=1), 4, other).tolist() == [0, 1, 2, 10]


def test_coverage_is_the_share_of_supervised_tokens_inside():
    assert coverage(counts(w3=6, w4=3, w9=1), torch.tensor([3, 9])) == pytest.approx(0.7)
    assert coverage(counts(w3=6), torch.arange(64)) == 1
    assert coverage(counts(), torch.tensor([3])) == 0
