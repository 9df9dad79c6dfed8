"""Growing proposals: what is asked of the drafter, what is drawn, from which law, in whose ids."""

import pytest
import torch
from torch import Tensor

from headstart.models.proposal.growth import Nodes, grow
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom, Sampling, draw
from headstart.models.proposal.trees import Dynamic, cartesian, chain, static, tree_attention_mask

IDS = torch.tensor([1, 4, 5, 9])
GREEDY = Drafting(False, Sampling())
# a law for each pair of tokens before: a wrong parent shows
TABLE = torch.randn(10, 10, 4, generator=torch.Generator().manual_seed(0)) * 2


class Steps:
    """A drafter of trigrams, which keeps what it was asked and checks what nodes may see."""

    def __init__(self, roots: list[int]):
        self.roots = torch.tensor(roots)
        self.tokens = torch.zeros(len(roots), 0, dtype=torch.long)
        self.parents = torch.zeros(len(roots), 0, dtype=torch.long)
        self.asked: list[Nodes] = []

    @property
    def first(self) -> Tensor:
        return TABLE[0, self.roots]

    def __call__(self, nodes: Nodes) -> Tensor:
        self.asked.append(nodes)
        self.tokens = torch.cat([self.tokens, nodes.tokens], 1)
        self.parents = torch.cat([self.parents, nodes.parents], 1)
        seen = tree_attention_mask(self.parents)[:, -nodes.tokens.shape[1] :, 1:]
        depths = seen.sum(-1)
        assert bool((depths == nodes.depth).all())
        if nodes.seen is None:
            assert bool(seen.all())
        else:
            assert torch.equal(nodes.seen, seen)
        above = torch.where(
            nodes.parents < 0,
            self.roots[:, None],
            self.tokens.gather(1, nodes.parents.clamp(min=0)),
        )
        return TABLE[above, nodes.tokens]


def law_of(root: int, path: list[int]) -> Tensor:
    """Logits after a path of verifier ids from the root."""
    text = [0, root, *path]
    return TABLE[text[-2], text[-1]]


