"""The rejection rule keeps the verifier's law: 200,000 draws from tables of q and p."""

import random

import numpy
import pytest
import torch

from headstart.eval.decoding import rejection
from headstart.eval.decoding.lossless import chi_square
from headstart.eval.decoding.rejection import (
    KVCache,
    spec_step,
    verify,
    verify_chain,
    verify_greedy,
)
from headstart.models.proposal.growth import grow
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import Sampling, draw
from headstart.models.proposal.trees import Dynamic, Shape, cartesian, static

DRAWS, V = 200_000, 5
GREEDY = Drafting(False, Sampling())


def tables(seed: int, sharpness: float = 1.5) -> list[torch.Tensor]:
    """Logits of a token given none, one or two before it: [V], [V, V], [V, V, V]."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(*[V] * (n + 1), generator=made) * sharpness for n in range(3)]


def laws(logits: list[torch.Tensor], sampling: Sampling) -> list[torch.Tensor]:
    return [sampling.probs(table) for table in logits]


def masked(logits: list[torch.Tensor], allowed: list[int]) -> list[torch.Tensor]:
    banned = torch.ones(V, dtype=torch.bool)
    banned[allowed] = False
    return [table.masked_fill(banned, -torch.inf) for table in logits]


def along(law: list[torch.Tensor], texts: torch.Tensor) -> torch.Tensor:
    """[n, 3, V] laws of the three tokens of `texts [n, >= 2]`, each given those before."""
    first, second = texts[:, 0], texts[:, 1]
    return torch.stack([law[0].expand(len(texts), V), law[1][first], law[2][first, second]], 1)


def table_p_value(q, p, greedy_drafts=False, vocabulary=None, seed=0) -> tuple[float, float]:
    """Decode three tokens of q with two drafts from p, DRAWS times: (p-value, accepted share)."""
    uniform = torch.rand(
        DRAWS, 8, dtype=torch.double, generator=torch.Generator().manual_seed(seed)
    )
    drafts = torch.zeros(DRAWS, 2, dtype=torch.long)
    for i in range(2):
        law = along(p, drafts)[:, i]
        drafts[:, i] = law.argmax(-1) if greedy_drafts else draw(law, uniform[:, i])
    q_laws, p_laws = along(q, drafts), along(p, drafts)[:, :2]
    if vocabulary is not None:
        p_laws = p_laws[..., vocabulary]
    accepted, token = verify_chain(
        q_laws,
        drafts,
        torch.full((DRAWS,), 2),
        uniform[:, 2:5],
        None if greedy_drafts else p_laws,
        vocabulary,
    )
    block = torch.cat([drafts, token[:, None]], 1).scatter(1, accepted[:, None], token[:, None])
    for i in (1, 2):  # what later rounds would write
        later = draw(along(q, block)[:, i], uniform[:, 5 + i])
        block[:, i] = torch.where(accepted < i, later, block[:, i])
    cells = (block * torch.tensor([V * V, V, 1])).sum(1)
    joint = q[0][:, None, None] * q[1][:, :, None] * q[2]
    outcome = chi_square(cells.bincount(minlength=V**3), joint.flatten())
    return outcome.p_value, float(accepted.double().mean() / 2)


WARM = Sampling(1.0)
TABLES = {
    "unlike": lambda: (laws(tables(1), WARM), laws(tables(2), WARM)),
    "equal": lambda: (laws(tables(1), WARM), laws(tables(1), WARM)),
    "disjoint": lambda: (
        laws(masked(tables(1), [0, 2]), WARM),
        laws(masked(tables(2), [1, 3, 4]), WARM),
    ),
    "overlapping": lambda: (
        laws(masked(tables(1), [0, 2, 3]), WARM),
        laws(masked(tables(2), [2, 3, 4]), WARM),
    ),
    "another temperature": lambda: (laws(tables(1), Sampling(0.7)), laws(tables(1), Sampling(1.6))),
    "top-k, top-p": lambda: (
        laws(tables(1), Sampling(0.9, 4, 0.85)),
        laws(tables(3), Sampling(1.2, 3)),
    ),
}


@pytest.mark.parametrize("case", TABLES)
@pytest.mark.parametrize("greedy_drafts", [False, True], ids=["sampled", "greedy"])
def test_joint_law_of_a_chain_is_the_verifiers(case, greedy_drafts):
    p_value, accepted = table_p_value(*TABLES[case](), greedy_drafts)
    assert p_value > 0.001
    if case == "equal" and not greedy_drafts:
        assert accepted == 1.0
    if case == "disjoint":
        assert accepted == 0.0


def test_joint_law_is_the_verifiers_with_a_draft_vocabulary():
    vocabulary = torch.tensor([0, 1, 4])
    p = laws(masked(tables(2), vocabulary.tolist()), WARM)
    p_value, accepted = table_p_value(laws(tables(1), WARM), p, vocabulary=vocabulary)
    assert p_value > 0.001 and accepted > 0.1


def test_acceptance_rate_is_the_overlap_of_the_laws():
    q, p = TABLES["unlike"]()
    uniform = torch.rand(DRAWS, 3, dtype=torch.double, generator=torch.Generator().manual_seed(5))
    drafts = draw(p[0].expand(DRAWS, V), uniform[:, 0])[:, None]
    q_laws = q[0].expand(DRAWS, 2, V)
    accepted, _ = verify_chain(
        q_laws, drafts, torch.ones(DRAWS).long(), uniform[:, 1:], p[0].expand(DRAWS, 1, V)
    )
    overlap = float(torch.minimum(q[0], p[0]).sum())
    assert float(accepted.double().mean()) == pytest.approx(overlap, abs=4 * (0.25 / DRAWS) ** 0.5)


def norm(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)


MUTANTS = {
    "residual soft-maxed": ("residual", lambda q, p: (q - p).clamp(min=0).softmax(-1)),
    "q in place of the residual": ("residual", lambda q, p: q),
    "residual without its clamp": ("residual", lambda q, p: norm((q - p).abs())),
    "accepts by q alone": ("accepts", lambda u, q, p: u < q),
    "accepts p/q": ("accepts", lambda u, q, p: u * q < p),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_rule_is_seen_in_200_000_draws(mutant, monkeypatch):
    monkeypatch.setattr(rejection, *MUTANTS[mutant])
    p_value, _ = table_p_value(*TABLES["unlike"]())
    assert p_value < 1e-6


def impossible_draft_is_accepted() -> bool:
    q = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    accepted, _ = verify_chain(
        q, torch.tensor([[0]]), torch.tensor([1]), torch.zeros(1, 2, dtype=torch.double)
    )
    return bool(accepted)


def test_a_token_the_verifier_cannot_write_is_rejected_at_u_zero(monkeypatch):
    assert not impossible_draft_is_accepted()
    monkeypatch.setattr(rejection, "accepts", lambda u, q, p: u * p <= q)
    assert impossible_draft_is_accepted()


def test_drafts_beyond_a_rows_length_are_not_looked_at():
    q = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]).expand(3, 3, 2)
    drafts, lengths = torch.tensor([[1, 1]] * 3), torch.tensor([0, 1, 2])
    half = torch.full((3, 3), 0.5, dtype=torch.double)
    accepted, token = verify_chain(q, drafts, lengths, half)
    assert accepted.tolist() == [0, 1, 2] and token.tolist() == [1, 1, 0]
    real = torch.arange(2) < lengths[:, None]
    proposal = Proposal(drafts, torch.tensor([[-1, 0]] * 3), real, None, None)
    path, accepted, token = verify_greedy(q.argmax(-1), proposal, 2)
    assert accepted.tolist() == [0, 1, 2] and token.tolist() == [1, 1, 0]
    assert path.tolist() == [[-1, -1], [0, -1], [0, 1]]


# ---- trees -------------------------------------------------------------------------------------


class Uniform:
    """The interface of RowRandom, without a generator a row."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, count: int) -> torch.Tensor:
        return torch.rand(DRAWS, count, dtype=torch.double, generator=self.generator)


