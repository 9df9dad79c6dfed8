import json
from collections import Counter
from itertools import islice

import pytest

from headstart.data.conversations.bad import BadRow
from headstart.data.conversations.mixture import Mixture


def write(folder, name: str, count: int) -> str:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"id": f"{n}", "prompt": "x"}) + "\n" for n in range(count)))
    return str(file)


def sources_of(rows) -> list[str]:
    return [row.id.split(".jsonl:")[0].rsplit("/", 1)[-1] for row in rows]


@pytest.fixture
def three(tmp_path) -> dict[str, float]:
    return {
        write(tmp_path, "a", 50): 5.0, write(tmp_path, "b", 10): 3.0, write(tmp_path, "c", 31): 2.0
    }  # fmt: skip


def test_every_prefix_has_the_shares_of_the_weights(three):
    names = sources_of(Mixture(three))
    for count in range(1, 101):
        found = Counter(names[:count])
        for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
            assert abs(found[name] - share * count) < 1.5
    assert Counter(names[:100]) == {"a": 50, "b": 30, "c": 20}


def test_a_pass_ends_when_all_were_read_and_smaller_sources_come_again(three):
    counts = Counter(row.id.rsplit("/", 1)[-1] for row in Mixture(three))
    assert sum(counts.values()) == pytest.approx(31 / 0.2, abs=3)
    assert {counts[f"c.jsonl:{n}"] for n in range(31)} == {1}
    assert {counts[f"b.jsonl:{n}"] for n in range(10)} <= {4, 5}
    assert {counts[f"a.jsonl:{n}"] for n in range(50)} <= {1, 2}


@pytest.mark.parametrize("stop", [0, 1, 33, 49, 60, 100, 150])
def test_a_mixture_goes_on_where_its_state_was_taken(three, stop):
    whole = [row.id for row in Mixture(three)]
    assert len(whole) > 150
    begun = Mixture(three)
    first = [row.id for row in islice(begun, stop)]
    resumed = Mixture(three)
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert first + [row.id for row in resumed] == whole
    resumed.restart()
    assert [row.id for row in resumed] == whole


def test_one_source_is_read_once_as_it_is(tmp_path):
    mixture = Mixture({write(tmp_path, "a", 7): 1.0})
    assert [row.id for row in mixture] == [str(n) for n in range(7)]
    assert not list(mixture)


def test_a_limit_holds_for_a_pass_and_over_a_resume(three):
    begun = Mixture(three, limit=20)
    first = [row.id for row in islice(begun, 8)]
    resumed = Mixture(three, limit=20)
    resumed.load_state_dict(begun.state_dict())
    rest = [row.id for row in resumed]
    assert first + rest == [row.id for row in islice(Mixture(three), 20)]


def test_what_cannot_be_mixed_is_named(tmp_path, three):
    empty, source = write(tmp_path, "empty", 0), write(tmp_path, "a", 3)
    for weight in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"the weight of .*a\.jsonl' is .* above 0"):
            Mixture({source: weight})
    with pytest.raises(ValueError, match=r"is a list; several sources are {SOURCE: WEIGHT, …}"):
        Mixture({f"[{source}, {source}]": 1.0})
    with pytest.raises(ValueError, match="lots}': every weight must be a number above 0"):
        Mixture({f"{{{source}: lots}}": 1.0})
    with pytest.raises(ValueError, match="no source is named"):
        Mixture({})
    with pytest.raises(ValueError, match=r"empty\.jsonl': it has no rows"):
        list(Mixture({source: 1.0, empty: 1.0}))
    with pytest.raises(ValueError, match="there are 3 sources, and were 1 when the run"):
        Mixture(three).load_state_dict(Mixture({source: 1.0}).state_dict())


def test_a_resume_does_not_depend_on_the_order_in_which_sources_are_listed(three):
    even = dict.fromkeys(three, 1.0)  # whose ties the order decides
    for weights in (even, three):
        whole = [row.id for row in Mixture(weights)]
        begun = Mixture(weights)
        first = [row.id for row in islice(begun, 20)]
        resumed = Mixture({source: weights[source] for source in reversed(weights)})
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert first + [row.id for row in resumed] == whole
        resumed.restart()
        assert [row.id for row in resumed] == whole, "nor does the next pass"


def test_a_row_that_cannot_be_read_keeps_its_place_over_a_resume(tmp_path):
    good, bad = write(tmp_path, "a", 6), tmp_path / "bad.jsonl"
    bad.write_text('{"id": "x", "prompt": "x"}\n{broken\n{"id": "z", "prompt": "x"}\n')
    weights = {good: 2.0, str(bad): 1.0}

    def names(rows) -> list[str]:
        return [str(r) if isinstance(r, BadRow) else r.id.rsplit("/", 1)[-1] for r in rows]

    whole = names(Mixture(weights))
    assert whole[:3] == ["a.jsonl:0", "bad.jsonl:x", "a.jsonl:1"]
    assert sum("line 2: broken JSON" in name for name in whole) == 1
    for stop in range(len(whole)):
        begun = Mixture(weights)
        first = names(islice(begun, stop))
        resumed = Mixture(weights)
        resumed.load_state_dict(begun.state_dict())
        assert first + names(resumed) == whole
