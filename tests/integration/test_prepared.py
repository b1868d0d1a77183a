"""The prepared statements of a worker's sessions, on a real connection."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import psycopg
import pytest

from pgoutbox.connections import break_socket
from pgoutbox.prepared import PreparedStatements
from tests.conftest import AsyncConnect, Connect
from tests.waiting import until

_SLEEPS = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(600)' AND state = 'active'"
_PREPARED = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE %s"


@pytest.fixture
async def session(aconnect: AsyncConnect) -> psycopg.AsyncConnection:
    """A direct connection in autocommit."""
    connection = await aconnect()
    await connection.set_autocommit(True)
    return connection


async def _prepared_count(session: psycopg.AsyncConnection, pattern: str) -> int:
    cursor = await session.execute(_PREPARED, [pattern], prepare=False)
    ((count,),) = await cursor.fetchall()
    return int(count)


async def test_a_statement_is_prepared_once_and_returns_its_rows_as_the_driver_does(
    session: psycopg.AsyncConnection,
) -> None:
    statements = PreparedStatements(session)
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    for text in ("a", "b%", "é"):
        rows = await statements.fetch(
            "SELECT %(text)s::text, %(number)s::bigint, %(moment)s::timestamptz, %(names)s::text[], NULL::text, '%%'",
            {"text": text, "number": 2**40, "moment": moment, "names": ["x", "y"], "unused": 1},
        )
        assert rows == [(text, 2**40, moment, ["x", "y"], None, "%")]
    assert await _prepared_count(session, "SELECT $1::text, $2::bigint%") == 1


async def test_a_statement_without_rows_returns_none(session: psycopg.AsyncConnection) -> None:
    statements = PreparedStatements(session)
    assert await statements.fetch("SELECT 1 WHERE false", {}) == []
    assert await statements.fetch("CREATE TEMPORARY TABLE t (n integer)", {}) == []


async def test_values_and_rows_may_be_larger_than_the_buffers_of_the_network(session: psycopg.AsyncConnection) -> None:
    statements = PreparedStatements(session)
    text = "x" * 20_000_000
    ((answer,),) = await statements.fetch("SELECT %(text)s::text", {"text": text})
    assert answer == text


async def test_an_error_of_the_server_is_the_drivers_and_leaves_the_session_usable(
    session: psycopg.AsyncConnection,
) -> None:
    statements = PreparedStatements(session)
    for _ in range(2):
        with pytest.raises(psycopg.errors.DivisionByZero) as failure:
            await statements.fetch("SELECT 1 / %(number)s::integer", {"number": 0})
        assert failure.value.sqlstate == "22012"
    with pytest.raises(psycopg.errors.UndefinedTable):
        await statements.fetch("SELECT FROM nothing", {})
    assert await statements.fetch("SELECT 1", {}) == [(1,)]


async def test_a_statement_whose_table_has_changed_is_prepared_again(session: psycopg.AsyncConnection) -> None:
    statements = PreparedStatements(session)
    await session.execute("CREATE TEMPORARY TABLE t AS SELECT 1 AS n")
    assert await statements.fetch("SELECT n FROM t", {}) == [(1,)]
    await session.execute("ALTER TABLE t ALTER n TYPE text")
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        await statements.fetch("SELECT n FROM t", {})
    assert await statements.fetch("SELECT n FROM t", {}) == [("1",)]


async def test_a_statement_that_was_deallocated_is_prepared_again(session: psycopg.AsyncConnection) -> None:
    statements = PreparedStatements(session)
    assert await statements.fetch("SELECT 1", {}) == [(1,)]
    await session.execute("DEALLOCATE ALL")
    with pytest.raises(psycopg.errors.InvalidSqlStatementName):
        await statements.fetch("SELECT 1", {})
    assert await statements.fetch("SELECT 1", {}) == [(1,)]


async def test_a_cancelled_call_ends_its_statement_on_the_server(
    session: psycopg.AsyncConnection, connect: Connect
) -> None:
    observer = connect()

    def sleeping_count() -> int:
        with observer.transaction():
            ((count,),) = observer.execute(_SLEEPS).fetchall()
        return int(count)

    statements = PreparedStatements(session)
    call = asyncio.create_task(statements.fetch("SELECT pg_sleep(600)", {}))
    await until(lambda: sleeping_count() == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert sleeping_count() == 0
    assert await statements.fetch("SELECT 2", {}) == [(2,)]


async def test_a_session_that_is_ended_by_the_server_says_why(
    session: psycopg.AsyncConnection, connect: Connect
) -> None:
    pid = session.info.backend_pid
    call = asyncio.create_task(PreparedStatements(session).fetch("SELECT pg_sleep(600)", {}))
    observer = connect()

    def is_sleeping() -> bool:
        with observer.transaction():
            ((count,),) = observer.execute(_SLEEPS).fetchall()
        return bool(count)

    await until(is_sleeping)
    observer.execute("SELECT pg_terminate_backend(%s)", [pid])
    with pytest.raises(psycopg.errors.AdminShutdown):
        await call
    with pytest.raises(psycopg.OperationalError):
        await PreparedStatements(session).fetch("SELECT 1", {})
    assert session.closed


async def test_a_connection_that_breaks_ends_the_call(session: psycopg.AsyncConnection) -> None:
    statements = PreparedStatements(session)
    call = asyncio.create_task(statements.fetch("SELECT pg_sleep(600)", {}))
    await asyncio.sleep(0)
    break_socket(session)
    with pytest.raises(psycopg.OperationalError):
        await call
