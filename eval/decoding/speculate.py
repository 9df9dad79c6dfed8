"""Lossless speculative decoding of a batch, with chains or trees of drafts.

Every round the drafter proposes a tree of tokens after the pending one, the verifier looks at all
of its nodes in one pass, and a path of them is kept, chosen so that the output is distributed
exactly as the verifier's own (Leviathan et al. 2023; Chen et al. 2023). At temperature 0 that
means: equal. Without a drafter the same loop is plain decoding. Lossy on request only: with
`acceptance=Typical(…)`.

Names: q is the verifier's law, p the drafter's (Leviathan et al. write them the other way round).
Legend: B rows, N nodes of a round's proposal, D its depth, V verifier's vocabulary, V' the
drafter's.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.data.rows.row import check_ids
from headstart.eval.decoding.rejection import (
    Verdict,
    last_node,
    verify,
    verify_greedy,
)
from headstart.eval.decoding.typical import Typical, verify_typical
from headstart.eval.measures.counts import Counts
from headstart.models.drafter import Drafter, check_depth
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom, Sampling, draw
from headstart.models.proposal.trees import Shape, tree_attention_mask
from headstart.models.verifier.cache import HOLE
from headstart.models.verifier.verifier import States, Verifier


@dataclass
class Generated:
    """One continuation and how it came about."""

    tokens: list[int]
    """Prefill's token first; a terminator is kept."""
    rounds: int
    drafted: list[int]
    """Drafts at position 1 … D, all nodes of that depth; only those that could still have been
    emitted are made."""
    examined: list[int]
    """Rounds in which a position was looked at: up to the first rejection of all drafts there, and
    not past a terminator."""
    accepted: list[int]
    emitted: list[int] = field(default_factory=list)
    """Tokens of each round."""

    def counts(self, id: str, category: str = "all") -> Counts:
        return Counts(id, category, len(self.tokens), self.rounds,
                      self.drafted, self.examined, self.accepted)  # fmt: skip


@dataclass
class Timer:
    """Seconds by part of `generate`, and the number of batched rounds they went into."""

    prefill: float = 0.0
    proposal: float = 0.0
    verification: float = 0.0
    """Verifier's pass, acceptance, and reading the result."""
    upkeep: float = 0.0
    """Cutting the cache back and the drafter's `advance`."""
    rounds: int = 0
    _last: float = field(default=0.0, repr=False)

    def start(self) -> None:
        self._last = self._now()

    def lap(self, part: str) -> None:
        now = self._now()
        setattr(self, part, getattr(self, part) + now - self._last)
        self._last = now

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # else the time falls to whoever waits for the device next
        return time.perf_counter()


