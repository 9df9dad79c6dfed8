"""Files of weights may be read by whoever the umask lets."""

import os

import pytest
import torch
from by_hand import loud as loud_eagle3
from imported import VERIFIER
from layout_drafters import LOSS

from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.export import converted, write
from headstart.models.verifier.weights import save_tensors


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_of_weights_have_the_mode_that_the_umask_asks_for(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        loud_eagle3().save(tmp_path / "saved")
        written = converted(loud_eagle3(), "speculators", "some/verifier")
        write(*written, tmp_path / "exported", torch.float32)
        (tmp_path / "alone").mkdir()
        save_tensors({"x": torch.ones(2)}, tmp_path / "alone" / "x.safetensors", {"a": "b"})
        DraftLM.create(VERIFIER, DraftLMConfig("layers:0"), LOSS).save(tmp_path / "lm")
    finally:
        os.umask(before)
    for folder in ("saved", "exported", "lm", "alone"):
        files = [f for f in (tmp_path / folder).iterdir() if f.is_file()]
        assert {f.stat().st_mode & 0o777 for f in files} == {mode}, folder
        assert any(f.suffix == ".safetensors" for f in files)
        assert not [f for f in files if f.name.startswith(".")]
