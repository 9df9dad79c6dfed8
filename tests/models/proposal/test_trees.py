"""Shapes: which nodes a tree has, who sees whom, and which tree is best."""

import json
from itertools import combinations, product

import pytest
import torch

from headstart.models.proposal.trees import (
    Dynamic,
    Tree,
    cartesian,
    chain,
    expected_accepted,
    optimal,
    parse,
    static,
    tree_attention_mask,
)


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), rank))
    return paths


def test_a_chain_is_a_tree_without_branches():
    tree = chain(3)
    assert tree.parents == (-1, 0, 1) and tree.ranks == (0, 0, 0)
    assert (tree.size, tree.depth, tree.branches) == (3, 3, False)


def test_a_static_tree_lies_level_by_level_siblings_by_rank():
    tree = static([(1, 0), (0, 1), (0,), (0, 0), (1,), (0, 1, 0)])
    assert paths_of(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]
    assert tree.parents == (-1, -1, 0, 0, 1, 3)
    assert (tree.size, tree.depth, tree.branches) == (6, 3, True)


def test_a_cartesian_tree_holds_every_combination():
    tree = cartesian(3, 2, 1)
    assert set(paths_of(tree)) == {
        path for n in (1, 2, 3) for path in product(*map(range, (3, 2, 1)[:n]))
    }
    assert tree.size == 3 + 6 + 6 and tree.name == "static:3x2x1"


def test_a_cut_tree_keeps_the_numbers_of_its_nodes():
    tree = cartesian(2, 2, 2)
    assert tree.cut(3) is tree and tree.cut(9) is tree
    short = tree.cut(2)
    assert short.parents == tree.parents[: short.size] and short.depth == 2 and short.size == 6


@pytest.mark.parametrize(
    "paths, missing",
    [([(0,), (1, 0)], "path [1, 0] needs [1]"), ([(0,), (2,)], "path [2] needs [1]"),
     ([(0,), (0, 1)], "path [0, 1] needs [0, 0]"), ([(-1,)], "whole numbers from 0 on, got -1"),
     ([(0.5,)], "whole numbers from 0 on, got 0.5"),
     ([], "at least one path")],
)  # fmt: skip
def test_a_tree_with_a_gap_is_refused(paths, missing):
    with pytest.raises(ValueError, match="tree:") as error:
        static(paths)
    assert missing in str(error.value)


# ---- mask --------------------------------------------------------------------------------------


def slow_mask(parents: list[int]) -> list[list[bool]]:
    mask = []
    for node in range(len(parents) + 1):
        seen = {0, node}
        while node:
            node = parents[node - 1] + 1
            seen.add(node)
        mask.append([i in seen for i in range(len(parents) + 1)])
    return mask


def random_parents(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, i, (), generator=generator)) for i in range(count)]


def test_a_mask_drawn_by_hand():
    # 0 and 1 below the root, 2 and 3 below 0, 4 below 3
    expected = ["x.....", "xx....", "x.x...", "xx.x..", "xx..x.", "xx..xx"]
    mask = tree_attention_mask([-1, -1, 0, 0, 3])
    assert ["".join(".x"[int(seen)] for seen in row) for row in mask] == expected


def test_masks_equal_a_walk_to_the_root():
    rows = [random_parents(seed, 17) for seed in range(20)]
    masks = tree_attention_mask(torch.tensor(rows))
    for parents, mask in zip(rows, masks, strict=True):
        assert mask.tolist() == slow_mask(parents)
        assert torch.equal(tree_attention_mask(parents), mask)


def test_a_mask_of_a_tree_object_and_of_nothing():
    tree = cartesian(2, 2)
    assert tree_attention_mask(tree).tolist() == slow_mask(list(tree.parents))
    assert tree_attention_mask([]).tolist() == [[True]]


@pytest.mark.parametrize("parents", [[0], [-1, 2, 0], [-2]])
def test_a_parent_after_its_child_is_refused(parents):
    with pytest.raises(ValueError, match="must come before its child"):
        tree_attention_mask(parents)


# ---- optimal -----------------------------------------------------------------------------------

ACCEPTANCE = torch.tensor([[0.6, 0.2, 0.1], [0.5, 0.25, 0.05], [0.4, 0.1, 0.1]])


def trees_of(size: int, depth: int, choices: int):
    """Every tree of `size` nodes with ranks in order."""
    every = [p for n in range(1, depth + 1) for p in product(range(choices), repeat=n)]
    for chosen in combinations(every, size):
        try:
            yield static(chosen)
        except ValueError:
            continue


def slow_expectation(tree: Tree, acceptance: torch.Tensor) -> float:
    """Enumerates which choice is right at each depth, and walks down."""
    depth, choices = acceptance.shape
    paths, total = set(paths_of(tree)), 0.0
    for right in product(range(choices + 1), repeat=depth):  # the last: none of them
        weight = 1.0
        for d, r in enumerate(right):
            weight *= float(acceptance[d, r] if r < choices else 1 - acceptance[d].sum())
        accepted = 0
        while accepted < depth and right[: accepted + 1] in paths:
            accepted += 1
        total += weight * accepted
    return total


