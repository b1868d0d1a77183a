"""The files of the first release: an object in a file of its name, split into statements that any driver takes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any, Final

import pytest

from pgoutbox import migrate

REVISION: Final[dict[str, Any]] = runpy.run_path(str(Path(migrate.version_location()) / "0001_first_release.py"))
SQL: Final = Path(migrate.version_location()).parent / "sql"
FILES: Final = sorted(SQL.rglob("*.sql"))
UPGRADE: Final = [path for path in FILES if path.parent != SQL / "down"]
OBJECTS: Final = [path for path in UPGRADE if path.parent != SQL]


def name_of(path: Path) -> str:
    return str(path.relative_to(SQL))


def statements_of(*paths: Path) -> list[str]:
    return [statement for path in paths for statement in REVISION["statements"]((name_of(path),))]


def test_an_upgrade_runs_every_file_once() -> None:
    assert sorted(REVISION["statements"](REVISION["ORDER"])) == sorted(statements_of(*UPGRADE))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_statements_of_a_file_are_its_whole_text(path: Path) -> None:
    rest = path.read_text()
    for statement in statements_of(path):
        between, rest = rest.split(f"{statement};", 1)
        assert between.strip() == ""
    assert rest.strip() == ""


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_statement_is_not_several(path: Path) -> None:
    for statement in statements_of(path):
        top_level = re.sub(r"--[^\n]*|'[^']*'|(\$\w*\$).*?\1|BEGIN ATOMIC.*", "", statement, flags=re.DOTALL)
        assert len(re.findall(r"^(?:CREATE|ALTER|COMMENT|DO|INSERT|LOCK)\b", top_level, re.MULTILINE)) == 1, statement


@pytest.mark.parametrize("path", OBJECTS, ids=name_of)
def test_a_file_has_the_name_of_the_object_that_it_creates(path: Path) -> None:
    created = re.findall(
        r"^CREATE (?:TABLE|TYPE|FUNCTION|VIEW|TRIGGER|CONSTRAINT TRIGGER) (?:pgoutbox\.)?(\w+)",
        path.read_text(),
        re.MULTILINE,
    )
    assert path.stem in created


def test_a_downgrade_drops_triggers_but_no_partitions_by_name() -> None:
    drops = REVISION["drops"]()
    assert "DROP TABLE pgoutbox.message" in drops
    assert "DROP TABLE pgoutbox.message_live" not in drops
    assert drops.index("DROP TRIGGER queue_acts ON pgoutbox.queue") < drops.index(
        "DROP FUNCTION pgoutbox._record_queue_act"
    )
