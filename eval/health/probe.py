"""A drafter read in several ways, to see under which its drafts are right.

A wrong setting changes no text and breaks nothing: it shows in acceptance alone. So the drafter is
run over texts that the verifier wrote, as its folder says and then with one thing read otherwise:
layer ids one off, the other residual, the verifier's positions, its embeddings, the map as ids. A
reading under which clearly more drafts are right names the defect.

Legend: n slots, K draft length.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.data.rows.collate import collate
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.eval.health.patient import Finding, Patient
from headstart.eval.measures.replay import acceptance_table
from headstart.models.batch import supervised
from headstart.models.drafter import TrainableDrafter
from headstart.models.drafters.eagle3 import layer_ids, with_layer_ids
from headstart.models.formats import layouts
from headstart.models.formats.imports import is_map, members
from headstart.models.loading import CLASSES
from headstart.models.losses import LossConfig
from headstart.models.parts.feature_drafter import llama_config
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.verifier.verifier import Verifier

GREEDY = Drafting(False, Sampling())
_DEVIATIONS = 3  # of a difference that counts, in standard errors
_SHARE = 0.02  # and of all drafts


class Reading(NamedTuple):
    """The patient with one thing read otherwise."""

    check: str
    what: str
    mend: str
    patient: Patient


def drafter_of(patient: Patient, verifier: Verifier) -> TrainableDrafter | None:
    """The drafter as an engine would run it; None where it could not."""
    config, kind, folder = patient.config, patient.kind, Path(patient.folder)
    required = layouts.required(kind, config)
    tensors = dict(patient.tensors)
    if required is not None:
        known = required | layouts.optional(kind, config)
        tensors = {name: tensor for name, tensor in tensors.items() if name in known}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if any(shapes.get(name) != shape for name, shape in required.items() if name != "d2t"):
            return None
    if kind == "eagle3":
        if "d2t" not in tensors:
            tensors.pop("t2d", None)  # draft ids are taken for token ids
        elif not is_map(tensors["d2t"], config["vocab_size"]):
            return None
        elif "t2d" not in tensors:
            tensors["t2d"] = members(tensors["d2t"], config["vocab_size"])
    given = () if required is None else (tensors,)
    try:
        return CLASSES[kind].load(folder, config, verifier, LossConfig(), *given).eval()
    except ValueError:
        return None


@torch.no_grad()
def right(
    drafter: TrainableDrafter | None, batch: dict[str, Tensor], draft_length: int
) -> Tensor | None:
    """Which teacher-forced greedy drafts are the verifier's next token: bool [n], all steps one
    after the other. None: the drafter cannot be run.

    Args:
        batch: texts that the verifier wrote, without its states.
    """
    if drafter is None:
        return None
    featurized = Featurizer(drafter.verifier, drafter.feature_layers, alone=False)(batch)
    table = acceptance_table(drafter, featurized, draft_length, Sampling(), GREEDY)
    steps = range(draft_length)
    return torch.cat([table[..., s][supervised(batch, s)] > 0 for s in steps])


def readings(patient: Patient, verifier: Verifier) -> Iterator[Reading]:
    """Every other way to read the folder."""
    config, tensors = patient.config, patient.tensors
    if patient.kind == "eagle3":
        yield from _layers(patient, verifier)
        flipped = not config["norm_before_residual"]
        yield Reading(
            "norm_before_residual",
            f"norm_before_residual is {str(not flipped).lower()}, but it was trained with "
            f"{str(flipped).lower()}",
            f"write norm_before_residual: {str(flipped).lower()} to config.json",
            replace(patient, config=config | {"norm_before_residual": flipped}),
        )
        yield from _maps(patient)
    if patient.kind not in ("eagle3", "eagle1"):
        return
    theirs = llama_config(verifier).rope_parameters
    if config["rope_parameters"] != theirs:
        yield Reading(
            "rope",
            f"positions are those of {_theta(config['rope_parameters'])}, but it was trained with "
            f"the verifier's, {_theta(theirs)}",
            "write the verifier's rope_parameters to config.json",
            replace(patient, config=config | {"rope_parameters": theirs}),
        )
    if "embed_tokens.weight" in tensors:
        without = {name: t for name, t in tensors.items() if name != "embed_tokens.weight"}
        yield Reading(
            "embed_tokens",
            "embed_tokens.weight in the file is not what it was trained with: the verifier's are",
            "take embed_tokens.weight out of the file: engines then share the verifier's",
            replace(patient, tensors=without),
        )


def diagnose(
    patient: Patient, verifier: Verifier, batch: dict[str, Tensor], draft_length: int
) -> tuple[list[Finding], Patient]:
    """Defects that another reading mends, one after the other, and the patient so read."""
    found: list[Finding] = []
    steps = min(draft_length, patient.config.get("num_heads", draft_length))
    known = set()
    count = sum(int(supervised(batch, s).sum()) for s in range(steps))
    now = right(drafter_of(patient, verifier), batch, steps)
    while True:
        now = torch.zeros(count, dtype=torch.bool) if now is None else now
        best: tuple[int, Reading, Tensor] | None = None
        for reading in readings(patient, verifier):
            if reading.check in known:
                continue
            other = right(drafter_of(reading.patient, verifier), batch, steps)
            if other is None:
                continue
            gain = int(other.sum() - now.sum())
            if clear(now, other) and (best is None or gain > best[0]):
                best = gain, reading, other
        if best is None:
            return found, patient
        _, reading, other = best
        before, after = now.double().mean().item(), other.double().mean().item()
        found.append(
            Finding(
                "defect", reading.check, reading.what,
                f"{before:.1%} of its drafts are right, {after:.1%} when it is read so "
                f"(teacher-forced, {count} drafts)",
                reading.mend,
            )
        )  # fmt: skip
        known.add(reading.check)
        patient, now = reading.patient, other


def clear(now: Tensor, other: Tensor) -> bool:
    """Whether the other reading has more drafts right than chance explains (McNemar's test)."""
    won, lost = int((other & ~now).sum()), int((now & ~other).sum())
    enough = won - lost >= _SHARE * len(now)
    return enough and won - lost > _DEVIATIONS * (won + lost) ** 0.5


def batch_of(rows: list[Row]) -> dict[str, Tensor]:
    """The rows, padded, in one batch."""
    return collate(rows, max(len(row.input_ids) for row in rows), packed=False)


# ---- readings ----------------------------------------------------------------------------------


def _layers(patient: Patient, verifier: Verifier) -> Iterator[Reading]:
    ids = layer_ids(patient.config)
    for step in (1, -1):
        shifted = [layer + step for layer in ids]
        if all(1 <= layer <= verifier.num_layers for layer in shifted):
            yield Reading(
                "layer ids",
                f"layer ids are {ids}, but it was trained on {shifted}: one "
                f"{'higher' if step > 0 else 'lower'}",
                f"write {shifted} to config.json, at its top level and in eagle_config",
                replace(patient, config=with_layer_ids(patient.config, shifted)),
            )


def _maps(patient: Patient) -> Iterator[Reading]:
    tensors, total = patient.tensors, patient.config["vocab_size"]
    size = patient.config["draft_vocab_size"]
    member = tensors.get("t2d")
    if size == total:
        return
    if "d2t" in tensors:
        offsets = tensors["d2t"] - torch.arange(size)
        what, mend = "d2t holds token ids where offsets belong", "subtract 0, 1, 2, … from d2t"
    elif member is not None and int(member.sum()) == size:
        offsets = member.nonzero()[:, 0] - torch.arange(size)
        what = f"d2t is missing, and the draft vocabulary has {size} of {total} ids"
        mend = "write d2t = (the ids where t2d is true) - (0, 1, 2, …) to the file"
    else:
        return
    if is_map(offsets, total):
        changed = tensors | {"d2t": offsets, "t2d": members(offsets, total)}
        yield Reading("vocabulary map", what, mend, replace(patient, tensors=changed))


def _theta(rope: dict[str, Any]) -> str:
    return f"{rope['rope_type']}, theta {rope['rope_theta']:g}"
