"""Tests a server whose notification queue fills up because a listening session stays in a transaction. Enqueuing never
fails for that, workers continue without bells, and normal operation resumes when the queue has drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgoutbox import Outbox
from pgoutbox.database import operator_connection
from pgoutbox.handlers import Context
from pgoutbox.message import Message, State
from pgoutbox.observability.events import LogEvent
from pgoutbox.operations import Operator
from pgoutbox.worker import Worker
from tests.support.fleet import fleet_on
from tests.support.missing import server_missing
from tests.support.outbox_actions import enqueue, reports, rows_of, running, settings_for
from tests.support.servers import OwnServer, open_workshop
from tests.support.waiting import until, until_idle, until_polled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

QUICK = {"listener_heartbeat_seconds": 0.5, "listener_heartbeat_timeout_seconds": 0.5}


@pytest.fixture(scope="module")
def small_server() -> Iterator[OwnServer]:
    """Run a server with the smallest possible notification queue."""
    with open_workshop(os.environ) as workshop, workshop.server() as server:
        if not server.try_start(max_notify_queue_pages="64", fsync="off"):
            server_missing("the notification queue has a fixed size before PostgreSQL 17")
        yield server


@pytest.fixture
def db(small_server: OwnServer) -> Iterator[psycopg.Connection]:
    """Open a connection to an empty outbox on the small server."""
    with contextlib.closing(small_server.connect()) as connection:
        connection.execute("TRUNCATE pgoutbox.message_live, pgoutbox.message_done, pgoutbox.queue CASCADE")
        yield connection


class Culprit:
    """A session that listens and stays in a transaction, and the notifications of others in the meantime."""

    def __init__(self, server: OwnServer) -> None:
        self._listener = server.connect("postgres")
        self._filler = server.connect("postgres")
        self._listener.execute("LISTEN filler")
        self._listener.execute("BEGIN")
        self._listener.execute("SELECT 1")

    @property
    def usage(self) -> float:
        """Return how full the queue is."""
        ((usage,),) = self._filler.execute("SELECT pg_notification_queue_usage()").fetchall()
        return float(usage)

    def fill(self, share: float) -> None:
        """Notify until the queue is this full, or has no room for one more."""
        with contextlib.suppress(psycopg.errors.ProgramLimitExceeded):
            while self.usage < share:
                self._filler.execute("SELECT pg_notify('filler', repeat('x', 7000))")

    def end(self) -> None:
        """End the session."""
        self._listener.close()
        self._filler.close()


@pytest.fixture
def culprit(small_server: OwnServer) -> Iterator[Culprit]:
    """Open a session that keeps the server from discarding notifications."""
    found = Culprit(small_server)
    yield found
    found.end()


def outbox_on(server: OwnServer, delivered: list[int], **settings: object) -> Outbox:
    """Build an outbox that records its deliveries."""
    outbox = Outbox(settings_for(server.dsn, **settings))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.append(message.id)

    return outbox


def has_bell(db: psycopg.Connection) -> bool:
    """Whether a worker of this database holds a wake-up lock, so that enqueues notify."""
    locks = """
        SELECT FROM pg_locks AS l
        JOIN pg_database AS d ON d.oid = l.database AND d.datname = current_database()
        WHERE l.locktype = 'advisory' AND l.classid = 1885826146 AND l.mode = 'ExclusiveLock'
    """
    return db.execute(locks).fetchone() is not None


async def test_workers_poll_and_enqueues_succeed_while_the_notification_queue_is_full(
    small_server: OwnServer, db: psycopg.Connection, culprit: Culprit
) -> None:
    delivered: list[int] = []
    worker = Worker(outbox_on(small_server, delivered, **QUICK))
    with reports() as heard:
        async with running(worker):
            await until_idle(worker)
            assert has_bell(db)
            culprit.fill(0.6)
            await heard.wait_for(LogEvent.NOTIFY_QUEUE_FILLING)
            await until(lambda: not has_bell(db))
            culprit.fill(1.0)
            ids = [enqueue(db), enqueue(db)]
            await until(lambda: delivered == ids)
            assert not has_bell(db)
            culprit.end()
            await heard.wait_for(LogEvent.NOTIFY_QUEUE_DRAINED)
            await until(lambda: has_bell(db))
            await until_polled(worker, db)
            rung = enqueue(db)
            await until(lambda: delivered == [*ids, rung])
    assert worker.telemetry.counts[LogEvent.LISTENER_LOST] == 0


def bell_count(db: psycopg.Connection) -> int:
    """Return how many sessions have the wake-up lock of a queue."""
    query = "SELECT count(*) FROM pg_locks WHERE classid = 1885826146 AND mode = 'ExclusiveLock'"
    ((count,),) = db.execute(query).fetchall()
    return int(count)


def test_a_process_polls_without_a_lock_while_the_notification_queue_is_full(
    small_server: OwnServer, db: psycopg.Connection, culprit: Culprit, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {name: str(value) for name, value in QUICK.items()}
    with fleet_on(small_server.dsn, tmp_path) as fleet:
        fleet.start(poll_interval_seconds="3600", **settings)
        fleet.until(lambda: bell_count(db) == 1, "it sleeps")
        culprit.fill(0.6)
        fleet.until(lambda: "notify_queue_filling" in fleet.log and bell_count(db) == 0, "it notices")
        culprit.fill(1.0)
        ids = [enqueue(db, "fault.deliver") for _ in range(2)]
        fleet.until(lambda: len(fleet.hand_overs()) == len(ids), "it polls")
        culprit.end()
        fleet.until(lambda: "notify_queue_drained" in fleet.log and bell_count(db) == 1, "it sleeps again")
        ids.append(enqueue(db, "fault.deliver"))
        fleet.until(lambda: fleet.deliveries() == dict.fromkeys(ids, 1), "it is notified")


async def test_an_enqueue_commits_if_the_notification_queue_fills_before_a_worker_notices(
    small_server: OwnServer, db: psycopg.Connection, culprit: Culprit
) -> None:
    delivered: list[int] = []
    worker = Worker(outbox_on(small_server, delivered, listener_heartbeat_seconds=600, poll_interval_seconds=1))
    async with running(worker):
        await until_idle(worker)
        culprit.fill(1.0)
        assert has_bell(db)
        ids = [enqueue(db)]
        ids += [
            row[0] for row in db.execute("SELECT pgoutbox.enqueue('greet', to_jsonb(n)) FROM generate_series(1, 3) n")
        ]
        with operator_connection.connect(settings_for(small_server.dsn)) as connection:
            Operator(connection).limit_in_flight("default", 100)
            Operator(connection).limit_in_flight("default", None)
        await until(lambda: sorted(delivered) == ids)


async def test_a_saturated_worker_runs_and_stops_cleanly_with_a_full_notification_queue(
    small_server: OwnServer, db: psycopg.Connection, culprit: Culprit
) -> None:
    culprit.fill(1.0)
    outbox = Outbox(settings_for(small_server.dsn, concurrency=1, batch_size=1))
    go = asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        await go.wait()

    ids = [enqueue(db) for _ in range(6)]
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: worker.status().busy == 1)
        go.set()
        await until(lambda: all(row.is_finished for row in rows_of(db, *ids)))
    assert {row.state for row in rows_of(db, *ids)} == {State.SENT}


async def test_a_worker_waits_for_a_server_limit_and_loses_no_outcome(
    small_server: OwnServer, db: psycopg.Connection
) -> None:
    """Raise the error of a server that is about to run out of transaction IDs and refuses every write."""
    delivered: list[int] = []
    worker = Worker(outbox_on(small_server, delivered, lease_seconds=600))
    db.execute(
        """
        CREATE SEQUENCE public.refusals;
        CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM nextval('public.refusals');
            RAISE EXCEPTION 'no transaction numbers' USING ERRCODE = '54000';
        END $$;
        CREATE TRIGGER refuse BEFORE DELETE OR UPDATE OF state ON pgoutbox.message_live
            FOR EACH ROW WHEN (OLD.state = 'sending') EXECUTE FUNCTION public.refuse()
        """
    )
    try:
        async with running(worker):
            ids = [enqueue(db), enqueue(db)]
            await until(lambda: db.execute("SELECT 1 FROM public.refusals WHERE last_value > 2").fetchone())
            db.execute("DROP TRIGGER refuse ON pgoutbox.message_live")
            await until(lambda: all(row.is_finished for row in rows_of(db, *ids)))
    finally:
        db.execute("DROP FUNCTION public.refuse() CASCADE; DROP SEQUENCE public.refusals")
    assert sorted(delivered) == ids
    assert {(row.state, row.attempt_count) for row in rows_of(db, *ids)} == {(State.SENT, 1)}
