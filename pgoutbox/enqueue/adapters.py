"""Adapters for the caller's own connection: recognised without importing its package, never committed, never closed.

An adapter knows whether a usable transaction is open on its kind of connection, and how to run one statement in it.
The methods of all adapters are coroutines. Those of sync connections never wait, so `run` needs no event loop.
SQLSTATE and the names in PostgreSQL's answer identify the errors of pgoutbox's functions. All other errors pass through
unchanged.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, LiteralString, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from pgoutbox.database.server import missing_object
from pgoutbox.errors import (
    ArgumentError,
    ConfigurationError,
    DedupeConflictError,
    PgOutboxError,
    SchemaError,
    StateError,
    TransactionError,
)

if TYPE_CHECKING:
    import sqlalchemy
    from psycopg.errors import Diagnostic
    from sqlalchemy import orm
    from sqlalchemy.ext import asyncio as sqlalchemy_async

Rows: TypeAlias = Sequence[Sequence[Any]]
R = TypeVar("R")
C = TypeVar("C", bound="psycopg.Connection[object] | psycopg.AsyncConnection[object]")


@functools.cache
def numbered(statement: LiteralString) -> str:
    """Return the statement in asyncpg's form: with `$1`, `$2` and so on instead of `%s`."""
    numbers = itertools.count(1)
    return re.sub("%s", lambda _: f"${next(numbers)}", statement)


class Adapter(Protocol):
    """A connection of the caller."""

    async def settle(self) -> None:
        """Wait for the caller's earlier statements in a pipeline: pgoutbox must not handle their errors."""
        return  # Only psycopg has pipelines.

    async def in_transaction(self) -> bool:
        """Whether the next statement runs in a transaction. Raise `TransactionError` if it cannot run at all."""
        ...

    async def fetch(self, statement: LiteralString, *parameters: object, has_rows: bool = True) -> Rows:
        """Run one statement, with the parameters in the order of its `%s`, and return its rows, if it has any."""
        ...


