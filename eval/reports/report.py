"""How a report is shown: tables on the terminal and in Markdown, and a picture."""

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headstart.eval.measures.intervals import LEAST_PROMPTS
from headstart.eval.measures.quality import Quality
from headstart.eval.reports import progress
from headstart.script import ROOT

NO_SPEED = "Speed was not measured."
_PAYS = 1.005  # a speedup that is written as 1.01 or more
PACKAGES = ("headstart", "torch", "transformers", "datasets", "accelerate")


def provenance(recipe: dict[str, Any]) -> dict[str, Any]:
    """Where a result comes from: command, commit (None outside a clone), versions, recipe, time."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": commit(),
        "versions": versions | {"python": platform.python_version()},
        "recipe": recipe,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str | None:
    """The clone's commit, "+" behind it when files differ; None outside a clone."""
    try:
        git = ["git", "-C", str(ROOT)]
        found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        if found.returncode:
            return None
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return found.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def folder(path: str) -> Path:
    """The folder of a report, which need not exist yet.

    Raises:
        ValueError: it could not be written to.
    """
    out = Path(path)
    existing = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not existing.is_dir() or not _writable(existing):
        raise ValueError(
            f"out: {path!r} cannot be a folder to write to, because of {existing}; pass another"
        )
    return out


def _writable(folder: Path) -> bool:
    """Tried, not asked: root is allowed everything and yet cannot write everywhere."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def write(result: dict[str, Any], out: Path) -> None:
    """report.json, report.md and acceptance.png; an earlier report.json is replaced whole.

    Raises:
        ValueError: the disk is full or the folder gone.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        temporary = out / ".report.json.partial"
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        temporary.replace(out / "report.json")
        (out / progress.FILE).unlink(missing_ok=True)
        write_markdown(result, out / "report.md")
        plot(result, out / "acceptance.png")
    except OSError as error:
        raise ValueError(
            f"out: the report cannot be written to {out} ({error.strerror}); make room or pass "
            "another folder"
        ) from error


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


NO_INTERVAL = (
    f"[–]: no interval; it takes {LEAST_PROMPTS} prompts or more that do not all say the same."
)


def interval(measure: dict[str, float | None], digits: int = 3) -> str:
    """value [low, high]; value [–] where there is no interval."""
    if measure["value"] is None:
        return "–"
    value, low, high = (number(measure[key], digits) for key in ("value", "low", "high"))
    return f"{value} [–]" if measure["low"] is None else f"{value} [{low}, {high}]"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns line up, so that it reads on a terminal too."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def lossy(measured_with: dict[str, Any]) -> str:
    """What the name of a figure goes on with where the text was not the verifier's in law.

    Args:
        measured_with: a run's settings, or an entry of speed.
    """
    return "" if measured_with["acceptance"] == "exact" else ", typical acceptance (lossy)"


NOTE = (
    "τ counts the verifier's own token: 1 + accepted / rounds; tokens a pass are those written, "
    "fewer where texts end inside a round. Predicted: tokens a pass / (1 + fixed + K·c + v), in "
    "plain passes. Intervals are 95 %, by studentised bootstrap over prompts. "
) + NO_INTERVAL


def law_title(entry: dict[str, Any]) -> str:
    s = entry["settings"]
    law = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}"
    if s["top_k"]:
        law += f", top-k {s['top_k']}"
    if s["top_p"] < 1:
        law += f", top-p {s['top_p']:g}"
    drafts = "greedy drafts" if s["drafting"] == "greedy" else "sampled drafts"
    title = f"T = {s['temperature']:g} ({law}, {drafts}), chain of K = {s['draft_length']}"
    if s["acceptance"] == "typical":
        title += f"{lossy(s)}, ε = {s['typical_epsilon']:g}, δ = {s['typical_delta']:g}"
    return title


