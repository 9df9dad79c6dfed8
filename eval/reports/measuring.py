"""What an acceptance report says of one drafter, measured: replay, decoding, speed."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headstart.data.conversations.law import Law
from headstart.data.conversations.law import check as check_law
from headstart.data.rows import rendering
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding import trial
from headstart.eval.decoding.lossless import judge
from headstart.eval.decoding.trial import Decoded, by_category, pick
from headstart.eval.measures.counts import Counts, summarise
from headstart.eval.measures.quality import Quality, compare_verifiers
from headstart.eval.measures.replay import rank_acceptance, replay_rows
from headstart.eval.reports import report
from headstart.eval.reports.measurement import Measurement, RunSettings
from headstart.eval.reports.progress import Progress, identity
from headstart.models import loading, saved
from headstart.models.drafter import (
    Drafter,
    TrainableDrafter,
    check_depth,
    fingerprint,
)
from headstart.models.proposal import trees
from headstart.models.proposal.trees import Shape
from headstart.models.verifier.verifier import Verifier
from headstart.script import named


@dataclass(kw_only=True)
class Acceptance(Measurement):
    """Settings of a report."""

    drafter: str
    """A checkpoint's folder, prompt-lookup, lookahead, layers:0-5, or a model with the verifier's
    tokenizer."""


def timed_replay(
    drafter: TrainableDrafter,
    rows: list[Row],
    run: RunSettings,
    settings: Acceptance,
    max_new_tokens: int | None = None,
) -> tuple[list[Counts], float]:
    """Counts of the rows, and the seconds taken, verifier included."""
    began = time.monotonic()
    featurize = Featurizer(drafter.verifier, drafter.feature_layers, alone=False)
    length, drafting = settings.draft_length, run.drafts
    counts = replay_rows(drafter, rows, featurize, length, run.law, drafting, max_new_tokens)
    return counts, time.monotonic() - began


def read_rows(verifier: Verifier, run: RunSettings, settings: Measurement) -> list[Row]:
    """The run's conversations, rendered.

    Raises:
        ValueError: data that cannot be read, or answers written under another law.
    """
    name = f"runs[{settings.runs.index(run)}]"
    with named(f"{name}.data"):
        rows, _ = rendering.render_all(
            run.data, verifier.tokenizer, verifier.terminator_ids, settings.max_length
        )
    law = Law(run.temperature, run.top_k, run.top_p)

    def way_out(other: Law) -> str:
        asked = " ".join(f"--{option} {value:g}" for option, value in law.on().items())
        anew = f"write answers anew with data/regenerate.py {asked}"
        if not set(other.on()) <= {"temperature", "top_k", "top_p"}:  # nothing here decodes so
            return anew
        its = ", ".join(f"{option}: {value:g}" for option, value in other.on().items())
        return f"replay needs answers of its own law; give {name} theirs, {{{its}}}, or {anew}"

    with named(f"{name}.data {run.data!r}"):
        check_law(rows, law, way_out)
    return rows


def replayed(
    drafter: Drafter,
    run: RunSettings,
    rows: list[Row],
    decoded: list[Decoded],
    settings: Acceptance,
) -> dict[str, Any] | None:
    """Replay of every row and of the texts just decoded; of these alone where no row is given.

    None for lookups, which do not unroll, and for typical acceptance: replay computes how often the
    exact rule would accept.
    """
    if not isinstance(drafter, TrainableDrafter) or run.typical:
        return None
    again = [d.as_row() for d in decoded]
    same, same_seconds = timed_replay(drafter, again, run, settings, settings.max_new_tokens)
    everything, seconds = same, same_seconds
    if rows:
        everything, seconds = timed_replay(drafter, rows, run, settings)
    return {
        "same_prompts": summarise(same) | {"seconds": same_seconds},
        "all": summarise(everything) | {"seconds": seconds, "categories": by_category(everything)},
    }


def measure_run(
    verifier: Verifier,
    drafter: Drafter,
    run: RunSettings,
    rows: list[Row],
    shapes: list[Shape],
    settings: Acceptance,
) -> list[dict[str, Any]]:
    """Entries of the report's `runs` for one law: of the chain, and of the tree if there is one."""
    # a verifier that was trained with the drafter did not write the rows' answers
    own = [] if loading.tunes_verifier(settings.drafter) else rows
    chosen = pick(rows, settings.decode_prompts)
    greedy = run.temperature == 0
    limit, size = settings.max_new_tokens, settings.batch_size
    plain: list[Shape | None] = [None] if greedy else []
    rules = (run.law, run.drafts, limit, size, settings.seed, run.typical)
    done = trial.decode(verifier, drafter, chosen, plain + shapes, *rules)
    entries = []
    for shape in shapes:
        decoded = [d for d in done if d.name == shape.name]
        counts = [d.counts() for d in decoded]
        sampled = trial.drafting_for(shape, run.drafts).sampled
        entries.append(
            {
                "settings": {
                    "draft_length": shape.depth,
                    "shape": shape.name if shape.branches else "chain",
                    "temperature": run.temperature,
                    "top_p": run.top_p,
                    "top_k": run.top_k,
                    "drafting": "sampled" if sampled else "greedy",
                    "acceptance": run.acceptance,
                    "typical_epsilon": run.typical and run.typical.epsilon,
                    "typical_delta": run.typical and run.typical.delta,
                    "batch_size": size,
                    "max_new_tokens": limit,
                    "seed": settings.seed,
                    "dtype": settings.dtype,
                    "device": settings.device,
                    "data": run.data,
                },
                "overall": summarise(counts),
                "categories": by_category(counts),
                "lossless": judge(verifier, done, shape) if greedy else None,
                "replay": None
                if shape.branches
                else replayed(drafter, run, own, decoded, settings),
                "decoding_seconds": sum(d.seconds for d in decoded),
            }
        )
    return entries


