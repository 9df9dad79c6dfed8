"""The pictures of a benchmark, of one workload and temperature each."""

from pathlib import Path
from typing import Any

from headstart.eval.reports import report
from headstart.eval.service.sweep import OFF

PARTS = ("proposal", "verification", "rest")
PERCENTILES = ("p50", "p95", "p99")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def cells_of(result: dict[str, Any], series: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of one workload and temperature."""
    key = (series["workload"], series["temperature"])
    return [cell for cell in result["cells"] if (cell["workload"], cell["temperature"]) == key]


def speedup(series: dict[str, Any], path: Path) -> None:
    """Measured speedup over concurrency, predicted beside it; below the line, drafting costs."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(7.5, 4.4))
    entries = series["by_concurrency"]
    names = list(dict.fromkeys(p["drafts"] for entry in entries for p in entry["points"]))
    for number, name in enumerate(names):
        shown = [
            (entry["concurrency"], p)
            for entry in entries
            for p in entry["points"]
            if p["drafts"] == name and p["measured"]["value"] is not None
        ]
        at = [concurrency * (1 + 0.02 * number) for concurrency, _ in shown]  # bars side by side
        values = [p["measured"]["value"] for _, p in shown]
        errors = report.errors(values, [p["measured"] for _, p in shown])
        lines = axis.errorbar(at, values, errors, fmt="o-", capsize=3, label=name)
        fitted = [
            (a, p["predicted"]) for a, (_, p) in zip(at, shown, strict=True) if p["predicted"]
        ]
        if fitted:
            axis.plot(*zip(*fitted, strict=True), "x:", color=lines[0].get_color(), markersize=7)
    axis.axhline(1, color="black", linewidth=1)
    axis.annotate(
        "break-even", (0.99, 1), xycoords=("axes fraction", "data"), va="bottom", ha="right"
    )
    _over_concurrency(axis, [entry["concurrency"] for entry in entries])
    axis.set(title="speedup (crosses: predicted)", ylabel="× plain decoding")
    if names:
        axis.legend(fontsize=8)
    _save(figure, path)


def latency(cells: list[dict[str, Any]], path: Path) -> None:
    """Inter-token latency: mean, P50, P95, P99 by concurrency and drafts."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 4, figsize=(13, 3.6), sharey=True)
    names = list(dict.fromkeys(cell["drafts"] for cell in cells))
    for axis, measure in zip(axes, ("mean", *PERCENTILES), strict=True):
        for name in names:
            mine = [cell for cell in cells if cell["drafts"] == name]
            axis.plot(
                [cell["concurrency"] for cell in mine],
                [1000 * cell["inter_token"][measure] for cell in mine],
                "o--" if name == OFF else "o-",
                color="black" if name == OFF else None,
                label=name,
            )
        _over_concurrency(axis, [cell["concurrency"] for cell in cells])
        axis.set(title=measure.upper() if measure != "mean" else "mean")
    axes[0].set_ylim(bottom=0)  # once all are drawn: they share it
    axes[0].set_ylabel("ms between tokens")
    axes[0].legend(fontsize=8)
    _save(figure, path)


def acceptance(cells: list[dict[str, Any]], path: Path) -> None:
    """Conditional acceptance by position, all concurrencies together."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(7.5, 4))
    longest = 1
    for name in dict.fromkeys(cell["drafts"] for cell in cells if cell["acceptance"]):
        values = by_position([cell for cell in cells if cell["drafts"] == name])
        reached = [(i, value) for i, value in enumerate(values, 1) if value is not None]
        axis.plot(*zip(*reached, strict=True), "o-", label=name)
        longest = max(longest, len(values))
    axis.set(title="acceptance by position, given that it was reached", xlabel="draft position")
    axis.set(ylim=(0, 1), ylabel="α")
    axis.set_xticks(range(1, longest + 1))
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
    else:
        axis.annotate("no draft was counted", (0.5, 0.5), xycoords="axes fraction", ha="center")
    _save(figure, path)


def by_position(cells: list[dict[str, Any]]) -> list[float | None]:
    """Conditional acceptance of cells together; None where no draft was examined."""
    longest = max(len(cell["positions"]) for cell in cells)
    values: list[float | None] = []
    for i in range(longest):
        there = [cell["positions"][i] for cell in cells if i < len(cell["positions"])]
        examined = sum(position["examined"] for position in there)
        accepted = sum(position["accepted"] for position in there)
        values.append(accepted / examined if examined else None)
    return values


def parts(cells: list[dict[str, Any]], path: Path) -> None:
    """Where the time of a pass goes, for a token that comes of it."""
    pyplot = _pyplot()
    shown = [cell for cell in cells if cell["parts"]]
    figure, axis = pyplot.subplots(figsize=(max(7.5, 0.42 * len(shown) + 2), 4.2))
    bottom = [0.0] * len(shown)
    for part in PARTS:
        heights = [1000 * cell["parts"][part] for cell in shown]
        axis.bar(range(len(shown)), heights, 0.75, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    names = [f"{cell['concurrency']} · {cell['drafts']}" for cell in shown]
    axis.set_xticks(range(len(shown)), names, rotation=60, ha="right", fontsize=7)
    axis.set(title="time of a pass (concurrency · drafts)", ylabel="ms")
    if shown:
        axis.legend()
    else:
        axis.annotate("a server tells no parts", (0.5, 0.5), xycoords="axes fraction", ha="center")
    _save(figure, path)


def _over_concurrency(axis: Any, concurrencies: list[int]) -> None:
    there = sorted(set(concurrencies))
    axis.set_xscale("log", base=2)
    axis.set_xticks(there, [str(concurrency) for concurrency in there])
    axis.minorticks_off()
    axis.set_xlabel("concurrency")


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
