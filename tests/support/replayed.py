"""Answers decoded and replayed, and whether both say the same."""

import itertools

import torch
from tiny import verifier as tiny_verifier

from headstart.data.rows.collate import collate
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding.speculate import generate
from headstart.eval.measures.counts import Counts
from headstart.eval.measures.replay import (
    replay,
)
from headstart.models.drafters.eagle3 import Eagle3
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain
from headstart.models.verifier.verifier import Verifier

GREEDY = Drafting(False, Sampling())


def flat(found: list[list[Counts]]) -> list[Counts]:
    return list(itertools.chain.from_iterable(found))


def verifier_of(softness: float = 1.0) -> Verifier:
    made = tiny_verifier(hidden_size=64, intermediate_size=128)
    made.terminator_ids = ()
    with torch.no_grad():
        made.head.weight.mul_(softness)
    return made


def answered(prompt: list[int], answer: list[int], name: str = "row") -> Row:
    return Row(prompt + answer, [0] * len(prompt) + [1] * len(answer), name)


def assert_equal(replayed: Counts, decoded: Counts) -> None:
    for name in ("tokens", "rounds", "drafted", "examined", "accepted"):
        assert getattr(replayed, name) == getattr(decoded, name), name


PROMPTS = [[5, 9, 11], [7], [20, 4, 33, 34, 35], [50, 51], [8, 8], [30], [12, 13, 14, 15], [60, 3]]


LIMIT = 26


def decoded_and_replayed(drafter: Eagle3, draft_length: int, limit: int, packed: bool):
    settings = {"shape": chain(draft_length), "sampling": Sampling(), "drafting": GREEDY}
    outputs = generate(drafter.verifier, drafter, PROMPTS, max_new_tokens=limit, **settings)
    decoded = [output.counts("row") for output in outputs]
    rows = [answered(p, o.tokens) for p, o in zip(PROMPTS, outputs, strict=True)]
    featurize = Featurizer(drafter.verifier, drafter.feature_layers)
    batch = featurize(collate(rows, 64, packed=packed))
    return decoded, flat(replay(drafter, [batch], draft_length, Sampling(), GREEDY, limit))
