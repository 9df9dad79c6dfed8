"""Where a folder's layer ids lie, as the doctor sees it."""

import json
from pathlib import Path
from typing import Any

import foreign
import pytest
import tiny
import torch
from imported import VERIFIER as THEIRS
from patients import patient_of

from headstart.eval.doctor import admit
from headstart.eval.health import layers
from headstart.models.drafters.eagle3 import LAYERS, Eagle3, Eagle3Config
from headstart.models.losses import LossConfig

VERIFIER = tiny.verifier()
OWN = [1, 4, 8]


def found(folder: Path, ids: list[int] | None, **change: Any) -> list[tuple[str, str]]:
    """Findings of a saved drafter whose config is changed; None takes a key out."""
    config = Eagle3Config(feature_layers=ids and tuple(ids))
    Eagle3.create(VERIFIER, config, LossConfig(), torch.ones(64)).save(folder)
    written = json.loads((folder / "config.json").read_text()) | change
    written = {key: value for key, value in written.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))
    patient = admit(str(folder), VERIFIER)
    return [(one.severity, one.what) for one in layers.layer_ids(patient, VERIFIER)]


def test_ids_in_both_places_are_in_order(tmp_path):
    assert found(tmp_path / "own", OWN) == found(tmp_path / "usual", None) == []


def test_ids_that_the_newer_gpu_runner_does_not_see_are_a_defect_unless_its_default(tmp_path):
    inside = "are in eagle_config alone"
    assert found(tmp_path / "own", OWN, **{LAYERS: None}) == [
        ("defect", f"layer ids {OWN} {inside}")
    ]
    assert found(tmp_path / "usual", None, **{LAYERS: None}) == [
        ("note", f"layer ids [2, 4, 5] {inside}")
    ]


def test_ids_at_the_top_level_alone_are_noted(tmp_path):
    said = [("note", f"layer ids {OWN} are at the top level alone")]
    assert found(tmp_path, OWN, eagle_config=None) == said


def test_ids_that_differ_are_a_defect(tmp_path):
    said = f"layer ids are {OWN} at the top level and [1, 4, 7] in eagle_config"
    assert found(tmp_path, OWN, eagle_config={LAYERS: [1, 4, 7]}) == [("defect", said)]


@pytest.mark.parametrize("place", ["eagle_config", LAYERS])
def test_another_programs_folder_is_held_to_the_same(place, tmp_path):
    given = {LAYERS: OWN} if place == LAYERS else {"eagle_config": {LAYERS: OWN}}
    patient = patient_of(tmp_path, lambda folder: foreign.original_eagle3(folder, **given))
    (one,) = layers.layer_ids(patient, THEIRS)
    assert one.severity == ("note" if place == LAYERS else "defect")
