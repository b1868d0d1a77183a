"""Messages of an ordering key are delivered one after the other, and no backlog delays another one for long."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Outbox, Permanent, RetryPolicy, Sent, Transient, Worker
from pgoutbox.operations import Operator, Rate
from tests.support.held import Held
from tests.support.outbox_actions import (
    begin,
    drained,
    enqueue,
    lapse,
    redrive,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.proxy import Proxy, proxy_to
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from pgoutbox import Context, Message

# No sweep comes within the patience of a test.
SLOW_SWEEPS = {"poll_interval_seconds": 3600}


class Deliveries:
    """An outbox that records its messages in their order. The first attempts of the messages in `fails` fail."""

    def __init__(self, dsn: str, *, concurrency: int = 20, batch_size: int = 100) -> None:
        self.outbox = Outbox(settings_for(dsn, concurrency=concurrency, batch_size=batch_size, **SLOW_SWEEPS))
        self.seen: list[int] = []
        self.fails: set[int] = set()
        self.overlap_count = 0
        self._in_flight: set[str] = set()

        @self.outbox.handler("greet", retry=RetryPolicy.steps(0, 0, jitter=0))
        async def greet(message: Message, ctx: Context) -> None:
            key = message.ordering_key or str(message.id)
            self.overlap_count += key in self._in_flight
            self._in_flight.add(key)
            await asyncio.sleep(0)  # Another attempt could begin here if it were allowed.
            self._in_flight.discard(key)
            if message.id in self.fails and message.attempt_count == 1:
                raise Transient("planned")
            self.seen.append(message.id)


def is_idle(db: psycopg.Connection) -> bool:
    """Return whether a worker listens and holds its wake-up lock, and has slept since its last statement."""
    ((count,),) = db.execute(
        "SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)"
        " WHERE l.locktype = 'advisory' AND l.granted AND a.state = 'idle' AND a.datname = current_database()"
    ).fetchall()
    return bool(count)


async def test_workers_deliver_many_keys_each_in_order(dsn: str, db: psycopg.Connection) -> None:
    keys = [f"key-{number:02}" for number in range(50)]
    ids = defaultdict[str, list[int]](list)
    for _ in range(20):
        for key in keys:
            ids[key].append(enqueue(db, ordering_key=key))
    both = [Deliveries(dsn), Deliveries(dsn, concurrency=3)]
    for one in both:
        one.fails = {ids[key][number] for key in keys[::3] for number in (0, 7)}
    await drained(*(one.outbox for one in both))
    assert [one.overlap_count for one in both] == [0, 0]
    rows = db.execute(
        "SELECT ordering_key, id, claimed_at, finished_at, state FROM pgoutbox.message ORDER BY claimed_at, finished_at"
    ).fetchall()
    assert {row[4] for row in rows} == {"sent"}
    for key in keys:
        of_key = [row for row in rows if row[0] == key]
        assert [row[1] for row in of_key] == ids[key]
        # A finish and the next claim may share a transaction, whose time is that of the finish.
        assert all(before[3] <= after[2] for before, after in pairwise(of_key))


async def test_an_idle_worker_learns_of_the_first_ordering_key(dsn: str, db: psycopg.Connection) -> None:
    async with running(Worker(Deliveries(dsn).outbox)):
        await until(lambda: is_idle(db))
        message_id = enqueue(db, ordering_key="k")
        await until(lambda: state_of(db, message_id) == "sent")


async def test_a_busy_worker_learns_of_the_first_ordering_key(dsn: str, db: psycopg.Connection) -> None:
    deliveries = Deliveries(dsn, concurrency=1, batch_size=1)
    for _ in range(3000):
        enqueue(db)
    async with running(Worker(deliveries.outbox)):
        await until(lambda: len(deliveries.seen) > 100)
        message_id = enqueue(db, ordering_key="k")
        await until(lambda: state_of(db, message_id) == "sent")
        assert rows_of(db)[-2].state == "pending"


async def test_a_key_continues_as_soon_as_its_first_message_ends(dsn: str, db: psycopg.Connection) -> None:
    deliveries = Deliveries(dsn)
    async with running(Worker(deliveries.outbox)):
        ids = [enqueue(db, ordering_key="k") for _ in range(30)]
        await until(lambda: deliveries.seen == ids)


async def test_a_key_continues_when_its_message_is_tried_again(dsn: str, db: psycopg.Connection) -> None:
    deliveries = Deliveries(dsn)
    ids = [enqueue(db, ordering_key="k") for _ in range(5)]
    deliveries.fails = {ids[0], ids[2]}
    async with running(Worker(deliveries.outbox)):
        await until(lambda: deliveries.seen == ids)


async def test_a_key_keeps_its_order_beside_lost_failed_and_redriven_messages(dsn: str, db: psycopg.Connection) -> None:
    ids = {
        key: [enqueue(db, ordering_key=key, halts_key=key == "halted") for _ in range(3)]
        for key in ("lost", "halted", "redriven")
    }
    begin(db, ids["lost"][0])
    first, second = Held(dsn, shutdown_grace_seconds=0), Held(dsn)
    for message_id in chain(*ids.values()):
        second.end(message_id, Sent())
    failed = [ids["halted"][0], ids["redriven"][0]]
    for message_id in failed:
        first.end(message_id, Permanent("no such user"))
    async with running(first.worker):
        await first.until_begun(ids["redriven"][1])
        await until(lambda: {row.state for row in rows_of(db, *failed)} == {"failed"})
        assert redrive(db, ids["redriven"][0])
        await second.run_once()
    assert sorted(message_id for message_id, _ in first.begun) == [*failed, ids["redriven"][1]]
    assert second.begun == []
    lapse(db, ids["lost"][0])
    assert redrive(db, ids["halted"][0])
    await second.run_once()
    assert {key: [message_id for message_id, _ in second.begun if message_id in ids[key]] for key in ids} == ids


async def test_a_due_key_is_found_among_more_waiting_keys_than_one_claim_reads(
    dsn: str, db: psycopg.Connection
) -> None:
    scheduled_at = datetime.now(UTC) + timedelta(hours=1)
    with db.transaction():
        for number in range(1200):
            enqueue(db, ordering_key=f"key-{number:04}", available_at=scheduled_at)
    async with running(Worker(Deliveries(dsn).outbox)):
        await until(lambda: is_idle(db))
        for key in ("key-0000-a", "key-0700-a", "z"):
            message_id = enqueue(db, ordering_key=key)
            await until(lambda: state_of(db, message_id) == "sent")  # noqa: B023 - asked at once
            await until(lambda: is_idle(db))


INSERT_KEYS = """
INSERT INTO pgoutbox.message (topic, payload, ordering_key, available_at)
SELECT 'greet', '1', 'waiting-' || k, {due_at}
FROM generate_series(1, {messages}) AS n, generate_series(1, {count}) AS k
"""


def has_seen(deliveries: Deliveries, count: int) -> bool:
    return len(deliveries.seen) == count


def claim_count(proxy: Proxy) -> int:
    """Return how many claims went through the proxy."""
    return len([text for text in proxy.statements if text.startswith("WITH judged")])


@pytest.mark.parametrize("which", ["new keys", "the next of a key"])
async def test_a_message_does_not_wait_for_a_round_over_all_keys(
    dsn: str, db: psycopg.Connection, tmp_path: Path, which: str
) -> None:
    """Each round has forty pages. They are counted, because a round takes a fraction of a second."""
    db.execute(INSERT_KEYS.format(count=20_000, due_at="now() + interval '1 day'", messages=1).encode())
    db.execute("ANALYZE pgoutbox.message_live")
    with proxy_to(dsn, tmp_path) as proxy:
        deliveries = Deliveries(proxy.dsn)
        async with running(Worker(deliveries.outbox)):
            await until(lambda: is_idle(db))
            count = claim_count(proxy)
            if which == "new keys":
                for number in range(20):
                    enqueue(db, ordering_key=f"{number}")
                    await until(partial(has_seen, deliveries, number + 1))
            else:
                with db.transaction():
                    ids = [enqueue(db, ordering_key="k") for _ in range(20)]
                    db.execute(
                        "UPDATE pgoutbox.message SET available_at = now() - interval '1 h' WHERE id = ANY (%s)", [ids]
                    )
                await until(lambda: state_of(db, ids[-1]) == "sent")
            assert claim_count(proxy) - count < 300


async def test_no_claim_takes_a_message_twice(dsn: str, db: psycopg.Connection) -> None:
    """Whichever way a message is found: by its due time, after the message before it, or among all keys."""
    db.execute(
        """
        CREATE FUNCTION refuse_twice() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF cardinality(NEW.ids) > (SELECT count(DISTINCT id) FROM unnest(NEW.ids) AS id) THEN
                RAISE EXCEPTION 'twice';
            END IF;
            RETURN NEW;
        END
        $$;
        CREATE TRIGGER refuse_twice BEFORE INSERT ON pgoutbox.claim FOR EACH ROW EXECUTE FUNCTION refuse_twice()
        """
    )
    due_at = "now() + CASE WHEN k % 4 > 0 THEN interval '1 day' ELSE interval '0 s' END"
    db.execute(INSERT_KEYS.format(count=4000, due_at=due_at, messages=2).encode())
    deliveries = Deliveries(dsn, concurrency=500, batch_size=1000)
    async with running(Worker(deliveries.outbox)):
        await until(partial(has_seen, deliveries, 2000))


async def test_many_keys_take_turns_under_a_limit(dsn: str, db: psycopg.Connection) -> None:
    db.execute(INSERT_KEYS.format(count=2000, due_at="now() + interval '1 day'", messages=1).encode())
    deliveries = Deliveries(dsn, concurrency=1)
    async with running(Worker(deliveries.outbox)):
        await until(lambda: is_idle(db))
        Operator(db).limit_in_flight("default", 1)
        with db.transaction():
            db.execute("UPDATE pgoutbox.message SET available_at = now()")
            db.execute(INSERT_KEYS.format(count=2000, due_at="now()", messages=2).encode())
        enqueue(db)
        await until(lambda: len(deliveries.seen) > 300)
    query = "SELECT count(DISTINCT coalesce(ordering_key, '')) FROM pgoutbox.message WHERE id = ANY (%s)"
    assert db.execute(query, [deliveries.seen[:300]]).fetchone() == (300,)


async def test_lanes_with_a_backlog_take_turns(dsn: str, db: psycopg.Connection) -> None:
    deliveries = Deliveries(dsn, concurrency=1, batch_size=1)
    retried = [enqueue(db) for _ in range(30)]
    db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1, claimed_at = now(), worker = 'former'")
    ordered = [enqueue(db, ordering_key=f"key-{number}") for number in range(30)]
    fresh = [enqueue(db) for _ in range(30)]
    await drained(deliveries.outbox)
    for lane in (retried, ordered, fresh):
        assert len(set(lane) & set(deliveries.seen[:45])) > 5


@pytest.mark.parametrize("has_fresh", [False, True])
async def test_keys_take_turns_under_a_limit(dsn: str, db: psycopg.Connection, has_fresh: bool) -> None:
    """The first key has a message for each permit."""
    deliveries = Deliveries(dsn)
    for _ in range(30):
        enqueue(db, ordering_key="a")
        if has_fresh:
            enqueue(db)
    Operator(db).limit_in_flight("default", 1)
    async with running(Worker(deliveries.outbox)):
        await until(lambda: deliveries.seen)
        last = enqueue(db, ordering_key="z")
        await until(lambda: last in deliveries.seen)
    assert len(deliveries.seen) < 30


async def test_all_lanes_share_the_tokens_of_their_queue(dsn: str, db: psycopg.Connection) -> None:
    deliveries = Deliveries(dsn)
    for _ in range(10):
        enqueue(db)
    db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1, claimed_at = now(), worker = 'former'")
    for number in range(10):
        enqueue(db)
        enqueue(db, ordering_key=f"key-{number}")
    Operator(db).limit_rate("default", Rate(8, 3600), burst=1)
    db.execute("UPDATE pgoutbox.queue SET burst = 7; UPDATE pgoutbox.queue SET tokens = 7")
    await Worker(deliveries.outbox).run_once()
    assert len(deliveries.seen) == 7
