"""Distil a small language model on the verifier's answers, to draft for it.

    accelerate launch train/draft_lm.py --config recipes/draft_lm/tiny.yaml
    accelerate launch -m headstart.train.draft_lm --config recipes/draft_lm/tiny.yaml

Writes what train/eagle3.py writes; a checkpoint is an ordinary model's folder.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.data.collate import Featurizer
from headstart.models.cache import HOLE
from headstart.models.draft_lm import DraftLM, DraftLMConfig
from headstart.models.drafter import Batch
from headstart.models.losses import LossConfig
from headstart.script import run_script
from headstart.train.recipe import CommonRecipe, Featurize, train


@dataclass
class Recipe(CommonRecipe):
    """Everything that decides a run."""

    loss: LossConfig = field(default_factory=lambda: LossConfig(num_steps=1))
    drafter: DraftLMConfig = field(default_factory=DraftLMConfig)
    on_policy: float = 0.0
    """Share of the batches whose answers go on in the drafter's own words, for the verifier to
    score."""

    def __post_init__(self) -> None:
        if not 0 <= self.on_policy <= 1:
            raise ValueError(f"on_policy must be in 0 … 1, got {self.on_policy}")
        if self.loss.num_steps != 1:
            raise ValueError(
                f"loss.num_steps is {self.loss.num_steps}; a language model has one step, later "
                "ones are shifts of it: set it to 1"
            )


class OnPolicy:
    """Some batches continued by the drafter and scored by the verifier (Agarwal et al. 2024, arXiv
    2306.13649): it then also learns on texts that it comes to by its own mistakes.

    In such a batch, the last answer of each document is cut at a random place and goes on as the
    drafter would, at temperature 1, up to the old length: supervision stays where it was.
    """

    def __init__(self, drafter: DraftLM, featurize: Featurize, share: float):
        self.drafter, self.featurize, self.share = drafter, featurize, share
        self.score = Featurizer(drafter.verifier, drafter.feature_layers)

    def __call__(self, batch: Batch) -> Batch:
        if torch.rand(()) >= self.share:
            return self.featurize(batch)
        return self.score(self.continued(batch))

    @torch.no_grad()
    def continued(self, batch: Batch) -> Batch:
        """The batch with other answers; the first token of an answer and its last one stay."""
        ids, turns, documents = (
            batch[name].cpu() for name in ("input_ids", "loss_mask", "document_ids")
        )
        places: list[tuple[int, int, int]] = []  # row, first slot to write, slot after the last
        prefixes: list[Tensor] = []
        for row, of_row in enumerate(documents):
            for document in of_row[of_row >= 0].unique():
                slots = (of_row == document).nonzero()[:, 0]
                answer = slots[(turns[row, slots] == turns[row, slots].max())]
                if turns[row, answer[0]] == 0 or len(answer) < 3:
                    continue
                first = int(answer[torch.randint(1, len(answer) - 1, ())])
                places.append((row, first, int(answer[-1])))
                prefixes.append(ids[row, slots[0] : first])
        if not places:
            return batch
        written = self.write(prefixes, max(end - first for _, first, end in places))
        ids = ids.clone()
        for (row, first, end), text in zip(places, written, strict=True):
            ids[row, first:end] = text[: end - first]
        return {**batch, "input_ids": ids.to(batch["input_ids"].device)}

    def write(self, prefixes: list[Tensor], count: int) -> Tensor:
        """`count` tokens after each prefix, drawn from the drafter, no terminator among them."""
        drafter, lm = self.drafter, self.drafter.lm
        lengths = torch.tensor([len(prefix) for prefix in prefixes])
        ids = pad_sequence(prefixes, batch_first=True).clamp(max=lm.vocab_size - 1)
        slots = torch.arange(ids.shape[1])
        positions = slots.expand_as(ids).masked_fill(slots >= lengths[:, None], HOLE)
        cache = lm.new_cache(len(prefixes))
        forbidden = [t for t in drafter.verifier.terminator_ids if t < drafter.width]
        training = drafter.training
        drafter.eval()
        hidden = lm.states(ids.to(lm.device), (), positions.to(lm.device), cache=cache).last_hidden
        hidden = hidden[torch.arange(len(prefixes)), lengths - 1]
        tokens = []
        for number in range(count):
            logits = drafter.logits(hidden, 0).float()
            logits[:, forbidden] = -torch.inf
            tokens.append(torch.multinomial(logits.softmax(-1).cpu(), 1))  # as resumed: by the CPU
            at = (lengths + number)[:, None].to(lm.device)
            at = at.clamp(max=lm.context_length - 1)  # of a text that is long enough already
            states = lm.states(tokens[-1].to(lm.device), (), at, cache=cache)
            hidden = states.last_hidden[:, 0]
        drafter.train(training)
        return torch.cat(tokens, 1)


def run(recipe: Recipe) -> None:
    """Train to the end of the recipe's budget."""

    def rewrite(drafter: DraftLM, featurize: Featurize) -> Featurize:
        return OnPolicy(drafter, featurize, recipe.on_policy) if recipe.on_policy else featurize

    train(
        recipe,
        "draft_lm",
        lambda verifier, data: DraftLM.create(verifier, recipe.drafter, recipe.loss),
        rewrite,
    )


if __name__ == "__main__":
    run_script(Recipe, run)
