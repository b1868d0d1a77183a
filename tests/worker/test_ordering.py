"""Tests ordering keys, fan-out and limits through workers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgoutbox import ArgumentError, NewMessage, Outbox, Topic
from pgoutbox.database import sql
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.kernel import lanes
from pgoutbox.kernel.lanes import PagedKeys
from pgoutbox.message import Message, Permanent, Snooze, State, Transient
from pgoutbox.operations import Operator, Rate
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from pgoutbox.worker.run import WorkerRun
from tests.promises.test_ordering_keys import is_idle
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    drained,
    enqueue,
    make_due,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.waiting import until, until_idle
from tests.support.worker_sql import WatchedWorker, claim_ordered

if TYPE_CHECKING:
    from pgoutbox.handlers import Context
    from tests.conftest import Connect


class Line:
    """An outbox that records its messages by ordering key; some attempts fail first."""

    def __init__(self, dsn: str, *, fails: frozenset[int] = frozenset(), ends: frozenset[int] = frozenset()) -> None:
        self.outbox = Outbox(settings_for(dsn, concurrency=20))
        self.seen: dict[str | None, list[int]] = defaultdict(list)
        self.in_flight: set[str | None] = set()
        self.overlaps = 0

        @self.outbox.handler("greet", retry=RetryPolicy.steps(0, 0, 0, jitter=0))
        async def greet(message: Message, ctx: Context) -> None:
            key = message.ordering_key
            self.overlaps += key is not None and key in self.in_flight
            self.in_flight.add(key)
            await asyncio.sleep(0)  # Another attempt could begin here if it were allowed.
            self.in_flight.discard(key)
            if message.id in ends:
                raise Permanent("planned")
            if message.id in fails and message.attempt_count < 3:
                raise Transient("planned")
            self.seen[key].append(message.id)


@pytest.mark.slow
async def test_processes_that_end_early_do_not_all_begin_with_the_same_keys(dsn: str, db: psycopg.Connection) -> None:
    """Each process ends with its first messages. A page of a worker with one slot is one key."""
    keys = [f"key-{number:02}" for number in range(40)]
    ids = {enqueue(db, ordering_key=key): key for key in keys for _ in range(2)}
    first: dict[Worker, str] = {}
    for _ in range(20):
        outbox = Outbox(settings_for(dsn, concurrency=1))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            first.setdefault(worker, ids[message.id])  # noqa: B023 - runs at once
            worker.stop()  # noqa: B023 - runs at once
            raise Snooze(0)

        worker = Worker(outbox)
        await worker.run()
        db.execute("UPDATE pgoutbox.message_live SET available_at = created_at")
    assert len(first) == 20
    assert len(set(first.values())) > 5


@pytest.mark.parametrize("halts_key", [False, True])
async def test_the_topic_decides_whether_a_failure_halts_its_key(
    dsn: str, db: psycopg.Connection, halts_key: bool
) -> None:
    first, *rest = (enqueue(db, ordering_key="k", halts_key=halts_key) for _ in range(3))
    line = Line(dsn, ends=frozenset({first}))
    await drained(line.outbox)
    assert state_of(db, first) == "failed"
    expected = "pending" if halts_key else "sent"
    assert {row.state for row in rows_of(db, *rest)} == {expected}
    if halts_key:
        mended = Line(dsn)
        assert Operator(db).redrive(first).is_done
        await drained(mended.outbox)
        assert mended.seen["k"] == [first, *rest]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by age", "by rule"])
async def test_a_halted_key_continues_when_its_failed_message_is_pruned(
    dsn: str, db: psycopg.Connection, way: str
) -> None:
    first = enqueue(db, ordering_key="k", halts_key=True)
    line = Line(dsn, ends=frozenset({first}))
    await drained(line.outbox)
    second = enqueue(db, ordering_key="k", halts_key=True)
    db.execute("UPDATE pgoutbox.message_failed SET finished_at = finished_at - interval '2 days'")
    worker = WatchedWorker(line.outbox)
    async with running(worker):
        await worker.asleep.wait()
        assert state_of(db, second) == "pending"
        if way == "by age":
            await asyncio.to_thread(Operator(db).prune, timedelta(days=1), states=[State.FAILED])
        else:
            Operator(db).set_retention("greet", "failed", timedelta(days=1))
            await asyncio.to_thread(Operator(db).prune_by_retention)
        await until(lambda: state_of(db, second) == "sent")
    assert line.seen["k"] == [second]


async def test_a_round_ends_although_the_key_where_it_began_is_gone(dsn: str, db: psycopg.Connection) -> None:
    enqueue(db, ordering_key="a")
    assert len(claim_ordered(db, worker="another")) == 1
    enqueue(db, ordering_key="a")
    line = Line(dsn)

    class LateWorker(Worker):
        def _new_run(self, *, ends_by_itself: bool) -> WorkerRun:
            run = super()._new_run(ends_by_itself=ends_by_itself)
            (lane,) = (lane for lane in run.kernel._lanes if isinstance(lane, PagedKeys))
            lane._after_key = "b"
            return run

    worker = LateWorker(line.outbox)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await worker.run_once()
    assert line.seen == {}


@pytest.mark.parametrize("how", ["a burst", "beside other messages", "while a key goes on"])
async def test_messages_that_fall_due_need_no_round_over_all_keys(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The pause after a round without a message has no end."""
    for name, value in (("_CHEAP_SEARCH_SECONDS", 0.0), ("_PAUSE_AFTER_SEARCH", 1e9), ("_MAX_PAUSE_SECONDS", 3600.0)):
        monkeypatch.setattr(lanes, name, value)
    insert = (
        "INSERT INTO pgoutbox.message (topic, payload, ordering_key, available_at)"
        " SELECT 'greet', '1', {key}, now() + {delay} FROM generate_series(1, {count}) AS k"
    )
    db.execute(insert.format(key="'waiting-' || k", delay="interval '1 day'", count=2000).encode())
    seen: list[str | None] = []
    outbox = Outbox(settings_for(dsn, concurrency=20, batch_size=20, poll_interval_seconds=3600))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        seen.append(message.ordering_key)

    async with running(Worker(outbox)):
        await until(lambda: is_idle(db))
        match how:
            case "a burst":
                db.execute(insert.format(key="'new-' || k", delay="interval '0'", count=400).encode())
                db.execute("NOTIFY pgoutbox, 'all default'")
                await until(lambda: len(seen) == 400)
            case "beside other messages":
                db.execute(insert.format(key="NULL", delay="interval '0'", count=20_000).encode())
                db.execute("NOTIFY pgoutbox, 'all default'")
                await until(lambda: seen)
                enqueue(db, ordering_key="new", notify=False)
                await until(lambda: "new" in seen)
                assert len(seen) < 20_000
            case _:
                for number in range(40):
                    delay = f"interval '{number % 20} ms'"
                    with db.transaction():
                        db.execute(insert.format(key=f"'new-{number}'", delay=delay, count=1).encode())
                        db.execute(insert.format(key="'goes on'", delay="interval '0'", count=5).encode())
                        db.execute("NOTIFY pgoutbox, 'all default'")
                    await until(partial(has_seen, seen, 6 * number + 6))