def measure_speed(
    verifier: Verifier, drafter: Drafter, rows: list[Row], tree: list[Shape], settings: Acceptance
) -> list[dict[str, Any]]:
    """Entries of the report's `speed`, under the first run's law."""
    run = settings.runs[0]
    shapes = [*map(trees.chain, settings.speed_draft_lengths), *tree]
    if not shapes or not settings.speed_prompts:
        return []
    timed = pick(pick(rows, settings.decode_prompts), settings.speed_prompts)
    limit = settings.speed_max_new_tokens
    rules = (run.law, run.drafts, limit, 1, settings.seed, run.typical)
    trial.decode(verifier, drafter, timed[:1], [None, *shapes], *rules)  # warm up
    done = trial.decode(verifier, drafter, timed, [None, *shapes], *rules)
    return [entry | {"acceptance": run.acceptance} for entry in trial.speed(done, shapes)]


def check(drafter: Drafter, settings: Acceptance) -> None:
    """Before anything is measured: can it be, of this drafter?

    Raises:
        ValueError: more drafts in a row than it makes, or an optimal tree for one without replay.
    """
    check_depth(drafter.max_depth, settings.draft_length, "draft_length")
    for length in settings.speed_draft_lengths:
        check_depth(drafter.max_depth, length, "speed_draft_lengths")
    if settings.tree is None:
        return
    if trees.optimal_budget(settings.tree) is None:
        depth = trees.parse(settings.tree).depth
        check_depth(drafter.max_depth, depth, f"tree {settings.tree!r}: its depth")
    elif not isinstance(drafter, TrainableDrafter):
        raise ValueError(
            f"tree {settings.tree!r} needs acceptance by rank, which {settings.drafter} cannot "
            "tell without decoding; pass a dynamic or static tree"
        )


