"""The connection of an operator, and its transactions, which are retried after a lost race."""

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
from pgoutbox.database.server import PACKAGE_VERSION, ServerFacts, judge_schema, judge_server, refusals
from pgoutbox.settings import Settings

_TRIALS: Final = 5
# A person waits for the answer and can interrupt it, so this only limits an unattended terminal.
_USUAL_TIME_LIMIT: Final = 300.0
_ANSWER_SECONDS: Final = 5.0  # Time that the server has to report that a statement reached its time limit.
_time_limit: ContextVar[float] = ContextVar("pgoutbox_time_limit", default=_USUAL_TIME_LIMIT)

_T = TypeVar("_T")
Parameters = Mapping[str, object] | Sequence[object]


@contextlib.contextmanager
def connect(
    settings: Settings, *, read_only: bool = False, purpose: str = "cli"
) -> Iterator[psycopg.Connection[TupleRow]]:
    """Open a connection for the functions of `pgoutbox.operations`, and close it after the `with` block.

    Its transactions are READ COMMITTED, whatever the role's default is. It works through a transaction pooler, and with
    `read_only` also on a standby. Raises `ConfigurationError` or `SchemaError` for an unsuitable server.

        with connect(load_settings()) as connection:
            redrive(connection, [17])
    """
    with contextlib.closing(open_connection(settings, read_only=read_only, purpose=purpose)) as connection:
        yield connection


def open_connection(
    settings: Settings,
    *,
    read_only: bool,
    purpose: str,
    watching: Callable[[psycopg.Connection[TupleRow]], AbstractContextManager[object]] = contextlib.nullcontext,
) -> psycopg.Connection[TupleRow]:
    """Open a connection like `connect`. While it queries the facts of the server, `watching` may break it."""
    connection = connections.connect(
        settings.require_dsn(),
        purpose=purpose,
        connect_timeout_seconds=settings.connect_timeout_seconds,
        answer_seconds=settings.connect_timeout_seconds,
    )
    try:
        with watching(connection):
            judge_server(ServerFacts._make(connection.execute(sql.SERVER_FACTS).fetchall()[0]), writes=not read_only)
            with refusals():
                ((found,),) = connection.execute(sql.SCHEMA_VERSION, {"package": PACKAGE_VERSION})
            judge_schema(found)
    except BaseException:
        connection.close()
        raise
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    connection.read_only = read_only
    return connection


@contextlib.contextmanager
def limiting(seconds: float) -> Iterator[None]:
    """Set the timeout of each statement of the `with` block, in its thread or asyncio task (default: five minutes)."""
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
    """Run `work` in a transaction, and repeat it after a lost race. It then decides again, by the current state.

    Raises the errors of `work`, and after five lost races the driver's error. Locking a row that moves to another
    partition fails with 40001, even in READ COMMITTED.
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
    """Run one statement in a transaction of its own, and return its rows."""
    return transact(connection, lambda: connection.execute(statement, parameters).fetchall())
