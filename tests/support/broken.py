"""Ways to break a saved drafter."""

from collections.abc import Callable

import torch
from torch import Tensor

from headstart.models.drafters.eagle3 import layer_ids, with_layer_ids

Config = dict


Change = Callable[[Config, dict[str, Tensor]], None]


def without_map(config: Config, tensors: dict[str, Tensor]) -> None:
    del tensors["d2t"]


def absolute_map(config: Config, tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def shifted_layers(by: int) -> Change:
    def change(config: Config, tensors: dict[str, Tensor]) -> None:
        config |= with_layer_ids(config, [i + by for i in layer_ids(config)])

    return change


def flipped_norm(config: Config, tensors: dict[str, Tensor]) -> None:
    config["norm_before_residual"] = not config["norm_before_residual"]


def other_theta(config: Config, tensors: dict[str, Tensor]) -> None:
    config["rope_parameters"]["rope_theta"] = 20.0
