"""Connections of workers to PostgreSQL, which reconnect automatically, and the classification of their errors.

A session has pgoutbox's own settings, independent of the role's, and also works through a pooler. Each statement has a
deadline on this side too, so that none waits for a dead network.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Final, LiteralString, Protocol, TypeVar

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from pgoutbox.database import connections, sql
from pgoutbox.database.round_trip import Pipeline, Step
from pgoutbox.database.server import PACKAGE_VERSION, CopyError, is_tls_refusal, refusals
from pgoutbox.errors import ConfigurationError
from pgoutbox.settings import Settings
from pgoutbox.text import one_line

T = TypeVar("T")

REST_SECONDS: Final = 5.0
"""After so long without a statement, a connection of one of many databases is closed."""
_REFUSED_PAUSE_SECONDS: Final = 1.0
_POOLER_TRIALS: Final = 3

# Transient errors: serialization, deadlock, lock timeout, cancelled statement, session timeout, server shutting down or
# full, broken connection, a limit of the server such as a full notification queue or no transaction numbers.
_PASSING_SQLSTATES = frozenset({"40001", "40P01", "55P03", "57014", "25006", "25P03", "25P04"})
_PASSING_CLASSES = ("08", "53", "54", "57P", "58")
# A server is full, or a standby that target_session_attrs refuses: until it is promoted, a failover leaves no other.
_PASSING_REFUSALS: Final = (
    "too many clients",
    "too many connections",
    "remaining connection slots",
    "no more connections allowed",
    "session is read-only",
    "server is in hot standby mode",
)


class StrandedError(psycopg.OperationalError):
    """An abandoned statement still runs on the server: repeating it would only add load."""


class Lender(Protocol):
    """Another connection of the worker, to which it has a session of its own."""

    @property
    def is_up(self) -> bool | None:
        """Whether it is connected."""
        ...

    def lend(self) -> contextlib.AbstractAsyncContextManager[psycopg.AsyncConnection[TupleRow] | None]:
        """Lend the connection, or None if it was lost meanwhile."""
        ...


class WorkerConnection:
    """One connection, opened on first use and replaced after it broke; statements take turns on it.

    Each statement has a deadline on this side too, because a server behind a dead network never answers. While the
    server refuses this connection, that of `spare` is used, which may belong to another thread's event loop. The spare
    comes first: it is opened again before this connection, which is given up if the server refuses the spare.
    With a `lender` its connection is used while it is up, so that a worker with many databases has one for each.
    `on_lost` is called after each statement that broke the connection, on the event loop of its caller.
    """

    def __init__(
        self,
        dsn: str,
        settings: Settings,
        *,
        purpose: str,
        spare: WorkerConnection | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._dsn = dsn
        self._settings = settings
        self.purpose = purpose
        self._spare = spare
        self._less_needed: list[WorkerConnection] = []
        if spare is not None:
            spare._less_needed.append(self)
        self._on_lost = on_lost
        self.lender: Lender | None = None
        self._lent: connections.AsyncConnection[TupleRow] | None = None
        self._lent_trips: Pipeline
        self._lent_pid: int | None = None
        self._refused_at = -math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: connections.AsyncConnection[TupleRow] | None = None
        self._pooled = settings.pooled
        self._trips: Pipeline
        self._pid: int | None = None
        self._stranded_pid: int | None = None
        self._turn = asyncio.Lock()
        self._used_at = -math.inf
        self._deadline_seconds = _deadline_of(settings)
        self._give_up_at = math.inf

    async def fetch(self, statement: LiteralString, parameters: Mapping[str, object]) -> list[TupleRow]:
        """Run one statement in its own transaction, and return its rows. See `trip`."""
        return (await self.trip([(statement, parameters)]))[0]

    async def trip(self, steps: Sequence[Step]) -> list[list[TupleRow]]:
        """Run the statements in one transaction and one round trip, and return the rows of each.

        After an error that broke the connection, or after the deadline, the next call opens another connection, and
        first ends the abandoned session: its statement must not commit later. The call raises `StrandedError` while
        that session still hangs in its COMMIT.
        """
        if self._spare is not None and not await self._can_open(beside=self._spare):
            return await self._spare._on_own_loop(self._spare.trip(steps))
        async with self._turn:
            if self.lender is not None and self.lender.is_up and self._stranded_pid is None:
                async with self.lender.lend() as lent:
                    if isinstance(lent, connections.AsyncConnection):
                        return await self._run_on(lent, steps)
            connection = await self._open()
            try:
                if self._stranded_pid is not None:
                    await self._end_stranded(self._stranded_pid)
                self._used_at = time.monotonic()
                return await self._run(steps)
            except BaseException as error:
                if not _keeps(connection, error):
                    await self._replace()
                raise

    async def _run_on(self, lent: connections.AsyncConnection[TupleRow], steps: Sequence[Step]) -> list[list[TupleRow]]:
        if lent is not self._lent:
            self._lent, self._lent_trips = lent, Pipeline(lent, prepares=True)
            self._lent_pid = lent.info.backend_pid  # A broken connection does not know it any more.
        usual_seconds, lent.answer_seconds = lent.answer_seconds, self._deadline_seconds
        lent.give_up_at = self._give_up_at
        try:
            return await self._lent_trips.fetch(steps)
        except BaseException as error:
            if not _keeps(lent, error):
                self._stranded_pid = self._lent_pid
                self._on_lost()
                await lent.close()
            raise
        finally:
            lent.answer_seconds = usual_seconds

    async def _run(self, steps: Sequence[Step]) -> list[list[TupleRow]]:
        if not self._pooled:
            return await self._trips.fetch(steps)
        # A transaction pooler gives each transaction another server session, so the settings come along.
        prepare = (sql.PREPARE_TRANSACTION, session_parameters(self._settings))
        try:
            with refusals():
                return (await self._trips.fetch([(sql.BEGIN, {}), prepare, *steps, (sql.COMMIT, {})]))[2:-1]
        except psycopg.Error:
            if self.is_open:
                await self._trips.fetch([(sql.ROLLBACK, {})])
            raise

    async def _on_own_loop(self, call: Coroutine[object, object, T]) -> T:
        if self._loop is None or self._loop is asyncio.get_running_loop():
            return await call
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    async def _end_stranded(self, pid: int) -> None:
        """End the abandoned session, unless its COMMIT waits for a standby."""
        (rows,) = await self._trips.fetch([(sql.END_STRANDED, {"pid": pid})])
        for has_ended, waits_for in rows:
            if not has_ended:
                raise StrandedError(f"the session of an abandoned statement still exists: {waits_for}")
        self._stranded_pid = None

    async def _can_open(self, *, beside: WorkerConnection) -> bool:
        if self.is_open:
            return True
        if time.monotonic() - self._refused_at < _REFUSED_PAUSE_SECONDS:
            return False
        try:
            await beside.reopen_from_anywhere()
            await self.open()
        except (psycopg.OperationalError, OSError):
            self._refused_at = time.monotonic()
            return False
        return True

    async def _open(self) -> psycopg.AsyncConnection[TupleRow]:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        if (left_seconds := self._give_up_at - time.monotonic()) <= 0:
            raise connections.AnswerTimeoutError("the worker ends")
        settings = self._settings
        if left_seconds < settings.connect_timeout_seconds:
            settings = settings.model_copy(update={"connect_timeout_seconds": math.ceil(left_seconds)})
        try:
            connection, self._pooled = await open_session(self._dsn, settings, purpose=self.purpose)
        except (psycopg.OperationalError, OSError):
            for other in self._less_needed:
                other._give_up()
            raise
        connection.answer_seconds = self._deadline_seconds
        self._trips = Pipeline(connection, prepares=not self._pooled)
        self._pid = connection.info.backend_pid
        self._connection = connection
        connection.give_up_at = self._give_up_at
        self._loop = asyncio.get_running_loop()
        return connection

    @property
    def is_open(self) -> bool:
        """Whether there is an open connection, as far as is known."""
        return self._connection is not None and not self._connection.closed

    def give_up_at(self, at: float) -> None:
        """Wait for no answer after this time, by the monotonic clock, and connect no more. Any thread may call it."""
        self._give_up_at = at
        for connection in (self._connection, self._lent):
            if connection is not None:
                connection.give_up_at = at

    async def reopen_from_anywhere(self) -> None:
        """Open the connection again if it was lost, on the event loop that opened it."""
        is_lent = self.lender is not None and self.lender.is_up
        if self._loop is not None and not (self.is_open or is_lent):
            await self._on_own_loop(self.open())

    async def open(self) -> None:
        """Open the connection before it is needed, if there is none."""
        async with self._turn:
            await self._open()

    async def rest(self, seconds: float) -> None:
        """Close the connection if it has not been used for so long."""
        if self.is_open and not self._turn.locked() and time.monotonic() - self._used_at >= seconds:
            async with self._turn:
                await self.close()

    def _give_up(self) -> None:
        """Close the connection after its statement. Any thread may call it."""

        async def close() -> None:
            async with self._turn:
                await self.close()

        if self.is_open and self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(close(), self._loop)

    async def _replace(self) -> None:
        if not self._pooled and self._stranded_pid is None:
            self._stranded_pid = self._pid  # Otherwise this session has only tried to end that one.
        self._on_lost()
        await self.close()

    async def close(self) -> None:
        """Close the connection; the next fetch opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error, OSError):
                await connection.close()


