"""A worker that stops leaves no message to the end of its lease."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.support.held import STOP_CLAIMS, Held
from tests.support.outbox_actions import PATIENCE_SECONDS, enqueue, rows_of, until_blocked

if TYPE_CHECKING:
    import psycopg


async def test_a_worker_that_is_stopped_during_its_claim_releases_the_messages(
    dsn: str, db: psycopg.Connection
) -> None:
    held = Held(
        dsn,
        worker_name="slow",
        lock_timeout_seconds=PATIENCE_SECONDS,
        shutdown_grace_seconds=0,
        listen=False,
        poll_interval_seconds=0.1,
    )
    running = enqueue(db)
    run = asyncio.create_task(held.worker.run())
    await held.until_begun(running)
    db.execute(STOP_CLAIMS)
    db.execute("SELECT pg_advisory_lock(1)")
    claimed = enqueue(db)
    await until_blocked(db, run)
    held.worker.stop()
    for _ in range(20):  # The worker ends all that it can end without an answer of the server.
        await asyncio.sleep(0)
    db.execute("SELECT pg_advisory_unlock(1)")
    await run
    assert [row.state for row in rows_of(db, running, claimed)] == ["pending", "pending"]
