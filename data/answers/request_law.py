"""What a request to a server says of the law: all of it.

A field that a request leaves out is not off, but whatever the server takes for its default: the
model's generation_config.json in vLLM and SGLang, top_k 40, top_p 0.95 and min_p 0.05 in llama.cpp.
Some servers refuse fields that are not OpenAI's; those are left out, which is said.
"""

import re
import warnings
from collections.abc import Iterable
from typing import Any

from headstart.models.proposal.sampling import Sampling

_OFF: dict[str, float] = {
    "top_p": 1.0,
    "top_k": -1,  # in vLLM, SGLang and llama.cpp; SGLang refuses 0
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,  # llama.cpp's name for it
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def law_fields(sampling: Sampling) -> dict[str, float]:
    """The fields of a request whose answer is to be of this law."""
    asked: dict[str, float] = {"temperature": sampling.temperature}
    if not sampling.greedy:
        asked["top_p"] = sampling.top_p
        asked["top_k"] = sampling.top_k or _OFF["top_k"]
    return _OFF | asked


def refused_fields(status: int, complaint: str, request: dict[str, Any]) -> set[str]:
    """Those that a server's refusal names, of the request's that say that something is off.

    What is on is the law that was asked for, and is not left out.
    """
    if status not in (400, 422):
        return set()
    off = (name for name, value in _OFF.items() if request.get(name) == value)
    return {name for name in off if re.search(rf"\b{name}\b", complaint)}


class LeftOut:
    """The fields that a server refuses: left out of its requests, which is said once.

    Args:
        server: its address.
    """

    def __init__(self, server: str):
        self.server = server
        self.names: frozenset[str] = frozenset()

    def of(self, request: dict[str, Any], more: Iterable[str] = ()) -> dict[str, Any]:
        """The request without them, and without `more`."""
        return {k: v for k, v in request.items() if k not in self.names.union(more)}

    def settle(self, names: Iterable[str]) -> None:
        """A request was answered once these were left out."""
        before = self.undecided
        self.names |= frozenset(names)
        new = [name for name in self.undecided if name not in before]
        if new:
            warnings.warn(
                f"server {self.server} refuses {', '.join(new)}: left out of its requests, so its "
                "own default rules, which need not be the law that was asked for",
                stacklevel=2,
            )

    @property
    def undecided(self) -> tuple[str, ...]:
        """Of the law's fields, those that the server decides."""
        both = {"repetition_penalty", "repeat_penalty"}  # it knows the one or the other
        names = self.names - both if both - self.names else self.names - {"repeat_penalty"}
        return tuple(sorted(names))
