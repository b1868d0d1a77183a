"""Tests maintenance by workers: one of a fleet has the turn, the others continue, and no failure in it ends one."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import pgoutbox.worker.beside.maintenance
from pgoutbox.database import connections, sql
from pgoutbox.database.store import Store
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.message import State
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.operations import Operator
from pgoutbox.worker.beside.maintenance import Maintenance
from tests.support.messages import put
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    cancel,
    enqueue,
    reports,
    row_of,
    rows_of,
    running,
    settings_for,
)
from tests.support.partitions import add_partition, drop_partitions, partitions_of, tables_of_partitions
from tests.support.proxy import proxy_to
from tests.support.races import ADVISORY_LOCKS
from tests.support.waiting import until
from tests.support.worker_sql import WatchedWorker, claim, finish_sent, ids_in_flight

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from pgoutbox import Outbox
    from tests.conftest import Connect

DAY = timedelta(days=1)
INTERVAL_SECONDS = 300


class Member:
    """The maintenance of one worker of a fleet."""

    def __init__(self, dsn: str, name: str, **settings: object) -> None:
        self.settings = settings_for(dsn, maintenance_interval_seconds=INTERVAL_SECONDS, **settings)
        self.store = Store(self.settings, worker=name)
        self.telemetry = Telemetry(logging.getLogger("pgoutbox.worker.maintenance"))
        self.maintenance = Maintenance(self.settings, self.store, self.telemetry)

    def count_of(self, event: LogEvent) -> int:
        """Return how often this event was reported."""
        return self.telemetry.counts[event]


@pytest.fixture
async def member(dsn: str) -> AsyncIterator[Callable[..., Member]]:
    """Create workers of a fleet."""
    members: list[Member] = []

    def make(name: str = "a", *, at: str = dsn, **settings: object) -> Member:
        members.append(Member(at, name, **settings))
        return members[-1]

    yield make
    for made in members:
        await made.store.close()


def make_due(db: psycopg.Connection) -> None:
    """Age the last turn, so that the next one is due."""
    db.execute("UPDATE pgoutbox.maintenance_run SET due_at = now() - interval '1 ms'")


def keep(db: psycopg.Connection, how_long: timedelta | None = 30 * DAY) -> None:
    """Set a rule for every state that is partitioned by time."""
    for state in ("sent", "skipped", "cancelled"):
        Operator(db).set_retention("*", state, how_long)


def held_back_deletes(db: psycopg.Connection, connect: Connect) -> psycopg.Connection:
    """Create three messages that a rule no longer keeps; they cannot be deleted until this connection rolls back."""
    Operator(db).set_retention("*", "failed", DAY)
    for _ in range(3):
        put(db, State.FAILED, age=2 * DAY)
    db.execute(
        "CREATE FUNCTION public.wait_first() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN OLD; END'"
    )
    db.execute(
        "CREATE TRIGGER wait_first BEFORE DELETE ON pgoutbox.message_failed"
        " FOR EACH ROW EXECUTE FUNCTION public.wait_first()"
    )
    holder = connect()
    holder.execute("SELECT pg_advisory_xact_lock(7)")
    return holder


async def test_a_turn_creates_partitions_and_applies_the_rules(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    keep(db)
    drop_partitions(db)
    name = add_partition(db, 40)
    put(db, State.SENT, age=40 * DAY)
    put(db, State.SENT, age=50 * DAY)
    kept = put(db, State.SENT)
    one = member()
    assert await one.maintenance.turn()
    assert name not in tables_of_partitions(db)
    assert [row.id for row in rows_of(db)] == [kept]
    assert partitions_of(db)
    assert one.count_of(LogEvent.MAINTENANCE_DONE) == 1
    # It is not recorded as an operator's act.
    assert db.execute("SELECT FROM pgoutbox.audit WHERE action = 'prune'").fetchall() == []
    assert db.execute("SELECT worker, due_at > now() FROM pgoutbox.maintenance_run").fetchall() == [("a", True)]


async def test_a_turn_deletes_the_requests_of_messages_that_have_ended(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    ended, live = enqueue(db), enqueue(db)
    assert ids_in_flight(claim(db)) == [ended, live]
    assert [cancel(db, message_id) for message_id in (ended, live)] == ["requested"] * 2
    finish_sent(db, (ended, 1))
    assert await member().maintenance.turn()
    assert db.execute("SELECT message_id FROM pgoutbox.cancel_request").fetchall() == [(live,)]


async def test_the_next_turn_is_due_at_once_after_a_clock_was_ahead(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    one = member()
    assert await one.maintenance.turn()
    db.execute(
        "UPDATE pgoutbox.maintenance_run SET began_at = now() + interval '30 d', due_at = now() + interval '30 d'"
    )
    assert await one.maintenance.turn()
    assert not await one.maintenance.turn()


async def test_a_turn_with_nothing_to_do_is_two_statements(
    member: Callable[..., Member], db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(db)
    one = member()
    assert await one.maintenance.turn()
    make_due(db)
    statements: list[str] = []
    fetch = WorkerConnection.fetch

    async def counted(self: WorkerConnection, statement: Any, parameters: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
        statements.append(statement)
        return await fetch(self, statement, parameters, **options)

    monkeypatch.setattr(WorkerConnection, "fetch", counted)
    monkeypatch.delattr("pgoutbox.database.operator_connection.connect")
    assert await one.maintenance.turn()
    assert statements == [sql.BEGIN_MAINTENANCE_IF_DUE, sql.MAINTENANCE_SUCCEEDED]
    assert one.count_of(LogEvent.MAINTENANCE_FAILED) == 0


@pytest.mark.slow
async def test_an_outage_and_its_end_are_logged_once(member: Callable[..., Member], db: psycopg.Connection) -> None:
    keep(db)
    drop_partitions(db)
    put(db, State.SENT, age=40 * DAY)
    one = member()
    db.execute("ALTER FUNCTION pgoutbox.make_partition RENAME TO elsewhere")
    for _ in range(3):
        assert await one.maintenance.turn()
        make_due(db)
    assert (one.count_of(LogEvent.MAINTENANCE_FAILED), one.count_of(LogEvent.MAINTENANCE_BACK)) == (1, 0)
    assert rows_of(db) == []  # The other steps ran.
    db.execute("ALTER FUNCTION pgoutbox.elsewhere RENAME TO make_partition")
    assert await one.maintenance.turn()
    assert (one.count_of(LogEvent.MAINTENANCE_FAILED), one.count_of(LogEvent.MAINTENANCE_BACK)) == (1, 1)
    assert partitions_of(db)


async def test_the_next_turn_is_due_slightly_before_the_interval_ends(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    assert await member().maintenance.turn()
    ((seconds,),) = db.execute(
        "SELECT extract(epoch FROM due_at - began_at)::float8 FROM pgoutbox.maintenance_run"
    ).fetchall()
    assert 0.7 * INTERVAL_SECONDS < seconds < 0.9 * INTERVAL_SECONDS


@pytest.mark.parametrize("passes", [True, False])
async def test_only_lasting_errors_of_the_turn_query_are_logged(
    member: Callable[..., Member], db: psycopg.Connection, passes: bool
) -> None:
    """The worker itself logs that a database cannot be reached."""
    if passes:
        one = member(at="postgresql://nobody@127.0.0.1:1/nothing")
    else:
        one = member()
        db.execute("ALTER TABLE pgoutbox.maintenance_run RENAME TO elsewhere")
    assert not await one.maintenance.turn()
    assert one.count_of(LogEvent.MAINTENANCE_FAILED) == (0 if passes else 1)


async def test_only_a_turn_without_errors_counts_as_success(
    member: Callable[..., Member], db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def succeeded_at() -> datetime:
        ((at,),) = db.execute("SELECT succeeded_at FROM pgoutbox.maintenance_run").fetchall()
        assert isinstance(at, datetime)
        return at

    keep(db)
    one = member()
    assert await one.maintenance.turn()
    first = succeeded_at()
    for is_broken in (True, False):
        drop_partitions(db)
        make_due(db)
        with monkeypatch.context() as patch:
            if is_broken:
                patch.setattr(sql, "MAKE_PARTITION", "SELECT 1/0")
            assert await one.maintenance.turn()
        assert (succeeded_at() > first) is not is_broken


async def test_a_turn_without_a_connection_is_logged_and_ends_nothing(
    member: Callable[..., Member], db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(db)
    drop_partitions(db)
    one = member()
    monkeypatch.delattr("pgoutbox.database.operator_connection.connect")
    assert await one.maintenance.turn()
    assert one.count_of(LogEvent.MAINTENANCE_FAILED) == 1


@pytest.mark.slow
async def test_a_statement_longer_than_the_limit_of_a_turn_is_cancelled(
    member: Callable[..., Member],
    db: psycopg.Connection,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pgoutbox.worker.beside.maintenance, "_TURN_SECONDS", 0.2)
    holder = held_back_deletes(db, connect)
    one = member()
    with caplog.at_level(logging.WARNING, logger="pgoutbox.worker.maintenance"):
        assert await one.maintenance.turn()
    assert [getattr(record, "detail", "") for record in caplog.records] == [
        "canceling statement due to user request"
    ], "not cancelled by the turn's limit"
    assert len(rows_of(db)) == 3
    holder.rollback()


async def test_the_stop_of_the_worker_waits_only_for_the_current_batch(
    member: Callable[..., Member], db: psycopg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgoutbox.worker.beside.maintenance, "_BATCH", 1)
    monkeypatch.setattr(pgoutbox.worker.beside.maintenance, "_STOP_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(pgoutbox.worker.beside.maintenance, "_FIRST_WITHIN_SECONDS", 0)
    holder = held_back_deletes(db, connect)
    one = member()
    taking_turns = asyncio.create_task(one.maintenance.keep_taking_turns())
    await until(lambda: db.execute(f"SELECT FROM {ADVISORY_LOCKS} WHERE NOT l.granted").fetchall())
    taking_turns.cancel()
    ending = asyncio.create_task(one.maintenance.stop())
    await until(one.maintenance._stopping.is_set)
    holder.rollback()
    await ending
    assert len(rows_of(db)) == 2


@pytest.mark.slow
async def test_a_running_worker_takes_its_turns_and_delivers_in_parallel(
    outbox: Outbox, dsn: str, db: psycopg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgoutbox.worker.beside.maintenance, "_FIRST_WITHIN_SECONDS", 0)
    keep(db)
    name = add_partition(db, 40)
    put(db, State.SENT, age=40 * DAY)
    got = asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: object, ctx: object) -> None:
        got.set()

    reader = connect()
    reader.execute("SELECT count(*) FROM pgoutbox.message_done")
    worker = WatchedWorker(outbox, settings=settings_for(dsn, maintenance_interval_seconds=1))
    with reports() as heard:
        async with running(worker):
            await worker.asleep.wait()
            message_id = enqueue(db)
            await got.wait()
            await until(lambda: row_of(db, message_id).state == "sent")
            reader.rollback()
            await heard.wait_for(LogEvent.MAINTENANCE_DONE)
    assert name not in partitions_of(db)


async def test_an_interval_of_zero_disables_maintenance(outbox: Outbox, dsn: str, db: psycopg.Connection) -> None:
    outbox.handler("greet")(lambda message, ctx: None)
    worker = WatchedWorker(outbox, settings=settings_for(dsn, maintenance_interval_seconds=0))
    async with running(worker):
        await worker.asleep.wait()
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "pgoutbox-maintenance"] == []
    assert db.execute("SELECT FROM pgoutbox.maintenance_run").fetchall() == []


async def test_maintenance_works_without_session_state(member: Callable[..., Member], db: psycopg.Connection) -> None:
    keep(db)
    name = add_partition(db, 40)
    assert await member(listen=False).maintenance.turn()
    assert name not in tables_of_partitions(db)


@pytest.mark.slow
async def test_a_cancelled_turn_on_a_dead_network_does_not_block_the_event_loop(
    dsn: str, tmp_path: Path, member: Callable[..., Member]
) -> None:
    with proxy_to(dsn, tmp_path) as proxy, ExitStack() as network:
        maintenance = member(at=proxy.dsn).maintenance
        maintenance._connection = connections.connect(proxy.dsn, purpose="maintenance", answer_seconds=None)
        network.callback(maintenance._connection.close)
        network.enter_context(proxy.stalled())
        # A blocked event loop would wait for this: the network recovers for it, much too late.
        rescue = threading.Timer(PATIENCE_SECONDS, network.close)
        rescue.start()
        cancelling = asyncio.create_task(maintenance._cancel_statement())
        await until(lambda: proxy.cancel_request_count)
        assert not cancelling.done()
        rescue.cancel()
        await cancelling
