"""Rows that cannot be used: left out and counted by reason, until they are too many."""

MAX_BAD_ROWS = 0.01
"""Fraction of the rows beyond which a run ends."""
_FIRST_CHECKED = 1000  # rows: of fewer, a fraction says little
REFUSED = "the chat template refuses it"
"""The one reason that is no fault of the data: it is counted and ends nothing."""

Bad = dict[str, list]
"""Reason -> how many rows, and what was said of the first."""


class BadRow(ValueError):
    """One row that cannot be used, where others may be.

    Args:
        where: the row, as a user finds it.
        reason: what is wrong, the same for all rows of which the same is wrong.
        detail: what is known of this one.
    """

    def __init__(self, where: str, reason: str, detail: str = ""):
        super().__init__(f"{where}: {reason}{detail}")
        self.reason = reason


def count(bad: Bad, row: BadRow) -> None:
    bad.setdefault(row.reason, [0, str(row)])[0] += 1


def total(bad: Bad) -> int:
    return sum(number for number, _ in bad.values())


def summary(bad: Bad) -> str:
    """How many by reason, the first of each by name."""
    each = (f"{number} rows: {why} (the first: {first})" for why, (number, first) in bad.items())
    return "; ".join(each)


def check(bad: Bad, rows: int, most: float) -> None:
    """Raise a ValueError where more than `most`, a fraction, of at least 1,000 rows are bad."""
    faulty = {reason: entry for reason, entry in bad.items() if reason != REFUSED}
    if rows >= _FIRST_CHECKED and total(faulty) > most * rows:
        raise ValueError(
            f"{total(faulty)} of {rows} rows cannot be used, more than max_bad_rows = {most} "
            f"allows: {summary(faulty)}; mend the data, or raise max_bad_rows"
        )


def check_limit(most: float, setting: str) -> None:
    """Raise a ValueError for a limit that is no fraction."""
    if not 0 <= most <= 1:
        raise ValueError(f"{setting} is {most}; it must be a fraction of the rows, 0 … 1")
