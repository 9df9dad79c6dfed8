"""Is the output the verifier's own? For a pair of your choice, or for the tests.

    python eval/losslessness.py --drafter outputs/quickstart/best --tree dynamic

Decodes prompts greedily with and without drafts and compares token by token; then draws many
samples of the same prompts and compares how often each next token came with the verifier's law.
Ends with code 1 where either says that the output is not the verifier's. With `--tasks`, counts
the tasks solved without drafts and with instead.

"""

import sys
from dataclasses import dataclass
from typing import Any, Literal

from headstart.data.rows.row import Row
from headstart.eval.decoding import tasks, trial
from headstart.eval.decoding.lossless import (
    SIGNIFICANCE,
    ChiSquare,
    chi_square,  # noqa: F401  (a public name)
    judge,
    next_token_test,
    together,
)
from headstart.eval.decoding.prompts import read_prompts
from headstart.eval.decoding.trial import prompt_of
from headstart.eval.reports import report
from headstart.models.drafter import Drafter
from headstart.models.loading import load_pair
from headstart.models.proposal import trees
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling, check_seed, mix
from headstart.models.proposal.trees import Shape
from headstart.models.verifier.verifier import Verifier
from headstart.script import named


@dataclass
class Losslessness:
    """Settings of the check."""

    drafter: str
    """A checkpoint's folder, prompt-lookup, lookahead, layers:0-5, or a model with the verifier's
    tokenizer."""
    verifier: str | None = None
    """Default: the verifier the drafter was trained for; needed for any other drafter."""
    allow_verifier: bool = False
    """Accept a verifier with another fingerprint, such as a quantised copy of the drafter's."""
    prompts: str = "data/smollm2/eval.jsonl"
    """Conversations, answered or not; what comes before their first answer is continued."""
    num_prompts: int = 24
    """Decoded greedily, dealt evenly over the categories; 0: all."""
    draft_length: int = 4
    """K of the chain."""
    tree: str | None = None
    """Check a tree too: dynamic:depth=5,top_k=10,total=60, static:4x2x2 or static:paths.json."""
    max_new_tokens: int = 64
    """Longest greedy answer."""
    temperature: float = 0.7
    """Of the sampled part."""
    top_k: int = 0
    top_p: float = 1.0
    drafting: Literal["sampled", "greedy"] = "sampled"
    """Of the sampled part; a dynamic tree's drafts are never sampled."""
    samples: int = 1000
    """Drawn for each sampled prompt; 0: no sampled part."""
    sampled_prompts: int = 2
    tasks: str | None = None
    """Score tasks with right answers instead, without drafts and with: conversations that end in
    the right answer, such as data/tasks/short.jsonl."""
    task_samples: int = 8
    """Texts of each task above temperature 0, without drafts and with."""
    batch_size: int = 8
    """Prompts decoded together; samples are drawn 32 times as many at once."""
    max_length: int = 1024
    """Longest conversation read, in tokens."""
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.temperature == 0:
            raise ValueError(
                "temperature is of the sampled part and must be above 0; greedy decoding is always "
                "checked"
            )
        Sampling(self.temperature, self.top_k, self.top_p)
        for name in (
            "max_new_tokens",
            "batch_size",
            "sampled_prompts",
            "max_length",
            "task_samples",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("num_prompts", "samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        check_seed(self.seed)
        trees.chain(self.draft_length)
        if self.tree is not None and trees.optimal_budget(self.tree) is not None:
            raise ValueError(
                f"tree: {self.tree} is fitted to a drafter by eval/acceptance.py, which checks its "
                "texts too; pass a static or dynamic tree here"
            )
        if self.tree is not None:
            trees.parse(self.tree)


def greedy_part(
    verifier: Verifier, drafter: Drafter, rows: list[Row], shapes: list[Shape], s: Losslessness
) -> list[dict[str, Any]]:
    greedy = (Sampling(), Drafting(False, Sampling()))
    everything: list[Shape | None] = [None, *shapes]
    limits = (s.max_new_tokens, s.batch_size, s.seed)
    done = trial.decode(verifier, drafter, rows, everything, *greedy, *limits)
    return [judge(verifier, done, shape) for shape in shapes]


def sampled_part(
    verifier: Verifier, drafter: Drafter, row: Row, shape: Shape, s: Losslessness, number: int
) -> ChiSquare:
    """Of one prompt, the `number`-th, for one shape."""
    law = Sampling(s.temperature, s.top_k, s.top_p)
    drafts = Drafting(s.drafting == "sampled", law)
    # draws of their own for each prompt: the tests are added up as independent ones
    limits = (shape.depth + 1, 32 * s.batch_size, mix(s.seed, number))
    done = trial.decode(verifier, drafter, [row] * s.samples, [shape], law, drafts, *limits)
    return next_token_test(verifier, prompt_of(row), [d.output.tokens for d in done], law)


def score_tasks(verifier: Verifier, drafter: Drafter, shapes: list[Shape], s: Losslessness) -> bool:
    """Print how many tasks are solved without drafts and with; whether no difference is more than
    chance."""
    with named("tasks"):
        found = tasks.read(s.tasks, verifier.tokenizer, s.max_length)
    lines, wrong = [], []
    greedy, law = Sampling(), Sampling(s.temperature, s.top_k, s.top_p)
    parts = [
        (greedy, Drafting(False, greedy), 1),
        (law, Drafting(s.drafting == "sampled", law), s.task_samples),
    ]
    for shape in shapes:
        for sampling, drafting, samples in parts:
            limits = (s.max_new_tokens, s.batch_size, s.seed, samples)
            scored = tasks.score(verifier, drafter, found, shape, sampling, drafting, *limits)
            at = f"T = {sampling.temperature:g}"
            numbers = [f"{right / scored.texts:.3f}" for right in (scored.plain, scored.drafted)]
            lines.append([shape.name, at, str(scored.texts), *numbers, f"{scored.p_value:.4f}"])
            if scored.p_value < SIGNIFICANCE or (samples == 1 and scored.plain != scored.drafted):
                wrong.append(f"{shape.name} at {at}")
    header = ["drafts", "law", "texts", "right without drafts", "right with", "p"]
    print(f"\n{len(found)} tasks of {s.tasks}, {s.dtype}\n\n{report.table(header, lines)}")
    verdict = "As many tasks are solved with drafts as without, chance apart."
    if wrong:
        verdict = f"DRAFTS CHANGE THE SCORE: {', '.join(wrong)}. Exact decoding does not."
    print(f"\n{verdict}")
    return not wrong


def run(settings: Losslessness) -> bool:
    """Check, print, and say whether the output is the verifier's."""
    verifier, drafter = load_pair(
        settings.verifier,
        settings.drafter,
        settings.dtype,
        settings.device,
        settings.allow_verifier,
    )
    shapes: list[Shape] = [trees.chain(settings.draft_length)]
    if settings.tree is not None:
        shapes.append(trees.parse(settings.tree))
    if settings.tasks is not None:
        return score_tasks(verifier, drafter, shapes, settings)
    with named("prompts"):
        rows = read_prompts(verifier, settings.prompts, settings.max_length)
    chosen = trial.pick(rows, settings.num_prompts)
    verdicts = greedy_part(verifier, drafter, chosen, shapes, settings)
    lines = [
        [shape.name, *(str(v[key]) for key in ("prompts", "identical", "ties", "different"))]
        for shape, v in zip(shapes, verdicts, strict=True)
    ]
    print(f"\nT = 0, up to {settings.max_new_tokens} tokens, {settings.dtype}: against the "
          f"verifier's own text of this run\n\n"
          f"{report.table(['drafts', 'prompts', 'equal', 'tie', 'different'], lines)}")  # fmt: skip
    wrong = [shape.name for shape, v in zip(shapes, verdicts, strict=True) if v["different"]]
    told = "; nothing was sampled"
    if settings.samples:
        sampled = trial.pick(rows, settings.sampled_prompts)
        lines, tested = [], True
        for shape in shapes:
            every = together(
                [
                    sampled_part(verifier, drafter, row, shape, settings, number)
                    for number, row in enumerate(sampled)
                ]
            )
            tested = tested and every.degrees > 0
            lines.append([shape.name, str(settings.samples * len(sampled)),
                          f"{every.statistic:.1f}", str(every.degrees),
                          f"{every.p_value:.4f}"])  # fmt: skip
            if every.p_value < SIGNIFICANCE:
                wrong.append(f"{shape.name} at T = {settings.temperature:g}")
        told = ", and no sampled one contradicts its law"
        if not tested:
            told = "; of the samples too few share a beginning to say anything: raise --samples"
        header = ["drafts", "texts", "chi-square", "degrees", "p"]
        print(f"\nT = {settings.temperature:g}: next tokens against the verifier's law\n")
        print(report.table(header, lines))
    verdict = f"Lossless: every greedy text is the verifier's own, ties apart{told}."
    if wrong:
        verdict = (
            f"NOT LOSSLESS: {', '.join(wrong)}. In float32 this is a fault, the drafter's or ours; "
            "of bfloat16 see docs/losslessness.md."
        )
    print(f"\n{verdict}")
    return not wrong


if __name__ == "__main__":
    from headstart.script import run_script

    def check(settings: Losslessness) -> None:
        if not run(settings):
            sys.exit(1)

    run_script(Losslessness, check)
