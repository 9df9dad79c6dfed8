"""The layers that a saved EAGLE-3 says it fuses are those that every engine finds in it.

The look-ups are copied as facts. Of vLLM 0.32: `v1/worker/gpu_model_runner.py` (the older runner,
which serves on CPUs), `v1/worker/gpu/spec_decode/eagle/eagle3_utils.py` (the newer, on GPUs) and
`transformers_utils/configs/speculators/algos.py`. Of SGLang 0.5.23:
`model_executor/model_runner_components/spec_aux_hidden_state.py` and `models/llama.py`.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest
import tiny
import torch

from headstart.models import export
from headstart.models.drafters.eagle3 import LAYERS, Eagle3, Eagle3Config, layer_ids
from headstart.models.formats import imports
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig

VERIFIER = tiny.verifier()  # 8 layers
DEFAULT = [2, 4, 5]
OWN = [1, 4, 8]
Config = dict[str, Any]


def vllm_older(config: Config) -> list[int]:
    found = config.get("eagle_aux_hidden_state_layer_ids")
    if not found:
        found = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return found or DEFAULT


def vllm_newer(config: Config) -> list[int]:
    found = config.get("eagle_aux_hidden_state_layer_ids")
    if not found:
        found = (config.get("eagle_config") or {}).get("layer_ids")
    return found or DEFAULT


def vllm_speculators(look_up: Callable[[Config], list[int]]) -> Callable[[Config], list[int]]:
    def read(config: Config) -> list[int]:
        inner = dict(config["transformer_layer_config"])
        if config.get("eagle_aux_hidden_state_layer_ids"):
            inner[LAYERS] = config["eagle_aux_hidden_state_layer_ids"]
        return look_up(inner)

    return read


def sglang(config: Config) -> list[int]:
    found = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return DEFAULT if found is None else [layer + 1 for layer in found]


NATIVE = (vllm_older, vllm_newer)


def made(layers: list[int] | None) -> Eagle3:
    config = Eagle3Config(feature_layers=layers and tuple(layers))
    return Eagle3.create(VERIFIER, config, LossConfig(), torch.ones(64))


def config_in(folder: Path) -> Config:
    return json.loads((folder / "config.json").read_text())


def exported(drafter: Eagle3, to: str, folder: Path) -> Config:
    written = export.converted(drafter, to, "some/verifier")
    export.write(*written, folder, torch.float32)
    return config_in(folder)


def old(folder: Path, layers: list[int] | None = None) -> Path:
    """As headstart used to save it."""
    made(layers).save(folder)
    config = config_in(folder)
    del config[LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("layers", [None, OWN, [3, 6]])
def test_every_look_up_finds_the_layers_of_training(layers, tmp_path):
    drafter = made(layers)
    drafter.save(tmp_path / "native")
    found = config_in(tmp_path / "native")
    trained = list(drafter.feature_layers)
    assert [look_up(found) for look_up in NATIVE] == [trained, trained]
    assert found["num_aux_hidden_states"] == len(trained)
    found = exported(drafter, "speculators", tmp_path / "speculators")
    assert [vllm_speculators(one)(found) for one in NATIVE] == [trained, trained]
    if len(trained) == 3:
        assert sglang(exported(drafter, "sglang", tmp_path / "sglang")) == trained
    if trained == DEFAULT:  # the layout has no place for others
        found = exported(drafter, "eagle", tmp_path / "eagle")
        assert [look_up(found) for look_up in (*NATIVE, sglang)] == [trained] * 3


def test_an_old_folder_loads_and_says_that_saving_it_again_mends_it(tmp_path):
    folder = old(tmp_path / "old", OWN)
    assert [look_up(config_in(folder)) for look_up in NATIVE] == [OWN, DEFAULT]
    with pytest.warns(UserWarning, match=r"in eagle_config alone.*Saved again it has both") as told:
        drafter = load_checkpoint(folder, VERIFIER)
    assert len(told) == 1 and "\n" not in str(told[0].message)
    assert drafter.feature_layers == tuple(OWN)
    drafter.save(tmp_path / "again")
    found = config_in(tmp_path / "again")
    assert [look_up(found) for look_up in NATIVE] == [OWN, OWN]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_checkpoint(tmp_path / "again", VERIFIER).feature_layers == tuple(OWN)


def test_a_folder_of_another_program_is_saved_with_both(tmp_path):
    inner = {"eagle_aux_hidden_state_layer_ids": OWN}
    for name, given in (("in", {"eagle_config": inner}), ("out", inner)):
        foreign.original_eagle3(tmp_path / name, **given)
        drafter = imports.load(tmp_path / name, VERIFIER, LossConfig())
        drafter.save(tmp_path / "saved")
        found = config_in(tmp_path / "saved")
        assert [look_up(found) for look_up in NATIVE] == [OWN, OWN]


def test_two_places_that_differ_are_refused(tmp_path):
    made(OWN).save(tmp_path)
    config = config_in(tmp_path)
    config["eagle_config"][LAYERS] = [1, 4, 7]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is \[1, 4, 8\] at the top .* \[1, 4, 7\] in eagle_c"):
        load_checkpoint(tmp_path, VERIFIER)
    with pytest.raises(KeyError):
        layer_ids({"eagle_config": {}})
