"""Lossless speculative decoding of a batch, with chains of drafts.

Every round the drafter proposes up to K tokens after the pending one, the verifier looks at all
of them in one pass, and a prefix of them is kept, chosen so that the output is distributed exactly
as the verifier's own (Leviathan et al. 2023; Chen et al. 2023). At temperature 0 that means: equal.
Without a drafter the same loop is plain decoding.

Names: q is the verifier's law, p the drafter's (Leviathan et al. write them the other way round).
Legend: B rows, N drafts in a round, K draft length, V verifier's vocabulary, V' the drafter's.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.eval.measures import Counts
from headstart.models.cache import HOLE, RaggedCache
from headstart.models.drafter import Drafter, Drafting
from headstart.models.sampling import RowRandom, Sampling, draw, residual
from headstart.models.verifier import States, Verifier


class Verdict(NamedTuple):
    """What one pass of the verifier says about a chain."""

    accepted: Tensor  # [B] how many drafts, from the first on, are kept
    token: Tensor  # [B] the verifier's token after them


@dataclass
class Generated:
    """One continuation and how it came about."""

    tokens: list[int]
    """Prefill's token first; a terminator is kept."""
    rounds: int
    drafted: list[int]
    """Drafts at position 1 … K; only those that could still have been emitted are made."""
    examined: list[int]
    """Of these, looked at: up to the first rejection, and not past a terminator."""
    accepted: list[int]

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


def accepts(uniform: Tensor, q: Tensor, p: Tensor | float) -> Tensor:
    """u < min(1, q/p) for a draft of probability q to the verifier and p to the drafter.

    Strict, so that a token the verifier cannot emit is rejected even at u = 0.
    """
    return uniform * p < q


def verify_chain(
    q: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    uniform: Tensor,
    p: Tensor | None = None,
    vocabulary: Tensor | None = None,
) -> Verdict:
    """The rejection rule (Leviathan et al. 2023, algorithm 1), vectorised over rows.

    Drafts are accepted until one fails; the token after them comes from (q − p)₊ at a rejection
    and from q if none failed.

    Args:
        q: [B, N+1, V] the verifier's laws, warped: column i after i drafts.
        drafts: [B, N] verifier ids.
        lengths: [B] how many of the N are real.
        uniform: [B, N+1] or wider, in [0, 1): the first N decide, the last column draws the token.
        p: [B, N, V'] the laws the drafts were drawn from; None: point masses.
        vocabulary: [V'] verifier id of each column of p; None: V' = V. p is 0 elsewhere.
    """
    num_drafts, width = drafts.shape[1], q.shape[-1]
    rows = torch.arange(len(q), device=q.device)
    if num_drafts == 0:
        return Verdict(torch.zeros_like(lengths), draw(q[:, 0], uniform[:, -1]))
    q_draft = q[:, :-1].gather(2, drafts[..., None])[..., 0]
    p_draft: Tensor | float = 1.0
    if p is not None:
        columns = drafts if vocabulary is None else _columns(vocabulary, width)[drafts]
        p_draft = p.gather(2, columns[..., None])[..., 0]
    real = torch.arange(num_drafts, device=q.device) < lengths[:, None]
    passed = accepts(uniform[:, :num_drafts], q_draft, p_draft) & real
    accepted = passed.long().cumprod(1).sum(1)
    law = q[rows, accepted]  # [B, V]
    at = accepted.clamp(max=num_drafts - 1)
    if p is None:
        drafted = torch.zeros_like(law).scatter_(1, drafts[rows, at][:, None], 1.0)
    elif vocabulary is None:
        drafted = p[rows, at]
    else:
        drafted = torch.zeros_like(law).index_copy_(1, vocabulary, p[rows, at].to(law.dtype))
    law = torch.where((accepted < lengths)[:, None], residual(law, drafted), law)
    return Verdict(accepted, draw(law, uniform[:, -1]))


def verify_greedy(best: Tensor, drafts: Tensor, lengths: Tensor) -> Verdict:
    """The same rule at temperature 0, for any drafts: accepted while they are the argmax.

    Args:
        best: [B, N+1] argmax of the verifier's logits.
        drafts: [B, N].
        lengths: [B].
    """
    num_drafts = drafts.shape[1]
    same = best[:, :-1] == drafts
    same &= torch.arange(num_drafts, device=best.device) < lengths[:, None]
    accepted = same.long().cumprod(1).sum(1)
    return Verdict(accepted, best.gather(1, accepted[:, None])[:, 0])


