"""Losses against plain loops in float64: values, gradients, metrics, extreme laws."""

import math
from collections.abc import Iterator

import pytest
import torch
from tiny import verifier
from torch import Tensor, nn

from headstart.models.batch import Batch, Loss
from headstart.models.drafter import TrainableDrafter
from headstart.models.losses import LossConfig, Teacher, row_losses

KINDS = ["ce", "hard_ce", "reverse_kl", "jsd", "lk", "lk_hybrid"]
STEPS, WIDTH = 3, 6
VERIFIER = verifier(num_hidden_layers=2)
DRAFT_IDS = torch.tensor([0, 1, 2, 5, 7, 8, 13, 21, 22, 30, 31, 40, 41, 55, 63])


class StandIn(TrainableDrafter):
    """The least that can be trained: the feature, turned once more at every step."""

    def __init__(self, loss: LossConfig, draft_ids: Tensor | None, one_head: bool = True):
        super().__init__(VERIFIER, loss)
        self.one_head = one_head
        self.feature_layers = ()
        torch.manual_seed(3)
        self.turn = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 64 if draft_ids is None else len(draft_ids), bias=False)
        nn.init.normal_(self.head.weight, std=2.0)
        self.draft_ids = draft_ids

    def unroll(self, batch: Batch, num_steps: int) -> Iterator[Tensor]:
        hidden = batch["features"]
        for _ in range(num_steps):
            hidden = self.turn(hidden).tanh()
            yield hidden

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.head(hidden) * self.sharpness(step)

    def sharpness(self, step: int) -> float:
        return 1.0 if self.one_head else 1.5 - 0.4 * step

    def start(self, *_): ...
    def advance(self, *_): ...
    def propose(self, *_): ...
    def select_rows(self, *_): ...


def batch(supervised: bool = True) -> Batch:
    """Two rows: two turns and padding; three packed documents, the second begins with an answer."""
    torch.manual_seed(0)
    turns = [
        [0, 0, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2, 2, 0, 0, 0],
        [0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1],
    ]
    documents = [[0] * 13 + [-1] * 3, [0] * 4 + [1] * 5 + [2] * 7]
    position_ids = [[*range(13), 0, 0, 0], [*range(4), *range(5), *range(7)]]
    ids = torch.randint(0, 64, (2, 16))
    ids[:, ::2] = DRAFT_IDS[torch.randint(0, len(DRAFT_IDS), (2, 8))]  # in and out of vocabulary
    return Batch(
        input_ids=ids,
        loss_mask=torch.tensor(turns) * int(supervised),
        position_ids=torch.tensor(position_ids),
        document_ids=torch.tensor(documents),
        features=torch.randn(2, 16, WIDTH),
        last_hidden=torch.randn(2, 16, VERIFIER.hidden_size) * 0.4,
    )