@torch.no_grad()
def generate(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: list[list[int]],
    *,
    shape: Shape | None,
    sampling: Sampling,
    drafting: Drafting | None,
    max_new_tokens: int,
    seed: int = 0,
    row_ids: list[int] | None = None,
    timer: Timer | None = None,
    acceptance: Typical | None = None,
) -> list[Generated]:
    """Continue each prompt until a terminator or `max_new_tokens`, as one batch.

    Args:
        drafter: None decodes plainly; `shape` and `drafting` are not used then.
        shape: of every round's proposal: a chain or a tree.
        sampling: the verifier's law.
        drafting: how drafts are chosen; p may have a temperature of its own.
        seed, row_ids: a row's draws depend on (seed, its row id) alone, not on its batch. Ids are
            0, 1, … when not given.
        timer: gets the seconds of each part.
        acceptance: None is the exact rule. Typical acceptance is lossy: above temperature 0 the
            text is not distributed as the verifier's.

    Raises:
        ValueError: `max_new_tokens` below 1, an empty prompt, or one that with its answer is longer
            than the context of the verifier or the drafter.
    """
    _check(verifier, drafter, prompts, max_new_tokens)
    if timer:
        timer.start()
    device, terminators = verifier.device, set(verifier.terminator_ids)
    layers = () if drafter is None else drafter.feature_layers
    depth = 0 if drafter is None else shape.depth
    if drafter is not None:
        check_depth(drafter.max_depth, depth, "the depth of the drafts")
    outputs = [Generated([], 0, *([0] * depth for _ in range(3))) for _ in prompts]
    random = RowRandom(seed, list(range(len(prompts))) if row_ids is None else row_ids)
    cache = verifier.new_cache(len(prompts))

    ids, counts = _pad(prompts)
    ids, counts = ids.to(device), counts.to(device)
    slots = torch.arange(ids.shape[1], device=device)
    position_ids = slots.expand_as(ids).masked_fill(slots >= counts[:, None], HOLE)
    states = verifier.states(ids, layers, position_ids=position_ids, cache=cache)
    last = states.last_hidden[torch.arange(len(ids), device=device), counts - 1]
    logits = verifier.logits(last)
    if sampling.greedy:
        token = logits.argmax(-1)
    else:
        token = draw(sampling.probs(logits), random.uniform()[:, 0].to(device))
    for output, first in zip(outputs, token.tolist(), strict=True):
        output.tokens.append(first)
    state = None if drafter is None else drafter.start(ids[:, 0])
    # A pass leaves verified slots: `states` of `counts` tokens, and in `block` the token after each
    block = torch.cat([ids[:, 1:], ids[:, :1]], 1).scatter(1, counts[:, None] - 1, token[:, None])
    position = torch.zeros_like(counts)
    active, number = outputs, 0
    if timer:
        timer.lap("prefill")

    while True:
        going = [
            row
            for row, output in enumerate(active)
            if len(output.tokens) < max_new_tokens and output.tokens[-1] not in terminators
        ]
        if not going:
            return outputs
        if len(going) < len(active):
            index = torch.tensor(going, device=device)
            active = [active[row] for row in going]
            cache.select_rows(index)
            random.select_rows(going)
            block, counts, position, token = (t[index] for t in (block, counts, position, token))
            if drafter is not None:
                drafter.select_rows(state, index)
                states = States(*(None if t is None else t[index] for t in states))
        position = position + counts
        if drafter is not None:
            drafter.advance(state, block, counts, states)
        if timer and number:
            timer.lap("upkeep")
        elif timer:
            timer.lap("prefill")

        number += 1
        room = [max_new_tokens - len(output.tokens) for output in active]
        proposal = drafts = _nothing(token)
        mask, depths, depth = None, None, 0
        if drafter is not None:
            wanted = shape.cut(max(room))
            # a stream for each round: how many draws it takes may depend on the batch
            stream = random.fork(number) if drafting.sampled else random
            proposal = drafter.propose(state, wanted, drafting, stream)
            mask, depths = _layout(proposal, wanted.branches)
            within = depths <= torch.tensor(room, device=device)[:, None]
            proposal = proposal._replace(real=proposal.real & within)
            drafts = _drafts(proposal)
            depth = min(wanted.depth, drafts.tokens.shape[1])
        if timer:
            timer.lap("proposal")

        inputs, position_ids = token[:, None], position[:, None]
        if proposal.tokens.shape[1]:
            inputs = torch.cat([inputs, proposal.tokens], 1)
            nodes = (position_ids + depths).masked_fill(~proposal.real, HOLE)
            position_ids = torch.cat([position_ids, nodes], 1)
        states = verifier.states(inputs, layers, position_ids=position_ids, cache=cache, mask=mask)
        logits = verifier.logits(states.last_hidden)
        judged = logits[:, : drafts.tokens.shape[1] + 1]
        if sampling.greedy:
            verdict = verify_greedy(judged.argmax(-1), drafts, depth)
        else:
            uniform = random.uniform(shape.size + 1 if drafter else 1).to(device)
            q = sampling.probs(judged)
            if acceptance is None or drafter is None:
                verdict = verify(q, drafts, uniform, depth)
            else:
                verdict = verify_typical(q, drafts, uniform, depth, acceptance)
        path, accepted, token = verdict
        if drafter is not None:
            drafter.observe(state, proposal, logits)
        # slots of this pass that are kept: the root's, then the path's
        slots = torch.cat([torch.zeros_like(counts)[:, None], path + 1], 1)
        block = torch.cat([inputs.gather(1, slots)[:, 1:], token[:, None]], 1)
        block = block.scatter(1, accepted[:, None], token[:, None])
        counts = accepted + 1
        looked = _looked(drafts, depths, verdict, depth)
        table = torch.cat([block, looked, counts[:, None]], 1).tolist()  # the one sync
        if timer:
            timer.lap("verification")
            timer.rounds += 1

        longest = max(row[-1] for row in table)
        cache.keep_path(inputs.shape[1], slots, counts, longest)
        if drafter is not None:
            block, states = block[:, :longest], _along(states, slots[:, :longest])
        for output, row, most in zip(active, table, room, strict=True):
            _record(output, row[: row[-1]], row[depth + 1 : -1], most, terminators)


