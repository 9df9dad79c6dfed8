"""Drafters on the verifier's states: texts for them, and checks that several of them share, first
of all that serving gives what training gives."""

from pathlib import Path

import pytest
import torch
from replayed import (
    LIMIT,
    PROMPTS,
    answered,
    assert_equal,
    decoded_and_replayed,
    verifier_of,
)
from tiny import verifier as tiny_verifier
from torch import Tensor, nn

from headstart.data.rows.collate import collate
from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding.speculate import generate
from headstart.models import vocab
from headstart.models.batch import Batch
from headstart.models.drafter import TrainableDrafter, fingerprint
from headstart.models.loading import load_checkpoint
from headstart.models.losses import LossConfig
from headstart.models.parts.heads import HeadsConfig, HeadsDrafter
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom, Sampling
from headstart.models.proposal.trees import Shape, chain, static
from headstart.models.verifier.verifier import States, Verifier

GREEDY = Drafting(False, Sampling())
SAMPLED = Drafting(True, Sampling(1.0))
ROUNDS = [[4, 7, 1], [1, 1, 1], [6, 0, 3], [2, 5, 0], [1, 6, 4], [3, 1, 1], [1, 1, 1]]
TREE = static(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 1, 0)]
)
CHAIN = chain(5)
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


def batch_of(verifier: Verifier, ids: Tensor, layers: tuple[int, ...] = ()) -> Batch:
    """One document a row, all of it answer."""
    states = verifier.states(ids, layers)
    batch = Batch(
        input_ids=ids,
        loss_mask=torch.ones_like(ids),
        position_ids=torch.arange(ids.shape[1]).expand_as(ids),
        document_ids=torch.zeros_like(ids),
        last_hidden=states.last_hidden,
    )
    if layers:
        batch["features"] = states.features
    return batch


class Serving:
    """Ragged texts taken in by `advance` round by round, each row another number of slots."""

    def __init__(self, drafter: TrainableDrafter, ids: Tensor, tolerance: float = 1e-4):
        self.drafter, self.ids, self.tolerance = drafter, ids, tolerance
        self.states = drafter.verifier.states(ids, drafter.feature_layers)
        self.slots = [0] * len(ids)
        self.state = drafter.start(ids[:, 0])

    def advance(self, lengths: list[int]) -> None:
        rows, width = len(self.ids), max(lengths)
        tokens = torch.full((rows, width), 63)
        states = States(
            *(None if s is None else torch.full((rows, width, s.shape[-1]), 9.0)
              for s in self.states)
        )  # fmt: skip
        for row, length in enumerate(lengths):
            begin = self.slots[row]
            tokens[row, :length] = self.ids[row, begin + 1 : begin + 1 + length]
            for given, own in zip(states, self.states, strict=True):
                if given is not None:
                    given[row, :length] = own[row, begin : begin + length]
            self.slots[row] += length
        self.drafter.advance(self.state, tokens, torch.tensor(lengths), states)

    def select_rows(self, rows: list[int]) -> None:
        index = torch.tensor(rows)
        self.drafter.select_rows(self.state, index)
        self.ids = self.ids[index]
        self.states = States(*(None if s is None else s[index] for s in self.states))
        self.slots = [self.slots[row] for row in rows]

    def propose(self, seed: int, shape: Shape = CHAIN, drafting: Drafting = SAMPLED) -> Proposal:
        random = RowRandom(seed, list(range(len(self.ids))))
        return self.drafter.propose(self.state, shape, drafting, random)

    def known(self, row: int, ids: Tensor) -> Batch:
        """A text whose states are known only as far as the row has been taken in."""
        drafter, slots = self.drafter, self.slots[row]
        batch = batch_of(drafter.verifier, ids[None], drafter.feature_layers)
        for name, own in self.states._asdict().items():
            if own is not None:
                batch[name][0, :slots] = own[row, :slots]
                batch[name][0, slots:] = 5.0
        return batch

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
                text = torch.cat([self.ids[row, : slots + 1], torch.tensor(path)])
                *_, hidden = drafter.unroll(self.known(row, text), s + 1)
                logits = drafter.logits(hidden[0, slots - 1], s)
                before = [i for i in range(node) if parents[i] == parent]
                logits[vocab.columns(tokens[before], drafter.draft_ids)] = -torch.inf
                close(proposal.log_probs[row, node], logits.log_softmax(-1), self.tolerance)


