"""What a session has locked, or a server refuses for a moment, delays no other message and costs no attempt."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, Permanent, Sent, Transient, Worker
from tests.support.held import Held, waiting_count
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    begin,
    enqueue,
    row_of,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.waiting import until
from tests.support.worker_process import connection_count

if TYPE_CHECKING:
    import psycopg

    from pgoutbox import Outcome
    from tests.conftest import Connect


@pytest.mark.parametrize("state", ["sent", "failed"])
async def test_a_locked_row_delays_only_its_own_outcome(
    dsn: str, db: psycopg.Connection, connect: Connect, state: str
) -> None:
    # A wait for the lock would last longer than the test.
    outbox = Outbox(settings_for(dsn, concurrency=20, lock_timeout_seconds=300, statement_timeout_seconds=300))
    handed_over: Counter[int] = Counter()
    may_end = asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Permanent | None:
        handed_over[message.id] += 1
        await may_end.wait()
        return Permanent("no") if state == "failed" else None

    ids = [enqueue(db) for _ in range(20)]
    locked, *others = ids
    async with running(Worker(outbox)):
        await until(lambda: len(handed_over) == len(ids))
        other = connect()
        other.execute("SELECT FROM pgoutbox.message_live WHERE id = %s FOR UPDATE", [locked])
        may_end.set()
        await until(lambda: {row.state for row in rows_of(db, *others)} == {state})
        assert state_of(db, locked) == "sending"
        other.commit()
        await until(lambda: state_of(db, locked) == state)
    assert handed_over == dict.fromkeys(ids, 1)


ACTS = {
    "ends it": "state = 'failed', last_error = 'by hand', key_in_flight = NULL, finished_at = now()",
    "puts it back": "state = 'pending', lane = 1, key_in_flight = NULL, available_at = now() + interval '1 h'",
    "keeps it": "headers = '{}'",
}


@pytest.mark.parametrize("outcome", [Sent(), Transient("busy")], ids=["sent", "retry"])
@pytest.mark.parametrize("act", ACTS)
async def test_an_open_transaction_on_one_message_delays_no_other_one(
    dsn: str, db: psycopg.Connection, connect: Connect, act: str, outcome: Outcome
) -> None:
    seconds, session = 2 * PATIENCE_SECONDS, connect()
    held = Held(dsn, concurrency=20, lock_timeout_seconds=seconds, statement_timeout_seconds=seconds)
    ids = [enqueue(db) for _ in range(20)]
    touched, others = ids[10], ids[:10] + ids[11:]
    ended = "sent" if isinstance(outcome, Sent) else "pending"
    async with running(held.worker):
        await held.until_begun(*ids)
        session.execute(f"UPDATE pgoutbox.message SET {ACTS[act]} WHERE id = %s".encode(), [touched])
        for message_id in ids:
            held.end(message_id, outcome)
        await until(lambda: {row.state for row in rows_of(db, *others)} == {ended})
        later = enqueue(db)
        held.end(later, Sent())
        await until(lambda: state_of(db, later) == "sent")
        assert state_of(db, touched) == "sending"
        session.commit()
        final = {"ends it": "failed", "puts it back": "pending", "keeps it": ended}[act]
        await until(lambda: state_of(db, touched) == final and not held.worker.status().in_flight)


async def test_content_that_is_locked_for_a_while_costs_no_attempt(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    held, session = Held(dsn, lock_timeout_seconds=0.1), connect()
    with db.transaction():
        (message,) = held.outbox.on(db).enqueue_fanout("greet", 1, ["a:1"], content="shared")
    held.end(message.id, Sent())
    session.execute("LOCK TABLE pgoutbox.content")
    async with running(held.worker):
        await until(lambda: attempts_of(db, message.id))
        session.rollback()
        await until(lambda: state_of(db, message.id) == "sent")
    row = row_of(db, message.id)
    assert [number for number, _ in held.begun] == [message.id]
    assert row.max_attempts - row.attempt_count == 10


# A sequence counts on when the transaction rolls back. About every other statement is refused, with shifts in between:
# otherwise the second statement of a trip that is repeated would be refused each time.
REFUSE = """
CREATE SEQUENCE public.asked;
CREATE SEQUENCE public.refused;
CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    number constant bigint := nextval('public.asked');
BEGIN
    IF (number + number / 7) % 2 = 1 THEN
        PERFORM nextval('public.refused');
        RAISE 'refused' USING ERRCODE = TG_ARGV[0];
    END IF;
    RETURN NULL;
END $$;
"""


@pytest.mark.parametrize("sqlstate", ["55P03", "40P01"])
async def test_a_refused_statement_costs_no_attempt(dsn: str, db: psycopg.Connection, sqlstate: str) -> None:
    outbox, attempts, ids = Outbox(settings_for(dsn)), list[tuple[int, int]](), list[int]()

    @outbox.handler("mail")
    async def mail(message: Message, ctx: Context) -> None:
        attempts.append((message.id, message.attempt_count))

    db.execute(REFUSE)
    db.execute(
        "CREATE TRIGGER refuse AFTER INSERT OR UPDATE OR DELETE ON pgoutbox.message"
        f" FOR EACH STATEMENT EXECUTE FUNCTION public.refuse('{sqlstate}')".encode()
    )
    db.execute("SET session_replication_role = replica")  # The test itself is not refused.
    async with running(Worker(outbox)):
        for _ in range(3):
            ids.append(enqueue(db, "mail"))
            db.execute("NOTIFY pgoutbox, 'all default'")
            await until(lambda: {row.state for row in rows_of(db, *ids)} == {"sent"})
    assert attempts == [(message_id, 1) for message_id in ids]
    ((refused_count,),) = db.execute("SELECT last_value FROM public.refused").fetchall()
    assert refused_count >= 3


async def test_workers_that_claim_the_same_keys_in_opposite_orders_do_not_deadlock(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    keys = [f"key-{number:02}" for number in range(40)]
    outbox = Outbox(settings_for(dsn, lock_timeout_seconds=PATIENCE_SECONDS))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    gate = connect()
    held = enqueue(db, queue="gate", coalesce_key=keys[20])
    for there, back in zip(keys, reversed(keys), strict=True):
        enqueue(db, queue="there", coalesce_key=there)
        enqueue(db, queue="back", coalesce_key=back)
    # As if each claim had begun before the other's messages were enqueued: nothing is superseded.
    db.execute("UPDATE pgoutbox.key_head SET newest_id = 0")
    begin(gate, held)  # Both claims come to wait, for this key or for each other.
    runs = [asyncio.create_task(Worker(outbox, queues=[queue]).run_once()) for queue in ("there", "back")]
    await until(lambda: waiting_count(db) == 2)
    gate.rollback()
    await asyncio.gather(*runs)
    await Worker(outbox, queues=["there", "back"]).drain()
    assert {row.state for row in rows_of(db) if row.id != held} == {"sent"}
    await until(lambda: connection_count(db) == 0)  # Then their sessions have reported their deadlocks.
    assert db.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone() == (0,)
