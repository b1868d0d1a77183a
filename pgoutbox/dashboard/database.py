"""The dashboard's database access: few connections, short statements, and a timeout for every answer.

Everything runs in threads, so that the event loop never waits for a server. Each page reads one snapshot and cannot
write. Each action of an operator gets its own connection, which is not reused.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias, TypeVar

import anyio
import anyio.to_thread
import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from pgoutbox.dashboard.credentials import Viewer
from pgoutbox.database import operator_connection, sql
from pgoutbox.database.connections import break_socket
from pgoutbox.database.server import OldPackageError
from pgoutbox.errors import ConfigurationError, PgOutboxError, SchemaError
from pgoutbox.operations import Operator
from pgoutbox.settings import Settings

STATEMENT_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 10.0
_CHECK_FIRST: Final = "the action may have succeeded: check before you repeat it"
_CONNECT_SECONDS: Final = 3
_AT_ONCE: Final = 4

Connection: TypeAlias = psycopg.Connection[TupleRow]
_T = TypeVar("_T")


class UnavailableError(PgOutboxError):
    """The database did not answer in time. The text contains no secrets."""


class RefusedError(PgOutboxError):
    """The database role of the dashboard lacks a right; the text names the role to grant."""

    def __init__(self, what: str, *roles: str) -> None:
        super().__init__(f"the database role of this dashboard cannot {what}: grant it {' or '.join(roles)}")


class Database:
    """Connections to one database, opened on demand."""

    def __init__(self, settings: Settings) -> None:
        seconds = min(settings.connect_timeout_seconds, _CONNECT_SECONDS)
        self._settings = settings.model_copy(update={"connect_timeout_seconds": seconds})
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        # Its own limiter: pages that wait for a slow server must not use up the threads of the host application.
        self._limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def read(self, load: Callable[[Connection], _T]) -> _T:
        """Run `load` in a read-only transaction with one snapshot."""
        try:
            return await self._answer(functools.partial(self._read, load))
        except psycopg.errors.InsufficientPrivilege:
            raise RefusedError("read the data of this page", "pgoutbox_viewer", "pgoutbox_operator") from None

    async def act(self, viewer: Viewer, do: Callable[[Operator], _T]) -> _T:
        """Run `do`, and record this viewer in the audit."""
        try:
            return await self._answer(functools.partial(self._act, viewer, do), advice=_CHECK_FIRST)
        except psycopg.errors.InsufficientPrivilege:
            raise RefusedError("do this", "pgoutbox_operator") from None

    @contextlib.contextmanager
    def connection(
        self, watching: Callable[[Connection], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    ) -> Iterator[Connection]:
        """Open a separate connection, for work that takes longer than a page."""
        opened = operator_connection.open_connection(self._settings, read_only=False, purpose="web", watching=watching)
        with contextlib.closing(opened):
            yield opened

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    async def _answer(self, work: Callable[[_Deadline], _T], *, advice: str = "try again") -> _T:
        deadline = _Deadline()
        try:
            with anyio.fail_after(ANSWER_SECONDS):
                return await anyio.to_thread.run_sync(
                    _run_safely, deadline, work, abandon_on_cancel=True, limiter=self._limiter
                )
        except TimeoutError:
            raise UnavailableError(f"the database did not answer in time; {advice}") from None
        finally:
            deadline.end()

    def _read(self, load: Callable[[Connection], _T], deadline: _Deadline) -> _T:
        while True:
            connection, is_used = self._take(deadline)
            try:
                with deadline.watching(connection):
                    return _load(connection, load)
            except (psycopg.OperationalError, psycopg.InterfaceError):
                # It may have died while it lay idle, as all do when the server restarts.
                if not is_used or not connection.closed or deadline.is_over:
                    raise
            finally:
                self._keep(connection)

    def _act(self, viewer: Viewer, do: Callable[[Operator], _T], deadline: _Deadline) -> _T:
        with (
            self.connection(deadline.watching) as connection,
            deadline.watching(connection),
            operator_connection.limiting(STATEMENT_SECONDS),
        ):
            try:
                return do(Operator(connection, actor=viewer.name, origin=viewer.origin or None))
            except (psycopg.OperationalError, psycopg.InterfaceError):
                if connection.closed:  # Perhaps with the answer to the commit.
                    raise UnavailableError(f"the connection to the database was lost; {_CHECK_FIRST}") from None
                raise

    def _take(self, deadline: _Deadline) -> tuple[Connection, bool]:
        """Return a connection, and whether it lay idle."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        opened = operator_connection.open_connection(
            self._settings, read_only=True, purpose="web", watching=deadline.watching
        )
        opened.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return opened, False

    def _keep(self, connection: Connection) -> None:
        with self._lock:
            if connection.info.transaction_status == TransactionStatus.IDLE and len(self._idle) < _AT_ONCE:
                self._idle.append(connection)
                return
        connection.close()


def _run_safely(deadline: _Deadline, work: Callable[[_Deadline], _T]) -> _T:
    """Run the work, and replace errors of the driver with texts that reveal nothing about the server.

    Leaves a missing right unchanged, because only the caller knows which right is missing.
    """
    try:
        return work(deadline)
    except psycopg.errors.QueryCanceled:
        raise UnavailableError(
            f"a query took longer than {STATEMENT_SECONDS:g} s and was cancelled; try again, or use a narrower filter"
        ) from None
    except psycopg.errors.ReadOnlySqlTransaction:
        raise UnavailableError("the database is read-only") from None
    except psycopg.errors.LockNotAvailable:
        raise UnavailableError("another transaction holds a lock; try again") from None
    except (psycopg.OperationalError, psycopg.InterfaceError):
        raise UnavailableError("the database cannot be reached") from None
    except OldPackageError as error:
        raise UnavailableError(str(error)) from None
    except SchemaError:
        raise UnavailableError("the schema pgoutbox is missing or too old: run `pgoutbox migrate`") from None
    except ConfigurationError:
        raise UnavailableError("the database cannot be used: see the log") from None


@contextlib.contextmanager
def allowing_bitmaps(connection: Connection) -> Iterator[None]:
    """Allow bitmaps in the block, for indexes that need one. Statements with a limit must not use them."""
    connection.execute(sql.ALLOW_BITMAPS)
    yield
    connection.execute(sql.PREPARE_PAGE)


def _load(connection: Connection, load: Callable[[Connection], _T]) -> _T:
    with operator_connection.limiting(STATEMENT_SECONDS), connection.transaction():
        operator_connection.prepare(connection)
        connection.execute(sql.PREPARE_PAGE)
        return load(connection)


class _Deadline:
    """Breaks the connection of a thread after the request has stopped waiting for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.is_over = False

    @contextlib.contextmanager
    def watching(self, connection: Connection) -> Iterator[None]:
        with self._lock:
            self._connection = connection
        try:
            if self.is_over:
                raise psycopg.OperationalError("deadline exceeded")
            yield
        finally:
            with self._lock:
                self._connection = None

    def end(self) -> None:
        with self._lock:
            self.is_over = True
            if self._connection is not None:
                break_socket(self._connection)
