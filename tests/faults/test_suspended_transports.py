"""Tests workers that are suspended while contents wait inside a transport."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.outbox_actions import enqueue, rows_of, state_of
from tests.support.smtp_server import Inbox, accepting_server, mail_settings
from tests.support.waiting import until
from tests.support.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    import psycopg

COUNT = 6


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    async with accepting_server() as inbox:
        yield inbox


@pytest.fixture
def start_worker(dsn: str, inbox: Inbox, tmp_path: Path) -> Iterator[Callable[[], WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start() -> WorkerProcess:
        settings = {name: str(value) for name, value in mail_settings(inbox.port).items()}
        worker = WorkerProcess(
            "tests.support.mail_app:outbox",
            log=tmp_path / "log",
            settings={"dsn": dsn, **settings, "smtp_connections": "1", "smtp_timeout_seconds": "60"},
        )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.end()


async def test_emails_that_waited_for_a_connection_of_a_suspended_worker_are_not_sent_again(
    db: psycopg.Connection, inbox: Inbox, start_worker: Callable[[], WorkerProcess]
) -> None:
    """The first worker has begun to send one e-mail. The others wait for its only connection."""
    recipients = [f"{number}@example.org" for number in range(COUNT)]
    last = COUNT - 1
    inbox.delays = lambda _: True  # Whichever gets the connection first, the others wait for it.
    ids = [
        enqueue(db, "mail", destination=f"mailto:{to}", coalesce_key="k" if number == last else None)
        for number, to in enumerate(recipients)
    ]
    first = start_worker()
    await until(lambda: inbox.delayed and {row.state for row in rows_of(db, *ids)} == {"sending"})
    os.kill(first.pid, signal.SIGSTOP)
    await asyncio.to_thread(first.until_suspended)
    (begun,) = inbox.delayed[0].recipients
    inbox.delays = lambda _: False
    newer = enqueue(db, "mail", destination="mailto:newer@example.org", coalesce_key="k")
    second = start_worker()
    await until(lambda: state_of(db, newer) == "sent")
    await until(lambda: {row.state for row in rows_of(db, *ids)} == {"sent", "skipped"})
    by_second = sorted(to for mail in inbox.received for to in mail.recipients)
    os.kill(first.pid, signal.SIGCONT)
    inbox.may_go_on.set()
    # A graceful stop waits for the running attempts.
    assert await asyncio.to_thread(first.stop) == 0, first.log
    received = sorted(to for mail in inbox.received for to in mail.recipients)
    assert received == sorted([*by_second, begun])
    assert {row.state for row in rows_of(db, *ids)} == {"sent", "skipped"}
    assert await asyncio.to_thread(second.stop) == 0