def _keeps(connection: psycopg.AsyncConnection[TupleRow], error: BaseException) -> bool:
    """Whether the connection is still usable.

    If it is now read-only, the server has become a standby. A prepared statement whose result has changed fails again.
    """
    return isinstance(error, psycopg.Error) and not connection.closed and error.sqlstate not in ("25006", "0A000")


async def open_session(
    dsn: str,
    settings: Settings,
    *,
    purpose: str,
    prepare: LiteralString | None = None,
    kind: type[connections.AsyncConnection[TupleRow]] = connections.AsyncConnection,
) -> tuple[connections.AsyncConnection[TupleRow], bool]:
    """Open a session of a worker. A direct one is prepared by `prepare`, or as those of the worker's own statements.

    Also return whether a pooler was told or detected, so that each transaction may have another session of the server.
    Raises `CopyError` for a direct session in a copy of the database, and `OldPackageError` for a package that is too
    old for the schema. Behind a pooler each transaction must ask.
    """
    connection, is_direct = await connect(dsn, settings, purpose=purpose, kind=kind)
    is_pooled = settings.pooled or not is_direct
    if not is_pooled:
        await prepare_session(connection, settings, prepare)
    return connection, is_pooled


async def connect(
    dsn: str,
    settings: Settings,
    *,
    purpose: str,
    kind: type[connections.AsyncConnection[TupleRow]] = connections.AsyncConnection,
) -> tuple[connections.AsyncConnection[TupleRow], bool]:
    """Open an autocommit connection, with the limit of a connect for each answer.

    Also return whether it leads to the server directly.
    A pooler gives its clients an invented process number. It may give each transaction another session: then a
    session's settings, prepared statements and LISTEN are lost, or other clients get them.
    """
    seconds = settings.connect_timeout_seconds
    connection = await connections.connect_async(
        dsn, purpose=purpose, connect_timeout_seconds=seconds, answer_seconds=seconds, kind=kind
    )
    try:
        cursor = await connection.execute(sql.BACKEND_PID, prepare=False)
        ((pid,),) = await cursor.fetchall()
    except BaseException:
        await connection.close()
        raise
    return connection, pid == connection.info.backend_pid