def test_expected_accepted_equals_enumeration():
    for tree in (chain(3), cartesian(3, 2, 1), static([(0,), (1,), (2,), (1, 0), (1, 0, 0)])):
        expected = slow_expectation(tree, ACCEPTANCE)
        assert expected_accepted(tree, ACCEPTANCE) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_no_tree_of_the_same_size_expects_more_than_the_optimal_one(budget):
    best = max(expected_accepted(tree, ACCEPTANCE[:, :2]) for tree in trees_of(budget, 3, 2))
    found = optimal(budget, ACCEPTANCE[:, :2])
    assert found.size == budget
    assert expected_accepted(found, ACCEPTANCE[:, :2]) == pytest.approx(best)


def test_an_optimal_tree_beats_static_ones_of_its_size():
    for widths in ((2, 2), (3, 1, 1), (1, 1, 1), (3, 3, 3)):
        tree = cartesian(*widths)
        best = expected_accepted(optimal(tree.size, ACCEPTANCE), ACCEPTANCE)
        assert best >= expected_accepted(tree, ACCEPTANCE)


def test_an_optimal_tree_has_no_node_that_is_never_accepted():
    acceptance = torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    assert optimal(10, acceptance).size == 1
    assert optimal(3, torch.zeros(2, 2)).size == 1  # yet it proposes something


def test_noise_in_a_later_rank_makes_no_gap():
    tree = optimal(4, torch.tensor([[0.3, 0.1, 0.2], [0.0, 0.0, 0.0]]))
    assert paths_of(tree) == [(0,), (1,), (2,)]


def measured(truth: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """Shares of the ranks of `number` drafts at each depth, drawn from the true ones."""
    rest = 1 - truth.sum(1, keepdim=True)  # none of the ranks
    drawn = torch.multinomial(torch.cat([truth, rest], 1), number, True, generator=generator)
    counts = torch.stack([row.bincount(minlength=truth.shape[1] + 1) for row in drawn])
    return counts[:, :-1] / number


def test_a_tree_promises_too_much_on_what_it_was_fitted_to_and_not_on_the_rest():
    """What it promises beyond its true expectation, over 300 fits to 100 drafts a depth."""
    generator = torch.Generator().manual_seed(0)
    truth = 0.3 * 0.7 ** torch.arange(10.0).expand(6, 10) * 0.9  # [D, R]
    own, other = [], []
    for _ in range(300):
        here, elsewhere = (measured(truth, 100, generator) for _ in range(2))
        for tree, excess in ((optimal(20, here), own), (optimal(20, elsewhere), other)):
            excess.append(expected_accepted(tree, here) - expected_accepted(tree, truth))
    own_excess, other_excess = torch.tensor(own), torch.tensor(other)
    assert own_excess.mean() > max(0.03, 3 * own_excess.std() / 300**0.5)
    assert abs(other_excess.mean()) < 3 * other_excess.std() / 300**0.5


# ---- names -------------------------------------------------------------------------------------


def test_trees_are_read_from_their_names(tmp_path):
    assert parse("chain:4") == chain(4)
    assert parse("static:3x2") == cartesian(3, 2)
    assert parse("dynamic") == Dynamic() and parse("dynamic:total=9,depth=2").total == 9
    file = tmp_path / "paths.json"
    file.write_text(json.dumps([[0], [1], [0, 0]]))
    assert parse(f"static:{file}").parents == (-1, -1, 0)
    for shape in (chain(2), cartesian(2, 2), Dynamic(4, 3, 20)):
        assert parse(shape.name) == shape


def test_eagle2_is_the_published_setting_and_not_our_default():
    """Theirs: 60 nodes with the root, 7 expansions of the first level, 10 a level."""
    assert parse("eagle2") == Dynamic(depth=7 + 1, top_k=10, total=60 - 1) != parse("dynamic")
    assert parse("eagle2").name == "dynamic:depth=8,top_k=10,total=59"


@pytest.mark.parametrize("content", ['{"a": 1}', "[0, 1]", '["a"]', "null", "[[", "\udcff"])
def test_a_file_that_holds_no_paths_is_refused(content, tmp_path):
    file = tmp_path / "paths.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"list of paths of ranks|not a JSON file"):
        parse(f"static:{file}")


@pytest.mark.parametrize(
    "text, message",
    [("bush", "tree 'bush': not known"), ("chain:0", "at most 4096, got 0"),
     ("static:2x0", "widths must be 1 or more, got 2x0"), ("static:nowhere.json", "neither widths"),
     ("dynamic:depth=0", "at most 256, got 0"), ("dynamic:top_p=3", "'top_p=3'"),
     ("dynamic:depth=x", "'depth=x'"), ("static:nowhere.json", "no such file"),
     ("static:9999x9999", "the most is 4096"), ("dynamic:total=99999", "at most 4096"),
     ("chain:99999", "at most 4096")],
)  # fmt: skip
def test_a_name_that_makes_no_tree_is_refused(text, message):
    with pytest.raises(ValueError) as error:
        parse(text)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"tree {text!r}: ")


def test_a_dynamic_tree_knows_how_large_it_can_be():
    assert Dynamic(5, 10, 60).size == 60
    assert Dynamic(1, 4, 60).size == 4 and Dynamic(2, 3, 60).size == 12
