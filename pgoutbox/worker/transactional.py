"""Transactional handlers: the handler's own writes and the completion of its message commit together.

The worker opens the transaction before the handler, so that the driver's own `transaction()` makes a savepoint in it,
and `commit()` raises. The completion is the last statement and is fenced like any other. If the attempt no longer holds
its message, all writes of the handler are rolled back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, Final, LiteralString

import psycopg
import psycopg_pool
from psycopg import sql
from psycopg.rows import TupleRow

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.connections import AsyncConnection, Connection, conninfo_for
from pgoutbox.database.store import Store, complete_within, complete_within_sync, name_session
from pgoutbox.errors import LeaseLostError
from pgoutbox.handlers import SyncContext
from pgoutbox.message import Message, Outcome, Sent, Transient
from pgoutbox.settings import Settings
from pgoutbox.worker.attempt import ALREADY_FINISHED, Attempt, AttemptResult, Work
from pgoutbox.worker.dispatcher import Dispatcher, in_thread, outcome_of_error

# Session settings of one handler must not reach the next one.
_FORGET: Final[LiteralString] = "RESET ROLE; RESET ALL"
# Time for a statement that was cancelled by the handler's timeout to end; after that its connection is broken.
_CANCEL_SECONDS: Final = 1.0


class _NotSentError(Exception):
    """Carries an outcome other than sent out of the transaction, and rolls it back."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


class Transactions:
    """Runs transactional handlers on pooled connections, which are opened when the first one runs."""

    def __init__(self, settings: Settings, store: Store, dispatcher: Dispatcher, threads: Executor) -> None:
        self._settings = settings
        self._store = store
        self._dispatcher = dispatcher
        self._threads = threads
        self._pool: psycopg_pool.AsyncConnectionPool[AsyncConnection[TupleRow]] | None = None
        self._sync_pool: psycopg_pool.ConnectionPool[Connection[TupleRow]] | None = None
        # For pgoutbox's own statements. A handler's statement may take as long as its handler.
        self._answer_seconds = settings.statement_timeout_seconds + settings.connect_timeout_seconds

    async def run(self, work: Work) -> Sequence[AttemptResult]:
        """Run one attempt of one message in a transaction of its own. Any outcome but `Sent` rolls it back."""
        (attempt,) = work
        try:
            if attempt.handler.is_async:
                await self._run_async(attempt)
            else:
                await self._run_in_thread(attempt)
        except _NotSentError as not_sent:
            return (not_sent.outcome,)
        except BaseException as error:  # noqa: BLE001 - a refused commit is the outcome of this attempt
            return (outcome_of_error(attempt.handler, error),)
        return (ALREADY_FINISHED,)

    async def _run_async(self, attempt: Attempt) -> None:
        pool = await self._open_pool()
        async with pool.connection() as connection:
            attempt.connection = connection
            message = attempt.message
            forgets = await self._store.forgets_sent((message.topic,))
            async with connection.transaction():
                await connection.execute(_name_of(attempt))
                await attempt.pass_gate()  # The connection and its first statements may have taken long.
                with self._lent(connection, attempt):
                    (outcome,) = await self._dispatcher.run((attempt,))
                _require_sent(outcome, connection, attempt)
                if not await complete_within(connection, attempt.token, worker=self._store.worker, forgets=forgets):
                    raise _lost(message)

    async def _run_in_thread(self, attempt: Attempt) -> None:
        pool = self._open_sync_pool()
        loop = asyncio.get_running_loop()
        handler = attempt.handler
        message = handler.parse(attempt.message)
        forgets = await self._store.forgets_sent((message.topic,))

        def work() -> None:
            with pool.connection() as connection, connection.transaction():
                connection.execute(_name_of(attempt))
                if attempt.is_in_doubt(elapsed_clock()):
                    asyncio.run_coroutine_threadsafe(attempt.pass_gate(), loop).result()
                with self._lent(connection, attempt):
                    result = handler.function(message, SyncContext(attempt, loop, connection))
                conclusion = self._dispatcher.conclude(attempt, message, result)
                outcome = asyncio.run_coroutine_threadsafe(conclusion, loop).result()
                _require_sent(outcome, connection, attempt)
                if not complete_within_sync(connection, attempt.token, worker=self._store.worker, forgets=forgets):
                    raise _lost(message)

        await in_thread(self._threads, work)

    @contextlib.contextmanager
    def _lent(self, connection: AsyncConnection[TupleRow] | Connection[TupleRow], attempt: Attempt) -> Iterator[None]:
        """Set the statement timeout: the handler's own statements may take as long as the handler."""
        limit = attempt.handler.timeout_seconds or self._settings.handler_timeout_seconds
        connection.answer_seconds = None if limit is None else limit + _CANCEL_SECONDS
        try:
            yield
        finally:
            connection.answer_seconds = self._answer_seconds

    async def _open_pool(self) -> psycopg_pool.AsyncConnectionPool[AsyncConnection[TupleRow]]:
        if self._pool is None:

            async def reset(connection: AsyncConnection[TupleRow]) -> None:
                await connection.set_autocommit(True)
                await connection.execute(_FORGET)
                await connection.set_autocommit(False)

            async def configure(connection: AsyncConnection[TupleRow]) -> None:
                connection.answer_seconds = self._answer_seconds
                await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)

            self._pool = psycopg_pool.AsyncConnectionPool(
                conninfo_for(
                    self._settings.require_dsn(),
                    purpose="handler",
                    connect_timeout_seconds=self._settings.connect_timeout_seconds,
                ),
                connection_class=AsyncConnection[TupleRow],
                configure=configure,
                reset=reset,
                check=psycopg_pool.AsyncConnectionPool.check_connection,
                open=False,
                **_pool_options(self._settings),
            )
            await self._pool.open()
        return self._pool

    def _open_sync_pool(self) -> psycopg_pool.ConnectionPool[Connection[TupleRow]]:
        if self._sync_pool is None:

            def reset(connection: Connection[TupleRow]) -> None:
                connection.autocommit = True
                connection.execute(_FORGET)
                connection.autocommit = False

            def configure(connection: Connection[TupleRow]) -> None:
                connection.answer_seconds = self._answer_seconds
                connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)

            self._sync_pool = psycopg_pool.ConnectionPool(
                conninfo_for(
                    self._settings.require_dsn(),
                    purpose="handler",
                    connect_timeout_seconds=self._settings.connect_timeout_seconds,
                ),
                connection_class=Connection[TupleRow],
                configure=configure,
                reset=reset,
                check=psycopg_pool.ConnectionPool.check_connection,
                open=True,
                **_pool_options(self._settings),
            )
        return self._sync_pool

    async def close(self) -> None:
        """Close the pooled connections."""
        if self._pool is not None:
            await self._pool.close()
        if self._sync_pool is not None:
            await asyncio.to_thread(self._sync_pool.close)


