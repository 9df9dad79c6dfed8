"""What a drafter's folder says, held against its verifier and against what engines look for.

Nothing is computed with the drafter here; `eval/health/probe.py` does that.

Legend: V and V' verifier's and draft vocabulary, L feature layers.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headstart.eval.health import layers
from headstart.eval.health.patient import Finding, Patient
from headstart.models.formats import layouts
from headstart.models.formats.imports import is_map
from headstart.models.parts.feature_drafter import llama_config
from headstart.models.verifier.verifier import Verifier, end_of_turn_ids

_SHOWN = 4  # names listed of many


def examine(patient: Patient, verifier: Verifier) -> list[Finding]:
    """Every finding of the folder alone."""
    found = [*fingerprint(patient, verifier), *tensors(patient), *untrained(patient)]
    if patient.kind == "eagle3":
        found += [*layers.layer_ids(patient, verifier), *vocabulary_map(patient)]
        found += [*residual(patient)]
    if patient.kind in ("eagle3", "eagle1"):
        found += [*rope(patient, verifier), *embeddings(patient, verifier)]
    if patient.kind == "eagle1" and patient.tensors.get("fc.bias", torch.zeros(1)).any():
        found.append(
            Finding(
                "defect", "tensors", "fc has a bias",
                "vLLM leaves it out without a word, so all it drafts is off",
                "train it without (bias false in config.json), or serve it with the code it "
                "comes from",
            )
        )  # fmt: skip
    if patient.kind == "draft_lm":
        found += [*sizes(patient, verifier)]
    return [*found, *terminators(patient, verifier), *template(verifier)]


def fingerprint(patient: Patient, verifier: Verifier) -> Iterator[Finding]:
    """Is this the verifier it was made for?"""
    if not patient.ours:
        yield Finding(
            "note", "fingerprint", "it does not say for which verifier it was made",
            "none, if it is this one; for another, nothing it drafts is right",
            "see the measured acceptance",
        )  # fmt: skip
        return
    entry = patient.config["headstart"]
    if entry["fingerprint"] != verifier.fingerprint():
        yield Finding(
            "defect", "fingerprint",
            f"it was made for {entry['verifier']} (fingerprint {entry['fingerprint']}), the "
            f"verifier is {verifier.name} ({verifier.fingerprint()})",
            "from a little less, for a copy in another precision, to nothing, for another model",
            "serve its own verifier, or train on from it: --init_from",
        )  # fmt: skip


# ---- tensors -----------------------------------------------------------------------------------


def tensors(patient: Patient) -> Iterator[Finding]:
    """Against the engine's table: missing, unexpected, of another shape, not finite."""
    required = layouts.required(patient.kind, patient.config)
    optional = layouts.optional(patient.kind, patient.config)
    held = patient.tensors
    broken = [n for n, t in held.items() if t.is_floating_point() and not t.isfinite().all()]
    if broken:
        yield Finding(
            "defect", "tensors", f"{_listed(broken)}: not every number is finite",
            "nothing it drafts is right",
            "go back to an earlier checkpoint, and train on at a lower rate",
        )  # fmt: skip
    if required is None:
        return
    missing = [name for name in required if name not in held and name != "d2t"]
    if missing:
        yield Finding(
            "defect", "tensors", f"missing: {_listed(missing)}",
            "engines go on without a word, with random numbers or with the verifier's",
            "copy the whole folder again, or export it again",
        )  # fmt: skip
    known = required | optional
    unexpected = [name for name in held if name not in known]
    if unexpected:
        yield Finding(
            "defect", "tensors", f"unexpected: {_listed(unexpected)}",
            "vLLM refuses the folder, or leaves a bias out without a word",
            "take them out, or correct what config.json says of the drafter's shape",
        )  # fmt: skip
    wrong = [
        f"{name} {list(held[name].shape)} where {list(shape)} is wanted"
        for name, shape in known.items()
        if name in held and tuple(held[name].shape) != shape
    ]
    if wrong:
        yield Finding(
            "defect", "tensors", f"of another shape: {_listed(wrong)}",
            "engines refuse the folder",
            "config.json and the weights are of two drafters; use those of one",
        )  # fmt: skip


