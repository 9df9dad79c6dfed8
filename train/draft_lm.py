"""Distil a small language model on the verifier's answers, to draft for it.

    accelerate launch train/draft_lm.py --config recipes/draft_lm/tiny.yaml
    accelerate launch -m headstart.train.draft_lm --config recipes/draft_lm/tiny.yaml

Writes what train/eagle3.py writes; a checkpoint is an ordinary model's folder.
"""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding.speculate import generate
from headstart.models.batch import Batch
from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.losses import LossConfig
from headstart.models.proposal.sampling import Sampling
from headstart.script import run_script
from headstart.train.run.recipe import train
from headstart.train.run.settings import CommonRecipe, Featurize, Script


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
            text = text[: end - first]
            ids[row, first : first + len(text)] = text
        return {**batch, "input_ids": ids.to(batch["input_ids"].device)}

    def write(self, prefixes: list[Tensor], count: int) -> Tensor:
        """`count` tokens after each prefix, drawn from the drafter, no terminator among them; fewer
        where the longest of them would not fit its context."""
        drafter = self.drafter
        writer = copy.copy(drafter.lm)
        writer.terminator_ids = ()
        forbidden = [t for t in drafter.verifier.terminator_ids if t < drafter.width]
        forbidden = torch.tensor(forbidden, dtype=torch.long, device=writer.device)
        writer.logits = lambda hidden: drafter.logits(hidden, 0).index_fill(
            -1, forbidden, -torch.inf
        )
        room = writer.context_length - max(map(len, prefixes))
        training = drafter.training
        drafter.eval()
        written = generate(
            writer,
            None,
            [prefix.clamp(max=writer.vocab_size - 1).tolist() for prefix in prefixes],
            shape=None,
            sampling=Sampling(1.0),
            drafting=None,
            max_new_tokens=min(count, room),
            seed=int(torch.randint(2**31, ())),  # of the generator that a checkpoint restores
        )
        drafter.train(training)
        return torch.tensor([text.tokens for text in written])


def run(recipe: Recipe) -> None:
    """Train to the end of the recipe's budget."""

    def rewrite(drafter: DraftLM, featurize: Featurize) -> Featurize:
        return OnPolicy(drafter, featurize, recipe.on_policy) if recipe.on_policy else featurize

    script = Script(
        "draft_lm",
        lambda verifier, counts: DraftLM.create(verifier, recipe.drafter, recipe.loss),
        check=recipe.drafter.check,
        rewrite=rewrite,
    )
    train(recipe, script)


if __name__ == "__main__":
    run_script(Recipe, run)
