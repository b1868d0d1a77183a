"""Tests that the schema of the last release, with messages in all states, comes forward to this package."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Operator, Worker, migrate
from pgoutbox.database.revisions import digest_of
from pgoutbox.operations import MessageFilter
from tests.frozen import __main__ as program
from tests.frozen.app import AFTER, BEFORE, LARGE, Application, states
from tests.frozen.dump import FILE, VERSION, is_released, lost, make, restore, rows_of, text
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture
def restored(empty_dsn: str) -> str:
    """Restore the dump."""
    restore(empty_dsn)
    return empty_dsn


def test_the_dump_is_of_the_files_of_this_package() -> None:
    words = (
        f"{VERSION} is released, and the files of its revision have changed: put the change into a revision of its own"
        if is_released()
        else f"{VERSION} is not released, and its schema has changed: run `make dump`, and commit the file"
    )
    assert f"'{digest_of(1)}'" in text(), words


def test_a_migration_keeps_each_row(restored: str) -> None:
    with psycopg.connect(restored, autocommit=True) as connection:
        before = rows_of(connection)
        assert states(connection) == BEFORE
        migrate.upgrade(restored)
        assert migrate.current(restored) == migrate.head()
        assert lost(before, rows_of(connection)) == []
    full = {"pgoutbox.audit", "pgoutbox.breaker", "pgoutbox.cancel_request", "pgoutbox.claim", "pgoutbox.content"}
    assert {name for name in full if not before[name]} == set()


async def test_a_worker_delivers_what_is_due_and_leaves_the_rest(
    restored: str, caplog: pytest.LogCaptureFixture
) -> None:
    migrate.upgrade(restored)
    application = Application(restored, is_later=True)
    worker = Worker(application.outbox)
    with (
        psycopg.connect(restored, autocommit=True) as connection,
        Operator(restored, actor="eve", origin="test") as operator,
    ):
        running = asyncio.create_task(worker.run())
        await until(lambda: "the database is a copy: nothing is claimed" in caplog.text)
        assert application.delivered == {}
        operator.adopt()
        operator.resume("default")
        for topic in ("retried", "snoozed"):
            operator.act_on_all("reschedule", MessageFilter(topic=topic))
        await until(lambda: states(connection) == AFTER)
        worker.stop()
        await running
        acts = [act.action for act in operator.list_acts(limit=100)]
    assert application.delivered["encrypted"] == [{"secret": "c4n4ry"}]
    assert application.delivered["large"] == [{"text": LARGE}]
    assert application.delivered["ordered"] == [{"number": 1}, {"number": 2}]
    assert {"dismiss", "redrive", "pause"} <= {*acts}


def test_the_dump_can_be_made_again(empty_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = tmp_path / FILE.name
    monkeypatch.setattr("tests.frozen.dump.FILE", again)
    make(empty_dsn)
    assert again.stat().st_size > FILE.stat().st_size / 2


def test_the_dump_of_a_released_version_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "CHANGELOG.md").write_text(f"## Unreleased\n\n## {VERSION} - 2026-12-24\n")
    monkeypatch.setattr("tests.frozen.dump.ROOT", tmp_path)
    with pytest.raises(SystemExit, match="its dump does not change"):
        program.main()
