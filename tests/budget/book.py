"""The book of the budget: what a message of each kind may cost, and the judgement of measured costs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.budget.meter import Kind

BOOK = Path(__file__).with_name("budget.json")
# What two runs of the same work may differ by, whatever their size: on a busy machine claims find fewer messages.
_NOISE: Final[Mapping[str, float]] = {
    "Python calls": 8_000,
    "WAL bytes": 8_000,
    "bytes to the client": 8_000,
    "bytes to the server": 8_000,
    "dead rows": 20,
    "index entries": 20,
    "notifications": 20,
    "pages read": 1_500,
    "round trips": 10,
    "statements": 10,
    "transactions": 10,
}

Costs = dict[str, float]


def read_book() -> dict[str, dict[str, Costs]]:
    """Return the budget: by kind and by number of messages."""
    book: dict[str, dict[str, Costs]] = json.loads(BOOK.read_text())
    return book


def exceeded(kind: Kind, costs: list[Costs], budget: Mapping[str, Costs]) -> list[str]:
    """Return a line for each count above its budget, and for each that grows with the number of messages."""
    found = []
    small, large = kind.sizes
    for size, cost in zip(kind.sizes, costs, strict=True):
        allowed = budget[str(size)]
        found += [
            f"{name}: {value:g} for each of {size} messages, budget {allowed[name]:g}"
            for name, value in cost.items()
            if value > _allowed(kind, name, allowed[name], size)
        ]
    found += [
        f"{name}: {value:g} for each of {large} messages, but {costs[0][name]:g} for each of {small}"
        for name, value in costs[1].items()
        if value > _allowed(kind, name, costs[0][name], small)
    ]
    return found


def least(costs: list[Costs], again: list[Costs]) -> list[Costs]:
    """Return the lower of two measurements of each count: a disturbance only adds."""
    return [
        {name: min(value, other[name]) for name, value in one.items()} for one, other in zip(costs, again, strict=True)
    ]


def rounded_up(value: float) -> float:
    """Return the value with three digits, rounded up."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return round(math.ceil(value / unit - 1e-9) * unit, 6)


def _allowed(kind: Kind, name: str, value: float, size: int) -> float:
    return kind.share_of(name) * value + _NOISE[name] / size