def _columns(vocabulary: Tensor, width: int) -> Tensor:
    """Column in the draft vocabulary of each verifier id [V]; V' (out of range) where none."""
    columns = torch.full((width,), len(vocabulary), device=vocabulary.device)
    columns[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    return columns


@torch.no_grad()
def generate(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: list[list[int]],
    *,
    draft_length: int,
    sampling: Sampling,
    drafting: Drafting,
    max_new_tokens: int,
    seed: int = 0,
    row_ids: list[int] | None = None,
    timer: Timer | None = None,
) -> list[Generated]:
    """Continue each prompt until a terminator or `max_new_tokens`, as one batch.

    Args:
        drafter: None decodes plainly; `draft_length` and `drafting` are not used then.
        sampling: the verifier's law.
        drafting: how drafts are chosen; p may have a temperature of its own.
        seed, row_ids: a row's draws depend on (seed, its row id) alone, not on its batch. Ids are
            0, 1, … when not given.
        timer: gets the seconds of each part.

    Raises:
        ValueError: a draft length or `max_new_tokens` below 1, an empty prompt, or one that with
            its answer is longer than the verifier's context.
    """
    _check(verifier, drafter, prompts, draft_length, max_new_tokens)
    if timer:
        timer.start()
    device, terminators = verifier.device, set(verifier.terminator_ids)
    layers = () if drafter is None else drafter.feature_layers
    draft_length = 0 if drafter is None else draft_length
    outputs = [Generated([], 0, *([0] * draft_length for _ in range(3))) for _ in prompts]
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
                states = _states(states, index)
        position = position + counts
        if drafter is not None:
            drafter.advance(state, block, counts, states)
        if timer and number:
            timer.lap("upkeep")
        elif timer:
            timer.lap("prefill")

        number += 1
        room = [max_new_tokens - len(output.tokens) for output in active]
        wanted = min(draft_length, max(room))
        drafts, lengths = token.new_empty(len(token), 0), torch.zeros_like(token)
        p = vocabulary = None
        if drafter is not None:
            # a stream for each round: how many draws it takes may depend on the batch
            stream = random.fork(number) if drafting.sampled else random
            proposal = drafter.propose(state, wanted, drafting, stream)
            drafts, lengths, vocabulary = proposal.tokens, proposal.lengths, proposal.vocabulary
            if min(room) < drafts.shape[1]:
                lengths = torch.minimum(lengths, torch.tensor(room, device=device))
            if proposal.log_probs is not None and not sampling.greedy:
                p = proposal.log_probs.exp()
        if timer:
            timer.lap("proposal")

        offsets = torch.arange(drafts.shape[1] + 1, device=device)
        position_ids = position[:, None] + offsets
        if len(active) > 1:
            position_ids = position_ids.masked_fill(offsets > lengths[:, None], HOLE)
        inputs = torch.cat([token[:, None], drafts], 1)
        states = verifier.states(inputs, layers, position_ids=position_ids, cache=cache)
        logits = verifier.logits(states.last_hidden)
        if sampling.greedy:
            accepted, token = verify_greedy(logits.argmax(-1), drafts, lengths)
        else:
            uniform = random.uniform(draft_length + 1).to(device)
            q = sampling.probs(logits)
            accepted, token = verify_chain(q, drafts, lengths, uniform, p, vocabulary)
        if drafter is not None and drafts.shape[1]:
            drafter.observe(state, proposal, logits)
        block = torch.cat([drafts, token[:, None]], 1)
        block = block.scatter(1, accepted[:, None], token[:, None])
        counts = accepted + 1
        table = torch.cat([block, lengths[:, None], counts[:, None]], 1).tolist()  # the one sync
        if timer:
            timer.lap("verification")
            timer.rounds += 1

        kept = [row[-1] for row in table]
        _cut(cache, counts, kept, len(offsets))
        if drafter is not None:
            block, states = block[:, : max(kept)], _states(states, slice(None), max(kept))
        for output, row, most in zip(active, table, room, strict=True):
            _record(output, row[: row[-1]], row[-2], most, terminators)


def _record(
    output: Generated, emitted: list[int], length: int, room: int, terminators: set[int]
) -> None:
    """Write down one row's round: the accepted ones of `length` drafts and the verifier's token.

    At most `room` of them are output: where as many drafts were accepted, that token is too many.
    """
    accepted = len(emitted) - 1
    examined = min(len(emitted), length)
    stop = next((i for i, token in enumerate(emitted) if token in terminators), accepted)
    emitted = emitted[: min(stop + 1, room)]
    output.tokens += emitted
    output.rounds += 1
    for i in range(length):
        output.drafted[i] += 1
    for i in range(min(examined, len(emitted))):
        output.examined[i] += 1
    for i in range(min(accepted, len(emitted))):
        output.accepted[i] += 1


def _cut(cache: RaggedCache, counts: Tensor, kept: list[int], width: int) -> None:
    """Of the last `width` slots of each row keep the first `counts [B]` (`kept`, on the host)."""
    if min(kept) == max(kept):
        if kept[0] < width:
            cache.truncate(cache.positions.shape[1] - width + kept[0])
        return
    slots = cache.positions.shape[1]
    ends = slots - width + counts
    cache.keep(torch.arange(slots, device=counts.device) < ends[:, None])


def _states(states: States, rows: Tensor | slice, width: int | None = None) -> States:
    features = None if states.features is None else states.features[rows, :width]
    return States(features, states.last_hidden[rows, :width])


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
    draft_length: int,
    max_new_tokens: int,
) -> None:
    if drafter is not None and draft_length < 1:
        raise ValueError(
            f"draft_length must be 1 or more, got {draft_length}; to decode plainly pass no drafter"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
    if not prompts:
        raise ValueError("prompts: there is none to continue")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; a continuation needs at least one token")
        if len(prompt) + max_new_tokens > verifier.context_length:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; with max_new_tokens {max_new_tokens} "
                f"that is more than the context of {verifier.name!r}, {verifier.context_length}; "
                "shorten the prompt or lower max_new_tokens"
            )
