"""Several drafters of one verifier, measured on the same prompts: one table and one picture.

    python eval/compare.py --verifier embedded/smollm2-135m --tree dynamic --out outputs/compare \\
        --drafters '[outputs/quickstart/best, prompt-lookup, "layers:0-5"]'

A drafter is named as for eval/acceptance.py, whose functions measure it, each in a run of its own;
its full report lies in OUT/<drafter>/report.json. A stopped comparison is continued by the same
command: what is finished is not measured again. The folder of an earlier report, such as
outputs/quickstart, stands for its drafter, if it was measured with the same settings.
"""

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headstart.data.rows.row import Row
from headstart.eval.decoding.trial import pick
from headstart.eval.measures.replay import turns
from headstart.eval.reports import measuring, report, side_by_side
from headstart.eval.reports.measurement import Measurement, RunSettings, check_data
from headstart.eval.reports.measuring import Acceptance, fingerprint_of
from headstart.eval.reports.side_by_side import Compared
from headstart.lock import only_writer
from headstart.models import loading, saved
from headstart.models.loading import check_name, load
from headstart.models.proposal import trees
from headstart.models.verifier.verifier import Verifier
from headstart.script import named

_FREE = ("out", "verifier", "allow_verifier", "runs", "tree", "batch_size")
"""Settings in which reports may differ, or which are compared in another way."""


@dataclass(kw_only=True)
class Compare(Measurement):
    """Settings of a comparison: what is measured, and of whom."""

    drafters: list[str]
    """Each a checkpoint's folder, prompt-lookup, lookahead, layers:0-5, a model with the verifier's
    tokenizer, or the folder of an earlier report; one with a comma needs quotes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drafters:
            raise ValueError("drafters must name at least one")


# ---- names ---------------------------------------------------------------------------------------


def labels(drafters: list[str]) -> list[str]:
    """A short name for each, fit for a folder; where short ones are equal, longer ones.

    Raises:
        ValueError: a drafter that is there twice.
    """
    choices = [_choices(name) for name in drafters]
    level = [0] * len(drafters)
    while True:
        names = [of[i] for of, i in zip(choices, level, strict=True)]
        equal = [i for i, name in enumerate(names) if names.count(name) > 1]
        longer = [i for i in equal if level[i] + 1 < len(choices[i])]
        if not equal:
            return names
        if not longer:
            raise ValueError(f"drafters: {drafters[equal[0]]!r} is there twice; name it once")
        for i in longer:
            level[i] += 1


def _choices(name: str) -> list[str]:
    """outputs/eagle3/best: eagle3, outputs-eagle3, eagle3-best, outputs-eagle3-best."""
    parts = [re.sub(r"[^\w.=,-]+", "-", part) for part in Path(name).parts if part != "/"]
    run = list(parts)
    while len(run) > 1 and re.fullmatch(r"best|checkpoints|step-\d+", run[-1]):
        run.pop()
    found = ["-".join(run[i:]) for i in reversed(range(len(run)))]
    return found + ["-".join(parts[i:]) for i in reversed(range(len(run)))]


def verifier_name(settings: Compare) -> str:
    """The verifier given, else that of the first drafter that was made for one.

    Raises:
        ValueError: there is none.
    """
    if settings.verifier is not None:
        return settings.verifier
    for name in settings.drafters:
        if (Path(name) / "report.json").is_file():
            return read_report(Path(name) / "report.json")[0]["verifier"]["name"]
        if loading.is_checkpoint(name):
            return saved.read_config(name)["headstart"]["verifier"]
    raise ValueError(
        "verifier: none of the drafters was made for one in particular; pass --verifier, such as "
        "embedded/smollm2-135m"
    )


# ---- reports that are there already --------------------------------------------------------------


def read_report(path: Path) -> tuple[dict[str, Any], Acceptance]:
    """A report and the settings it was measured with.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        given = result["provenance"]["recipe"]
        runs = [RunSettings(**one) for one in given["runs"]]
        lengths = tuple(given["speed_draft_lengths"])
        made = Acceptance(**(given | {"runs": runs, "speed_draft_lengths": lengths}))
        if result["schema"] != 1:
            raise ValueError("another schema")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no report of this version of eval/acceptance.py; measure that drafter again"
        ) from error
    return result, made


def differences(
    result: dict[str, Any],
    made: Acceptance,
    wanted: Acceptance,
    verifier: Verifier,
    rows: list[list[Row]],
) -> list[tuple[str, Any, Any]]:
    """In what a report was measured otherwise than wanted: (setting, its value, the wanted one)."""
    pairs = [("the verifier", result["verifier"]["fingerprint"], verifier.fingerprint())]
    for field in fields(Measurement):
        if field.name not in _FREE:
            pairs.append((field.name, getattr(made, field.name), getattr(wanted, field.name)))
    pairs.append(("runs: how many", len(made.runs), len(wanted.runs)))
    for i, (its, ours) in enumerate(zip(made.runs, wanted.runs, strict=False)):
        for field in fields(RunSettings):
            name = f"runs[{i}].{field.name}"
            pairs.append((name, getattr(its, field.name), getattr(ours, field.name)))
    for one, read, (chain, *_) in zip(made.runs, rows, report.by_law(result), strict=False):
        # the same file may have been another one then
        decoded = len({row.id for row in pick(read, wanted.decode_prompts)})
        pairs.append((f"{one.data}: prompts decoded", chain["overall"]["prompts"], decoded))
        if chain["replay"] is not None:
            every = {row.id for row in read if turns(row.loss_mask, [0] * len(row.loss_mask))}
            replayed = chain["replay"]["all"]["prompts"]
            pairs.append((f"{one.data}: prompts replayed", replayed, len(every)))
    return [pair for pair in pairs if pair[1] != pair[2]]


