"""What `eval/engine.py serve` prints for every kind of drafter and every engine, in one table.

The arguments are held against those of the engines, copied as facts: of SGLang 0.5.23 from
`arg_groups/fields/spec.py` and `model.py` (a field's name with dashes), of llama.cpp from the
library in xllamacpp 2026.10.11549, in which a test looks them up where it is installed.
`pytest -s` prints the commands.
"""

import json
import shlex
import shutil
from pathlib import Path

import hub_cache
import pytest
import tiny
import torch

from headstart.eval.engines.commands import ENGINES, lines
from headstart.models import export
from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.hydra_heads import HydraHeads, HydraHeadsConfig
from headstart.models.drafters.medusa import Medusa, MedusaConfig
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.formats import imports
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier
from headstart.script import ROOT

LOSS, ONES = LossConfig(num_steps=3), torch.ones(64)
MAKERS = {
    "EAGLE-3": lambda v: Eagle3.create(v, Eagle3Config(feature_layers=(1, 4, 8)), LOSS, ONES),
    "EAGLE-1": lambda v: Eagle1.create(v, Eagle1Config(), LOSS),
    "Medusa": lambda v: Medusa.create(v, MedusaConfig(), LOSS, ONES),
    "Hydra heads": lambda v: HydraHeads.create(v, HydraHeadsConfig(), LOSS, ONES),
    "MTP graft": lambda v: MTP.create(v, MTPConfig(), LOSS),
    "draft model": lambda v: DraftLM.create(v, DraftLMConfig("layers:0,7"), LOSS),
}
TABLE = {  # of docs/serving.md, by engine
    "EAGLE-3": ("as is", "after `--to sglang`", "after `--to gguf`"),
    "EAGLE-1": ("as is", "after `--to sglang`", "no"),
    "Medusa": ("as is", "no", "no"),
    "Hydra heads": ("no", "no", "no"),
    "MTP graft": ("after `--to mimo`", "no", "no"),
    "MTP in its verifier's folder": ("as is", "as is, but for MiMo", "no"),
    "draft model": ("as is", "as is", "after `--to gguf`"),
    "trained with its verifier": ("no", "no", "no"),
    "prompt lookup": ("as is", "as is", "as is"),
    "lookahead": ("no", "no", "no"),
}
SGLANG = {
    "--model-path", "--speculative-algorithm", "--speculative-draft-model-path",
    "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
    "--speculative-ngram-max-bfs-breadth",
}  # fmt: skip
ALGORITHMS = {"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"}
LLAMA_CPP = {
    "-m", "-md", "--spec-type", "--spec-draft-n-max", "--spec-ngram-simple-size-n",
    "--spec-ngram-simple-size-m",
}  # fmt: skip
TYPES = {"draft-simple", "draft-eagle3", "ngram-simple"}
LIBRARY = ROOT / ".venv-llama-cpp"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A verifier, and a drafter of every kind."""
    folder = tmp_path_factory.mktemp("table")
    verifier = Verifier.load(tiny.save(tiny.verifier(), folder / "verifier"))
    for name, make in MAKERS.items():
        make(verifier).save(folder / name)
    shutil.copytree(folder / "Medusa", folder / "tuned")
    config = json.loads((folder / "tuned" / "config.json").read_text())
    config["headstart"]["adapter"] = "x"
    (folder / "tuned" / "config.json").write_text(json.dumps(config))
    deepseek = {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
    hub_cache.fill(folder / "hub", {"their/deepseek": deepseek})
    return folder


def drafters(place: Path) -> dict[str, str]:
    """By the table's rows."""
    names = {name: str(place / name) for name in MAKERS}
    return names | {
        "MTP in its verifier's folder": "their/deepseek",
        "trained with its verifier": str(place / "tuned"),
        "prompt lookup": "prompt-lookup:max_ngram=4,min_ngram=2",
        "lookahead": "lookahead",
    }


def printed(engine: str, drafter: str, place: Path) -> list[list[str]] | str:
    """The lines, or the refusal."""
    verifier = str(place / "verifier") if drafter.startswith(("prompt-", "look")) else None
    try:
        return lines(engine, drafter, verifier, 2, [])
    except ValueError as error:
        assert "\n" not in str(error)
        return str(error)


def cell(found: list[list[str]] | str, drafter: str) -> str:
    """What the table says of it."""
    if isinstance(found, str):
        return "after `--to mimo`" if "--to mimo --out" in found else "no"
    exports = [words for words in found[:-1] if words[2] == drafter]
    return f"after `--to {exports[0][exports[0].index('--to') + 1]}`" if exports else "as is"


