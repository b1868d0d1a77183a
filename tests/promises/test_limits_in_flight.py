"""Workers together keep the limit in flight of a queue, and a limit blocks nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgoutbox import Sent
from pgoutbox.operations import Operator
from tests.support.held import STOP_CLAIMS, Held, waiting_count
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    begin,
    enqueue,
    rows_of,
    running,
    state_of,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect


async def test_workers_together_keep_the_limit_in_flight_of_a_queue(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    Operator(db).limit_in_flight("default", 3)
    slow = Held(dsn, worker_name="slow", lock_timeout_seconds=PATIENCE_SECONDS, concurrency=10)
    quick = Held(dsn, queues=["default", "other"])
    ids = [enqueue(db) for _ in range(8)]
    for message_id in ids[:3]:
        begin(db, message_id, lease_seconds=-1)  # Its worker has died.

    async def others_are_delivered() -> None:
        quick.begun.clear()
        message_id = enqueue(db, queue="other")
        quick.end(message_id, Sent())
        await quick.run_once()
        assert quick.begun == [(message_id, 1)]

    db.execute(STOP_CLAIMS)
    db.execute("SELECT pg_advisory_lock(1)")
    async with running(slow.worker):
        await until(lambda: waiting_count(db) == 1)
        await others_are_delivered()
        db.execute("SELECT pg_advisory_unlock(1)")
        await until(lambda: len(slow.begun) == 3)
        await others_are_delivered()
        assert sum(row.state == "sending" for row in rows_of(db, *ids)) == 3
        changer = connect()
        changer.execute("SELECT")
        Operator(changer).limit_in_flight("default", 4)
        await others_are_delivered()
        for message_id in ids:
            slow.end(message_id, Sent())
        changer.rollback()
        await until(lambda: all(state_of(db, message_id) == "sent" for message_id in ids))
