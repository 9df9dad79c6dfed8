"""The commands with which engines serve a drafter: vLLM 0.32, SGLang 0.5.23, llama.cpp.

What an engine accepts in silence and serves badly is refused here: a method told by the folder's
name, more Medusa heads than there are, layer ids counted otherwise, a kind that it does not know.
Arguments are those of SGLang's `arg_groups/fields/spec.py`, and of the llama.cpp in xllamacpp
2026.10.11549.
"""

from pathlib import Path
from typing import Any

from headstart.eval.engines import kinds
from headstart.eval.engines.kinds import LOOKUP, NATIVE, Found
from headstart.eval.engines.server import command, unchecked
from headstart.models import loading
from headstart.models.drafters.eagle3 import LAYERS
from headstart.models.drafters.lookup import PromptLookupConfig
from headstart.models.verifier import embedded
from headstart.models.verifier.names import is_embedded, is_path
from headstart.script import options

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}
_SGLANG = {"eagle3": "EAGLE3", "eagle1": "EAGLE", "draft_lm": "STANDALONE", NATIVE: "NEXTN",
           LOOKUP: "NGRAM"}  # fmt: skip
_LENGTH = {"vllm": "--max-model-len", "sglang": "--context-length", "llama.cpp": "--ctx-size"}
_LLAMA_CPP = {"eagle3": "draft-eagle3", "draft_lm": "draft-simple", LOOKUP: "ngram-simple"}


def speculative_config(
    drafter: str, draft_length: int, method: str | None = None
) -> dict[str, Any]:
    """What vLLM is told of a drafter.

    Args:
        drafter: the folder or Hub name of a checkpoint; prompt-lookup, options behind a colon (vLLM
            calls it ngram); a verifier with an MTP module in its folder; or any causal language
            model with the verifier's tokenizer.
        method: for a name of the Hub whose config cannot be read.

    Raises:
        ValueError: a drafter that vLLM cannot serve, or not with so many drafts.
    """
    found = kinds.find(drafter, method)
    check_served(found, draft_length, "vLLM")
    drafts = {"num_speculative_tokens": draft_length}
    if found.kind == LOOKUP:
        lookup = options(drafter, PromptLookupConfig)
        span = {"prompt_lookup_max": lookup.max_ngram, "prompt_lookup_min": lookup.min_ngram}
        return {"method": "ngram"} | drafts | span
    if found.kind == NATIVE:  # vLLM reads them where it reads the verifier
        return {"method": "mtp"} | drafts
    serving = loading.CLASSES[found.kind].serving
    return {"method": serving, "model": _place(drafter)} | drafts


def loader_arguments(drafter: str, method: str | None = None) -> list[str]:
    """What `vllm serve` must be told besides."""
    return unchecked(kinds.find(drafter, method).config)


def length_arguments(
    engine: str, drafter: str, verifier: str | None, method: str | None = None
) -> list[str]:
    """Where the verifier's rotary factors hang on the longest text that an engine may see, that
    length."""
    length = kinds.longest_text(verifier, drafter, method)
    return [] if length is None else [_LENGTH[engine], str(length)]


def lines(
    engine: str,
    drafter: str,
    verifier: str | None,
    draft_length: int,
    arguments: list[str],
    method: str | None = None,
) -> list[list[str]]:
    """Commands to type one after the other, as words: exports that the engine needs, then its own.

    Args:
        engine: one of `ENGINES`.
        arguments: further words for the engine's command.

    Raises:
        ValueError: a drafter that the engine cannot serve, or not this way.
    """
    found, made_for = kinds.find(drafter, method), kinds.verifier_of(verifier, drafter, method)
    check_served(found, draft_length, ENGINES[engine])
    kinds.check_fit(found, made_for, ENGINES[engine])
    arguments = [*length_arguments(engine, drafter, verifier, method), *arguments]
    if engine == "vllm":
        more = [*loader_arguments(drafter, method), *arguments]
        return [command(made_for, speculative_config(drafter, draft_length, method), more)]
    given = [] if verifier is None else ["--verifier", verifier]
    make = _sglang if engine == "sglang" else _llama_cpp
    *exports, launch = make(found, made_for, draft_length, given)
    return [*exports, [*launch, *arguments]]