def tree_name(tree: str | None) -> str | None:
    """As reports write it: with all of its numbers."""
    if tree is None or trees.optimal_budget(tree) is not None:
        return tree
    return trees.parse(tree).name


def training_tokens(folder: str) -> int | None:
    """Input tokens a checkpoint was trained on; None where none were counted."""
    try:
        return json.loads((Path(folder) / "resume" / "state.json").read_text())["tokens"]
    except (OSError, KeyError, TypeError, ValueError):
        return None


# ---- who is compared -----------------------------------------------------------------------------


def earlier(
    name: str, label: str, wanted: Acceptance, verifier: Verifier, rows: list[list[Row]]
) -> Compared:
    """The drafter of an earlier report, which may lack the tree.

    Raises:
        ValueError: a report that cannot be read, or one measured otherwise.
    """
    path = Path(name) / "report.json"
    result, made = read_report(path)
    pairs = differences(result, made, wanted, verifier, rows)
    its, ours = tree_name(made.tree), tree_name(wanted.tree)
    if None not in (its, ours) and its != ours:
        pairs.append(("tree", its, ours))
    if pairs:
        what, theirs, own = pairs[0]
        raise ValueError(
            f"drafters: {path} was measured with another setting, {what} is {theirs!r} there and "
            f"{own!r} here; give the same, or name its drafter {result['drafter']['path']!r} itself"
        )
    tokens = None
    drafter = result["drafter"]
    if loading.is_checkpoint(drafter["path"]):
        try:  # the checkpoint may be gone, or be another one by now
            if (
                fingerprint_of(load(drafter["path"], verifier, wanted.allow_verifier))
                == drafter["fingerprint"]
            ):
                tokens = training_tokens(drafter["path"])
        except ValueError:
            pass
    return Compared(label, name, path, tokens, result)


def to_measure(
    name: str, label: str, wanted: Acceptance, verifier: Verifier, rows: list[list[Row]]
) -> Compared:
    """A drafter, with its report if an earlier call of this comparison finished it.

    Raises:
        ValueError: no such drafter, one of another verifier, one that cannot be measured so, or
            a report in its place that was measured otherwise.
    """
    drafter = load(name, verifier, wanted.allow_verifier)
    with named(f"drafters {name!r}"):
        measuring.check(drafter, wanted)
    path = Path(wanted.out) / "report.json"
    compared = Compared(label, name, path, training_tokens(name), None)
    if not path.is_file():
        return compared
    result, made = read_report(path)
    pairs = differences(result, made, wanted, verifier, rows)
    pairs.append(("tree", tree_name(made.tree), tree_name(wanted.tree)))
    its = result["drafter"]
    pairs.append(("the drafter's fingerprint", its["fingerprint"], fingerprint_of(drafter)))
    if its["fingerprint"] is None:
        pairs.append(("the drafter", its["path"], name))
    for what, theirs, own in pairs:
        if theirs != own:
            raise ValueError(
                f"out: {path} was measured with another setting, {what} is {theirs!r} there and "
                f"{own!r} here; give the same, or pass another --out"
            )
    compared.report = result
    return compared


def settings_of(settings: Compare, verifier: str, name: str, label: str) -> Acceptance:
    """The settings of one drafter's report."""
    shared = {field.name: getattr(settings, field.name) for field in fields(Measurement)}
    own = {"drafter": name, "verifier": verifier, "out": str(Path(settings.out) / label)}
    return Acceptance(**(shared | own))


def run(settings: Compare) -> None:
    """Measure whom nobody has measured yet, print, and write."""
    out = report.folder(settings.out)
    names = labels(settings.drafters)
    with only_writer(out / ".compare.lock", f"out {settings.out!r}"):
        measure_all(settings, names, out)


def measure_all(settings: Compare, names: list[str], out: Path) -> None:
    """The same, of drafters with these short names."""
    check_data(settings)
    for name in settings.drafters:
        check_name(name, verifier_name(settings))
    verifier = Verifier.load(verifier_name(settings), settings.dtype, settings.device)
    rows = [measuring.read_rows(verifier, one, settings) for one in settings.runs]
    wanted = [
        settings_of(settings, verifier.name, name, label)
        for name, label in zip(settings.drafters, names, strict=True)
    ]
    compared = []
    for one, label in zip(wanted, names, strict=True):  # whoever is refused is before any measuring
        there = (Path(one.drafter) / "report.json").is_file()
        compared.append((earlier if there else to_measure)(one.drafter, label, one, verifier, rows))
    for i, (one, drafter) in enumerate(zip(wanted, compared, strict=True)):
        number = f"{drafter.label}, {i + 1} of {len(compared)}"
        if drafter.report is not None:
            when = drafter.report["provenance"]["time"]
            print(f"\n{number}: {drafter.path} of {when} is read, nothing measured again")
            continue
        print(f"\n{number}: measured now", flush=True)
        made = load(one.drafter, verifier, one.allow_verifier)
        drafter.report = measuring.measure(one, verifier, made)
        report.write(drafter.report, Path(one.out))
        print(f"wrote {drafter.path}")
    side_by_side.write(compared, settings, out)


if __name__ == "__main__":
    from headstart.script import run_script

    run_script(Compare, run)
