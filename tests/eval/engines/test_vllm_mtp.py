"""A grafted MTP module in a real vLLM process, served as a MiMo: the text is the verifier's, and
as many drafts are accepted at each position as by our chain loop with the graft.

Needs the engine's environment (`make engine`). One graft is trained for each verifier, on the spot.
"""

from pathlib import Path

import pytest
import tiny
import torch
from overfit import answered_rows, learn
from vllm_runs import LENGTH, LOSS, answered, check, compared
from vllm_runs import pytestmark as pytestmark

from headstart.data.rows.rendering import render_all
from headstart.eval.decoding.trial import pick, prompt_of
from headstart.eval.engines.commands import speculative_config
from headstart.eval.engines.kinds import verifier_of
from headstart.eval.engines.parity import Compared
from headstart.models import export
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.export import Export
from headstart.models.verifier import embedded
from headstart.models.verifier.verifier import Verifier


def measured(
    verifier: Verifier, prompts: list[list[int]], folder: Path, rate: float, lengths: list[int]
) -> list[list[Compared]]:
    """Of each draft length; the verifier without drafts is the original one."""
    verifier.terminator_ids = ()
    rows = answered_rows(verifier, prompts, LENGTH)
    torch.manual_seed(0)
    drafter = MTP.create(verifier, MTPConfig(), LOSS)
    learn(drafter, rows, rate, enough=0.7)
    drafter.save(folder / "drafter")
    both = str(folder / "mimo")
    export.run(Export(str(folder / "drafter"), "mimo", both))
    original = verifier_of(None, str(folder / "drafter"))
    engines = [{"model": original, "max_model_len": 256}]
    engines += [
        {"model": both, "max_model_len": 256, "speculative_config": speculative_config(both, k)}
        for k in lengths
    ]
    plain, *drafted = answered(folder, engines, prompts)
    return [compared(drafter, rows, plain, one) for one in drafted]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_vllm_accepts_of_a_tiny_graft_what_our_loop_does(family, tmp_path):
    made = tiny.verifier(
        family, hidden_size=64, intermediate_size=128, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    verifier = Verifier.load(tiny.save(made, tmp_path / "verifier"))
    random = torch.Generator().manual_seed(8)
    prompts = torch.randint(3, 64, (3, 5), generator=random).tolist()
    (found,) = measured(verifier, prompts, tmp_path, 5e-3, [3])
    check(found)


@pytest.mark.slow
def test_vllm_accepts_of_the_embedded_verifiers_graft_what_our_loop_does(tmp_path):
    verifier = Verifier.load(embedded.NAME)
    rows, _ = render_all(
        "data/smollm2/eval.jsonl", verifier.tokenizer, verifier.terminator_ids, 256
    )
    prompts = [prompt_of(row) for row in pick(rows, 3)]
    for found in measured(verifier, prompts, tmp_path, 1e-3, [1, 3]):
        check(found)
