"""Acceptance report of a drafter: how much of what it drafts its frozen verifier accepts.

    python eval/acceptance.py --drafter outputs/quickstart/best --out outputs/quickstart

Replays the evaluation answers (every prompt, seconds), decodes some of the prompts for real, checks
that the text is the verifier's own, measures the speed of the same loop with and without drafts,
and writes report.json, report.md and acceptance.png.
"""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from headstart.data import render
from headstart.data.collate import Featurizer
from headstart.data.render import Row
from headstart.eval import report
from headstart.eval.losslessness import compare
from headstart.eval.measures import Counts, summarise
from headstart.eval.replay import replay_rows
from headstart.eval.speculate import Generated, Timer, generate
from headstart.eval.speedup import predicted_speedup
from headstart.models import drafter as drafters
from headstart.models.drafter import Drafting, TrainableDrafter
from headstart.models.sampling import Sampling
from headstart.models.verifier import Verifier


@dataclass
class RunSettings:
    """One law of decoding to measure under."""

    data: str = "data/smollm2/eval.jsonl"
    """Conversations whose answers the verifier wrote at this run's temperature."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    drafting: str = "greedy"
    """greedy: the drafter's best token; sampled: drawn from its law at the same settings."""

    def __post_init__(self) -> None:
        Sampling(self.temperature, self.top_k, self.top_p)
        if self.drafting not in ("greedy", "sampled"):
            raise ValueError(f"drafting must be greedy or sampled, got {self.drafting!r}")


@dataclass
class Acceptance:
    """Settings of a report."""

    drafter: str
    """Folder of a checkpoint, such as outputs/quickstart/best."""
    out: str
    """Folder for report.json, report.md and acceptance.png."""
    verifier: str | None = None
    """Default: the verifier the drafter was trained for."""
    allow_verifier: bool = False
    """Accept a verifier with another fingerprint, such as a quantised copy of the drafter's."""
    runs: list[RunSettings] = field(
        default_factory=lambda: [
            RunSettings(),
            RunSettings("data/smollm2/eval-t1.jsonl", temperature=1.0, drafting="sampled"),
        ]
    )
    draft_length: int = 4
    """K, of replay and decoding."""
    decode_prompts: int = 24
    """Prompts decoded for real, dealt evenly over the categories; 0: all."""
    speed_prompts: int = 12
    """Of these, timed with and without drafts, interleaved, one at a time."""
    speed_draft_lengths: tuple[int, ...] = (1, 2, 4)
    max_new_tokens: int = 64
    """Longest decoded answer."""
    max_length: int = 1024
    """Longest conversation replayed, in tokens."""
    batch_size: int = 8
    """Prompts decoded together (not while timing)."""
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        lengths = (self.draft_length, *self.speed_draft_lengths)
        if min(lengths) < 1:
            raise ValueError(f"draft lengths must be 1 or more, got {min(lengths)}")
        for name in ("max_new_tokens", "max_length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("decode_prompts", "speed_prompts"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 (all) or more, got {getattr(self, name)}")
        if not self.runs:
            raise ValueError("runs must name at least one law to measure under")


def pick(rows: list[Row], count: int) -> list[Row]:
    """`count` rows dealt evenly over the categories, in file order; 0: all."""
    if count == 0 or count >= len(rows):
        return rows
    by_category: dict[str, list[Row]] = {}
    for row in rows:
        by_category.setdefault(row.category, []).append(row)
    dealt: list[Row] = []
    for turn in range(count):
        dealt += [group[turn] for group in by_category.values() if turn < len(group)]
    chosen = {id(row) for row in dealt[:count]}
    return [row for row in rows if id(row) in chosen]


def prompt_of(row: Row) -> list[int]:
    """The ids before the first answer of a row."""
    return row.input_ids[: next(i for i, turn in enumerate(row.loss_mask) if turn)]


def timed_replay(
    drafter: TrainableDrafter,
    rows: list[Row],
    run: RunSettings,
    settings: Acceptance,
    max_new_tokens: int | None = None,
) -> tuple[list[Counts], float]:
    """Counts of the rows, and the seconds taken, verifier included."""
    began = time.monotonic()
    sampling = Sampling(run.temperature, run.top_k, run.top_p)
    drafting = Drafting(run.drafting == "sampled", sampling)
    featurize = Featurizer(drafter.verifier, drafter.feature_layers)
    length = settings.draft_length
    counts = replay_rows(drafter, rows, featurize, length, sampling, drafting, max_new_tokens)
    return counts, time.monotonic() - began