async def keeps_session(connection: psycopg.AsyncConnection[TupleRow], dsn: str, settings: Settings) -> bool:
    """Whether a pooler gives this connection one session, as far as can be determined.

    Then two open connections never have the same session. If the second one is refused, the answer is no.
    """
    try:
        other, _ = await connect(dsn, settings, purpose="listen")
    except (psycopg.OperationalError, OSError):
        return False
    try:
        pids: list[set[int]] = [set(), set()]
        for _ in range(_POOLER_TRIALS):
            for mine, met in zip((connection, other), pids, strict=True):
                cursor = await mine.execute(sql.BACKEND_PID, prepare=False)
                met.update(pid for (pid,) in await cursor.fetchall())
    finally:
        await other.close()
    return len(pids[0]) == len(pids[1]) == 1 and pids[0] != pids[1]


async def prepare_session(
    connection: psycopg.AsyncConnection[TupleRow], settings: Settings, prepare: LiteralString | None = None
) -> None:
    """Set pgoutbox's own settings, independent of the role's defaults, on a direct connection; close it on failure.

    Raises `CopyError` in a copy of the database, and `OldPackageError` for a package that is too old for the schema.
    """
    if prepare is None:
        connection.prepare_threshold = 1
    try:
        with refusals():
            await connection.execute(prepare or sql.PREPARE_SESSION, session_parameters(settings), prepare=False)
    except BaseException:
        await connection.close()
        raise