def untrained(patient: Patient) -> Iterator[Finding]:
    """Weights that look as they did before the first step."""
    flat = [
        name
        for name, tensor in patient.tensors.items()
        if tensor.is_floating_point()
        and tensor.dim() == 2
        and tensor.numel() > 1
        and bool((tensor == tensor.flatten()[0]).all())
    ]
    if flat:
        yield Finding(
            "defect", "never trained", f"{_listed(flat)}: one number throughout",
            "what depends on them drafts as it did before training",
            "train with a loss that reaches them: loss.num_steps is the number of heads",
        )  # fmt: skip
    ones = [
        name
        for name, tensor in patient.tensors.items()
        if tensor.dim() == 1 and "norm" in name and bool((tensor == 1).all())
    ]
    if ones:
        yield Finding(
            "note", "norms", f"{_listed(ones)}: all ones, as before training",
            "none by itself; a trained norm differs from it",
            "see that training reaches them",
        )  # fmt: skip


# ---- settings ----------------------------------------------------------------------------------


def residual(patient: Patient) -> Iterator[Finding]:
    if patient.ours and "norm_before_residual" not in patient.written:
        yield Finding(
            "note", "norm_before_residual", "config.json does not say which residual it has",
            "none where the engine takes false, as vLLM does for this format; poor where it "
            "takes true",
            "write norm_before_residual to config.json",
        )  # fmt: skip


def rope(patient: Patient, verifier: Verifier) -> Iterator[Finding]:
    """Positions are the verifier's."""
    wanted = llama_config(verifier)
    found, theirs = patient.config["rope_parameters"], wanted.rope_parameters
    if _without_names(found) != _without_names(theirs):
        yield Finding(
            "defect" if patient.ours else "note", "rope",
            f"positions are {_settings(found)}, the verifier's are {_settings(theirs)}",
            "worse the longer the text, unless it was trained so",
            "write the verifier's rope_parameters to config.json",
        )  # fmt: skip
    longest = patient.config.get("max_position_embeddings") or 0
    if longest < wanted.max_position_embeddings:
        yield Finding(
            "note", "rope",
            f"max_position_embeddings is {longest}, the verifier's "
            f"{wanted.max_position_embeddings}",
            f"none in vLLM, which raises it; elsewhere nothing right beyond {longest} tokens",
            f"write {wanted.max_position_embeddings} to config.json",
        )  # fmt: skip


def embeddings(patient: Patient, verifier: Verifier) -> Iterator[Finding]:
    """Engines use those of the file before the verifier's."""
    own = patient.tensors.get("embed_tokens.weight")
    theirs = verifier.model.get_input_embeddings().weight.detach().cpu()
    if own is None or own.shape != theirs.shape or torch.equal(own, theirs.to(own.dtype)):
        return
    likeness = torch.cosine_similarity(own.float(), theirs.float(), dim=-1).mean().item()
    alike = likeness > 0.5
    yield Finding(
        "note" if alike else "defect", "embed_tokens",
        f"its embeddings are not the verifier's: their rows are alike by {likeness:.2f}, as "
        "cosines go",
        "little" if alike else "poor from the first draft on, unless it was trained with these",
        "take embed_tokens.weight out of the file: engines then share the verifier's",
    )  # fmt: skip


