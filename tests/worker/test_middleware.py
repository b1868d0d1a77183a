"""Middleware: the application's code around the attempts of its messages."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox import Context, Message, Outbox, Permanent, Sent, Skip, Snooze, SyncContext, Transient
from pgoutbox.errors import ConfigurationError
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker import Worker
from tests.support.outbox_actions import attempts_of, enqueue, reports, row_of, state_of

if TYPE_CHECKING:
    import psycopg

    from pgoutbox.handlers import CallNext
    from pgoutbox.message import Outcome

    Messages = Sequence[Message[Any]]
    Mistake = Callable[[Sequence[Outcome]], Sequence[Outcome]]


async def test_middlewares_surround_the_handler_in_their_order(outbox: Outbox, db: psycopg.Connection) -> None:
    steps: list[str] = []

    @outbox.middleware
    async def outer(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        steps.append("outer")
        outcomes = await call_next()
        steps.append("outer again")
        return outcomes

    @outbox.middleware
    async def inner(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        steps.append(f"inner {[message.id for message in messages]}")
        return await call_next()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        steps.append("handler")

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert steps == ["outer", f"inner [{message_id}]", "handler", "outer again"]
    assert state_of(db, message_id) == "sent"


async def test_a_middleware_sees_the_exception_behind_an_outcome(outbox: Outbox, db: psycopg.Connection) -> None:
    causes: list[BaseException | None] = []

    @outbox.middleware
    async def report(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        outcomes = await call_next()
        causes.extend(outcome.__cause__ for outcome in outcomes if isinstance(outcome, Exception))
        return outcomes

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        raise LookupError("nobody")

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    (cause,) = causes
    assert isinstance(cause, LookupError)
    assert cause.__traceback__ is not None
    assert attempts_of(db, message_id) == [(1, "retry", "LookupError: nobody")]


async def test_a_context_variable_of_a_middleware_reaches_a_handler_in_a_thread(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    tenant: ContextVar[str] = ContextVar("tenant")
    seen: list[tuple[str, bool]] = []

    @outbox.middleware
    async def bind(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        tenant.set(f"tenant of {messages[0].id}")
        return await call_next()

    @outbox.handler("greet")
    def greet(message: Message, ctx: SyncContext) -> None:
        seen.append((tenant.get(), threading.current_thread() is threading.main_thread()))

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert seen == [(f"tenant of {message_id}", False)]


async def test_a_middleware_may_answer_itself_or_change_an_outcome(outbox: Outbox, db: psycopg.Connection) -> None:
    delivered: list[int] = []

    @outbox.middleware
    async def judge(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        if messages[0].topic == "bill":
            return [Skip("bills are off")]
        return [Permanent("gone") if isinstance(o, Transient) else o for o in await call_next()]

    @outbox.handler("bill")
    @outbox.handler("greet")
    async def deliver(message: Message, ctx: Context) -> None:
        delivered.append(message.id)
        raise Transient("busy")

    bill, greet = enqueue(db, "bill"), enqueue(db)
    await Worker(outbox).run_once()
    assert delivered == [greet]
    assert (row_of(db, bill).state, row_of(db, greet).state) == ("skipped", "failed")


async def test_a_batch_has_one_call_with_all_its_messages(outbox: Outbox, db: psycopg.Connection) -> None:
    calls: list[list[int]] = []

    @outbox.middleware
    async def note(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        calls.append([message.id for message in messages])
        return await call_next()

    @outbox.batch_handler("greet")
    async def greet(messages: Sequence[Message], contexts: Sequence[Context]) -> None: ...

    with db.transaction():
        ids = [enqueue(db) for _ in range(3)]
    await Worker(outbox).run_once()
    assert calls == [ids]


async def test_an_exception_before_the_handler_ends_the_attempt_as_one_of_the_handler_would(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    @outbox.middleware
    async def refuse(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        raise ValueError("no tenant")

    @outbox.handler("greet", permanent=[ValueError])
    async def greet(message: Message, ctx: Context) -> None:
        raise AssertionError("must not run")

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert (row_of(db, message_id).state, row_of(db, message_id).last_error) == ("failed", "ValueError: no tenant")


def raises(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    raise ValueError("metrics are down")


def forgets(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    return None  # type: ignore[return-value] # a common mistake


def returns_too_few(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    return []


def returns_something_else(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    return ["sent"]  # type: ignore[list-item] # a common mistake


MISTAKES = [raises, forgets, returns_too_few, returns_something_else]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
async def test_a_mistake_after_the_handler_is_logged_and_the_message_stays_sent(
    outbox: Outbox, db: psycopg.Connection, caplog: pytest.LogCaptureFixture, mistake: Mistake
) -> None:
    @outbox.middleware
    async def measure(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        return mistake(await call_next())

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    message_id = enqueue(db)
    with caplog.at_level(logging.ERROR):
        await Worker(outbox).run_once()
    assert state_of(db, message_id) == "sent"
    assert [getattr(record, "event", None) for record in caplog.records] == ["middleware_failed"]


@pytest.mark.parametrize("mistake", MISTAKES[1:], ids=lambda mistake: mistake.__name__)
async def test_a_middleware_that_answers_wrongly_instead_of_the_handler_costs_an_attempt(
    outbox: Outbox, db: psycopg.Connection, mistake: Mistake
) -> None:
    @outbox.middleware
    async def answer(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        return mistake(())

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        raise AssertionError("must not run")

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    ((_, outcome, error),) = attempts_of(db, message_id)
    assert outcome == "retry"
    assert error is not None
    assert error.startswith("middleware: must return ")


async def test_call_next_can_be_called_once(outbox: Outbox, db: psycopg.Connection) -> None:
    delivered: list[int] = []

    @outbox.middleware
    async def again(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        await call_next()
        return await call_next()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.append(message.id)

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert delivered == [message_id]
    assert state_of(db, message_id) == "sent"


async def test_a_committed_transactional_handler_stays_sent_whatever_a_middleware_says(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    seen: list[Outcome] = []

    @outbox.middleware
    async def snooze(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        seen.extend(await call_next())
        return [Snooze(60)]

    @outbox.handler("greet", transactional=True)
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute("SELECT 1")

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert seen == [Sent()]
    assert state_of(db, message_id) == "sent"


async def test_a_middleware_may_return_the_releases_of_a_worker_that_stops(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    seen: list[Outcome] = []

    @outbox.middleware
    async def note(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        seen.extend(await call_next())
        return seen

    @outbox.handler("greet", transactional=True, max_size=10)
    async def greet(message: Message, ctx: Context) -> None:
        worker.stop()

    worker = Worker(outbox)
    ids = [enqueue(db) for _ in range(3)]
    with reports() as heard:
        await worker.run_once()
    assert isinstance(seen[0], Sent)
    assert [isinstance(outcome, Snooze) for outcome in seen[1:]] == [True, True]
    assert [state_of(db, message_id) for message_id in ids] == ["sent", "pending", "pending"]
    assert LogEvent.MIDDLEWARE_FAILED not in heard.events


async def test_a_timeout_reaches_the_middleware_as_a_cancellation(outbox: Outbox, db: psycopg.Connection) -> None:
    ended: list[str] = []

    @outbox.middleware
    async def clean_up(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
        try:
            return await call_next()
        finally:
            ended.append("clean")

    @outbox.handler("greet", timeout=0.05)
    async def greet(message: Message, ctx: Context) -> None:
        await asyncio.Event().wait()

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert ended == ["clean"]
    assert attempts_of(db, message_id) == [(1, "retry", "timed out after 0.05 s, outcome unknown")]


def test_a_middleware_must_be_async() -> None:
    with pytest.raises(ConfigurationError, match="must be an async function"):

        @Outbox().middleware  # type: ignore[type-var] # a common mistake
        def count(messages: Messages, call_next: CallNext) -> Sequence[Outcome]:
            return []
