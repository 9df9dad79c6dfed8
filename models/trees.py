"""Trees of drafts, under the name that users know; they live in models/proposal."""

from headstart.models.proposal.trees import (
    Dynamic,
    Shape,
    Tree,
    cartesian,
    chain,
    optimal,
    parse,
    static,
    tree_attention_mask,
)

__all__ = [
    "Dynamic",
    "Shape",
    "Tree",
    "cartesian",
    "chain",
    "optimal",
    "parse",
    "static",
    "tree_attention_mask",
]