@dataclass
class Decoded:
    """One prompt, decoded with a draft length (0: plainly)."""

    row: Row
    draft_length: int
    output: Generated
    seconds: float
    timer: Timer


def decode(
    drafter: TrainableDrafter,
    rows: list[Row],
    run: RunSettings,
    settings: Acceptance,
    lengths: tuple[int, ...],
    batch_size: int,
) -> list[Decoded]:
    """Decode every batch of rows with each of `lengths` in turn (interleaved, for fair timing)."""
    sampling = Sampling(run.temperature, run.top_k, run.top_p)
    drafting = Drafting(run.drafting == "sampled", sampling)
    done = []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        for length in lengths:
            timer = Timer()
            began = time.monotonic()
            outputs = generate(
                drafter.verifier,
                drafter if length else None,
                [prompt_of(row) for row in part],
                draft_length=length,
                sampling=sampling,
                drafting=drafting,
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed,
                row_ids=list(range(start, start + len(part))),
                timer=timer,
            )
            seconds = time.monotonic() - began
            done += [
                Decoded(row, length, output, seconds / len(part), timer)
                for row, output in zip(part, outputs, strict=True)
            ]
    return done


def by_category(counts: list[Counts]) -> dict[str, Any]:
    names = sorted({c.category for c in counts})
    return {name: summarise([c for c in counts if c.category == name]) for name in names}


def decoded_row(decoded: Decoded) -> Row:
    """The text just decoded, as a row to replay."""
    prompt = prompt_of(decoded.row)
    answer = decoded.output.tokens
    row = decoded.row
    return Row(
        input_ids=prompt + answer,
        loss_mask=[0] * len(prompt) + [1] * len(answer),
        id=row.id,
        category=row.category,
        temperature=row.temperature,
    )


def read_rows(verifier: Verifier, run: RunSettings, settings: Acceptance) -> list[Row]:
    """The run's conversations, rendered.

    Raises:
        ValueError: data that cannot be read, or answers written at another temperature.
    """
    rows, _ = render.render_all(
        run.data, verifier.tokenizer, verifier.terminator_ids, settings.max_length
    )
    for row in rows:
        if row.temperature is not None and row.temperature != run.temperature:
            raise ValueError(
                f"{run.data}: {row.id} was answered at temperature {row.temperature}, the run has "
                f"{run.temperature}; replay needs answers written at its own temperature"
            )
    return rows


def measure_run(
    drafter: TrainableDrafter, run: RunSettings, rows: list[Row], settings: Acceptance
) -> tuple[dict[str, Any], list[Decoded]]:
    """One entry of the report's `runs`, and everything decoded for it."""
    verifier = drafter.verifier
    everything, seconds = timed_replay(drafter, rows, run, settings)
    chosen = pick(rows, settings.decode_prompts)
    plain = [0] if run.temperature == 0 else []
    timed = pick(chosen, settings.speed_prompts) if run is settings.runs[0] else []
    lengths = tuple(dict.fromkeys([0, settings.draft_length, *settings.speed_draft_lengths]))
    decode(drafter, chosen[:1], run, settings, (0, settings.draft_length), 1)  # warm up
    done = decode(drafter, timed, run, settings, lengths, 1)
    others = [row for row in chosen if id(row) not in {id(r) for r in timed}]
    rest = (*plain, settings.draft_length)
    done += decode(drafter, others, run, settings, rest, settings.batch_size)
    drafted = [d for d in done if d.draft_length == settings.draft_length]
    counts = [d.output.counts(d.row.id, d.row.category) for d in drafted]
    again = [decoded_row(d) for d in drafted]
    limit = settings.max_new_tokens
    same, same_seconds = timed_replay(drafter, again, run, settings, limit)
    entry = {
        "settings": {
            "draft_length": settings.draft_length,
            "shape": "chain",
            "temperature": run.temperature,
            "top_p": run.top_p,
            "top_k": run.top_k,
            "drafting": run.drafting,
            "batch_size": settings.batch_size,
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
            "dtype": settings.dtype,
            "device": settings.device,
            "data": run.data,
        },
        "overall": summarise(counts),
        "categories": by_category(counts),
        "lossless": lossless(verifier, done, settings) if run.temperature == 0 else None,
        "replay": {
            "same_prompts": summarise(same) | {"seconds": same_seconds},
            "all": summarise(everything)
            | {"seconds": seconds, "categories": by_category(everything)},
        },
        "decoding_seconds": sum(d.seconds for d in drafted),
    }
    return entry, [d for d in done if id(d.row) in {id(r) for r in timed}]


