"""A small vocabulary, whose joint laws can be written out."""

import torch
from tiny import verifier

from headstart.models.proposal.sampling import Sampling

PROMPTS = [[5, 9, 11], [7], [20, 4, 33, 34, 35, 36, 37, 38, 39], [50, 51]]


KNOWN: dict[tuple, list[int]] = {}


def plain(model, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without cache, drafts or terminators; texts are kept over the tests."""
    text = KNOWN.setdefault((model.name, model.num_layers, *prompt), list(prompt))
    while len(text) < len(prompt) + count:
        hidden = model.states(torch.tensor([text])).last_hidden[0, -1]
        text.append(int(model.logits(hidden).argmax()))
    return text[len(prompt) : len(prompt) + count]


def endless(family="llama", **overrides):
    model = verifier(family, **({"num_hidden_layers": 4} | overrides))
    model.terminator_ids = ()
    return model


WIDTH, END, ROWS = 6, 2, 20_000


PROMPT = [3, 1, 4]


def small():
    """Vocabulary 6, of which 2 is the terminator; flat enough that every token occurs."""
    model = verifier(vocab_size=WIDTH, num_hidden_layers=2)
    with torch.no_grad():
        model.head.weight.mul_(0.3)
    assert model.terminator_ids == (END,)
    return model


def exact_law(model, sampling: Sampling) -> torch.Tensor:
    """[7, 7, 7] law of the first three tokens; index 6 where the text has ended."""
    law = torch.zeros(7, 7, 7, dtype=torch.double)

    def follow(text: tuple[int, ...], weight: float) -> None:
        if len(text) == 3 or text[-1:] == (END,):
            law[text + (WIDTH,) * (3 - len(text))] = weight
            return
        hidden = model.states(torch.tensor([PROMPT + list(text)])).last_hidden[0, -1]
        for token, q in enumerate(sampling.probs(model.logits(hidden)).tolist()):
            follow((*text, token), weight * q)

    follow((), 1.0)
    return law
