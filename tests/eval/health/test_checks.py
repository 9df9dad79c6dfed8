"""What a drafter's folder shows by itself; most of it on broken drafters in test_doctor."""

import json

import foreign
import pytest
import tiny
import torch
from imported import EMBEDDINGS, VERIFIER
from layout_drafters import DRAFTERS, SCALED
from patients import patient_of
from torch import Tensor

from headstart.eval.doctor import admit
from headstart.eval.health import checks
from headstart.eval.health.checks import examine, is_absolute
from headstart.eval.health.patient import CHECKS
from headstart.models.formats.imports import members

IDS = torch.tensor(foreign.IDS)
OFFSETS = IDS - torch.arange(16)
EVEN = torch.arange(0, 32, 2)  # as offsets: 0, 3, 6, …, 45, ascending ids too


@pytest.mark.parametrize(
    "offsets, member, expected",
    [
        (OFFSETS, None, False),
        (OFFSETS, members(OFFSETS, 64), False),
        (IDS, None, True),
        (IDS, members(OFFSETS, 64), True),
        (EVEN, None, False),  # both readings give ids: nothing tells
        (EVEN, members(EVEN - torch.arange(16), 64), True),
        (EVEN, members(EVEN, 64), False),
        (torch.zeros(16, dtype=torch.long), None, False),
    ],
)
def test_a_map_of_ids_is_told_from_one_of_offsets(offsets, member, expected):
    assert is_absolute(offsets, member, 64) is expected


def noted(own: Tensor, tmp_path) -> str | None:
    patient = patient_of(tmp_path, lambda f: foreign.original_eagle1(f, own, bias=False))
    found = [f.severity for f in checks.embeddings(patient, VERIFIER)]
    return found[0] if found else None


def test_embeddings_are_held_against_the_verifiers(tmp_path):
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(64, 32, generator=random)
    assert noted(EMBEDDINGS, tmp_path / "same") is None
    assert noted(EMBEDDINGS + 0.1 * noise, tmp_path / "tuned") == "note"
    assert noted(noise, tmp_path / "random") == "defect"


@pytest.mark.parametrize("scaling", SCALED)
def test_positions_of_a_scaled_verifier_are_in_order_and_their_loss_is_seen(scaling, tmp_path):
    model = tiny.verifier(rope_parameters=SCALED[scaling], max_position_embeddings=4096)
    DRAFTERS["eagle3"](model).save(tmp_path)
    patient = admit(str(tmp_path), model)
    assert list(checks.rope(patient, model)) == []
    patient.config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    patient.config["max_position_embeddings"] = 2048
    lost, short = checks.rope(patient, model)
    assert (lost.severity, short.severity) == ("defect", "note")
    assert f"rope_type {scaling}" in lost.what and "2048, the verifier's 4096" in short.what


def test_positions_taken_out_of_a_config_are_read_as_engines_read_that(tmp_path):
    model = tiny.verifier(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    DRAFTERS["eagle1"](model).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field in ("rope_parameters", "bias", "target_hidden_size"):
        del config[field]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = examine(admit(str(tmp_path), model), model)
    (lost,) = [finding for finding in found if finding.severity == "defect"]
    assert lost.check == "rope"
    assert "rope_theta 10000.0" in lost.what and "rope_theta 500000.0" in lost.what


def test_a_config_of_which_nothing_can_be_said_is_refused(tmp_path):
    DRAFTERS["eagle3"](VERIFIER).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"'intermediate_size' is missing from its config\.json"):
        admit(str(tmp_path), VERIFIER)


def test_of_many_names_a_few_are_listed(tmp_path):
    patient = patient_of(tmp_path, foreign.original_eagle3)
    for name in patient.tensors:
        if "proj" in name:
            patient.tensors[name] = torch.full_like(patient.tensors[name], torch.inf)
    (found,) = [f for f in checks.tensors(patient)]
    assert "and 3 more: not every number is finite" in found.what


def test_a_vocabulary_without_any_terminator_is_a_defect_and_without_one_of_two_a_note(tmp_path):
    patient = patient_of(tmp_path, foreign.original_eagle3)
    model = tiny.verifier()
    severities = []
    for ids in ((2,), (2, 7), (7,)):
        model.terminator_ids = ids
        severities.append([f.severity for f in checks.terminators(patient, model)])
    assert severities == [[], ["note"], ["defect"]]


def test_a_verifier_without_a_template_or_with_one_that_never_stops_is_noted():
    model = tiny.verifier()
    assert list(checks.template(model)) == []
    model.terminator_ids = (9,)
    (found,) = checks.template(model)
    assert "with none of the terminators" in found.what
    model.tokenizer.chat_template = None
    (found,) = checks.template(model)
    assert "no chat template" in found.what


def test_every_finding_is_of_a_check_that_the_report_lists(tmp_path):
    patient = patient_of(
        tmp_path, lambda f: foreign.original_eagle3(f, rope_theta=5.0, max_position_embeddings=9)
    )
    patient.tensors = {"fc.weight": torch.zeros(32, 64), "d2t": IDS, "norm.weight": torch.ones(32)}
    found = examine(patient, VERIFIER)
    assert {f.check for f in found} <= set(CHECKS)
    assert {"fingerprint", "tensors", "never trained", "layer ids", "norms", "rope",
            "vocabulary map"} <= {f.check for f in found}  # fmt: skip