def grown(p_logits, shape: Shape, drafting: Drafting, seed: int = 0) -> Proposal:
    """DRAWS proposals of depth at most 2 from tables of logits."""
    first = p_logits[0].expand(DRAWS, V)
    return grow(first, lambda n: p_logits[1][n.tokens], shape, drafting, Uniform(seed), None)


def with_replacement(p_logits, sampling: Sampling) -> Proposal:
    """Three children of the root, each drawn from the whole p: duplicates stay, and so does p."""
    p = sampling.probs(p_logits[0])
    tokens = draw(p.expand(DRAWS, 3, V), Uniform(7).uniform(3))
    real = torch.ones_like(tokens, dtype=torch.bool)
    return Proposal(tokens, torch.full_like(tokens, -1), real, p.log().expand(DRAWS, 3, V), None)


def mixed(p_logits, sampling: Sampling) -> Proposal:
    """Sampled and deterministic children at one node, and at both depths.

    Root: two drawn without replacement, then the likeliest of the rest. Below the first: one drawn;
    below the third: the two likeliest.
    """
    drawn = grown(p_logits, static([(0,), (1,), (0, 0)]), Drafting(True, sampling))
    used = torch.zeros(DRAWS, V).scatter_(1, drawn.tokens[:, :2], torch.inf)
    third = (p_logits[0] - used).argmax(-1, keepdim=True)
    below = p_logits[1][third[:, 0]].topk(2).indices
    certain = torch.cat([third, below], 1)
    points = torch.nn.functional.one_hot(certain, V).float().log()
    tokens = torch.cat([drawn.tokens[:, :2], third, drawn.tokens[:, 2:], below], 1)
    log_probs = drawn.log_probs
    log_probs = torch.cat([log_probs[:, :2], points[:, :1], log_probs[:, 2:], points[:, 1:]], 1)
    parents = torch.tensor([-1, -1, -1, 0, 2, 2]).expand(DRAWS, -1)
    real = torch.cat([drawn.real[:, :2], drawn.real[:, :1], drawn.real[:, 2:], drawn.real[:, :1],
                      drawn.real[:, :1]], 1)  # fmt: skip
    return Proposal(tokens, parents, real, log_probs, None)


