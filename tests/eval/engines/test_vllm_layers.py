"""The layers that vLLM's own look-ups, of both of its runners, find in the folders we write."""

import json
import subprocess
from pathlib import Path

import tiny
import torch
from vllm_runs import ENGINE
from vllm_runs import pytestmark as engine_marks

from headstart.models import export
from headstart.models.drafters.eagle3 import LAYERS, Eagle3, Eagle3Config
from headstart.models.losses import LossConfig

pytestmark = engine_marks
OWN = [1, 4, 8]
SCRIPT = """
import json, sys
from types import SimpleNamespace
from vllm.transformers_utils.config import get_config
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
found = []
for folder in sys.argv[1:]:
    config = SimpleNamespace(hf_config=get_config(folder, trust_remote_code=False))
    spec = SimpleNamespace(draft_model_config=config)
    older = GPUModelRunner._get_eagle3_aux_layers_from_config(
        SimpleNamespace(speculative_config=spec)
    )
    found.append([older, get_eagle3_aux_layers_from_config(spec)])
print(json.dumps(found))
"""


def test_both_runners_find_the_layers_of_training(tmp_path: Path) -> None:
    drafter = Eagle3.create(
        tiny.verifier(), Eagle3Config(feature_layers=tuple(OWN)), LossConfig(), torch.ones(64)
    )
    drafter.save(tmp_path / "native")
    drafter.save(tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    del config[LAYERS]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    written = export.converted(drafter, "speculators", str(tmp_path / "verifier"))
    export.write(*written, tmp_path / "speculators", torch.float32)
    folders = [str(tmp_path / name) for name in ("native", "speculators", "old")]
    done = subprocess.run(
        [ENGINE / "bin" / "python", "-c", SCRIPT, *folders],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    native, speculators, old = json.loads(done.stdout.splitlines()[-1])
    assert native == speculators == [OWN, OWN]
    assert old == [OWN, None]  # None: the newer one takes its default
