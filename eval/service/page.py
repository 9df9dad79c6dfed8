"""A benchmark as people look at it: one HTML file that needs nothing else, and its pictures."""

import base64
import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.eval.measures.intervals import LEAST_TRIALS
from headstart.eval.reports import report
from headstart.eval.service import plots
from headstart.eval.service.sweep import OFF

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
td, th { border: 1px solid #ccc; padding: .2em .6em; text-align: right; }
td:first-child, th:first-child, .words td { text-align: left; }
img { max-width: 100%; }
.verdict { border-left: .5em solid; padding: .3em 1em; background: #f5f5f5; }
.ship { border-color: #2a2; } .tune { border-color: #d90; } .switch-off { border-color: #c22; }
.figures { overflow-x: auto; }
footer { color: #666; font-size: 12px; overflow-wrap: anywhere; }
"""
HEADER = [
    "workload", "T", "concurrency", "drafts", "tokens/s", "speedup [95 %]", "as run", "predicted",
    "τ", "tokens a pass", "efficiency", "break-even", "wasted", "first token ms, P50",
    "between tokens ms, mean", "P50", "P95", "P99", "proposal ms", "verification ms", "rest ms",
]  # fmt: skip
_PAGE_ONLY = (
    "first token ms, P50", "proposal ms", "verification ms", "rest ms",
)  # fmt: skip
NOTES = (
    "Tokens/s, speedup and latencies are those of a loop whose slots are all taken; “as run” is "
    "the ratio of the trials' whole times, prefill and emptying slots included.",
    "Predicted: tokens a pass, over the fitted cost of a pass. Break-even: the draft "
    "efficiency (accepted / drafted) at which drafting is as fast as plain decoding.",
    "Tokens of one pass arrive together: the first waited for the pass, the others 0 ms. So P99 is "
    "a whole round where plain decoding waits for a pass over one token.",
    "Proposal, verification, rest: milliseconds of a mean pass. Wasted: drafts that were not "
    "accepted. Intervals are 95 %, by studentised bootstrap over trials; [–]: fewer than "
    f"{LEAST_TRIALS} trials, too few for one.",
)


CHECKED = ["check", "result", "value", "bound", "threshold", "source", "reason"]


@dataclass
class Opinion:
    """A verdict on the result at one concurrency, as the page shows it, whoever gave it."""

    value: str
    concurrency: int
    drafts: str | None
    holds: bool
    """Whether no check failed."""
    reasons: list[str]
    checks: list[list[str]]
    """Of each, in the order of `CHECKED`."""


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The table's, a cell each, in the order of `HEADER`."""
    points = {
        (s["workload"], s["temperature"], entry["concurrency"], point["drafts"]): point
        for s in result["series"]
        for entry in s["by_concurrency"]
        for point in entry["points"]
    }
    found = []
    for cell in result["cells"]:
        key = tuple(cell[name] for name in ("workload", "temperature", "concurrency", "drafts"))
        point, number = points.get(key), report.number
        between, parts = cell["inter_token"], cell["parts"]
        speed = point["measured"] if point else {"value": None, "as_run": None}
        found.append(
            [
                cell["workload"],
                f"{cell['temperature']:g}",
                str(cell["concurrency"]),
                cell["drafts"],
                number(cell["tokens_per_second"], 1),
                report.interval(speed, 2),
                number(speed["as_run"], 2),
                number(point and point["predicted"], 2),
                number(point and point["acceptance_length"], 2),
                number(point and point["tokens_per_round"], 2),
                number(point and point["draft_efficiency"]),
                number(point and point["breakeven_efficiency"]),
                "–" if cell["wasted"] is None else f"{cell['wasted']:,.0f}",
                number(1000 * cell["first_token"]["p50"], 1),
                *(number(1000 * between[name], 1) for name in ("mean", *plots.PERCENTILES)),
                *(number(parts and 1000 * parts[name], 1) for name in plots.PARTS),
            ]
        )
    return found


def costs(series: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Fitted costs by concurrency: header and rows."""
    header = ["concurrency", "best", "drafting, fixed", "c", "verify overhead v"]
    header += ["α needed (efficiency)", "α needed (acceptance rate)"]
    found = []
    for entry in series["by_concurrency"]:
        fit, points = entry["fit"], entry["points"]
        fixed = fit.get("drafting_fixed", fit.get("overhead_fixed"))
        overheads = fit.get("verify_overhead", {})
        found.append(
            [
                str(entry["concurrency"]),
                best_words(entry),
                report.number(fixed),
                _step(fit),
                ", ".join(f"{name} {v:.2f}" for name, v in overheads.items()) or "not told apart",
                _needed(points, "breakeven_efficiency"),
                _needed(points, "breakeven_acceptance_rate"),
            ]
        )
    return header, found


def _step(fit: dict[str, Any]) -> str:
    """c of chains, and of each tree."""
    chains = fit.get("cost_ratio", fit.get("overhead_per_draft"))
    trees = [f"{name} {c:.3f}" for name, c in fit.get("cost_ratios", {}).items() if c != chains]
    return ", ".join([report.number(chains), *trees])


def _needed(points: list[dict[str, Any]], key: str) -> str:
    return ", ".join(f"{p['drafts']} {report.number(p[key], 2)}" for p in points)


def best_words(entry: dict[str, Any]) -> str:
    """The fastest drafts at a concurrency; off where none pays."""
    best = next((p for p in entry["points"] if p["drafts"] == entry["best"]), None)
    if best is None:
        return "–"
    value = best["measured"]["value"]
    return f"{best['drafts']} ({value:.2f})" if value > 1 else f"{OFF} ({value:.2f} at best)"


def paying(series: dict[str, Any]) -> str:
    """Up to which concurrency drafting pays, in a sentence."""
    measured = [entry["concurrency"] for entry in series["by_concurrency"]]
    if not measured:
        return "Nothing to compare yet."
    stops = series["stops_paying"]["best"]
    if stops is None:
        return f"Drafting pays at {max(measured)}, the highest concurrency measured."
    if stops <= min(measured):
        return f"Drafting does not pay at any concurrency measured, {min(measured)} or more."
    return f"Drafting stops paying at a concurrency of about {stops:.1f}."


def table(result: dict[str, Any]) -> str:
    """For the terminal: a line a cell, and what follows from them."""
    shown = [i for i, name in enumerate(HEADER) if name not in _PAGE_ONLY]
    cells = [[row[i] for i in shown] for row in rows(result)]
    lines = [report.table([HEADER[i] for i in shown], cells)]
    for series in result["series"]:
        name = f"{series['workload']}, T = {series['temperature']:g}"
        lines.append(f"{name}\n\n{report.table(*costs(series))}\n\n{paying(series)}")
    return "\n\n".join(lines)


# ---- HTML ----------------------------------------------------------------------------------------


def _table(header: list[str], rows: list[list[str]], kind: str = "") -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "\n".join([line(header, "th"), *(line(row, "td") for row in rows)])
    return f'<div class="figures"><table class="{kind}">\n{body}\n</table></div>'


def _picture(path: Path, words: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(words)}" src="data:image/png;base64,{data}"></p>'


def _verdict(verdict: Opinion, others: list[Opinion]) -> str:
    kind = verdict.value.replace(" ", "-")
    at = f"at concurrency {verdict.concurrency}"
    at += f" with {verdict.drafts}" if verdict.drafts else ""
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in verdict.reasons)
    elsewhere = [
        [
            str(other.concurrency),
            other.value,
            other.drafts or "–",
            "all checks hold" if other.holds else "; ".join(other.reasons),
        ]
        for other in others
    ]
    return f"""<div class="verdict {kind}"><h2>{html.escape(verdict.value.capitalize())}, {at}</h2>
<ul>{reasons}</ul></div>
<details><summary>Every check</summary>
{_table(CHECKED, verdict.checks, "words")}</details>
<details><summary>The verdict at every concurrency measured</summary>
{_table(["concurrency", "verdict", "drafts", "because"], elsewhere, "words")}</details>"""


def document(
    result: dict[str, Any], verdict: Opinion, others: list[Opinion], pictures: list[list[Path]]
) -> str:
    """The page.

    Args:
        others: verdicts at other concurrencies.
        pictures: of each of the result's series, in order.
    """
    drafter, verifier, origin = result["drafter"], result["verifier"], result["provenance"]
    if drafter is not None:
        subject = f"{drafter['path']} ({drafter['type']}) for {verifier['name']}, in our own loop"
    else:
        subject = ", ".join(f"{s['url']} ({s['drafts']})" for s in result["servers"])
    parts = [f"<h1>Does drafting pay?</h1><p>{html.escape(subject)}</p>", _verdict(verdict, others)]
    for series, paths in zip(result["series"], pictures, strict=True):
        name = f"{series['workload']}, T = {series['temperature']:g}"
        parts.append(f"<h2>{html.escape(name)}</h2><p>{html.escape(paying(series))}</p>")
        parts += [_picture(path, path.stem) for path in paths]
        parts.append(_table(*costs(series), "words"))
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in NOTES)
    parts.append(f"<h2>Every cell</h2>{_table(HEADER, rows(result))}<ul>{notes}</ul>")
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    source = f"{origin['command']}, commit {origin['commit']}, {origin['time']}, {versions}"
    parts.append(f"<footer>{html.escape(source)}</footer>")
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Does drafting pay?</title><style>{_STYLE}</style></head>\n<body>{body}</body>"
        "</html>\n"
    )


def draw(result: dict[str, Any], out: Path) -> list[list[Path]]:
    """The PNGs of each series."""
    pictures = []
    for number, series in enumerate(result["series"], 1):
        mine = plots.cells_of(result, series)
        paths = [
            out / f"{name}-{number}.png" for name in ("speedup", "latency", "positions", "parts")
        ]
        plots.speedup(series, paths[0])
        plots.latency(mine, paths[1])
        plots.acceptance(mine, paths[2])
        plots.parts(mine, paths[3])
        pictures.append(paths)
    return pictures


def write(result: dict[str, Any], verdict: Opinion, others: list[Opinion], out: Path) -> None:
    """benchmark.json, benchmark.html and the PNGs; an earlier benchmark.json is replaced whole.

    Raises:
        ValueError: the disk is full or the folder gone.
    """
    try:
        temporary = out / ".benchmark.json.partial"
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        temporary.replace(out / "benchmark.json")
        text = document(result, verdict, others, draw(result, out))
        (out / "benchmark.html").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"out: the report cannot be written to {out} ({error.strerror}); make room, and give "
            "the same command: what was measured is kept"
        ) from error
