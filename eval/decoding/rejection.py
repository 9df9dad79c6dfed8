"""The rejection rule: which drafts are kept, so that the output is exactly the verifier's.

Names: q is the verifier's law, p the drafter's (Leviathan et al. write them the other way round).
Legend: B rows, N nodes of a round's proposal, D its depth, V verifier's vocabulary, V' the
drafter's.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.models import vocab
from headstart.models.proposal.proposal import Proposal
from headstart.models.proposal.sampling import draw, residual
from headstart.models.proposal.trees import ROOT, walk


class Verdict(NamedTuple):
    """What one pass of the verifier says about a proposal."""

    path: Tensor  # [B, D] the nodes that are kept, from the root down; -1 after the last
    accepted: Tensor  # [B] how many
    token: Tensor  # [B] the verifier's token after them


def accepts(uniform: Tensor, q: Tensor, p: Tensor | float) -> Tensor:
    """u < min(1, q/p) for a draft of probability q to the verifier and p to the drafter.

    Strict, so that a token the verifier cannot emit is rejected even at u = 0.
    """
    return uniform * p < q


def verify(
    q: Tensor,
    proposal: Proposal,
    uniform: Tensor,
    depth: int,
) -> Verdict:
    """The rejection rule on a tree, vectorised over rows; on a chain, Leviathan et al. 2023.

    From the root down, a node's children are tried in order, each against what the law still
    holds: child c drawn from p is accepted with min(1, q(c)/p(c)); else q becomes (q − p)₊,
    normalised (recursive rejection: Miao et al. 2024, Jeon et al. 2024, arXiv 2402.14160). A point
    mass is its own p, so rejecting it takes c out of q. The token after the path is drawn from
    what is left where a node's children have failed, from q where it has none.

    Args:
        q: [B, N+1, V] the verifier's laws, warped: of the root, then of each node.
        uniform: [B, N+1] or wider, in [0, 1): column n decides node n, the last draws the token.
        depth: D, the longest path that the proposal may have.
    """
    rows, count = proposal.tokens.shape
    device, width = q.device, q.shape[-1]
    at = torch.full((rows,), ROOT, device=device)
    path = torch.full((rows, depth), ROOT, device=device)
    accepted = torch.zeros(rows, dtype=torch.long, device=device)
    law = q[:, 0].clone()  # what is left of it at the node each row has come to
    for node in range(count):
        trying = (proposal.parents[:, node] == at) & proposal.real[:, node]
        row = trying.nonzero()[:, 0]
        if not len(row):
            continue
        token = proposal.tokens[row, node]
        left = law[row]
        p_token: Tensor | float = 1.0
        if proposal.log_probs is not None:
            p = proposal.log_probs[row, node].exp()
            column = vocab.columns(token, proposal.vocabulary)
            p_token = p.gather(1, column[:, None])[:, 0]
        q_token = left.gather(1, token[:, None])[:, 0]
        passed = accepts(uniform[row, node], q_token, p_token)
        won, lost = row[passed], row[~passed]
        path[won, accepted[won]] = node
        accepted[won] += 1
        at[won] = node
        law[won] = q[won, node + 1]
        if len(lost):
            drafted = torch.zeros(len(lost), width, dtype=law.dtype, device=device)
            if proposal.log_probs is None:
                drafted.scatter_(1, token[~passed][:, None], 1.0)
            elif proposal.vocabulary is None:
                drafted = p[~passed]
            else:
                drafted.index_copy_(1, proposal.vocabulary, p[~passed].to(law.dtype))
            law[lost] = residual(left[~passed], drafted)
    return Verdict(path, accepted, draw(law, uniform[:, -1]))


def verify_greedy(best: Tensor, proposal: Proposal, depth: int) -> Verdict:
    """The same rule at temperature 0, for any drafts: accepted while they are the argmax.

    Args:
        best: [B, N+1] argmax of the verifier's logits, of the root, then of each node.
        depth: D, the longest path that the proposal may have.
    """

    def after(_: int, at: Tensor) -> Tensor:
        return best.gather(1, at[:, None] + 1)[:, 0]

    nodes = (proposal.tokens, proposal.parents, proposal.real)
    path, accepted = walk(*nodes, after, depth)
    return Verdict(path, accepted, after(depth, last_node(path, accepted)))


def last_node(path: Tensor, accepted: Tensor) -> Tensor:
    """The node that each row's path ends at, -1 the root: [B, D], [B] -> [B]."""
    root = torch.full_like(accepted[:, None], ROOT)
    return torch.cat([root, path], 1).gather(1, accepted[:, None])[:, 0]


