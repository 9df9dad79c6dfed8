"""What a running vLLM answered, held against what our own chain loop does with the same prompts.

eval/engine.py asks it (server.py has the request); here nothing is asked.

Greedy, float32, answers of a fixed length (terminators are written over), one prompt at a time. The
texts must be equal, and so must the drafts accepted at each position. Where they are not, every one
of the engine's rounds is checked against the drafter's own logits on that text: it should accept
exactly the drafts that are the drafter's argmax. A round that does not is a numerical tie where the
two logits lie within `TIE`; anything else is a fault.

vLLM drafts K in every round, past the end of the answer too, and counts what it accepted there. So
our loop is run some tokens further, and its last round is counted whole as well.

Legend: K draft length, T slots of prompt and text.
"""

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headstart.data.rows.collate import collate
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding.lossless import compare
from headstart.eval.decoding.speculate import generate
from headstart.eval.engines.metrics import EngineCounts
from headstart.models import vocab
from headstart.models.drafter import Drafter, TrainableDrafter
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom, Sampling
from headstart.models.proposal.trees import Shape, chain
from headstart.models.verifier.verifier import States, Verifier

TIE = 1e-3  # logits nearer than this are decided by rounding: two float32 implementations differ


class Recorded(Drafter):
    """A drafter of one text that writes down how many drafts were accepted in each round."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.feature_layers = drafter.feature_layers
        self.context_length, self.max_depth = drafter.context_length, drafter.max_depth
        self.accepted: list[int] = []
        self._prefilled = False

    def start(self, first_tokens: Tensor) -> Any:
        assert len(first_tokens) == 1
        return self.drafter.start(first_tokens)

    def advance(self, state: Any, tokens: Tensor, lengths: Tensor, states: States) -> None:
        if self._prefilled:  # a round's slots: the pending token's, then those of accepted drafts
            self.accepted.append(int(lengths) - 1)
        self._prefilled = True
        self.drafter.advance(state, tokens, lengths, states)

    def propose(
        self, state: Any, shape: Shape, drafting: Drafting, random: RowRandom | None
    ) -> Proposal:
        return self.drafter.propose(state, shape, drafting, random)

    def select_rows(self, state: Any, rows: Tensor) -> None:
        self.drafter.select_rows(state, rows)


@dataclass
class Answer:
    """One prompt's greedy answer, with drafts: ours, or the engine's."""

    tokens: list[int]
    """Ours goes on after the limit, as far as its last round could have been looked at."""
    accepted: list[int]
    """Drafts accepted in each round, the last one's past the limit too."""

    def by_position(self, draft_length: int) -> list[int]:
        return [sum(a > i for a in self.accepted) for i in range(draft_length)]


def own_answer(
    verifier: Verifier, drafter: Drafter, prompt: list[int], draft_length: int, max_new_tokens: int
) -> Answer:
    """By our loop, whose rounds are counted as vLLM counts them."""
    recorded, terminators = Recorded(drafter), verifier.terminator_ids
    verifier.terminator_ids = ()  # as ignore_eos
    try:
        (output,) = generate(
            verifier,
            recorded,
            [prompt],
            shape=chain(draft_length),
            sampling=Sampling(),
            drafting=Drafting(False, Sampling()),
            # one more, so that the round that reaches the limit is followed by another
            max_new_tokens=max_new_tokens + draft_length + 1,
        )
    finally:
        verifier.terminator_ids = terminators
    written, rounds = 1, 0
    while written < max_new_tokens:
        written += recorded.accepted[rounds] + 1
        rounds += 1
    return Answer(output.tokens[:written], recorded.accepted[:rounds])


def engine_answer(steps: list[list[int]], counts: EngineCounts) -> Answer | None:
    """From the tokens of each of vLLM's steps, prefill's first, and what it counted meanwhile.

    None where steps came in one piece, so that rounds cannot be told apart.
    """
    tokens = [token for step in steps for token in step]
    accepted = [len(step) - 1 for step in steps[1:]]
    if len(steps[0]) != 1 or len(accepted) != counts.rounds:
        return None
    if accepted:  # what was accepted past the limit is not in the text
        accepted[-1] = round(sum(counts.accepted)) - sum(accepted[:-1])
    answer = Answer(tokens, accepted)
    return answer if answer.by_position(len(counts.accepted)) == counts.accepted else None


