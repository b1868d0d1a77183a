"""Tests that a locked row delays only its own outcome."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox
from pgoutbox.kernel import statements
from pgoutbox.message import AttemptOutcome, State
from pgoutbox.worker import Worker
from pgoutbox.worker.kernel_run import Link
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    enqueue,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.worker_sql import End, Trip, WatchedWorker, around_trips, claim, finish

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg

    from pgoutbox.kernel.seams import Row, Step
    from tests.conftest import Connect

pytestmark = pytest.mark.slow


def new(db: psycopg.Connection) -> int:
    return enqueue(db)


def new_and_ordered(db: psycopg.Connection) -> int:
    return enqueue(db, ordering_key="k")


def retried(db: psycopg.Connection) -> int:
    message_id = enqueue(db)
    claim(db)
    finish(db, End(message_id, 1, AttemptOutcome.RETRY, "busy", delay_seconds=0))
    return message_id


def left_by_a_dead_worker(db: psycopg.Connection) -> int:
    message_id = enqueue(db)
    claim(db, worker="killed")
    return message_id


@pytest.mark.parametrize("make", [new, new_and_ordered, retried, left_by_a_dead_worker])
async def test_traffic_does_not_hide_a_message_that_was_locked_when_it_was_due(
    dsn: str, connect: Connect, make: Callable[[psycopg.Connection], int]
) -> None:
    """Traffic never pauses for a poll interval, so only a sweep by the clock finds the message again."""
    db, holder = connect(autocommit=True), connect()
    outbox = Outbox(settings_for(dsn, poll_interval_seconds=0.5))
    delivered: asyncio.Queue[int] = asyncio.Queue()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.put_nowait(message.id)

    victim = make(db)
    fall_due = """
        WITH due AS (
            SELECT clock_timestamp() + %s * interval '1 s' AS at
        ), lease AS (
            UPDATE pgoutbox.claim SET lease_expires_at = due.at FROM due
        )
        UPDATE pgoutbox.message_live AS m
        SET available_at = CASE m.state WHEN 'pending' THEN due.at ELSE m.available_at END
        FROM due
        WHERE m.id = %s
        RETURNING due.at
    """
    db.execute(fall_due, [3600, victim])
    async with asyncio.timeout(PATIENCE_SECONDS), running(worker := WatchedWorker(outbox)):
        await worker.falls_asleep()
        ((due_at,),) = db.execute(fall_due, [1, victim]).fetchall()
        holder.execute("SELECT FROM pgoutbox.message_live WHERE id = %s FOR UPDATE", [victim])
        is_due = False
        while not is_due:
            ((is_due,),) = db.execute("SELECT clock_timestamp() > %s", [due_at]).fetchall()
            assert await next_delivered(db, worker, delivered) != victim
        holder.rollback()
        while await next_delivered(db, worker, delivered) != victim:
            pass
    assert state_of(db, victim) == State.SENT


async def next_delivered(db: psycopg.Connection, worker: WatchedWorker, delivered: asyncio.Queue[int]) -> int:
    """Enqueue one more message, wait until the worker sleeps again, and return the next delivered message."""
    worker.sleeping.clear()
    enqueue(db)
    message_id = await delivered.get()
    await worker.sleeping.wait()
    return message_id


# Not an error of a row, like a lock timeout.
REFUSED: Step = ("SELECT public.refuse()", {})
REFUSE = """
CREATE FUNCTION public.refuse() RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE lock_not_available; END $$
"""


async def test_a_refused_statement_costs_no_attempt_and_no_lease(
    dsn: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse one statement of a worker in each round: each kind of statement, up to the third time that it is sent."""
    db = connect(autocommit=True)
    db.execute(REFUSE)
    outbox = Outbox(settings_for(dsn))
    delivered: Counter[int] = Counter()
    refused: set[tuple[str, int]] = set()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered[message.id] += 1

    met: Counter[str] = Counter()
    has_refused = True

    async def refusing(steps: Sequence[Step], trip: Trip) -> list[list[Row]]:
        nonlocal has_refused
        met.update(statement for statement, _ in steps)
        fresh = {(statement, met[statement]) for statement, _ in steps if met[statement] <= 3} - refused
        if has_refused or not fresh:
            return await trip(steps)
        has_refused = True
        refused.add(min(fresh))
        return await trip([REFUSED, *steps])

    monkeypatch.setattr(Link, "trip", around_trips(refusing))
    while has_refused:
        has_refused = False
        ids = [enqueue(db), enqueue(db, coalesce_key="k"), enqueue(db, ordering_key="k")]
        budgets = [row.max_attempts - 1 for row in rows_of(db, *ids)]
        met.clear()
        await Worker(outbox).run_once()
        assert [delivered[i] for i in ids] == [1] * len(ids), refused
        rows = rows_of(db, *ids)
        assert {row.state for row in rows} == {State.SENT}, refused
        assert [row.max_attempts - row.attempt_count for row in rows] == budgets, refused
    kinds = {statement for statement, _ in refused}
    assert {
        statements.OVERTAKEN,
        statements.CLAIM,
        statements.FINISH_SENT,
        statements.TELL_SUCCESSORS,
        statements.NEXT_DUE,
    } <= kinds