def notes(engine: str, drafter: str, verifier: str | None, method: str | None = None) -> list[str]:
    """What the user should know of these commands: names that are no folders here, and layer ids
    that not all of vLLM finds."""
    found = kinds.find(drafter, method)
    asked = [kinds.verifier_of(verifier, drafter, method)]
    asked += [] if found.kind in (LOOKUP, NATIVE) else [_place(drafter)]
    away = [name for name in dict.fromkeys(asked) if not Path(name).exists()]
    told = [f"no folder {name!r} is here; {ENGINES[engine]} takes it from the Hub" for name in away]
    inside = (found.config.get("eagle_config") or {}).get(LAYERS)
    if engine == "vllm" and inside and not found.config.get(LAYERS):
        told.append(
            f"{drafter!r} has {LAYERS} in eagle_config alone: on GPUs, vLLM drafts from its "
            f"default layers, unless {inside} is at the top level of config.json, too"
        )
    return told


# ---- refused -----------------------------------------------------------------------------------


def check_served(found: Found, draft_length: int, engine: str) -> None:
    """Raise a ValueError for a drafter that this engine, by the name it goes by, does not serve."""
    if draft_length < 1:
        raise ValueError(f"draft_length must be 1 or more, got {draft_length}")
    drafter, kind = found.name, found.kind
    if kind in loading.LOOKUPS and kind != LOOKUP:
        raise ValueError(
            f"drafter {drafter!r}: {engine} knows no {kind}; pass {LOOKUP} or a checkpoint"
        )
    if kind == "layers":
        raise ValueError(
            f"drafter {drafter!r}: {engine} needs a folder; train one from these layers with "
            f"train/draft_lm.py --drafter.init {drafter} and serve its checkpoint"
        )
    if kind in (LOOKUP, NATIVE):
        _check_native(found, engine)
        return
    if kind not in loading.CLASSES:
        raise ValueError(
            f"drafter {drafter!r} is of type {kind!r}, which this version of headstart does not "
            f"know; it knows {', '.join(loading.CLASSES)}"
            if found.ours
            else f"drafter {drafter!r} is of speculators' kind {kind}, which headstart does not "
            f"know; see {engine}'s documentation for its command"
        )
    if "adapter" in found.config.get("headstart", {}):
        raise ValueError(
            f"drafter {drafter!r} drafts for a verifier that was trained with it, by an adapter; "
            f"{engine} would serve the original one: merge the adapter into a copy of the verifier "
            "first"
        )
    if kind == "mtp":
        _refuse_module(found, engine)
    if engine == "vLLM":
        _check_vllm(found, draft_length)
    elif kind not in (_SGLANG if engine == "SGLang" else _LLAMA_CPP):
        served = loading.CLASSES[kind].serving is not None
        raise ValueError(
            f"drafter {drafter!r} is of type {kind}, which {engine} does not load; "
            + ("vLLM does" if served else "headstart's own loop decodes with it")
        )


def _check_native(found: Found, engine: str) -> None:
    if found.kind != NATIVE or engine == "vLLM":
        return
    if engine == "llama.cpp":
        raise ValueError(
            f"drafter {found.name!r}: headstart writes no MTP module for llama.cpp, whose own "
            "converter does for some models; vLLM serves this folder"
        )
    if "MiMoForCausalLM" in (found.config.get("architectures") or []):
        raise ValueError(
            f"drafter {found.name!r}: SGLang gives a MiMo's module states after the verifier's "
            "final norm, and it learned from those before; vLLM serves this folder"
        )


def _refuse_module(found: Found, engine: str) -> None:
    number = found.config["headstart"].get("num_modules", 1)
    if engine != "vLLM":
        raise ValueError(
            f"drafter {found.name!r} is an MTP module, for which headstart has no form that "
            f"{engine} reads rightly; vLLM serves it, by models/export.py --to mimo"
        )
    if number > 1:
        raise ValueError(
            f"drafter {found.name!r} has {number} MTP modules, of which vLLM runs one; train one "
            "with drafter.num_modules 1, or decode with headstart's own loop"
        )
    raise ValueError(
        f"drafter {found.name!r} is an MTP module, which vLLM reads from its verifier's folder; "
        f"write both as one with models/export.py {found.name} --to mimo --out FOLDER, then serve "
        "FOLDER"
    )


