"""Growing a proposal from a drafter's steps, level by level; written once for all drafters.

Legend: B rows, N nodes of a proposal, m nodes of one level, M nodes stepped before, V' draft
vocabulary.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom, draw
from headstart.models.proposal.trees import ROOT, Dynamic, Shape, Tree, tree_attention_mask


class Nodes(NamedTuple):
    """Nodes of one level, whose children are asked for."""

    tokens: Tensor  # [B, m] verifier ids
    parents: Tensor  # [B, m] their parents among the nodes stepped before; -1 the root
    depth: int  # 1 for the root's children
    seen: Tensor | None  # bool [B, m, M + m] ancestors and itself; None: all, it is a chain


Step = Callable[[Nodes], Tensor]
"""Nodes -> logits [B, m, V'] of what follows each; nodes count on from call to call."""


def grow(
    logits: Tensor,
    step: Step,
    shape: Shape,
    drafting: Drafting,
    random: RowRandom | None,
    draft_ids: Tensor | None,
) -> Proposal:
    """A proposal of this shape. The one place where draft-vocabulary ids become verifier ids.

    Args:
        logits: [B, V'] of the first draft, before warping.
        random: used when drafts are sampled.
        draft_ids: [V'] verifier id of each column; None: V' = V.

    Raises:
        ValueError: sampled drafts in a tree that is chosen by probability.
    """
    if isinstance(shape, Tree):
        return _grow_tree(logits, step, shape, drafting, random, draft_ids)
    if drafting.sampled:
        raise ValueError(
            "drafting: a dynamic tree chooses its nodes by their probability, so they cannot be "
            "sampled; use greedy drafts"
        )
    return _grow_dynamic(logits, step, shape, draft_ids)


class Level(NamedTuple):
    """What growing one level of a fixed tree needs to know."""

    numbers: list[list[int]]  # [choices][sources] the node that is choice r after source s; 0: none
    sources: list[int]  # of each node, its parent's place among the nodes stepped last
    ranks: list[int]
    inner: list[int]  # places of the nodes that have children
    parents: list[int]  # of those, their parents' numbers among all stepped nodes; -1 the root
    seen: Tensor | None  # bool [m, M + m]


@lru_cache(maxsize=64)
def _plan(tree: Tree) -> list[Level]:
    mask = tree_attention_mask(tree)[1:, 1:]
    has_children = set(tree.parents)
    stepped = {ROOT: -1}  # node -> its number among the stepped ones
    places, levels = {ROOT: 0}, []
    for depth in range(1, tree.depth + 1):
        nodes = [i for i, d in enumerate(tree.depths) if d == depth]
        inner = [i for i in nodes if i in has_children]
        sources = [places[tree.parents[i]] for i in nodes]
        ranks = [tree.ranks[i] for i in nodes]
        numbers = [[0] * len(places) for _ in range(max(ranks) + 1)]
        for node, source, rank in zip(nodes, sources, ranks, strict=True):
            numbers[rank][source] = node
        parents = [stepped[tree.parents[i]] for i in inner]
        for i in inner:
            stepped[i] = len(stepped) - 1
        known = [i for i in stepped if i != ROOT]
        levels.append(
            Level(
                numbers=numbers,
                sources=sources,
                ranks=ranks,
                inner=[nodes.index(i) for i in inner],
                parents=parents,
                seen=mask[inner][:, known] if tree.branches else None,
            )
        )
        places = {node: place for place, node in enumerate(inner)}
    return levels


def _grow_tree(
    logits: Tensor,
    step: Step,
    tree: Tree,
    drafting: Drafting,
    random: RowRandom | None,
    draft_ids: Tensor | None,
) -> Proposal:
    rows, device = len(logits), logits.device
    uniform = random.uniform(tree.size).to(device) if drafting.sampled else None
    laws = logits[:, None]  # [B, m, V'] after each node stepped last
    alive = torch.ones(rows, 1, dtype=torch.bool, device=device)
    tokens, real, log_probs = [], [], []
    for depth, level in enumerate(_plan(tree), 1):
        if uniform is None:
            columns, exists = _likeliest(laws, len(level.numbers))
        else:
            probs = drafting.sampling.probs(laws)
            columns, exists, drawn = _drawn(probs, uniform, level.numbers)
            log_probs.append(drawn[:, level.sources, level.ranks].log())
        columns = columns[:, level.sources, level.ranks]
        alive = alive[:, level.sources] & exists[:, level.sources, level.ranks]
        real.append(alive)
        tokens.append(columns if draft_ids is None else draft_ids[columns])
        if level.inner:
            seen = level.seen
            nodes = Nodes(
                tokens[-1][:, level.inner],
                torch.tensor(level.parents, device=device).expand(rows, -1),
                depth,
                None if seen is None else seen.to(device).expand(rows, -1, -1),
            )
            laws, alive = step(nodes), alive[:, level.inner]
    return Proposal(
        torch.cat(tokens, 1),
        torch.tensor(tree.parents, device=device).expand(rows, -1),
        torch.cat(real, 1),
        torch.cat(log_probs, 1) if log_probs else None,
        draft_ids if log_probs else None,
    )


def _likeliest(laws: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """The `choices` best columns `[B, m, choices]`, and whether there are so many."""
    if choices == 1:
        columns = laws.argmax(-1, keepdim=True)
        return columns, torch.ones_like(columns, dtype=torch.bool)
    columns = laws.topk(min(choices, laws.shape[-1]), dim=-1).indices
    missing = choices - columns.shape[-1]
    exists = torch.ones_like(columns, dtype=torch.bool)
    return pad(columns, (0, missing)), pad(exists, (0, missing))


def _drawn(
    probs: Tensor, uniform: Tensor, numbers: list[list[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws without replacement, in the order drawn.

    Args:
        probs: [B, m, V'].
        uniform: [B, N]; choice r after source s takes column `numbers[r][s]`.

    Returns:
        columns, and whether p's support reached so far, [B, m, choices]; the law that each was
        drawn from given its earlier siblings, [B, m, choices, V'].
    """
    columns, exists, laws = [], [], []
    for of_rank in numbers:
        column = draw(probs, uniform[:, of_rank])
        columns.append(column)
        exists.append(probs.gather(-1, column[..., None])[..., 0] > 0)
        laws.append(probs)
        probs = probs.scatter(-1, column[..., None], 0.0)
        probs = probs / probs.sum(-1, keepdim=True).clamp(min=1e-45)
    return torch.stack(columns, 2), torch.stack(exists, 2), torch.stack(laws, 2)


def _grow_dynamic(logits: Tensor, step: Step, shape: Dynamic, draft_ids: Tensor | None) -> Proposal:
    rows, device = len(logits), logits.device
    children = min(shape.top_k, logits.shape[-1])

    def ids(columns: Tensor) -> Tensor:
        return columns if draft_ids is None else draft_ids[columns]

    values, columns = logits.float().log_softmax(-1).topk(children)  # [B, m] of the current level
    tokens = ids(columns)
    numbers = torch.arange(children, device=device).expand(rows, -1)  # in the pool of all nodes
    parents = torch.full_like(numbers, ROOT)  # among the stepped nodes
    seen = torch.eye(children, dtype=torch.bool, device=device).expand(rows, -1, -1)
    pool = [(values, tokens, torch.full_like(numbers, ROOT))]
    in_pool, stepped = children, 0
    for depth in range(1, shape.depth):
        laws = step(Nodes(tokens, parents, depth, seen)).float().log_softmax(-1)
        more, columns = laws.topk(children)  # [B, m, children]
        more = (values[..., None] + more).flatten(1)
        below = ids(columns).flatten(1)
        pool.append((more, below, numbers.repeat_interleave(children, 1)))
        values, best = more.topk(min(shape.top_k, more.shape[1]))
        source = best // children
        tokens, numbers, parents = below.gather(1, best), in_pool + best, stepped + source
        in_pool, stepped = in_pool + more.shape[1], stepped + columns.shape[1]
        above = seen.gather(1, source[..., None].expand(-1, -1, seen.shape[-1]))
        own = torch.eye(best.shape[1], dtype=torch.bool, device=device).expand(rows, -1, -1)
        seen = torch.cat([above, own], 2)
    values, tokens, above = (torch.cat(parts, 1) for parts in zip(*pool, strict=True))
    # ties go to the node seen first, hence to parents before children
    order = torch.sort(values, dim=1, descending=True, stable=True).indices
    kept = order[:, : shape.total].sort(1).values
    place = torch.zeros_like(above).scatter(
        1, kept, torch.arange(kept.shape[1], device=device).expand(rows, -1)
    )
    above = above.gather(1, kept)
    parents = torch.where(above == ROOT, ROOT, place.gather(1, above.clamp(min=0)))
    real = torch.ones_like(kept, dtype=torch.bool)
    return Proposal(tokens.gather(1, kept), parents, real, None, None)
