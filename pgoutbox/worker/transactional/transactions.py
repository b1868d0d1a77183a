"""Transactional handlers: the handler's own writes and the completion of its message commit together.

The worker opens the transaction before the handler, so that the driver's own `transaction()` makes a savepoint in it,
and `commit()` raises. The completion is the last statement and is fenced like any other. If the attempt no longer holds
its message, all writes of the handler are rolled back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from pgoutbox.database import sql
from pgoutbox.database.connections import LentAsyncConnection, LentConnection
from pgoutbox.database.round_trip import Step
from pgoutbox.database.store import Store, fence, name_session
from pgoutbox.errors import LeaseLostError
from pgoutbox.kernel import statements
from pgoutbox.message import Message, Outcome, Sent, Snooze, Transient
from pgoutbox.observability.events import Telemetry
from pgoutbox.settings import Settings
from pgoutbox.text import describe
from pgoutbox.worker.attempt import ALREADY_FINISHED, Attempt, AttemptResult, Work
from pgoutbox.worker.dispatcher import Dispatcher, outcome_of_error
from pgoutbox.worker.threads import thread_owner
from pgoutbox.worker.transactional.handler_session import HandlerSession
from pgoutbox.worker.transactional.handler_sessions import PATIENCE_SECONDS, HandlerSessions, NoSessionError

# Time for a statement that was cancelled by the handler's timeout to end; after that its connection is broken.
_CANCEL_SECONDS: Final = 1.0
# The pause of a message without a connection. It lets other messages pass.
_PAUSE_SECONDS: Final = (1.0, 3.0)
_ENDED_ITS_TRANSACTION: Final = "the handler ended its transaction, by COMMIT or ROLLBACK as a statement"
_NOT_SENT: Final = {
    TransactionStatus.INERROR: "the handler returned with its transaction aborted; nothing was committed",
    TransactionStatus.IDLE: _ENDED_ITS_TRANSACTION,
    TransactionStatus.ACTIVE: "the handler returned before its last statement had ended; nothing was committed",
    TransactionStatus.UNKNOWN: "the connection of the handler is closed; nothing was committed",
}


class Transactions:
    """Runs each transactional handler in a transaction of its own."""

    def __init__(self, settings: Settings, store: Store, dispatcher: Dispatcher, telemetry: Telemetry) -> None:
        self._settings = settings
        self._store = store
        self._dispatcher = dispatcher
        self._sessions = HandlerSessions(settings, telemetry)

    async def run(self, work: Work) -> Sequence[AttemptResult]:
        """Run one attempt of one message in a transaction of its own. Any outcome but `Sent` rolls it back.

        What happens before the handler begins uses up no attempt.
        """
        (attempt,) = work
        slot = thread_owner.get()
        slot.pause_timeout()
        try:
            topics = await self._store.forgotten_topics(within_seconds=PATIENCE_SECONDS)
            forgets = not topics.isdisjoint((attempt.message.topic, "*"))
            session = await self._sessions.begin(_name_of(attempt))
        except (NoSessionError, psycopg.Error, OSError) as error:
            return (Snooze(random.uniform(*_PAUSE_SECONDS), f"not begun, no connection: {describe(error)}"),)
        finally:
            slot.restart_timeout()
        is_ended = False
        try:
            result = await self._run_in(session, attempt, forgets=forgets)
            is_ended = True
        finally:
            if not is_ended:
                self._sessions.abandon(session)
        self._sessions.put_back(session)
        return (result,)

    async def _run_in(self, session: HandlerSession, attempt: Attempt, *, forgets: bool) -> AttemptResult:
        """Run the attempt, and end the transaction. A cancellation passes through with the transaction open."""
        outcome: Outcome
        limit = attempt.handler.timeout_seconds or self._settings.handler_timeout_seconds
        try:
            await attempt.pass_gate()  # The wait for the session may have taken long.
            # The handler's own statements may take as long as the handler.
            answer_seconds = None if limit is None else limit + _CANCEL_SECONDS
            if attempt.handler.is_async:
                with session.lent(LentAsyncConnection[TupleRow], answer_seconds) as attempt.connection:
                    (outcome,) = await self._dispatcher.run((attempt,))
            else:
                with session.lent(LentConnection[TupleRow], answer_seconds) as attempt.sync_connection:
                    (outcome,) = await self._dispatcher.run((attempt,))
            if isinstance(outcome, Sent):
                await self._complete(session, attempt, forgets=forgets)
                return ALREADY_FINISHED
        except BaseException as error:  # noqa: BLE001 - a refused commit is the outcome of this attempt
            outcome = outcome_of_error(attempt.handler, error)
        try:
            await session.roll_back()
        except (psycopg.Error, OSError):
            session.close()
        return outcome

    async def _complete(self, session: HandlerSession, attempt: Attempt, *, forgets: bool) -> None:
        """Finish the attempt as sent and commit. Raise an error if the attempt does not hold its message."""
        if attempt.done:
            raise _lost(attempt.message)
        if session.status != TransactionStatus.INTRANS:
            raise Transient(_NOT_SENT[session.status])
        name = _name_of(attempt)
        token = attempt.token
        complete: Step = (
            sql.COMPLETE_IF_HELD,
            {
                "name": name,
                "id": token.id,
                "attempt_count": token.attempt_count,
                "worker": self._store.worker,
                "claimed_at": token.claimed_at,
            },
        )
        try:
            if forgets and await session.fetch(
                # It would skip a locked row. PostgreSQL sees a deadlock with the handler's own locks, and ends it.
                [
                    (sql.WAIT_FOR_MESSAGE, {"id": token.id}),
                    (statements.FORGET_SENT, fence([token], self._store.worker)),
                ]
            ):
                complete = (sql.REQUIRE_COMPLETION, {"name": name, "count": 1})
            await session.commit(complete)
        except psycopg.Error as error:
            match error.sqlstate:
                case "OB002":
                    raise Transient(f"{_ENDED_ITS_TRANSACTION}, or all settings, by RESET ALL") from None
                case "OB003":
                    raise _lost(attempt.message) from None
            raise

    async def close(self) -> None:
        """Close the sessions."""
        await self._sessions.close()


def _name_of(attempt: Attempt) -> str:
    return name_session(attempt.message.id, attempt.attempt_count)


def _lost(message: Message[object]) -> LeaseLostError:
    return LeaseLostError(
        f"message {message.id}, attempt {message.attempt_count}: lost; the handler's writes are rolled back"
    )
