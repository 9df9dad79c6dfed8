"""How a report is shown: tables on the terminal and in Markdown, and a picture."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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
    here = Path(__file__).resolve().parent
    try:
        git = ["git", "-C", str(here)]
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
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(
            f"out: {path!r} cannot be a folder to write to, because of {existing}; pass another"
        )
    return out


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
        write_markdown(result, out / "report.md")
        plot(result, out / "acceptance.png")
    except OSError as error:
        raise ValueError(
            f"out: the report cannot be written to {out} ({error.strerror}); make room or pass "
            "another folder"
        ) from error


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def interval(measure: dict[str, float | None]) -> str:
    """value [low, high]"""
    if measure["value"] is None:
        return "–"
    return f"{measure['value']:.3f} [{number(measure['low'])}, {number(measure['high'])}]"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns line up, so that it reads on a terminal too."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def run_title(entry: dict[str, Any]) -> str:
    s = entry["settings"]
    law = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}"
    if s["top_k"]:
        law += f", top-k {s['top_k']}"
    if s["top_p"] < 1:
        law += f", top-p {s['top_p']:g}"
    drafts = "greedy drafts" if s["drafting"] == "greedy" else "sampled drafts"
    return f"T = {s['temperature']:g} ({law}, {drafts}), chain of K = {s['draft_length']}"


def run_table(entry: dict[str, Any]) -> str:
    """One run: replay over everything by category, then decoding."""
    header = ["measured on", "prompts", "τ acceptance length", "α acceptance rate", "efficiency"]
    everything = entry["replay"]["all"]
    categories = everything["categories"]
    named = [(f"replay, {name}", m) for name, m in categories.items() if len(categories) > 1]
    named.append(("replay, all", everything))
    if entry["overall"] is not None:
        named.append(("replay, decoded prompts", entry["replay"]["same_prompts"]))
        named.append(("decoding, same prompts", entry["overall"]))
    rows = [
        [
            name,
            str(m["prompts"]),
            interval(m["acceptance_length"]),
            interval(m["acceptance_rate"]),
            number(m["draft_efficiency"]),
        ]
        for name, m in named
    ]
    return table(header, rows)


def position_table(entry: dict[str, Any]) -> str:
    everything = entry["replay"]["all"]
    header = ["position", *(str(i + 1) for i in range(len(everything["conditional"])))]
    rows = [
        [f"{name} acceptance", *map(number, everything[name])] for name in ("conditional", "joint")
    ]
    return table(header, rows)


def lossless_line(entry: dict[str, Any]) -> str:
    found = entry["lossless"]
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
    same = entry["replay"]["same_prompts"]["seconds"]
    return (
        f"Replay of the decoded prompts took 1/{entry['decoding_seconds'] / max(same, 1e-9):.1f} "
        "of the time of decoding them."
    )


def speed_table(speed: list[dict[str, Any]]) -> str:
    header = ["K", "speedup [95 %]", "median", "predicted", "c", "v_K", "τ"]
    rows = [
        [
            str(s["draft_length"]),
            f"{s['measured']:.2f} [{number(s['low'], 2)}, {number(s['high'], 2)}]",
            number(s["median"], 2),
            number(s["predicted"], 2),
            number(s["cost_ratio"]),
            number(s["verify_overhead"]),
            number(s["acceptance_length"], 2),
        ]
        for s in speed
    ]
    return table(header, rows)


def best_line(speed: list[dict[str, Any]]) -> str:
    best = max(speed, key=lambda s: s["measured"])
    return f"Best: K = {best['draft_length']}, {best['measured']:.2f} × plain decoding."


def run_text(entry: dict[str, Any]) -> str:
    parts = [run_table(entry), position_table(entry), lossless_line(entry), seconds_line(entry)]
    return "\n\n".join(parts)


def print_run(entry: dict[str, Any]) -> None:
    print(f"\n{run_title(entry)}\n\n{run_text(entry)}", flush=True)


def print_speed(speed: list[dict[str, Any]]) -> None:
    if speed:
        print(f"\nSpeed, batch 1, same loop with and without drafts, interleaved\n\n"
              f"{speed_table(speed)}\n\n{best_line(speed)}", flush=True)  # fmt: skip


def write_markdown(result: dict[str, Any], path: Path) -> None:
    drafter, verifier, origin = result["drafter"], result["verifier"], result["provenance"]
    parts = [
        f"# Acceptance of {drafter['path']}",
        f"{drafter['type']} drafter, {drafter['parameters']:,} parameters, for {verifier['name']} "
        f"(fingerprint {verifier['fingerprint']}).",
    ]
    for entry in result["runs"]:
        parts += [f"## {run_title(entry)}", run_text(entry)]
    if result["speed"]:
        parts += ["## Speed, batch 1", speed_table(result["speed"]), best_line(result["speed"])]
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    parts += [
        "## Where this comes from",
        f"`{origin['command']}` at commit {origin['commit']}, {origin['time']}, with {versions}.",
        "τ counts the verifier's own token: 1 + accepted / rounds. Intervals are 95 %, by "
        "bootstrap over prompts.",
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def plot(result: dict[str, Any], path: Path) -> None:
    """α by position; τ by category; speedup by draft length; intervals where there are any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs, speed = result["runs"], result["speed"]
    figure, axes = pyplot.subplots(1, 3 if speed else 2, figsize=(14 if speed else 10, 4.2))
    shift = 0.8 / len(runs)
    for i, entry in enumerate(runs):
        everything = entry["replay"]["all"]
        label = f"T = {entry['settings']['temperature']:g}"
        places = range(1, len(everything["conditional"]) + 1)
        axes[0].plot(places, everything["conditional"], "o-", label=label)
        named = [*everything["categories"].items(), ("all", everything)]
        lengths = [m["acceptance_length"] for _, m in named]
        values = [m["value"] or 1.0 for m in lengths]
        # of few prompts, a bootstrap interval need not hold the value
        below = [max(v - (m["low"] or v), 0) for v, m in zip(values, lengths, strict=True)]
        above = [max((m["high"] or v) - v, 0) for v, m in zip(values, lengths, strict=True)]
        at = [k + i * shift for k in range(len(named))]
        axes[1].bar(at, values, shift, yerr=[below, above], capsize=2, label=label)
        axes[1].set_xticks(range(len(named)), [n for n, _ in named], rotation=40, ha="right")
    axes[0].set(title="α by position (replay)", xlabel="draft position", ylim=(0, 1))
    axes[0].set_xticks(range(1, len(runs[0]["replay"]["all"]["conditional"]) + 1))
    axes[1].set(title=f"τ by category (replay, K = {runs[0]['settings']['draft_length']})")
    axes[1].set_ylim(bottom=1)
    axes[1].margins(y=0.25)  # room for the legend
    axes[0].legend()
    axes[1].legend()
    if speed:
        names = ["all", *speed[0]["categories"]]
        width = 0.8 / len(speed)
        for i, s in enumerate(speed):
            values = [s["measured"], *(s["categories"][name] for name in names[1:])]
            bars = axes[2].bar(
                [k + i * width for k in range(len(names))],
                values,
                width,
                label=f"K = {s['draft_length']}",
            )
            axes[2].errorbar(
                bars[0].get_x() + width / 2,
                values[0],
                [
                    [max(values[0] - (s["low"] or values[0]), 0)],
                    [max((s["high"] or values[0]) - values[0], 0)],
                ],
                color="black",
                capsize=2,
            )
        axes[2].set_xticks(range(len(names)), names, rotation=40, ha="right")
        axes[2].axhline(1, color="grey", linewidth=0.8)
        axes[2].set(title="speedup, batch 1 (measured)")
        axes[2].margins(y=0.25)
        axes[2].legend(ncols=len(speed))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