def path_of(proposal: Proposal, row: int, node: int) -> list[int]:
    """The verifier ids from the root's child down to `node`; of -1: none."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, int(proposal.tokens[row, node]))
        node = int(proposal.parents[row, node])
    return path


# ---- fixed trees -------------------------------------------------------------------------------


def test_a_greedy_chain_follows_the_best_column_in_verifier_ids():
    steps = Steps([2, 7])
    proposal = grow(steps.first, steps, chain(3), GREEDY, None, IDS)
    for row, root in enumerate([2, 7]):
        path: list[int] = []
        for _ in range(3):
            path.append(int(IDS[law_of(root, path).argmax()]))
        assert proposal.tokens[row].tolist() == path
    assert len(steps.asked) == 2  # the last draft needs no step
    assert proposal.parents.tolist() == [[-1, 0, 1]] * 2 and bool(proposal.real.all())
    assert proposal.log_probs is None and proposal.vocabulary is None


TREES = {
    "chain": chain(3),
    "cartesian": cartesian(3, 2, 1),
    "ragged": static([(0,), (1,), (2,), (1, 0), (1, 1), (0, 0), (1, 0, 0), (1, 0, 1), (1, 0, 2)]),
}


@pytest.mark.parametrize("name", TREES)
def test_a_greedy_tree_holds_the_likeliest_children_of_each_node(name):
    tree, steps = TREES[name], Steps([2, 7, 3])
    proposal = grow(steps.first, steps, tree, GREEDY, None, IDS)
    assert proposal.parents.tolist() == [list(tree.parents)] * 3
    for row, root in enumerate([2, 7, 3]):
        for node in range(tree.size):
            law = law_of(root, path_of(proposal, row, tree.parents[node]))
            assert proposal.tokens[row, node] == IDS[law.argsort(descending=True)[tree.ranks[node]]]
    inner = set(tree.parents) - {-1}
    assert steps.tokens.shape[1] == len(inner)  # leaves need no step


@pytest.mark.parametrize("name", TREES)
def test_sampled_children_carry_the_law_they_were_drawn_from(name):
    """Without replacement: p of a later child lacks the siblings drawn before it."""
    tree, sampling, rows = TREES[name], Sampling(0.8), [2, 7, 3]
    steps, numbers = Steps(rows), [5, 6, 7]
    random = RowRandom(5, numbers)
    proposal = grow(steps.first, steps, tree, Drafting(True, sampling), random, IDS)
    uniform = RowRandom(5, numbers).uniform(tree.size)
    for row, root in enumerate(rows):
        for node in range(tree.size):
            parent = tree.parents[node]
            law = sampling.probs(law_of(root, path_of(proposal, row, parent)))
            for other in range(node):
                if tree.parents[other] == parent:
                    law[IDS.tolist().index(int(proposal.tokens[row, other]))] = 0
            law = law / law.sum()
            torch.testing.assert_close(proposal.log_probs[row, node].exp(), law)
            assert proposal.tokens[row, node] == IDS[draw(law, uniform[row, node])]
    assert bool(proposal.real.all()) and torch.equal(proposal.vocabulary, IDS)


def test_children_end_where_the_laws_support_does():
    """Top-k 2 has two children, whatever the tree asks for; nor have their children any."""
    tree, steps = cartesian(4, 3, 1), Steps([2])
    drafting = Drafting(True, Sampling(1.0, top_k=2))
    proposal = grow(steps.first, steps, tree, drafting, RowRandom(0, [0]), IDS)
    for node in range(tree.size):
        parent, rank = tree.parents[node], tree.ranks[node]
        expected = rank < 2 and (parent < 0 or bool(proposal.real[0, parent]))
        assert bool(proposal.real[0, node]) == expected
    assert len(set(proposal.tokens[0, :2].tolist())) == 2
    greedy = grow(steps.first, Steps([2]), cartesian(6), GREEDY, None, IDS)
    assert greedy.real.tolist() == [[True] * 4 + [False] * 2]  # a vocabulary of four


def test_sampled_drafts_have_their_law():
    count = 20_000
    random = RowRandom(1, list(range(count)))
    logits = TABLE[0, 2].expand(count, 4)
    proposal = grow(logits, Steps([2]), cartesian(2), Drafting(True, Sampling(1.0)), random, IDS)
    law = TABLE[0, 2].softmax(-1)
    shares = proposal.tokens[:, 0].bincount(minlength=10)[IDS] / count
    torch.testing.assert_close(shares, law, atol=0.015, rtol=0)
    # the second of two: Σ_a p(a) · p(b) / (1 − p(a))
    second = torch.stack([sum(law[a] * law[b] / (1 - law[a]) for a in range(4) if a != b)
                          for b in range(4)])  # fmt: skip
    shares = proposal.tokens[:, 1].bincount(minlength=10)[IDS] / count
    torch.testing.assert_close(shares, second, atol=0.015, rtol=0)


def test_a_cut_tree_draws_what_the_whole_one_does():
    drafting = Drafting(True, Sampling(1.0))
    tree = cartesian(2, 2, 2)
    whole, short = (
        grow(TABLE[0, [2]], Steps([2]), t, drafting, RowRandom(3, [9]), IDS)
        for t in (tree, tree.cut(2))
    )
    assert torch.equal(whole.tokens[:, :6], short.tokens)


def test_without_a_draft_vocabulary_columns_are_verifier_ids():
    table = torch.eye(4).roll(1, 1)  # 0 -> 1 -> 2 -> 3
    proposal = grow(table[[0, 2]], lambda n: table[n.tokens], chain(2), GREEDY, None, None)
    assert proposal.tokens.tolist() == [[1, 2], [3, 0]]


# ---- EAGLE-2's tree ----------------------------------------------------------------------------


def slow_dynamic(root: int, shape: Dynamic) -> set[tuple[int, ...]]:
    """Paths of the tree, by sorting plain lists."""
    pool: list[tuple[float, tuple[int, ...]]] = []
    layer = [(0.0, ())]
    for _ in range(shape.depth):
        grown = []
        for value, path in layer:
            law = law_of(root, list(path)).log_softmax(-1)
            for column in law.argsort(descending=True)[: shape.top_k].tolist():
                grown.append((value + float(law[column]), (*path, int(IDS[column]))))
        pool += grown
        layer = sorted(grown, reverse=True)[: shape.top_k]
    return {path for _, path in sorted(pool, key=lambda item: -item[0])[: shape.total]}


@pytest.mark.parametrize("shape", [Dynamic(4, 3, 12), Dynamic(1, 2, 5), Dynamic(3, 9, 40),
                                   Dynamic(5, 1, 60), Dynamic(3, 2, 1)])  # fmt: skip
def test_a_dynamic_tree_holds_the_most_probable_nodes(shape):
    roots = [2, 7, 3]
    steps = Steps(roots)
    proposal = grow(steps.first, steps, shape, GREEDY, None, IDS)
    tree_attention_mask(proposal.parents)  # refuses a child before its parent
    for row, root in enumerate(roots):
        paths = [tuple(path_of(proposal, row, n)) for n in range(proposal.tokens.shape[1])]
        assert set(paths) == slow_dynamic(root, shape) and len(set(paths)) == len(paths)
    assert proposal.log_probs is None and bool(proposal.real.all())
    assert len(steps.asked) == shape.depth - 1


def test_equal_values_keep_parents_before_children():
    """A certain child has its parent's value: the parent must stay."""
    certain = torch.full((10, 4), -1e9)
    certain[:, 1] = 0.0
    shape = Dynamic(4, 2, 3)
    proposal = grow(certain[[0]], lambda n: certain[n.tokens], shape, GREEDY, None, IDS)
    assert proposal.tokens.tolist() == [[4, 4, 4]] and proposal.parents.tolist() == [[-1, 0, 1]]


def test_a_rows_dynamic_tree_does_not_depend_on_its_batch():
    shape = Dynamic(4, 3, 10)
    together = grow(TABLE[0, [2, 7]], Steps([2, 7]), shape, GREEDY, None, IDS)
    alone = grow(TABLE[0, [7]], Steps([7]), shape, GREEDY, None, IDS)
    assert torch.equal(together.tokens[1:], alone.tokens)
    assert torch.equal(together.parents[1:], alone.parents)


def test_a_dynamic_tree_of_sampled_drafts_is_refused():
    with pytest.raises(ValueError, match="use greedy drafts"):
        grow(TABLE[0, [2]], Steps([2]), Dynamic(), Drafting(True, Sampling(1.0)), None, IDS)
