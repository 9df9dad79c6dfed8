"""From logits to distributions and draws. One place, for verifier and drafter alike.

Legend: V vocabulary; leading dimensions are free.
"""

from dataclasses import dataclass

import torch
from numpy.typing import ArrayLike
from torch import Tensor

_LIKELIEST = 1024  # tokens among which a nucleus is looked for first


@dataclass(frozen=True)
class Sampling:
    """How the verifier's next token is chosen. Temperature 0 is greedy."""

    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this, in (0, 1]."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (greedy) or a positive number, got {self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """The warped distribution, float32 `[..., V]`; a point mass when greedy.

        Order as everywhere: temperature, then top-k, then top-p of what is left.
        """
        if self.greedy:
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
        logits = logits.float() / self.temperature
        if self.top_k and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probs = logits.softmax(-1)
        return self._nucleus(probs) if self.top_p < 1 else probs

    def prob(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """`probs(logits)` at `tokens` alone: `[..., V]`, `[...]` -> double `[...]`."""
        if self.greedy or self.top_k or self.top_p < 1:
            return self.probs(logits).gather(-1, tokens[..., None])[..., 0].double()
        logits = logits.float() / self.temperature
        chosen = logits.gather(-1, tokens[..., None])[..., 0]
        return (chosen.double() - logits.logsumexp(-1).double()).exp()

    def _nucleus(self, probs: Tensor) -> Tensor:
        # a nucleus is mostly small: sorting the whole vocabulary would cost more than all the rest
        width = probs.shape[-1]
        for count in (min(_LIKELIEST, width), width):
            ordered, order = probs.topk(count, dim=-1)
            before = ordered.cumsum(-1) - ordered
            if count == width or bool((before[..., -1] >= self.top_p).all()):
                break
        kept = ordered.masked_fill(before >= self.top_p, 0)
        kept = kept / kept.sum(-1, keepdim=True)
        return torch.zeros_like(probs).scatter_(-1, order, kept)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """One token per row by inverting the cumulative distribution.

    Args:
        probs: [..., V], each row sums to 1.
        uniform: [...], in [0, 1).

    Returns:
        ids [...], never one of probability 0.
    """
    cumulative = probs.double().cumsum(-1)
    cumulative = cumulative / cumulative[..., -1:]
    index = torch.searchsorted(cumulative, uniform.double()[..., None].contiguous(), right=True)
    return index[..., 0].clamp(max=probs.shape[-1] - 1)


def residual(q: Tensor | ArrayLike, p: Tensor | ArrayLike) -> Tensor:
    """What is left of the verifier's q after drafts from p: (q − p)₊, normalised. `[..., V]`.

    Both are tensors, or arrays or lists of numbers.

    q is the verifier, p the drafter (Leviathan et al. 2023 name them the other way round). Where
    rounding leaves nothing, q itself: then p = q and a rejection has probability zero.
    """
    q, p = torch.as_tensor(q), torch.as_tensor(p)
    left = (q - p).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp(min=1e-45), q)


class RowRandom:
    """Uniform numbers with one stream per row, so a row's draws do not depend on its batch.

    Seeded by (seed, row id): the same prompt gets the same answer whatever runs beside it, and
    after a resume.
    """

    def __init__(self, seed: int, row_ids: list[int]):
        self.seed, self.row_ids = seed, list(row_ids)
        self.generators = [torch.Generator().manual_seed(mix(seed, row)) for row in row_ids]

    def fork(self, number: int) -> "RowRandom":
        """Fresh streams for the same rows, another set for each `number`.

        For a consumer whose number of draws may depend on the batch: it cannot shift the draws of
        this one.
        """
        return RowRandom(mix(self.seed, ~number), self.row_ids)

    def uniform(self, count: int = 1) -> Tensor:
        """[rows, count] in [0, 1), double."""
        draws = [torch.rand(count, generator=g, dtype=torch.double) for g in self.generators]
        return torch.stack(draws)

    def select_rows(self, rows: list[int]) -> None:
        self.row_ids = [self.row_ids[row] for row in rows]
        self.generators = [self.generators[row] for row in rows]


def check_seed(seed: int) -> None:
    """Raise a ValueError for a number that no generator takes."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2^63), got {seed}")


def mix(seed: int, row: int) -> int:
    """A well-spread 63-bit seed from two numbers (splitmix64's finaliser)."""
    z = (seed * 0x9E3779B97F4A7C15 + row * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 1
