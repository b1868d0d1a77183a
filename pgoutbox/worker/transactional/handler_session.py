"""A session of transactional handlers: it begins a transaction, lends itself, and ends the transaction.

Nothing that a handler leaves in it reaches the next one. Statements are never prepared, because behind a pooler another
client would meet them under the same names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final, LiteralString, TypeVar

import psycopg
from psycopg.pq import Escaping, PGconn, TransactionStatus, abc
from psycopg.rows import TupleRow

from pgoutbox.database import sql
from pgoutbox.database.connections import AsyncConnection, LentAsyncConnection, LentConnection, break_socket
from pgoutbox.database.round_trip import Pipeline, Step
from pgoutbox.database.server import refusals
from pgoutbox.database.worker_connection import open_session, session_parameters
from pgoutbox.settings import Settings

_TRANSACTION_TIMEOUT_SINCE: Final = 170_000
# What a client may set at its start. A pooler remembers these for each client, and forgets them at RESET ALL.
_CLIENT_SETTINGS: Final = ("client_encoding", "TimeZone", "DateStyle", "IntervalStyle", "application_name")

L = TypeVar("L", LentAsyncConnection[TupleRow], LentConnection[TupleRow])


class HandlerSession:
    """Use `open`. Each of its own statements has a deadline; an error of one leaves the session to `close`."""

    def __init__(self, connection: AsyncConnection[TupleRow], settings: Settings, *, is_pooled: bool) -> None:
        self._connection = connection
        self._trips = Pipeline(connection, prepares=False)
        self._parameters = session_parameters(settings)
        self._answer_seconds = settings.statement_timeout_seconds + settings.connect_timeout_seconds
        connection.answer_seconds = self._answer_seconds
        self.is_pooled = is_pooled
        self._discard_pooled = ";".join([sql.DISCARD_POOLED, *_settings_of(self.pgconn), sql.COMMIT]).encode()
        self.was_idle = False
        """Whether it has been idle between two handlers."""
        self.idle_since = 0.0
        self.begun_at = 0.0

    @classmethod
    async def open(cls, settings: Settings) -> HandlerSession:
        """Connect. Raises `CopyError` in a copy of the database, and the errors of the driver."""
        connection, is_pooled = await open_session(
            settings.require_dsn(),
            settings,
            purpose="handler",
            prepare=sql.REQUIRE_HOME,
            kind=LentAsyncConnection[TupleRow],
        )
        return cls(connection, settings, is_pooled=is_pooled)

    @property
    def pgconn(self) -> abc.PGconn:
        """The connection of libpq."""
        return self._connection.pgconn

    @property
    def is_free(self) -> bool:
        """Whether it is open and without a transaction, as far as is known."""
        return self.status == TransactionStatus.IDLE

    @property
    def status(self) -> TransactionStatus:
        """The status of its transaction, also if a handler changed it."""
        return TransactionStatus(self.pgconn.transaction_status)

    async def begin(self, name: str, *, seconds: float) -> None:
        """Begin the transaction of attempts under this name, with a deadline of `seconds`."""
        text = f"{sql.BEGIN_FOR_HANDLER};SET LOCAL application_name TO '{name}'"
        if self._connection.info.server_version >= _TRANSACTION_TIMEOUT_SINCE:
            text += ";SET LOCAL transaction_timeout TO 0"
        self._connection.answer_seconds = seconds
        await self._trips.run(text.encode())
        self._connection.answer_seconds = self._answer_seconds

    @contextlib.contextmanager
    def lent(self, kind: type[L], answer_seconds: float | None) -> Iterator[L]:
        """Return the connection as a handler of this kind sees it. Afterwards it is closed for the handler.

        It is a new object, so that adapters or row factories of one handler do not reach the next one. There may be
        only one, because it gets the notices of the connection of libpq.
        """
        lent = kind(self.pgconn)
        lent.prepare_threshold = None
        lent.answer_seconds = answer_seconds
        try:
            yield lent
        finally:
            lent.pgconn = PGconn()

    async def fetch(self, steps: Sequence[Step]) -> list[TupleRow]:
        """Run these steps in the transaction as the worker's role, and return the rows of the last one."""
        return (await self._trips.fetch([(sql.RESET_ROLE, {}), *steps]))[-1]

    async def run(self, text: LiteralString) -> None:
        """Run a statement without rows, such as that of a savepoint, in the transaction.

        Raises an error if the handler has ended the transaction.
        """
        await self._trips.run(text.encode())

    async def commit(self, statement: Step) -> None:
        """Run the last statement and commit, in one message to the server. Raises the error of either."""
        checks: list[Step] = [(sql.CHECK_CONSTRAINTS, {})] if self.is_pooled else []
        await self._end([(sql.RESET_ROLE, {}), statement, *checks], sql.COMMIT, sql.COMMIT_AND_CHAIN)

    async def roll_back(self) -> None:
        """Roll the transaction back."""
        await self._end([], sql.ROLLBACK, sql.ROLLBACK_AND_CHAIN)

    async def require_home(self, *, seconds: float) -> None:
        """Raise `CopyError` in a copy of the database, and `AnswerTimeoutError` without an answer in time."""
        self._connection.answer_seconds = seconds
        with refusals():
            await self._trips.fetch([(sql.REQUIRE_HOME, self._parameters)])

    async def _end(self, steps: Sequence[Step], end: LiteralString, end_and_chain: LiteralString) -> None:
        if not self.is_pooled:
            await self._trips.fetch([*steps, (end, {})], finally_run=sql.DISCARD_SESSION)
            return
        await self._trips.fetch([*steps, (end_and_chain, {})])
        # The transaction has ended, whatever happens from here on.
        try:
            await self._trips.run(self._discard_pooled)
        except (psycopg.Error, OSError):
            self.close()

    def close(self) -> None:
        """Close the connection. No thread may use it."""
        self.pgconn.finish()

    def abandon(self) -> None:
        """End the session, which a thread may still use: the last one that has it closes it."""
        break_socket(self._connection)


def _settings_of(pgconn: abc.PGconn) -> list[str]:
    """Return statements that repeat the present settings of the client."""
    values = [(name, pgconn.parameter_status(name.encode())) for name in _CLIENT_SETTINGS]
    escape = Escaping(pgconn).escape_literal
    return [f"SET {name} TO {bytes(escape(value)).decode()}" for name, value in values if value is not None]
