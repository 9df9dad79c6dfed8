"""Speculative decoding, under the name that users know; it lives in eval/decoding."""

from headstart.eval.decoding.rejection import KVCache, spec_step
from headstart.eval.decoding.speculate import Generated, Timer, generate
from headstart.eval.measures.counts import Counts
from headstart.models.proposal.sampling import residual
from headstart.models.proposal.trees import tree_attention_mask

__all__ = [
    "Counts",
    "Generated",
    "KVCache",
    "Timer",
    "generate",
    "residual",
    "spec_step",
    "tree_attention_mask",
]