def session_parameters(settings: Settings) -> dict[str, object]:
    """Return the parameters of the statements that prepare a session or a transaction."""
    return {
        "deployment": settings.deployment,
        "package": PACKAGE_VERSION,
        "statement_timeout": f"{int(settings.statement_timeout_seconds * 1000)}ms",
        "lock_timeout": f"{int(settings.lock_timeout_seconds * 1000)}ms",
        "transaction_timeout": f"{int(_deadline_of(settings) * 1000)}ms",
    }


def _deadline_of(settings: Settings) -> float:
    """Return the seconds after which a connection that has not answered is closed."""
    return settings.statement_timeout_seconds + settings.connect_timeout_seconds


def kind_of(error: BaseException) -> str:
    """Return the type and the SQLSTATE of an error for the log, without its text, which may quote values."""
    return f"{type(error).__name__} {getattr(error, 'sqlstate', None) or ''}".rstrip()


def is_transient_error(error: BaseException) -> bool:
    """Whether the same statement may succeed later: the server or the connection is at fault, not the statement."""
    if isinstance(error, (TimeoutError, ConnectionError, psycopg.InterfaceError)):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError)
    return error.sqlstate in _PASSING_SQLSTATES or error.sqlstate.startswith(_PASSING_CLASSES)


def is_refusal(error: BaseException) -> bool:
    """Whether the server has answered with this error, and so has rolled the statement back.

    A session that is terminated while it waits for a standby has still committed.
    """
    sqlstate = error.sqlstate if isinstance(error, psycopg.Error) else None
    return sqlstate is not None and not sqlstate.startswith(("08", "57P"))


def is_lost_key(error: BaseException) -> bool:
    """Whether two workers conflicted at one key, and the other one has it, or the clock has given a claim's time again.

    During a concurrent rebuild of an index, by REINDEX or a tool, another index of any name takes its place.
    """
    return isinstance(error, psycopg.errors.UniqueViolation) and error.diag.table_name in {"message_live", "claim"}


async def is_unreachable(error: psycopg.Error | OSError, dsn: str, settings: Settings) -> bool:
    """Whether a first connection failed because the server is down, starting, full or a standby: that may pass.

    A copy also counts: it may be adopted. Raises `ConfigurationError` if libpq refuses the value of an option.

    The driver gives no SQLSTATE for a refused connection. libpq's ping shows that a server is down or starting, but
    answers the same for a refusal of TLS. Only the text shows that it is full or a standby: in another language than
    English it counts as a permanent refusal.
    """
    if not is_transient_error(error):
        return False
    if isinstance(error, (CopyError, TimeoutError)):
        return True
    if not isinstance(error, psycopg.OperationalError) or error.sqlstate is not None:
        return True
    if _may_pass(error):
        return True
    if is_tls_refusal(str(error)):
        return False
    conninfo = make_conninfo(dsn, connect_timeout=math.ceil(settings.connect_timeout_seconds)).encode()
    match await asyncio.to_thread(pq.PGconn.ping, conninfo):
        case pq.Ping.NO_ATTEMPT:
            variable = "PGOUTBOX_DSN" if dsn == settings.require_dsn() else "PGOUTBOX_LISTEN_DSN"
            raise ConfigurationError(f"{variable}: {_refused_option(conninfo)}") from error
        case pq.Ping.REJECT | pq.Ping.NO_RESPONSE:
            return True
    # It is up now, but may have been down at the first refusal: connect again.
    try:
        connection, _ = await connect(dsn, settings, purpose="start")
    except psycopg.OperationalError as again:
        return _may_pass(again)
    await connection.close()
    return True


def _refused_option(conninfo: bytes) -> str:
    """Return libpq's reason, which it gives before it looks for the host."""
    refused = pq.PGconn.connect_start(conninfo)
    try:
        return one_line(refused.get_error_message())
    finally:
        refused.finish()


def _may_pass(error: psycopg.OperationalError) -> bool:
    return any(words in str(error) for words in _PASSING_REFUSALS)
