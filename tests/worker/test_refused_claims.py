"""Tests claims that the database refuses because of a row: the worker ends with PostgreSQL's error, and names the
place to look at."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Context, Message, Outbox
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker import Worker
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    enqueue,
    lapse,
    make_due,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.waiting import until
from tests.support.worker_sql import claim

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

REFUSALS = {
    "P0001": "RAISE EXCEPTION 'not this one'",
    "23514": "RAISE EXCEPTION 'not this one' USING ERRCODE = 'check_violation'",
    "22012": "PERFORM 1 / 0",
    "XX001": "RAISE EXCEPTION 'missing chunk number 0 for toast value 1' USING ERRCODE = 'data_corrupted'",
}


def refuse_claims(db: psycopg.Connection, ids: Collection[int], how: str = REFUSALS["P0001"]) -> None:
    """Let a user trigger refuse each change of these messages while they are not final."""
    db.execute(
        f"""
        CREATE FUNCTION refuse_claim() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF OLD.id = ANY ('{{{",".join(map(str, ids))}}}') THEN
                {how};
            END IF;
            RETURN NEW;
        END
        $$;
        CREATE TRIGGER refuse_claim BEFORE UPDATE ON pgoutbox.message_live
            FOR EACH ROW EXECUTE FUNCTION refuse_claim();
        """.encode()
    )


def greeting(outbox: Outbox) -> list[int]:
    """Return the ids of a handler's messages, in order."""
    handed_over = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        handed_over.append(message.id)

    return handed_over


def fresh(db: psycopg.Connection) -> int:
    return enqueue(db)


def retry(db: psycopg.Connection) -> int:
    message_id = lost(db)
    db.execute(
        "UPDATE pgoutbox.message SET state = 'pending', lane = 1 WHERE id = %s",
        [message_id],
    )
    make_due(db, message_id)
    return message_id


def ordered(db: psycopg.Connection) -> int:
    return enqueue(db, ordering_key="member:7")


def lost(db: psycopg.Connection, *, max_attempts: int = 11) -> int:
    message_id = enqueue(db, max_attempts=max_attempts)
    assert len(claim(db, worker="dead")) == 1
    lapse(db, message_id)
    return message_id


def without_attempt_left(db: psycopg.Connection) -> int:
    return lost(db, max_attempts=1)


def suspect(db: psycopg.Connection) -> int:
    return lost(db, max_attempts=2)


@pytest.mark.parametrize(
    "create",
    [fresh, retry, ordered, lost, without_attempt_left, suspect],
)
async def test_a_refused_claim_of_any_lane_ends_the_worker(
    dsn: str,
    db: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
    create: Callable[[psycopg.Connection], int],
) -> None:
    outbox = Outbox(settings_for(dsn))
    greeting(outbox)
    message_id = create(db)
    before = state_of(db, message_id)
    refuse_claims(db, {message_id})
    with caplog.at_level(logging.ERROR), pytest.raises(psycopg.errors.RaiseException, match="not this one"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await Worker(outbox).run()
    (record,) = [r for r in caplog.records if r.__dict__.get("event") == LogEvent.CLAIM_REFUSED]
    assert record.__dict__["reason"] == "P0001"
    assert state_of(db, message_id) == before


@pytest.mark.parametrize("sqlstate", REFUSALS)
async def test_a_run_ends_with_the_error_of_a_refused_claim(dsn: str, db: psycopg.Connection, sqlstate: str) -> None:
    outbox = Outbox(settings_for(dsn))
    greeting(outbox)
    refuse_claims(db, {enqueue(db)}, REFUSALS[sqlstate])
    worker = Worker(outbox)
    with pytest.raises(psycopg.DatabaseError) as refusal:
        await worker.run_once()
    assert refusal.value.sqlstate == sqlstate
    assert worker.telemetry.counts[LogEvent.CLAIM_REFUSED] == 1


async def test_a_worker_that_ends_because_of_a_refused_claim_writes_the_outcomes_of_its_attempts(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn))
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        has_begun.set()
        await may_end.wait()

    delivered = enqueue(db)
    worker = Worker(outbox)
    run = asyncio.create_task(worker.run())
    await has_begun.wait()
    with db.transaction():
        refused = enqueue(db)
        refuse_claims(db, {refused})
    await until(lambda: worker.telemetry.counts[LogEvent.CLAIM_REFUSED] == 1)
    may_end.set()
    with pytest.raises(psycopg.errors.RaiseException):
        await run
    assert {row.id: row.state for row in rows_of(db)} == {delivered: "sent", refused: "pending"}


@pytest.mark.slow
async def test_messages_are_delivered_when_their_claim_is_no_longer_refused(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    handed_over = greeting(outbox)
    ids = [enqueue(db) for _ in range(10)]
    refuse_claims(db, ids[4:5])
    with pytest.raises(psycopg.errors.RaiseException):
        await Worker(outbox).run()
    db.execute("DROP FUNCTION refuse_claim CASCADE")
    async with running(Worker(outbox)):
        await until(lambda: handed_over == ids)
        await until(lambda: {state_of(db, message_id) for message_id in ids} == {"sent"})


@pytest.mark.slow
async def test_a_worker_process_exits_with_code_1_after_a_refused_claim(dsn: str, db: psycopg.Connection) -> None:
    refuse_claims(db, {enqueue(db, "test.good")})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pgoutbox", "worker", "--app", "tests.support.app:outbox", "--dsn", dsn),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            _, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert (process.returncode, log.count(b"claim_refused")) == (1, 1)
    assert b"PostgreSQL: not this one [P0001]" in log