def vocabulary_map(patient: Patient) -> Iterator[Finding]:
    """d2t: missing, or ids where offsets belong."""
    size, total = patient.config["draft_vocab_size"], patient.config["vocab_size"]
    offsets, member = patient.tensors.get("d2t"), patient.tensors.get("t2d")
    if size == total:
        return
    if offsets is None:
        mend = "export the drafter again"
        if member is not None and int(member.sum()) == size:
            mend = "write d2t = (the ids where t2d is true) - (0, 1, 2, …) to the file"
        yield Finding(
            "defect", "vocabulary map",
            f"d2t is missing, and the draft vocabulary has {size} of {total} ids",
            "engines go on without a word and take draft id 5 for token 5: next to nothing is "
            "accepted",
            mend,
        )  # fmt: skip
        return
    if is_absolute(offsets, member, total):
        yield Finding(
            "defect", "vocabulary map", "d2t holds token ids where offsets belong",
            "engines add each draft id to it: other tokens are proposed, and next to nothing is "
            "accepted",
            "subtract 0, 1, 2, … from d2t in the file",
        )  # fmt: skip
    elif not is_map(offsets, total):
        yield Finding(
            "defect", "vocabulary map",
            f"d2t, read as offsets, gives no ascending ids in 0 … {total - 1}",
            "the wrong tokens are proposed, or the engine stops", "export the drafter again",
        )  # fmt: skip
    elif member is not None and not _agree(offsets, member):
        yield Finding(
            "defect", "vocabulary map", "d2t and t2d name different tokens",
            "engines go by d2t; if it is of another run, the wrong tokens are proposed",
            "export the drafter again",
        )  # fmt: skip


def is_absolute(offsets: Tensor, member: Tensor | None, vocab_size: int) -> bool:
    """Whether a map gives sense as token ids, and none, or less, as offsets."""
    zeros = torch.arange(len(offsets))
    if not is_map(offsets - zeros, vocab_size):
        return False
    if not is_map(offsets, vocab_size):
        return True
    return member is not None and _agree(offsets - zeros, member) and not _agree(offsets, member)


def _agree(offsets: Tensor, member: Tensor) -> bool:
    ids = offsets + torch.arange(len(offsets))
    return torch.equal(ids, member.nonzero()[:, 0])


def sizes(patient: Patient, verifier: Verifier) -> Iterator[Finding]:
    size = patient.config["vocab_size"]
    if size != verifier.vocab_size:
        yield Finding(
            "note", "tensors", f"its vocabulary has {size} rows, the verifier's "
            f"{verifier.vocab_size}",
            "none here; vLLM refuses the pair", "use a model of the same padded vocabulary",
        )  # fmt: skip


def terminators(patient: Patient, verifier: Verifier) -> Iterator[Finding]:
    """Can it draft the end of an answer?"""
    held, member = patient.tensors, None
    if patient.kind == "eagle3" and "d2t" in held:
        offsets = held["d2t"]
        if not is_absolute(offsets, held.get("t2d"), patient.config["vocab_size"]):
            offsets = offsets + torch.arange(len(offsets))
        member = set(offsets.tolist())
    elif "token_map" in held:
        member = set(held["token_map"].tolist())
    if member is None:
        return
    lacking = [i for i in verifier.terminator_ids if i not in member]
    if lacking:
        names = verifier.tokenizer.convert_ids_to_tokens(lacking)
        none = len(lacking) == len(verifier.terminator_ids)
        yield Finding(
            "defect" if none else "note", "terminators",
            f"{_listed(names)} cannot be drafted: not in the draft vocabulary",
            "the last draft of every answer that ends so is rejected",
            "train on with --init_from, which makes room for them",
        )  # fmt: skip


def template(verifier: Verifier) -> Iterator[Finding]:
    tokenizer = verifier.tokenizer
    if not tokenizer.chat_template:
        yield Finding(
            "note", "template", "the verifier has no chat template", "none for plain text",
            "serve it as a base model",
        )  # fmt: skip
    elif not end_of_turn_ids(tokenizer) & set(verifier.terminator_ids):
        yield Finding(
            "note", "template", "the template ends an answer with none of the terminators",
            "a drafter that learned from templated text does not learn to stop",
            "add the template's end of turn to eos_token_id in generation_config.json",
        )  # fmt: skip


# ---- words -------------------------------------------------------------------------------------


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _without_names(rope: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key != "type"}


def _settings(rope: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(_without_names(rope).items()))
