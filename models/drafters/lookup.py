"""Drafters without weights: prompt lookup, and lookahead decoding.

Both draft what followed the same few tokens before. Prompt lookup (Saxena 2023) finds them in the
text itself; lookahead (Fu et al. 2024, arXiv 2402.02057) also collects n-grams that the verifier
wrote on a window of guesses about what is to come, which it looks at in the same pass.

Their drafts are point masses. Texts are kept as lists on the host, one a row.
Legend: B rows, N nodes of a proposal, n new tokens, W window, G guesses kept of a token.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.models.drafter import Drafter
from headstart.models.proposal.proposal import Drafting, Proposal
from headstart.models.proposal.sampling import RowRandom
from headstart.models.proposal.trees import ROOT, Shape
from headstart.models.verifier.verifier import States


class Draft:
    """The proposal of one row while it grows: a trie of continuations."""

    def __init__(self, size: int):
        self.size = size
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.children: dict[tuple[int, int], int] = {}

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.size

    def add(self, continuation: list[int]) -> None:
        """Insert a continuation, as far as there is room; what is there already is shared."""
        at = ROOT
        for token in continuation:
            node = self.children.get((at, token))
            if node is None:
                if self.full:
                    return
                node = self.append(token, at)
            at = node

    def append(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.children[parent, token] = node = len(self.tokens) - 1
        return node


def assemble(drafts: list[Draft], device: torch.device, scratch: Sequence[Draft] = ()) -> Proposal:
    """The rows' tries side by side, padded; after them their scratch nodes, of equal number."""
    width = max(len(draft.tokens) for draft in drafts)
    tokens, parents, real = [], [], []
    for row, draft in enumerate(drafts):
        missing = width - len(draft.tokens)
        of_row = draft.tokens + [0] * missing
        above = draft.parents + [ROOT] * missing
        there = [True] * len(draft.tokens) + [False] * missing
        if scratch:
            of_row += scratch[row].tokens
            above += [p if p == ROOT else p + width for p in scratch[row].parents]
            there += [True] * len(scratch[row].tokens)
        tokens.append(of_row)
        parents.append(above)
        real.append(there)
    return Proposal(
        torch.tensor(tokens, dtype=torch.long, device=device),
        torch.tensor(parents, dtype=torch.long, device=device),
        torch.tensor(real, dtype=torch.bool, device=device),
        None,
        None,
        scratch=len(scratch[0].tokens) if scratch else 0,
    )


