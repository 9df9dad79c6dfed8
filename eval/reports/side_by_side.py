"""How several acceptance reports are shown together: one table, one picture."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headstart.eval.reports import report
from headstart.eval.reports.measurement import Measurement, RunSettings


@dataclass
class Compared:
    """A drafter of the comparison."""

    label: str
    name: str
    """As the user gave it."""
    path: Path
    """Of its report."""
    training_tokens: int | None
    report: dict[str, Any] | None
    """None until it is measured."""


def main_law(runs: list[RunSettings]) -> int:
    """The law that drafters are ordered by: the first greedy one, else the first."""
    return next((i for i, run in enumerate(runs) if run.temperature == 0), 0)


# ---- from a report to a row ----------------------------------------------------------------------


def measures(entry: dict[str, Any]) -> dict[str, Any]:
    """τ of an entry, and what it rests on; `decoded` is that of the prompts decoded for real."""
    widest, source = report.measured(entry), "decoding" if entry["replay"] is None else "replay"
    return {
        "drafting": entry["settings"]["drafting"],
        "source": source,
        "prompts": widest["prompts"],
        "acceptance_length": widest["acceptance_length"],
        "decoded": {key: entry["overall"][key] for key in ("prompts", "acceptance_length")},
    }


def row_of(compared: Compared, tree: str | None) -> dict[str, Any]:
    """What the comparison says of one drafter; of the tree only if one is compared."""
    result = compared.report
    laws = [entries[: 1 if tree is None else 2] for entries in report.by_law(result)]
    verdicts = [e["lossless"] for entries in laws for e in entries if e["lossless"] is not None]
    chains = [entry for entry in result["speed"] if entry["shape"] == "chain"]
    speed = chains if tree is None else result["speed"]
    longest = max(chains, key=lambda entry: entry["draft_length"], default=None)
    return {
        "label": compared.label,
        "name": compared.name,
        "report": str(compared.path),
        "type": result["drafter"]["type"],
        "parameters": result["drafter"]["parameters"],
        "training_tokens": compared.training_tokens,
        "laws": [
            {"chain": measures(chain), "tree": measures(trees[0]) if trees else None}
            for chain, *trees in laws
        ],
        "cost_ratio": longest
        and {
            "draft_length": longest["draft_length"],
            "fixed": longest.get("drafting_fixed"),  # earlier reports have it in c
            "value": longest["cost_ratio"],
        },
        "speed": speed,
        "best": max(speed, key=lambda entry: entry["measured"], default=None),
        "lossless": {key: sum(v[key] for v in verdicts) for key in verdicts[0]}
        if verdicts
        else None,
        "measured": {key: result["provenance"][key] for key in ("time", "commit")},
    }


def rows_of(compared: list[Compared], settings: Measurement) -> list[dict[str, Any]]:
    """A row for each drafter, by chain τ of the main law, the best first."""
    law = main_law(settings.runs)

    def length(row: dict[str, Any]) -> float:
        return row["laws"][law]["chain"]["acceptance_length"]["value"] or 0.0

    return sorted((row_of(one, settings.tree) for one in compared), key=length, reverse=True)


# ---- the table -----------------------------------------------------------------------------------


def law_name(run: RunSettings) -> str:
    """T = 1, and what else is not as usual."""
    name = f"T = {run.temperature:g}"
    name += f", top-k {run.top_k}" if run.top_k else ""
    name += f", top-p {run.top_p:g}" if run.top_p < 1 else ""
    if run.typical:
        name += f"{lossy(run)}, ε = {run.typical.epsilon:g}, δ = {run.typical.delta:g}"
    return name


def lossy(run: RunSettings) -> str:
    """What a figure's name goes on with where the text was not the verifier's in law."""
    return report.lossy({"acceptance": run.acceptance})


def source_cell(row: dict[str, Any]) -> str:
    """replay of 120; where the laws differ in it, each."""
    chains = [law["chain"] for law in row["laws"]]
    return " / ".join(dict.fromkeys(f"{c['source']} of {c['prompts']}" for c in chains))


def lossless_cell(found: dict[str, int] | None) -> str:
    if found is None:
        return "–"
    if found["different"]:
        return f"NO, {found['different']} of {found['prompts']} differ"
    return f"yes, {found['identical']} of {found['prompts']}" + (
        f", {found['ties']} at a tie" if found["ties"] else ""
    )


def best_cell(best: dict[str, Any] | None) -> str:
    if best is None:
        return "–"
    return f"{report.speedup_cell(best)}, {speed_kind(best)}"


def speed_kind(entry: dict[str, Any]) -> str:
    return report.speed_name(entry) if entry["shape"] == "chain" else "tree"


Column = tuple[str, Callable[[dict[str, Any]], str]]


def tau_columns(rows: list[dict[str, Any]], settings: Measurement) -> list[Column]:
    """Chains first, trees apart; the drafting rule is in the header, as it is the same for all."""
    columns: list[Column] = []
    for i, run in enumerate(settings.runs):
        drafting = rows[0]["laws"][i]["chain"]["drafting"]
        columns.append(
            (
                f"τ chain of {settings.draft_length}, {law_name(run)}, {drafting} drafts",
                lambda row, i=i: report.interval(row["laws"][i]["chain"]["acceptance_length"]),
            )
        )
    law = main_law(settings.runs)
    prompts = rows[0]["laws"][law]["chain"]["decoded"]["prompts"]
    if any(row["laws"][law]["chain"]["source"] == "replay" for row in rows):
        columns.append(
            (
                f"the same, {law_name(settings.runs[law])}, {prompts} prompts decoded",
                lambda row: report.interval(
                    row["laws"][law]["chain"]["decoded"]["acceptance_length"]
                ),
            )
        )
    for i, run in enumerate(settings.runs):
        trees = [row["laws"][i]["tree"] for row in rows if row["laws"][i]["tree"] is not None]
        if trees:
            title = f"τ tree {settings.tree}, {law_name(run)}, {trees[0]['drafting']} drafts"
            columns.append((f"{title}, {trees[0]['prompts']} prompts decoded",
                            lambda row, i=i: tree_cell(row["laws"][i]["tree"])))  # fmt: skip
    return columns


def fixed_cell(row: dict[str, Any]) -> str:
    return report.number(row["cost_ratio"] and row["cost_ratio"]["fixed"])


def cost_cell(row: dict[str, Any]) -> str:
    """c; where no fixed part is told apart, at which K it was measured."""
    cost = row["cost_ratio"]
    if cost is None:
        return "–"
    at = f" at K = {cost['draft_length']}" if cost["fixed"] is None else ""
    return report.number(cost["value"]) + at


def tree_cell(tree: dict[str, Any] | None) -> str:
    return "–" if tree is None else report.interval(tree["acceptance_length"])


def table(rows: list[dict[str, Any]], settings: Measurement) -> str:
    """One line a drafter."""
    columns: list[Column] = [
        ("drafter", lambda row: row["label"]),
        ("type", lambda row: row["type"]),
        ("parameters", lambda row: f"{row['parameters']:,}"),
        ("training tokens", lambda row: count(row["training_tokens"])),
        ("chain τ from", source_cell),
        *tau_columns(rows, settings),
    ]
    if any(row["cost_ratio"] is not None for row in rows):
        columns += [("fixed cost", fixed_cell), ("c", cost_cell)]
    columns += [
        (f"best speedup{lossy(settings.runs[0])}", lambda row: best_cell(row["best"])),
        ("lossless at T = 0", lambda row: lossless_cell(row["lossless"])),
    ]
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return report.table([name for name, _ in columns], cells)


def count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def notes() -> str:
    """How the table is to be read."""
    lines = [
        "τ counts the verifier's own token: 1 + accepted / rounds. Brackets are 95 % intervals, by "
        f"studentised bootstrap over prompts (earlier reports: its percentiles). "
        f"{report.NO_INTERVAL}",
        "Chain τ from replay: over every prompt's answer, as the verifier wrote it. From decoding: "
        "of lookups and lossy rules, which have no replay, over the prompts decoded for real.",
        "Best speedup: against plain decoding in the same run, prompts interleaved, one at a time; "
        "of all K, and the tree, the best. Fixed cost, c: what drafting costs beside a plain pass, "
        "whatever its length, and for each step; without a fixed cost it is in c.",
        "Lossless: greedy texts that are the verifier's own, token by token.",
        "Training tokens: – where none were counted. Parameters: of layers:…, the verifier's own.",
    ]
    return "\n".join(f"- {line}" for line in lines)


# ---- the picture ---------------------------------------------------------------------------------


def plot(rows: list[dict[str, Any]], settings: Measurement, path: Path) -> None:
    """τ of chain and tree at the main law; measured speedup by draft length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    law = main_law(settings.runs)
    figure, axes = pyplot.subplots(1, 2, figsize=(max(10, 4 + 2 * len(rows)), 4.6))
    kinds = ["chain", "tree"] if any(row["laws"][law]["tree"] for row in rows) else ["chain"]
    width = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        shown = [
            (k, row["laws"][law][kind]) for k, row in enumerate(rows) if row["laws"][law][kind]
        ]
        lengths = [entry["acceptance_length"] for _, entry in shown]
        values = [length["value"] or 1.0 for length in lengths]
        axes[0].bar(
            [k + i * width for k, _ in shown],
            values,
            width,
            yerr=report.errors(values, lengths),
            capsize=3,
            label=f"chain of {settings.draft_length}"
            if kind == "chain"
            else f"tree {settings.tree}, {shown[0][1]['prompts']} decoded",
        )
    named = [f"{row['label']}\n{source_cell(row)}" for row in rows]
    middle = [k + (len(kinds) - 1) * width / 2 for k in range(len(rows))]
    axes[0].set_xticks(middle, named, rotation=25, ha="right")
    axes[0].set(title=f"acceptance length τ, {law_name(settings.runs[law])}")
    axes[0].margins(y=0.25)  # room for the legend; without effect once a limit is set
    axes[0].set_ylim(bottom=1)

    kinds = list(dict.fromkeys(speed_kind(s) for row in rows for s in row["speed"]))
    width = 0.8 / max(len(kinds), 1)
    for i, kind in enumerate(kinds):
        found = [
            (k, s) for k, row in enumerate(rows) for s in row["speed"] if speed_kind(s) == kind
        ]
        values = [s["measured"] for _, s in found]
        yerr = report.errors(values, [s for _, s in found])
        at = [k + i * width for k, _ in found]
        axes[1].bar(at, values, width, yerr=yerr, capsize=3, label=kind)
    middle = [k + (len(kinds) - 1) * width / 2 for k in range(len(rows))]
    axes[1].set_xticks(middle, [row["label"] for row in rows], rotation=25, ha="right")
    axes[1].axhline(1, color="grey", linewidth=0.8)
    axes[1].set(title=f"speedup, batch 1 (measured){lossy(settings.runs[0])}")
    axes[1].margins(y=0.25)
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(ncols=4)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ---- files ---------------------------------------------------------------------------------------


