"""What is wrong with a drafter, before it is served.

    python eval/doctor.py outputs/quickstart/best
    python -m headstart.eval.doctor DRAFTER --verifier embedded/smollm2-135m

Holds the folder against its verifier and against what engines look for (tensors, layer ids, norms,
positions, vocabulary, template), then drafts on ten prompts: how many drafts are right, whether as
many as in training, and whether another reading of the folder would have more of them right, which
names the defect. DRAFTER is a checkpoint, or a folder that another program saved. Each finding says
what is wrong, what it does to acceptance and how to mend it. Exit code 0: no defect; 3: defects.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from transformers import LlamaConfig

from headstart.data.answers import decoding
from headstart.data.answers.turns import Asking, Limits
from headstart.data.conversations import reading
from headstart.data.conversations.conversation import Conversation
from headstart.data.conversations.law import Law
from headstart.data.conversations.law import check as check_law
from headstart.data.rows import rendering
from headstart.data.rows.row import Audit, Row
from headstart.data.states.featurize import Featurizer
from headstart.eval.health import checks, probe
from headstart.eval.health.patient import CHECKS, Finding, Patient
from headstart.eval.measures.counts import summarise
from headstart.eval.measures.intervals import LEAST_PROMPTS
from headstart.eval.measures.replay import replay_rows
from headstart.models import saved
from headstart.models.drafters.eagle3 import LAYERS, check_layers, with_layer_ids
from headstart.models.formats import imports, layouts
from headstart.models.joint.lora import tune
from headstart.models.loading import CLASSES, tunes_verifier
from headstart.models.proposal.sampling import Sampling
from headstart.models.saved import read_config, read_tensors
from headstart.models.verifier.verifier import Verifier
from headstart.script import named

ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings")
_PROMPTS = "data/smollm2/eval.jsonl"
_WAY_OUT = "drafts are compared with greedy answers; pass --prompts FILE, and they are written anew"


@dataclass
class Doctor:
    """What is examined, and on which prompts."""

    drafter: str
    """Folder of a checkpoint, or of a drafter that another program saved; may be the first word
    alone."""
    verifier: str | None = None
    """Default: the verifier the drafter was trained for."""
    prompts: str | None = None
    """Conversations; the verifier answers their first turns. Default: the answers that validation
    replayed in training, if they are known and here, else prompts that headstart brings."""
    num_prompts: int = 10
    """So many of them, evenly spread."""
    max_new_tokens: int = 48
    """Of each answer that the verifier writes."""
    draft_length: int = 4
    """K, drafts in a row."""
    max_length: int = 1024
    """Longer conversations are cut, in tokens."""
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_new_tokens", "draft_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")


@dataclass
class Diagnosis:
    """What was found."""

    findings: list[Finding]
    measured: dict[str, Any] | None
    """Measures of the probe, the folder as it is; None where it cannot be run."""
    recorded: dict[str, Any] | None

    @property
    def defects(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "defect"]


# ---- the folder --------------------------------------------------------------------------------


def admit(folder: str, verifier: Verifier) -> Patient:
    """The drafter's folder as it is.

    Raises:
        ValueError: no drafter there, or one of which nothing can be said.
    """
    if saved.kind_in(folder) is not None:
        kind, config, tensors = imports.translate(folder, verifier)
        written = json.loads((Path(folder) / "config.json").read_text())
        return Patient(folder, kind, config, tensors, ours=False, written=written)
    config = read_config(folder)
    kind = config["headstart"]["type"]
    if kind not in CLASSES:
        raise ValueError(f"drafter {folder!r} has type {kind!r}; known are {', '.join(CLASSES)}")
    tensors = read_tensors(Path(folder))
    try:
        read = as_engines_read(config, kind, verifier)
        layouts.required(kind, read)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"drafter {folder!r}: {error} is missing from its config.json, so nothing can be said "
            "of its tensors; copy the folder again"
        ) from error
    patient = Patient(folder, kind, read, tensors, ours=True, written=config)
    patient.recorded, patient.data = history(Path(folder))
    if kind == "eagle3":
        patient.trained_layers = trained_layers(Path(folder), verifier)
    return patient


def as_engines_read(config: dict[str, Any], kind: str, verifier: Verifier) -> dict[str, Any]:
    """With vLLM's defaults for what somebody took out of it."""
    if kind not in ("eagle3", "eagle1"):
        return config
    rope = {field: config[field] for field in ROPE_FIELDS if field in config}
    read = {
        "bias": False,
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "target_hidden_size": config["hidden_size"],
    } | config
    read["rope_parameters"] = LlamaConfig(**rope).rope_parameters
    if kind == "eagle1":
        return read
    flags = ("norm_before_residual", "norm_output", "fc_norm")
    read = dict.fromkeys(flags, False) | {"draft_vocab_size": config["vocab_size"]} | read
    ids = config.get(LAYERS) or (config.get("eagle_config") or {}).get(LAYERS)
    return with_layer_ids(read, ids or list(check_layers(None, verifier.num_layers)))


