import itertools

import pytest
import tiny
import torch

from headstart.data.conversations.conversation import Conversation
from headstart.data.rows import packing
from headstart.data.rows.collate import Loader, collate
from headstart.data.rows.packing import by_length, pack
from headstart.data.rows.rendering import render
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer, available_memory
from headstart.models.batch import supervised


def row(length: int, number: int = 0, mask: list[int] | None = None) -> Row:
    """Ids that tell the row and the place in it."""
    ids = [1000 * number + place for place in range(length)]
    return Row(ids, mask or [0] + [1] * (length - 1), f"r{number}")


def rows_of(lengths) -> list[Row]:
    return [row(length, number) for number, length in enumerate(lengths, 1)]


def random_rows(count: int, longest: int = 40, vocab_size: int = 64) -> list[Row]:
    lengths = torch.randint(3, longest + 1, (count,)).tolist()
    rows = rows_of(lengths)
    for item in rows:
        item.input_ids = torch.randint(0, vocab_size, (len(item.input_ids),)).tolist()
    return rows


def where(batch, step: int, b: int = 0) -> list[int]:
    return supervised(batch, step)[b].nonzero()[:, 0].tolist()


# ---- supervision -----------------------------------------------------------------------------


def two_turns() -> Row:
    conversation = Conversation(
        "c",
        [
            {"role": "user", "content": "w1"},
            {"role": "assistant", "content": "w2 w3"},
            {"role": "user", "content": "w4"},
            {"role": "assistant", "content": "w5"},
        ],
    )
    return render(conversation, tiny.tokenizer(), (2,), 100)[0]


def test_supervision_of_a_two_turn_conversation_slot_by_slot():
    """
    t   0   1    2  3   4   5         6  7  8   9   10   11 12  13  14        15 16
    x   <s> user w1 <e> <s> assistant w2 w3 <e> <s> user w4 <e> <s> assistant w5 <e>
    m   0   0    0  0   0   0         1  1  1   0   0    0  0   0   0         2  2
    """
    made = two_turns()
    assert made.loss_mask == [0] * 6 + [1] * 3 + [0] * 6 + [2] * 2
    assert [made.input_ids[t] for t in (8, 16)] == [2, 2]
    batch = collate([made], 100, packed=False)
    # step 0 predicts x_{t+2}: w3 at 5, the terminator at 6; the second turn's terminator at 14.
    # Never w2 or w5, which prefill gives; nothing after a terminator; nothing across turns.
    assert where(batch, 0) == [5, 6, 14]
    assert where(batch, 1) == [5]
    assert where(batch, 2) == []


def test_a_packed_document_that_starts_with_an_answer_begins_at_its_own_first_token():
    first, second = row(5, 1), row(5, 2, mask=[1, 1, 1, 1, 1])
    batch = collate([first, second], 10, packed=True)
    assert batch["input_ids"].shape == (1, 10)
    # slot 4, the first document's last, could predict x_6 by turn numbers alone: another document
    assert where(batch, 0) == [0, 1, 2, 5, 6, 7]
    assert where(batch, 1) == [0, 1, 5, 6]
    assert where(batch, 2) == [0, 5]


def test_packed_supervision_is_padded_supervision():
    rows = [two_turns(), row(7, 1), row(3, 2, mask=[1, 1, 1]), row(2, 3), row(9, 4)]
    padded, packed = collate(rows, 24, packed=False), collate(rows, 24, packed=True)
    for step in range(4):
        targets = []
        for batch in (padded, packed):
            b, t = supervised(batch, step).nonzero().T
            ids = batch["input_ids"]
            targets.append(sorted(torch.stack([ids[b, t], ids[b, t + step + 2]], 1).tolist()))
        assert targets[0] == targets[1]
        assert step > 0 or len(targets[0]) == 3 + 5 + 1 + 0 + 7


# ---- batches ---------------------------------------------------------------------------------


def test_first_fit_never_splits_a_document():
    assert pack([5, 4, 3, 6, 1], 10) == [[0, 1, 4], [2, 3]]
    with pytest.raises(AssertionError):
        pack([11], 10)


def test_a_packed_batch_marks_documents_positions_and_padding():
    batch = collate(rows_of([4, 3, 2]), 7, packed=True, pad_id=9)
    assert batch["input_ids"].tolist() == [
        [1000, 1001, 1002, 1003, 2000, 2001, 2002],
        [3000, 3001, 9, 9, 9, 9, 9],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1], [0, 0, -1, -1, -1, -1, -1]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0, 0]]


def test_a_padded_batch_keeps_the_order_of_its_rows():
    batch = collate(rows_of([2, 4, 3]), 100, packed=False)
    assert batch["input_ids"][:, 0].tolist() == [1000, 2000, 3000]
    assert batch["input_ids"].shape == (3, 4)
    assert (batch["document_ids"] >= 0).sum(1).tolist() == [2, 4, 3]


