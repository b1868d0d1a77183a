"""Workers do not deadlock."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pgoutbox import Context, Message, Outbox, Worker
from tests.support.held import waiting_count
from tests.support.outbox_actions import PATIENCE_SECONDS, begin, enqueue, rows_of, settings_for
from tests.support.waiting import until
from tests.support.worker_process import connection_count

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect


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
