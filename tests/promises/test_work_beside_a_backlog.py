"""A worker that has an endless backlog delivers everything else too: no kind of message starves another."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, RetryPolicy, Transient, Worker
from pgoutbox.operations import Operator, Rate
from tests.support.outbox_actions import begin, enqueue, lapse, rows_of, running, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

pytestmark = pytest.mark.slow

COUNT = 20


def fresh(db: psycopg.Connection, count: int = COUNT) -> list[int]:
    return [enqueue(db, "other", queue="other") for _ in range(count)]


def limited_in_flight(db: psycopg.Connection) -> list[int]:
    Operator(db).limit_in_flight("other", 1)
    return fresh(db, 150)  # Each end lets the next one begin: a look now and then would not be enough.


def limited_by_a_rate(db: psycopg.Connection) -> list[int]:
    Operator(db).limit_rate("other", Rate(10, 0.5), burst=1)
    return fresh(db)


def resumed(db: psycopg.Connection) -> list[int]:
    Operator(db).pause("other")
    ids = fresh(db)
    db.execute("UPDATE pgoutbox.queue SET resume_at = now() + interval '0.3 s' WHERE name = 'other'")
    return ids


def ordered(db: psycopg.Connection) -> list[int]:
    return [enqueue(db, "other", queue="other", ordering_key="k") for _ in range(COUNT)]


def retried(db: psycopg.Connection) -> list[int]:
    return [enqueue(db, "retried", queue="other") for _ in range(COUNT)]


def lapsed(db: psycopg.Connection) -> list[int]:
    ids = [enqueue(db, "other", queue="other") for _ in range(4)]
    for message_id in ids:
        begin(db, message_id, worker="dead")
        lapse(db, message_id)
    return ids


@pytest.mark.parametrize("queues", ["other,busy", "busy:1,other:1"])
@pytest.mark.parametrize("create", [fresh, limited_in_flight, limited_by_a_rate, resumed, ordered, retried, lapsed])
async def test_no_backlog_starves_messages_of_an_earlier_queue_or_of_one_with_a_share(
    dsn: str, db: psycopg.Connection, create: Callable[[psycopg.Connection], list[int]], queues: str
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=4, batch_size=4))
    begun_count = 0

    @outbox.handler("busy")
    async def busy(message: Message, ctx: Context) -> None:
        nonlocal begun_count
        begun_count += 1
        await asyncio.sleep(0.002)
        if not is_over:
            db.execute("SELECT pgoutbox.enqueue('busy', '1', queue => 'busy', notify => false)")

    @outbox.handler("other")
    async def other(message: Message, ctx: Context) -> None:
        await asyncio.sleep(0.002)

    @outbox.handler("retried", retry=RetryPolicy.steps(0.1, jitter=0))
    async def retry(message: Message, ctx: Context) -> Transient | None:
        return Transient("busy") if message.attempt_count == 1 else None

    is_over = False
    db.execute("SELECT pgoutbox.enqueue('busy', '1', queue => 'busy') FROM generate_series(1, 50)")
    async with running(Worker(outbox, queues=queues.split(","))):
        await until(lambda: begun_count > 100)
        ids = create(db)
        query = "SELECT FROM pgoutbox.message_live WHERE id = ANY (%s)"
        await until(lambda: db.execute(query, [ids]).rowcount == 0)
        is_over = True
    assert {row.state for row in rows_of(db, *ids)} == {"sent"}