@torch.no_grad()
def check_rounds(drafter: TrainableDrafter, shape: Shape, tolerance: float = 1e-4) -> None:
    """Over rounds in which rows grow differently, or not at all, and one ends."""
    serving = Serving(drafter, texts(3, 32), tolerance)
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


def check_comes_back(drafter: TrainableDrafter, folder: Path) -> None:
    """Saved and loaded, it is the same bit by bit, and so is what it then saves."""
    verifier, layers, steps = drafter.verifier, drafter.feature_layers, drafter.loss.num_steps
    drafter.save(folder / "drafter")
    loaded = load_checkpoint(folder / "drafter", verifier)
    before, after = drafter.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert fingerprint(loaded) == fingerprint(drafter)
    assert (loaded.feature_layers, loaded.max_depth) == (layers, drafter.max_depth)
    batch = batch_of(verifier, texts(2, 12), layers)
    pairs = zip(drafter.unroll(batch, steps), loaded.unroll(batch, steps), strict=True)
    for s, (left, right) in enumerate(pairs):
        assert torch.equal(left, right)
        assert torch.equal(drafter.logits(left, s), loaded.logits(right, s))
    loaded.save(folder / "again")
    for name in ("config.json", "model.safetensors"):
        first, second = (folder / saved / name for saved in ("drafter", "again"))
        assert first.read_bytes() == second.read_bytes()


def check_trains_and_drafts(drafter: TrainableDrafter, folder: Path) -> None:
    """Every weight has a gradient; saved and loaded, its drafts leave the text as it is."""
    verifier, steps = drafter.verifier, drafter.loss.num_steps
    drafter.save(folder)
    batch = batch_of(verifier, texts(2, 10), drafter.feature_layers)
    loss = drafter(batch, torch.full((steps,), 0.01))
    loss.value.backward()
    assert loss.value.isfinite() and loss.value > 0
    for name, weight in drafter.named_parameters():
        assert weight.grad.isfinite().all() and weight.grad.abs().sum() > 0, name
    loaded = load_checkpoint(folder, verifier)
    prompts = [[5, 9, 11], [7, 20]]
    greedy = {"sampling": Sampling(), "drafting": GREEDY, "max_new_tokens": 8}
    drafted = generate(verifier, loaded, prompts, shape=chain(3), **greedy)
    plain = generate(verifier, None, prompts, shape=None, **greedy)
    assert [got.tokens for got in drafted] == [got.tokens for got in plain]
    assert sum(drafted[0].drafted) > 0


def check_every_layer_learns_by_itself(drafter: TrainableDrafter, layers: list[nn.Linear]) -> None:
    """None of them is the module of another place, as the original Medusa trainer's were."""
    drafter(batch_of(drafter.verifier, texts(2, 12)), torch.full((4,), 0.05)).value.backward()
    gradients = [layer.weight.grad for layer in layers]
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    for i, gradient in enumerate(gradients):
        assert not any(torch.equal(gradient, other) for other in gradients[:i])


def check_another_shape_is_refused(
    drafter: TrainableDrafter, overrides: dict[str, int], folder: Path
) -> None:
    drafter.save(folder)
    with pytest.raises(ValueError, match="hidden size 32 and 64 tokens") as error:
        load_checkpoint(folder, tiny_verifier(**overrides), allow_verifier=True)
    assert "\n" not in str(error.value)