def tree_of(drafter: Drafter, settings: Acceptance, rows: list[list[Row]]) -> list[Shape]:
    """The tree asked for, if any.

    An optimal one is fitted to the first run's answers, but for those whose prompts are decoded in
    some run: measured on what it was fitted to, it would seem better than it is.

    Raises:
        ValueError: no answer is left to fit it to.
    """
    if settings.tree is None:
        return []
    budget = trees.optimal_budget(settings.tree)
    if budget is None:
        return [trees.parse(settings.tree)]
    featurize = Featurizer(drafter.verifier, drafter.feature_layers, alone=False)
    depth, ranks = trees.OPTIMAL_BOUNDS
    if drafter.max_depth is not None:
        depth = min(depth, drafter.max_depth)
    decoded = {row.id for read in rows for row in pick(read, settings.decode_prompts)}
    others = [row for row in rows[0] if row.id not in decoded]
    if not others:
        raise ValueError(
            f"decode_prompts {settings.decode_prompts} leaves none of {settings.runs[0].data}'s "
            f"answers to fit tree {settings.tree!r} to, which must not be measured on what it is "
            "fitted to; lower it"
        )
    by_rank = rank_acceptance(drafter, others, featurize, depth, ranks)
    return [trees.optimal(budget, by_rank)]


def quality_of(verifier: Verifier, settings: Acceptance, rows: list[Row]) -> Quality | None:
    """How far a verifier that was trained with the drafter has moved; None for any other."""
    if not loading.tunes_verifier(settings.drafter):
        return None
    name = settings.verifier or saved.read_config(settings.drafter)["headstart"]["verifier"]
    original = Verifier.load(name, settings.dtype, settings.device)
    return compare_verifiers(original, verifier, rows)


def fingerprint_of(drafter: Drafter) -> str | None:
    """None for lookups, which have nothing that could differ."""
    return fingerprint(drafter) if isinstance(drafter, TrainableDrafter) else None


def size_of(verifier: Verifier) -> dict[str, Any]:
    """Hidden size, and how many MTP modules it was pretrained with (0 where its configuration does
    not say)."""
    config = verifier.config
    return {
        "hidden_size": config.hidden_size,
        "mtp_modules": getattr(config, "num_nextn_predict_layers", None) or 0,
    }


def measure(settings: Acceptance, verifier: Verifier, drafter: Drafter) -> dict[str, Any]:
    """The report's content, printed as it grows; runs that a stopped measurement with the same
    settings has finished are taken from `settings.out`."""
    check(drafter, settings)
    trainable = isinstance(drafter, TrainableDrafter)
    rows = [read_rows(verifier, one, settings) for one in settings.runs]
    tree = tree_of(drafter, settings, rows)
    began = time.monotonic()
    quality = quality_of(verifier, settings, rows[0])
    if quality is not None:
        print(f"\n{quality.line()}", flush=True)
    shapes = [trees.chain(settings.draft_length), *tree]
    fingerprints = [verifier.fingerprint(), fingerprint_of(drafter)]
    done = Progress(Path(settings.out), identity(settings, fingerprints, rows, shapes))
    runs = []
    for number, (one, read) in enumerate(zip(settings.runs, rows, strict=True)):
        entries = done.of(number)
        if entries is None:
            entries = measure_run(verifier, drafter, one, read, shapes, settings)
            done.ended(number, entries)
        runs += entries
        report.print_law(entries)
    speed = measure_speed(verifier, drafter, rows[0], tree, settings)
    report.print_speed(speed)
    return {
        "schema": 1,
        "drafter": {
            "type": loading.kind_of(drafter),
            "path": settings.drafter,
            "parameters": sum(p.numel() for p in drafter.parameters()) if trainable else 0,
            "fingerprint": fingerprint_of(drafter),
        },
        "verifier": {
            "name": verifier.name,
            "fingerprint": verifier.fingerprint(),
            "quality": quality and asdict(quality),
            **size_of(verifier),
        },
        "runs": runs,
        "speed": speed,
        "provenance": report.provenance(asdict(settings)) | {"seconds": time.monotonic() - began},
    }
