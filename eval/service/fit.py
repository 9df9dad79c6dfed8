"""What a sweep says: the cost of drafting, and predicted against measured speedup.

a, c and v_N are those of `costs.py`. All of them grow with concurrency, so they are fitted at each.
Beside speedup.py: overhead there is a + K·c + v_N here.

A server tells no parts. Its overhead is what its speed leaves: tokens a pass, divided by the
speedup, − 1; a line over K is fitted to that.
"""

from collections.abc import Sequence
from typing import Any

from headstart.eval.measures.costs import fit_drafting, line
from headstart.eval.measures.speedup import breakeven_acceptance_rate
from headstart.eval.service.sweep import OFF
from headstart.models.proposal import trees

# ---- one concurrency -----------------------------------------------------------------------------


def costs(plain: dict[str, Any], drafted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fit at one concurrency, from the cells without and with drafts.

    Returns:
        `drafting_fixed` a (0 where it cannot be told from c), `cost_ratio` c of chains (None: there
        is none), `cost_ratios` {drafts: c}, `verify_overhead` {drafts: v}; or, of a server,
        `overhead_fixed` and `overhead_per_draft` of its line. Empty where nothing can be fitted.
    """
    timed = [cell for cell in drafted if cell["parts"]]
    if plain["parts"] and timed:
        parts = plain["parts"]
        unit = sum(parts.values())
        shapes = {cell["drafts"]: trees.parse(cell["drafts"]) for cell in timed}
        drafting = {
            cell["drafts"]: sum(cell["parts"][p] - parts[p] for p in ("proposal", "rest")) / unit
            for cell in timed
        }
        fitted = fit_drafting(drafting, shapes)
        chains = [c for drafts, c in fitted.step.items() if not shapes[drafts].branches]
        return {
            "drafting_fixed": fitted.fixed or 0.0,
            "cost_ratio": chains[0] if chains else None,
            "cost_ratios": fitted.step,
            "verify_overhead": {
                cell["drafts"]: (cell["parts"]["verification"] - parts["verification"]) / unit
                for cell in timed
            },
        }
    known = [(cell, _left_over(cell)) for cell in drafted]
    known = [(cell, over) for cell, over in known if over is not None]
    if len({cell["drafts"] for cell, _ in known}) < 2:  # a line through one point predicts nothing
        return {}
    depths = [trees.parse(cell["drafts"]).depth for cell, _ in known]
    fixed, slope = line(depths, [over for _, over in known])
    return {"overhead_fixed": fixed, "overhead_per_draft": slope}


def _left_over(cell: dict[str, Any]) -> float | None:
    """What a pass costs beyond a plain one, from the speed alone."""
    measured, acceptance = cell["speedup"]["value"], cell["acceptance"]
    if not measured or acceptance is None:
        return None
    return tokens_a_pass(cell) / measured - 1


def tokens_a_pass(cell: dict[str, Any]) -> float:
    """Of a cell with acceptance. A server's counters know rounds with drafts alone, so that tokens
    over these would be too many: there it is τ."""
    acceptance = cell["acceptance"]
    told = acceptance["tokens_per_round"] if cell["parts"] else None
    return acceptance["acceptance_length"]["value"] if told is None else told


def fitted_overhead(fit: dict[str, Any], drafts: str) -> float | None:
    """a + K·c + v_N of a shape, as fitted."""
    depth = trees.parse(drafts).depth
    if "cost_ratio" in fit and drafts in fit["verify_overhead"]:
        cost_ratio = fit["cost_ratios"][drafts]
        return fit["drafting_fixed"] + depth * cost_ratio + fit["verify_overhead"][drafts]
    if "overhead_per_draft" in fit:
        return fit["overhead_fixed"] + depth * fit["overhead_per_draft"]
    return None


def point(cell: dict[str, Any], fit: dict[str, Any]) -> dict[str, Any]:
    """Predicted (tokens a pass / the fitted cost of a pass) against measured, and how much
    acceptance the cost asks for.

    Break-even efficiency is overhead / drafts a pass, which is `speedup.breakeven_alpha` for a
    chain that always drafts K.
    """
    shape = trees.parse(cell["drafts"])
    fitted = fitted_overhead(fit, cell["drafts"])
    overhead = _left_over(cell) if fitted is None else fitted
    found: dict[str, Any] = {
        "drafts": cell["drafts"],
        "draft_length": shape.depth,
        "measured": cell["speedup"],
        "predicted": None,
        "overhead": overhead,
        "acceptance_length": None,
        "tokens_per_round": None,
        "draft_efficiency": None,
        "breakeven_efficiency": None,
        "breakeven_acceptance_rate": None,
    }
    if cell["acceptance"] is None or overhead is None:
        return found
    length = cell["acceptance"]["acceptance_length"]["value"]
    found["acceptance_length"] = length
    found["tokens_per_round"] = tokens_a_pass(cell)
    found["draft_efficiency"] = cell["acceptance"]["draft_efficiency"]
    found["breakeven_efficiency"] = overhead * cell["rounds"] / cell["drafted"]
    if not shape.branches:
        rate = breakeven_acceptance_rate(overhead, shape.depth)
        found["breakeven_acceptance_rate"] = rate if rate <= 1 else None  # JSON knows no infinity
    if fitted is not None:
        found["predicted"] = tokens_a_pass(cell) / (1 + fitted)
    return found


# ---- over concurrencies --------------------------------------------------------------------------


def stops_paying(speedups: Sequence[tuple[int, float]]) -> float | None:
    """The concurrency from which on drafting is no faster: where the line between two measured
    points, over log concurrency, crosses 1 for the last time.

    Returns:
        The lowest concurrency measured where it never paid; None where it still pays at the
        highest.
    """
    ordered = sorted(speedups)
    if not ordered or ordered[-1][1] > 1:
        return None
    last = max((i for i, (_, value) in enumerate(ordered) if value > 1), default=None)
    if last is None:
        return float(ordered[0][0])
    (low, above), (high, below) = ordered[last], ordered[last + 1]
    share = (above - 1) / (above - below)
    return float(low * (high / low) ** share)


def series(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each workload and temperature, what holds at each concurrency.

    Args:
        cells: of `measures`, those with drafts also with their `speedup`.
    """
    found = []
    for key in dict.fromkeys((cell["workload"], cell["temperature"]) for cell in cells):
        mine = [cell for cell in cells if (cell["workload"], cell["temperature"]) == key]
        by_concurrency = []
        for concurrency in sorted({cell["concurrency"] for cell in mine}):
            here = [cell for cell in mine if cell["concurrency"] == concurrency]
            plain = next((cell for cell in here if cell["drafts"] == OFF), None)
            drafted = [cell for cell in here if cell["drafts"] != OFF]
            if plain is None or not drafted:
                continue
            fit = costs(plain, drafted)
            points = [point(cell, fit) for cell in drafted]
            paid = [p for p in points if p["measured"]["value"] is not None]
            best = max(paid, key=lambda p: p["measured"]["value"], default=None)
            by_concurrency.append(
                {
                    "concurrency": concurrency,
                    "fit": fit,
                    "points": points,
                    "best": best and best["drafts"],
                }
            )
        names = list(dict.fromkeys(cell["drafts"] for cell in mine if cell["drafts"] != OFF))
        speeds = {
            name: [
                (entry["concurrency"], p["measured"]["value"])
                for entry in by_concurrency
                for p in entry["points"]
                if p["drafts"] == name and p["measured"]["value"] is not None
            ]
            for name in names
        }
        best_speeds = [
            (entry["concurrency"], max(values))
            for entry in by_concurrency
            if (values := [v for p in entry["points"] if (v := p["measured"]["value"]) is not None])
        ]
        found.append(
            {
                "workload": key[0],
                "temperature": key[1],
                "by_concurrency": by_concurrency,
                "stops_paying": {name: stops_paying(speeds[name]) for name in names}
                | {"best": stops_paying(best_speeds)},
            }
        )
    return found
