"""The page needs nothing but itself, and says what the report says."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic import report

from headstart.eval.benchmark import opinion
from headstart.eval.gating.checks import Thresholds
from headstart.eval.gating.verdict import Verdict, judge
from headstart.eval.service import page, plots


class Reader(HTMLParser):
    """What a browser would do with the page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def written(folder: Path, result: dict[str, Any], concurrency: int = 1) -> tuple[str, Verdict]:
    named = [("benchmark.json", result)]
    verdict = judge(named, Thresholds(concurrency=concurrency))
    there = sorted({cell["concurrency"] for cell in result["cells"]})
    others = [judge(named, Thresholds(concurrency=at)) for at in there]
    page.write(result, opinion(verdict), [opinion(other) for other in others], folder)
    return (folder / "benchmark.html").read_text(encoding="utf-8"), verdict


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, str, Verdict]:
    folder = tmp_path_factory.mktemp("page")
    result = report(0.75)
    result["provenance"]["command"] = "bench --servers 'http://host/v1' <script src=x>"
    return folder, *written(folder, result)


def test_page_refers_to_nothing_outside(whole):
    _, text, _ = whole
    reader = Reader(text)
    assert not reader.open  # every tag is closed
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "iframe", "object", "base"}
    for _, attributes in reader.tags:
        for name in ("src", "href", "srcset", "data", "action", "background", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.S)
    assert "url(" not in style and "@import" not in style
    assert "<script src=x>" in "".join(reader.words)  # as text


def test_pictures_in_the_page_are_the_png_files(whole):
    folder, text, _ = whole
    images = [attributes["src"] for tag, attributes in Reader(text).tags if tag == "img"]
    names = ("speedup", "latency", "positions", "parts")
    files = [(folder / f"{name}-1.png").read_bytes() for name in names]
    assert [base64.b64decode(src.split(",", 1)[1]) for src in images] == files
    assert all(data.startswith(b"\x89PNG") for data in files)


def test_verdict_is_on_top_with_its_reasons(whole):
    _, text, verdict = whole
    words = "".join(Reader(text).words)
    top = words[: words.index("Every check")]
    assert f"{verdict.value.capitalize()}, at concurrency 1 with {verdict.drafts}" in top
    assert all(check.reason in top for check in verdict.reasons)
    assert "mixed, T = 0" not in top


def test_table_has_every_cell_and_its_measures(whole):
    folder, text, _ = whole
    result = json.loads((folder / "benchmark.json").read_text())
    rows = page.rows(result)
    assert len(rows) == len(result["cells"]) == 16
    assert all(len(row) == len(page.HEADER) for row in rows)
    words = Reader(text).words
    for cell, row in zip(result["cells"], rows, strict=True):
        assert f"{cell['tokens_per_second']:.1f}" == row[4] and row[4] in words
        assert f"{1000 * cell['inter_token']['p99']:.1f}" == row[16]
        assert row[5].startswith(
            "–" if cell["drafts"] == "off" else f"{cell['speedup']['value']:.2f}"
        )


def test_sentence_says_where_drafting_stops_paying(whole):
    result = report(0.75)
    (series,) = result["series"]
    stops = series["stops_paying"]["best"]
    assert page.paying(series) == f"Drafting stops paying at a concurrency of about {stops:.1f}."
    (series,) = report(0.75, (1, 4))["series"]
    assert page.paying(series) == "Drafting pays at 4, the highest concurrency measured."
    (series,) = report(0.01, (1, 4))["series"]
    assert page.paying(series).startswith("Drafting does not pay at any concurrency measured")
    assert page.best_words(series["by_concurrency"][0]).startswith("off (0.")


def test_a_server_that_does_not_draft_has_a_page_too(tmp_path):
    result = report(0.75, (1, 2), lengths=(4,), parts=False, drafting=False)
    result |= {"drafter": None, "verifier": None}
    result["servers"] = [{"url": "http://a/v1", "drafts": "off"}]
    text, verdict = written(tmp_path, result)
    assert verdict.value == "tune" and "http://a/v1 (off)" in text


def test_acceptance_by_position_is_that_of_all_cells_together():
    cells = [
        {"positions": [{"examined": 10, "accepted": 5}, {"examined": 0, "accepted": 0}]},
        {"positions": [{"examined": 30, "accepted": 25}]},
    ]
    assert plots.by_position(cells) == [0.75, None]
