"""MTP modules that a verifier's own folder holds, in the names and precision of its files.

Three ways to write the same tensors (transformers loads none of them with the model):

- MiMo: `model.mtp_layers.{k}.`
- DeepSeek-V3 and GLM-4-MoE: `model.layers.{n + k}.`, after the model's own n layers, with copies of
  its embedding and head
- Qwen3-Next: `mtp.`, and its layers below `mtp.layers.{k}.`; what is not of a layer serves them all

Experts lie one by one in these files and stacked in memory.

Legend: H hidden size, I width of an expert.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.losses import LossConfig
from headstart.models.verifier import outline
from headstart.models.verifier.outline import first_line
from headstart.models.verifier.verifier import Verifier
from headstart.models.verifier.weights import save_tensors

_DEEPSEEK = {
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "projection",
    "shared_head.norm": "norm",
}
_NAMES = {
    "mimo": {
        "token_layernorm": "embedding_norm",
        "hidden_layernorm": "hidden_norm",
        "input_proj": "projection",
        "final_layernorm": "norm",
    },
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "qwen3_next": {
        "pre_fc_norm_embedding": "embedding_norm",
        "pre_fc_norm_hidden": "hidden_norm",
        "fc": "projection",
        "norm": "norm",
    },
}
_COPIES = ("embed_tokens.", "shared_head.head.")  # of the verifier's own tensors


class Place(NamedTuple):
    """Where a tensor of the files lies in ours."""

    name: str
    expert: int | None = None  # of a stack of them
    half: int | None = None  # of gate and up, which are stacked too


class Native(NamedTuple):
    """What a verifier's folder holds."""

    folder: Path
    layout: str
    num_modules: int
    places: dict[str, Place]  # by the files' names
    files: dict[str, Path]  # the same


def find(verifier: str) -> Native:
    """The modules in the folder of a verifier of this name.

    Raises:
        ValueError: there are none, or they are not of a kind that can be trained.
    """
    folder = outline.folder(verifier)
    config = AutoConfig.from_pretrained(folder).get_text_config()
    num_layers, model_type = config.num_hidden_layers, config.model_type
    places, files, layouts = {}, {}, set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                names = list(tensors.keys())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read: {first_line(error)}") from error
        for name in names:
            found = _placed(name, num_layers, model_type)
            if found is not None:
                layout, places[name] = found
                files[name] = file
                layouts.add(layout)
    if len(layouts) != 1:
        raise ValueError(
            f"mode native: {str(folder)!r} holds no MTP modules of a known layout ("
            f"{', '.join(_NAMES)}); graft modules onto this verifier instead, with mode graft"
        )
    (layout,) = layouts
    scaled = [name for name in places if name.endswith(("_scale_inv", "weight_scale"))]
    if scaled:
        raise ValueError(
            f"mode native: the MTP modules in {str(folder)!r} are quantised ({scaled[0]}); use a "
            "folder with weights in bfloat16 or float32"
        )
    numbers = {int(place.name.split(".")[1]) for place in places.values()}
    if layout == "qwen3_next" and len(numbers) > 1:
        raise ValueError(
            f"mode native: {str(folder)!r} has {len(numbers)} layers behind one projection; only "
            "one is supported"
        )
    return Native(folder, layout, len(numbers), places, files)


def holds_modules(name: str) -> bool:
    """Whether this is a folder on this machine of a verifier with modules that can be read."""
    try:
        return Path(name).is_dir() and find(name).num_modules > 0
    except (OSError, ValueError):  # no modules, or no model
        return False


def _placed(name: str, num_layers: int, model_type: str) -> tuple[str, Place] | None:
    """Layout and place of a tensor; None where it is not of an MTP module."""
    number, rest = 0, ""
    if match := re.fullmatch(r"model\.mtp_layers\.(\d+)\.(.+)", name):
        layout, number, rest = "mimo", int(match[1]), match[2]
    elif match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", name):
        return "qwen3_next", _in_layer(int(match[1]), match[2])
    elif match := re.fullmatch(r"mtp\.(.+)", name):
        layout, rest = "qwen3_next", match[1]
    elif match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        layout = "glm4_moe" if model_type == "glm4_moe" else "deepseek_v3"
        number, rest = int(match[1]) - num_layers, match[2]
    if not rest or number < 0 or rest.startswith(_COPIES):
        return None
    stem, _, suffix = rest.rpartition(".")
    if stem in _NAMES[layout]:
        return layout, Place(f"blocks.{number}.{_NAMES[layout][stem]}.{suffix}")
    return layout, _in_layer(number, rest)