def test_groups_of_like_length_pad_little():
    lengths = torch.randint(1, 300, (200,)).tolist()
    groups = by_length(lengths, 2000)
    assert sorted(i for group in groups for i in group) == list(range(200))
    slots = sum(len(group) * max(lengths[i] for i in group) for group in groups)
    assert all(len(group) * max(lengths[i] for i in group) <= 2000 for group in groups)
    assert sum(lengths) > 0.85 * slots
    assert by_length([50, 3], 10) == [[0], [1]]


# ---- the loader ------------------------------------------------------------------------------


def names(batch) -> list[int]:
    """Numbers of the rows in a batch of `rows_of`."""
    starts = (batch["position_ids"] == 0) & (batch["document_ids"] >= 0)
    return sorted((batch["input_ids"][starts] // 1000).tolist())


def epoch(loader) -> list[list[int]]:
    return [names(batch) for batch in loader]


@pytest.fixture
def rows() -> list[Row]:
    return rows_of(torch.randint(3, 41, (60,)).tolist())


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_has_every_row_once_within_the_budget(rows, packed):
    loader = Loader(rows, 128, 40, packed)
    batches = list(loader)
    assert sorted(n for batch in batches for n in names(batch)) == list(range(1, 61))
    assert all(batch["input_ids"].numel() <= 128 for batch in batches)
    used = sum((batch["document_ids"] >= 0).sum().item() for batch in batches)
    assert used == sum(len(r.input_ids) for r in rows)
    assert used > 0.85 * sum(batch["input_ids"].numel() for batch in batches)


def test_packing_holds_over_several_windows(rows, monkeypatch):
    monkeypatch.setattr(packing, "WINDOW", 16)
    batches = list(Loader(rows, 128, 40))
    assert sorted(n for batch in batches for n in names(batch)) == list(range(1, 61))
    assert all(len(batch["input_ids"]) <= 3 for batch in batches)


def test_the_order_depends_on_seed_and_epoch_alone(rows):
    loader = Loader(rows, 128, 40, seed=1)
    first, second = epoch(loader), epoch(loader)
    assert first != second
    torch.manual_seed(77)
    again = Loader(rows, 128, 40, seed=1)
    assert epoch(again) == first
    assert epoch(again) == second
    assert epoch(Loader(rows, 128, 40, seed=2)) != first


def test_without_shuffling_every_epoch_is_the_same(rows):
    loader = Loader(rows, 128, 40, packed=False, shuffle=False)
    assert epoch(loader) == epoch(loader)


@pytest.mark.parametrize("stop", [0, 1, 4, 11, 12, 13, 15])
def test_a_resumed_loader_goes_on_with_the_next_batch(rows, stop):
    def stream(loader):
        while True:
            yield from loader

    whole = Loader(rows, 128, 40)
    assert len(whole) == 12, "the stops lie in the first epoch, at its end, and after"
    expected = [batch["input_ids"] for _, batch in zip(range(30), stream(whole), strict=False)]
    begun = Loader(rows, 128, 40)
    batches = stream(begun)
    for _ in range(stop):
        next(batches)
    resumed = Loader(rows, 128, 40)
    resumed.load_state_dict(begun.state_dict())
    rest = [b["input_ids"] for _, b in zip(range(30 - stop), stream(resumed), strict=False)]
    assert len(rest) == 30 - stop
    assert all(torch.equal(a, b) for a, b in zip(expected[stop:], rest, strict=True))


def test_resuming_with_other_data_or_settings_is_refused(rows):
    state = Loader(rows, 128, 40).state_dict()
    for other, name in (
        (Loader(rows[1:], 128, 40), "rows"),
        (Loader(rows, 160, 40), "batch_tokens"),
        (Loader(rows, 128, 40, seed=3), "seed"),
        (Loader(rows, 128, 40, packed=False), "packed"),
    ):
        with pytest.raises(ValueError, match=f"begun with {name} = "):
            other.load_state_dict(state)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_share_an_epoch_evenly_and_without_repeats(rows, world_size):
    loaders = [Loader(rows, 128, 40, rank=r, world_size=world_size) for r in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    parts = [epoch(loader) for loader in loaders]
    assert {len(part) for part in parts} == {len(parts[0])}
    assert sorted(n for part in parts for batch in part for n in batch) == list(range(1, 61))


def test_two_ranks_take_turns_in_the_order_of_one(rows):
    both = [epoch(Loader(rows, 128, 40, rank=r, world_size=2)) for r in range(2)]
    one = epoch(Loader(rows, 128, 40))
    assert len(one) % 2 == 0
    assert one == [batch for pair in zip(*both, strict=True) for batch in pair]


def ranks_of(rows, world_size, state=None, **settings):
    loaders = [
        Loader(rows, 128, 40, rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def taken(loaders, batches):
    """Rows of the next so many batches of every rank, in turn."""
    iterators = [iter(loader) for loader in loaders]
    return [names(batch) for _ in range(batches) for batch in map(next, iterators)]


@pytest.mark.parametrize("packed", [True, False])
def test_rows_come_once_an_epoch_whatever_becomes_of_the_number_of_ranks(rows, packed):
    first = ranks_of(rows, 3, packed=packed)
    seen = taken(first, 2)
    second = ranks_of(rows, 2, first[0].state_dict(), packed=packed)
    seen += taken(second, 2)
    third = ranks_of(rows, 1, second[0].state_dict(), packed=packed)
    (last,) = third
    seen += epoch(last)
    assert sorted(n for batch in seen for n in batch) == list(range(1, 61))
    fresh = Loader(rows, 128, 40, packed=packed)
    assert last.order(1) == fresh.order(1)


def test_another_number_of_ranks_keeps_the_order_of_packed_rows(rows):
    whole = epoch(Loader(rows, 128, 40))
    two = ranks_of(rows, 2)
    taken(two, 3)
    one = Loader(rows, 128, 40)
    one.load_state_dict(two[1].state_dict())
    assert epoch(one) == whole[6:]


def test_fewer_rows_left_than_ranks_begin_the_next_epoch():
    few = rows_of([5, 5, 5])
    one = Loader(few, 5, 5)
    taken([one], 2)
    with pytest.warns(UserWarning, match="1 rows are left of epoch 0, too few for 2 processes"):
        two = Loader(few, 5, 5, world_size=2)
        two.load_state_dict(one.state_dict())
    assert (two.epoch, two.index) == (1, 0)


def test_ranks_have_batches_of_like_size_at_once(rows):
    loaders = ranks_of(rows, 3, packed=False)
    widths = list(
        zip(*[[b["input_ids"].numel() for b in loader] for loader in loaders], strict=True)
    )
    assert len(set(widths)) > 2
    in_order = sorted(widths)
    assert all(max(a) <= min(b) for a, b in itertools.pairwise(in_order))
    assert widths != in_order  # the groups come in no order of size


def test_a_few_rows_reach_every_rank():
    few = rows_of([5, 5, 5])
    parts = [epoch(Loader(few, 100, 40, rank=r, world_size=3)) for r in range(3)]
    assert sorted(n for part in parts for batch in part for n in batch) == [1, 2, 3]
    with pytest.raises(ValueError, match="3 rows cannot be shared by 4 processes"):
        Loader(few, 100, 40, world_size=4)


def test_a_batch_that_cannot_hold_a_row_is_an_error(rows):
    with pytest.raises(ValueError, match="batch_tokens = 30 cannot hold a row of max_length = 40"):
        Loader(rows, 30, 40)


def test_a_padded_row_longer_than_a_batch_is_a_batch_of_its_own():
    few = rows_of([35, 5, 5])
    batches = [tuple(b["input_ids"].shape) for b in Loader(few, 20, 40, packed=False)]
    assert sorted(batches) == [(1, 35), (2, 5)]


# ---- the verifier's states -------------------------------------------------------------------

LAYERS = (1, 4, 7)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("packed", [True, False])
def test_states_are_those_of_the_verifier_run_over_the_batch(family, packed):
    verifier = tiny.verifier(family)
    batch = collate(random_rows(6), 40, packed)
    made = Featurizer(verifier, LAYERS)(batch)
    whole = verifier.states(
        batch["input_ids"], LAYERS, batch["position_ids"], batch["document_ids"]
    )
    real = batch["document_ids"] >= 0
    torch.testing.assert_close(made["features"][real], whole.features[real], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        made["last_hidden"][real], whole.last_hidden[real], atol=1e-4, rtol=1e-4
    )
    assert not made["features"][~real].any()
    assert {k: v.shape for k, v in batch.items()} == {k: made[k].shape for k in batch}


def test_kept_states_are_the_online_ones_whatever_the_packing():
    verifier = tiny.verifier()
    rows = random_rows(12)
    kept = Featurizer(verifier, LAYERS, keep=True, num_tokens=1000, verbose=False)
    online = Featurizer(verifier, LAYERS)
    runs = []
    run = verifier.states
    verifier.states = lambda *arguments: runs.append(arguments) or run(*arguments)
    for packed in (True, False):
        for batch in Loader(rows, 120, 40, packed):
            kept(batch)
    assert len(runs) == len({tuple(r.input_ids) for r in rows}), "each document once"
    for packed in (True, False):
        for batch in Loader(rows, 120, 40, packed, seed=5):
            a, b = kept(batch), online(batch)
            assert torch.equal(a["features"], b["features"])
            assert torch.equal(a["last_hidden"], b["last_hidden"])


def test_documents_run_in_groups_have_the_same_states(monkeypatch):
    verifier = tiny.verifier()
    batch = collate(random_rows(9), 40, packed=True)
    alone = Featurizer(verifier, LAYERS)
    one_by_one = alone(batch)
    monkeypatch.setattr(alone, "alone", False)
    runs = []
    run = verifier.states
    verifier.states = lambda *arguments: runs.append(arguments) or run(*arguments)
    grouped = alone(batch)
    assert 1 <= len(runs) < 9
    for name in ("features", "last_hidden"):
        torch.testing.assert_close(grouped[name], one_by_one[name], atol=1e-4, rtol=1e-4)


def test_kept_states_may_be_rounded_and_are_so_from_the_first_use():
    verifier = tiny.verifier()
    batch = collate(random_rows(3), 40, packed=True)
    exact = Featurizer(verifier, LAYERS)(batch)
    rounding = Featurizer(
        verifier, LAYERS, keep=True, num_tokens=120, dtype=torch.bfloat16, verbose=False
    )
    first, second = rounding(batch), rounding(batch)
    assert rounding.bytes_needed == 120 * 4 * 32 * 2
    for name in ("features", "last_hidden"):
        assert first[name].dtype == torch.float32
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], exact[name].to(torch.bfloat16).float())


def test_states_are_kept_as_far_as_they_fit_and_this_is_said(capsys):
    verifier = tiny.verifier()
    batch = collate(rows_of([20, 20, 20]), 60, packed=True)
    batch["input_ids"] %= 64
    needed = 60 * 4 * 32 * 4
    for limit, number, said in (
        (needed, 3, "kept in memory ("),
        (needed - 1, 2, "kept in memory for 100% of them, the rest computed every epoch"),
        (needed // 3, 1, "for 33% of them"),
        (0, 0, "for 0% of them"),
    ):
        made = Featurizer(verifier, LAYERS, keep=True, num_tokens=60, memory_limit=limit)
        assert said in capsys.readouterr().err
        first, second = made(batch), made(batch)
        assert len(made.kept) == number
        assert torch.equal(first["features"], second["features"])
    Featurizer(verifier, LAYERS)
    assert capsys.readouterr().err == ""


def test_without_layers_there_is_the_last_hidden_state_alone():
    batch = collate(random_rows(3), 40, packed=True)
    made = Featurizer(tiny.verifier(), ())(batch)
    assert "features" not in made
    assert made["last_hidden"].shape == (*batch["input_ids"].shape, 32)


def test_autocast_is_used_when_asked_for():
    batch = collate(random_rows(3), 40, packed=True)
    verifier = tiny.verifier()
    exact = Featurizer(verifier, LAYERS)(batch)["last_hidden"]
    rounded = Featurizer(verifier, LAYERS, autocast_dtype=torch.bfloat16)(batch)["last_hidden"]
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded.float(), atol=0.5, rtol=0.1)


def test_available_memory_is_a_plausible_number_of_bytes():
    assert 1e7 < available_memory() < 1e14


def test_groups_give_the_same_states_whichever_document_comes_first(monkeypatch):
    monkeypatch.setattr("headstart.data.states.featurize._GROUP_TOKENS", 60)
    verifier = tiny.verifier()
    lengths = torch.randint(3, 30, (20,)).tolist()
    rows = [Row(torch.randint(3, 64, (n,)).tolist(), [1] * n, id=str(n)) for n in lengths]
    documents = [row.input_ids for row in rows] + 2 * [rows[0].input_ids, rows[1].input_ids]
    total = sum(map(len, documents))

    def states(order: list[int]) -> dict[int, torch.Tensor]:
        run = Featurizer(
            verifier, LAYERS, keep=True, num_tokens=total, documents=documents, verbose=False
        )
        return {i: run(collate([rows[i]], 1000, packed=False))["features"][0] for i in order}

    some = list(range(len(rows)))
    forward, backward = states(some), states(some[::-1])
    online = Featurizer(verifier, LAYERS)
    for i in some:
        assert torch.equal(forward[i], backward[i])  # so a resumed run sees what it saw before
        alone = online(collate([rows[i]], 1000, packed=False))["features"][0]
        torch.testing.assert_close(forward[i], alone, rtol=1e-4, atol=1e-4)


def test_document_that_comes_often_is_run_in_one_group(monkeypatch):
    monkeypatch.setattr("headstart.data.states.featurize._GROUP_TOKENS", 30)
    documents = [[3] * 10] * 4 + [[4] * 10, [5] * 9]
    run = Featurizer(
        tiny.verifier(), LAYERS, keep=True, num_tokens=59, documents=documents, verbose=False
    )
    assert len(run.groups) == 3
    assert sorted(map(len, {id(g): g for g in run.groups.values()}.values())) == [3]