def has_seen(seen: list[str | None], count: int) -> bool:
    return len(seen) == count


async def test_only_the_topic_can_set_its_ordering_key(dsn: str, connect: Connect) -> None:
    line = Line(dsn)
    topic: Topic[Any] = Topic("greet", ordering_key=lambda p: str(p["account"]), halts_key=True)
    with connect() as connection:
        for number in range(4):
            line.outbox.on(connection).enqueue(topic, {"account": number % 2})
        line.outbox.on(connection).enqueue_many([NewMessage(topic, {"account": number % 2}) for number in range(4)])
    await drained(line.outbox)
    assert {key: len(ids) for key, ids in line.seen.items()} == {"0": 4, "1": 4}
    assert all(ids == sorted(ids) for ids in line.seen.values())


# --- debounce ---------------------------------------------------------------------------------------------------------


def due_in(db: psycopg.Connection, message_id: int) -> float:
    (seconds,) = db.execute(
        "SELECT extract(epoch FROM available_at - clock_timestamp())::float8 FROM pgoutbox.message WHERE id = %s",
        [message_id],
    ).fetchone() or (0.0,)
    return float(seconds)


def debounced(outbox: Outbox, connect: Connect) -> int:
    with connect() as connection:
        return outbox.on(connection).enqueue("greet", 1, coalesce_key="k", delay=60, max_delay=timedelta(seconds=90)).id


@pytest.mark.slow
async def test_each_newer_message_restarts_the_delay_up_to_the_limit(
    dsn: str, connect: Connect, db: psycopg.Connection
) -> None:
    line = Line(dsn)
    first = debounced(line.outbox, connect)
    assert 50 < due_in(db, first) <= 60
    # As if the first had been enqueued 40 seconds ago: 50 of the 90 are left.
    db.execute("UPDATE pgoutbox.key_head SET waiting_since = waiting_since - interval '40 s'")
    second = debounced(line.outbox, connect)
    assert 40 < due_in(db, second) <= 50
    db.execute("UPDATE pgoutbox.key_head SET waiting_since = waiting_since - interval '60 s'")
    third = debounced(line.outbox, connect)
    assert due_in(db, third) <= 0
    await drained(line.outbox)
    assert line.seen[None] == [third]
    # A message after a delivery begins its own limit.
    fourth = debounced(line.outbox, connect)
    assert 50 < due_in(db, fourth) <= 60