def history(folder: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """What training wrote beside a checkpoint: its last validation, and its settings of data."""
    try:
        recorded = json.loads((folder / "resume" / "state.json").read_text())["validation"]
        data = yaml.safe_load((folder / "recipe.yaml").read_text())["data"]
        data["eval"], data["chat_template_kwargs"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None, None
    return recorded, data


def trained_layers(folder: Path, verifier: Verifier) -> list[int] | None:
    """Layer ids that the recipe beside an EAGLE-3 checkpoint asks for; None: it does not tell.

    Between neighbouring layers of a deep model a drafter's acceptance may hardly differ, so that
    drafting does not show which of them it learned from.
    """
    try:
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        if recipe["init_from"] is not None:  # then they are that drafter's
            return None
        return list(check_layers(recipe["drafter"]["feature_layers"], verifier.num_layers))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None


def verifier_of(settings: Doctor) -> str:
    """The verifier's name: as asked, or the one it was made for.

    Raises:
        ValueError: neither is known.
    """
    if settings.verifier is not None:
        return settings.verifier
    if saved.kind_in(settings.drafter) is not None:
        raise ValueError(
            f"verifier: {settings.drafter} does not say for which it was made; pass --verifier"
        )
    return read_config(settings.drafter)["headstart"]["verifier"]


# ---- the texts ---------------------------------------------------------------------------------


def texts(settings: Doctor, patient: Patient, verifier: Verifier) -> tuple[list[Row], Audit, bool]:
    """Rows that the verifier wrote, their audit, and whether training measured on such rows.

    Raises:
        ValueError: data that cannot be read, without a prompt, or with answers that are not greedy.
    """
    known = None if patient.recorded is None else patient.data["eval"]
    same = settings.prompts is None and known is not None and reading.resolve(known)
    source = known if same else settings.prompts or _PROMPTS
    every = [c for c in reading.read(source) if c.asked()]
    chosen = [every[i * len(every) // settings.num_prompts] for i in range(settings.num_prompts)]
    chosen = every if len(every) <= settings.num_prompts else chosen
    if not chosen:
        raise ValueError(f"prompts {source!r}: no row has a user turn")
    if same:
        with named(f"data.eval {source!r} of its recipe"):
            check_law(chosen, Law(0.0), lambda law: _WAY_OUT)
    else:
        chosen = answered(chosen, settings, verifier)
    kwargs = patient.data["chat_template_kwargs"] if same else None
    rules = (verifier.tokenizer, verifier.terminator_ids, settings.max_length, kwargs)
    audit, rows = Audit(), []
    for conversation in chosen:
        found = rendering.render(conversation, *rules)
        audit.add(found)
        rows += [row for row in found if not row.empty]
    return rows, audit, bool(same)


def answered(
    prompts: list[Conversation], settings: Doctor, verifier: Verifier
) -> list[Conversation]:
    """The first turn of each, answered greedily by the verifier."""
    first = []
    for prompt in prompts:
        asked = prompt.asked()
        last = next((i for i, m in enumerate(asked) if m["role"] == "user"), len(asked) - 1)
        first.append(replace(prompt, messages=asked[: last + 1], chat_template_kwargs=None))
    context = verifier.context_length
    limits = Limits(context, settings.max_new_tokens, context)
    asking = Asking(limits, Sampling(), seed=0, chat_template_kwargs=None)
    return decoding.answer(verifier, first, asking, lambda tokens: None, Counter())


# ---- the diagnosis -----------------------------------------------------------------------------


def diagnose(settings: Doctor, patient: Patient, verifier: Verifier) -> Diagnosis:
    """Every finding, of the folder and of the probe."""
    findings = checks.examine(patient, verifier)
    if tunes_verifier(patient.folder):
        tune(verifier, Path(patient.folder))
    rows, audit, same = texts(settings, patient, verifier)
    findings += mask(rows, audit)
    if not rows:
        return Diagnosis(findings, None, patient.recorded)
    batch = probe.batch_of(rows)
    named, _ = probe.diagnose(patient, verifier, batch, settings.draft_length)
    found = {finding.check for finding in named}
    findings = [f for f in findings if f.check not in found] + named
    measured = measure(settings, patient, verifier, rows)
    findings += acceptance(measured, patient.recorded if same else None, named)
    order = {name: i for i, name in enumerate(CHECKS)}
    findings.sort(key=lambda finding: (finding.severity, order[finding.check]))
    return Diagnosis(findings, measured, patient.recorded if same else None)


def measure(
    settings: Doctor, patient: Patient, verifier: Verifier, rows: list[Row]
) -> dict[str, Any] | None:
    """Replayed acceptance of the folder as it is; None where no engine could run it."""
    drafter = probe.drafter_of(patient, verifier)
    if drafter is None:
        return None
    length = min(settings.draft_length, drafter.max_depth or settings.draft_length)
    if patient.recorded is not None:
        length = len(patient.recorded["conditional"])
    featurize = Featurizer(verifier, drafter.feature_layers, alone=False)
    return summarise(replay_rows(drafter, rows, featurize, length, Sampling(), probe.GREEDY))


def mask(rows: list[Row], audit: Audit) -> list[Finding]:
    """Are the verifier's answers found in its template, their terminators among them?"""
    if not rows:
        return [
            Finding(
                "defect", "mask", "the verifier's answers are not found in what its template "
                "writes, so nothing could be learned from them",
                "the drafter learned from other tokens than it is asked for",
                "see a row with data/render.py",
            )
        ]  # fmt: skip
    if audit.terminators == audit.finished:
        return []
    return [
        Finding(
            "note", "mask",
            f"{audit.terminators} terminators in {audit.finished} finished answers",
            "a drafter that learned from such rows does not learn to stop",
            "see a row with data/render.py",
        )
    ]  # fmt: skip


def acceptance(
    measured: dict[str, Any] | None, recorded: dict[str, Any] | None, named: list[Finding]
) -> list[Finding]:
    """Against what training reported, where it did, on the same data."""
    if measured is None:
        return [
            Finding(
                "defect", "acceptance", "it cannot be run as it is", "engines refuse it, or draft "
                "from numbers that nobody trained", "mend the other defects first",
            )
        ]  # fmt: skip
    now = measured["acceptance_length"]
    if recorded is not None and now["value"] is not None:
        then = recorded["acceptance_length"]
        if then["value"] is not None and _fell(measured, recorded):
            return [
                Finding(
                    "defect", "acceptance",
                    f"acceptance length {_interval(now)}, training reported {_interval(then)} on "
                    "the same data",
                    "that much of the speedup is lost",
                    "mend what is named above" if named else "something was changed after "
                    "training that no other reading explains: go back to the run's checkpoint",
                )
            ]  # fmt: skip
    first = measured["conditional"][0] if measured["conditional"] else None
    if first is not None and first < 0.05 and not named:
        return [
            Finding(
                "note", "acceptance", f"{first:.1%} of its first drafts are right",
                "next to nothing is accepted: barely trained, or for another verifier",
                "train it further, or pass its own verifier",
            )
        ]  # fmt: skip
    return []


def _fell(measured: dict[str, Any], recorded: dict[str, Any]) -> bool:
    """By the intervals; of too few prompts for one, to less than half."""
    high, low = _bound(measured, "high"), _bound(recorded, "low")
    if high is None or low is None:
        now, then = (m["acceptance_length"]["value"] for m in (measured, recorded))
        return now - 1 < (then - 1) / 2
    return high < low


def _bound(found: dict[str, Any], which: str) -> float | None:
    """Of the acceptance length; where enough prompts all say the same, that."""
    length = found["acceptance_length"]
    if length[which] is None and found["prompts"] >= LEAST_PROMPTS:
        return length["value"]
    return length[which]


def _interval(length: dict[str, Any]) -> str:
    if length["low"] is None:
        return f"{length['value']:.2f}"
    return f"{length['value']:.2f} [{length['low']:.2f}, {length['high']:.2f}]"


# ---- script ------------------------------------------------------------------------------------


def text(patient: Patient, verifier: Verifier, diagnosis: Diagnosis) -> str:
    """The report."""
    lines = [f"{patient.folder}: {patient.kind} for {verifier.name}"]
    concerned = {finding.check for finding in diagnosis.findings}
    lines.append("in order: " + ", ".join(name for name in CHECKS if name not in concerned))
    if diagnosis.measured is not None:
        now = diagnosis.measured
        lines.append(f"acceptance as it is: {_measures(now)}, {now['prompts']} prompts")
    if diagnosis.recorded is not None:
        lines.append(f"training reported:   {_measures(diagnosis.recorded)}")
    for finding in diagnosis.findings:
        lines += [
            f"\n{finding.severity.upper()} {finding.check}: {finding.what}",
            f"    effect: {finding.effect}",
            f"    mend:   {finding.mend}",
        ]
    count = len(diagnosis.defects)
    lines.append(f"\n{count} defect{'s' * (count != 1)}" if count else "\nno defect found")
    return "\n".join(lines)


def _measures(found: dict[str, Any]) -> str:
    length = found["acceptance_length"]["value"]
    conditional = ", ".join("–" if v is None else f"{v:.3f}" for v in found["conditional"])
    return f"length {length or 0:.3f}, by position {conditional}"


def run(settings: Doctor) -> None:
    """Examine, report, and end with code 3 where there are defects."""
    verifier = Verifier.load(verifier_of(settings), settings.dtype, settings.device)
    patient = admit(settings.drafter, verifier)
    diagnosis = diagnose(settings, patient, verifier)
    print(text(patient, verifier, diagnosis))
    if diagnosis.defects:
        sys.exit(3)


if __name__ == "__main__":
    from headstart.script import run_script

    run_script(Doctor, run, first="drafter")
