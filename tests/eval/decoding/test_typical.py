"""Typical acceptance: which drafts it keeps, and what of that is exact."""

import math

import pytest
import torch
from tiny import verifier

from headstart.eval.decoding.rejection import verify_greedy
from headstart.eval.decoding.speculate import generate
from headstart.eval.decoding.typical import Typical, verify_typical
from headstart.models.drafters.lookup import PromptLookup
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain

MEDUSA = Typical()


def chain_of(*drafts: int) -> Proposal:
    """One row."""
    tokens = torch.tensor([drafts])
    parents = torch.arange(-1, len(drafts) - 1)[None]
    return Proposal(tokens, parents, torch.ones_like(tokens, dtype=torch.bool), None, None)


def accepted(law: list[float], draft: int, settings: Typical = MEDUSA) -> bool:
    """Is `draft` kept where the verifier's law is `law`?"""
    q = torch.tensor([[law, law]], dtype=torch.double)
    return bool(verify_typical(q, chain_of(draft), torch.zeros(1, 2), 1, settings).accepted)


def test_medusas_thresholds_are_the_default():
    assert Typical(0.09, 0.3) == MEDUSA


def test_epsilon_decides_where_the_verifier_is_sure():
    """H = 1.167 nats: 0.3 exp(−H) = 0.0934, above 0.09."""
    assert accepted([0.5, 0.3, 0.11, 0.09], 2) and not accepted([0.5, 0.3, 0.11, 0.09], 3)
    assert not accepted([0.5, 0.3, 0.11, 0.09], 2, Typical(0.12, 0.9))
    assert not accepted([0.5, 0.25, 0.25], 1, Typical(0.25, 0.9))  # strictly more


def test_entropy_decides_where_it_is_not():
    """H = 2.164 nats, exp(−H) = 0.1149: 0.04 is more than 0.3 of it and less than 0.4."""
    law = [0.12] * 8 + [0.04]
    assert accepted(law, 8) and not accepted(law, 8, Typical(0.09, 0.4))
    assert not accepted([0.92, 0.04, 0.04], 1)  # the same draft where the verifier is sure


def random_trees(rows: int, count: int, width: int, distinct: bool) -> Proposal:
    """Trees with missing nodes; with `distinct`, siblings hold different tokens."""
    generator = torch.Generator().manual_seed(4)
    parents = torch.stack([torch.randint(-1, n, (rows,), generator=generator)
                           for n in range(count)], 1)  # fmt: skip
    tokens = torch.randint(width, (rows, count), generator=generator)
    real = torch.rand(rows, count, generator=generator) < 0.85
    if distinct:
        for row in range(rows):
            for n in range(count):
                before = [tokens[row, m] for m in range(n) if parents[row, m] == parents[row, n]]
                real[row, n] &= int(tokens[row, n]) not in before
    return Proposal(tokens, parents, real, None, None)


def in_plain_loops(q, proposal: Proposal, row: int, settings: Typical) -> list[int]:
    """The nodes of the longest path whose drafts are all typical, of equally long ones the
    likeliest, of equals the first."""
    best: list[int] = []
    paths = {-1: []}
    chances = {-1: 1.0}
    for node, token in enumerate(proposal.tokens[row].tolist()):
        parent = int(proposal.parents[row, node])
        if parent not in paths or not proposal.real[row, node]:
            continue
        law = q[row, parent + 1].tolist()
        entropy = -sum(p * math.log(p) for p in law if p > 0)
        if law[token] > min(settings.epsilon, settings.delta * math.exp(-entropy)):
            paths[node] = [*paths[parent], node]
            chances[node] = chances[parent] * law[token]
            ahead = chances[node] > chances[(best or [-1])[-1]] * (1 + 1e-12)
            if len(paths[node]) > len(best) or (len(paths[node]) == len(best) and ahead):
                best = paths[node]
    return best


@pytest.mark.parametrize("settings", [MEDUSA, Typical(0.3, 0.5), Typical(0.02, 0.9)])
@pytest.mark.parametrize("top_k", [0, 3], ids=["whole law", "top-k"])
def test_the_longest_typical_path_is_kept(settings, top_k):
    """Against plain loops, over random trees with missing and double nodes."""
    rows, count, width = 400, 9, 6
    proposal = random_trees(rows, count, width, distinct=False)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, count + 1, width, generator=generator) * 2
    q = Sampling(1.0, top_k).probs(logits).double()
    uniform = torch.rand(rows, count + 3, dtype=torch.double, generator=generator)
    path, number, token = verify_typical(q, proposal, uniform, count, settings)
    lengths = set()
    for row in range(rows):
        wanted = in_plain_loops(q, proposal, row, settings)
        assert path[row].tolist() == wanted + [-1] * (count - len(wanted))
        assert number[row] == len(wanted)
        left = q[row, (wanted or [-1])[-1] + 1].cumsum(0)  # the token: by the last column
        assert token[row] == int((left <= uniform[row, -1] * left[-1]).sum())
        lengths.add(len(wanted))
    assert {0, 1, 2, 3} <= lengths