def _check_vllm(found: Found, draft_length: int) -> None:
    drafter, kind, config = found.name, found.kind, found.config
    if loading.CLASSES[kind].serving is None:
        raise ValueError(
            f"drafter {drafter!r} is of type {kind}, which vLLM does not load; headstart's own "
            "loop decodes with it (eval/acceptance.py)"
        )
    if found.for_sglang:
        raise ValueError(
            f"drafter {drafter!r} was written for SGLang, which reads other layer ids and names "
            "than vLLM; serve the checkpoint that it was made from"
        )
    heads = config.get("medusa_num_heads", config.get("num_heads")) if kind == "medusa" else None
    if heads is not None and draft_length > heads:
        raise ValueError(
            f"draft_length is {draft_length}, but {drafter!r} has {heads} heads, and vLLM would "
            f"draft with heads of random weights; pass {heads} or less"
        )
    if not found.ours:
        return
    if "truncated_vocab_size" in config and not config["original_lm_head"]:
        raise ValueError(
            f"drafter {drafter!r} has heads of its own over a draft vocabulary, which vLLM does "
            "not load; train it with drafter.shared_projection true, or without draft_vocab_size"
        )
    entry = config["headstart"]
    if kind == "draft_lm" and config["vocab_size"] != entry["target_vocab_size"]:
        raise ValueError(
            f"drafter {drafter!r} has {config['vocab_size']} tokens, its verifier "
            f"{entry['target_vocab_size']}, and vLLM wants the same number; pad its embeddings"
        )


# ---- words -------------------------------------------------------------------------------------


def _place(drafter: str) -> str:
    return str(embedded.folder(drafter)) if is_embedded(drafter) else drafter


def _sglang(found: Found, verifier: str, draft_length: int, given: list[str]) -> list[list[str]]:
    algorithm, exports = _SGLANG[found.kind], []
    words = ["python", "-m", "sglang.launch_server", "--model-path", verifier]
    words += ["--speculative-algorithm", algorithm]
    drafts = ["--speculative-num-draft-tokens", str(draft_length + 1)]  # the root is one of them
    if found.kind == LOOKUP:
        return [[*words, *drafts, "--speculative-ngram-max-bfs-breadth", "1"]]  # a chain
    if found.kind != NATIVE:  # whose path is the verifier's
        folder = _place(found.name)
        if _needs_export(found):
            folder = f"{found.name.rstrip('/')}-sglang"
            exports = [_export(found, "sglang", folder, given)]
        words += ["--speculative-draft-model-path", folder]
    chain = ["--speculative-num-steps", str(draft_length), "--speculative-eagle-topk", "1"]
    return [*exports, [*words, *chain, *drafts]]


def _needs_export(found: Found) -> bool:
    """Whether SGLang reads it otherwise than it was meant. Of another program's EAGLE-3 without
    layer ids it takes the usual ones, as everybody does."""
    if found.kind == "draft_lm" or found.for_sglang:
        return False
    config = found.config
    told = config.get("eagle_config") or "speculators_model_type" in config
    return found.kind == "eagle1" or found.ours or bool(told)


def _llama_cpp(found: Found, verifier: str, draft_length: int, given: list[str]) -> list[list[str]]:
    model, number = f"{Path(verifier).name}.gguf", str(draft_length)
    exports = [_export(Found(verifier, "draft_lm", {}), "gguf", model, ["--verifier", verifier])]
    words = ["llama-server", "-m", model]
    kind = ["--spec-type", _LLAMA_CPP[found.kind]]
    if found.kind == LOOKUP:
        span = str(options(found.name, PromptLookupConfig).max_ngram)
        sizes = ["--spec-ngram-simple-size-n", span, "--spec-ngram-simple-size-m", number]
        return [*exports, [*words, *kind, *sizes]]
    name = found.name.rstrip("/")
    file = f"{name if is_path(name) else Path(name).name}.gguf"
    exports.append(_export(found, "gguf", file, given))
    return [*exports, [*words, "-md", file, *kind, "--spec-draft-n-max", number]]


def _export(found: Found, to: str, out: str, given: list[str]) -> list[str]:
    """Raises a ValueError for a drafter that has to be here to be exported."""
    if found.kind != "draft_lm" and not is_path(found.name):
        raise ValueError(
            f"drafter {found.name!r} has to be written anew by models/export.py --to {to}; "
            "download it and pass its folder"
        )
    return ["python", "models/export.py", found.name, *given, "--to", to, "--out", out]
