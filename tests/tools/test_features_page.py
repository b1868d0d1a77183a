"""Every line of the matrix of features is there once, with a test that exists, and with a result. The page for readers
has the same groups and fits one screen."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).parents[1]
MATRIX: Final = TESTS / "features.md"
PAGE: Final = TESTS.parent / "docs/explanation/features.md"
SCREEN: Final = 60  # lines
GROUPS: Final = {"A": 14, "B": 10, "C": 6, "D": 8, "E": 14, "F": 15}
LINES: Final = [f"{letter}{number}" for letter, count in GROUPS.items() for number in range(1, count + 1)]
LINK: Final = re.compile(r"\[([^\]]+)\]\((\w[^):]+\.py)\)")


def rows(cell_count: int) -> list[tuple[str, ...]]:
    """Return the rows of the tables with that many cells, without their heads."""
    lines = re.findall(r"^\| ([A-F]\d+ \|.*) \|$", MATRIX.read_text(), re.MULTILINE)
    cells = [tuple(cell.strip() for cell in line.split("|")) for line in lines]
    return [row for row in cells if len(row) == cell_count]


CHECKS: Final = rows(3)


@cache
def sentences_in(path: Path) -> set[str]:
    """Return the names of the tests in a file, as sentences."""
    nodes = ast.walk(ast.parse(path.read_text()))
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {name.removeprefix("test_").replace("_", " ") for name in names if name.startswith("test_")}


def test_each_line_is_described_once() -> None:
    described = rows(4)
    assert [line for line, *_ in described] == LINES
    assert [line for line, need, pgoutbox, _ in described if not need or not pgoutbox] == []


def test_each_line_is_checked_once_with_a_result() -> None:
    assert [line for line, *_ in CHECKS] == LINES
    assert [line for line, _, tried in CHECKS if not tried] == []


@pytest.mark.parametrize(("line", "tests"), [row[:2] for row in CHECKS], ids=[row[0] for row in CHECKS])
def test_the_tests_of_a_line_exist(line: str, tests: str) -> None:
    named = LINK.findall(tests)
    assert named != [], f"{line} names no test"
    assert len(named) == tests.count("["), f"{line} has a link that is not a test"
    missing = [
        f"{name} in {path}" for name, path in named if name[0].lower() + name[1:] not in sentences_in(TESTS / path)
    ]
    assert missing == []


def test_the_page_for_readers_has_the_same_groups_on_one_screen() -> None:
    def groups(page: Path) -> list[str]:
        return re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)

    assert groups(PAGE) == groups(MATRIX)
    assert PAGE.read_text().count("\n") <= SCREEN
