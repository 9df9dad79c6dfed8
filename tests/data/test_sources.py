"""Texts and an untrained model from the standard library."""

from pathlib import Path

import pytest

from headstart.data.conversations.reading import read
from headstart.data.rows.rendering import render_all
from headstart.data.sources import Sources, pieces, run
from headstart.models.verifier.verifier import Verifier


def test_pieces_are_the_whole_text_in_order_and_fit():
    text = "".join(f"def f{i}():\n    return {i}\n\n\n" for i in range(50)) + "x = 1\n" * 300
    got = list(pieces(text, 200))
    assert all(len(piece) <= 200 for piece in got) and len(got) > 10
    strip = str.maketrans("", "", "\n ")
    assert "".join(got).translate(strip) == text.translate(strip)


def test_what_is_written_can_be_read_and_trained_on(tmp_path, monkeypatch):
    monkeypatch.setattr("headstart.data.sources.standard_library", lambda: modules(tmp_path))
    run(Sources(str(tmp_path / "out"), vocab_size=300, hidden_size=32, num_layers=2))
    verifier = Verifier.load(str(tmp_path / "out" / "verifier"))
    assert verifier.vocab_size == 300 and len(verifier.terminator_ids) == 1
    arguments = (verifier.tokenizer, verifier.terminator_ids, 512)
    rows, audit = render_all(str(tmp_path / "out" / "train.jsonl"), *arguments)
    assert audit.empty == 0 and all(set(row.loss_mask) == {1} for row in rows)
    texts = [row.text for row in read(str(tmp_path / "out" / "train.jsonl"))]
    decoded = [verifier.tokenizer.decode(row.input_ids[:-1]) for row in rows]
    assert decoded == texts
    rows, _ = render_all(str(tmp_path / "out" / "eval.jsonl"), *arguments)
    assert rows and all(row.loss_mask[0] == 0 and row.loss_mask[-1] == 1 for row in rows)
    assert all(row.input_ids[-1] == verifier.terminator_ids[0] for row in rows)


@pytest.mark.parametrize(
    "field, value",
    [("vocab_size", -5), ("characters", 0), ("num_layers", 0), ("context_length", 1)],
)
def test_sizes_that_cannot_be_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .* got {value}"):
        Sources("out", **{field: value})


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="holds something already"):
        run(Sources(str(tmp_path)))
    with pytest.raises(ValueError, match="cannot be written to"):
        run(Sources(str(tmp_path / "train.jsonl")))
    assert (tmp_path / "train.jsonl").read_text() == "mine"


def modules(folder: Path) -> list[Path]:
    files = []
    for number in range(3):
        file = folder / f"module{number}.py"
        lines = "".join(f"def name_{number}_{i}(x):\n    return x + {i}\n\n\n" for i in range(40))
        file.write_text(lines)
        files.append(file)
    return files
