"""Every drafter with weights learns eight conversations by heart, and is then accepted in decoding:
training, replay and serving see the same thing.

A new drafter adds itself to `DRAFTERS`.
"""

from collections.abc import Callable

import pytest
import tiny
import torch
from test_replay import assert_equal

from headstart.data.render import Row
from headstart.data.rows.collate import collate
from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding.speculate import generate
from headstart.eval.measures.counts import summarise
from headstart.eval.measures.replay import replay_rows
from headstart.models.drafter import Drafting, TrainableDrafter
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
from headstart.models.proposal.trees import chain
from headstart.models.verifier.verifier import Verifier

LENGTH = 1 + 5 * 6  # of an answer: six rounds in which all is accepted, after prefill's token
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


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_is_learned_by_heart_is_accepted_in_decoding(name):
    verifier = tiny.verifier(hidden_size=64, intermediate_size=128)
    verifier.terminator_ids = ()
    random = torch.Generator().manual_seed(8)
    prompts = torch.randint(3, 64, (8, 4), generator=random).tolist()
    rows = answered_rows(verifier, prompts, LENGTH)
    torch.manual_seed(0)
    drafter = DRAFTERS[name](verifier)
    rate = 1e-2 if isinstance(drafter, HeadsDrafter) else 5e-3
    assert learn(drafter, rows, rate, enough=0.99) > 0.98
    greedy, drafting = Sampling(), Drafting(False, Sampling())
    decoding = {"sampling": greedy, "drafting": drafting, "max_new_tokens": LENGTH}
    drafted = generate(verifier, drafter, prompts, shape=chain(4), **decoding)
    assert [p + got.tokens for p, got in zip(prompts, drafted, strict=True)] == [
        row.input_ids for row in rows
    ]
    decoded = [got.counts(str(i)) for i, got in enumerate(drafted)]
    assert summarise(decoded)["acceptance_length"]["value"] > 4.5
    featurize = Featurizer(verifier, drafter.feature_layers)
    replayed = replay_rows(drafter, rows, featurize, 4, greedy, drafting, LENGTH)
    for left, right in zip(replayed, decoded, strict=True):
        assert_equal(left, right)
