"""The results of a scenario and their output: tables for people, JSON for machines. A verdict never fails a run."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A measured value and its target in the design."""

    what: str
    value: float
    target: float
    direction: Literal["at least", "at most"]
    unit: str = "x"

    @property
    def is_met(self) -> bool:
        """Return whether the value reaches the target."""
        return self.value >= self.target if self.direction == "at least" else self.value <= self.target


@dataclass(slots=True)
class Result:
    """The results of one scenario. `samples` are the single measurements behind the tables."""

    scenario: str
    settings: dict[str, Cell] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: dict[str, Sequence[float]] = field(default_factory=dict)


def median(values: Sequence[float]) -> float:
    """Return the median, or NaN for no values."""
    return statistics.median(values) if values else float("nan")


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by nearest rank, or NaN for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def ratio_of_rounds(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios within each round, so that slow rounds cancel out."""
    return median([a / b for a, b in zip(ours, theirs, strict=True) if b])


def machine_facts(server_version: str) -> dict[str, Cell]:
    """Return the facts that the numbers depend on, without the names of machine and user."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "PostgreSQL": server_version,
        "Python": platform.python_version(),
        "load before": round(os.getloadavg()[0], 2),
    }


def show(result: Result) -> None:
    """Print a result: with rich on a terminal, as plain text otherwise."""
    tables = list(result.tables)
    if result.verdicts:
        tables.append(
            Table(
                "verdicts",
                ("what", "value", "target", "verdict"),
                [
                    (
                        v.what,
                        f"{_number(v.value)} {v.unit}",
                        f"{v.direction} {_number(v.target)} {v.unit}",
                        "met" if v.is_met else "MISSED",
                    )
                    for v in result.verdicts
                ],
            )
        )
    print(f"\n== {result.scenario} ==")
    if result.settings:
        print(", ".join(f"{name}={value}" for name, value in result.settings.items()))
    for table in tables:
        _show_table(table)
    for title, text in result.texts:
        print(f"\n{title}\n{text}")
    for note in result.notes:
        print(f"note: {note}")
    sys.stdout.flush()


def _show_table(table: Table) -> None:
    rows = [[_text(cell) for cell in row] for row in table.rows]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table as RichTable
        except ImportError:
            pass
        else:
            shown = RichTable(title=table.title, title_justify="left")
            for index, column in enumerate(table.columns):
                shown.add_column(column, justify="left" if index == 0 else "right")
            for row in rows:
                shown.add_row(*row)
            Console().print(shown)
            return
    widths = [max(len(line[i]) for line in [list(table.columns), *rows]) for i in range(len(table.columns))]
    print(f"\n{table.title}")
    for line in (list(table.columns), ["-" * width for width in widths], *rows):
        cells = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return _number(cell) if isinstance(cell, float) else str(cell)


def _number(value: float) -> str:
    if value != value:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def document_of(
    machine: Mapping[str, Cell], versions: Mapping[str, str], results: Sequence[Result], *, quick: bool
) -> dict[str, object]:
    """Return all results, including the single measurements, as JSON has them."""
    return {
        "quick": quick,
        "machine": machine,
        "versions": versions,
        "scenarios": {
            result.scenario: {
                **asdict(result),
                "verdicts": [{**asdict(v), "is_met": v.is_met} for v in result.verdicts],
            }
            for result in results
        },
    }


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write the file atomically, so that an interrupted run keeps the previous scenarios."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(document, indent=2) + "\n")
    draft.replace(path)
