"""Acceptance without decoding: what a drafter would get on texts that the verifier wrote.

One teacher-forced unroll gives a(t, s), the probability that the draft of slot t, step s is
accepted given that the output is this very text. A pass over the text then sums over where rounds
can begin. At temperature 0 the counts equal those of decoding; above, they are its expectation,
provided the texts were written at the temperature, top-k and top-p of `sampling`.

Legend: B rows, T slots, K draft length.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from headstart.data.rows.collate import collate
from headstart.data.rows.packing import by_length
from headstart.data.rows.row import Row
from headstart.eval.measures.counts import Counts
from headstart.models import vocab
from headstart.models.batch import Batch, supervised
from headstart.models.drafter import TrainableDrafter
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling

_CHUNK = 512  # positions whose logits are held at once
_BATCH_TOKENS = 4096  # slots of a batch, padding included


@torch.no_grad()
def acceptance_table(
    drafter: TrainableDrafter,
    batch: Batch,
    draft_length: int,
    sampling: Sampling,
    drafting: Drafting,
) -> Tensor:
    """a(t, s), float64 `[B, T, K]`; zero where x_{t+2+s} is no answer token.

    Greedy drafts: 1[argmax p = x]. Sampled drafts: min(1, p(x) / q(x)), because
    P(x drafted and accepted) = min(p, q) and P(output is x) = q, which is 1 at temperature 0.
    """
    ids, turns = batch["input_ids"], batch["loss_mask"]
    rows, width = ids.shape
    table = torch.zeros(rows, width, draft_length, dtype=torch.double, device=ids.device)
    q = torch.ones(rows, width, dtype=torch.double, device=ids.device)  # of each answer token
    if drafting.sampled and not sampling.greedy:
        for part in (turns[:, 1:] > 0).nonzero().split(_CHUNK):
            row, slot = part.T
            teacher = drafter.verifier.logits(batch["last_hidden"][row, slot])
            q[row, slot + 1] = sampling.prob(teacher, ids[row, slot + 1])
    for s, hidden in enumerate(drafter.unroll(batch, draft_length)):
        if width <= s + 2:
            break
        for part in (turns[:, s + 2 :] > 0).nonzero().split(_CHUNK):
            row, slot = part.T
            token = ids[row, slot + s + 2]
            logits = drafter.logits(hidden[row, slot], s).float()
            column = vocab.columns(token, drafter.draft_ids)
            inside, column = column >= 0, column.clamp(min=0)
            if drafting.sampled:
                p = drafting.sampling.prob(logits, column)
                accepted = (p / q[row, slot + s + 2].clamp(min=1e-30)).clamp(max=1)
            else:
                accepted = (logits.argmax(-1) == column).double()
            table[row, slot, s] = accepted * inside
    return table


@torch.no_grad()
def rank_acceptance(
    drafter: TrainableDrafter,
    rows: list[Row],
    featurize: Callable[[Batch], Batch],
    depth: int,
    ranks: int,
) -> Tensor:
    """How often the drafter's choice number r is the text's token, by depth: `[depth, ranks]`.

    At depth d > 1 of those drafts whose predecessors were among the first `ranks` choices: no tree
    of so many choices goes on from the others.
    """
    right = torch.zeros(depth, ranks, dtype=torch.double)
    asked = torch.zeros(depth, dtype=torch.double)
    for _, batch in _batches(rows, featurize):
        ids = batch["input_ids"]
        alive = torch.ones_like(ids, dtype=torch.bool)
        for s, hidden in enumerate(drafter.unroll(batch, depth)):
            reached = torch.zeros_like(alive)
            for part in (supervised(batch, s) & alive).nonzero().split(_CHUNK):
                row, slot = part.T
                column = vocab.columns(ids[row, slot + s + 2], drafter.draft_ids)
                logits = drafter.logits(hidden[row, slot], s).float()
                rank = (logits > logits.gather(1, column.clamp(min=0)[:, None])).sum(1)
                rank = rank.masked_fill(column < 0, ranks).clamp(max=ranks)
                reached[row, slot] = rank < ranks
                right[s] += rank.bincount(minlength=ranks + 1)[:ranks].cpu()
                asked[s] += len(rank)
            alive = reached
    return right / asked.clamp(min=1)[:, None]


def count_turn(
    table: list[list[float]], first: int, last: int, draft_length: int, limit: int | None = None
) -> Counts:
    """Expected rounds, and drafts made, examined and accepted, of one answer.

    Args:
        table: a(t, s) of the row, `[T][K]`.
        first, last: positions of the answer's first and last token.
        limit: position of the last token that was allowed: nothing is drafted beyond. None: every
            round drafts K, as far as is known.
    """
    start = first - 1
    visits = [0.0] * (last - start + 1)  # visits[i]: expected rounds that begin at slot start + i
    visits[0] = 1.0
    rounds = 0.0
    drafted, examined, accepted = ([0.0] * draft_length for _ in range(3))
    for slot in range(start, last - 1):
        weight = visits[slot - start]
        if weight == 0.0:
            continue
        rounds += weight
        for i in range(draft_length if limit is None else min(draft_length, limit - 1 - slot)):
            drafted[i] += weight
        reach = min(draft_length, last - 1 - slot)
        survival = weight
        for i in range(reach):
            examined[i] += survival
            passed = survival * table[slot][i]
            visits[slot + i + 1 - start] += survival - passed
            accepted[i] += passed
            survival = passed
            if survival == 0.0:
                break
        else:
            visits[slot + reach + 1 - start] += survival
    return Counts(
        id="",
        category="all",
        tokens=last - first + 1,
        rounds=rounds,
        drafted=drafted,
        examined=examined,
        accepted=accepted,
    )


def turns(loss_mask: list[int], document_ids: list[int]) -> list[tuple[int, int, int]]:
    """(document, first, last) of each assistant turn; a turn that opens a text starts at its
    second token, since nothing comes before to draft from."""
    found = []
    begin = None
    for t in range(len(loss_mask) + 1):
        key = (document_ids[t], loss_mask[t]) if t < len(loss_mask) else None
        if begin is not None and key != (document_ids[begin], loss_mask[begin]):
            opens = begin == 0 or document_ids[begin - 1] != document_ids[begin]
            first = begin + 1 if opens else begin
            if t - 1 >= first:
                found.append((document_ids[begin], first, t - 1))
            begin = None
        if begin is None and key is not None and key[1] > 0 and key[0] >= 0:
            begin = t
    return found


def replay(
    drafter: TrainableDrafter,
    batches: Iterable[Batch],
    draft_length: int,
    sampling: Sampling,
    drafting: Drafting,
    max_new_tokens: int | None = None,
) -> list[list[Counts]]:
    """Counts of each assistant turn, a list a row, in the order of batches and rows.

    Args:
        batches: with the verifier's states in them (featurized).
        max_new_tokens: of each answer: it is replayed as if it had been decoded under this limit.
    """
    found = []
    for batch in batches:
        table = acceptance_table(drafter, batch, draft_length, sampling, drafting).cpu()
        for row in range(len(table)):
            values, counts = table[row].tolist(), []
            for _, first, last in turns(
                batch["loss_mask"][row].tolist(), batch["document_ids"][row].tolist()
            ):
                limit = None
                if max_new_tokens is not None:
                    limit = first + max_new_tokens - 1
                    last = min(last, limit)
                counts.append(count_turn(values, first, last, draft_length, limit))
            found.append(counts)
    return found


def replay_rows(
    drafter: TrainableDrafter,
    rows: list[Row],
    featurize: Callable[[Batch], Batch],
    draft_length: int,
    sampling: Sampling,
    drafting: Drafting,
    max_new_tokens: int | None = None,
) -> list[Counts]:
    """`replay` of rendered rows, in padded batches of like length; counts carry the rows' names."""
    counts = []
    for group, batch in _batches(rows, featurize):
        found = replay(drafter, [batch], draft_length, sampling, drafting, max_new_tokens)
        for row, of_row in zip(group, found, strict=True):
            for count in of_row:
                count.id, count.category = row.id, row.category
                counts.append(count)
    return counts


def _batches(
    rows: list[Row], featurize: Callable[[Batch], Batch]
) -> Iterator[tuple[list[Row], Batch]]:
    """Padded, featurized batches of rows of like length, and the rows in each."""
    for group in by_length([len(row.input_ids) for row in rows], _BATCH_TOKENS):
        part = [rows[i] for i in group]
        width = max(len(row.input_ids) for row in part)
        yield part, featurize(collate(part, width, packed=False))
