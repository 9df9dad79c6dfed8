"""The law of answers: stored in rows, read with them, and held against a run's."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from headstart.data.conversations import law, reading
from headstart.data.conversations.conversation import Conversation, parse
from headstart.data.conversations.law import Law

ANSWER = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def of(row: dict[str, Any]) -> Law | None:
    return parse(ANSWER | row, "here", "x").law


def test_a_row_holds_all_of_its_law() -> None:
    made = Law(0.7, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    row = json.loads(json.dumps(made.to_json()))
    assert row == {
        "temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
    }  # fmt: skip
    assert of(row) == made
    assert Law(0.0).to_json() == {"temperature": 0.0, "top_k": 0, "top_p": 1.0}


def test_a_temperature_alone_means_that_nothing_else_was_on() -> None:
    assert of({"temperature": 1}) == Law(1)
    null = dict.fromkeys(["top_k", "top_p", "min_p", "left_to_server"])  # as from Parquet
    assert of({"temperature": 1} | null) == Law(1)
    assert of({"temperature": 1, "top_k": -1}) == Law(1)


def test_without_a_temperature_the_law_is_unknown() -> None:
    assert of({}) is None
    assert of({"temperature": None, "top_k": "three"}) is None


@pytest.mark.parametrize(
    "row", [{"temperature": "1"}, {"top_p": "0.9"}, {"top_k": True}, {"min_p": float("nan")}]
)
def test_a_law_that_is_no_number_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"here: (temperature|top_p|top_k|min_p) must be a number, got"
    ):
        of({"temperature": 1} | row)


def laws_in(folder: Path, rows: list[dict[str, Any]], record: Any) -> list[Law | None]:
    (folder / "a.jsonl").write_text("".join(json.dumps(ANSWER | row) + "\n" for row in rows))
    if record is not None:
        text = record if isinstance(record, str) else json.dumps(record)
        (folder / "a.meta.json").write_text(text)
    return [c.law for c in reading.read(str(folder / "a.jsonl"))]


def test_an_older_file_s_record_tells_what_its_rows_do_not(tmp_path: Path) -> None:
    record = {"verifier": "v", "temperature": 1.0, "top_k": 3, "top_p": 0.9, "seed": 0}
    rows = [
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5, "top_p": 1.0},  # of a newer version
        {"temperature": 0.5},  # put there by somebody else
        {},
    ]
    assert laws_in(tmp_path, rows, record) == [Law(1.0, 3, 0.9), Law(1.0, 5), Law(0.5), None]


@pytest.mark.parametrize("record", [None, "{broken", [1], {"top_k": 3}])
def test_a_record_that_tells_nothing_leaves_rows_as_they_are(tmp_path: Path, record: Any) -> None:
    assert laws_in(tmp_path, [{"temperature": 1.0}], record) == [Law(1.0)]


def held(*laws: Law | None) -> list[Conversation]:
    return [Conversation(f"r{i}", law=one) for i, one in enumerate(laws)]


def test_answers_of_another_law_are_refused_by_name() -> None:
    for other in (Law(1.0, 3), Law(1.0, min_p=0.1), Law(0.0), Law(1.0, presence_penalty=1)):
        with pytest.raises(ValueError, match=r"^r1 was answered at .*, not at temperature 1: mend"):
            law.check(held(Law(1), other), Law(1.0), lambda its: f"mend {its}")
    law.check(held(Law(1.0, 3), None), Law(1.0, 3), str)


def test_greedy_answers_do_not_depend_on_what_cuts_off_a_tail() -> None:
    law.check(held(Law(0.0, 3, 0.9, 0.1)), Law(0.0, 50), str)
    with pytest.raises(ValueError, match=r"temperature 0, repetition_penalty 1\.1, not at"):
        law.check(held(Law(0.0, repetition_penalty=1.1)), Law(0.0), str)


def test_answers_that_a_server_had_a_say_in_are_accepted_and_doubted() -> None:
    doubtful = Law(0.0, left_to_server=("min_p",))
    with pytest.warns(UserWarning, match="2 answers are of a server that refused min_p"):
        law.check(held(doubtful, Law(0.0), doubtful), Law(0.0), str)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        law.check(held(Law(0.0)), Law(0.0), str)