def test_a_debounce_limit_without_a_key_is_refused(dsn: str, connect: Connect) -> None:
    with connect() as connection, pytest.raises(ArgumentError, match="max_delay: only together with coalesce_key"):
        Line(dsn).outbox.on(connection).enqueue("greet", 1, delay=60, max_delay=90)


# --- fan-out ----------------------------------------------------------------------------------------------------------


async def test_a_fan_out_stores_its_content_once_and_delivers_it_to_each(
    dsn: str, connect: Connect, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn))
    content = {"html": "x" * 10_000}
    destinations = [f"mailto:{number}@example.org" for number in range(50)]
    got: dict[str | None, object] = {}
    keys: set[str] = set()

    @outbox.handler("newsletter", retry=RetryPolicy.steps(0, jitter=0))
    async def newsletter(message: Message, ctx: Context) -> None:
        if message.destination == destinations[7] and message.attempt_count == 1:
            raise Transient("planned")
        got[message.destination] = message.content
        keys.add(message.idempotency_key)

    with connect() as connection:
        enqueued = outbox.on(connection).enqueue_fanout("newsletter", {"issue": 12}, destinations, content=content)
    rows = rows_of(db, *(message.id for message in enqueued))
    assert db.execute("SELECT count(*), min(octet_length(body::text)) FROM pgoutbox.content").fetchone() == (1, 10_012)
    await drained(outbox)
    assert got == dict.fromkeys(destinations, content)
    assert len(keys) == len(rows) == 50
    assert attempts_of(db, enqueued[7].id) == [(1, "retry", "planned")]


@pytest.mark.slow
async def test_more_contents_than_a_worker_caches_are_delivered(
    dsn: str, connect: Connect, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn, batch_size=30))
    got: dict[int, object] = {}

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        got[message.id] = message.content

    expected: dict[int, object] = {}
    with connect() as connection:
        for number in range(40):
            for message in outbox.on(connection).enqueue_fanout("greet", 1, ["a:1", "a:2", "a:3"], content=number):
                expected[message.id] = number
    # Each claim has the first destination of some fan-outs, and the second of others.
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() - make_interval(secs => id * 7 % 11)")
    await drained(outbox)
    assert got == expected


def fail_to_read_contents_once(monkeypatch: pytest.MonkeyPatch, error: psycopg.Error) -> None:
    """Let the next read of contents end by this error."""
    fetch = WorkerConnection.fetch
    trials = 0

    async def fail_once(self: WorkerConnection, statement: Any, parameters: Any) -> Any:  # noqa: ANN401 - passed on
        nonlocal trials
        trials += statement is sql.CONTENTS
        if statement is sql.CONTENTS and trials == 1:
            raise error
        return await fetch(self, statement, parameters)

    monkeypatch.setattr(WorkerConnection, "fetch", fail_once)


@pytest.mark.parametrize("error", [psycopg.OperationalError("gone"), psycopg.errors.LockNotAvailable()])
async def test_a_temporarily_unreadable_content_uses_up_no_attempt(
    dsn: str, connect: Connect, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, error: psycopg.Error
) -> None:
    line = Line(dsn)
    with connect() as connection:
        (message,) = line.outbox.on(connection).enqueue_fanout("greet", 1, ["a:1"], content="shared")
    fail_to_read_contents_once(monkeypatch, error)
    await drained(line.outbox)
    (row,) = rows_of(db, message.id)
    assert (row.state, row.max_attempts - row.attempt_count) == ("sent", 10)


