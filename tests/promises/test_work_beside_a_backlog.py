"""No kind of message and no queue starves another: a worker that has a backlog delivers everything else too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, RetryPolicy, Settings, Transient, Worker
from pgoutbox.operations import Operator, Rate
from tests.support.outbox_actions import begin, enqueue, lapse, rows_of, running, settings_for, state_of
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg

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


KINDS = ("fresh", "retried", "ordered", "lost")


def put(db: psycopg.Connection, kind: str) -> int:
    """Enqueue a message, which is due in the lane of its kind, and return its id."""
    message_id = enqueue(db, payload=kind, ordering_key="k" if kind == "ordered" else None, notify=False)
    if kind == "retried":
        db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = %s", [message_id])
    elif kind == "lost":
        begin(db, message_id, lease_seconds=-1)
    return message_id


@pytest.mark.parametrize("source", KINDS)
async def test_no_endless_source_of_messages_starves_another_kind(
    dsn: str, db: psycopg.Connection, source: str
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1, batch_size=1))
    others: list[int] = []
    count = 0

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        nonlocal count
        if message.payload == source:
            count += 1
            put(db, source)
            if count == 10:
                others.extend(put(db, kind) for kind in KINDS if kind != source)

    with db.transaction():
        for _ in range(20):
            put(db, source)
    async with running(Worker(outbox)):
        await until(lambda: others and all(state_of(db, message_id) == "sent" for message_id in others))


@pytest.mark.parametrize("kind", ["plain", "ordered"])
@pytest.mark.parametrize(
    ("queues", "counts", "first", "shares"),
    [
        (["high:3", "low:1"], {"low": 100, "high": 100}, 80, {"high": 60, "low": 20}),
        (["high:16", "plain:4", "low:1"], {"plain": 100, "low": 100}, 50, {"plain": 40, "low": 10}),
        (["high", "low"], {"low": 20, "high": 20}, 20, {"high": 20}),
    ],
)
async def test_queues_share_a_worker_in_the_proportion_of_their_weights(
    dsn: str,
    db: psycopg.Connection,
    queues: Sequence[str],
    counts: dict[str, int],
    first: int,
    shares: dict[str, int],
    kind: str,
) -> None:
    outbox = Outbox(Settings(dsn=dsn, concurrency=1, batch_size=1))
    order: list[str] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        order.append(message.queue)

    for queue, count in counts.items():
        db.execute(
            "SELECT pgoutbox.enqueue('greet', '1', queue => %s, ordering_key => CASE WHEN %s THEN (n %% 3)::text END)"
            " FROM generate_series(1, %s) AS n",
            (queue, kind == "ordered", count),
        )
    await Worker(outbox, queues=queues).run_once()

    assert len(order) == sum(counts.values())
    found = {queue: order[:first].count(queue) for queue in dict.fromkeys(order[:first])}
    # The first claims are on their way before the worker knows which queues are empty.
    assert all(abs(found.get(queue, 0) - share) <= 2 for queue, share in shares.items()), found