def tree_p_values(q, proposal: Proposal, seed: int = 1) -> tuple[float, float, float]:
    """Of the first token, of three tokens jointly; and the mean number of drafts accepted."""
    tokens, parents = proposal.tokens, proposal.parents
    laws_of_nodes = []
    for node in range(tokens.shape[1]):
        above = parents[:, node]
        first = tokens.gather(1, above.clamp(min=0)[:, None])[:, 0]
        deep = q[2][first, tokens[:, node]]
        laws_of_nodes.append(torch.where((above < 0)[:, None], q[1][tokens[:, node]], deep))
    q_laws = torch.stack([q[0].expand(DRAWS, V), *laws_of_nodes], 1)
    uniform = Uniform(seed).uniform(tokens.shape[1] + 3)
    path, accepted, token = verify(q_laws, proposal, uniform[:, :-2], 2)
    block = torch.cat([tokens.gather(1, path.clamp(min=0)), token[:, None]], 1)
    block = block.scatter(1, accepted[:, None], token[:, None])
    for i in (1, 2):  # what later rounds would write
        later = draw(along(q, block)[:, i], uniform[:, -i])
        block[:, i] = torch.where(accepted < i, later, block[:, i])
    cells = (block * torch.tensor([V * V, V, 1])).sum(1)
    joint = q[0][:, None, None] * q[1][:, :, None] * q[2]
    return (
        chi_square(block[:, 0].bincount(minlength=V), q[0]).p_value,
        chi_square(cells.bincount(minlength=V**3), joint.flatten()).p_value,
        float(accepted.double().mean()),
    )


SEVEN = static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0)])
LAWS = {
    "0.7": (Sampling(0.7), Sampling(0.7)),
    "1.3": (Sampling(1.3), Sampling(1.3)),
    "top-p": (Sampling(1.0, 0, 0.9), Sampling(1.0, 0, 0.9)),
    "0.7, top-p": (Sampling(0.7, 0, 0.9), Sampling(1.3)),
    "1.3, top-p": (Sampling(1.3, 0, 0.9), Sampling(0.7, 0, 0.9)),
}
PROPOSALS = {
    "chain": lambda p, s: grown(p, static([(0,), (0, 0)]), Drafting(True, s)),
    "sampled": lambda p, s: grown(p, SEVEN, Drafting(True, s)),
    "deterministic": lambda p, s: grown(p, SEVEN, GREEDY),
    "dynamic": lambda p, s: grown(p, Dynamic(2, 3, 7), GREEDY),
    "with replacement": with_replacement,
    "mixed": mixed,
}


