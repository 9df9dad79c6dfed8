"""A tiny MTP drafter whose every weight is heard."""

import torch
from tiny import verifier as tiny_verifier

from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier

VERIFIER = tiny_verifier()


def make(num_modules: int = 1, steps: int = 3, verifier: Verifier = VERIFIER, **settings) -> MTP:
    loss = LossConfig("ce", num_steps=steps, gamma=1.0)
    return MTP.create(verifier, MTPConfig(num_modules, **settings), loss)


def loud(num_modules: int = 1, **settings) -> MTP:
    """Weights large enough that every one of them shows in the output, norms included."""
    drafter = make(num_modules, **settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.2 / weight.shape[-1] ** 0.5)
            else:
                weight.uniform_(0.5, 1.5)
    return drafter.eval()
