"""A saved drafter as the doctor sees it."""

import json

from imported import VERIFIER

from headstart.eval.health.patient import Patient
from headstart.models.formats import imports


def patient_of(folder, maker) -> Patient:
    maker(folder)
    kind, config, tensors = imports.translate(folder, VERIFIER)
    written = json.loads((folder / "config.json").read_text())
    return Patient(str(folder), kind, config, tensors, ours=False, written=written)