@torch.no_grad()
def margins(
    drafter: TrainableDrafter, prompt: list[int], text: list[int], draft_length: int
) -> Tensor:
    """How far the drafter prefers the text's token to every other: float `[T, K]`.

    At (t, s): the logit of x_{t+2+s} less the best other one, of a drafter that has been given the
    text so far. Positive where the draft is right; minus infinity outside the draft vocabulary; NaN
    where the text has no such token.
    """
    ids = prompt + text
    row = Row(ids, [0] * len(prompt) + [1] * len(text), "")
    featurize = Featurizer(drafter.verifier, drafter.feature_layers, alone=False, verbose=False)
    batch = featurize(collate([row], len(ids), packed=False))
    table = torch.full((len(ids), draft_length), torch.nan)
    for s, hidden in enumerate(islice(drafter.unroll(batch, draft_length), len(ids) - 2)):
        slots = torch.arange(len(prompt) - 1, len(ids) - 2 - s)
        logits = drafter.logits(hidden[0, slots], s).float()
        token = batch["input_ids"][0, slots + 2 + s]
        column = vocab.columns(token, drafter.draft_ids)[:, None]
        inside, column = column >= 0, column.clamp(min=0)
        own = logits.gather(1, column).masked_fill(~inside, -torch.inf)
        others = torch.where(inside, logits.scatter(1, column, -torch.inf), logits)
        table[slots, s] = (own[:, 0] - others.max(-1).values).cpu()
    return table


@dataclass
class Deviation:
    """A draft that the engine accepted or rejected otherwise than the drafter's logits say."""

    token: int
    """Number of the answer's token, from 0."""
    position: int
    """Of the draft in its round, from 1."""
    margin: float | None
    """Of the text's token over the best other one; None: the draft lies past the known text."""

    @property
    def explained(self) -> bool:
        """A tie, or a draft past the limit that no text tells of."""
        return self.margin is None or abs(self.margin) < TIE


def deviations(
    answer: Answer, table: Tensor, prompt_length: int, draft_length: int
) -> list[Deviation]:
    """Of every round of the engine's, the first draft that is not as `margins` says, if any."""
    found, written = [], 1
    for accepted in answer.accepted:
        slot = prompt_length + written - 2
        for i in range(draft_length):
            margin = float(table[slot, i]) if slot < len(table) else math.nan
            if math.isnan(margin):  # past the text
                if i < accepted:
                    found.append(Deviation(written + i, i + 1, None))
                break
            if (margin > 0) != (i < accepted):
                found.append(Deviation(written + i, i + 1, margin))
                break
            if i == accepted:
                break
        written += accepted + 1
    return found


@dataclass
class Compared:
    """One prompt, by the engine and by us."""

    id: str
    category: str
    text: str
    """identical, tie or different: the engine's text and ours."""
    lossless: str | None
    """The same of the engine's text with and without drafts; None where it was not asked for."""
    ours: list[int]
    """Accepted by position."""
    engine: list[int]
    rounds: tuple[int, int]
    """Ours, and the engine's."""
    deviations: list[Deviation] | None = None
    """Of the engine's rounds from the drafter's logits, looked for where counts differ; None: not
    looked for, or its rounds could not be told apart."""
    seconds: tuple[float, float] | None = None
    """Of the engine's answer without and with drafts."""

    @property
    def equal(self) -> bool:
        return self.ours == self.engine and self.rounds[0] == self.rounds[1]

    @property
    def explained(self) -> bool:
        """Counts are equal, or every round that is not as the logits say has its reason."""
        found = self.deviations
        if self.equal or found is None:
            return self.equal
        # of one text, rounds can only differ where one of them deviates
        return bool(found or self.text != "identical") and all(d.explained for d in found)


def judge(
    drafter: TrainableDrafter,
    row: Row,
    prompt: list[int],
    steps: list[list[int]],
    counts: EngineCounts,
    plain: list[int] | None,
) -> Compared:
    """Hold an answer of the engine's against our own loop.

    Args:
        steps: tokens of each of its steps, prefill's first.
        counts: what it counted for this prompt alone.
        plain: its answer without drafts.
    """
    verifier, draft_length = drafter.verifier, len(counts.accepted)
    written = [token for step in steps for token in step]
    ours = own_answer(verifier, drafter, prompt, draft_length, len(written))
    text = compare(verifier, prompt, written, ours.tokens[: len(written)], TIE)
    compared = Compared(
        id=row.id,
        category=row.category,
        text=text,
        lossless=plain and compare(verifier, prompt, plain, written, TIE),
        ours=ours.by_position(draft_length),
        engine=[round(a) for a in counts.accepted],
        rounds=(len(ours.accepted), round(counts.rounds)),
    )
    if not compared.equal:
        answer = engine_answer(steps, counts)
        if answer is not None:
            known = ours.tokens if text == "identical" else written
            table = margins(drafter, prompt, known, draft_length)
            compared.deviations = deviations(answer, table, len(prompt), draft_length)
    return compared