def supervised_slots(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, t, s): x_{t+1} … x_{t+2+s} are of one turn, x_t of the same document."""
    slots = []
    for row in range(2):
        turns, documents = batch["loss_mask"][row].tolist(), batch["document_ids"][row].tolist()
        for s in range(STEPS):
            for t in range(len(turns)):
                span = range(t + 1, t + 3 + s)
                if span[-1] >= len(turns):
                    continue
                keys = {(turns[i], documents[i]) for i in span}
                if len(keys) == 1 and turns[t + 1] > 0 and documents[t] == documents[t + 1]:
                    slots.append((row, t, s))
    return slots


def reference(drafter: StandIn, batch: Batch, weights: Tensor) -> dict[str, Tensor]:
    """Loss, gradients and metric sums, slot by slot, in float64."""
    turn = drafter.turn.weight.detach().double().requires_grad_()
    head = drafter.head.weight.detach().double().requires_grad_()
    hidden, steps = batch["features"].double(), []
    for _ in range(STEPS):
        hidden = (hidden @ turn.T).tanh()
        steps.append(hidden)
    ids = list(range(64)) if drafter.draft_ids is None else drafter.draft_ids.tolist()
    total = torch.zeros((), dtype=torch.double)
    sums = torch.zeros(STEPS, 4, dtype=torch.double)  # loss, accurate, outside, count
    for row, t, s in supervised_slots(batch):
        target = int(batch["input_ids"][row, t + 2 + s])
        q_logits = VERIFIER.logits(batch["last_hidden"][row, t + 1 + s]).detach().double()
        q = q_logits.exp() / q_logits.exp().sum()
        p_logits = steps[s][row, t] @ head.T * drafter.sharpness(s)
        p = p_logits.exp() / p_logits.exp().sum()
        overlap = sum(torch.minimum(q[v], p[i]) for i, v in enumerate(ids))
        inside = sum(q[v] for v in ids)
        cross_entropy = -sum(q[v] / inside * p[i].log() for i, v in enumerate(ids))
        kl = cross_entropy + sum(q[v] / inside * (q[v] / inside).log() for v in ids)
        if drafter.loss.kind == "ce":
            loss = cross_entropy
        elif drafter.loss.kind == "hard_ce":
            loss = -p[ids.index(target)].log() if target in ids else torch.zeros(()).double()
        elif drafter.loss.kind == "lk":
            loss = -overlap.log()
        elif drafter.loss.kind == "reverse_kl":
            loss = sum(p[i] * (p[i] / (q[v] / inside)).log() for i, v in enumerate(ids))
        elif drafter.loss.kind == "jsd":
            loss, beta = torch.zeros(()).double(), drafter.loss.beta
            for i, v in enumerate(ids):
                mixed = beta * q[v] / inside + (1 - beta) * p[i]
                loss = loss + beta * q[v] / inside * (q[v] / inside / mixed).log()
                loss = loss + (1 - beta) * p[i] * (p[i] / mixed).log()
        else:
            weight = math.exp(-3.0 * overlap.item())
            loss = weight * kl + (1 - weight) * (1 - overlap)
        total = total + float(weights[s]) * loss
        accurate = ids[int(p.argmax())] == target
        row_sums = [loss.item(), float(accurate), float(target not in ids), 1.0]
        sums[s] += torch.tensor(row_sums, dtype=torch.double)
    total.backward()
    return {"value": total.detach(), "sums": sums, "turn": turn.grad, "head": head.grad}


def run(drafter: StandIn, given: Batch, weights: Tensor) -> Loss:
    drafter.zero_grad()
    loss = drafter(given, weights)
    loss.value.backward()
    return loss


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


WEIGHTS = torch.tensor([0.05, 0.03, 0.02])


@pytest.mark.parametrize("one_head", [True, False], ids=["one head", "a head a step"])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["whole", "draft vocabulary"])
@pytest.mark.parametrize("kind", KINDS)
def test_value_gradient_and_metrics_equal_plain_loops(kind, draft_ids, one_head):
    given = batch()
    drafter = StandIn(LossConfig(kind, beta=0.3), draft_ids, one_head)
    expected = reference(drafter, given, WEIGHTS)
    loss = run(drafter, given, WEIGHTS)
    close(loss.value, expected["value"])
    close(drafter.turn.weight.grad, expected["turn"])
    close(drafter.head.weight.grad, expected["head"])
    names = ("loss", "accuracy", "outside_vocabulary")
    for s in range(STEPS):
        for column, name in enumerate(names):
            total, count = loss.metrics[f"{name}/{s}"]
            close(total, expected["sums"][s, column], 1e-4)
            assert count == expected["sums"][s, 3]
    assert expected["sums"][:, 3].sum() > 0 or draft_ids is None
    assert drafter.head.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize("chunk_positions", [1, 3, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_equals_unchunked(kind, chunk_positions):
    given = batch()
    whole = StandIn(LossConfig(kind), DRAFT_IDS)
    parts = StandIn(LossConfig(kind, chunk_positions=chunk_positions), DRAFT_IDS)
    one, other = run(whole, given, WEIGHTS), run(parts, given, WEIGHTS)
    close(other.value, one.value, 1e-6)
    for name in one.metrics:
        close(other.metrics[name][0], one.metrics[name][0])
        assert other.metrics[name][1] == one.metrics[name][1]
    for left, right in zip(parts.parameters(), whole.parameters(), strict=True):
        close(left.grad, right.grad, 1e-6)


def test_no_more_logits_than_one_chunks_are_made(monkeypatch):
    sizes = []
    logits = VERIFIER.logits
    monkeypatch.setattr("headstart.models.losses._ROWS", 1)
    monkeypatch.setattr(
        VERIFIER, "logits", lambda h, ids: (sizes.append(len(h)), logits(h, ids))[1]
    )
    run(StandIn(LossConfig(chunk_positions=4), None), batch(), WEIGHTS)
    assert max(sizes) == 4 < sum(sizes)


def far_apart() -> tuple[Tensor, Tensor]:
    """Logits whose best tokens have log-probabilities near −200 under the other law."""
    q, p = torch.zeros(1, 8), torch.zeros(1, 8)
    q[0, 0], p[0, 1] = 200.0, 200.0
    p[0, 2:] = torch.linspace(-1, 1, 6)  # no ties: there a minimum has no one gradient
    return q, p


def test_lk_is_finite_where_naive_arithmetic_is_not():
    q, p = far_apart()
    p.requires_grad_()
    naive = -torch.minimum(q.softmax(-1), p.softmax(-1)).sum(-1).log()
    assert naive.isinf()
    (naive_gradient,) = torch.autograd.grad(naive.sum(), p)
    assert not naive_gradient.isfinite().all()
    teacher = Teacher(q.log_softmax(-1))
    loss, gradient = row_losses(LossConfig("lk"), teacher, p, torch.tensor([0]))
    p64 = p.detach().double().requires_grad_()
    overlap = torch.minimum(q.double().softmax(-1), p64.softmax(-1)).sum(-1)
    (exact,) = torch.autograd.grad(-overlap.log().sum(), p64)
    close(loss, -overlap.log())
    close(gradient, exact)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_finite_on_laws_that_hardly_overlap(kind):
    q, p = far_apart()
    for tensor in row_losses(LossConfig(kind), Teacher(q.log_softmax(-1)), p, torch.tensor([0])):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_verifier_sure_of_a_token_outside_of_the_vocabulary_gives_no_nan(kind):
    """What V' holds of q is then zero in float32, and cannot be divided by."""
    given = batch()
    assert 3 not in DRAFT_IDS
    given["last_hidden"] = 200 * VERIFIER.head.weight[3] * torch.ones(2, 16, 1)
    drafter = StandIn(LossConfig(kind), DRAFT_IDS)
    loss = run(drafter, given, WEIGHTS)
    assert loss.value.isfinite()
    assert all(weight.grad.isfinite().all() for weight in drafter.parameters())


