"""A benchmark's back end: our own batched loop.

Its batches are not refilled: when an answer ends, the others go on. In service the slot would be
taken at once, so the speed at a concurrency is put together from two measurements of the same
trial: the time of the passes in which every row was still decoding, and the tokens that a row got
from a pass over its whole answer. (Rows of few tokens a pass stay longer, which a mean over the
full passes alone would not see.)
"""

from collections.abc import Mapping, Sequence

from headstart.data.rows.template import template_ids
from headstart.eval.decoding.lossless import compare
from headstart.eval.decoding.speculate import Generated, generate
from headstart.eval.decoding.trial import drafting_for
from headstart.eval.service.latency import Clock
from headstart.eval.service.sweep import OFF, Cell, Measure, Trial
from headstart.eval.service.workload import Prompt, Workload, batch
from headstart.models.drafter import Drafter
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import Shape
from headstart.models.verifier.verifier import Verifier


def ids_of(prompt: Prompt, verifier: Verifier) -> list[int]:
    return template_ids(
        verifier.tokenizer, prompt.messages, prompt.tools, prompt.chat_template_kwargs
    )


def own_loop(
    verifier: Verifier,
    drafter: Drafter,
    shapes: Mapping[str, Shape],
    workloads: Mapping[str, tuple[Workload, list[Prompt]]],
    sampled: bool,
    seed: int,
) -> Measure:
    """What measures a trial of a cell in this process.

    Args:
        shapes: by the name that a cell has.
        sampled: whether drafts are drawn from the drafter's law.
    """

    def measure(cell: Cell, number: int) -> Trial:
        workload, prompts = workloads[cell.workload]
        chosen = batch(prompts, cell.concurrency, number)
        law = Sampling(cell.temperature)
        shape = None if cell.drafts == OFF else shapes[cell.drafts]
        clock = Clock()
        outputs = generate(
            verifier,
            None if shape is None else drafter,
            [ids_of(prompt, verifier) for prompt in chosen],
            shape=shape,
            sampling=law,
            drafting=drafting_for(shape, Drafting(sampled, law)),
            max_new_tokens=workload.max_new_tokens,
            seed=seed,
            row_ids=list(range(cell.concurrency * number, cell.concurrency * (number + 1))),
            timer=clock,
        )
        return trial_of(cell, number, chosen, outputs, clock)

    return measure


def trial_of(
    cell: Cell, number: int, prompts: Sequence[Prompt], outputs: Sequence[Generated], clock: Clock
) -> Trial:
    """What a batch says of its cell."""
    passes = clock.passes()
    full = passes[: min(output.rounds for output in outputs)]
    rounds = sum(output.rounds for output in outputs)
    drafted = sum(sum(output.emitted) for output in outputs)  # without prefill's token
    per_pass = drafted / max(rounds, 1)
    waits = [sum(one.values()) for one in full]
    return Trial(
        cell=cell,
        number=number,
        seconds=clock.laps[-1][1],
        tokens=sum(len(output.tokens) for output in outputs),
        requests=len(outputs),
        full_seconds=sum(waits),
        full_tokens=len(outputs) * len(full) * per_pass,
        first_token=[clock.first_token] * len(outputs),
        waits=waits,
        wait_tokens=len(full) * per_pass,
        parts={
            part: sum(one[part] for one in full) for part in ("proposal", "verification", "rest")
        },
        passes=len(full),
        counts=[
            output.counts(prompt.id, prompt.category)
            for prompt, output in zip(prompts, outputs, strict=True)
        ],
        texts=[output.tokens for output in outputs] if cell.temperature == 0 else [],
    )


def lossless(
    verifier: Verifier, prompts: Sequence[Prompt], plain: Sequence[Trial], drafted: Sequence[Trial]
) -> dict[str, int] | None:
    """Greedy texts of a cell against those of plain decoding; None where there are none.

    Args:
        prompts: of the workload.
    """
    own = {trial.number: trial.texts for trial in plain}
    verdicts: list[str] = []
    for trial in drafted:
        asked = batch(list(prompts), trial.cell.concurrency, trial.number)
        pairs = zip(asked, own.get(trial.number, []), trial.texts, strict=False)
        for prompt, expected, text in pairs:
            ids = [] if expected == text else ids_of(prompt, verifier)
            verdicts.append(compare(verifier, ids, expected, text))
    if not verdicts:
        return None
    return {
        "identical": verdicts.count("identical"),
        "ties": verdicts.count("tie"),
        "different": verdicts.count("different"),
        "prompts": len(verdicts),
    }