async def test_an_unreadable_content_does_not_release_messages_whose_content_is_cached(
    dsn: str, connect: Connect, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(dsn)
    with connect() as connection:
        first, cached = line.outbox.on(connection).enqueue_fanout("greet", 1, ["a:1", "a:2"], content="cached")
        Outbox().on(connection).reschedule(cached.id, delay=timedelta(hours=1))
    worker = Worker(line.outbox)
    async with running(worker):
        await until(lambda: state_of(db, first.id) == "sent")
        await until_idle(worker)
        fail_to_read_contents_once(monkeypatch, psycopg.OperationalError("gone"))
        with connect() as connection:  # One claim takes both.
            (unread,) = line.outbox.on(connection).enqueue_fanout("greet", 2, ["a:3"], content="unread")
            make_due(connection, cached.id)
        await until(lambda: {state_of(db, one.id) for one in (cached, unread)} == {"sent"})
    assert [row.attempt_count for row in rows_of(db, cached.id, unread.id)] == [1, 2]


async def test_the_content_is_deleted_with_the_last_of_its_messages(
    dsn: str, connect: Connect, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn))
    with connect() as connection:
        first, second = outbox.on(connection).enqueue_fanout("greet", 1, ["a:1", "a:2"], content="shared")

    def prune_after_a_day() -> int | None:
        db.execute("UPDATE pgoutbox.message SET finished_at = now() - interval '2 days' WHERE finished_at IS NOT NULL")
        Operator(db).prune(timedelta(days=1))
        row = db.execute("SELECT count(*) FROM pgoutbox.content").fetchone()
        return None if row is None else int(row[0])

    with connect() as connection:
        outbox.on(connection).cancel(first.id)
    assert prune_after_a_day() == 1
    with connect() as connection:
        outbox.on(connection).cancel(second.id)
    assert prune_after_a_day() == 0


@pytest.mark.slow
async def test_a_message_with_a_deleted_content_fails_with_the_reason(
    dsn: str, connect: Connect, db: psycopg.Connection
) -> None:
    line = Line(dsn)
    with connect() as connection:
        (message,) = line.outbox.on(connection).enqueue_fanout("greet", 1, ["a:1"], content="shared")
    db.execute("DELETE FROM pgoutbox.content")
    await drained(line.outbox)
    (row,) = rows_of(db, message.id)
    assert row.state == "failed"
    assert "content" in (row.last_error or "")


def test_an_error_in_a_fan_out_names_the_destination_and_stores_nothing(dsn: str, connect: Connect) -> None:
    outbox = Outbox(settings_for(dsn))
    with connect() as connection:
        with pytest.raises(ArgumentError, match=r"destinations\[1\]"):
            outbox.on(connection).enqueue_fanout("greet", 1, ["a:1", "not a URI"], content="shared")
        assert outbox.on(connection).enqueue_fanout("greet", 1, [], content="shared") == []
        with pytest.raises(ArgumentError, match="have no keys"):
            outbox.on(connection).enqueue_fanout(outbox.define(Topic("keyed", dedupe_key=str)), 1, ["a:1"])
        assert connection.execute("SELECT count(*) FROM pgoutbox.content").fetchone() == (0,)


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_worker_sleeps_exactly_until_the_next_token(dsn: str, db: psycopg.Connection) -> None:
    ids = [enqueue(db) for _ in range(12)]
    Operator(db).limit_rate("default", Rate(100, 1), burst=1)
    line = Line(dsn)
    async with running(WatchedWorker(line.outbox)):
        await until(lambda: {row.state for row in rows_of(db, *ids)} == {"sent"})


async def test_a_resumed_queue_is_claimed_immediately(dsn: str, db: psycopg.Connection) -> None:
    Operator(db).pause("default")
    message_id = enqueue(db)
    line = Line(dsn)
    worker = WatchedWorker(line.outbox)
    async with running(worker):
        await worker.asleep.wait()
        assert state_of(db, message_id) == "pending"
        Operator(db).resume("default")
        await until(lambda: state_of(db, message_id) == "sent")


async def test_a_notification_does_not_open_a_paused_queue(dsn: str, db: psycopg.Connection) -> None:
    """The worker sleeps and listens when the queue is paused, and the next enqueue rings."""
    worker = WatchedWorker(Line(dsn).outbox)
    async with running(worker):
        await worker.asleep.wait()
        Operator(db).pause("default")
        worker.asleep.clear()
        message_id = enqueue(db)
        await worker.asleep.wait()
        assert state_of(db, message_id) == "pending"


async def test_a_drain_ignores_due_messages_in_a_paused_queue(dsn: str, db: psycopg.Connection) -> None:
    message_id = enqueue(db)
    Operator(db).pause("default")
    await drained(Line(dsn).outbox)
    assert state_of(db, message_id) == "pending"


@pytest.mark.slow
async def test_a_pause_that_ends_by_itself_wakes_the_worker(dsn: str, db: psycopg.Connection) -> None:
    Operator(db).pause("default", duration=timedelta(milliseconds=300))
    message_id = enqueue(db)
    async with running(WatchedWorker(Line(dsn).outbox)):
        await until(lambda: state_of(db, message_id) == "sent")
