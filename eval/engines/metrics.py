"""What a running vLLM accepted, read from its Prometheus page.

Its counters run from the start of the process, so acceptance over a time is the difference of two
pages. A server of several engines has a line for each; they are added up. vLLM counts drafts past
the end of an answer too, so its τ is a little higher on short answers than ours.

Legend: K draft length.
"""

import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headstart.eval.reports import report

_LINE = re.compile(
    r'^vllm:(\w+?)(?:_total)?(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? ([-+.\w]+)', re.MULTILINE
)
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


@dataclass
class EngineCounts:
    """A server's counters."""

    rounds: float
    """Drafts in vLLM's words: passes in which a text had drafts."""
    drafted: float
    """Draft tokens."""
    accepted: list[float]
    """Draft tokens by position 1, 2, …, K."""
    generated: float
    """Tokens written, of all requests."""

    def since(self, earlier: "EngineCounts") -> "EngineCounts":
        """What happened after `earlier`.

        Raises:
            ValueError: another server, or one that was started again in between.
        """
        pairs = list(zip(self.accepted, earlier.accepted, strict=False))
        rounds, drafted = self.rounds - earlier.rounds, self.drafted - earlier.drafted
        other = len(self.accepted) != len(earlier.accepted)
        if other or rounds < 0 or any(now < then for now, then in pairs):
            raise ValueError(
                "page: the counters went down between the two pages, so they are not of one run of "
                "one server, the earlier first; scrape both again"
            )
        accepted = [now - then for now, then in pairs]
        return EngineCounts(rounds, drafted, accepted, self.generated - earlier.generated)

    def measures(self) -> dict[str, Any]:
        """α, τ and their like, as the acceptance report names them.

        Acceptance rate and conditional acceptance need to know how often a position was examined:
        as often as the one before was accepted, where every round drafted K. Else they are None.

        Raises:
            ValueError: there was no round.
        """
        if not self.rounds:
            raise ValueError(
                "page: no drafts were made in this time; send requests meanwhile, or take a longer "
                "time (--seconds), or everything since the server's start (--seconds 0)"
            )
        total, examined = sum(self.accepted), [self.rounds, *self.accepted[:-1]]
        whole = self.drafted == len(self.accepted) * self.rounds
        conditional = None
        if whole:
            pairs = zip(self.accepted, examined, strict=True)
            conditional = [a / e if e else None for a, e in pairs]
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": total,
            "acceptance_length": 1 + total / self.rounds,
            "acceptance_rate": total / sum(examined) if whole else None,
            "draft_efficiency": total / self.drafted,
            "conditional": conditional,
            "joint": [a / self.rounds for a in self.accepted],
        }


def counters(text: str) -> tuple[dict[str, float], dict[int, float]]:
    """vLLM's of a page, without its prefix, and drafts accepted by position 0, 1, …: of all engines
    together."""
    found: dict[str, float] = {}
    accepted: dict[int, float] = {}
    for counter, labels, value in _LINE.findall(text):
        position = _POSITION.search(labels)
        if counter == PER_POSITION and position:
            index = int(position[1])
            accepted[index] = accepted.get(index, 0.0) + float(value)
        else:
            found[counter] = found.get(counter, 0.0) + float(value)
    return found, accepted


def parse(text: str, name: str) -> EngineCounts:
    """The counters of a page.

    Raises:
        ValueError: a page that is not vLLM's, or of a server without drafts.
    """
    found, accepted = counters(text)
    if not found:
        raise ValueError(f"page {name!r} is no metrics page of vLLM; pass such as http://HOST:8000")
    if not accepted:
        raise ValueError(
            f"page {name!r}: this server makes no drafts; start it with --speculative-config "
            "(eval/engine.py serve prints the command)"
        )
    names = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "generation_tokens")
    lacking = [counter for counter in names if counter not in found]
    if lacking or sorted(accepted) != list(range(len(accepted))):
        missing = lacking[0] if lacking else f"{PER_POSITION} of every position"
        raise ValueError(f"page {name!r} has no {missing}; is it cut off? Save all of it")
    rounds, drafted, generated = (found[counter] for counter in names)
    counts = [rounds, *(accepted[position] for position in range(len(accepted)))]
    falling = all(0 <= after <= before for before, after in pairwise(counts))
    if not (falling and drafted >= sum(counts[1:]) and drafted >= rounds and generated >= 0):
        raise ValueError(
            f"page {name!r}: its counters contradict each other ({rounds:g} rounds, {drafted:g} "
            f"drafted, accepted by position {', '.join(f'{a:g}' for a in counts[1:])}); "
            "read it again from the server"
        )
    return EngineCounts(rounds, drafted, counts[1:], generated)