@pytest.mark.parametrize("kind", PROPOSALS)
@pytest.mark.parametrize("law", LAWS)
def test_joint_law_of_a_tree_is_the_verifiers(kind, law):
    sampling, drafting = LAWS[law]
    proposal = PROPOSALS[kind](tables(2, 1.0), drafting)
    first, joint, accepted = tree_p_values(laws(tables(1), sampling), proposal)
    assert first > 0.001 and joint > 0.001
    assert accepted > 0.2


def test_more_children_are_accepted_more_often():
    """A tree with the chain as its first branch is accepted further."""
    sampling = Sampling(1.0)
    q = laws(tables(1), sampling)
    chain = tree_p_values(q, PROPOSALS["chain"](tables(2, 1.0), sampling))[2]
    tree = tree_p_values(q, PROPOSALS["sampled"](tables(2, 1.0), sampling))[2]
    assert tree > 1.2 * chain


def test_a_tree_over_a_draft_vocabulary_keeps_the_law():
    ids, sampling = torch.tensor([0, 2, 3]), Sampling(1.0)
    p = tables(2, 1.0)
    proposal = grow(
        p[0][ids].expand(DRAWS, 3), lambda n: p[1][n.tokens][..., ids], cartesian(2, 2),
        Drafting(True, sampling), Uniform(3), ids,
    )  # fmt: skip
    first, joint, accepted = tree_p_values(laws(tables(1), sampling), proposal)
    assert first > 0.001 and joint > 0.001 and accepted > 0.2


def p_kept(p, s) -> Proposal:
    """Drawn without replacement, yet judged as if p were whole."""
    proposal = PROPOSALS["sampled"](p, s)
    whole = s.probs(p[0]).log().expand(DRAWS, 3, V)
    return proposal._replace(log_probs=torch.cat([whole, proposal.log_probs[:, 3:]], 1))


def sampled_rule_for_the_likeliest(p, s) -> Proposal:
    proposal = grown(p, cartesian(3), GREEDY)
    return proposal._replace(log_probs=s.probs(p[0]).log().expand(DRAWS, 3, V))


def sorted_after_drawing(p, s) -> Proposal:
    proposal = grown(p, cartesian(3), Drafting(True, s))
    order = p[0][proposal.tokens].argsort(1, descending=True)
    return proposal._replace(
        tokens=proposal.tokens.gather(1, order),
        log_probs=proposal.log_probs.gather(1, order[..., None].expand(-1, -1, V)),
    )


def duplicates_dropped(p, s) -> Proposal:
    proposal = with_replacement(p, s)
    tokens, real = proposal.tokens, proposal.real.clone()
    real[:, 1] = tokens[:, 1] != tokens[:, 0]
    real[:, 2] = (tokens[:, 2] != tokens[:, 0]) & (tokens[:, 2] != tokens[:, 1])
    return proposal._replace(real=real)


TREE_MUTANTS = {
    "p kept without replacement": p_kept,
    "sampled rule for the likeliest": sampled_rule_for_the_likeliest,
    "children sorted after drawing": sorted_after_drawing,
    "duplicates dropped while p is kept": duplicates_dropped,
}


@pytest.mark.parametrize("mutant", TREE_MUTANTS)
def test_a_proposal_with_wrong_laws_is_seen(mutant):
    sampling = Sampling(1.0)
    proposal = TREE_MUTANTS[mutant](tables(2, 1.0), sampling)
    first, joint, _ = tree_p_values(laws(tables(1), sampling), proposal)
    assert min(first, joint) < 1e-6


@pytest.mark.parametrize("kind", ["sampled", "deterministic", "mixed"])
@pytest.mark.parametrize("mutant", ["residual soft-maxed", "q in place of the residual"])
def test_a_wrong_residual_is_seen_in_a_tree(mutant, kind, monkeypatch):
    monkeypatch.setattr(rejection, *MUTANTS[mutant])
    sampling = Sampling(1.0)
    proposal = PROPOSALS[kind](tables(2, 1.0), sampling)
    first, joint, _ = tree_p_values(laws(tables(1), sampling), proposal)
    assert min(first, joint) < 1e-6


