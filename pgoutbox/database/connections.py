"""Opening of connections to PostgreSQL, for every part of the package.

Every connection uses UTF-8, whatever the role, the database or PGCLIENTENCODING say. It detects a dead peer, and has a
connect timeout. A server behind a dead network never answers, so each wait for an answer has a deadline on this side
too.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import make_conninfo
from psycopg.rows import Row, TupleRow

_KEEPALIVE: Final = {
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
_WAIT_INTERVAL_SECONDS: Final = 0.1
DEFAULT_CONNECT_TIMEOUT_SECONDS: Final = 10
_LENT: Final = "commit() and rollback() are forbidden: the worker ends the transaction of a transactional handler"

RV = TypeVar("RV")


class AnswerTimeoutError(psycopg.OperationalError, TimeoutError):
    """The server did not answer in time, and the connection has been broken."""


def conninfo_for(dsn: str, *, purpose: str, connect_timeout_seconds: int) -> str:
    """Return `dsn` with the options of every connection of pgoutbox, and its purpose in the application name.

    The connection breaks half a minute after its peer has silently disappeared. Raises `psycopg.ProgrammingError` if
    `dsn` is not a connection string.
    """
    return make_conninfo(
        dsn,
        application_name=f"pgoutbox {purpose}",
        client_encoding="UTF8",
        connect_timeout=connect_timeout_seconds,
        **_KEEPALIVE,
    )


class Connection(psycopg.Connection[Row]):
    """A connection that breaks when an answer takes longer than `answer_seconds`; None means no limit.

    It also breaks when an answer has not come at `give_up_at`, by the monotonic clock, which may change meanwhile. The
    waiting call then raises `AnswerTimeoutError`.
    """

    answer_seconds: float | None = None
    give_up_at: float = math.inf

    def wait(self, gen: PQGen[RV], interval: float = _WAIT_INTERVAL_SECONDS, timeout: float | None = None) -> RV:
        """Wait for the server, up to the limit."""
        gen = _limited(self, gen, self.answer_seconds)
        return super().wait(gen, interval) if timeout is None else super().wait(gen, interval, timeout)


class AsyncConnection(psycopg.AsyncConnection[Row]):
    """The same connection for an event loop.

    `asyncio.timeout` would cancel the task. Then the driver would first ask the server to cancel the statement, and
    wait for that for up to ten seconds more, on the same dead network.
    """

    answer_seconds: float | None = None
    give_up_at: float = math.inf

    async def wait(self, gen: PQGen[RV], interval: float = _WAIT_INTERVAL_SECONDS, timeout: float | None = None) -> RV:  # noqa: ASYNC109 - the driver's signature
        """Wait for the server, up to the limit."""
        gen = _limited(self, gen, self.answer_seconds)
        try:
            return await (super().wait(gen, interval) if timeout is None else super().wait(gen, interval, timeout))
        except psycopg.OperationalError as error:
            if isinstance(error.__cause__, AnswerTimeoutError):
                raise error.__cause__ from None  # The driver took it for an error of the socket.
            raise


class LentConnection(Connection[Row]):
    """An open connection as a handler sees it: its owner ends the transaction, and closes it."""

    def commit(self) -> None:
        """Refuse: the worker commits."""
        raise psycopg.ProgrammingError(_LENT)

    def rollback(self) -> None:
        """Refuse: the worker rolls back."""
        raise psycopg.ProgrammingError(_LENT)

    def __del__(self, *_: object) -> None:
        """Leave the connection to its owner."""


class LentAsyncConnection(AsyncConnection[Row]):
    """The same for a handler on the event loop."""

    async def commit(self) -> None:
        """Refuse: the worker commits."""
        raise psycopg.ProgrammingError(_LENT)

    async def rollback(self) -> None:
        """Refuse: the worker rolls back."""
        raise psycopg.ProgrammingError(_LENT)

    def __del__(self, *_: object) -> None:
        """Leave the connection to its owner."""


def connect(
    dsn: str,
    *,
    purpose: str,
    connect_timeout_seconds: int = DEFAULT_CONNECT_TIMEOUT_SECONDS,
    answer_seconds: float | None,
    autocommit: bool = True,
) -> Connection[TupleRow]:
    """Open a connection without prepared statements, which works through a transaction pooler too."""
    connection = Connection.connect(
        conninfo_for(dsn, purpose=purpose, connect_timeout_seconds=connect_timeout_seconds),
        autocommit=autocommit,
        prepare_threshold=None,
    )
    connection.answer_seconds = answer_seconds
    return connection


async def connect_async(
    dsn: str,
    *,
    purpose: str,
    connect_timeout_seconds: int,
    answer_seconds: float | None,
    kind: type[AsyncConnection[TupleRow]] = AsyncConnection,
) -> AsyncConnection[TupleRow]:
    """Open an autocommit connection without prepared statements, for the running event loop."""
    try:
        connection = await kind.connect(
            conninfo_for(dsn, purpose=purpose, connect_timeout_seconds=connect_timeout_seconds),
            autocommit=True,
            prepare_threshold=None,
        )
    except psycopg.Error as error:
        # The driver's frame refers to its error, so that the socket of an attempt without an answer would stay open.
        raise error.with_traceback(None) from None
    connection.answer_seconds = answer_seconds
    return connection


def _limited(connection: Connection[Any] | AsyncConnection[Any], gen: PQGen[RV], seconds: float | None) -> PQGen[RV]:
    """Do what the driver waits for, and break the connection when the time is up."""
    began_at = time.monotonic()
    ends_at = math.inf if seconds is None else began_at + seconds
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            # The driver resumes this generator at each interval, with nothing ready if no data has arrived.
            if not ready and time.monotonic() > (limit := min(ends_at, connection.give_up_at)):
                connection.pgconn.finish()
                raise AnswerTimeoutError(f"no answer within {round(limit - began_at, 1):g} s")
            wanted = gen.send(ready)
    except StopIteration as end:
        answer: RV = end.value
        return answer


def break_socket(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Shut down the socket of a connection, from any thread. A thread or task waiting for an answer gets an error."""
    if not connection.closed:
        # libpq keeps the socket itself, and reads its end.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as broken:
            broken.shutdown(socket.SHUT_RDWR)
