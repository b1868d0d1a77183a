"""Tests the rule `pending` through the Python API and workers, and which transactions wait for each other."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgoutbox import NewMessage, Outbox, PayloadError, Topic
from pgoutbox.errors import ConfigurationError
from pgoutbox.message import State, Transient
from pgoutbox.retry import RetryPolicy
from tests.support import races
from tests.support.outbox_actions import WatchedWorker, rows_of, running, settings_for, state_of
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pgoutbox.handlers import Context
    from pgoutbox.message import Message
    from pgoutbox.topics import CoalesceRule
    from tests.conftest import Connect


@pytest.fixture
def outbox(dsn: str) -> Outbox:
    return Outbox(settings_for(dsn))


def look_again(outbox: Outbox, connection: psycopg.Connection) -> int:
    with connection.transaction():
        return outbox.enqueue(connection, "greet", None, coalesce_key="k", coalesce_rule="pending").id


# --- arguments --------------------------------------------------------------------------------------------------------


def test_every_way_to_enqueue_takes_the_rule(outbox: Outbox, connect: Connect) -> None:
    topic = outbox.define(Topic("search.refresh", coalesce_key=str, coalesce_rule="pending"))
    with connect() as connection:
        outbox.enqueue(connection, "greet", 1, coalesce_key="k", coalesce_rule="pending")
        outbox.enqueue_many(
            connection,
            [
                NewMessage("greet", 2, coalesce_key="k", coalesce_rule="pending"),
                NewMessage("greet", 3, coalesce_key="k", coalesce_rule="newest"),
                NewMessage(topic, 4),
                NewMessage("greet", 5),
            ],
        )
        outbox.enqueue(connection, topic, 6)
        rows = connection.execute("SELECT payload, coalesces_pending FROM pgoutbox.message ORDER BY payload").fetchall()
    assert rows == [(1, True), (2, True), (3, None), (4, True), (5, None), (6, True)]


async def test_an_async_connection_takes_the_rule(outbox: Outbox, dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await outbox.aenqueue(connection, "greet", None, coalesce_key="k", coalesce_rule="pending")
        await outbox.aenqueue_many(connection, [NewMessage("greet", None, coalesce_key="k", coalesce_rule="pending")])
        rows = await (await connection.execute("SELECT coalesces_pending FROM pgoutbox.message")).fetchall()
    assert rows == [(True,), (True,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coalesce_rule": "pending"}, "coalesce_rule: only together with coalesce_key"),
        ({"coalesce_rule": "newest"}, "coalesce_rule: only together with coalesce_key"),
        ({"coalesce_key": "k", "coalesce_rule": "last"}, "coalesce_rule: must be newest or pending, not .last."),
        (
            {"coalesce_key": "k", "coalesce_rule": "pending", "max_delay": 1},
            "max_delay: not together",
        ),
    ],
)
def test_a_mistake_is_refused_before_any_statement(
    outbox: Outbox, connect: Connect, options: dict[str, Any], message: str
) -> None:
    with connect() as connection:
        with pytest.raises(PayloadError, match=message):
            outbox.enqueue(connection, "greet", None, **options)
        with pytest.raises(PayloadError, match=message):
            outbox.enqueue_many(connection, [NewMessage("greet", None, **options)])
        assert connection.execute("SELECT count(*) FROM pgoutbox.message").fetchone() == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coalesce_rule": "last"}, "coalesce_rule: must be newest or pending"),
        ({"coalesce_key": str, "coalesce_rule": "pending", "max_delay": 1}, "max_delay: not together"),
    ],
)
def test_a_topic_with_a_mistake_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Topic("greet", **options)


def test_a_call_for_a_topic_with_the_rule_must_not_pass_the_rule(outbox: Outbox, connect: Connect) -> None:
    topic = outbox.define(Topic("search.refresh", coalesce_key=str, coalesce_rule="pending"))
    with connect() as connection, pytest.raises(PayloadError, match="coalesce_rule: belongs to the definition"):
        outbox.enqueue(connection, topic, 1, coalesce_rule="newest")


# --- locks ------------------------------------------------------------------------------------------------------------


def one_by_one(
    outbox: Outbox, connection: psycopg.Connection, keys: Sequence[str], rule: CoalesceRule = "newest"
) -> None:
    for key in keys:
        outbox.enqueue(connection, "greet", None, coalesce_key=key, coalesce_rule=rule)


def in_different_order(connect: Connect, enqueue: Callable[[psycopg.Connection, str], object]) -> None:
    """Enqueue for two keys in two transactions, each in its own order, and raise the error that ends one of them."""
    first, second, observer = connect(), connect(), connect(autocommit=True)
    for connection in (first, second):
        connection.execute("SET LOCAL lock_timeout = 0; SET LOCAL deadlock_timeout = '10ms'")
    enqueue(first, "a")
    enqueue(second, "b")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(enqueue, first, "b")
        races.until_blocked(observer, first, waiting)
        try:
            enqueue(second, "a")
            waiting.result()
        finally:
            second.rollback()


def test_separate_calls_in_different_order_deadlock_by_the_rule_newest(outbox: Outbox, connect: Connect) -> None:
    with pytest.raises(psycopg.errors.DeadlockDetected):
        in_different_order(connect, lambda connection, key: one_by_one(outbox, connection, [key]))


def test_one_enqueue_many_takes_the_keys_in_one_order(outbox: Outbox, connect: Connect) -> None:
    """The second bulk waits for the first at their first common key, without a cycle."""
    first, second, observer = connect(), connect(), connect(autocommit=True)

    def bulk(connection: psycopg.Connection, keys: Sequence[str]) -> None:
        outbox.enqueue_many(connection, [NewMessage("greet", None, coalesce_key=key) for key in keys])

    bulk(first, ["a", "b"])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(bulk, second, ["b", "a"])
        races.until_blocked(observer, second, waiting)
        bulk(first, ["b", "a"])
        first.commit()
        waiting.result()
    second.commit()


def test_separate_calls_in_one_order_wait_and_do_not_deadlock(outbox: Outbox, connect: Connect) -> None:
    first, second, observer = connect(), connect(), connect(autocommit=True)
    one_by_one(outbox, first, ["a"])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(one_by_one, outbox, second, ["a", "b"])
        races.until_blocked(observer, second, waiting)
        one_by_one(outbox, first, ["b"])
        first.commit()
        waiting.result()
    second.commit()


def test_calls_in_any_order_do_not_wait_by_the_rule_pending(outbox: Outbox, connect: Connect) -> None:
    """Everything runs on one thread, so a call that waited would fail at the lock timeout."""
    first, second = connect(), connect()
    one_by_one(outbox, first, ["a"], "pending")
    one_by_one(outbox, second, ["b"], "pending")
    one_by_one(outbox, first, ["b"], "pending")
    one_by_one(outbox, second, ["a"], "pending")
    second.commit()
    first.commit()


def test_dedupe_keys_in_different_order_deadlock_by_any_rule(outbox: Outbox, connect: Connect) -> None:
    def welcome(connection: psycopg.Connection, key: str) -> None:
        outbox.enqueue(connection, "greet", None, coalesce_key="k", coalesce_rule="pending", dedupe_key=key)

    with pytest.raises(psycopg.errors.DeadlockDetected):
        in_different_order(connect, welcome)


# --- workers ----------------------------------------------------------------------------------------------------------


async def test_messages_enqueued_during_an_attempt_are_delivered_once_after_it(
    outbox: Outbox, connect: Connect
) -> None:
    db = connect(autocommit=True)
    began, let_go = asyncio.Event(), asyncio.Event()
    handed_over = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        handed_over.append(message.id)
        began.set()
        await let_go.wait()
        assert not ctx.should_stop
        await ctx.ensure_lease()

    async with running(WatchedWorker(outbox)):
        first = look_again(outbox, db)
        await began.wait()
        older, newest = look_again(outbox, db), look_again(outbox, db)
        await until(lambda: state_of(db, older) == State.SKIPPED)
        let_go.set()
        await until(lambda: state_of(db, newest) == State.SENT)
    assert handed_over == [first, newest]


async def test_an_older_id_committed_during_an_attempt_is_delivered_afterwards(
    outbox: Outbox, connect: Connect
) -> None:
    db, late = connect(autocommit=True), connect()
    began, let_go = asyncio.Event(), asyncio.Event()
    handed_over = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        handed_over.append(message.id)
        began.set()
        await let_go.wait()

    older = outbox.enqueue(late, "greet", None, coalesce_key="k", coalesce_rule="pending").id
    worker = WatchedWorker(outbox)
    async with running(worker):
        newer = look_again(outbox, db)
        await began.wait()
        late.commit()
        await worker.falls_asleep()
        let_go.set()
        await until(lambda: state_of(db, older) == State.SENT)
    assert handed_over == [newer, older]


async def test_a_failed_attempt_is_not_repeated_beside_a_newer_message(outbox: Outbox, connect: Connect) -> None:
    db = connect(autocommit=True)
    newer: list[int] = []

    @outbox.handler("greet", retry=RetryPolicy(base=3600))
    async def greet(message: Message, ctx: Context) -> None:
        if not newer:
            newer.append(look_again(outbox, db))
            raise Transient("busy")

    older = look_again(outbox, db)
    async with running(WatchedWorker(outbox)):
        await until(lambda: newer and state_of(db, newer[0]) == State.SENT)
    (row,) = rows_of(db, older)
    assert (row.state, row.superseded_by) == (State.SKIPPED, newer[0])


async def test_workers_and_producers_of_one_key_leave_no_commit_without_a_delivery(dsn: str, connect: Connect) -> None:
    """Each handler counts the committed rows. At the end, one of them has counted all rows."""
    db = connect(autocommit=True)
    db.execute("CREATE TABLE total (number integer)")
    read = [0]

    def worker_of(number: int) -> WatchedWorker:
        outbox = Outbox(settings_for(dsn, batch_size=3))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            async with await psycopg.AsyncConnection.connect(dsn) as connection:
                cursor = await connection.execute("SELECT count(*) FROM total")
                read.extend(row[0] for row in await cursor.fetchall())

        return WatchedWorker(outbox)

    def produce(outbox: Outbox) -> None:
        with psycopg.connect(dsn) as connection:
            for _ in range(40):
                with connection.transaction():
                    outbox.enqueue(connection, "greet", None, coalesce_key="k", coalesce_rule="pending")
                    connection.execute("INSERT INTO total VALUES (1)")

    async with running(worker_of(1)), running(worker_of(2)):
        await asyncio.gather(*(asyncio.to_thread(produce, Outbox(settings_for(dsn))) for _ in range(3)))
        await until(lambda: db.execute("SELECT FROM pgoutbox.message_live").fetchone() is None)
    assert max(read) == 120
    rows = db.execute("SELECT state FROM pgoutbox.message").fetchall()
    assert len(rows) == 120
    assert set(rows) == {("sent",), ("skipped",)}
