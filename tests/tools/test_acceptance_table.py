"""The table of promises names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_each_promise_names_existing_tests_or_says_what_to_write() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)\|(.*)\|(.*)\|$", (TESTS / "acceptance.md").read_text(), re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    for number, _, to_write, tests in rows:
        names = re.findall(r"`([^`]+)`", tests)
        assert names or to_write.strip(), f"row {number} names no test and nothing to write"
        assert [name for name in names if not (TESTS / name).is_file()] == [], f"row {number}"
