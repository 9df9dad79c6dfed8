"""A checkpoint that is damaged is refused by its name, in one line, whatever is wrong with it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.loading import load_checkpoint, load_pair, load_to_train
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier

VERIFIER = tiny.verifier()
LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An EAGLE-3 of 16 draft ids."""
    config = Eagle3Config(draft_vocab_size=16)
    Eagle3.create(VERIFIER, config, LossConfig(), torch.arange(64)).save(tmp_path)
    return tmp_path


def written(folder: Path, change: dict[str, Any]) -> None:
    """Change the config; a dotted name is a key of a section."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in change.items():
        *sections, key = name.split(".")
        at = config[sections[0]] if sections else config
        at[key] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"headstart.verifier": 5}, "config.json: headstart.verifier is 5, not a text"),
        ({"headstart.fingerprint": None}, "config.json: headstart.fingerprint is None"),
        ({"headstart.type": ["eagle3"]}, r"config.json: headstart.type is \['eagle3'\]"),
        ({"headstart.type": "medusa"}, "num_heads|token_map"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"num_attention_heads": 7}, "config.json"),
        ({"num_attention_heads": -9}, "config.json"),
        ({"rms_norm_eps": "NaNish"}, "config.json says: .*NaNish"),
        ({"draft_vocab_size": "x"}, "config.json.* x"),
        ({"draft_vocab_size": 15}, "d2t .offsets. has 16 ids, draft_vocab_size is 15"),
        ({"hidden_act": "bogus"}, "config.json says: .*bogus"),
        ({"hidden_size": 500}, "config.json"),
        ({LAYERS: None, f"eagle_config.{LAYERS}": [2, 4, 99]}, r"1 … 8, got \[2, 4, 99\]"),
        ({f"eagle_config.{LAYERS}": [2, 4, 99]}, r"\[2, 4, 5\] at the top .* in eagle_config"),
        ({LAYERS: None, "eagle_config": None}, "config.json"),
    ],
)
def test_an_impossible_config_is_refused_by_the_folders_name(
    folder: Path, change: dict[str, Any], said: str
) -> None:
    written(folder, change)
    for load in (
        lambda: load_checkpoint(folder, VERIFIER),
        lambda: load_to_train(str(folder), VERIFIER, LossConfig()),
    ):
        start = re.escape(f"drafter {str(folder)!r}")
        with pytest.raises(ValueError, match=f"^{start}.*(?:{said})") as caught:
            load()
        assert "\n" not in str(caught.value)


def test_a_verifier_that_is_no_name_is_told_before_any_is_loaded(folder: Path) -> None:
    written(folder, {"headstart.verifier": 5})
    with pytest.raises(ValueError, match=r"headstart\.verifier is 5"):
        load_pair(None, str(folder), "float32", "cpu")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("d2t", lambda t: t + 1_000_000, "d2t .offsets. gives no ascending ids below 64"),
        ("d2t", lambda t: torch.full_like(t, -5), "d2t .offsets. gives"),
        ("d2t", lambda t: t.float(), "d2t .offsets. gives"),
        ("fc.weight", lambda t: t * torch.nan, r"not every number is finite in 1 tensor \(fc\.w"),
        ("norm.weight", lambda t: t / 0, "not every number is finite"),
    ],
)
def test_weights_of_which_no_drafts_come_are_refused(folder, name, change, said) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"^drafter .*{said}") as caught:
        load_checkpoint(folder, VERIFIER)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layers:40", r"drafter 'layers:40': layers must be ids in 0 … 7 of .*, got 40"),
        ("layers:x", r"drafter 'layers:x': 'x' is no layer"),
        ("prompt-lookup:max_ngram=0", r"drafter 'prompt-lookup:max_ngram=0': .*max_ngram"),
        ("prompt-lookup:nope=1", r"drafter 'prompt-lookup:nope=1': .*nope"),
    ],
)
def test_a_name_that_cannot_be_is_refused_before_the_verifier_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    verifier = tiny.save(VERIFIER, tmp_path / "verifier")
    monkeypatch.setattr(Verifier, "load", None)
    with pytest.raises(ValueError, match=said):
        load_pair(verifier, name, "float32", "cpu")