def lossless(verifier: Verifier, done: list[Decoded], settings: Acceptance) -> dict[str, Any]:
    """Each prompt's text with drafts against its text without, decoded in the same run."""
    plain = {id(d.row): d.output.tokens for d in done if d.draft_length == 0}
    drafted = [d for d in done if d.draft_length == settings.draft_length]
    verdicts = [
        compare(verifier, prompt_of(d.row), plain[id(d.row)], d.output.tokens) for d in drafted
    ]
    return {
        "identical": verdicts.count("identical"),
        "ties": verdicts.count("tie"),
        "different": verdicts.count("different"),
        "prompts": len(drafted),
    }


def speed(timed: list[Decoded], lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Speedup of each draft length, measured and predicted.

    The measured one is total time without / with drafts over the same prompts, its interval by
    bootstrap over prompts. A prediction needs c and v_N, which come from the same runs' timers.
    """
    plain = {id(d.row): d for d in timed if d.draft_length == 0}
    passes = sum(d.timer.rounds for d in plain.values())
    if not passes:  # nothing was timed, or every answer ended in prefill
        return []
    pass_seconds = sum(d.timer.verification for d in plain.values()) / passes
    entries = []
    for length in lengths:
        drafted = [d for d in timed if d.draft_length == length]
        without = torch.tensor([plain[id(d.row)].seconds for d in drafted])
        seconds = torch.tensor([d.seconds for d in drafted])
        generator = torch.Generator().manual_seed(0)
        sample = torch.randint(len(drafted), (1000, len(drafted)), generator=generator)
        resampled = without[sample].sum(1) / seconds[sample].sum(1)
        rounds = sum(d.timer.rounds for d in drafted)
        steps = sum(sum(d.output.drafted) for d in drafted)
        drafting = sum(d.timer.proposal + d.timer.upkeep for d in drafted)
        cost_ratio = drafting / max(steps, 1) / pass_seconds
        verification = sum(d.timer.verification for d in drafted) / max(rounds, 1)
        overhead = verification / pass_seconds - 1
        measures = summarise([d.output.counts(d.row.id) for d in drafted])
        alpha = measures["acceptance_rate"]["value"] or 0.0
        entries.append(
            {
                "draft_length": length,
                "measured": float(without.sum() / seconds.sum()),
                "low": float(resampled.quantile(0.025)) if len(drafted) > 1 else None,
                "high": float(resampled.quantile(0.975)) if len(drafted) > 1 else None,
                "median": float((without / seconds).median()),
                "predicted": predicted_speedup(alpha, length, cost_ratio, overhead),
                "cost_ratio": cost_ratio,
                "verify_overhead": overhead,
                "acceptance_length": measures["acceptance_length"]["value"],
                "categories": {
                    name: float(
                        sum(plain[id(d.row)].seconds for d in drafted if d.row.category == name)
                        / sum(d.seconds for d in drafted if d.row.category == name)
                    )
                    for name in sorted({d.row.category for d in drafted})
                },
            }
        )
    return entries


def run(settings: Acceptance) -> None:
    """Measure, print, and write the report."""
    out = report.folder(settings.out)  # before anything is measured that could not be written
    config = drafters.read_config(settings.drafter)
    name = settings.verifier or config["headstart"]["verifier"]
    verifier = Verifier.load(name, settings.dtype, settings.device)
    drafter = drafters.load(settings.drafter, verifier, settings.allow_verifier).eval()
    rows = [read_rows(verifier, one, settings) for one in settings.runs]
    began = time.monotonic()
    runs, timed = [], []
    for one, read in zip(settings.runs, rows, strict=True):
        entry, decoded = measure_run(drafter, one, read, settings)
        runs.append(entry)
        timed += decoded
        report.print_run(entry)
    result = {
        "schema": 1,
        "drafter": {
            "type": config["headstart"]["type"],
            "path": settings.drafter,
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "fingerprint": drafters.fingerprint(drafter),
        },
        "verifier": {"name": name, "fingerprint": verifier.fingerprint()},
        "runs": runs,
        "speed": speed(timed, settings.speed_draft_lengths),
        "provenance": report.provenance(asdict(settings)) | {"seconds": time.monotonic() - began},
    }
    report.print_speed(result["speed"])
    report.write(result, out)
    print(f"wrote {out}/report.json, report.md, acceptance.png")


if __name__ == "__main__":
    from headstart.script import run_script

    run_script(Acceptance, run)
