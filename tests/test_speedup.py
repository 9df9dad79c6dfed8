"""The arithmetic of speed, at values worked out by hand."""

import pytest

from headstart.eval.speedup import expected_tokens_per_verify, predicted_speedup


def test_expected_tokens_are_a_geometric_sum():
    assert expected_tokens_per_verify(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens_per_verify(0.5, 3) == pytest.approx((1 - 0.5**4) / 0.5)
    assert expected_tokens_per_verify(0.0, 5) == 1
    assert expected_tokens_per_verify(1.0, 5) == 6
    assert expected_tokens_per_verify(0.7, 0) == 1


@pytest.mark.parametrize("alpha, N", [(-0.1, 2), (1.1, 2), (0.5, -1)])
def test_what_is_no_rate_or_length_is_refused(alpha, N):
    with pytest.raises(ValueError, match="must be"):
        expected_tokens_per_verify(alpha, N)


def test_the_prediction_counts_the_wider_pass():
    """Passes of 77 against 40 ms make the textbook's 1.89 a 1.05."""
    assert predicted_speedup(0.6, 3, 0.05, 0.0) == pytest.approx(1.89, abs=0.005)
    assert predicted_speedup(0.6, 3, 0.05, 77 / 40 - 1) == pytest.approx(1.05, abs=0.005)
    assert predicted_speedup(0.0, 2, 0.1, 0.2) == pytest.approx(1 / 1.4)