def is_url(page: str) -> bool:
    return page.startswith(("http://", "https://"))


def check_url(field: str, server: str) -> None:
    """Raise a ValueError for a server's address without its scheme."""
    if not is_url(server):
        raise ValueError(f"{field} is {server!r}; an address begins so: 'http://{server}'")


def _looks_like_server(page: str) -> bool:
    """HOST:PORT, perhaps with a path behind it, that no file here is called."""
    return re.match(r"[\w.-]+:\d+(/|$)", page) is not None and not Path(page).exists()


def scrape(page: str) -> EngineCounts:
    """The counters of a server (its address, or that of its page) or of a saved page.

    Raises:
        ValueError: neither there, or not of a server with drafts.
    """
    if _looks_like_server(page):
        check_url("page", page)
    if not is_url(page):
        try:
            return parse(Path(page).read_text(encoding="utf-8"), page)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"page {page!r} cannot be read ({error}); pass a server's address or a saved page"
            ) from error
    address = page if urlsplit(page).path.strip("/") else page.rstrip("/") + "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return parse(answer.read().decode(), address)
    except (OSError, urllib.error.URLError) as error:
        raise ValueError(
            f"page {address!r} cannot be read ({error}); is the server running there?"
        ) from error


@dataclass
class Metrics:
    """Which page to read, and over which time."""

    page: str
    """A server's address, such as http://localhost:8000, or the file of a saved page."""
    later: str | None = None
    """A page of the same server saved later: count what happened in between."""
    seconds: float = 0.0
    """Read a server twice, so many seconds apart; 0: everything since its start."""

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError(f"seconds must be 0 or more, got {self.seconds}")
        if _looks_like_server(self.page):
            check_url("page", self.page)
        if self.seconds and (self.later or not is_url(self.page)):
            raise ValueError(
                f"seconds is {self.seconds:g}, but a saved page does not change; leave it out, and "
                "pass a page saved later as --later"
            )


def show(counts: EngineCounts) -> str:
    """The measures as two tables."""
    measures = counts.measures()
    length, rate = measures["acceptance_length"], measures["acceptance_rate"]
    rows = [
        ["rounds (vLLM's drafts)", f"{measures['rounds']:.0f}"],
        ["drafted", f"{measures['drafted']:.0f}"],
        ["accepted", f"{measures['accepted']:.0f}"],
        ["acceptance length τ", report.number(length)],
        ["acceptance rate α, of examined", report.number(rate)],
        ["draft efficiency, of drafted", report.number(measures["draft_efficiency"])],
    ]
    conditional = measures["conditional"] or [None] * len(measures["joint"])
    positions = [
        [str(i + 1), f"{counts.accepted[i]:.0f}", report.number(joint), report.number(given)]
        for i, (joint, given) in enumerate(zip(measures["joint"], conditional, strict=True))
    ]
    header = ["position", "accepted", "joint acceptance", "conditional"]
    text = f"{report.table(['measure', 'value'], rows)}\n\n{report.table(header, positions)}"
    if rate is None:
        text += "\n\nSome rounds drafted less than K, so how often each position was examined, and "
        text += "with it α, cannot be told from the page."
    return text


def run(settings: Metrics) -> None:
    """Read and print."""
    first = scrape(settings.page)
    if settings.seconds:
        time.sleep(settings.seconds)
    if settings.seconds or settings.later:
        first = scrape(settings.later or settings.page).since(first)
    print(show(first))
