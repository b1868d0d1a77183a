"""Print the branch coverage of the package as a table with a row for each sub-package.

Reads the report of `coverage json` from standard input; `make coverage` calls it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any


@dataclass(slots=True)
class Row:
    """Counts of statements and branches, and how many of them the tests ran."""

    statements: int = 0
    branches: int = 0
    covered: int = 0

    @property
    def percent(self) -> float:
        """The share of statements and branches that the tests ran."""
        return 100 * self.covered / max(self.statements + self.branches, 1)


def rows_of(report: dict[str, Any]) -> dict[str, Row]:
    """A row for each directory of a report, by its dotted name, and one for all of them together."""
    rows: dict[str, Row] = defaultdict(Row)
    for name, file in report["files"].items():
        summary = file["summary"]
        for row in (rows[".".join(PurePath(name).parent.parts)], rows["total"]):
            row.statements += summary["num_statements"]
            row.branches += summary["num_branches"]
            row.covered += summary["covered_lines"] + summary["covered_branches"]
    return {name: rows[name] for name in sorted(rows, key=lambda name: (name == "total", name))}


def main() -> None:
    """Print the table."""
    rows = rows_of(json.load(sys.stdin))
    width = max(map(len, rows))
    print(f"{'package':{width}}  statements  branches  covered")
    for name, row in rows.items():
        print(f"{name:{width}}  {row.statements:10,}  {row.branches:8,}  {row.percent:6.1f}%")


if __name__ == "__main__":
    main()
