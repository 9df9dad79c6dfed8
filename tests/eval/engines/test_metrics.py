"""Acceptance from vLLM's Prometheus page: saved, two of them, or a server's over a time."""

from pathlib import Path

import pytest
from metrics_page import page, serving

from headstart.eval.engines import metrics
from headstart.eval.engines.metrics import EngineCounts, Metrics, parse, scrape


def test_page_is_read():
    assert parse(page(50, 150, [30, 20, 5], 106), "x") == EngineCounts(50, 150, [30, 20, 5], 106)


def test_engines_of_one_server_are_added_up():
    both = page(50, 150, [30, 20, 5], 106) + page(10, 30, [1, 1, 0], 12, engine=1)
    assert parse(both, "x") == EngineCounts(60, 180, [31, 21, 5], 118)


def test_ten_positions_are_in_order():
    accepted = list(range(20, 8, -1))
    assert parse(page(30, 360, accepted), "x").accepted == accepted


def test_measures_are_those_of_the_acceptance_report():
    measures = EngineCounts(50, 150, [30, 20, 5], 106).measures()
    assert measures["acceptance_length"] == 1 + 55 / 50
    assert measures["acceptance_rate"] == 55 / (50 + 30 + 20)
    assert measures["draft_efficiency"] == 55 / 150
    assert measures["joint"] == [30 / 50, 20 / 50, 5 / 50]
    assert measures["conditional"] == [30 / 50, 20 / 30, 5 / 20]


def test_rate_of_shorter_drafts_is_not_made_up():
    counts = EngineCounts(50, 140, [30, 20, 5], 106)
    measures = counts.measures()
    assert measures["acceptance_rate"] is None and measures["conditional"] is None
    assert measures["joint"] == [30 / 50, 20 / 50, 5 / 50]
    assert "cannot be told" in metrics.show(counts)


def test_position_that_was_never_reached_has_no_conditional_acceptance():
    assert EngineCounts(4, 12, [0, 0, 0], 4).measures()["conditional"] == [0.0, None, None]


def test_two_saved_pages_give_what_happened_in_between(tmp_path: Path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text(page(50, 150, [30, 20, 5], 106))
    second.write_text(page(90, 270, [50, 24, 5], 170))
    metrics.run(Metrics(str(first), later=str(second)))
    out = capsys.readouterr().out
    assert "| rounds (vLLM's drafts)" in out and " 40 " in out
    assert "1.600" in out  # 1 + 24 / 40
    assert "0.375" in out  # 24 of 40 + 20 + 4 examined
    assert scrape(str(second)).since(scrape(str(first))) == EngineCounts(40, 120, [20, 4, 0], 64)


def test_a_server_is_read_over_a_time(capsys):
    pages = [page(50, 150, [30, 20, 5]), page(54, 162, [34, 24, 9])]
    asked = []

    def answer(path: str, body: bytes) -> str:
        asked.append(path)
        return pages[len(asked) - 1]

    with serving(answer) as server:
        metrics.run(Metrics(server, seconds=0.01))
    assert asked == ["/metrics", "/metrics"]
    assert "4.000" in capsys.readouterr().out  # of 4 rounds everything was accepted


@pytest.mark.parametrize(
    "given, said",
    [
        ({"page": "x", "seconds": -1}, "seconds must be 0 or more, got -1"),
        ({"page": "saved.txt", "seconds": 5}, "a saved page does not change"),
        ({"page": "http://x", "later": "y", "seconds": 5}, "--later"),
    ],
)
def test_impossible_times_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Metrics(**given)


@pytest.mark.parametrize(
    "text, said",
    [
        ("python_gc_objects 3\n", "no metrics page of vLLM"),
        ('vllm:generation_tokens_total{engine="0"} 5.0\n', "makes no drafts"),
        (page(5, 10, [3, 1]).partition("vllm:generation_tokens")[0], "has no generation_tokens"),
        (page(5, 10, [3, 1]).partition("vllm:spec_decode_num_draft_tokens")[2], "no spec_decode"),
        (page(5, 10, [3, 1]).replace('position="1"', 'position="2"'), "every position"),
        (page(5, 10, [2, 3]), "contradict each other"),
        (page(5, 10, [-2, -3]), "contradict each other"),
        (page(5, 3, [2, 1]), "contradict each other"),
    ],
)
def test_other_pages_are_refused(tmp_path: Path, text, said):
    (tmp_path / "page").write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        scrape(str(tmp_path / "page"))
    assert "\n" not in str(error.value)


def test_missing_pages_and_servers_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"page '.*nowhere' cannot be read"):
        scrape(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"page 'http://127.0.0.1:9/metrics' cannot be read"):
        scrape("http://127.0.0.1:9")


@pytest.mark.parametrize("seconds", [0, 5])
@pytest.mark.parametrize("page", ["localhost:8000", "10.0.0.7:80/metrics"])
def test_an_address_without_its_scheme_is_told(page, seconds, tmp_path: Path, monkeypatch):
    with pytest.raises(ValueError, match=f"begins so: 'http://{page}'"):
        scrape(Metrics(page, seconds=seconds).page)
    monkeypatch.chdir(tmp_path)
    Path("saved:1").write_text("python_gc_objects 3\n")
    with pytest.raises(ValueError, match="no metrics page of vLLM"):  # a file may be called so
        scrape("saved:1")


def test_a_restarted_server_is_noticed():
    late, early = EngineCounts(5, 15, [1, 0, 0], 5), EngineCounts(50, 150, [30, 20, 5], 100)
    with pytest.raises(ValueError, match="not of one run of one server"):
        late.since(early)
    with pytest.raises(ValueError, match="not of one run of one server"):
        EngineCounts(60, 120, [31, 21], 110).since(early)


def test_a_time_without_drafts_is_said():
    counts = EngineCounts(50, 150, [30, 20, 5], 100)
    with pytest.raises(ValueError, match="no drafts were made in this time"):
        counts.since(counts).measures()
