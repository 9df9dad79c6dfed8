"""Drafters with heads: texts for them, and a check that serving gives what training gives."""

import torch
from test_replay import (
    LIMIT,
    PROMPTS,
    answered,
    assert_equal,
    decoded_and_replayed,
    verifier_of,
)
from torch import Tensor

from headstart.data.collate import Featurizer, collate
from headstart.eval.speculate import generate
from headstart.models import vocab
from headstart.models.drafter import Batch, Drafting, Proposal
from headstart.models.heads import HeadsConfig, HeadsDrafter
from headstart.models.losses import LossConfig
from headstart.models.sampling import RowRandom, Sampling
from headstart.models.trees import Shape, static
from headstart.models.verifier import States, Verifier

GREEDY = Drafting(False, Sampling())
SAMPLED = Drafting(True, Sampling(1.0))
ROUNDS = [[4, 7, 1], [1, 1, 1], [6, 0, 3], [2, 5, 0], [1, 6, 4], [3, 1, 1], [1, 1, 1]]
TREE = static(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 1, 0)]
)
COUNTS = torch.arange(64) % 7


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def texts(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def loud(drafter: HeadsDrafter) -> HeadsDrafter:
    """Weights large enough that every one of them shows in the output."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.normal_(0, 1.2 / weight.shape[-1] ** 0.5)
    return drafter


def batch_of(verifier: Verifier, ids: Tensor) -> Batch:
    """One document a row, all of it answer."""
    return Batch(
        input_ids=ids,
        loss_mask=torch.ones_like(ids),
        position_ids=torch.arange(ids.shape[1]).expand_as(ids),
        document_ids=torch.zeros_like(ids),
        last_hidden=verifier.states(ids).last_hidden,
    )


class Serving:
    """Ragged texts taken in by `advance` round by round, each row another number of slots."""

    def __init__(self, drafter: HeadsDrafter, ids: Tensor):
        self.drafter, self.ids = drafter, ids
        self.hidden = drafter.verifier.states(ids).last_hidden
        self.slots = [0] * len(ids)
        self.state = drafter.start(ids[:, 0])

    def advance(self, lengths: list[int]) -> None:
        width = max(lengths)
        tokens = torch.full((len(self.ids), width), 63)
        hidden = torch.full((len(self.ids), width, self.hidden.shape[-1]), 9.0)
        for row, length in enumerate(lengths):
            begin = self.slots[row]
            tokens[row, :length] = self.ids[row, begin + 1 : begin + 1 + length]
            hidden[row, :length] = self.hidden[row, begin : begin + length]
            self.slots[row] += length
        self.drafter.advance(self.state, tokens, torch.tensor(lengths), States(None, hidden))

    def select_rows(self, rows: list[int]) -> None:
        index = torch.tensor(rows)
        self.drafter.select_rows(self.state, index)
        self.ids, self.hidden = self.ids[index], self.hidden[index]
        self.slots = [self.slots[row] for row in rows]

    def propose(self, seed: int, shape: Shape, drafting: Drafting = SAMPLED) -> Proposal:
        random = RowRandom(seed, list(range(len(self.ids))))
        return self.drafter.propose(self.state, shape, drafting, random)

    def check(self, proposal: Proposal) -> None:
        """The law of every node is the unroll's over the text with the node's path in it, less the
        siblings drawn before."""
        drafter = self.drafter
        for row, slots in enumerate(self.slots):
            tokens, parents = proposal.tokens[row], proposal.parents[row].tolist()
            for node, parent in enumerate(parents):
                path, above = [], parent
                while above >= 0:
                    path.insert(0, int(tokens[above]))
                    above = parents[above]
                s = len(path)  # the node is step s of the last verified slot
                path.append(0)  # room for the token it predicts
                ids = torch.cat([self.ids[row, : slots + 1], torch.tensor(path)])[None]
                hidden = torch.full((1, ids.shape[1], self.hidden.shape[-1]), 5.0)
                hidden[0, :slots] = self.hidden[row, :slots]  # others are not known yet
                batch = Batch(input_ids=ids, last_hidden=hidden)
                *_, hidden = drafter.unroll(batch, s + 1)
                law = drafter.logits(hidden[0, slots - 1], s).softmax(-1)
                before = [i for i in range(node) if parents[i] == parent]
                law[vocab.columns(tokens[before], drafter.draft_ids)] = 0
                close(proposal.log_probs[row, node].exp(), law / law.sum())


@torch.no_grad()
def check_rounds(drafter: HeadsDrafter, shape: Shape) -> None:
    """Over rounds in which rows grow differently, or not at all, and one ends."""
    serving = Serving(drafter, texts(3, 32))
    for seed, lengths in enumerate(ROUNDS):
        if seed == 5:
            serving.select_rows([2, 0])
        serving.advance(lengths[: len(serving.slots)])
        serving.check(serving.propose(seed, shape))
        serving.check(serving.propose(seed + 100, shape))  # and left the state as it was


def check_prompts_are_not_learned(drafter: HeadsDrafter) -> None:
    """Two turns; other prompt tokens give the same gradients, another answer token does not."""
    ids = texts(1, 20)
    batch = batch_of(drafter.verifier, ids)
    batch["loss_mask"] = torch.tensor([[0] * 5 + [1] * 6 + [0] * 4 + [2] * 5])
    drafter.loss = LossConfig("hard_ce", num_steps=4)

    def gradients(changed: list[int]) -> list[Tensor]:
        other = ids.clone()
        other[0, changed] = (other[0, changed] + 7) % 64
        drafter.zero_grad()
        loss = drafter(Batch(**{**batch, "input_ids": other}), torch.full((4,), 0.05))
        loss.value.backward()
        return [weight.grad.clone() for weight in drafter.parameters()]

    plain = gradients([])
    assert all(gradient.abs().max() > 0 for gradient in plain)
    prompts = gradients([0, 1, 2, 3, 4, 11, 12, 13, 14])
    assert all(map(torch.equal, plain, prompts))
    for token in (6, 10, 16, 19):  # a turn's first token is the verifier's own
        assert not all(map(torch.equal, plain, gradients([token])))


def check_replay(kind: type[HeadsDrafter], config: HeadsConfig) -> None:
    """Of a partly trained drafter, replay counts exactly what decoding does, prompt by prompt."""
    verifier = verifier_of()
    settings = {"shape": None, "sampling": Sampling(), "drafting": GREEDY}
    found = generate(verifier, None, PROMPTS, max_new_tokens=LIMIT, **settings)
    rows = [answered(p, t.tokens) for p, t in zip(PROMPTS, found, strict=True)]
    drafter = kind.create(verifier, config, LossConfig(num_steps=4), COUNTS)
    batch = Featurizer(verifier, ())(collate(rows, 64, packed=False))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    weights = drafter.loss.step_weights() / batch["loss_mask"].sum()
    for _ in range(8):
        optimizer.zero_grad()
        drafter(batch, weights).value.backward()
        optimizer.step()
    for draft_length, limit in [(1, LIMIT), (2, LIMIT), (4, 3), (4, 6), (4, LIMIT)]:
        decoded, replayed = decoded_and_replayed(drafter, draft_length, limit, packed=False)
        for got, expected in zip(replayed, decoded, strict=True):
            assert_equal(got, expected)
    share = sum(sum(c.accepted) for c in decoded) / sum(sum(c.examined) for c in decoded)
    assert 0.15 < share < 0.95, share  # neither hopeless nor perfect
