"""Tests claims whose answers are lost: the messages are released, and the worker looks for them at once."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from typing import TYPE_CHECKING

import psycopg
import pytest
from pydantic import SecretStr

from pgoutbox import Context, Message, MultiWorker, Outbox
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.message import State
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker import Worker
from tests.support.outbox_actions import (
    attempts_of,
    enqueue,
    row_of,
    running,
    settings_for,
    state_of,
)
from tests.support.waiting import until
from tests.support.worker_sql import has_claimed, run_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.kernel.seams import Row, Step


def lose_answer(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Lose the answer to the nth claim that found messages."""
    trip = WorkerConnection.trip
    filled = 0

    async def lose(self: WorkerConnection, steps: Sequence[Step]) -> list[list[Row]]:
        nonlocal filled
        results = await trip(self, steps)
        if has_claimed(steps, results):
            filled += 1
            if filled == nth:
                raise psycopg.OperationalError("the connection broke after the commit")
        return results

    monkeypatch.setattr(WorkerConnection, "trip", lose)


@pytest.mark.slow
async def test_an_attempt_whose_outcome_a_failover_lost_is_not_released_with_a_lost_claim(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(settings_for(dsn))
    handed_over: Counter[int] = Counter()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        handed_over[message.id] += 1

    lose_answer(monkeypatch, 2)
    first = enqueue(db)
    async with running(worker := Worker(outbox)):
        await until(lambda: state_of(db, first) == State.SENT)
        db.execute(
            """
            WITH back AS (
                UPDATE pgoutbox.message SET state = 'sending', finished_at = NULL WHERE id = %s RETURNING *
            )
            INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
            SELECT b.claimed_at, now() + interval '1 h', b.queue, b.worker, ARRAY[b.id] FROM back AS b
            ON CONFLICT ON CONSTRAINT claim_pkey DO NOTHING
            """,
            [first],
        )
        second = enqueue(db)
        await until(lambda: state_of(db, second) == State.SENT)
    assert worker.telemetry.counts[LogEvent.CLAIM_LOST] == 1
    assert (state_of(db, first), handed_over) == (State.SENDING, {first: 1, second: 1})


def break_connection(link: WorkerConnection) -> None:
    """Break the connection on this side. The server does not notice it while a statement runs."""
    connection = link._connection or link._lent
    assert connection is not None
    with socket.socket(fileno=os.dup(connection.fileno())) as broken:
        broken.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
@pytest.mark.parametrize("is_one_of_many", [False, True], ids=["one database", "one of many"])
async def test_a_claim_cannot_commit_after_its_connection_broke(
    dsn: str, db: psycopg.Connection, is_one_of_many: bool
) -> None:
    settings = settings_for(dsn)
    if is_one_of_many:  # Then the session that listens claims.
        settings = settings.model_copy(update={"dsn": None, "dsns": SecretStr(f"one {dsn}")})
    outbox = Outbox(settings)

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        """Do nothing; the message is then sent."""

    db.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NEW; END'"
    )
    db.execute("CREATE TRIGGER wait BEFORE UPDATE ON pgoutbox.message_live FOR EACH ROW EXECUTE FUNCTION wait()")
    db.execute("SELECT pg_advisory_lock(7)")
    message_id = enqueue(db)
    waiting = (
        "SELECT array_agg(pid) FROM pg_stat_activity WHERE wait_event = 'advisory' AND datname = current_database()"
    )
    worker = MultiWorker(outbox) if is_one_of_many else Worker(outbox)
    async with running(worker):
        await until(lambda: db.execute(waiting).fetchone() != (None,))
        before = db.execute(waiting).fetchone()
        one = worker if isinstance(worker, Worker) else worker._members["one"].worker
        break_connection(run_of(one).state.store.claims)
        # The first session has ended, and another one waits for the lock.
        await until(lambda: db.execute(waiting).fetchone() not in (before, (None,)))
        db.execute("SELECT pg_advisory_unlock(7)")
        await until(lambda: state_of(db, message_id) == State.SENT)
    assert (row_of(db, message_id).attempt_count, attempts_of(db, message_id)) == (1, [])


async def test_an_abandoned_session_is_ended_even_if_the_next_connection_breaks_too(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep_there = "SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
    link = WorkerConnection(dsn, settings_for(dsn), purpose="abandons")

    async def break_again(pid: int) -> None:
        break_connection(link)
        await link._trips.fetch([("SELECT 1", {})])

    asleep = asyncio.create_task(link.fetch("SELECT pg_sleep(600)", {}))
    await until(lambda: db.execute(asleep_there).rowcount == 1)
    break_connection(link)
    with pytest.raises(psycopg.OperationalError):
        await asleep
    with monkeypatch.context() as broken:
        broken.setattr(link, "_end_stranded", break_again)
        with pytest.raises(psycopg.OperationalError):
            await link.fetch("SELECT 1", {})
    assert db.execute(asleep_there).rowcount == 1
    assert await link.fetch("SELECT 1", {}) == [(1,)]
    assert db.execute(asleep_there).rowcount == 0
    await link.close()


async def test_a_lost_claim_connection_is_opened_again_before_another_one(dsn: str) -> None:
    """With one free session, the other one would get it, and the worker could neither end messages nor claim."""
    claims = WorkerConnection(dsn, settings_for(dsn), purpose="claim")
    other = WorkerConnection(dsn, settings_for(dsn), purpose="other", spare=claims)
    await claims.fetch("SELECT 1", {})
    break_connection(claims)
    with pytest.raises(psycopg.OperationalError):
        await claims.fetch("SELECT 1", {})
    assert await other.fetch("SELECT 2", {}) == [(2,)]
    assert (claims.is_open, other.is_open) == (True, True)
    await claims.close()
    await other.close()