def run(call: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine on the adapter of a sync connection."""
    try:
        while True:
            call.send(None)
    except StopIteration as stop:
        return cast("R", stop.value)


class DjangoConnection(Protocol):
    """The part of Django's `connection` that its type stubs declare; they leave the results of queries open."""

    in_atomic_block: bool
    needs_rollback: bool

    def get_autocommit(self) -> bool: ...

    def cursor(self) -> AbstractContextManager[Any]: ...


class AsyncpgConnection(Protocol):
    """The used part of asyncpg's `Connection`, or of one of its pool. In its type stubs a row is not a `Sequence`."""

    def is_closed(self) -> bool: ...

    def is_in_transaction(self) -> bool: ...

    def fetch(self, query: str, /, *args: object) -> Awaitable[Sequence[Any]]: ...


SyncConnection: TypeAlias = (
    psycopg.Connection[object] | DjangoConnection | "sqlalchemy.Connection" | "orm.Session" | "orm.scoped_session[Any]"
)
AsyncConnection: TypeAlias = (
    psycopg.AsyncConnection[object]
    | AsyncpgConnection
    | "sqlalchemy_async.AsyncConnection"
    | "sqlalchemy_async.AsyncSession"
    | "sqlalchemy_async.async_scoped_session[sqlalchemy_async.AsyncSession]"
)

_TYPES: Final = (
    "psycopg.Connection, SQLAlchemy's Connection or Session, Django's connection, "
    "psycopg.AsyncConnection, SQLAlchemy's AsyncConnection or AsyncSession, or a Connection of asyncpg or its pool"
)


@functools.cache  # An application has few types of connections, and the search costs as much as the rest of `on`.
def adapter_of(kind: type) -> tuple[Callable[..., Adapter] | None, bool]:
    """Return the adapter of a kind of connection, None for an unknown kind, and whether its calls are awaited."""
    names = _names_of(kind)
    found = next((name for name in names if name in _SYNC_ADAPTERS or name in _ASYNC_ADAPTERS), "")
    return _SYNC_ADAPTERS.get(found) or _ASYNC_ADAPTERS.get(found), found in _ASYNC_ADAPTERS


def refusal(connection: object) -> TypeError:
    """Return the error for a connection of an unknown kind."""
    text = f"on takes {_TYPES}, not {_names_of(type(connection))[0]}"
    if hasattr(connection, "cursor"):
        text += "; with another driver of PostgreSQL call the SQL functions: SELECT pgoutbox.enqueue(...)"
    return TypeError(text)


def _names_of(kind: type) -> list[str]:
    return [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]


# --- psycopg ----------------------------------------------------------------------------------------------------------


class _OfPsycopg(Generic[C]):
    def __init__(self, connection: C) -> None:
        self._connection = connection

    async def in_transaction(self) -> bool:
        if self._connection.closed:
            raise _closed()
        status = self._connection.info.transaction_status
        if status == TransactionStatus.INERROR:
            raise _aborted()
        # Without autocommit psycopg itself begins a transaction before the next statement.
        return status != TransactionStatus.IDLE or not self._connection.autocommit


class Psycopg(_OfPsycopg["psycopg.Connection[object]"]):
    """The adapter of a psycopg `Connection`."""

    async def settle(self) -> None:
        if self._connection.info.pipeline_status != PipelineStatus.OFF:
            with self._connection.pipeline():
                """Entering a pipeline within a pipeline synchronises the outer one."""

    async def fetch(self, statement: LiteralString, *parameters: object, has_rows: bool = True) -> Rows:
        if self._connection.info.pipeline_status == PipelineStatus.ABORTED:
            await self.settle()
        # The connection's own cursor factory may use other placeholders or row types.
        with translated_errors(), psycopg.Cursor(self._connection, row_factory=tuple_row) as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if has_rows else []


class _AsyncPsycopg(_OfPsycopg["psycopg.AsyncConnection[object]"]):
    async def settle(self) -> None:
        if self._connection.info.pipeline_status != PipelineStatus.OFF:
            async with self._connection.pipeline():
                """Entering a pipeline within a pipeline synchronises the outer one."""

    async def fetch(self, statement: LiteralString, *parameters: object, has_rows: bool = True) -> Rows:
        if self._connection.info.pipeline_status == PipelineStatus.ABORTED:
            await self.settle()
        with translated_errors():
            async with psycopg.AsyncCursor(self._connection, row_factory=tuple_row) as cursor:
                await cursor.execute(statement, parameters)
                return await cursor.fetchall() if has_rows else []


# --- SQLAlchemy -------------------------------------------------------------------------------------------------------


class _SQLAlchemy(Adapter):
    """The adapter of what `open_connection` returns: a session opens its connection when it is needed."""

    def __init__(self, open_connection: Callable[[], sqlalchemy.Connection]) -> None:
        self._open = open_connection

    async def in_transaction(self) -> bool:
        with translated_errors():
            connection = self._open()
            dialect = connection.dialect
            if dialect.name != "postgresql" or dialect.driver not in ("psycopg", "asyncpg"):
                raise TypeError(
                    f"the SQLAlchemy dialect is {dialect.name}+{dialect.driver}: "
                    "pgoutbox takes postgresql+psycopg and postgresql+asyncpg"
                )
            if connection.closed or connection.invalidated:
                raise _closed()
            return not getattr(connection.connection.dbapi_connection, "autocommit", False)

    async def fetch(self, statement: LiteralString, *parameters: object, has_rows: bool = True) -> Rows:
        with translated_errors():
            connection = self._open()
            text = numbered(statement) if connection.dialect.driver == "asyncpg" else statement
            result = connection.exec_driver_sql(text, parameters or None)
            return cast("Rows", result.fetchall()) if has_rows else []


def _of_connection(connection: sqlalchemy.Connection) -> _SQLAlchemy:
    return _SQLAlchemy(lambda: connection)


def _of_session(session: orm.Session) -> _SQLAlchemy:
    return _SQLAlchemy(session.connection)


class _AsyncSQLAlchemy(Adapter):
    """Runs the sync adapter through SQLAlchemy's `run_sync`."""

    def __init__(
        self,
        connection: sqlalchemy_async.AsyncConnection | sqlalchemy_async.AsyncSession,
        adapter: Callable[..., _SQLAlchemy],
    ) -> None:
        self._run_sync: Callable[..., Awaitable[object]] = connection.run_sync
        self._adapter = adapter

    async def in_transaction(self) -> bool:
        return cast("bool", await self._run_sync(lambda inner: run(self._adapter(inner).in_transaction())))

    async def fetch(self, statement: LiteralString, *parameters: object, has_rows: bool = True) -> Rows:
        return cast(
            "Rows",
            await self._run_sync(
                lambda inner: run(self._adapter(inner).fetch(statement, *parameters, has_rows=has_rows))
            ),
        )


# --- asyncpg ----------------------------------------------------------------------------------------------------------


class _Asyncpg(Adapter):
    def __init__(self, connection: AsyncpgConnection) -> None:
        self._connection = connection

    async def in_transaction(self) -> bool:
        try:
            closed = self._connection.is_closed()
        except Exception as error:
            # A connection that was returned to its pool refuses every call.
            if "asyncpg.exceptions._base.InterfaceError" in _names_of(type(error)):
                raise _closed() from error
            raise
        if closed:
            raise _closed()
        return self._connection.is_in_transaction()

    async def fetch(self, statement: LiteralString, *parameters: object, has_rows: bool = True) -> Rows:  # noqa: ARG002
        with translated_errors():
            return await self._connection.fetch(numbered(statement), *parameters)


# --- Django -----------------------------------------------------------------------------------------------------------


class _Django(Adapter):
    def __init__(self, connection: DjangoConnection) -> None:
        self._connection = connection

    async def in_transaction(self) -> bool:
        driver = cast("Any", self._connection).Database.__name__
        if driver != "psycopg":
            raise TypeError(f"Django's connection works on {driver}: pgoutbox takes PostgreSQL with psycopg 3")
        if self._connection.needs_rollback:
            raise _aborted()
        return self._connection.in_atomic_block or not self._connection.get_autocommit()

    async def fetch(self, statement: LiteralString, *parameters: object, has_rows: bool = True) -> Rows:
        try:
            with translated_errors(), self._connection.cursor() as cursor:
                cursor.execute(statement, parameters)
                return cursor.fetchall() if has_rows else []
        except SchemaError as error:
            alias = cast("Any", self._connection).alias
            raise SchemaError(
                f"connection: is that of DATABASES[{alias!r}], where {error}. "
                "If the outbox is in another database, use the connection of that one"
            ) from error


_SYNC_ADAPTERS: Mapping[str, Callable[..., Adapter]] = {
    "psycopg.Connection": Psycopg,
    "sqlalchemy.engine.base.Connection": _of_connection,
    "sqlalchemy.orm.session.Session": _of_session,
    "sqlalchemy.orm.scoping.scoped_session": lambda registry: _of_session(registry()),
    "django.db.backends.base.base.BaseDatabaseWrapper": _Django,
    "django.utils.connection.ConnectionProxy": _Django,
}
_ASYNC_ADAPTERS: Mapping[str, Callable[..., Adapter]] = {
    "psycopg.AsyncConnection": _AsyncPsycopg,
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": lambda connection: _AsyncSQLAlchemy(connection, _of_connection),
    "sqlalchemy.ext.asyncio.session.AsyncSession": lambda session: _AsyncSQLAlchemy(session, _of_session),
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": lambda registry: _AsyncSQLAlchemy(registry(), _of_session),
    "asyncpg.connection.Connection": _Asyncpg,
    "asyncpg.pool.PoolConnectionProxy": _Asyncpg,
}


# --- errors -----------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """PostgreSQL's error, from any driver."""

    sqlstate: str
    message: str
    schema: str | None
    column: str | None
    constraint: str | None


class ClosedError(TransactionError):
    """The connection is closed, so the writes of its transaction are not committed."""


class ItemRefusedError(ArgumentError):
    """The SQL function refused one item of the array. `index` counts within the statement."""

    def __init__(self, index: int, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.index = index


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise pgoutbox's own error for a driver's error from its SQL functions, or from their absence."""
    try:
        yield
    except Exception as error:
        own = _own_error(error)
        if own is None:
            raise
        raise own from error


def _own_error(error: Exception) -> PgOutboxError | None:
    if "sqlalchemy.exc.PendingRollbackError" in _names_of(type(error)):
        return _aborted()
    if isinstance(error, UnicodeEncodeError):
        return ConfigurationError(
            f"client_encoding: the connection's encoding {error.encoding} lacks {error.object[error.start]!a};"
            " set client_encoding to UTF8 for the role or the connection"
        )
    match answer_of(error):
        case Answer(sqlstate="25P02"):
            return _aborted()
        case Answer(sqlstate="22023" | "22004", schema="pgoutbox", column=str(column), message=message):
            return _refused(column, message)
        case Answer(schema="pgoutbox", constraint="dedupe_payload", message=message):
            return DedupeConflictError(message.removeprefix("pgoutbox.enqueue: "))
        case Answer(schema="pgoutbox", constraint="blackout", message=message):
            return StateError(message)
        case Answer(sqlstate="55000", schema="pgoutbox", message=message):
            return SchemaError(message.removeprefix("pgoutbox.enqueue: "))
        case Answer(sqlstate="OB004", message=message):  # Of a function that a later schema keeps for earlier packages.
            return SchemaError(message)
        case Answer(sqlstate="42883" | "42P01" | "3F000", message=message):
            return missing_object(message)
        case _:
            return None


def answer_of(error: Exception) -> Answer | None:
    """Return PostgreSQL's answer behind an error of any driver, or of pgoutbox; None if there is none."""
    # SQLAlchemy has the driver's error in `orig`, for asyncpg within a wrapper; others have it as the cause.
    causes = (error, error.__cause__, getattr(error.__cause__, "__cause__", None))
    wrapped = [getattr(cause, "orig", None) for cause in causes]
    for candidate in (*causes, *wrapped, *(getattr(inner, "__cause__", None) for inner in wrapped)):
        if isinstance(candidate, psycopg.Error) and candidate.sqlstate is not None:
            source, message = candidate.diag, candidate.diag.message_primary or ""
        elif "asyncpg.exceptions._base.PostgresError" in _names_of(type(candidate)):
            source = cast("Diagnostic", candidate)  # It has the same attributes.
            message = getattr(candidate, "message", "")
        else:
            continue
        sqlstate = source.sqlstate or ""
        return Answer(sqlstate, message, source.schema_name, source.column_name, source.constraint_name)
    return None


def _refused(column: str, message: str) -> ArgumentError:
    # A field of its own names the invalid argument. Only the text of the function names the item.
    reason = message.partition(f"{column}: ")[2] or message
    item = re.search(r"(?:messages|destinations)\[(\d+)\]", message)
    return ArgumentError(column, reason) if item is None else ItemRefusedError(int(item[1]), column, reason)


def _aborted() -> TransactionError:
    return TransactionError("the transaction is aborted; roll back first")


def _closed() -> TransactionError:
    return ClosedError("the connection is closed")
