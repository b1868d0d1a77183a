"""python -m benchmarks.publish results.json [--to PAGE]: the performance page and its plots, from a run's `--json`.

The explanations are in `performance.template.md`. Every number, the facts of the machine and the versions come from
the results. So do not edit the page by hand.

These placeholders are replaced. Those between two texts of the template stay as they are in the page if the run has
none of their scenarios: so some scenarios can be measured again. On a new page they are marked as not measured.

    {{machine}} {{versions}} {{settings SCENARIO}} {{notes SCENARIO}} {{verdicts SCENARIO}}
    {{table SCENARIO NUMBER [COLUMN ...]}}   a table, or some of its columns
    {{bars SCENARIO NUMBER COLUMN FILE}}   a plot of one column
    {{ranges SCENARIO NUMBER COLUMN-COLUMN UNIT FILE}}   a plot of neighbouring columns, such as percentiles
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from benchmarks.plots import bars, number, ranges

TEMPLATE = Path(__file__).parent / "performance.template.md"
PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "performance.md"
_NOT_MEASURED = "*Not measured in this run.*"
_PLACEHOLDER = re.compile(r"\{\{(\w+)([^{}]*)\}\}")

Cell = str | int | float | bool | None


class _Table(TypedDict):
    title: str
    columns: list[str]
    rows: list[list[Cell]]


class _Verdict(TypedDict):
    what: str
    value: float
    target: float
    direction: str
    unit: str
    is_met: bool


class _Scenario(TypedDict):
    settings: dict[str, Cell]
    tables: list[_Table]
    verdicts: list[_Verdict]
    notes: list[str]


class Results(TypedDict):
    """The content of `--json`, as far as the page needs it."""

    quick: bool
    machine: dict[str, Cell]
    versions: dict[str, str]
    scenarios: dict[str, _Scenario]


class TemplateError(ValueError):
    """The template refers to something that does not exist."""


def publish(results: Results, page: Path, template: str) -> list[Path]:
    """Write the page, and the plots into `img` next to it. Return the files.

    Raises `TemplateError` if a part of the page is to stay, but the page has other texts than the template.
    """
    images: dict[str, str] = {}
    parts = [
        (is_text, list(part))
        for is_text, part in itertools.groupby(template.splitlines(), key=lambda line: bool(line) and "{{" not in line)
    ]
    measured = results["scenarios"].keys()
    asked = set[str]().union(*(_scenarios_of(part) for _, part in parts))
    # If most tables are of a former run, so are the facts of the machine.
    former = _former(page, parts) if page.exists() and not asked <= measured else {}
    lines: list[str] = []
    for place, (is_text, part) in enumerate(parts):
        if is_text:
            lines += part
        elif place in former and not _scenarios_of(part) & measured:
            lines += former[place]
        else:
            _render(part, results, images, lines)
    page.parent.mkdir(parents=True, exist_ok=True)
    written = [page]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, content in images.items():
        path = page.parent / "img" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
        written.append(path)
    return written


def _scenarios_of(part: Sequence[str]) -> set[str]:
    calls = [match[2].split() for line in part if (match := _PLACEHOLDER.fullmatch(line.strip()))]
    return {arguments[0] for arguments in calls if arguments}


def _former(page: Path, parts: Sequence[tuple[bool, list[str]]]) -> dict[int, list[str]]:
    """Return the lines of the page in place of the placeholders, by the place of their part."""
    pattern = "".join(
        "".join(f"{re.escape(line)}\n" for line in part) if is_text else "((?:.*\n)*?)" for is_text, part in parts
    )
    match = re.fullmatch(pattern, page.read_text(encoding="utf-8"))
    if match is None:
        raise TemplateError(f"{page} has other texts than the template: measure all scenarios, or give it these texts")
    places = [place for place, (is_text, _) in enumerate(parts) if not is_text]
    return {place: text.splitlines() for place, text in zip(places, match.groups(), strict=True)}


def _render(part: Sequence[str], results: Results, images: dict[str, str], lines: list[str]) -> None:
    """Append the lines of a part, with what its placeholders stand for."""
    for line in part:
        match = _PLACEHOLDER.fullmatch(line.strip())
        if match is None:
            if line:
                raise TemplateError(f"put the placeholder on its own line: {line}")
            lines.append(line)
            continue
        replacement = _replacement(match[1], match[2].split(), results, images)
        # Once is enough for adjacent placeholders without measurements.
        if replacement != [_NOT_MEASURED] or _last_text(lines) != _NOT_MEASURED:
            lines += replacement
        elif lines and not lines[-1]:
            lines.pop()


def _last_text(lines: Sequence[str]) -> str:
    return next((line for line in reversed(lines) if line), "")


def _replacement(kind: str, arguments: Sequence[str], results: Results, images: dict[str, str]) -> list[str]:
    match kind, list(arguments):
        case "machine", []:
            facts = ", ".join(f"{name} {_shown(value)}" for name, value in results["machine"].items())
            quick = ["", "**A quick run only checks that the benchmarks work: no number of it means anything.**"]
            return [f"The machine: {facts}.", *(quick if results["quick"] else [])]
        case "versions", []:
            return [
                "Versions: " + ", ".join(f"{name} {version}" for name, version in results["versions"].items()) + "."
            ]
        case _, [scenario, *rest]:
            found = results["scenarios"].get(scenario)
            return [_NOT_MEASURED] if found is None else _of_scenario(kind, found, rest, images)
        case _:
            raise TemplateError(f"unknown placeholder: {kind} {' '.join(arguments)}")


def _of_scenario(kind: str, scenario: _Scenario, rest: Sequence[str], images: dict[str, str]) -> list[str]:
    match kind, list(rest):
        case "settings", []:
            return [f"- {name}: {_shown(value)}" for name, value in scenario["settings"].items()]
        case "notes", []:
            return [f"- {note}" for note in scenario["notes"]]
        case "verdicts", []:
            return _verdicts(scenario["verdicts"])
        case "table", [index, *wanted]:
            table = _table_of(scenario, index)
            columns = [int(column) for column in wanted] or range(len(table["columns"]))
            rows = [[_shown(row[column]) for column in columns] for row in table["rows"]]
            return _markdown([table["columns"][column] for column in columns], rows)
        case "bars", [index, column, file]:
            table = _table_of(scenario, index)
            values = [(str(row[0]), _as_float(row[int(column)])) for row in table["rows"]]
            return _image(file, bars(table["title"], values), table["title"], images)
        case "ranges", [index, between, unit, file]:
            table = _table_of(scenario, index)
            first, last = (int(column) for column in between.split("-"))
            values_of = [(str(row[0]), [_as_float(cell) for cell in row[first : last + 1]]) for row in table["rows"]]
            title = f"{table['title']}: {', '.join(table['columns'][first : last + 1])}"
            return _image(file, ranges(title, values_of, unit=unit), title, images)
        case _:
            raise TemplateError(f"unknown placeholder: {kind} {' '.join(rest)}")


def _table_of(scenario: _Scenario, index: str) -> _Table:
    try:
        return scenario["tables"][int(index)]
    except (IndexError, ValueError):
        raise TemplateError(f"there is no table {index}") from None


def _image(file: str, content: str, title: str, images: dict[str, str]) -> list[str]:
    images[file] = content
    return [f"![{title}](img/{file})"]


def _verdicts(verdicts: Sequence[_Verdict]) -> list[str]:
    """Return how many targets were met, and each missed one."""
    missed = [
        f"- {verdict['what']}: {_with_unit(verdict['value'], verdict['unit'])}"
        f" ({verdict['direction']} {_with_unit(verdict['target'], verdict['unit'])})"
        for verdict in verdicts
        if not verdict["is_met"]
    ]
    met = f"Targets met: {len(verdicts) - len(missed)} of {len(verdicts)}."
    return [f"{met} Missed:", "", *missed] if missed else [met]


def _with_unit(value: float, unit: str) -> str:
    return f"{number(value)} {unit}".rstrip()


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    return head + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _shown(cell: Cell) -> str:
    match cell:
        case None:
            return "-"
        case bool() | str():
            return str(cell)
        case int():
            return f"{cell:,}"
        case float():
            return number(cell)


def _as_float(cell: Cell) -> float:
    return float(cell) if isinstance(cell, (int, float)) else float("nan")


def read_results(path: Path) -> Results:
    """Return the results of a run, or exit with the reason."""
    try:
        document: Mapping[str, object] = json.loads(path.read_text(encoding="utf-8"))
        missing = {"quick", "machine", "versions", "scenarios"} - document.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f"{path}: {error}") from error
    if missing:
        raise SystemExit(f"{path} is not a result of a run: {', '.join(sorted(missing))} missing")
    return Results(
        quick=bool(document["quick"]),
        machine=document["machine"],  # type: ignore[typeddict-item] # Written by `write_json`.
        versions=document["versions"],  # type: ignore[typeddict-item]
        scenarios=document["scenarios"],  # type: ignore[typeddict-item]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description="Write the performance page.")
    parser.add_argument("results", type=Path, help="the file that a run wrote with --json")
    parser.add_argument("--to", type=Path, default=PAGE, metavar="PAGE", help="the page; its plots go to img")
    arguments = parser.parse_args()
    for path in publish(read_results(arguments.results), arguments.to, TEMPLATE.read_text(encoding="utf-8")):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