def test_forward_kl_has_the_gradient_of_ce():
    """So `ce` need not subtract the teacher's entropy."""
    q, p = torch.randn(5, 64), torch.randn(5, len(DRAFT_IDS), requires_grad=True)
    teacher = Teacher(q.log_softmax(-1)[:, DRAFT_IDS])
    loss, gradient = row_losses(LossConfig("ce"), teacher, p, torch.zeros(5).long())
    q_tilde = q[:, DRAFT_IDS].softmax(-1)
    kl = (q_tilde * (q_tilde.log() - p.log_softmax(-1))).sum(-1)
    close(gradient, torch.autograd.grad(kl.sum(), p)[0], 1e-6)
    assert (kl < loss).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_teacher_gets_no_gradient(kind):
    given = batch()
    given["last_hidden"].requires_grad_()
    run(StandIn(LossConfig(kind), DRAFT_IDS), given, WEIGHTS)
    assert given["last_hidden"].grad is None
    assert all(weight.grad is None for weight in VERIFIER.model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_no_supervised_slot_gives_zero_and_no_nan(kind):
    drafter = StandIn(LossConfig(kind), DRAFT_IDS)
    loss = run(drafter, batch(supervised=False), WEIGHTS)
    assert loss.value == 0
    assert all(total == 0 and count == 0 for total, count in loss.metrics.values())
    for weight in drafter.parameters():  # data parallelism waits for a gradient of every weight
        assert weight.grad is not None and (weight.grad == 0).all()


def test_weights_scale_a_sum():
    given = batch()
    drafter = StandIn(LossConfig("ce"), None)
    value = run(drafter, given, WEIGHTS).value
    close(run(drafter, given, 4 * WEIGHTS).value, 4 * value)
    by_step = [run(drafter, given, WEIGHTS * torch.eye(STEPS)[s]).value for s in range(STEPS)]
    close(sum(by_step), value)
    rows = [Batch(**{k: v[i : i + 1] for k, v in given.items()}) for i in range(2)]
    close(sum(run(drafter, row, WEIGHTS).value for row in rows), value)


def test_outside_of_the_vocabulary_is_a_rejection():
    """The drafter's best draft is the first column everywhere; a token outside V' has no column."""
    given = batch()
    drafter = StandIn(LossConfig("ce"), DRAFT_IDS)
    drafter.logits = lambda hidden, step: drafter.head(hidden) * 0
    with torch.no_grad():
        loss = drafter(given, WEIGHTS)
    slots = supervised_slots(given)
    for s in range(STEPS):
        targets = [given["input_ids"][b, t + 2 + s] for b, t, step in slots if step == s]
        outside = sum(target not in DRAFT_IDS for target in targets)
        first = sum(bool(target == DRAFT_IDS[0]) for target in targets)
        assert loss.metrics[f"outside_vocabulary/{s}"][0] == outside > 0
        assert loss.metrics[f"accuracy/{s}"] == (first, len(targets))


def test_step_weights_sum_to_one_and_fall_by_gamma():
    weights = LossConfig(num_steps=4, gamma=0.5).step_weights()
    close(weights, torch.tensor([8, 4, 2, 1]) / 15)


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_steps", 0),
        ("num_steps", 10**9),
        ("gamma", 0.0),
        ("gamma", 1.5),
        ("chunk_positions", 0),
        ("beta", 1.0),
    ],
)
def test_settings_without_meaning_are_refused(field, value):
    with pytest.raises(ValueError, match=f"loss.{field} must be .* got {value}"):
        LossConfig(**{field: value})
