"""Tests that an unanswered statement ends its connection at its deadline, without further requests to that server
session."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.rows import TupleRow

from pgoutbox import Message, Outbox, RetryPolicy
from pgoutbox.database import connections, operator_connection
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.message import State
from pgoutbox.worker import Worker
from pgoutbox.worker.transactional.handler_session import HandlerSession
from tests.support.outbox_actions import PATIENCE_SECONDS, enqueue, row_of, running, settings_for
from tests.support.proxy import Proxy, proxy_to
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


async def _connect(proxy: Proxy, answer_seconds: float) -> connections.AsyncConnection[TupleRow]:
    return await connections.connect_async(
        proxy.dsn, purpose="test", connect_timeout_seconds=10, answer_seconds=answer_seconds
    )


async def test_a_deadline_ends_an_unresponsive_connection_without_a_cancel_request(proxy: Proxy) -> None:
    async with await _connect(proxy, 0.2) as connection:
        with proxy.stalled():
            with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
                await connection.execute("SELECT 1")
            assert connection.closed
            assert proxy.cancel_request_count == 0


async def test_a_deadline_met_keeps_the_connection_and_passes_server_errors_on(proxy: Proxy) -> None:
    async with await _connect(proxy, PATIENCE_SECONDS) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await connection.execute("SELECT 1 / 0")
        assert not connection.closed


async def test_the_deadline_of_a_connection_restarts_with_each_answer(proxy: Proxy) -> None:
    async with await _connect(proxy, 0.4) as connection:
        for _ in range(3):
            await connection.execute("SELECT pg_sleep(0.2)")


async def test_an_unanswered_statement_makes_the_link_open_another_connection(proxy: Proxy) -> None:
    settings = settings_for(proxy.dsn, statement_timeout_seconds=1, connect_timeout_seconds=2)
    link = WorkerConnection(proxy.dsn, settings, purpose="test")
    try:
        assert await link.fetch("SELECT 1", {}) == [(1,)]
        with proxy.stalled("pgoutbox test", open_connections_only=True):
            with pytest.raises(TimeoutError):
                await link.fetch("SELECT 2", {})
            assert await link.fetch("SELECT 3", {}) == [(3,)]
    finally:
        await link.close()
    assert proxy.cancel_request_count == 0


async def test_the_limits_of_a_connect_and_of_a_begin_do_not_hold_for_later_statements(dsn: str) -> None:
    settings = settings_for(dsn, connect_timeout_seconds=1)
    link = WorkerConnection(dsn, settings, purpose="test")
    session = await HandlerSession.open(settings)
    try:
        await session.begin("slow", seconds=1)
        await asyncio.gather(link.fetch("SELECT pg_sleep(1.3)", {}), session.fetch([("SELECT pg_sleep(1.3)", {})]))
    finally:
        session.close()
        await link.close()


@pytest.mark.parametrize("is_async", [True, False], ids=["on the event loop", "in a thread"])
@pytest.mark.parametrize("stage", ["in the handler", "at its completion"])
async def test_a_dead_network_costs_a_transactional_handler_one_attempt_and_no_slot(
    dsn: str, db: psycopg.Connection, tmp_path: Path, is_async: bool, stage: str
) -> None:
    with proxy_to(dsn, tmp_path) as proxy, ExitStack() as network:
        outbox = Outbox(settings_for(proxy.dsn, concurrency=1, statement_timeout_seconds=1, connect_timeout_seconds=1))
        attempts: list[int] = []
        limit = 1.0 if stage == "in the handler" else None
        at_once = RetryPolicy(base=0.01, cap=0.01)

        def dies(message: Message) -> bool:
            attempts.append(message.attempt_count)
            if message.attempt_count == 1:
                network.enter_context(proxy.stalled("pgoutbox handler", open_connections_only=True))
            return message.attempt_count == 1 and stage == "in the handler"

        if is_async:

            @outbox.handler("greet", transactional=True, retry=at_once, timeout=limit)
            async def greet(message: Message, ctx: Context) -> None:
                await ctx.connection.execute("SELECT 1")
                if dies(message):
                    await ctx.connection.execute("SELECT 2")
        else:

            @outbox.handler("greet", transactional=True, retry=at_once, timeout=limit)
            def greet_in_thread(message: Message, ctx: SyncContext) -> None:
                ctx.connection.execute("SELECT 1")
                if dies(message):
                    ctx.connection.execute("SELECT 2")

        message_id = enqueue(db)
        async with running(Worker(outbox)):
            await until(lambda: row_of(db, message_id).is_finished)
    assert attempts == [1, 2]
    assert row_of(db, message_id).state == State.SENT


def test_a_sync_connection_without_answers_breaks_without_a_cancel_request(proxy: Proxy) -> None:
    with connections.connect(proxy.dsn, purpose="cli", answer_seconds=0.2) as connection:
        with proxy.stalled(), pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
            connection.execute("SELECT 1")
        assert connection.closed
        assert proxy.cancel_request_count == 0


def test_the_deadline_of_a_sync_connection_restarts_with_each_answer(proxy: Proxy) -> None:
    with connections.connect(proxy.dsn, purpose="cli", answer_seconds=0.4) as connection:
        for _ in range(3):
            connection.execute("SELECT pg_sleep(0.2)")


def test_an_operator_command_gives_up_on_a_dead_network(proxy: Proxy) -> None:
    with (
        operator_connection.connect(settings_for(proxy.dsn)) as connection,
        operator_connection.limiting(-4.5),
        pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"),
        connection.transaction(),
        proxy.stalled(),
    ):
        operator_connection.prepare(connection)
