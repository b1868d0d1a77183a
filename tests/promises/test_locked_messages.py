"""An act on one message delays no other one, however long its transaction stays open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgoutbox import Sent, Transient
from tests.support.held import Held
from tests.support.outbox_actions import PATIENCE_SECONDS, attempts_of, enqueue, row_of, rows_of, running, state_of
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

    from pgoutbox import Outcome
    from tests.conftest import Connect

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
