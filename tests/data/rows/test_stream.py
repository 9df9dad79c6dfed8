"""Streaming gives every row once, in an order that a resume continues."""

import copy
import json
from itertools import islice
from pathlib import Path

import pytest
import tiny
import torch

from headstart.data.conversations.mixture import Mixture
from headstart.data.rows import packing
from headstart.data.rows.selection import Selection
from headstart.data.rows.stream import StreamLoader

TOKENIZER = tiny.tokenizer()
LENGTH = 48


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(packing, "WINDOW", 20)


@pytest.fixture
def source(tmp_path) -> str:
    """100 conversations, told apart by their prompts; some have nothing to learn."""
    with (tmp_path / "chats.jsonl").open("w") as file:
        for n in range(100):
            turns = [{"role": "user", "content": f"w{n // 10} w{n % 10}"}]
            turns.append({"role": "assistant", "content": "w20 " * (n % 23 if n % 9 else 0)})
            file.write(json.dumps({"id": f"c{n}", "messages": turns}) + "\n")
    return str(tmp_path / "chats.jsonl")


def loader(source, *, limit=None, said=None, **settings) -> StreamLoader:
    selection = Selection(TOKENIZER, (TOKENIZER.eos_token_id,), LENGTH)
    shape = {"batch_tokens": 2 * LENGTH} | settings
    weights = {source: 1.0} if isinstance(source, str) else source
    say = (lambda text: None) if said is None else said.append
    return StreamLoader(Mixture(weights, limit), selection, say=say, **shape)


def prompts(batch) -> list[tuple[int, int]]:
    """The two words that tell a row."""
    starts = (batch["position_ids"] == 0) & (batch["document_ids"] >= 0)
    return [
        tuple((batch["input_ids"][b, t + 2 : t + 4] - 7).tolist())
        for b, t in starts.nonzero().tolist()
    ]


def of_pass(loaded) -> list[list[tuple[int, int]]]:
    return [prompts(batch) for batch in loaded]


def rows_of(batches) -> list[tuple[int, int]]:
    return [row for batch in batches for row in batch]