def _in_layer(number: int, rest: str) -> Place:
    prefix = f"blocks.{number}.layer."
    expert = re.fullmatch(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight", rest)
    if expert is None:
        return Place(prefix + rest)
    if expert[3] == "down":
        return Place(f"{prefix}{expert[1]}down_proj", int(expert[2]))
    return Place(f"{prefix}{expert[1]}gate_up_proj", int(expert[2]), int(expert[3] == "up"))


def mimo_name(name: str) -> str:
    """Of our tensor, of a dense layer, in MiMo's layout."""
    _, number, rest = name.split(".", 2)
    stem, _, suffix = rest.rpartition(".")
    theirs = {ours: their for their, ours in _NAMES["mimo"].items()}
    rest = f"{theirs[stem]}.{suffix}" if stem in theirs else rest.removeprefix("layer.")
    return f"model.mtp_layers.{number}.{rest}"


def part(tensors: dict[str, Tensor], place: Place) -> Tensor:
    """The part of our tensors that lies at a place: a view."""
    tensor = tensors[place.name]
    if place.expert is not None:
        tensor = tensor[place.expert]  # [2 I, H] or [H, I]
    return tensor if place.half is None else tensor.chunk(2)[place.half]


@torch.no_grad()
def load(drafter: MTP, native: Native) -> None:
    """Put the folder's modules in the place of the drafter's, every tensor of them.

    Raises:
        ValueError: other tensors than the verifier's last layer has.
    """
    mine = drafter.state_dict()
    filled = dict.fromkeys(mine, 0)
    wrong = ""
    for file in sorted(set(native.files.values())):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (no mapping)
                place = native.places.get(name)
                if place is None:
                    continue
                if place.name not in mine:
                    wrong = f"{name} has no place"
                    continue
                target, source = part(mine, place), tensors.get_tensor(name)
                if target.shape != source.shape:
                    wrong = f"{name} is {list(source.shape)}, not {list(target.shape)}"
                    continue
                target.copy_(source)
                filled[place.name] += source.numel()
    lacking = [name for name, count in filled.items() if count != mine[name].numel()]
    if wrong or lacking:
        raise ValueError(
            f"mode native: the MTP modules in {str(native.folder)!r} are not like the verifier's "
            f"last layer: {wrong or f'{lacking[0]} is missing'}"
        )


def create(verifier: Verifier, settings: MTPConfig, loss: LossConfig) -> MTP:
    """The verifier's own modules, to be trained further.

    Raises:
        ValueError: it has none.
    """
    native = find(verifier.name)
    config = replace(settings, layout=native.layout, num_modules=native.num_modules)
    drafter = MTP.create(verifier, config, loss)
    load(drafter, native)
    return drafter


def write_back(tensors: dict[str, Tensor], native: Native, target: Path) -> None:
    """The verifier's folder with these modules in it, in the precision of its own.

    Args:
        tensors: a saved drafter's.
        target: its folder; files that stay the same are links there.
    """
    target.mkdir(parents=True, exist_ok=True)
    changed = set(native.files.values())
    for file in sorted(native.folder.iterdir()):
        place = target / file.name
        if file in changed:
            with safe_open(file, framework="pt") as held:
                metadata = held.metadata()
                written = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
            for name in written.keys() & native.places.keys():
                new = part(tensors, native.places[name]).to(written[name].dtype)
                written[name] = new.contiguous().clone()
            temporary = place.with_suffix(".partial")
            save_tensors(written, temporary, metadata)
            os.replace(temporary, place)
        elif file.is_file() and not place.exists():
            place.symlink_to(file.resolve())