def test_a_temperature_ignored_in_q_is_seen_in_a_tree():
    proposal = PROPOSALS["sampled"](tables(2, 1.0), Sampling(1.0))
    q = laws(tables(1), Sampling(1.0))  # where 0.8 was asked for
    tokens = tree_tokens(q, proposal)
    assert (
        chi_square(tokens.bincount(minlength=V), laws(tables(1), Sampling(0.8))[0]).p_value < 1e-6
    )


def tree_tokens(q, proposal: Proposal) -> torch.Tensor:
    """The first token of each draw, of a tree whose nodes all lie at depth 1."""
    first = cartesian(3)
    tokens, parents, real = (t[:, : first.size] for t in proposal[:3])
    flat = Proposal(tokens, parents, real, proposal.log_probs[:, : first.size], None)
    q_laws = torch.cat([q[0].expand(DRAWS, 1, V), q[1][tokens]], 1)
    path, accepted, token = verify(q_laws, flat, Uniform(1).uniform(first.size + 1), 1)
    taken = tokens.gather(1, path.clamp(min=0))[:, 0]
    return torch.where(accepted > 0, taken, token)


def test_at_temperature_zero_the_path_of_argmaxes_is_kept():
    """Against a walk in plain loops, over random trees with missing and double nodes."""
    generator = torch.Generator().manual_seed(4)
    rows, count, width = 400, 9, 3
    tokens = torch.randint(width, (rows, count), generator=generator)
    parents = torch.stack([torch.randint(-1, n, (rows,), generator=generator)
                           for n in range(count)], 1)  # fmt: skip
    real = torch.rand(rows, count, generator=generator) < 0.8
    best = torch.randint(width, (rows, count + 1), generator=generator)
    path, accepted, token = verify_greedy(best, Proposal(tokens, parents, real, None, None), count)
    for row in range(rows):
        at, walked = -1, []
        while True:
            hits = [n for n in range(count) if parents[row, n] == at and real[row, n]
                    and tokens[row, n] == best[row, at + 1]]  # fmt: skip
            if not hits:
                break
            at = hits[0]
            walked.append(at)
        assert path[row].tolist() == walked + [-1] * (count - len(walked))
        assert accepted[row] == len(walked) and token[row] == best[row, at + 1]
    assert accepted.max() >= 3


# ---- one round in plain steps ------------------------------------------------------------------


def test_spec_step_keeps_the_law_and_the_books():
    """The first token of each round, from laws that depend on the text."""
    q, p = laws(tables(1), Sampling(1.0)), laws(tables(2), Sampling(1.0))
    dice = random.Random(0)
    counts, lengths = torch.zeros(V), []
    for _ in range(4000):
        kv = KVCache([4])
        emitted, passes = spec_step(
            lambda text: q[1][text[-1]], lambda text: p[1][text[-1]], 3, kv, dice
        )
        assert passes == 1 and 1 <= len(emitted) <= 4
        assert kv.tokens == [4, *emitted[:-1]]  # the last is not read yet
        counts[emitted[0]] += 1
        lengths.append(len(emitted))
    assert chi_square(counts, q[1][4]).p_value > 0.001
    assert set(lengths) == {1, 2, 3, 4}


def test_spec_step_of_equal_laws_accepts_everything():
    law = numpy.array([0.2, 0.3, 0.5])
    rng = numpy.random.default_rng(0)
    for _ in range(100):
        kv = KVCache()
        emitted, _ = spec_step(law, law, 4, kv, rng)
        assert len(emitted) == 5 and len(kv) == 4
    with pytest.raises(ValueError, match=r"N .draft length. must be 1 or more, got 0"):
        spec_step(law, law, 0, KVCache(), rng)


def test_the_books_of_a_cache():
    kv = KVCache([1, 2])
    kv.extend([3, 4])
    kv.truncate_to(3)
    assert kv.tokens == [1, 2, 3] and len(kv) == 3
    with pytest.raises(ValueError, match=r"length must be in 0 … 3, got 4"):
        kv.truncate_to(4)