KEPT = sorted((n // 10, n % 10) for n in range(100) if n % 9 and n % 23)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_pass_has_every_row_once_whatever_the_ranks(source, packed, world_size):
    ranks = [
        of_pass(loader(source, packed=packed, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(row for batches in ranks for row in rows_of(batches)) == KEPT


def test_batches_are_shuffled_within_windows_and_anew_each_pass(source):
    stream = loader(source, seed=1)
    first, second = of_pass(stream), of_pass(stream)
    assert first != second and sorted(rows_of(first)) == sorted(rows_of(second))
    assert of_pass(loader(source, seed=1)) == first
    assert of_pass(loader(source, seed=2)) != first
    window = KEPT[:20]
    assert sorted(rows_of(first)[:20]) == window and rows_of(first)[:20] != window


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_resumed_stream_goes_on_with_the_next_batch(source, tmp_path, packed, mixed):
    if mixed:
        (tmp_path / "more.jsonl").write_text(
            "".join(
                json.dumps(
                    {
                        "messages": [
                            {"role": "user", "content": f"w30 w{n}"},
                            {"role": "assistant", "content": "w21 w22 w23"},
                        ]
                    }
                )
                + "\n"
                for n in range(15)
            )
        )
        source = {source: 3.0, str(tmp_path / "more.jsonl"): 1.0}

    def batches(loaded):
        while True:
            yield from loaded

    whole = loader(source, packed=packed)
    states, expected = [copy.deepcopy(whole.state_dict())], []
    for batch, _ in zip(batches(whole), range(90), strict=False):
        expected.append(batch["input_ids"])
        states.append(json.loads(json.dumps(whole.state_dict())))
    assert whole.epoch >= 2
    for stop in (0, 1, 9, 10, 35, 36, 44, 60):
        resumed = loader(source, packed=packed)
        resumed.load_state_dict(states[stop])
        rest = [b["input_ids"] for b, _ in zip(batches(resumed), range(5), strict=False)]
        assert all(torch.equal(a, b) for a, b in zip(expected[stop : stop + 5], rest, strict=True))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("before, after", [(1, 2), (3, 2), (2, 4), (2, 1)])
def test_another_number_of_ranks_goes_on_with_the_rows_that_are_left(source, packed, before, after):
    def ranks(number):
        return [
            loader(source, packed=packed, rank=r, world_size=number, seed=3) for r in range(number)
        ]

    for stop in (0, 1, 4, 6):
        begun, seen = ranks(before), []
        for rank in begun:
            seen += [prompts(batch) for batch in islice(rank, stop)]
        states = [json.loads(json.dumps(rank.state_dict())) for rank in begun]
        assert all(state["dealt"] == [] and state["epoch"] == 0 for state in states)
        resumed = ranks(after)
        for rank in resumed:
            rank.load_state_dict(states[0])
        rest = [of_pass(rank) for rank in resumed]
        assert len({len(batches) for batches in rest}) == 1
        assert sorted(rows_of(seen) + rows_of(rows_of(rest))) == KEPT


def test_a_run_may_change_its_number_of_ranks_twice_in_a_window(source):
    seen, state = [], None
    for number, stop in ((1, 2), (3, 1), (2, 99)):
        streams = [loader(source, rank=r, world_size=number) for r in range(number)]
        for stream in streams:
            if state is not None:
                stream.load_state_dict(state)
            seen += [prompts(batch) for batch in islice(stream, stop)]
        state = copy.deepcopy(streams[0].state_dict())
    assert sorted(rows_of(seen)) == KEPT


def test_what_was_left_out_is_said_after_each_pass_and_counted_over_a_resume(source):
    said, resumed_said = [], []
    whole = loader(source, said=said)
    for number, _ in enumerate(whole, start=1):
        if number == 7:
            state = copy.deepcopy(whole.state_dict())
    resumed = loader(source, said=resumed_said)
    resumed.load_state_dict(state)
    of_pass(resumed)
    assert said == resumed_said and len(said) == 1
    assert said[0].startswith("pass 1 over the training data: 100 conversations, 100 rows")
    assert f"{100 - len(KEPT)} rows without supervision" in said[0]


@pytest.mark.parametrize("count, world_size", [(21, 3), (41, 5), (40, 4), (3, 3)])
def test_the_last_window_has_a_row_for_every_rank(source, count, world_size, tmp_path):
    all_lines = Path(source).read_text().splitlines(keepends=True)
    lines = [line for n, line in enumerate(all_lines) if n % 9 and n % 23][:count]
    (tmp_path / "some.jsonl").write_text("".join(lines))
    ranks = [
        of_pass(loader(str(tmp_path / "some.jsonl"), rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert sorted(row for batches in ranks for row in rows_of(batches)) == KEPT[:count]


def test_what_cannot_be_streamed_is_named(source):
    with pytest.raises(ValueError, match="batch_tokens = 30 cannot hold a row of max_length = 48"):
        loader(source, batch_tokens=30)
    with pytest.raises(ValueError, match="2 rows cannot be shared by 4 processes"):
        of_pass(loader(source, limit=3, world_size=4))
    with pytest.raises(ValueError, match=r"give the run's length as training\.max_steps or"):
        len(loader(source))
    state = loader(source).state_dict()
    with pytest.raises(ValueError, match="begun with seed = 0 of its training data, now it is 5"):
        loader(source, seed=5).load_state_dict(state)


@pytest.fixture
def holed(source) -> str:
    """The source with three lines that cannot be read, in three windows."""
    lines = Path(source).read_text().splitlines()
    for place in (5, 45, 99):
        lines.insert(place, "{broken")
    Path(source).write_text("\n".join(lines) + "\n")
    return source


def test_lines_that_cannot_be_read_are_left_out_and_counted_once_a_pass(holed):
    said = []
    stream = loader(holed, said=said)
    for _ in range(2):
        assert sorted(rows_of(of_pass(stream))) == KEPT
    assert len(said) == 2
    for text in said:
        assert "left out: 3 rows: broken JSON (the first: " in text and "line 6: broken" in text


def test_they_are_counted_once_over_a_resume(holed):
    whole = of_pass(loader(holed))
    for stop in range(1, len(whole), 3):
        said = []
        begun, resumed = loader(holed), loader(holed, said=said)
        first = [prompts(batch) for batch in islice(begun, stop)]
        resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
        assert first + of_pass(resumed) == whole
        assert "left out: 3 rows: broken JSON" in said[0]


def test_too_many_of_them_end_the_run(source):
    with Path(source).open("a") as file:
        file.write("{broken\n" * 900)
    with pytest.raises(ValueError, match=r"900 of 1000 rows .* more than max_bad_rows = 0\.01"):
        of_pass(loader(source))