@dataclass
class PromptLookupConfig:
    """Which matches count."""

    max_ngram: int = 3
    """Longest suffix of the text that is looked for; longer matches go first."""
    min_ngram: int = 1
    """Shortest suffix that may be matched."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                "prompt-lookup: needs 1 ≤ min_ngram ≤ max_ngram, got "
                f"min_ngram {self.min_ngram} and max_ngram {self.max_ngram}"
            )


@dataclass
class Text:
    """One row: its tokens, and where each n-gram of them ended."""

    device: torch.device
    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))


class PromptLookup(Drafter):
    """Drafts what followed the last occurrence of the text's longest suffix, at most N nodes.

    A chain follows the best match alone. A tree holds the continuations of several, longest suffix
    first, then the latest, until it is full.
    """

    def __init__(self, config: PromptLookupConfig | None = None):
        self.config = config or PromptLookupConfig()

    def start(self, first_tokens: Tensor) -> list[Text]:
        state = [Text(first_tokens.device) for _ in first_tokens]
        for text, token in zip(state, first_tokens.tolist(), strict=True):
            self._extend(text, [token])
        return state

    def _extend(self, text: Text, tokens: list[int]) -> None:
        for token in tokens:
            text.tokens.append(token)
            end = len(text.tokens)
            for n in range(self.config.min_ngram, min(self.config.max_ngram, end) + 1):
                text.ends[tuple(text.tokens[end - n :])].append(end)

    def advance(self, state: list[Text], tokens: Tensor, lengths: Tensor, states: States) -> None:
        for text, row, length in zip(state, tokens.tolist(), lengths.tolist(), strict=True):
            self._extend(text, row[:length])

    def propose(
        self, state: list[Text], shape: Shape, drafting: Drafting, random: RowRandom | None
    ) -> Proposal:
        drafts = []
        for text in state:
            draft = Draft(shape.size)
            for begin in self._matches(text):
                draft.add(continuation(text.tokens, begin, shape.depth))
                if draft.full or not shape.branches:
                    break
            drafts.append(draft)
        return assemble(drafts, state[0].device)

    def _matches(self, text: Text) -> Iterator[int]:
        """Places right after an earlier occurrence of a suffix, best first."""
        end, seen = len(text.tokens), {len(text.tokens)}
        for n in range(min(self.config.max_ngram, end), self.config.min_ngram - 1, -1):
            for begin in reversed(text.ends[tuple(text.tokens[end - n :])]):
                if begin not in seen:
                    seen.add(begin)
                    yield begin

    def select_rows(self, state: list[Text], rows: Tensor) -> None:
        state[:] = [state[row] for row in rows.tolist()]


def continuation(tokens: list[int], begin: int, length: int) -> list[int]:
    """`length` tokens from `begin` on; past the end of the text they repeat what was copied."""
    period = len(tokens) - begin
    return [tokens[begin + i % period] for i in range(length)]


@dataclass
class LookaheadConfig:
    """The window and the pool."""

    window: int = 8
    """W, guesses side by side: the n-grams found in one pass of the verifier."""
    ngram: int = 4
    """Length of the n-grams; the window has ngram - 1 levels of W nodes each."""
    guesses: int = 8
    """G, n-grams kept of each first token, the latest."""

    def __post_init__(self) -> None:
        if self.window < 1 or self.ngram < 2 or self.guesses < 1:
            raise ValueError(
                "lookahead: needs window ≥ 1, ngram ≥ 2 and guesses ≥ 1, got "
                f"window {self.window}, ngram {self.ngram} and guesses {self.guesses}"
            )


@dataclass
class Guesses:
    """One row: what it knows about what is to come."""

    device: torch.device
    tokens: list[int] = field(default_factory=list)
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))
    """Token -> what was seen to follow it, the latest last."""
    levels: list[list[int]] = field(default_factory=list)
    """The window: `levels[0][i]` is the guess i + 1 tokens ahead, `levels[j][i]` what the verifier
    wrote after `levels[0][: i + 1]`, …, `levels[j - 1][i]`, i + 1 + j tokens ahead."""


class Lookahead(Drafter):
    """Drafts from a pool of n-grams, and lets the verifier write new ones in every pass.

    The window is a Jacobi iteration that keeps its last `ngram - 1` states. It goes along as a
    tree of scratch nodes: `levels[0]` is a chain from the pending token, and below its node i hang
    `levels[1][i]`, `levels[2][i]`, … . What the verifier writes after the lowest of them ends an
    n-gram, and becomes the newest level.
    """

    def __init__(self, config: LookaheadConfig | None = None):
        self.config = config or LookaheadConfig()

    def start(self, first_tokens: Tensor) -> list[Guesses]:
        state = [Guesses(first_tokens.device) for _ in first_tokens]
        for row, token in zip(state, first_tokens.tolist(), strict=True):
            row.tokens.append(token)
        return state

    def advance(
        self, state: list[Guesses], tokens: Tensor, lengths: Tensor, states: States
    ) -> None:
        ngram = self.config.ngram
        for row, new, length in zip(state, tokens.tolist(), lengths.tolist(), strict=True):
            for token in new[:length]:
                row.tokens.append(token)
                if len(row.tokens) >= ngram:
                    self._learn(row, row.tokens[-ngram:])
            if (
                not row.levels
            ):  # any guess will do to begin with; the text's own words are good ones
                repeats = -(-self.config.window // len(row.tokens))
                row.levels.append((row.tokens * repeats)[-self.config.window :])

    def _learn(self, row: Guesses, ngram: list[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        known = row.pool[first]
        if rest in known:
            known.remove(rest)
        known.append(rest)
        del known[: -self.config.guesses]

    def propose(
        self, state: list[Guesses], shape: Shape, drafting: Drafting, random: RowRandom | None
    ) -> Proposal:
        drafts, windows = [], []
        for row in state:
            draft = Draft(shape.size)
            for rest in reversed(row.pool[row.tokens[-1]]):
                draft.add(self._followed(row, rest, shape.depth))
                if draft.full or not shape.branches:
                    break
            drafts.append(draft)
            windows.append(self._window(row))
        return assemble(drafts, state[0].device, windows)

    @staticmethod
    def _followed(row: Guesses, rest: tuple[int, ...], depth: int) -> list[int]:
        """`rest`, and what the pool says follows its end, up to `depth` tokens."""
        path = list(rest)
        while len(path) < depth and row.pool.get(path[-1]):
            path += row.pool[path[-1]][-1]
        return path[:depth]

    def _window(self, row: Guesses) -> Draft:
        """Level by level: node j·W + i is `levels[j][i]`."""
        window = Draft(self.config.window * len(row.levels))
        for j, level in enumerate(row.levels):
            for i, token in enumerate(level):
                above = i - 1 if j == 0 else (j - 1) * self.config.window + i  # i - 1: the root too
                window.append(token, above)
        return window

    def observe(self, state: list[Guesses], proposal: Proposal, node_logits: Tensor) -> None:
        width, written = self.config.window, node_logits[:, -self.config.window :].argmax(-1)
        there = proposal.real[:, -width:]  # of the lowest level
        for row, tokens, real in zip(state, written.tolist(), there.tolist(), strict=True):
            for i, token in enumerate(tokens):
                if real[i]:  # else the text ends before
                    self._learn(row, [*(level[i] for level in row.levels), token])
            row.levels.append(tokens)
            if len(row.levels) == self.config.ngram:
                # one token on, what was level 1 has become the guess i + 1 tokens ahead
                del row.levels[0]

    def select_rows(self, state: list[Guesses], rows: Tensor) -> None:
        state[:] = [state[row] for row in rows.tolist()]
