"""Limits of queues: workers wait for a permit without claiming in vain, and keep them together."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, Sent, Worker
from pgoutbox.operations import Operator, Rate
from tests.support.held import STOP_CLAIMS, Held, waiting_count
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    begin,
    enqueue,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.proxy import proxy_to
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from tests.conftest import Connect

COUNT = 40


@pytest.mark.parametrize("holder", ["its own attempt", "another worker", "the rate"])
async def test_a_worker_at_a_limit_waits_for_a_permit(
    dsn: str, db: psycopg.Connection, tmp_path: Path, holder: str
) -> None:
    operator = Operator(db)
    ids = [enqueue(db) for _ in range(COUNT)]
    statements: Counter[str] = Counter()
    has_begun, may_end = asyncio.Event(), asyncio.Event()
    if holder == "the rate":
        operator.limit_rate("default", Rate(2, 3600), burst=1)
    else:
        operator.limit_in_flight("default", 1)
    if holder == "another worker":
        begin(db, ids[0], worker="another")
        has_begun.set()

    def has_passed(seconds: int) -> bool:
        return db.execute("SELECT now() > %s + make_interval(secs => %s)", [began_at, seconds]).fetchone() == (True,)

    with proxy_to(dsn, tmp_path) as proxy:
        outbox = Outbox(settings_for(proxy.dsn))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            has_begun.set()
            await may_end.wait()

        async with running(worker := Worker(outbox)):
            await has_begun.wait()
            await until(lambda: proxy.open_count("pgoutbox listen") == 1)
            ((began_at,),) = db.execute("SELECT now()").fetchall()
            proxy.on_statement = lambda application, text: statements.update([application])
            await until(lambda: has_passed(4))
            # It looks about once a second, because nobody tells it of ends in other workers.
            assert statements["pgoutbox claim"] < 60
            assert worker.status().in_flight == (holder != "another worker")
            may_end.set()
            if holder == "the rate":
                operator.limit_rate("default", None)
            elif holder == "another worker":
                db.execute(
                    "UPDATE pgoutbox.message SET state = 'sent', finished_at = now() WHERE id = %s",
                    [ids[0]],
                )
            # One after the other: a look once a second would take longer than the test waits.
            await until(lambda: {row.state for row in rows_of(db)} == {"sent"})


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
