"""Marks, seeds, and no network: every test starts alike."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: it reads this once
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

torch.set_num_threads(1)  # of tiny models, more would wait for each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