def test_table_of_the_docs_is_what_serve_prints(place, monkeypatch):
    hub_cache.use(place / "hub", monkeypatch)
    docs = (ROOT / "docs" / "serving.md").read_text()
    for row, drafter in drafters(place).items():
        cells = []
        for engine in ENGINES:
            found = printed(engine, drafter, place)
            said = found if isinstance(found, str) else "\n".join(map(shlex.join, found))
            print(f"--- {row}, {ENGINES[engine]}\n{said}".replace(f"{place}/", ""))
            cells.append(cell(found, drafter))
        wanted = tuple(text.partition(", but")[0] for text in TABLE[row])
        assert tuple(cells) == wanted, row
        assert f"| {row} | {' | '.join(TABLE[row])} |" in docs, row


def test_every_argument_is_one_of_the_engine(place, monkeypatch):
    hub_cache.use(place / "hub", monkeypatch)
    for engine, known, values in (
        ("sglang", SGLANG, ALGORITHMS), ("llama.cpp", LLAMA_CPP, TYPES)
    ):  # fmt: skip
        seen = set()
        for drafter in drafters(place).values():
            found = printed(engine, drafter, place)
            if isinstance(found, str):
                continue
            words = found[-1][3 if engine == "sglang" else 1 :]
            names, given = words[::2], words[1::2]
            assert set(names) <= known
            seen |= set(names)
            option = "--speculative-algorithm" if engine == "sglang" else "--spec-type"
            assert given[names.index(option)] in values
        assert seen == known


def test_sglang_verifies_a_chain_of_k_drafts_and_the_root(place):
    *_, words = lines("sglang", str(place / "EAGLE-3"), None, 5, ["--port", "1"])
    assert shlex.join(words).endswith(
        "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6 "
        "--port 1"
    )


@pytest.mark.parametrize("row", ["EAGLE-3", "EAGLE-1"])
def test_the_printed_export_writes_what_sglang_reads(place, row):
    words, launch = lines("sglang", str(place / row), None, 2, [])
    assert words[:3] == ["python", "models/export.py", str(place / row)]
    asked = dict(zip(words[3::2], words[4::2], strict=True))
    export.run(export.Export(words[2], asked["--to"], asked["--out"]))
    folder = launch[launch.index("--speculative-draft-model-path") + 1]
    assert folder == asked["--out"] and Path(folder, "config.json").is_file()
    verifier = Verifier.load(str(place / "verifier"))
    assert imports.load(folder, verifier, LOSS).verifier is verifier
    again = lines("sglang", folder, str(place / "verifier"), 2, [])
    assert again == [launch]  # an export needs no other
    with pytest.raises(ValueError, match="was written for SGLang"):
        lines("vllm", folder, str(place / "verifier"), 2, [])


def test_a_mimo_is_not_given_to_sglang(place, tmp_path):
    """It hands the module the states after the final norm: `models/mimo.py` of 0.5.23."""
    out = str(tmp_path / "mimo")
    export.run(export.Export(str(place / "MTP graft"), "mimo", out))
    assert lines("vllm", out, None, 2, [])
    with pytest.raises(ValueError, match="states after the verifier's final norm"):
        lines("sglang", out, None, 2, [])


def test_a_hub_name_that_needs_an_export_is_to_be_downloaded(tmp_path, monkeypatch):
    config = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 64}
    told = config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}}
    hub_cache.fill(tmp_path, {"their/usual": config, "their/own": told})
    hub_cache.use(tmp_path, monkeypatch)
    (words,) = lines("sglang", "their/usual", "some/model", 2, [])  # both take the usual layers
    assert words[words.index("--speculative-draft-model-path") + 1] == "their/usual"
    with pytest.raises(ValueError, match="download it and pass its folder"):
        lines("sglang", "their/own", "some/model", 2, [])


@pytest.mark.engine
@pytest.mark.skipif(
    not (LIBRARY / "installed").exists(), reason="needs llama.cpp in .venv-llama-cpp: make engine"
)
def test_llama_cpp_has_these_arguments():
    (library,) = LIBRARY.glob("lib/python3*/site-packages/xllamacpp/*.so")
    held = library.read_bytes()
    for word in LLAMA_CPP | TYPES:
        assert b"\0" + word.encode() + b"\0" in held, word
