"""Tests of promises that meet: a cancel and a transaction, a limit and a cancel, a lease and a business row."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Context, Message, Outbox, SyncContext
from pgoutbox.message import State
from pgoutbox.operations import Operator
from pgoutbox.worker import Worker
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    cancel,
    enqueue,
    lapse,
    running,
    settings_for,
    state_of,
)
from tests.support.waiting import until
from tests.support.worker_sql import claim, ids_in_flight

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event as ProcessEvent

    from tests.conftest import Connect

SPAWN = multiprocessing.get_context("spawn")
STOCK = "CREATE TABLE stock (id integer PRIMARY KEY, count integer); INSERT INTO stock VALUES (7, 0)"
TAKE_ONE = "UPDATE stock SET count = count + 1 WHERE id = 7"


def tomorrow() -> datetime:
    return datetime.now(UTC) + timedelta(days=1)


def taken(db: psycopg.Connection) -> int:
    ((count,),) = db.execute("SELECT count FROM stock WHERE id = 7").fetchall()
    return int(count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_cancel_and_a_transactional_handler_that_need_one_row_both_end(
    outbox: Outbox, connect: Connect, kind: str
) -> None:
    """The business transaction cancels first and then waits for the handler's row lock."""
    db, business = connect(autocommit=True), connect()
    db.execute(STOCK)
    waiting: list[asyncio.Task[object]] = []
    has_row, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def cancel_and_take() -> None:
        assert cancel(business, message_id) == "requested"
        business.execute(TAKE_ONE)
        business.commit()

    if kind == "async":

        @outbox.handler("greet", transactional=True)
        async def greet(message: Message, ctx: Context) -> None:
            await ctx.connection.execute(TAKE_ONE)
            has_row.set()
            await go_on.wait()

    else:

        @outbox.handler("greet", transactional=True)
        def greet_in_thread(message: Message, ctx: SyncContext) -> None:
            ctx.connection.execute(TAKE_ONE)
            loop.call_soon_threadsafe(has_row.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

    message_id = enqueue(db)
    async with asyncio.timeout(PATIENCE_SECONDS), running(Worker(outbox)):
        await has_row.wait()
        waiting.append(asyncio.create_task(asyncio.to_thread(cancel_and_take)))
        blocked = "SELECT cardinality(pg_blocking_pids(%s)) > 0"
        await until(lambda: db.execute(blocked, [business.info.backend_pid]).fetchone() == (True,))
        go_on.set()
        await waiting[0]
        await until(lambda: state_of(db, message_id) == State.SENT)
    assert taken(db) == 2


def test_a_transaction_that_cancels_messages_in_flight_frees_no_permit(connect: Connect) -> None:
    db, business = connect(autocommit=True), connect()
    db.execute("INSERT INTO pgoutbox.queue (name, max_in_flight) VALUES ('default', 2)")
    ids = [enqueue(db, owner="ada") for _ in range(4)]
    assert ids_in_flight(claim(db)) == ids[:2]
    business.execute("SELECT pgoutbox.cancel_all('ada')")
    assert claim(db, worker="second") == []
    business.rollback()
    assert claim(db, worker="second") == []


@pytest.mark.slow
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_transactional_handler_of_any_isolation_level_outlasts_renewals(
    dsn: str, db: psycopg.Connection, level: str
) -> None:
    outbox = Outbox(settings_for(dsn, lease_seconds=1))
    db.execute(STOCK)

    @outbox.handler("greet", transactional=True)
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        await ctx.connection.execute(TAKE_ONE)
        ((first,),) = db.execute("SELECT lease_expires_at FROM pgoutbox.claim").fetchall()
        renewed = "SELECT lease_expires_at > %s FROM pgoutbox.claim"
        await until(lambda: db.execute(renewed, [first]).fetchone() == (True,))

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert (state_of(db, message_id), attempts_of(db, message_id), taken(db)) == ("sent", [], 1)


def take_and_hang(dsn: str, in_handler: ProcessEvent, go_on: ProcessEvent) -> None:
    """Start a worker process whose transactional handler stops after its write."""
    outbox = Outbox(settings_for(dsn, worker_name="stale"))

    @outbox.handler("greet", transactional=True)
    def greet(message: Message, ctx: SyncContext) -> None:
        ctx.connection.execute(TAKE_ONE)
        in_handler.set()
        go_on.wait(PATIENCE_SECONDS)

    asyncio.run(Worker(outbox).run_once())


@pytest.mark.slow
async def test_the_next_attempt_ends_the_open_transaction_of_a_suspended_worker(
    outbox: Outbox, dsn: str, db: psycopg.Connection
) -> None:
    db.execute(STOCK)
    message_id = enqueue(db)
    in_handler, go_on = SPAWN.Event(), SPAWN.Event()
    stale = SPAWN.Process(target=take_and_hang, args=(dsn, in_handler, go_on), daemon=True)
    stale.start()
    try:
        assert await asyncio.to_thread(in_handler.wait, PATIENCE_SECONDS)
        os.kill(stale.pid or 0, signal.SIGSTOP)
        lapse(db, message_id)

        @outbox.handler("greet", transactional=True)
        async def greet(message: Message, ctx: Context) -> None:
            await ctx.connection.execute(TAKE_ONE)

        async with asyncio.timeout(PATIENCE_SECONDS):
            await Worker(outbox).run_once()
        assert (state_of(db, message_id), taken(db)) == ("sent", 1)
    finally:
        os.kill(stale.pid or 0, signal.SIGCONT)
        go_on.set()
        await asyncio.to_thread(stale.join, PATIENCE_SECONDS)
    assert (state_of(db, message_id), taken(db)) == ("sent", 1)


def test_a_large_cancel_needs_few_subtransactions(connect: Connect) -> None:
    """PostgreSQL keeps 64 of a session in shared memory; beyond that every snapshot of all sessions costs more."""
    db, business = connect(autocommit=True), connect()
    with db.transaction():
        for _ in range(200):
            enqueue(db, owner="ada")
    assert len(claim(db, total=100)) == 100
    business.execute("SELECT pgoutbox.cancel_all('ada')")
    # Each row names the subtransaction that wrote or locked it.
    ((count,),) = business.execute(
        """
        SELECT count(DISTINCT w.xid)
        FROM (
            SELECT unnest(ARRAY[m.xmin, m.xmax])::text FROM pgoutbox.message AS m
            UNION ALL
            SELECT c.xmin::text FROM pgoutbox.cancel_request AS c
        ) AS w(xid)
        """
    ).fetchall()
    assert count <= 10


async def test_a_transactional_handler_waits_for_its_row_where_sent_messages_are_deleted(
    outbox: Outbox, connect: Connect
) -> None:
    db, holder = connect(autocommit=True), connect()
    db.execute(STOCK)
    Operator(db).set_retention("*", "sent", timedelta())
    has_row, locked = asyncio.Event(), asyncio.Event()

    @outbox.handler("greet", transactional=True)
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute(TAKE_ONE)
        has_row.set()
        await locked.wait()

    message_id = enqueue(db)
    async with asyncio.timeout(PATIENCE_SECONDS), running(Worker(outbox)):
        await has_row.wait()
        holder.execute("SELECT FROM pgoutbox.message_live WHERE id = %s FOR UPDATE", [message_id])
        locked.set()
        blocks = "SELECT count(*) > 0 FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
        await until(lambda: db.execute(blocks, [holder.info.backend_pid]).fetchone() == (True,))
        holder.rollback()
        await until(lambda: db.execute("SELECT FROM pgoutbox.message").fetchall() == [])
    assert taken(db) == 1


def test_a_repeated_message_whose_successor_was_cancelled_is_not_a_duplicate(connect: Connect) -> None:
    db = connect(autocommit=True)
    older = enqueue(db, coalesce_key="k", dedupe_key="d7", available_at=tomorrow())
    newer = enqueue(db, coalesce_key="k", dedupe_key="d8", available_at=tomorrow())
    assert enqueue(db, coalesce_key="k", dedupe_key="d7") == older  # The newer one stands for it.
    assert cancel(db, newer) == "cancelled"
    again = enqueue(db, coalesce_key="k", dedupe_key="d7")
    assert again > newer
    assert ids_in_flight(claim(db)) == [again]
