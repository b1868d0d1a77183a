"""One operator's connection, and its transactions, each tried again when it lost a race."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Final, LiteralString, TypeVar

import psycopg
from psycopg.errors import DeadlockDetected, SerializationFailure
from psycopg.rows import TupleRow

from pgoutbox.database import connections, sql
from pgoutbox.database.server import ServerFacts, judge_schema, judge_server
from pgoutbox.settings import Settings

Progress = Callable[[int], object]
"""Called after each committed batch with the number of messages done so far."""

_TRIALS: Final = 5
# A person waits for the answer and can interrupt it: this is only there for a terminal that was left alone.
_USUAL_TIME_LIMIT: Final = 300.0
_ANSWER_SECONDS: Final = 5.0  # Time that the server has to report that a statement reached its time limit.
_time_limit: ContextVar[float] = ContextVar("pgoutbox_time_limit", default=_USUAL_TIME_LIMIT)

_T = TypeVar("_T")
Parameters = Mapping[str, object] | Sequence[object]


@contextlib.contextmanager
def connect(
    settings: Settings,
    *,
    read_only: bool = False,
    purpose: str = "cli",
    watching: Callable[[psycopg.Connection[TupleRow]], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[psycopg.Connection[TupleRow]]:
    """A connection for the functions of this module, for the length of the `with` block.

    Transactions on it are READ COMMITTED whatever the role's default is. Works through a transaction pooler, and with
    `read_only` on a standby too. While the server is asked what it is, `watching` may break the connection. Raises
    `ConfigurationError` or `SchemaError` for a server that cannot be worked with.

        with connect(load_settings()) as connection:
            redrive(connection, [17])
    """
    connection = connections.connect(
        settings.require_dsn(),
        purpose=purpose,
        connect_timeout_seconds=settings.connect_timeout_seconds,
        answer_seconds=settings.connect_timeout_seconds,
    )
    with contextlib.closing(connection):
        with watching(connection):
            _check_server(connection, read_only=read_only)
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        connection.read_only = read_only
        yield connection


def _check_server(connection: psycopg.Connection[TupleRow], *, read_only: bool) -> None:
    judge_server(ServerFacts._make(connection.execute(sql.SERVER_FACTS).fetchall()[0]), writes=not read_only)
    ((found,),) = connection.execute(sql.SCHEMA_VERSION)
    judge_schema(found)


@contextlib.contextmanager
def limiting(seconds: float) -> Iterator[None]:
    """Give each statement of the `with` block so long, in its thread or asyncio task; five minutes without it."""
    token = _time_limit.set(seconds)
    try:
        yield
    finally:
        _time_limit.reset(token)


def prepare(connection: psycopg.Connection[TupleRow]) -> None:
    """Make the open transaction independent of the defaults of its role and its database, and limit its statements."""
    if isinstance(connection, connections.Connection):
        connection.answer_seconds = _time_limit.get() + _ANSWER_SECONDS
    connection.execute(sql.PREPARE_OPERATION, {"statement_timeout": f"{_time_limit.get() * 1000:.0f}ms"})


def transact(connection: psycopg.Connection[TupleRow], work: Callable[[], _T]) -> _T:
    """Run `work` in a transaction, and again if it lost a race: its statements decide anew by the state they then meet.

    Raises what `work` raises, and after five lost races the driver's error. A row that moves to another partition while
    it is being locked fails with 40001, in READ COMMITTED too.
    """
    trial = 1
    while True:
        try:
            with connection.transaction():
                prepare(connection)
                return work()
        except (SerializationFailure, DeadlockDetected):
            if trial == _TRIALS:
                raise
            trial += 1


def fetch(connection: psycopg.Connection[TupleRow], statement: LiteralString, parameters: Parameters) -> list[TupleRow]:
    """What one statement answers, in a transaction of its own."""
    return transact(connection, lambda: connection.execute(statement, parameters).fetchall())
