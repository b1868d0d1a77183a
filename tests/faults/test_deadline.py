"""A statement that is not answered in time ends its connection, and nothing more is asked of the server behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox.link import Link, deadline
from tests.outbox_actions import PATIENCE_SECONDS, settings_for

if TYPE_CHECKING:
    from tests.faults.proxy import Proxy


async def test_a_deadline_ends_a_connection_that_does_not_answer_without_asking_the_server_to_cancel(
    proxy: Proxy,
) -> None:
    async with await psycopg.AsyncConnection.connect(proxy.dsn, autocommit=True) as connection:
        with proxy.stalled():
            with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
                async with deadline(connection, 0.2):
                    await connection.execute("SELECT 1")
            assert connection.closed
            assert proxy.cancel_request_count == 0


async def test_a_deadline_that_is_kept_leaves_the_connection_and_the_servers_own_errors_alone(proxy: Proxy) -> None:
    async with await psycopg.AsyncConnection.connect(proxy.dsn, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            async with deadline(connection, PATIENCE_SECONDS):
                await connection.execute("SELECT 1 / 0")
        async with deadline(connection, 0.05):
            """It is left in time, and what comes after it has all the time in the world."""
        await connection.execute("SELECT pg_sleep(0.1)")
        assert not connection.closed


async def test_a_link_whose_statement_is_not_answered_opens_another_connection(proxy: Proxy) -> None:
    settings = settings_for(proxy.dsn, statement_timeout_seconds=1, connect_timeout_seconds=2)
    link = Link(proxy.dsn, settings, purpose="test")
    try:
        assert await link.fetch("SELECT 1", {}) == [(1,)]
        with proxy.stalled("pgoutbox test", open_connections_only=True):
            with pytest.raises(TimeoutError):
                await link.fetch("SELECT 2", {})
            assert await link.fetch("SELECT 3", {}) == [(3,)]
    finally:
        await link.close()
    assert proxy.cancel_request_count == 0
