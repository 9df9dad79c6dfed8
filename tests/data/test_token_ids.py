"""A tokenizer with tokens that the model has no embedding of: the row is named, nothing crashes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from runs import recipe, run

from headstart.data import features, regenerate
from headstart.data.features import Features
from headstart.data.regenerate import Regenerate
from headstart.data.rows.collate import collate
from headstart.data.rows.row import Row, check_ids
from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding.speculate import generate
from headstart.models.proposal.sampling import Sampling
from headstart.models.verifier.verifier import Verifier

ROWS = 40  # of the embedding; the tokenizer has 64 tokens, of which "w45" is number 52
WANTED = rf"row 'odd.*' has token id 52, and the verifier's embedding has {ROWS} rows, 0 … 39: "


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tiny.verifier(vocab_size=ROWS)
    made.tokenizer = tiny.tokenizer(64)
    return tiny.save(made, tmp_path_factory.mktemp("verifier"))


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    files = {}
    for name, words in {"good": ["w1", "w2", "w3"], "bad": ["w1", "w45", "w3"]}.items():
        lines = [
            {"id": f"odd-{word}" if word == "w45" else f"{name}-{n}", "messages": [
                {"role": "user", "content": f"{word} w{n}"},
                {"role": "assistant", "content": "w4 w5 w6 w7"},
            ]}
            for n, word in enumerate(words)
        ]  # fmt: skip
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        files[name] = str(file)
    return files


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("train, held_out", [("bad", "good"), ("good", "bad")])
def test_training_names_the_row(
    tmp_path: Path, verifier: str, data: dict[str, str], train: str, held_out: str, streaming: bool
) -> None:
    settings = recipe(tmp_path, verifier)
    settings.data = replace(
        settings.data, train=data[train], eval=data[held_out], streaming=streaming
    )
    with pytest.raises(ValueError, match=WANTED):
        run(settings)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_writing_states_names_the_row(tmp_path: Path, verifier: str, data: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=WANTED):
        features.run(Features(str(tmp_path / "out"), [data["bad"]], verifier, layers=[1]))


def test_answering_names_the_row_and_keeps_what_was_answered(
    tmp_path: Path, verifier: str, data: dict[str, str]
) -> None:
    out = tmp_path / "out.jsonl"
    settings = Regenerate(str(out), verifier, data["bad"], max_new_tokens=3, batch_size=1)
    with pytest.raises(ValueError, match=WANTED):
        regenerate.run(settings)
    assert "w1 w0" in "".join(path.read_text() for path in tmp_path.glob("out.jsonl*"))


def test_decoding_names_the_prompt_and_states_the_id(verifier: str) -> None:
    loaded = Verifier.load(verifier)
    with pytest.raises(ValueError, match=r"^prompt 1 has token id 52, "):
        generate(loaded, None, [[5], [5, 52]], shape=None, sampling=Sampling(), drafting=None,
                 max_new_tokens=2)  # fmt: skip
    batch = collate([Row([5, 52, 6], [0, 1, 1], "a")], 8, packed=False)
    with pytest.raises(ValueError, match="token id 52, "):
        Featurizer(loaded, ())(batch)


def test_every_row_of_the_embedding_may_be_used() -> None:
    check_ids("row 'a'", [0, ROWS - 1], ROWS)
    check_ids("row 'empty'", [], ROWS)
    with pytest.raises(ValueError, match=f"row 'a' has token id {ROWS}, "):
        check_ids("row 'a'", torch.tensor([3, ROWS]).tolist(), ROWS)
