"""Every decision has a number, a title, a date and a status, and stands in the index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

DOCS: Final = Path(__file__).parents[2] / "docs"
DECISIONS: Final = sorted(DOCS.glob("decisions/*.md"))
LINK: Final = r"\[decision \d+\]\(\d{4}-[a-z0-9-]+\.md\)"
HEAD: Final = re.compile(
    r"# (\d+)\. (.+)\n\n- Date: \d{4}-\d\d-\d\d\n"
    rf"- Status: (?:accepted(?:, amended by {LINK})?|superseded by {LINK})\n\n"
)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_begins_with_its_title_date_and_status(page: Path) -> None:
    head = HEAD.match(page.read_text())
    assert head is not None
    number, title = head.groups()
    assert int(number) == int(page.name[:4])
    lines = re.sub(r"\n +", " ", (DOCS / "README.md").read_text()).splitlines()
    assert f"{number}. [{title}](decisions/{page.name})" in lines


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
