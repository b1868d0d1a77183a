"""One pass of a worker in the open transaction of somebody else's connection, which it never commits.

The parts and the statements are those of a worker. Claims, handlers and finishes alternate, each in a savepoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Final, LiteralString, cast

import psycopg
from psycopg.pq.abc import PGconn
from psycopg.rows import TupleRow

from pgoutbox.database.connections import LentConnection
from pgoutbox.database.round_trip import Step
from pgoutbox.database.store import Store
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.encryption import keyring_of
from pgoutbox.errors import ConfigurationError
from pgoutbox.handlers import Middleware, handled_by
from pgoutbox.observability.events import Telemetry
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings
from pgoutbox.testing.driver import without_patience
from pgoutbox.transports import Transport
from pgoutbox.worker.alert import handlers_of
from pgoutbox.worker.attempt import Attempt
from pgoutbox.worker.breakers.circuit_breakers import CircuitBreakers
from pgoutbox.worker.dispatcher import Dispatcher
from pgoutbox.worker.executor import AttemptExecutor
from pgoutbox.worker.kernel_run import KernelAttempts, kernel_of, refuses
from pgoutbox.worker.leases import LeaseKeeper
from pgoutbox.worker.loader import Loader
from pgoutbox.worker.outcomes import Outcomes
from pgoutbox.worker.payloads import LargeTexts
from pgoutbox.worker.pool import AttemptPool
from pgoutbox.worker.queues import Turns, parse_queues
from pgoutbox.worker.run_state import RunState
from pgoutbox.worker.threads import AttemptThreads
from pgoutbox.worker.transactional.handler_session import HandlerSession
from pgoutbox.worker.transactional.handler_sessions import HandlerSessions
from pgoutbox.worker.transactional.transactions import Transactions

_log = logging.getLogger("pgoutbox.worker")

_CLOSED: Final = "driver: a handler has closed the connection of the test"
# The worker's statements change these up to the end of their transaction, which is the caller's here.
_SETTINGS: Final = "SELECT current_setting('lock_timeout'), current_setting('application_name')"
_SET: Final = "SELECT set_config('lock_timeout', %s, true), set_config('application_name', %s, true)"


async def run_pass(
    connection: psycopg.Connection,
    outbox: Outbox,
    settings: Settings,
    *,
    queues: Sequence[str],
    transports: Mapping[str, Transport],
    middlewares: Sequence[Middleware],
    threads: Executor,
) -> None:
    """Deliver the due messages of these queues, one after the other, on a connection that `borrow` returned.

    Plain functions run in `threads`.
    """
    settings = settings.model_copy(update={"concurrency": 1})
    handlers = without_patience(handlers_of(outbox, settings))
    hooks = {topic: handlers[hook].retry.max_attempts for topic, hook in outbox.hooks.items()}
    run = RunState(
        settings,
        _BorrowingStore(connection, settings, hooks=hooks),
        Telemetry(_log),
        queues=Turns(parse_queues(queues)),
        topics=handled_by(handlers),
        stopping=asyncio.Event(),
    )
    breakers = CircuitBreakers(run, transports)
    outcomes = Outcomes(run, breakers)
    # Without breakers: their pauses would never end in one transaction.
    attempt_threads = AttemptThreads(inner=threads)
    executor = AttemptExecutor(
        run,
        transports,
        middleware=middlewares,
        on_outcome=outcomes.collect,
        threads=attempt_threads,
        transactions=_Savepoints,
    )
    keyring = keyring_of(settings.encryption_keys)
    texts = LargeTexts(run, keyring=keyring)
    pool = AttemptPool(run, executor.run, large_texts=texts, on_outcome=outcomes.collect)
    keeper = LeaseKeeper(run, pool)
    loader = Loader(run, handlers, keyring=keyring, pool=pool, outcomes=outcomes, lease_keeper=keeper)
    attempts = _Attempts(run, outcomes, pool=pool, loader=loader, breakers=breakers)
    hold_topics = [topic for topic, handler in handlers.items() if handler.on_unknown == "hold"]
    kernel = kernel_of(run, attempts, _Alternating(run, pool), hold_topics=hold_topics, handle_error=_raise)
    try:
        await kernel.run_once()
        await attempts.write_last(kernel)
    finally:
        await pool.stop()
        await breakers.close()
        await executor.close()
        attempt_threads.shutdown(wait=False, cancel_futures=True)


async def _raise(error: BaseException) -> None:
    raise error


async def _until_idle(run: RunState, pool: AttemptPool) -> None:
    """Wait for the handlers: a statement of the worker while one runs would be in the savepoint of the handler."""
    while pool.open_count:
        run.progress.clear()
        await run.progress.wait()


class _Attempts(KernelAttempts):
    async def forgotten(self, ended: Sequence[Attempt]) -> Sequence[Attempt]:
        """See `Attempts`."""
        await _until_idle(self._run, self.pool)
        return await super().forgotten(ended)


class _Alternating:
    """The kernel's link."""

    def __init__(self, run: RunState, pool: AttemptPool) -> None:
        self._run = run
        self._pool = pool

    async def trip(self, steps: Sequence[Step]) -> list[list[TupleRow]]:
        """See `Link`."""
        await _until_idle(self._run, self._pool)
        return await self._run.store.claims.trip(steps)

    def abandon(self) -> None:
        """See `Link`. An error ends the pass."""

    def refuses(self, error: BaseException) -> bool:
        """See `Link`."""
        return refuses(error)


