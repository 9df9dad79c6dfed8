"""Names that documents gave to users stay importable from where they were said to be."""

import importlib

import pytest

PUBLIC = {
    "headstart.eval.speculate": [
        "generate", "residual", "spec_step", "KVCache", "tree_attention_mask", "Counts",
    ],
    "headstart.eval.speedup": [
        "expected_tokens_per_verify", "wall_time_per_token", "expected_speedup",
        "breakeven_alpha", "breakeven_acceptance_rate", "simulate_tail",
    ],
    "headstart.eval.losslessness": ["chi_square", "ChiSquare", "Losslessness"],
    "headstart.eval.acceptance": ["Acceptance", "run"],
    "headstart.eval.gate": ["Gate", "run"],
    "headstart.models.trees": ["tree_attention_mask", "chain", "static", "Dynamic", "optimal"],
    "headstart.models.drafter": ["Drafter", "TrainableDrafter", "Batch", "Proposal", "Drafting"],
    "headstart.models.losses": ["LossConfig"],
    "headstart.models.loading": ["load", "load_pair"],
    "headstart.models.verifier": [],
    "headstart.data.render": ["Render", "run"],
}  # fmt: skip


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_where_they_were(module: str) -> None:
    held = importlib.import_module(module)
    assert not [name for name in PUBLIC[module] if not hasattr(held, name)]


def test_an_old_name_is_the_same_object() -> None:
    from headstart.eval import speculate, speedup
    from headstart.eval.decoding import rejection
    from headstart.eval.measures import speedup as formulas
    from headstart.models import trees
    from headstart.models.proposal import trees as own

    assert speculate.spec_step is rejection.spec_step
    assert speedup.expected_speedup is formulas.expected_speedup
    assert trees.Dynamic is own.Dynamic
