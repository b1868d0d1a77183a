"""Tests commits that hang because a synchronous standby is gone: a worker waits with one session and opens no more."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo

from pgoutbox import Outbox
from pgoutbox.database.worker_connection import StrandedError, WorkerConnection
from pgoutbox.handlers import Context
from pgoutbox.message import Message, State
from pgoutbox.worker import Worker
from pgoutbox.worker.run import WorkerRun
from tests.support.outbox_actions import enqueue, lapse, rows_of, running, settings_for
from tests.support.servers import OwnServer, open_workshop
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPATIENT = {"statement_timeout_seconds": 0.5, "connect_timeout_seconds": 1, "lease_seconds": 3}
SESSIONS_OF_CLAIMS = "SELECT FROM pg_stat_activity WHERE application_name LIKE 'pgoutbox claim%'"


@pytest.fixture
def own_server() -> Iterator[OwnServer]:
    """Run a server whose commits do not wait for the standby unless they request it."""
    with open_workshop(os.environ) as workshop, workshop.server() as server:
        server.start(synchronous_commit="local", fsync="off")
        yield server


def patient_dsn(server: OwnServer) -> str:
    """Return a DSN whose commits wait for the standby."""
    return make_conninfo(server.dsn, options="-c synchronous_commit=on")


def miss_a_standby(server: OwnServer, *, missing: bool = True) -> None:
    """Make the server wait for a standby that does not exist or has gone."""
    with server.connect() as superuser:
        if missing:
            superuser.execute("ALTER SYSTEM SET synchronous_standby_names = 'missing'")
        else:
            superuser.execute("ALTER SYSTEM RESET synchronous_standby_names")
        superuser.execute("SELECT pg_reload_conf()")


class CountingWorker(Worker):
    """A worker that counts its failures."""

    trouble_count = 0

    def _new_run(self, *, ends_by_itself: bool) -> WorkerRun:
        run = super()._new_run(ends_by_itself=ends_by_itself)
        outage = run.state.outage
        pause_or_raise = outage.pause_or_raise

        async def counted(error: BaseException) -> None:
            self.trouble_count += 1
            await pause_or_raise(error)

        outage.pause_or_raise = counted  # type: ignore[method-assign] # counted, and otherwise the same
        return run


async def test_a_worker_waits_for_hanging_commits_in_one_session_and_then_delivers_all(
    own_server: OwnServer,
) -> None:
    outbox = Outbox(settings_for(patient_dsn(own_server), batch_size=2, **IMPATIENT))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        """Do nothing; the message is then sent."""

    with own_server.connect() as db:
        worker = CountingWorker(outbox)
        async with running(worker):
            miss_a_standby(own_server)
            ids = [enqueue(db) for _ in range(12)]
            await until(lambda: worker.trouble_count >= 6)
            # One session hangs, and one checks whether it still hangs.
            assert len(db.execute(SESSIONS_OF_CLAIMS).fetchall()) <= 2
            miss_a_standby(own_server, missing=False)
            # No worker has received the messages of the one claim that hung.
            await until(lambda: sum(not row.is_finished for row in rows_of(db, *ids)) <= 2)
        for message_id in ids:
            lapse(db, message_id)
        await Worker(outbox).run_once()
        assert {row.state for row in rows_of(db, *ids)} == {State.SENT}


async def test_a_session_abandoned_for_another_reason_is_terminated(own_server: OwnServer) -> None:
    settings = settings_for(own_server.dsn, statement_timeout_seconds=0.5, connect_timeout_seconds=1)
    link = WorkerConnection(own_server.dsn, settings, purpose="claim")
    with own_server.connect() as db:
        # The server's own limits would end it first.
        limits = "SELECT set_config(name, '0', false) FROM pg_settings WHERE name ~ '^(statement|transaction)_timeout$'"
        await link.fetch(limits, {})
        with pytest.raises(TimeoutError):
            await link.fetch("SELECT pg_sleep(600)", {})
        await link.fetch("SELECT 1", {})
        assert len(db.execute(SESSIONS_OF_CLAIMS).fetchall()) == 1
    await link.close()


async def test_a_session_that_waits_for_a_standby_is_not_terminated(own_server: OwnServer) -> None:
    link = WorkerConnection(patient_dsn(own_server), settings_for(own_server.dsn, **IMPATIENT), purpose="claim")
    miss_a_standby(own_server)
    with own_server.connect() as db:
        await link.open()
        with pytest.raises(TimeoutError):
            await link.fetch("SELECT pg_logical_emit_message(true, 'test', 'a commit'), txid_current()", {})
        for _ in range(3):
            with pytest.raises(StrandedError, match="SyncRep"):
                await link.fetch("SELECT 1", {})
        assert len(db.execute(SESSIONS_OF_CLAIMS).fetchall()) == 2
        miss_a_standby(own_server, missing=False)
        await until(lambda: len(db.execute(SESSIONS_OF_CLAIMS).fetchall()) == 1)
        assert await link.fetch("SELECT 1", {}) == [(1,)]
    await link.close()
