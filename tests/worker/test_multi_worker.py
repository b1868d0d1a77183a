"""The worker of several databases in the test's process: it can run again, and follows its list at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest
from pydantic import SecretStr

from pgoutbox import Context, Message, Outbox
from pgoutbox.worker import multi_worker
from pgoutbox.worker.multi_worker import MultiWorker
from tests.support.outbox_actions import enqueue, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Server


def outbox_of(file: Path, handled: list[str | None]) -> Outbox:
    """Return an outbox for the databases in this file, which notes the database of each message."""
    only_told = {"dsn": None, "dsns": SecretStr(str(file)), "poll_interval_seconds": 3600}
    outbox = Outbox(settings_for("dbname=unused").model_copy(update=only_told))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        handled.append(message.database)

    return outbox


async def test_one_worker_can_run_again(dsn: str, db: psycopg.Connection, tmp_path: Path) -> None:
    handled: list[str | None] = []
    file = tmp_path / "databases"
    file.write_text(f"one {dsn}\n")
    worker = MultiWorker(outbox_of(file, handled))
    for count in (1, 2):
        enqueue(db)
        await worker.run_once()
        assert handled == ["one"] * count


async def test_a_name_with_another_dsn_is_served_there_when_the_former_one_has_ended(
    dsn: str,
    db: psycopg.Connection,
    server: Server,
    template_of_today: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multi_worker, "_READ_SECONDS", 3600.0)
    handled: list[str | None] = []
    file = tmp_path / "databases"
    file.write_text(f"one {dsn}\n")
    worker = MultiWorker(outbox_of(file, handled))
    with server.database(template=template_of_today()) as other:
        running = asyncio.create_task(worker.run())
        enqueue(db)
        await until(lambda: handled == ["one"])
        file.write_text(f"one {server.dsn_for(other)}\n")
        with psycopg.connect(server.dsn_for(other), autocommit=True) as session:
            enqueue(session)
        worker.read_databases()
        await until(lambda: handled == ["one", "one"])
        worker.stop()
        await running