def _name_of(attempt: Attempt) -> sql.Composed:
    """Return the statement that names the transaction. After it, a handler can still set the isolation level."""
    name = name_session(attempt.message.id, attempt.attempt_count)
    return sql.SQL("SET LOCAL application_name TO {}").format(name)


def _pool_options(settings: Settings) -> dict[str, Any]:
    return {
        "kwargs": {"prepare_threshold": None} if settings.pooled else {},
        "min_size": 0,
        "max_size": settings.concurrency,
        "timeout": settings.connect_timeout_seconds,
    }


def _require_sent(
    outcome: Outcome, connection: psycopg.AsyncConnection[TupleRow] | psycopg.Connection[TupleRow], attempt: Attempt
) -> None:
    """Raise unless the attempt's message may be completed on its handler's connection."""
    if not isinstance(outcome, Sent):
        raise _NotSentError(outcome)
    match connection.info.transaction_status:
        case psycopg.pq.TransactionStatus.INERROR:
            raise _NotSentError(Transient("the handler returned with its transaction aborted; nothing was committed"))
        case psycopg.pq.TransactionStatus.IDLE:
            raise _NotSentError(Transient("the handler ended its transaction, by COMMIT or ROLLBACK as a statement"))
    if attempt.done:
        raise _lost(attempt.message)


def _lost(message: Message[object]) -> LeaseLostError:
    return LeaseLostError(
        f"message {message.id}, attempt {message.attempt_count}: lost; the handler's writes are rolled back"
    )
