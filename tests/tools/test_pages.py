"""The checks of the pages name each fault, and find none in pages without faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.pages import CHECKS, ROOT, main

COUNTS = {"A": 14, "B": 10, "C": 6, "D": 8, "E": 14, "F": 24}
LINES = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]
TEST = "[A message is sent](worker/test_sending.py)"
PAGES = {
    "README.md": "# Club\n\nSee [the list](docs/decisions.md#decisions).\n\n```sh\n[x](no-link.md) jobs\n```\n",
    "CHANGELOG.md": "# Changelog\n",
    "docs/README.md": """# Docs

[Guarantees](explanation/guarantees.md), [faults](explanation/reliability.md), [features](explanation/features.md),
[decisions](decisions.md)
""",
    "docs/decisions.md": "# Decisions\n\n1. [One\n   table](decisions/0001-one-table.md)\n",
    "docs/zensical.toml": """[project]
nav = [
    { Start = ["index.md", "contents.md"] },
    { Why = ["explanation/guarantees.md", { More = ["explanation/reliability.md", "explanation/features.md"] }] },
    { Decisions = ["decisions.md", "decisions/*", "changelog.md"] },
]
""",
    "docs/decisions/0001-one-table.md": "# 1. One table\n\n- Date: 2026-01-31\n- Status: accepted\n\nBecause.\n",
    "docs/explanation/guarantees.md": "Sent: `tests/worker/test_sending.py` (a message is\n  sent; a scenario).\n",
    "docs/explanation/reliability.md": "| a crash | `test_a_message_is_sent` |\n",
    "docs/explanation/features.md": "## Mail\n\n[all](../../tests/features.md)\n",
    "tests/features.md": "## Mail\n\n"
    + "".join(
        [f"| {line} | need | pgoutbox | others |\n" for line in LINES]
        + [f"| {line} | {TEST} | works |\n" for line in LINES]
    ),
    "tests/worker/test_sending.py": "def test_a_message_is_sent() -> None: ...\nasync def a_scenario() -> None: ...\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in PAGES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_pages_without_faults_pass(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(root) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("page", "old", "new", "fault"),
    [
        ("README.md", "# Club", "# Dead letters", "README.md: `Dead letters` is not a term of the glossary"),
        ("README.md", "See", "`tests/worker/no.py`", "README.md: tests/worker/no.py does not exist"),
        ("docs/README.md", "[faults]", "[", "docs/explanation/reliability.md: not in the index docs/README.md"),
        (
            "docs/zensical.toml",
            "{ Start = [",
            '{ Start = ["explanation/features.md", ',
            "docs/explanation/features.md: name it once, as explanation/features.md, in a group of docs/zensical.toml",
        ),
        (
            "docs/zensical.toml",
            '"index.md"',
            '"home.md"',
            "README.md: name it once, as index.md, in a group of docs/zensical.toml",
        ),
        ("docs/zensical.toml", '"index.md"', '"home.md"', "docs/zensical.toml: there is no page home.md"),
        (
            "docs/decisions.md",
            "1. [One",
            "1. [A",
            "docs/decisions/0001-one-table.md: its number and title are not in docs/decisions.md",
        ),
        (
            "docs/decisions/0001-one-table.md",
            "accepted",
            "good",
            "docs/decisions/0001-one-table.md: must begin with its number and title, date and status",
        ),
        (
            "docs/decisions/0001-one-table.md",
            "# 1.",
            "# 2.",
            "docs/decisions/0001-one-table.md: must have the number 1",
        ),
        (
            "docs/explanation/guarantees.md",
            "a scenario",
            "a story",
            "docs/explanation/guarantees.md: no test of tests/worker/test_sending.py says: a story",
        ),
        (
            "docs/explanation/guarantees.md",
            "(a",
            "a",
            "docs/explanation/guarantees.md: names no test",
        ),
        (
            "docs/explanation/reliability.md",
            "is_sent",
            "is_lost",
            "docs/explanation/reliability.md: test_a_message_is_lost does not exist",
        ),
        ("docs/explanation/reliability.md", "`", "", "docs/explanation/reliability.md: names no test"),
        (
            "tests/features.md",
            f"| A2 | {TEST} |",
            f"| A2 | {TEST.replace('sent]', 'lost]')} |",
            "tests/features.md: A2: no test of worker/test_sending.py says: A message is lost",
        ),
        (
            "tests/features.md",
            f"| A2 | {TEST} | works |\n",
            "",
            "tests/features.md: the checks must have the lines A1 to F24 once, in order",
        ),
        (
            "tests/features.md",
            "| A2 | need |",
            "| A2 |  |",
            "tests/features.md: A2 has an empty cell",
        ),
        (
            "tests/features.md",
            f"| A2 | {TEST} |",
            "| A2 | [the page](../README.md) |",
            "tests/features.md: A2 must name tests, and only tests",
        ),
        (
            "docs/explanation/features.md",
            "## Mail",
            "## Post",
            "docs/explanation/features.md: must have the groups of tests/features.md",
        ),
        (
            "docs/explanation/features.md",
            "## Mail",
            "## Mail" + "\n" * 60,
            "docs/explanation/features.md: must have at most 60 lines",
        ),
    ],
)
def test_a_fault_is_named(root: Path, page: str, old: str, new: str, fault: str) -> None:
    assert old in PAGES[page]
    (root / page).write_text(PAGES[page].replace(old, new))
    assert fault in [found for check in CHECKS for found in check(root)]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("docs", "docs", ""),
        ("docs/decisions.md", "docs/INDEX.md", "README.md:3:16: [MD057]"),
        ("#decisions", "#reasons", "README.md:3:5: [MD051]"),
    ],
)
def test_a_broken_link_is_named(root: Path, old: str, new: str, fault: str) -> None:
    (root / "README.md").write_text(PAGES["README.md"].replace(old, new))
    command = [
        str(Path(sys.executable).with_name("rumdl")),
        "check",
        "--quiet",
        "--config",
        str(ROOT / "pyproject.toml"),
        ".",
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == int(fault != ""), done.stderr
    assert done.stdout[: len(fault) or None] == fault
