"""Shapes of a proposal, and the attention mask it is verified under.

A tree holds several guesses at once; the verifier looks at all of its nodes in one pass, each
seeing the text and its own ancestors. A chain is a tree without branches.

Legend: B rows, N nodes of a proposal, D levels, R choices at a node.
"""

import heapq
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from headstart.script import options

ROOT = -1
MOST_NODES = 4096  # beyond any use; a slip of the keyboard must not fill memory


@dataclass(frozen=True)
class Tree:
    """A fixed tree, level by level: node i is choice `ranks[i]` after node `parents[i]`.

    Choice 0 is the likeliest token, or the first drawn; -1 is the root, the pending token.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    name: str

    @property
    def size(self) -> int:
        """Drafts in a proposal, at most."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """1 for the root's children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return self.depths[-1]

    @property
    def branches(self) -> bool:
        return self.depth < self.size

    def cut(self, depth: int) -> "Tree":
        """Without the nodes deeper than `depth`; the others keep their numbers."""
        if depth >= self.depth:
            return self
        size = sum(d <= depth for d in self.depths)
        return replace(self, parents=self.parents[:size], ranks=self.ranks[:size])


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree (Li et al. 2024, arXiv 2406.16858), another one each round.

    Every level expands the `top_k` nodes of the level above with the highest cumulative draft
    probability; of all nodes seen, the `total` most probable are kept. `depth` counts levels of
    drafts, `total` drafts. The defaults are headstart's own; the published ones are `EAGLE2`.
    """

    depth: int = 5
    top_k: int = 10
    total: int = 60

    def __post_init__(self) -> None:
        for name, most in (("depth", 256), ("top_k", 256), ("total", MOST_NODES)):
            if not 1 <= getattr(self, name) <= most:
                got = getattr(self, name)
                raise ValueError(f"tree: {name} must be 1 or more, at most {most}, got {got}")

    @property
    def name(self) -> str:
        return f"dynamic:depth={self.depth},top_k={self.top_k},total={self.total}"

    @property
    def size(self) -> int:
        seen = self.top_k + (self.depth - 1) * self.top_k**2
        return min(self.total, seen)

    @property
    def branches(self) -> bool:
        return True

    def cut(self, depth: int) -> "Dynamic":
        """The same: which nodes are kept must not depend on how long other rows still are."""
        return self


EAGLE2 = Dynamic(depth=8, top_k=10, total=59)
"""The setting of EAGLE-2's authors, by the name `eagle2`. Their code says depth 7 and 60 nodes: its
depth leaves out the first level, and its nodes count the root."""

Shape = Tree | Dynamic


# ---- which tree ----------------------------------------------------------------------------------


def chain(draft_length: int) -> Tree:
    """One guess of `draft_length` tokens.

    Raises:
        ValueError: a draft length below 1, or absurdly long.
    """
    if not 1 <= draft_length <= MOST_NODES:
        raise ValueError(
            f"draft_length must be 1 or more, at most {MOST_NODES}, got {draft_length}"
        )
    return Tree(tuple(range(-1, draft_length - 1)), (0,) * draft_length, f"chain:{draft_length}")


def static(paths: Sequence[Sequence[int]], name: str = "static") -> Tree:
    """The tree of these paths of ranks, as Medusa writes them: (0,), (1,), (0, 0), …

    Raises:
        ValueError: no path, or a path whose parent or earlier sibling is missing (the rejection
            rule needs the siblings drawn before).
    """
    for path in paths:
        for rank in path:
            if type(rank) is not int or rank < 0:
                raise ValueError(f"tree: ranks are whole numbers from 0 on, got {rank!r}")
    wanted = {tuple(path) for path in paths} - {()}
    if not wanted:
        raise ValueError(
            "tree: static needs at least one path of ranks, such as [[0], [1], [0, 0]]"
        )
    ordered = sorted(wanted, key=lambda path: (len(path), path))
    numbers = {(): ROOT} | {path: i for i, path in enumerate(ordered)}
    for path in ordered:
        before = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
        if path[-1] < 0 or before not in numbers or path[:-1] not in numbers:
            raise ValueError(
                f"tree: path {list(path)} needs {list(before)} beside it; ranks count from 0, and "
                "a node's parent and earlier siblings belong to the tree"
            )
    parents = tuple(numbers[path[:-1]] for path in ordered)
    return Tree(parents, tuple(path[-1] for path in ordered), name)


def cartesian(*widths: int) -> Tree:
    """Every combination of the likeliest `widths[0]` first tokens, `widths[1]` second ones, …

    Raises:
        ValueError: no width, or one below 1.
    """
    if not widths or min(widths) < 1:
        raise ValueError(f"tree: static widths must be 1 or more, got {'x'.join(map(str, widths))}")
    size, level = 0, 1
    for width in widths:
        level *= width
        size += level
    if size > MOST_NODES:
        raise ValueError(
            f"tree: static:{'x'.join(map(str, widths))} has {size} nodes; the most is {MOST_NODES}"
        )
    paths = [
        path
        for depth in range(1, len(widths) + 1)
        for path in product(*(range(width) for width in widths[:depth]))
    ]
    return static(paths, f"static:{'x'.join(map(str, widths))}")


def optimal(budget: int, acceptance: Tensor) -> Tree:
    """The tree of `budget` nodes that expects most accepted drafts (Sequoia, Chen et al. 2024).

    A node is reached when every choice on its path is right, so a tree expects the sum over its
    nodes of the products of `acceptance` along their paths; the most valuable nodes form a tree.

    Args:
        acceptance: [D, R] probability that choice r at depth d is right, given that the drafts
            before are; falls with r.

    Raises:
        ValueError: a budget below 1.
    """
    if budget < 1:
        raise ValueError(f"tree: optimal needs a budget of 1 node or more, got {budget}")
    # noise in a measurement must not make a later choice look better than an earlier one
    values = acceptance.double().cummin(1).values.tolist()
    depths, ranks = acceptance.shape
    paths: list[tuple[int, ...]] = []
    heap = [(-values[0][0], (0,), 1.0)]
    while heap and len(paths) < budget:
        negative, path, parent = heapq.heappop(heap)
        if negative == 0:
            break  # never accepted
        paths.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < ranks:
            value = parent * values[depth - 1][rank + 1]
            heapq.heappush(heap, (-value, (*path[:-1], rank + 1), parent))
        if depth < depths:
            heapq.heappush(heap, (negative * values[depth][0], (*path, 0), -negative))
    return static(paths or [(0,)], f"optimal:{budget}")


def expected_accepted(tree: Tree, acceptance: Tensor) -> float:
    """Accepted drafts of a round of `tree`, given `acceptance [D, R]` by depth and rank."""
    values: list[float] = []
    for parent, rank, depth in zip(tree.parents, tree.ranks, tree.depths, strict=True):
        before = 1.0 if parent == ROOT else values[parent]
        values.append(before * float(acceptance[depth - 1, rank]))
    return sum(values)


OPTIMAL_BOUNDS = 8, 10
"""Deepest level and most choices at a node that an optimal tree is looked for among."""


def optimal_budget(text: str) -> int | None:
    """Nodes of `optimal:60`; None for the name of another tree.

    Raises:
        ValueError: no whole number of nodes.
    """
    kind, _, budget = text.partition(":")
    if kind != "optimal":
        return None
    if not budget.isdecimal() or not 1 <= int(budget) <= MOST_NODES:
        raise ValueError(
            f"tree {text!r}: needs a number of nodes, 1 … {MOST_NODES}, such as optimal:60"
        )
    return int(budget)


def parse(text: str) -> Shape:
    """A shape from its name: `chain:4`, `static:4x2x2`, `static:paths.json` (a list of paths of
    ranks, as Medusa's), `dynamic:depth=5,top_k=10,total=60` (these numbers are headstart's own, and
    the default), or `eagle2`, the published `dynamic:depth=8,top_k=10,total=59`.

    Raises:
        ValueError: another name, or numbers that make no tree.
    """
    try:
        return _parse(text)
    except ValueError as error:
        raise ValueError(f"tree {text!r}: {str(error).removeprefix('tree: ')}") from error


def _parse(text: str) -> Shape:
    kind, _, rest = text.partition(":")
    if kind == "chain" and rest.isdecimal():
        return chain(int(rest))
    if text == "eagle2":
        return EAGLE2
    if kind == "dynamic":
        return options(text, Dynamic)
    if kind == "static" and re.fullmatch(r"\d+(x\d+)*", rest):
        return cartesian(*map(int, rest.split("x")))
    if kind == "static" and rest:
        try:
            paths = json.loads(Path(rest).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            what = "no such file" if not Path(rest).exists() else "not a JSON file"
            raise ValueError(
                f"neither widths such as 4x2x2 nor a file with paths: {rest}: {what}"
            ) from error
        if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
            raise ValueError(
                f"{rest} must hold a list of paths of ranks, such as [[0], [1], [0, 0]]"
            )
        return static(paths, text)
    raise ValueError(
        "not known; pass dynamic:depth=5,top_k=10,total=60, eagle2, static:4x2x2, "
        "static:paths.json or optimal:60"
    )


# ---- who sees whom -------------------------------------------------------------------------------


def tree_attention_mask(tree: Tree | Sequence[int] | Tensor) -> Tensor:
    """Which nodes each node of a tree may see: itself and its ancestors, the root among them.

    Args:
        tree: a `Tree`, or parents `[N]` or `[B, N]`, -1 the root, each after its parent.

    Returns:
        bool `[N+1, N+1]` or `[B, N+1, N+1]`; index 0 is the root, node i has index i + 1.

    Raises:
        ValueError: a parent that does not come before its child.
    """
    parents = torch.as_tensor(tree.parents if isinstance(tree, Tree) else tree, dtype=torch.long)
    numbers = torch.arange(parents.shape[-1], device=parents.device)
    if bool(((parents >= numbers) | (parents < ROOT)).any()):
        raise ValueError(f"tree: a parent must come before its child, got {parents.tolist()}")
    above = torch.cat([parents.new_zeros(*parents.shape[:-1], 1), parents + 1], dim=-1)
    at = torch.arange(above.shape[-1], device=above.device).expand_as(above)
    mask = torch.zeros(*above.shape, above.shape[-1], dtype=torch.bool, device=above.device)
    while True:
        mask.scatter_(-1, at[..., None], True)
        if not bool(at.any()):
            return mask
        at = above.gather(-1, at)


def walk(
    tokens: Tensor,
    parents: Tensor,
    real: Tensor,
    wanted: Callable[[int, Tensor], Tensor],
    depth: int,
) -> tuple[Tensor, Tensor]:
    """Down from the root, as long as a child holds the wanted token; of equal ones, the first.

    Args:
        tokens, parents, real: [B, N] of the nodes; parents -1 for the root.
        wanted: (step, nodes [B] come to, -1 the root) -> tokens [B] to go on with; -1 ends a row.
        depth: D, most steps.

    Returns:
        nodes [B, D], -1 after the last; how many, [B].
    """
    at = torch.full((len(tokens),), ROOT, device=tokens.device)
    path = at[:, None].repeat(1, depth)
    count = torch.zeros_like(at)
    going = torch.ones_like(at, dtype=torch.bool)
    for i in range(depth):
        hit = (parents == at[:, None]) & (tokens == wanted(i, at)[:, None]) & real
        going = going & hit.any(1)
        at = torch.where(going, hit.int().argmax(1), at)
        path[:, i] = torch.where(going, at, ROOT)
        count += going
    return path, count