def write(compared: list[Compared], settings: Measurement, out: Path) -> None:
    """Print the table; write compare.json, compare.md and compare.png.

    Raises:
        ValueError: the disk is full or the folder gone.
    """
    rows = rows_of(compared, settings)
    verifier = compared[0].report["verifier"]
    origin = report.provenance(asdict(settings))
    text = f"{table(rows, settings)}\n\n{notes()}"
    print(f"\n{text}", flush=True)
    result = {"schema": 1, "verifier": verifier, "drafters": rows, "provenance": origin}
    reports = "\n".join(
        f"- {row['label']}: `{row['name']}`, {row['report']}, measured {row['measured']['time']} "
        f"at commit {row['measured']['commit']}"
        for row in rows
    )
    title = f"# {len(rows)} drafters of {verifier['name']}"
    page = [title, text, "![τ and speedup](compare.png)", "## Where this comes from", reports]
    page.append(f"`{origin['command']}` at commit {origin['commit']}, {origin['time']}.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "compare.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "compare.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
        plot(rows, settings, out / "compare.png")
    except OSError as error:
        raise ValueError(
            f"out: the comparison cannot be written to {out} ({error.strerror}); make room or pass "
            "another folder; no drafter is measured again"
        ) from error
    print(f"wrote {out}/compare.json, compare.md, compare.png")
