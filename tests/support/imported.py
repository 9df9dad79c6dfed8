"""Drafters as other programs save them."""

from pathlib import Path

import foreign
import tiny
import torch

from headstart.models.drafter import TrainableDrafter
from headstart.models.loading import load
from headstart.models.verifier.verifier import Verifier

VERIFIER = tiny.verifier()


EMBEDDINGS = VERIFIER.model.get_input_embeddings().weight.detach()


OTHERS = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


MAKERS = {
    "eagle3, original": foreign.original_eagle3,
    "eagle3, speculators": lambda f: foreign.speculators_eagle3(f, False, EMBEDDINGS.clone()),
    "eagle3, speculators, normed, own embeddings": lambda f: foreign.speculators_eagle3(
        f, True, OTHERS
    ),
    "eagle1, original": lambda f: foreign.original_eagle1(f, EMBEDDINGS, bias=False),
    "eagle1, original, bias": lambda f: foreign.original_eagle1(f, OTHERS, bias=True),
    "medusa, original": foreign.original_medusa,
}


def imported(name: str, folder: Path, verifier: Verifier = VERIFIER) -> TrainableDrafter:
    return load(str(MAKERS[name](folder)), verifier)
