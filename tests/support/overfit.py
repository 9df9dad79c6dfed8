"""Drafters that have learned a few answers by heart."""

from collections.abc import Callable

import torch

from headstart.data.rows.collate import collate
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding.speculate import generate
from headstart.models.drafter import TrainableDrafter
from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.hydra_heads import HydraHeads
from headstart.models.drafters.medusa import Medusa
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.losses import LossConfig
from headstart.models.parts.heads import HeadsConfig, HeadsDrafter
from headstart.models.proposal.sampling import Sampling
from headstart.models.verifier.verifier import Verifier

LOSS = LossConfig("hard_ce", num_steps=4, gamma=1.0)


def heads(
    kind: type[HeadsDrafter], verifier: Verifier, shared: bool, num_layers: int
) -> HeadsDrafter:
    config = HeadsConfig(num_layers=num_layers, shared_projection=shared)
    return kind.create(verifier, config, LOSS, torch.ones(64))


DRAFTERS: dict[str, Callable[[Verifier], TrainableDrafter]] = {
    "eagle3": lambda verifier: Eagle3.create(verifier, Eagle3Config(), LOSS, torch.ones(64)),
    "eagle1": lambda verifier: Eagle1.create(verifier, Eagle1Config("random", 0.0, 1.0), LOSS),
    "medusa": lambda verifier: heads(Medusa, verifier, shared=False, num_layers=1),
    "medusa, shared projection": lambda verifier: heads(Medusa, verifier, True, num_layers=3),
    "hydra_heads": lambda verifier: heads(HydraHeads, verifier, shared=False, num_layers=1),
    "hydra_heads, shared projection": lambda verifier: heads(HydraHeads, verifier, True, 3),
    "mtp": lambda verifier: MTP.create(verifier, MTPConfig(num_modules=4), LOSS),
    "mtp, one module": lambda verifier: MTP.create(verifier, MTPConfig(layout="glm4_moe"), LOSS),
    "draft_lm": lambda verifier: DraftLM.create(verifier, DraftLMConfig("layers:0,7"), LOSS),
}


def answered_rows(verifier: Verifier, prompts: list[list[int]], length: int) -> list[Row]:
    """The prompts with the verifier's own greedy answers of `length` tokens."""
    decoding = {"sampling": Sampling(), "drafting": None, "max_new_tokens": length}
    answers = generate(verifier, None, prompts, shape=None, **decoding)
    return [
        Row(prompt + answer.tokens, [0] * len(prompt) + [1] * length, str(i))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def learn(drafter: TrainableDrafter, rows: list[Row], rate: float, enough: float) -> float:
    """Train on the rows until `enough` of the drafts are right: the share that is."""
    featurize = Featurizer(drafter.verifier, drafter.feature_layers)
    batch = featurize(collate(rows, 512, packed=False))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate)
    steps = drafter.loss.num_steps
    weights = drafter.loss.step_weights() / batch["loss_mask"].sum()
    drafter.train()
    for _ in range(400):
        optimizer.zero_grad()
        loss = drafter(batch, weights)
        loss.value.backward()
        optimizer.step()
        totals = [loss.metrics[f"accuracy/{s}"] for s in range(steps)]
        marginal = float(sum(total for total, _ in totals) / sum(count for _, count in totals))
        if marginal > enough:
            break
    drafter.eval()
    return marginal