def test_of_equally_long_paths_the_likeliest_wins():
    """Two drafts after the root, the second of them likelier."""
    proposal = Proposal(
        torch.tensor([[0, 1]]), torch.tensor([[-1, -1]]), torch.ones(1, 2).bool(), None, None
    )
    q = torch.tensor([0.4, 0.6]).expand(1, 3, 2)
    path, number, _ = verify_typical(q, proposal, torch.zeros(1, 3), 1, MEDUSA)
    assert path.tolist() == [[1]] and number.tolist() == [1]


def test_of_equally_long_and_likely_paths_the_earliest_wins():
    """Nodes 0 and 1 after the root, 2 after 1 and 3 after 0; all are typical."""
    tokens, parents = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[-1, -1, 1, 0]])
    proposal = Proposal(tokens, parents, torch.ones(1, 4, dtype=torch.bool), None, None)
    q = torch.full((1, 5, 2), 0.5)
    path, number, _ = verify_typical(q, proposal, torch.zeros(1, 5), 3, MEDUSA)
    assert path.tolist() == [[1, 2, -1]] and number.tolist() == [2]


def test_at_temperature_zero_it_is_exact_greedy_acceptance():
    """Sampling(0) makes q a point mass: only the argmax is typical."""
    rows, count, width = 400, 9, 3
    proposal = random_trees(rows, count, width, distinct=True)
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(rows, count + 1, width, generator=generator)
    uniform = torch.rand(rows, count + 1, dtype=torch.double, generator=generator)
    wanted = verify_greedy(logits.argmax(-1), proposal, count)
    for settings in (MEDUSA, Typical(0.999, 0.999), Typical(1e-6, 1e-6)):
        got = verify_typical(Sampling().probs(logits), proposal, uniform, count, settings)
        assert all(map(torch.equal, got, wanted))
    assert int(wanted.accepted.max()) >= 3


@pytest.mark.parametrize("settings", [MEDUSA, Typical(0.999, 0.999)])
def test_the_likeliest_token_is_always_typical(settings):
    """exp(−H) is at most the greatest probability, so δ < 1 keeps it."""
    generator = torch.Generator().manual_seed(7)
    for sharpness in (0.0, 0.1, 1.0, 5.0):
        logits = torch.randn(300, 40, generator=generator) * sharpness
        q = logits.softmax(-1)[:, None].expand(-1, 2, -1)
        best = q[:, 0].argmax(-1, keepdim=True)
        proposal = Proposal(best, torch.full_like(best, -1), best >= 0, None, None)
        assert bool(verify_typical(q, proposal, torch.zeros(300, 2), 1, settings).accepted.all())


def test_without_a_draft_the_token_is_drawn_from_the_verifiers_law():
    q = torch.tensor([[[0.25, 0.75]], [[0.25, 0.75]]])
    empty = torch.empty(2, 0, dtype=torch.long)
    nothing = Proposal(empty, empty, empty.bool(), None, None)
    uniform = torch.tensor([[0.2], [0.3]], dtype=torch.double)
    path, number, token = verify_typical(q, nothing, uniform, 0, MEDUSA)
    assert path.shape == (2, 0) and number.tolist() == [0, 0] and token.tolist() == [0, 1]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"epsilon": 0}, "typical_epsilon must be above 0 and below 1, got 0; Medusa's is 0.09"),
        ({"epsilon": math.nan}, "typical_epsilon must be above 0 and below 1, got nan"),
        ({"delta": 1.0}, "typical_delta must be above 0 and below 1, got 1.0; Medusa's is 0.3"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ValueError, match=message) as error:
        Typical(**given)
    assert "\n" not in str(error.value)


# ---- through the loop --------------------------------------------------------------------------


def decoded(sampling: Sampling, acceptance: Typical | None, prompts: list[list[int]]):
    model = verifier(num_hidden_layers=3)
    model.terminator_ids = ()
    return generate(
        model, PromptLookup(), prompts, shape=chain(4), sampling=sampling,
        drafting=Drafting(False, Sampling()), max_new_tokens=24, acceptance=acceptance,
        row_ids=[9 + len(prompt) for prompt in prompts],
    )  # fmt: skip


PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [7, 8, 7, 8, 7], [4, 4, 4]]


def test_at_temperature_zero_the_text_is_the_verifiers():
    assert decoded(Sampling(), MEDUSA, PROMPTS) == decoded(Sampling(), None, PROMPTS)


def test_a_rows_text_does_not_depend_on_its_batch():
    """Lossy, not careless."""
    batch = decoded(Sampling(1.0), MEDUSA, PROMPTS)
    for prompt, got in zip(PROMPTS, batch, strict=True):
        assert decoded(Sampling(1.0), MEDUSA, [prompt]) == [got]
