import pytest

from headstart.data.conversations import bad
from headstart.data.conversations.bad import REFUSED, BadRow


def counted(**reasons: int) -> bad.Bad:
    found: bad.Bad = {}
    for reason, number in reasons.items():
        for line in range(number):
            bad.count(found, BadRow(f"line {line}", reason, " here"))
    return found


def test_bad_rows_are_counted_by_reason_and_the_first_is_named():
    found = counted(broken=2, odd=1)
    assert bad.total(found) == 3
    assert bad.summary(found) == (
        "2 rows: broken (the first: line 0: broken here); 1 rows: odd (the first: line 0: odd here)"
    )


def test_more_than_the_fraction_ends_a_run_after_a_thousand_rows():
    bad.check(counted(broken=999), 999, 0.01)
    bad.check(counted(broken=10), 1000, 0.01)
    with pytest.raises(ValueError, match=r"11 of 1000 .* max_bad_rows = 0\.01 allows: 5 rows: b"):
        bad.check(counted(broken=5, odd=6), 1000, 0.01)
    bad.check(counted(broken=1000), 1000, 1.0)
    with pytest.raises(ValueError, match="1 of 2000 rows cannot be used"):
        bad.check(counted(broken=1), 2000, 0.0)


def test_what_a_template_refuses_ends_nothing():
    bad.check(counted(**{REFUSED: 1500}, broken=10), 2000, 0.01)
    with pytest.raises(ValueError, match=r"21 of 2000 rows .*: 21 rows: broken"):
        bad.check(counted(**{REFUSED: 1500}, broken=21), 2000, 0.01)


@pytest.mark.parametrize("most", [-0.1, 1.5, float("nan")])
def test_a_limit_is_a_fraction(most):
    with pytest.raises(ValueError, match=r"^x is .*; it must be a fraction of the rows, 0 … 1"):
        bad.check_limit(most, "x")
