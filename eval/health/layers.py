"""The layer ids of an EAGLE-3 folder: those of training, counted and placed as engines expect."""

from collections.abc import Iterator

from headstart.eval.health.patient import Finding, Patient
from headstart.models.drafters import eagle3
from headstart.models.verifier.verifier import Verifier

_PLACES = "at its top level and in eagle_config"


def layer_ids(patient: Patient, verifier: Verifier) -> Iterator[Finding]:
    """As many as fc reads, in range, ascending; counted as vLLM counts."""
    ids, layers = eagle3.layer_ids(patient.config), verifier.num_layers
    mend = f"write the ids of training, ascending, to config.json: {_PLACES}"
    if not all(1 <= layer <= layers for layer in ids) or ids != sorted(set(ids)):
        yield Finding(
            "defect", "layer ids", f"{ids} are not distinct, ascending ids in 1 … {layers}",
            "vLLM sorts them and drops what is twice there, so fc reads other features than it "
            "learned from",
            mend,
        )  # fmt: skip
    count = patient.config.get("num_aux_hidden_states", len(ids))
    fc = patient.tensors.get("fc.weight")
    columns = count if fc is None else fc.shape[1] // verifier.hidden_size
    if not len(ids) == count == columns:
        yield Finding(
            "defect", "layer ids",
            f"{len(ids)} ids, num_aux_hidden_states {count}, and fc reads {columns} features",
            "engines refuse the folder", mend,
        )  # fmt: skip
    if patient.trained_layers not in (None, ids):
        yield Finding(
            "defect", "layer ids",
            f"layer ids are {ids}, but by its recipe.yaml it was trained on "
            f"{patient.trained_layers}",
            "fc reads other features than it learned from: poor in a model of few layers, hardly "
            "seen where neighbouring layers are alike",
            f"write {patient.trained_layers} to config.json, {_PLACES}",
        )  # fmt: skip
    outer = patient.written.get(eagle3.LAYERS)
    inner = (patient.written.get("eagle_config") or {}).get(eagle3.LAYERS)
    if (outer or inner) in (None, ids):
        if "speculators_model_type" not in patient.written:
            yield from layer_places(ids, outer, inner, layers)
    else:
        yield Finding(
            "note", "layer ids", f"{outer or inner} are the ids as SGLang counts them, {ids} here",
            "right in SGLang; vLLM takes them as they are, one layer too low",
            "for vLLM, train on from it or save it with headstart: its ids are vLLM's",
        )  # fmt: skip


def layer_places(
    ids: list[int], outer: list[int] | None, inner: list[int] | None, layers: int
) -> Iterator[Finding]:
    """The ids lie where each engine looks for them: at the top level and in eagle_config."""
    mend = f"write {ids} to config.json, {_PLACES}, or save the drafter again with headstart"
    default = [2, layers // 2, layers - 3]
    if outer and inner and outer != inner:
        yield Finding(
            "defect", "layer ids", f"layer ids are {outer} at the top level and {inner} in "
            "eagle_config",
            "vLLM goes by the top level, other programs by eagle_config: one of them drafts from "
            "other layers than it learned from",
            f"write those of training to config.json, {_PLACES}",
        )  # fmt: skip
    elif inner and not outer:
        yield Finding(
            "note" if ids == default else "defect", "layer ids",
            f"layer ids {ids} are in eagle_config alone",
            f"vLLM's newer GPU runner looks at the top level: it drafts from its default, {default}"
            ", without a word",
            mend,
        )  # fmt: skip
    elif outer and not inner:
        yield Finding(
            "note", "layer ids", f"layer ids {ids} are at the top level alone",
            "none in vLLM; programs that look in eagle_config draft from their default layers",
            mend,
        )  # fmt: skip