def borrow(connection: psycopg.Connection[Any]) -> psycopg.Connection:
    """Return the connection as psycopg alone makes it: the cursors and adapters of its owner do not matter.

    Threads may use both, one after the other.
    """
    borrowed = LentConnection[TupleRow](connection.pgconn)
    borrowed.lock = connection.lock
    borrowed.prepare_threshold = None  # The owner's statements and these would get the same names.
    return borrowed


class _BorrowingStore(Store):
    def __init__(self, connection: psycopg.Connection, settings: Settings, *, hooks: Mapping[str, int]) -> None:
        self.borrowed = connection
        super().__init__(settings, worker=f"test:{secrets.token_hex(4)}", hooks=hooks)

    def new_connection(self, purpose: str, *, spare: WorkerConnection | None = None) -> WorkerConnection:  # noqa: ARG002
        link = _Link(self._settings.require_dsn(), self._settings, purpose=purpose)
        link.borrowed = self.borrowed
        return link


class _Link(WorkerConnection):
    """Runs statements on the borrowed connection. It blocks the event loop: no other task has work meanwhile."""

    borrowed: psycopg.Connection

    async def trip(self, steps: Sequence[Step]) -> list[list[TupleRow]]:
        if self.borrowed.closed:  # The parts of a worker would wait for the server.
            raise ConfigurationError(_CLOSED)
        with _savepoint(self.borrowed):
            cursors = [self.borrowed.execute(*step) for step in steps]
            return [cursor.fetchall() if cursor.description else [(cursor.rowcount,)] for cursor in cursors]


class _Savepoints(Transactions):
    """Runs each transactional handler in a savepoint."""

    def __init__(self, run: RunState, dispatcher: Dispatcher) -> None:
        super().__init__(run, dispatcher)
        self._sessions = _SavepointSessions(run)


class _SavepointSessions(HandlerSessions):
    def __init__(self, run: RunState) -> None:
        super().__init__(run)
        self._store = cast("_BorrowingStore", run.store)

    async def begin(self, name: str) -> HandlerSession:  # noqa: ARG002
        return _SavepointSession(self._store.borrowed)

    def put_back(self, session: HandlerSession) -> None:
        """Its savepoint has ended."""

    def abandon(self, session: HandlerSession) -> None:
        session.close()


class _SavepointSession(HandlerSession):
    """A savepoint in the open transaction of the borrowed connection."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._borrowed = connection
        self._savepoint = _savepoint(connection)
        self._savepoint.__enter__()
        (self._role,) = connection.execute("SELECT current_setting('role')").fetchone() or ("none",)
        connection.execute("SET LOCAL pgoutbox.is_of_worker TO true")

    @property
    def pgconn(self) -> PGconn:
        return self._borrowed.pgconn

    async def run(self, text: LiteralString) -> None:
        self._borrowed.execute(text)
        self._return_to_role()

    def _return_to_role(self) -> None:
        self._borrowed.execute("SELECT set_config('role', %s, true)", [self._role])

    async def fetch(self, steps: Sequence[Step]) -> list[TupleRow]:
        self._return_to_role()
        return [self._borrowed.execute(*step).fetchall() for step in steps][-1]

    async def commit(self, statement: Step) -> None:
        await self.fetch([statement])
        self._savepoint.__exit__(None, None, None)

    async def roll_back(self) -> None:
        self.close()

    def close(self) -> None:
        self._savepoint.__exit__(psycopg.Rollback, psycopg.Rollback(), None)


@contextlib.contextmanager
def _savepoint(connection: psycopg.Connection) -> Iterator[psycopg.Connection]:
    with connection.transaction():
        kept = connection.execute(_SETTINGS).fetchone()
        yield connection
        connection.execute(_SET, kept)
