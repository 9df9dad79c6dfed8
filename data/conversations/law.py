"""The law that answers were written under: how each of their tokens was chosen.

A text tells what a drafter is accepted under one law alone, the one it was written under. Rows hold
it: `temperature`, and beside it `top_k`, `top_p` and whatever else was on. A row without a
temperature is of an unknown law. A row with nothing but a temperature is an old one: the file's
record (`.meta.json`) tells the rest, and without one nothing else was on.
"""

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from headstart.data.conversations.bad import BadRow

_ALWAYS = ("temperature", "top_k", "top_p")  # rows name them even where they are off


@dataclass(frozen=True)
class Law:
    """A temperature; everything else is off unless it is given."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    left_to_server: tuple[str, ...] = ()
    """Those of the above that the server which wrote the answers refused to be told."""

    @property
    def shape(self) -> "Law":
        """What is known to shape a text: a greedy one is not shaped by what cuts off a tail."""
        tail = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} if self.temperature == 0 else {}
        return replace(self, left_to_server=(), **tail)

    def to_json(self) -> dict[str, Any]:
        """As a row holds it."""
        every = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {n: v for n, (v, off) in every.items() if n in _ALWAYS or v != off}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.on().items())

    def on(self) -> dict[str, float]:
        """The temperature, and whatever is not off."""
        shape = self.shape
        found = {field.name: getattr(shape, field.name) for field in fields(shape)[:-1]}
        off = Law(self.temperature)
        return {n: v for n, v in found.items() if n == "temperature" or v != getattr(off, n)}


class Written(Protocol):
    """A conversation, or a row of one."""

    id: str
    law: Law | None


def of_row(row: dict[str, Any], where: str) -> Law | None:
    """The law of a row's answers; None: unknown, as its temperature is.

    Raises:
        BadRow: a number that is none, or a temperature below 0.
    """
    if row.get("temperature") is None:
        return None
    found = {}
    for field in fields(Law)[:-1]:
        value = row.get(field.name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise BadRow(where, f"{field.name} must be a number", f", got {value!r}")
        found[field.name] = value
    if found["temperature"] < 0:
        raise BadRow(where, "temperature must be a number ≥ 0", f", got {found['temperature']}")
    found["top_k"] = max(0, found.get("top_k", 0))  # engines write -1 where it is off
    left = row.get("left_to_server") or ()
    return Law(**found, left_to_server=tuple(map(str, left)))


def recorded(file: Path) -> dict[str, Any]:
    """What the record beside a file of answers says of their law; empty where there is none."""
    try:
        record = json.loads(file.with_suffix(".meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: record[k] for k in _ALWAYS if k in record} if isinstance(record, dict) else {}


def completed(row: Any, record: dict[str, Any]) -> Any:
    """A row of an older file, with what its record says beside the temperature."""
    if not isinstance(row, dict) or any(row.get(name) is not None for name in _ALWAYS[1:]):
        return row
    known = row.get("temperature") is not None and row["temperature"] == record.get("temperature")
    return row | record if known else row


def check(answers: Iterable[Written], run: Law, way_out: Callable[[Law], str]) -> None:
    """Refuse to measure under one law on answers of another.

    Args:
        way_out: what to do, given the answers' law.

    Raises:
        ValueError: an answer of another law, the first one by name.
    """
    unsure = Counter[str]()
    for one in answers:
        if one.law is None:
            continue
        if one.law.shape != run.shape:
            found = f"{one.id} was answered at {one.law}, not at {run}"
            raise ValueError(f"{found}: {way_out(one.law)}")
        unsure.update(one.law.left_to_server)
    if unsure:
        warnings.warn(
            f"{max(unsure.values())} answers are of a server that refused {', '.join(unsure)}: "
            "where its own default is not off, they are of another law than the run's",
            stacklevel=2,
        )
