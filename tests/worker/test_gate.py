"""Tests the gate: right before the first byte of a hand-over, a message must be held, current and not expired."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Email, Message, Outbox, RetryPolicy, Sent, Snooze
from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import name_session
from pgoutbox.handlers import Context, Handler, SyncContext
from pgoutbox.message import State
from pgoutbox.transports import pass_gate
from pgoutbox.worker import Worker
from pgoutbox.worker.attempt import Attempt, Claim, InFlight
from pgoutbox.worker.transactional import transactions
from tests.support.outbox_actions import (
    attempts_of,
    cancel,
    enqueue,
    expire,
    lapse,
    row_of,
    running,
    settings_for,
    state_of,
)
from tests.support.sends import outgoing
from tests.support.smtp_server import Inbox, accepting_server, mail_settings
from tests.support.waiting import until, wait_until
from tests.support.worker_sql import claim, ids_in_flight, run_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import psycopg

    from pgoutbox.message import Outcome
    from pgoutbox.transports import Content

pytestmark = pytest.mark.slow


class Postcard:
    """A content."""

    scheme = "postcard"


class Post:
    """A transport that waits for its turn, and then hands over at once."""

    schemes = ("postcard",)

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.turn = asyncio.Event()
        self.turn.set()
        self.waiting_count = 0

    async def send(self, message: Message[object], content: Content) -> Outcome:
        self.waiting_count += 1
        await self.turn.wait()
        await pass_gate()
        self.sent.append(message.id)
        return Sent()

    async def aclose(self) -> None: ...


@pytest.fixture
def post() -> Post:
    return Post()


@pytest.fixture
def outbox(dsn: str, post: Post) -> Outbox:
    return Outbox(settings_for(dsn), transports=[post])


def soon() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=1)


def has_expired(db: psycopg.Connection, message_id: int) -> bool:
    ((has_expired,),) = db.execute(
        "SELECT expires_at < clock_timestamp() FROM pgoutbox.message WHERE id = %s", [message_id]
    ).fetchall()
    return bool(has_expired)


@pytest.mark.parametrize("kind", ["async", "sync", "batch", "transactional", "asks itself"])
async def test_a_content_rendered_past_the_expiry_is_not_handed_over(
    outbox: Outbox, db: psycopg.Connection, post: Post, kind: str
) -> None:
    match kind:
        case "sync":

            @outbox.handler("greet")
            def greet_in_thread(message: Message, ctx: SyncContext) -> Postcard:
                wait_until(lambda: has_expired(db, message.id), lambda: "expiry")
                return Postcard()

        case "batch":

            @outbox.batch_handler("greet")
            async def greet_all(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Postcard]:
                await until(lambda: has_expired(db, messages[0].id))
                return [Postcard()]

        case _:

            @outbox.handler("greet", transactional=kind == "transactional")
            async def greet(message: Message, ctx: Context) -> Postcard | None:
                await until(lambda: has_expired(db, message.id))
                assert ctx.should_stop
                if kind == "asks itself":
                    await ctx.ensure_lease()
                    post.sent.append(message.id)
                    return None
                return Postcard()

    message_id = enqueue(db, expires_at=soon(), max_attempts=1)
    async with running(Worker(outbox)):
        await until(lambda: state_of(db, message_id) not in (State.PENDING, State.SENDING))
    row = row_of(db, message_id)
    assert (row.state, row.skip_reason, post.sent) == (State.SKIPPED, "expired", [])


@pytest.mark.parametrize("how", ["expired", "cancelled", "superseded", "lease lost"])
async def test_a_content_that_waited_in_its_transport_passes_the_gate_after_the_wait(
    outbox: Outbox, db: psycopg.Connection, post: Post, how: str
) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Postcard:
        context.append(ctx)
        return Postcard()

    context: list[Context] = []
    post.turn.clear()
    message_id = enqueue(db, coalesce_key="k")
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: post.waiting_count == 1)
        match how:
            case "expired":  # With an expiry that comes soon, it might never reach the transport.
                expire(db, message_id)
                run_of(worker).state.in_flight[message_id].expiring_at = elapsed_clock()
            case "cancelled":
                assert cancel(db, message_id) == "requested"
            case "superseded":
                enqueue(db, coalesce_key="k", queue="other")
            case _:
                with db.transaction():  # In between, the worker itself could claim it.
                    lapse(db, message_id)
                    assert ids_in_flight(claim(db, worker="another")) == [message_id]
        await until(lambda: context[0].should_stop)
        post.turn.set()
        ends = {
            "expired": State.SKIPPED,
            "cancelled": State.CANCELLED,
            "superseded": State.SKIPPED,
            "lease lost": State.SENDING,
        }
        await until(lambda: state_of(db, message_id) == ends[how])
    assert post.sent == []
    assert (row_of(db, message_id).worker == "another") == (how == "lease lost")


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_a_transactional_handler_does_not_begin_if_its_message_expired_while_its_transaction_began(
    outbox: Outbox, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    begun: list[int] = []

    if is_async:

        @outbox.handler("greet", transactional=True)
        async def greet(message: Message, ctx: Context) -> None:
            begun.append(message.id)

    else:

        @outbox.handler("greet", transactional=True)
        def greet_in_thread(message: Message, ctx: SyncContext) -> None:
            begun.append(message.id)

    def name_late(message_id: int, attempt_count: int) -> str:
        wait_until(lambda: has_expired(db, message_id), lambda: "the message does not expire")
        return name_session(message_id, attempt_count)

    monkeypatch.setattr(transactions, "name_session", name_late)
    with db.transaction():
        message_id = outbox.on(db).enqueue("greet", 1, expires_at=soon()).id
    async with running(Worker(outbox)):
        await until(lambda: row_of(db, message_id).is_finished)
    assert (state_of(db, message_id), begun) == ("skipped", [])


async def test_an_attempt_that_has_ended_hands_nothing_over(dsn: str, db: psycopg.Connection, post: Post) -> None:
    outbox = Outbox(settings_for(dsn, lease_seconds=1), transports=[post])
    may_return = asyncio.Event()

    @outbox.handler("greet", timeout=0.1, retry=RetryPolicy.steps(3600))
    async def greet(message: Message, ctx: Context) -> Postcard:
        while not may_return.is_set():
            with contextlib.suppress(asyncio.CancelledError):  # A handler that cannot be stopped.
                await may_return.wait()
        return Postcard()

    message_id = enqueue(db)
    worker = Worker(outbox)
    async with running(worker):
        try:
            await until(lambda: attempts_of(db, message_id))
            assert worker.status().abandoned == 1
        finally:
            may_return.set()
        await until(lambda: worker.status().abandoned == 0)
    assert (post.waiting_count, post.sent) == (0, [])


async def test_an_attempt_whose_lease_cannot_be_checked_does_not_pass() -> None:
    async def ensure(attempt: Attempt) -> None:
        raise OSError("away")

    async def greet(message: Message, ctx: Context) -> None: ...

    claim = Claim(datetime(2024, 1, 1, tzinfo=UTC))
    attempt = Attempt(outgoing(), Handler("greet", greet), claim, elapsed_clock() - 2, ensure)
    await attempt.pass_gate()
    attempt.in_flight = InFlight()
    attempt.in_flight.stale_seconds = 1
    with pytest.raises(Snooze) as refusal:
        await attempt.pass_gate()
    assert refusal.value.reason == "message 7, attempt 1: not sent: its lease could not be checked: OSError"


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    async with accepting_server() as inbox:
        yield inbox


async def test_an_email_that_waited_for_a_connection_past_its_expiry_is_not_sent(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    outbox = Outbox(settings_for(dsn, **mail_settings(inbox.port), smtp_connections=1))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Email:
        return Email(subject="Hello", text="Hello")

    inbox.delays = lambda _: True
    first = enqueue(db, destination="mailto:first@example.org")
    async with running(Worker(outbox)):
        await until(lambda: inbox.delayed)
        second = enqueue(db, destination="mailto:second@example.org", expires_at=soon())
        await until(lambda: has_expired(db, second))
        inbox.may_go_on.set()
        await until(lambda: state_of(db, second) == State.SKIPPED)
    assert state_of(db, first) == State.SENT
    assert [mail.recipients for mail in inbox.received] == [["first@example.org"]]
