"""A cache of the Hub with configs in it, as huggingface_hub keeps them."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest


def fill(cache: Path, configs: dict[str, dict[str, Any]]) -> None:
    for name, config in configs.items():
        folder = cache / f"models--{name.replace('/', '--')}"
        (folder / "snapshots" / "abc").mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")
        (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(config))


def use(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read it, and ask no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