def verify_chain(
    q: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    uniform: Tensor,
    p: Tensor | None = None,
    vocabulary: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`verify` of chains: how many drafts are kept `[B]`, and the verifier's token after them.

    Args:
        q: [B, N+1, V] the verifier's laws, warped: column i after i drafts.
        drafts: [B, N] verifier ids.
        lengths: [B] how many of the N are real.
        uniform: [B, N+1] or wider, in [0, 1): the first N decide, the last column draws the token.
        p: [B, N, V'] the laws the drafts were drawn from; None: point masses.
        vocabulary: [V'] verifier id of each column of p, ascending; None: V' = V. p is 0 elsewhere.
    """
    count = drafts.shape[1]
    order = torch.arange(count, device=drafts.device)
    log_probs = None if p is None else p.log()
    real = order < lengths[:, None]
    proposal = Proposal(drafts, (order - 1).expand_as(drafts), real, log_probs, vocabulary)
    verdict = verify(q, proposal, uniform, count)
    return verdict.accepted, verdict.token


Law = Callable[[list[int]], Any] | Sequence[float] | Tensor
"""A distribution over V tokens for each text: a function of it, or one and the same."""


class KVCache:
    """Which tokens a model's key-value cache holds: the bookkeeping of `spec_step`, no tensors."""

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens = list(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def truncate_to(self, length: int) -> None:
        """Forget every token from number `length` on.

        Raises:
            ValueError: more tokens than it holds, or fewer than none.
        """
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"length must be in 0 … {len(self.tokens)}, got {length}")
        del self.tokens[length:]


def spec_step(q: Law, p: Law, N: int, kv: KVCache, rng: Any) -> tuple[list[int], int]:
    """One round on laws instead of models, in plain steps: draft N tokens, verify, roll back.

    Follows Leviathan et al. 2023, algorithm 1, whose names for the two laws are the other way
    round. It is what `generate` does for a chain, without batch, cache or tree. V is the size of
    the vocabulary, the same for both laws.

    Args:
        q: the verifier's law: a function from a text (list of ids) to probabilities [V], summing to
            1, as a list, array or tensor; or these themselves, the same after every text.
        p: the drafter's, likewise.
        N: draft length, 1 or more.
        kv: the text so far; afterwards the emitted tokens are in it, but for the last, which no
            pass has read yet. So the caller hands it in again at the end of the next `kv`:
            `kv.extend(emitted[-1:])`.
        rng: anything whose `random()` gives a number in [0, 1), such as
            `numpy.random.default_rng(0)` or `random.Random(0)`.

    Returns:
        (tokens, passes): the ids emitted, a list of 1 … N+1, distributed as if drawn from q one by
        one; and the number of verifier passes, 1.

    Raises:
        ValueError: N below 1.
    """
    if N < 1:
        raise ValueError(f"N (draft length) must be 1 or more, got {N}")

    def law_of(law: Law, text: list[int]) -> Tensor:
        return torch.as_tensor(law(text) if callable(law) else law, dtype=torch.double)

    def uniform() -> Tensor:
        return torch.tensor(float(rng.random()), dtype=torch.double)

    text = list(kv.tokens)
    drafts: list[int] = []
    p_laws = []
    for _ in range(N):
        p_laws.append(law_of(p, text + drafts))
        drafts.append(int(draw(p_laws[-1], uniform())))
    kv.extend(drafts)  # the one pass of the verifier reads them all
    q_laws = [law_of(q, text + drafts[:i]) for i in range(N + 1)]
    accepted = 0
    for d, q_law, p_law in zip(drafts, q_laws, p_laws, strict=False):
        if not bool(accepts(uniform(), q_law[d], p_law[d])):
            break
        accepted += 1
    law = q_laws[accepted]
    if accepted < N:
        law = residual(law, p_laws[accepted])
    kv.truncate_to(len(text) + accepted)
    return [*drafts[:accepted], int(draw(law, uniform()))], 1
