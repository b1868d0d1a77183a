"""Transactional handlers: the handler's own writes and the completion of its messages commit together.

The worker opens the transaction before the handler, so that the driver's own `transaction()` makes a savepoint in it,
and `commit()` raises. The completion is the last statement and is fenced like any other. If an attempt no longer holds
its message, its writes are rolled back.

A transaction has one message, or one batch, or several messages, each in a savepoint. If the server refuses to commit
several messages, it does not say which one is at fault, so each half of them is tried again.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Final, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from pgoutbox.database import sql
from pgoutbox.database.connections import LentAsyncConnection, LentConnection
from pgoutbox.database.round_trip import Step
from pgoutbox.database.store import fence, name_session, name_shared_session
from pgoutbox.database.worker_connection import is_refusal
from pgoutbox.errors import LeaseLostError
from pgoutbox.kernel import statements
from pgoutbox.message import Message, Outcome, Permanent, Sent, Skip, Snooze, Transient
from pgoutbox.text import describe
from pgoutbox.worker.attempt import RELEASED, Attempt, Work
from pgoutbox.worker.dispatcher import Dispatcher, halves, outcome_of_error
from pgoutbox.worker.run_state import RunState
from pgoutbox.worker.threads import thread_owner
from pgoutbox.worker.transactional.handler_session import HandlerSession
from pgoutbox.worker.transactional.handler_sessions import PATIENCE_SECONDS, HandlerSessions, NoSessionError

# Time for a statement that was cancelled by the handler's timeout to end; after that its connection is broken.
_CANCEL_SECONDS: Final = 1.0
# The pause of a message without a connection. It lets other messages pass.
_PAUSE_SECONDS: Final = (1.0, 3.0)
_ENDED_ITS_TRANSACTION: Final = "the handler ended its transaction, by COMMIT or ROLLBACK as a statement"
_NO_SAVEPOINT: Final = "3B001"
_NOT_SENT: Final = {
    TransactionStatus.INERROR: "the handler returned with its transaction aborted; nothing was committed",
    TransactionStatus.IDLE: _ENDED_ITS_TRANSACTION,
    TransactionStatus.ACTIVE: "the handler returned before its last statement had ended; nothing was committed",
    TransactionStatus.UNKNOWN: "the connection of the handler is closed; nothing was committed",
}


Outcomes = TypeVar("Outcomes", Sequence[Outcome], list[Outcome] | Permanent | Skip)


class _DividedError(Exception):
    """The server has refused to commit several attempts, and one of them is at fault."""


class Transactions:
    """Runs transactional handlers in transactions."""

    def __init__(self, run: RunState, dispatcher: Dispatcher) -> None:
        self._settings = run.settings
        self._store = run.store
        self._stopping = run.stopping
        self._dispatcher = dispatcher
        self._sessions = HandlerSessions(run)

    async def run(self, work: Work) -> Sequence[Outcome]:
        """Run one attempt of each message. The writes of an attempt with any outcome but `Sent` are rolled back.

        What happens before the handler begins uses up no attempt.
        """
        results: dict[Attempt, Outcome] = {}
        # A session has the name of one claim. After a failover the attempts may have several.
        parts: list[Work] = [list(same) for _, same in groupby(work, key=lambda attempt: attempt.claim)]
        while parts:
            parts[:0] = await self._run_part(parts.pop(0), results)
        return [results[attempt] for attempt in work]

    async def _run_part(self, work: Work, results: dict[Attempt, Outcome]) -> Sequence[Work]:
        """Run these attempts in a transaction. Return those that have no result, in parts to try again."""
        slot = thread_owner.get()
        slot.pause_timeout()
        try:
            topics = await self._store.forgotten_topics(within_seconds=PATIENCE_SECONDS)
            forgets = not topics.isdisjoint((work[0].message.topic, "*"))
            session = await self._sessions.begin(self._name_for(work[0]))
        except (NoSessionError, psycopg.Error, OSError) as error:
            reason = f"not begun, no connection: {describe(error)}"
            results.update((attempt, Snooze(random.uniform(*_PAUSE_SECONDS), reason)) for attempt in work)
            return ()
        finally:
            slot.restart_timeout()
        is_ended = False
        try:
            parts = await self._run_in(session, work, results, forgets=forgets)
            is_ended = True
        finally:
            if not is_ended:
                self._sessions.abandon(session)
        self._sessions.put_back(session)
        return parts

    def _name_for(self, attempt: Attempt) -> str:
        if attempt.handler.max_size is None:
            return name_session(attempt.message.id, attempt.attempt_count)
        return name_shared_session(self._store.worker, attempt.claimed_at)

    async def _run_in(
        self, session: HandlerSession, work: Work, results: dict[Attempt, Outcome], *, forgets: bool
    ) -> Sequence[Work]:
        """Run the attempts, and end the transaction. A cancellation passes through with the transaction open."""
        sent: Work = ()
        parts: Sequence[Work] = ()
        try:
            run = self._run_batch if work[0].handler.is_batch else self._run_each
            sent, parts = await run(session, work, results)
            if sent:
                await self._complete(session, sent, forgets=forgets)
                for attempt in sent:
                    attempt.is_written = True
                    results[attempt] = Sent()
                return parts
        except BaseException as error:  # noqa: BLE001 - a refused commit is the outcome of these attempts
            outcome = outcome_of_error(work[0].handler, error)
            if isinstance(error, _DividedError):
                parts = halves(sent)
            else:
                results.update(dict.fromkeys(sent, outcome))
        try:
            await session.roll_back()
        except (psycopg.Error, OSError):
            session.close()
        if not parts:  # The handler of another message has ended the transaction of these.
            results.update((attempt, RELEASED) for attempt in work if attempt not in results)
        return parts

    async def _run_each(
        self, session: HandlerSession, work: Work, results: dict[Attempt, Outcome]
    ) -> tuple[Work, Sequence[Work]]:
        """Run the handler for one message after the other. Return those that are to be completed."""
        if work[0].handler.max_size is None:
            (attempt,) = work
            outcome = await self._run_one(session, attempt)
            if isinstance(outcome, Sent):
                return work, ()
            results[attempt] = outcome
            return (), ()
        slot = thread_owner.get()
        sent = []
        await session.run(sql.BEGIN_SAVEPOINT)
        for attempt in work:
            if self._stopping.is_set() or not slot.may_begin()():  # Or the handler before it has passed its timeout.
                results[attempt] = RELEASED
                continue
            slot.time((attempt,))
            outcome = await self._run_one(session, attempt)
            try:
                if not isinstance(outcome, Sent):
                    await session.run(sql.UNDO_SAVEPOINT)
                elif attempt is not work[-1]:
                    await session.run(sql.NEXT_SAVEPOINT)
            except (psycopg.Error, OSError) as error:
                if isinstance(outcome, Sent):
                    has_ended = isinstance(error, psycopg.Error) and error.sqlstate == _NO_SAVEPOINT
                    outcome = outcome_of_error(
                        attempt.handler, Transient(_ENDED_ITS_TRANSACTION) if has_ended else error
                    )
                results[attempt] = outcome
                return (), ()
            if isinstance(outcome, Sent):
                sent.append(attempt)
            else:
                results[attempt] = outcome
        slot.time(sent)
        return sent, ()

    async def _run_one(self, session: HandlerSession, attempt: Attempt) -> Outcome:
        try:
            await attempt.pass_gate()  # The wait for the session, or for other messages, may have taken long.
            (outcome,) = await self._call(session, (attempt,), self._dispatcher.run)
        except BaseException as error:  # noqa: BLE001 - as in the dispatcher
            return outcome_of_error(attempt.handler, error)
        return _checked(session, outcome)

    async def _run_batch(
        self, session: HandlerSession, work: Work, results: dict[Attempt, Outcome]
    ) -> tuple[Work, Sequence[Work]]:
        """Call the handler for all messages. Return them if all are sent, else those to try again."""
        slot = thread_owner.get()
        if self._stopping.is_set() or not slot.may_begin()():  # Or the call before it has passed its timeout.
            results.update(dict.fromkeys(work, RELEASED))
            return (), ()
        slot.time(work)
        handed = []
        for attempt in work:
            try:
                await attempt.pass_gate()
            except Snooze as late:
                results[attempt] = outcome_of_error(attempt.handler, late)
            else:
                handed.append(attempt)
        if handed and handed[0].handler.mailing_list is not None:
            refused = await self._dispatcher.lists.refusals(handed)
            results.update(refused)
            handed = [attempt for attempt in handed if attempt not in refused]
        if not handed:
            return (), ()
        outcomes = await self._call(session, handed, self._dispatcher.call_batch)
        if isinstance(outcomes, (Permanent, Skip)):
            return (), halves(handed)
        found = dict(zip(handed, (_checked(session, outcome) for outcome in outcomes), strict=True))
        sent = [attempt for attempt, outcome in found.items() if isinstance(outcome, Sent)]
        if len(sent) == len(handed):
            return sent, ()
        results.update((attempt, outcome) for attempt, outcome in found.items() if attempt not in sent)
        return (), [sent] if sent else ()

    async def _call(
        self, session: HandlerSession, attempts: Work, run: Callable[[Work], Awaitable[Outcomes]]
    ) -> Outcomes:
        """Run the handler of these attempts with the connection of the session."""
        handler = attempts[0].handler
        limit = handler.timeout_seconds or self._settings.handler_timeout_seconds
        # The handler's own statements may take as long as the handler.
        answer_seconds = None if limit is None else limit + _CANCEL_SECONDS
        if handler.is_async:
            with session.lent(LentAsyncConnection[TupleRow], answer_seconds) as connection:
                for attempt in attempts:
                    attempt.connection = connection
                return await run(attempts)
        with session.lent(LentConnection[TupleRow], answer_seconds) as sync_connection:
            for attempt in attempts:
                attempt.sync_connection = sync_connection
            return await run(attempts)

    async def _complete(self, session: HandlerSession, sent: Work, *, forgets: bool) -> None:
        """Finish the attempts as sent and commit. Raise an error if one of them does not hold its message.

        The error is `_DividedError` if it is about one of several attempts.
        """
        try:
            if any(attempt.done for attempt in sent):
                raise _lost(sent[0].message)
            held = fence([attempt.token for attempt in sent], self._store.worker)
            complete: Step = (sql.COMPLETE_IF_HELD, held)
            if forgets:
                # It would skip a locked row. PostgreSQL sees a deadlock with the handler's own locks, and ends it.
                found = await session.fetch(
                    [(sql.WAIT_FOR_MESSAGES, {"ids": held["ids"]}), (statements.FORGET_SENT, held)]
                )
                complete = (sql.REQUIRE_COMPLETION, {"lost_count": len(sent) - len(found)})
            await session.commit(complete)
        except (LeaseLostError, psycopg.Error) as error:
            if len(sent) > 1 and (isinstance(error, LeaseLostError) or is_refusal(error)):
                raise _DividedError from error
            match getattr(error, "sqlstate", None):
                case "OB002":
                    raise Transient(f"{_ENDED_ITS_TRANSACTION}, or all settings, by RESET ALL") from None
                case "OB003":
                    raise _lost(sent[0].message) from None
            raise

    async def close(self) -> None:
        """Close the sessions."""
        await self._sessions.close()


def _checked(session: HandlerSession, outcome: Outcome) -> Outcome:
    """Return the outcome of a handler, or why its messages cannot be completed."""
    if isinstance(outcome, Sent) and session.status != TransactionStatus.INTRANS:
        return Transient(_NOT_SENT[session.status])
    return outcome


def _lost(message: Message[object]) -> LeaseLostError:
    return LeaseLostError(
        f"message {message.id}, attempt {message.attempt_count}: lost; the handler's writes are rolled back"
    )