def _nothing(token: Tensor) -> Proposal:
    """Of plain decoding: no node in any row."""
    empty = token.new_empty(len(token), 0)
    return Proposal(empty, empty, empty.bool(), None, None)


def _drafts(proposal: Proposal) -> Proposal:
    """The nodes that may be accepted."""
    if not proposal.scratch:
        return proposal
    end = -proposal.scratch
    tokens, parents, real = (t[:, :end] for t in proposal[:3])
    return Proposal(tokens, parents, real, proposal.log_probs, proposal.vocabulary)


def _layout(proposal: Proposal, branches: bool) -> tuple[Tensor | None, Tensor]:
    """The pass's attention mask [B, N+1, N+1] (None for chains) and each node's depth [B, N]."""
    if not branches and not proposal.scratch:
        depths = torch.arange(1, proposal.tokens.shape[1] + 1, device=proposal.tokens.device)
        return None, depths.expand_as(proposal.tokens)
    mask = tree_attention_mask(proposal.parents)
    return mask, mask.sum(-1)[:, 1:] - 1


def _looked(proposal: Proposal, depths: Tensor, verdict: Verdict, depth: int) -> Tensor:
    """How many nodes each row has at depth 1 … D, and how many depths were examined: `[B, D+1]`."""
    at = last_node(verdict.path, verdict.accepted)[:, None]
    more = ((proposal.parents == at) & proposal.real).any(1)
    if depth:
        depths = depths[:, : proposal.tokens.shape[1]]
    levels = [((depths == d) & proposal.real).sum(1) for d in range(1, depth + 1)]
    return torch.stack([*levels, verdict.accepted + more], 1)


def _record(
    output: Generated, emitted: list[int], looked: list[int], room: int, terminators: set[int]
) -> None:
    """Write down one row's round: the accepted drafts and the verifier's token.

    At most `room` of them are output: where as many drafts were accepted, that token is too many.

    Args:
        looked: how many drafts there were at depth 1, 2, …, and last, how many depths were
            examined.
    """
    accepted = len(emitted) - 1
    *drafted, examined = looked
    stop = next((i for i, token in enumerate(emitted) if token in terminators), accepted)
    emitted = emitted[: min(stop + 1, room)]
    output.tokens += emitted
    output.emitted.append(len(emitted))
    output.rounds += 1
    for i, number in enumerate(drafted):
        output.drafted[i] += number
    for i in range(min(examined, len(emitted))):
        output.examined[i] += 1
    for i in range(min(accepted, len(emitted))):
        output.accepted[i] += 1


def _along(states: States, slots: Tensor) -> States:
    """The states of `slots [B, m]`."""

    def along(tensor: Tensor) -> Tensor:
        return tensor.gather(1, slots[..., None].expand(-1, -1, tensor.shape[-1]))

    features = None if states.features is None else along(states.features)
    return States(features, along(states.last_hidden))


def _pad(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Right-padded ids `[B, T]` and lengths `[B]`."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    return ids, lengths


def _check(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: list[list[int]],
    max_new_tokens: int,
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
    if not prompts:
        raise ValueError("prompts: there is none to continue")
    limits = {repr(verifier.name): verifier.context_length}
    if drafter is not None and drafter.context_length is not None:
        limits["the drafter"] = drafter.context_length
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; a continuation needs at least one token")
        check_ids(f"prompt {number}", prompt, verifier.num_embeddings)
        for name, limit in limits.items():
            if len(prompt) + max_new_tokens > limit:
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens; with max_new_tokens "
                    f"{max_new_tokens} that is more than the context of {name}, {limit}; shorten "
                    f"the prompt or lower max_new_tokens{verifier.longer}"
                )
