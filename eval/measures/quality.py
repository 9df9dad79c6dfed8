"""How far a verifier that was trained with its drafter has moved from the original.

Legend: T tokens of a text, H hidden size.
"""

from dataclasses import dataclass

import torch

from headstart.data.rows.row import Row
from headstart.models.verifier.verifier import Verifier

KL_LIMIT = 0.02  # nats a token
PERPLEXITY_LIMIT = 1.02  # tuned / original
_CHUNK = 512  # positions whose logits are held at once


@dataclass
class Quality:
    """Tuned against original verifier, over the answer tokens of held-out texts."""

    tokens: int
    kl: float
    """Mean KL divergence from the original to the tuned verifier, in nats a token."""
    agreement: float
    """Share of tokens whose likeliest successor is the same."""
    perplexity_original: float
    perplexity_tuned: float

    @property
    def moved(self) -> bool:
        ratio = self.perplexity_tuned / self.perplexity_original
        return self.kl > KL_LIMIT or ratio > PERPLEXITY_LIMIT

    def line(self) -> str:
        """In words, with a warning where quality moved."""
        text = (
            f"The verifier was trained with this drafter: over {self.tokens} held-out answer "
            f"tokens, KL from the original {self.kl:.4f} nats a token, the same best token on "
            f"{self.agreement:.1%}, perplexity {self.perplexity_tuned:.3f} (original "
            f"{self.perplexity_original:.3f}). Its text is not the original's: lossless means "
            "the tuned verifier's own."
        )
        if self.moved:
            text += (
                f" WARNING: quality moved (limits: KL {KL_LIMIT}, perplexity × {PERPLEXITY_LIMIT})."
            )
        return text


@torch.no_grad()
def compare_verifiers(original: Verifier, tuned: Verifier, rows: list[Row]) -> Quality:
    """Both verifiers over the same texts; their output heads may differ."""
    sums = torch.zeros(5, dtype=torch.double)  # tokens, KL, agreement, surprisal of each
    for row in rows:
        ids = torch.tensor([row.input_ids], device=original.device)
        slots = torch.tensor(row.loss_mask[1:]).nonzero()[:, 0]  # x_{t+1} is an answer's
        hidden = [v.states(ids.to(v.device), ()).last_hidden[0] for v in (original, tuned)]
        for part in slots.split(_CHUNK):
            log_q, log_r = (
                v.logits(h[part]).double().log_softmax(-1).cpu()
                for v, h in zip((original, tuned), hidden, strict=True)
            )
            token = ids[0, part + 1].cpu()[:, None]
            sums += torch.stack(
                [
                    torch.tensor(len(part), dtype=torch.double),
                    (log_q.exp() * (log_q - log_r)).sum(),
                    (log_q.argmax(-1) == log_r.argmax(-1)).double().sum(),
                    -log_q.gather(1, token).sum(),
                    -log_r.gather(1, token).sum(),
                ]
            )
    tokens, kl, agreement, surprisal, tuned_surprisal = sums.tolist()
    tokens = max(tokens, 1.0)
    perplexities = torch.tensor([surprisal, tuned_surprisal]).div(tokens).exp().tolist()
    return Quality(int(tokens), kl / tokens, agreement / tokens, *perplexities)