def by_law(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The entries of a report's `runs`, for each law: the chain's, and the tree's if it has one."""
    entries = result["runs"]
    each = len(entries) // len(result["provenance"]["recipe"]["runs"])
    return [entries[i : i + each] for i in range(0, len(entries), each)]


def law_table(entries: list[dict[str, Any]]) -> str:
    """One law: replay over everything by category, then decoding; the tree's figures apart."""
    chain, *trees = entries
    first = f"measured on{lossy(chain['settings'])}"
    header = [first, "prompts", "τ acceptance length", "tokens a pass", "α acceptance rate"]
    header.append("efficiency")
    header += ["τ tree", "efficiency tree"] * len(trees)
    rows = []
    replay = chain["replay"]
    if replay is not None:
        categories = replay["all"]["categories"]
        named = [(f"replay, {name}", m) for name, m in categories.items() if len(categories) > 1]
        named += [("replay, all", replay["all"])]
        named += [("replay, decoded prompts", replay["same_prompts"])]
        rows += [(name, m, [None] * len(trees)) for name, m in named]
    elif len(chain["categories"]) > 1:
        for name, m in chain["categories"].items():
            rows.append((f"decoding, {name}", m, [t["categories"][name] for t in trees]))
    label = "decoding, all" if replay is None else "decoding, same prompts"
    rows.append((label, chain["overall"], [t["overall"] for t in trees]))
    cells = []
    for name, m, others in rows:
        row = [name, str(m["prompts"]), interval(m["acceptance_length"])]
        row += [number(m["tokens_per_round"]), interval(m["acceptance_rate"])]
        row.append(number(m["draft_efficiency"]))
        for other in others:
            if other is None:
                row += ["–", "–"]
            else:
                row += [interval(other["acceptance_length"]), number(other["draft_efficiency"])]
        cells.append(row)
    return table(header, cells)


def measured(entry: dict[str, Any]) -> dict[str, Any]:
    """The widest measures of an entry: replay over all prompts, else decoding."""
    return entry["overall"] if entry["replay"] is None else entry["replay"]["all"]


def position_table(entry: dict[str, Any]) -> str:
    everything = measured(entry)
    positions = range(1, len(everything["conditional"]) + 1)
    header = [f"position{lossy(entry['settings'])}", *map(str, positions)]
    rows = [
        [f"{name} acceptance", *map(number, everything[name])] for name in ("conditional", "joint")
    ]
    return table(header, rows)


def lossless_line(entry: dict[str, Any]) -> str:
    found = entry["lossless"]
    if entry["settings"]["acceptance"] == "typical":
        return (
            "NOT LOSSLESS: with typical acceptance the text is not distributed as the verifier's, "
            "by intent."
        )
    if found is None:
        return (
            "Above temperature 0 losslessness is a matter of distributions: the tests check it by "
            "chi-square, no text comparison can."
        )
    verdict = "lossless" if found["different"] == 0 else "NOT LOSSLESS"
    return (
        f"{verdict}: of {found['prompts']} texts, {found['identical']} are the verifier's own "
        f"token by token, {found['ties']} differ at a tie of its logits, {found['different']} "
        "differ otherwise."
    )


def seconds_line(entry: dict[str, Any]) -> str:
    if entry["settings"]["acceptance"] == "typical":
        return (
            "Typical acceptance (lossy) has no replay, which computes what the exact rule accepts: "
            "everything here was decoded."
        )
    if entry["replay"] is None:
        return "Lookups have no replay: everything here was decoded."
    same = entry["replay"]["same_prompts"]["seconds"]
    return (
        f"Replay of the decoded prompts took 1/{entry['decoding_seconds'] / max(same, 1e-9):.1f} "
        "of the time of decoding them."
    )


def speed_table(speed: list[dict[str, Any]]) -> str:
    header = [f"drafts{lossy(speed[0])}", "speedup [95 %]", "median", "predicted", "fixed", "c"]
    header += ["v", "τ", "tokens a pass"]
    rows = [
        [
            speed_name(s),
            speedup_cell(s),
            number(s["median"], 2),
            number(s["predicted"], 2),
            number(s["drafting_fixed"]),
            number(s["cost_ratio"]),
            number(s["verify_overhead"]),
            number(s["acceptance_length"], 2),
            number(s["tokens_per_round"], 2),
        ]
        for s in speed
    ]
    return table(header, rows)


def speedup_cell(entry: dict[str, Any]) -> str:
    """value [low, high] of an entry of speed."""
    return interval(entry | {"value": entry["measured"]}, 2)


def speed_name(entry: dict[str, Any]) -> str:
    return f"K = {entry['draft_length']}" if entry["shape"] == "chain" else entry["shape"]


def speed_title(speed: list[dict[str, Any]]) -> str:
    return f"Speed, batch 1{lossy(speed[0])}"


def best_line(speed: list[dict[str, Any]]) -> str:
    """The best setting, and where drafting pays."""
    best = max(speed, key=lambda s: s["measured"])
    line = f"Best: {speed_name(best)}{lossy(best)}, {best['measured']:.2f} × plain decoding"
    if best["measured"] < _PAYS:
        line += ", which does not pay"
    if len(best["categories"]) > 1:
        pays = [f"{name} {v:.2f}" for name, v in best["categories"].items() if v >= _PAYS]
        costs = [f"{name} {v:.2f}" for name, v in best["categories"].items() if v < _PAYS]
        line += f"; pays on {', '.join(pays) or 'none'}; does not on {', '.join(costs) or 'none'}"
    return line + "."


def law_text(entries: list[dict[str, Any]]) -> str:
    chain, *trees = entries
    parts = [law_table(entries), position_table(chain)]
    for entry in trees:
        s = entry["settings"]
        drafts = f"{s['drafting']} drafts{lossy(s)}"
        parts.append(f"Tree {s['shape']}, {drafts}, by depth, of the prompts decoded:")
        parts.append(position_table(entry))
    for entry in entries:
        name = "" if entry is chain else f"Tree {entry['settings']['shape']}: "
        parts.append(name + lossless_line(entry))
    return "\n\n".join([*parts, seconds_line(chain)])


def print_law(entries: list[dict[str, Any]]) -> None:
    print(f"\n{law_title(entries[0])}\n\n{law_text(entries)}", flush=True)


def print_speed(speed: list[dict[str, Any]]) -> None:
    if not speed:
        print(f"\n{NO_SPEED}", flush=True)
    else:
        print(f"\n{speed_title(speed)}, same loop with and without drafts, interleaved\n\n"
              f"{speed_table(speed)}\n\n{best_line(speed)}", flush=True)  # fmt: skip


def write_markdown(result: dict[str, Any], path: Path) -> None:
    drafter, verifier, origin = result["drafter"], result["verifier"], result["provenance"]
    parts = [
        f"# Acceptance of {drafter['path']}",
        f"{drafter['type']} drafter, {drafter['parameters']:,} parameters, for {verifier['name']} "
        f"(fingerprint {verifier['fingerprint']}).",
    ]
    if verifier["quality"] is not None:
        parts.append(Quality(**verifier["quality"]).line())
    for entries in by_law(result):
        parts += [f"## {law_title(entries[0])}", law_text(entries)]
    if result["speed"]:
        title = f"## {speed_title(result['speed'])}"
        parts += [title, speed_table(result["speed"]), best_line(result["speed"])]
    else:
        parts += ["## Speed", NO_SPEED]
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    parts += [
        "## Where this comes from",
        f"`{origin['command']}` at commit {origin['commit']}, {origin['time']}, with {versions}.",
        NOTE,
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def errors(values: list[float], measured: list[dict[str, Any]]) -> list[list[float]]:
    """Lengths of the error bars; none without an interval."""
    pairs = list(zip(values, measured, strict=True))
    below = [max(v - (m["low"] or v), 0) for v, m in pairs]
    return [below, [max((m["high"] or v) - v, 0) for v, m in pairs]]


def plot(result: dict[str, Any], path: Path) -> None:
    """α by position; τ by category; speedup by draft length; intervals where there are any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs, speed = result["runs"], result["speed"]
    figure, axes = pyplot.subplots(1, 3 if speed else 2, figsize=(14 if speed else 10, 4.2))
    shift = 0.8 / len(runs)
    for i, entry in enumerate(runs):
        everything, shape = measured(entry), entry["settings"]["shape"]
        label = f"T = {entry['settings']['temperature']:g}"
        label += "" if shape == "chain" else f", {shape.partition(':')[0]} tree"
        label += lossy(entry["settings"])
        places = range(1, len(everything["conditional"]) + 1)
        axes[0].plot(places, everything["conditional"], "o-", label=label)
        categories = everything.get("categories", entry["categories"])
        named = [*categories.items(), ("all", everything)]
        lengths = [m["acceptance_length"] for _, m in named]
        values = [m["value"] or 1.0 for m in lengths]
        at = [k + i * shift for k in range(len(named))]
        axes[1].bar(at, values, shift, yerr=errors(values, lengths), capsize=2, label=label)
        axes[1].set_xticks(range(len(named)), [n for n, _ in named], rotation=40, ha="right")
    exact = "" if all(entry["settings"]["acceptance"] == "exact" for entry in runs) else "exact "
    source = f"{exact}chains by replay" if any(entry["replay"] for entry in runs) else "decoding"
    axes[0].set(title=f"α by position ({source})", xlabel="draft position", ylim=(0, 1))
    axes[0].set_xticks(range(1, max(e["settings"]["draft_length"] for e in runs) + 1))
    axes[1].set(title=f"τ by category ({source}, K = {runs[0]['settings']['draft_length']})")
    axes[1].margins(y=0.12 * len(runs))  # room for the legend; without effect once a limit is set
    axes[1].set_ylim(bottom=1)
    axes[0].legend()
    axes[1].legend()
    if speed:
        names = ["all", *speed[0]["categories"]]
        width = 0.8 / len(speed)
        for i, s in enumerate(speed):
            values = [s["measured"], *(s["categories"][name] for name in names[1:])]
            at = [k + i * width for k in range(len(names))]
            axes[2].bar(at, values, width, label=speed_name(s))
            bars = errors(values[:1], [s])
            axes[2].errorbar(at[:1], values[:1], bars, color="black", capsize=2)
        axes[2].set_xticks(range(len(names)), names, rotation=40, ha="right")
        axes[2].axhline(1, color="grey", linewidth=0.8)
        axes[2].set(title="speedup, batch 1 (measured)")
        axes[2].margins(y=0.25)
        axes[2].legend(ncols=len(speed), title=lossy(speed[0]).removeprefix(", ") or None)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
