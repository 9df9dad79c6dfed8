"""Other readings of a drafter's folder, and when one of them counts."""

import foreign
import pytest
import torch
from imported import EMBEDDINGS, MAKERS, VERIFIER
from patients import patient_of
from served import batch_of, texts
from torch import Tensor

from headstart.eval.health.checks import Patient
from headstart.eval.health.probe import clear, drafter_of, readings, right
from headstart.models.batch import supervised


def flags(*counts: int) -> tuple[Tensor, Tensor]:
    """Drafts right under both readings, the first alone, the other alone, none."""
    now = torch.tensor([True, True, False, False]).repeat_interleave(torch.tensor(counts))
    other = torch.tensor([True, False, True, False]).repeat_interleave(torch.tensor(counts))
    return now, other


@pytest.mark.parametrize(
    "counts, expected",
    [
        ((0, 0, 100, 100), True),
        ((50, 10, 60, 80), True),  # 50 more, 8.4 would be one standard error
        ((50, 40, 60, 50), False),  # 20 more, of 100 that differ: two standard errors
        ((100, 0, 3, 97), False),  # too few to matter
        ((100, 60, 0, 40), False),  # worse
        ((0, 0, 0, 100), False),
    ],
)
def test_a_reading_counts_where_chance_does_not_explain_it(counts, expected):
    assert clear(*flags(*counts)) is expected


@pytest.mark.parametrize(
    "name, expected",
    [
        (
            "eagle3, original",  # its default layers are 2, 4, 5
            {"layer ids": 2, "norm_before_residual": 1, "vocabulary map": 0},
        ),
        (
            "eagle3, speculators, normed, own embeddings",  # 1, 4, 8 of 8 can go nowhere
            {"norm_before_residual": 1, "embed_tokens": 1},
        ),
        ("eagle1, original, bias", {"embed_tokens": 1}),
        ("medusa, original", {}),
    ],
)
def test_what_can_be_read_otherwise(name, expected, tmp_path):
    found = [r.check for r in readings(patient_of(tmp_path, MAKERS[name]), VERIFIER)]
    assert {check: found.count(check) for check in expected} == expected
    assert set(found) <= set(expected)


def test_the_verifiers_positions_are_a_reading_where_the_drafter_has_others(tmp_path):
    patient = patient_of(tmp_path, lambda f: foreign.original_eagle3(f, rope_theta=77.0))
    (reading,) = [r for r in readings(patient, VERIFIER) if r.check == "rope"]
    assert "theta 77" in reading.what and "theta 10000" in reading.what
    made = drafter_of(reading.patient, VERIFIER)
    assert torch.equal(made.rotary.inv_freq, VERIFIER.decoder.rotary_emb.inv_freq)


def test_a_map_of_ids_is_read_as_ids_and_a_missing_one_from_its_members(tmp_path):
    patient = patient_of(tmp_path, foreign.original_eagle3)
    ids = torch.tensor(foreign.IDS)
    for tensors in (
        patient.tensors | {"d2t": ids},
        {name: t for name, t in patient.tensors.items() if name != "d2t"},
    ):
        broken = Patient(str(tmp_path), "eagle3", patient.config, tensors, ours=False)
        (reading,) = [r for r in readings(broken, VERIFIER) if r.check == "vocabulary map"]
        assert torch.equal(drafter_of(reading.patient, VERIFIER).draft_ids, ids)


def test_a_missing_map_takes_draft_ids_for_tokens(tmp_path):
    """As vLLM does."""
    patient = patient_of(tmp_path, foreign.original_eagle3)
    del patient.tensors["d2t"]
    drafter = drafter_of(patient, VERIFIER)
    assert drafter.draft_ids is None and drafter.lm_head.weight.shape == (16, 32)


@pytest.mark.parametrize("name", ["norm.weight", "midlayer.self_attn.k_proj.weight"])
def test_what_lacks_a_tensor_is_not_run(name, tmp_path):
    patient = patient_of(tmp_path, foreign.original_eagle3)
    del patient.tensors[name]
    assert drafter_of(patient, VERIFIER) is None
    assert right(None, {}, 2) is None


@torch.no_grad()
def test_right_drafts_are_counted_slot_by_slot(tmp_path):
    drafter = drafter_of(patient_of(tmp_path, foreign.original_medusa), VERIFIER)
    ids = texts(2, 12)
    batch = batch_of(VERIFIER, ids)
    hidden = batch.pop("last_hidden")
    found = right(drafter, batch, 2)
    expected = [
        bool(drafter.logits(drafter.blocks[s](hidden[b, t]), s).argmax() == ids[b, t + 2 + s])
        for s in range(2)
        for b in range(2)
        for t in range(12)
        if supervised(batch, s)[b, t]
    ]
    assert found.tolist() == expected and len(expected) == 2 * (10 + 9)


def test_the_verifiers_own_embeddings_are_no_reading(tmp_path):
    patient = patient_of(tmp_path, lambda f: foreign.original_eagle1(f, EMBEDDINGS, bias=False))
    assert "embed_tokens.weight" not in patient.tensors
    assert list(readings(patient, VERIFIER)) == []
    assert drafter_of(patient, VERIFIER).embed_tokens is None
