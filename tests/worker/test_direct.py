"""Tests direct sends: one attempt through real transports, without a row, with a producer's login."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from cryptography.fernet import Fernet

from pgoutbox import (
    ArgumentError,
    ConfigurationError,
    Context,
    Email,
    Message,
    Notification,
    Outbox,
    Permanent,
    SendFailure,
    Sent,
    Skip,
    Snooze,
    SyncContext,
    Topic,
    Transient,
    Unavailable,
    UnknownTopicError,
    asend_directly,
    send_directly,
)
from pgoutbox.message import Postponed
from pgoutbox.transports import pass_gate
from pgoutbox.worker import Worker
from pgoutbox.worker.direct import DirectOptions
from tests.support.outbox_actions import enqueue, row_of, settings_for
from tests.support.roles import login
from tests.support.smtp_server import Misbehaviour, accepting_server, mail_settings, scripted_server
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from pgoutbox import CallNext, Outcome
    from pgoutbox.transports import Content
    from tests.support.smtp_server import Inbox

ANN, TESTER = "ann@example.com", "tester@example.org"
BLACKOUT = "INSERT INTO pgoutbox.blackout SELECT d - 2, d + 2 FROM (SELECT (now() AT TIME ZONE 'UTC')::date) AS t(d)"
SWITCH_ON = f"SELECT pgoutbox.set_redirect('{TESTER}')"
STORED = """
    SELECT (SELECT count(*) FROM pgoutbox.message), (SELECT count(*) FROM pgoutbox.breaker),
        (SELECT count(*) FROM pgoutbox.worker), (SELECT last_value FROM pgoutbox.message_id_seq)
"""


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    async with accepting_server() as opened:
        yield opened


@pytest.fixture
def producer(dsn: str) -> Iterator[str]:
    with login(dsn, "pgoutbox_producer") as opened:
        yield opened


def mailing(dsn: str, inbox: Inbox, **overrides: object) -> Outbox:
    """Return an outbox whose topic `greet` sends an e-mail to the destination."""
    outbox = Outbox(settings_for(dsn, **mail_settings(inbox.port) | overrides))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Email:
        return Email(subject="Hello", text=f"Hi {message.payload}")

    return outbox


def answering(dsn: str, answer: Outcome | Exception, *, permanent: Sequence[type[BaseException]] = ()) -> Outbox:
    """Return an outbox whose topic `greet` raises the answer, or returns it."""
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", permanent=permanent)
    async def greet(message: Message, ctx: Context) -> Outcome:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return outbox


def recipients(inbox: Inbox) -> list[str]:
    return [recipient for received in inbox.received for recipient in received.recipients]


# --- the answer -------------------------------------------------------------------------------------------------------


async def test_a_producer_sends_once_and_nothing_is_stored(producer: str, db: psycopg.Connection, inbox: Inbox) -> None:
    before = db.execute(STORED).fetchone()
    outbox = mailing(producer, inbox)
    outcome = await asend_directly(outbox, "greet", {"user": 7}, destination=f"mailto:{ANN}")
    assert (outcome, recipients(inbox)) == (Sent(), [ANN])
    assert b"Hi {'user': 7}" in inbox.received[0].content
    assert db.execute(STORED).fetchone() == before


def test_the_sync_form_sends_from_a_thread(producer: str) -> None:
    async def serve() -> list[str]:
        async with accepting_server() as inbox:
            outbox = mailing(producer, inbox)
            to = f"mailto:{ANN}"
            assert await asyncio.to_thread(send_directly, outbox, "greet", 1, destination=to) == Sent()
            return recipients(inbox)

    assert asyncio.run(serve()) == [ANN]


async def test_the_sync_form_refuses_a_thread_with_an_event_loop(dsn: str) -> None:
    with pytest.raises(TypeError, match="use: await asend_directly"):
        send_directly(answering(dsn, Sent()), "greet", None)


@pytest.mark.parametrize("answer", [Permanent("no"), Skip("gone"), Snooze(5), Unavailable("down")])
async def test_an_outcome_is_returned_whether_it_is_returned_or_raised(
    dsn: str, db: psycopg.Connection, answer: Outcome
) -> None:
    before = db.execute(STORED).fetchone()
    outbox = answering(dsn, answer)

    @outbox.handler("polite")
    async def polite(message: Message, ctx: Context) -> Outcome:
        return answer

    for topic in ("greet", "polite"):
        assert str(await asend_directly(outbox, topic, None)) == str(answer)
    assert db.execute(STORED).fetchone() == before


async def test_an_exception_is_the_outcome_with_its_cause(dsn: str) -> None:
    outcome = await asend_directly(answering(dsn, KeyError("x"), permanent=[KeyError]), "greet", None)
    assert (type(outcome).__mro__[1], str(outcome)) == (Permanent, "KeyError: 'x'")
    outcome = await asend_directly(answering(dsn, ValueError("x")), "greet", None)
    assert isinstance(outcome, Transient)
    assert isinstance(outcome.__cause__, ValueError)


async def test_a_dead_mail_server_is_the_answer_each_time_and_opens_no_breaker(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    outbox = mailing(dsn, inbox, smtp_port=1)
    for _ in range(3):
        outcome = await asend_directly(outbox, "greet", None, destination=f"mailto:{ANN}")
        assert isinstance(outcome, Unavailable)
    assert db.execute("SELECT count(*) FROM pgoutbox.breaker").fetchone() == (0,)


async def test_an_open_breaker_does_not_keep_the_caller_from_the_answer(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error) "
        "VALUES (%s, now() + interval '1 hour', 30, 'w', 'down')",
        [f"smtp:127.0.0.1:{inbox.port}"],
    )
    assert await asend_directly(mailing(dsn, inbox), "greet", None, destination=f"mailto:{ANN}") == Sent()
    assert db.execute("SELECT count(*) FROM pgoutbox.breaker").fetchone() == (1,)


async def test_a_scheme_without_a_transport_is_unavailable(dsn: str) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Email:
        return Email(subject="Hello", text="Hi", to=ANN)

    outcome = await asend_directly(outbox, "greet", None)
    assert isinstance(outcome, Unavailable)
    assert "set PGOUTBOX_SMTP_HOST" in outcome.error


# --- the message ------------------------------------------------------------------------------------------------------


async def test_the_handler_gets_the_message_as_a_worker_would_pass_it(dsn: str) -> None:
    key = Fernet.generate_key().decode()
    outbox = Outbox(settings_for(dsn, encryption_keys=key))
    found: list[Message] = []
    secret = outbox.define(
        Topic("secret", queue="critical", coalesce_key=lambda p: str(p["id"]), encrypted=True, delay=60)
    )

    @outbox.handler(secret)
    async def handle(message: Message, ctx: Context) -> None:
        await ctx.ensure_lease()
        assert not ctx.should_stop
        found.append(message)

    options: DirectOptions = {"destination": "sms:1", "headers": {"a": "b"}, "content": {"html": "<p>"}}
    for _ in range(2):
        assert await asend_directly(outbox, secret, {"id": 7}, **options) == Sent()
    first, second = found
    assert (first.payload, first.content, first.headers) == ({"id": 7}, {"html": "<p>"}, {"a": "b"})
    assert (first.queue, first.destination, first.coalesce_key) == ("critical", "sms:1", "7")
    assert (first.attempt_count, first.max_attempts) == (1, 1)
    assert datetime.now(UTC) - first.created_at < timedelta(minutes=1)
    assert len({first.idempotency_key, second.idempotency_key}) == 2
    assert min(first.id, second.id) >= 2**62
    assert max(first.id, second.id) < 2**63


async def test_a_batch_handler_gets_one_message_through_the_middleware(dsn: str) -> None:
    outbox = Outbox(settings_for(dsn))
    seen: list[object] = []
    variable: ContextVar[str] = ContextVar("variable", default="outside")

    @outbox.middleware
    async def around(messages: Sequence[Message], call_next: CallNext) -> Sequence[Outcome]:
        variable.set("inside")
        return await call_next()

    @outbox.batch_handler("many")
    def many(messages: Sequence[Message], contexts: Sequence[SyncContext]) -> list[Outcome]:
        seen.append((len(messages), variable.get(), threading.current_thread() is threading.main_thread()))
        return [Skip("seen")]

    assert isinstance(await asend_directly(outbox, "many", 1), Skip)
    assert seen == [(1, "inside", False)]
    assert variable.get() == "outside"


@pytest.mark.parametrize(
    ("topic", "payload", "options", "error", "match"),
    [
        ("greet", object(), {}, ArgumentError, "payload"),
        ("greet", 1, {"destination": "mailto:a@example.org,b@example.org"}, ArgumentError, "one recipient"),
        ("greet", 1, {"destination": "mailto:a@example.org\nBcc: eve@example.org"}, ArgumentError, "control"),
        ("greet", 1, {"content": object()}, ArgumentError, "content"),
        ("greet", 1, {"headers": {"a": 1}}, ArgumentError, "headers"),
        ("Greet", 1, {}, ArgumentError, "topic"),
        ("nobody", 1, {}, UnknownTopicError, "'nobody' has no handler in this outbox"),
        ("books", 1, {}, ConfigurationError, "transactional handler, .*; enqueue the message instead"),
    ],
)
async def test_wrong_use_raises_before_anything_is_sent(
    dsn: str, topic: str, payload: object, options: DirectOptions, error: type[Exception], match: str
) -> None:
    outbox = answering(dsn, Sent())

    @outbox.handler("books", transactional=True)
    async def books(message: Message, ctx: Context) -> None: ...

    with pytest.raises(error, match=match):
        await asend_directly(outbox, topic, payload, **options)


async def test_without_a_database_setting_the_error_says_how_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGOUTBOX_DSN", raising=False)
    outbox = Outbox()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    with pytest.raises(ConfigurationError, match="set PGOUTBOX_DSN"):
        await asend_directly(outbox, "greet", None)


# --- permission to send -----------------------------------------------------------------------------------------------


async def test_a_redirect_applies_also_if_it_is_switched_on_while_the_handler_runs(
    producer: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    outbox = Outbox(settings_for(producer, **mail_settings(inbox.port)))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Content:
        db.execute(SWITCH_ON)
        return Email(subject="Hello", text="Hi")

    assert await asend_directly(outbox, "greet", None, destination=f"mailto:{ANN}") == Sent()
    assert recipients(inbox) == [TESTER]


async def test_the_redirect_of_the_environment_applies(producer: str, inbox: Inbox) -> None:
    outbox = mailing(producer, inbox, redirect_to=TESTER)
    assert await asend_directly(outbox, "greet", None, destination=f"mailto:{ANN}") == Sent()
    assert recipients(inbox) == [TESTER]


async def test_a_blackout_refuses_to_redirect(producer: str, db: psycopg.Connection, inbox: Inbox) -> None:
    db.execute(SWITCH_ON)
    db.execute(BLACKOUT)
    outcome = await asend_directly(mailing(producer, inbox), "greet", None, destination=f"mailto:{ANN}")
    assert isinstance(outcome, Postponed)
    assert f"refuses to redirect to {TESTER} within the blackout" in str(outcome.reason)
    assert inbox.received == []


async def test_a_redirect_holds_other_contents_back(producer: str, db: psycopg.Connection) -> None:
    db.execute(SWITCH_ON)
    transport = Own()
    outbox = Outbox(settings_for(producer), transports=[transport])

    @outbox.handler("note")
    async def note(message: Message, ctx: Context) -> Content:
        return Notification("Hello", "Hi")

    outcome = await asend_directly(outbox, "note", None, destination="own:1")
    assert isinstance(outcome, Postponed)
    assert (outcome.reason, transport.sent) == (
        "not sent: a redirect is on, and the transport of 'own' does not follow it",
        [],
    )


async def test_a_copy_of_the_database_sends_nothing_and_runs_no_handler(
    producer: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    db.execute("UPDATE pgoutbox.home SET database_id = 1, server_id = 1")
    outbox = Outbox(settings_for(producer, **mail_settings(inbox.port)))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Content:
        raise AssertionError("the handler ran in a copy")

    outcome = await asend_directly(outbox, "greet", None, destination=f"mailto:{ANN}")
    assert isinstance(outcome, Unavailable)
    assert "send nothing from this database" in outcome.error
    assert "pgoutbox adopt" in outcome.error


async def test_a_login_without_a_role_sends_nothing(dsn: str, inbox: Inbox) -> None:
    with login(dsn) as nobody:
        outcome = await asend_directly(mailing(nobody, inbox), "greet", None, destination=f"mailto:{ANN}")
    assert isinstance(outcome, Unavailable)
    assert outcome.error == "not sent: permission denied for schema pgoutbox"
    assert inbox.received == []


async def test_an_unreachable_database_sends_nothing_and_shows_no_password(inbox: Inbox) -> None:
    outbox = mailing("postgresql://app:s3cret@127.0.0.1:1/app", inbox)
    outcome = await asend_directly(outbox, "greet", None, destination=f"mailto:{ANN}")
    assert isinstance(outcome, Unavailable)
    assert outcome.error.startswith("not sent: ")
    assert "s3cret" not in outcome.error
    assert inbox.received == []


async def test_its_session_does_not_count_as_a_worker(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    names: list[str] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        rows = db.execute("SELECT application_name FROM pg_stat_activity WHERE datname = current_database()")
        names.extend(name.split()[1] for (name,) in rows if name.startswith("pgoutbox "))

    await asend_directly(outbox, "greet", None)
    assert names == ["direct"]


# --- time, cancellation, resources ------------------------------------------------------------------------------------


async def test_the_timeout_of_the_handler_ends_the_attempt_as_unknown(dsn: str) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", timeout=0.05)
    async def greet(message: Message, ctx: Context) -> None:
        await asyncio.Event().wait()

    outcome = await asend_directly(outbox, "greet", None)
    assert isinstance(outcome, SendFailure)
    assert (str(outcome), outcome.unknown) == ("timed out after 0.05 s, outcome unknown", True)


async def test_a_handler_in_a_thread_that_overruns_does_not_keep_the_caller(dsn: str) -> None:
    outbox = Outbox(settings_for(dsn))
    release = threading.Event()

    @outbox.handler("greet", timeout=0.05)
    def greet(message: Message, ctx: SyncContext) -> None:
        release.wait(60)

    try:
        outcome = await asend_directly(outbox, "greet", None)
    finally:
        release.set()
    assert isinstance(outcome, SendFailure)


async def test_a_cancelled_call_stops_the_handler_and_closes_the_connections(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    began, ended = asyncio.Event(), asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = asyncio.create_task(asend_directly(outbox, "greet", None))
    await began.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()
    await until(
        lambda: (
            db.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgoutbox direct%'"
            ).fetchone()
            == (0,)
        )
    )


async def test_a_call_that_is_cancelled_while_it_closes_leaves_nothing_open(dsn: str, db: psycopg.Connection) -> None:
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgoutbox direct%'"
    async with scripted_server({"QUIT": Misbehaviour.HANG}) as server:
        outbox = Outbox(settings_for(dsn, **mail_settings(server.port)))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> Email:
            return Email(subject="Hello", text="Hi")

        call = asyncio.create_task(asend_directly(outbox, "greet", None, destination=f"mailto:{ANN}"))
        await server.is_silent.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.was_left.wait()
        await until(lambda: db.execute(sessions).fetchone() == (0,))


async def test_a_handler_of_a_worker_may_send_directly(dsn: str, db: psycopg.Connection, inbox: Inbox) -> None:
    outbox = mailing(dsn, inbox)
    outcomes: list[Outcome] = []

    @outbox.handler("outer")
    async def outer(message: Message, ctx: Context) -> None:
        outcomes.append(await asend_directly(outbox, "greet", None, destination=f"mailto:{ANN}"))

    @outbox.handler("outer.sync")
    def outer_sync(message: Message, ctx: SyncContext) -> None:
        outcomes.append(send_directly(outbox, "greet", None, destination=f"mailto:{ANN}"))

    ids = [enqueue(db, topic) for topic in ("outer", "outer.sync")]
    await Worker(outbox).run_once()
    assert (outcomes, recipients(inbox)) == ([Sent()] * 2, [ANN] * 2)
    assert [row_of(db, message_id).state for message_id in ids] == ["sent"] * 2


async def test_a_pooled_connection_asks_for_the_home_too(dsn: str, db: psycopg.Connection, inbox: Inbox) -> None:
    outbox = mailing(dsn, inbox, listen=False)
    assert await asend_directly(outbox, "greet", None, destination=f"mailto:{ANN}") == Sent()
    db.execute("UPDATE pgoutbox.home SET database_id = 1, server_id = 1")
    outcome = await asend_directly(outbox, "greet", None, destination=f"mailto:{ANN}")
    assert (type(outcome), len(inbox.received)) == (Unavailable, 1)


class Own:
    """A transport of the application, which counts the ends of its life."""

    schemes = ("own",)

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.closed_after: list[int] = []

    async def send(self, message: Message[object], content: Content) -> Outcome:
        await pass_gate()
        self.sent.append(message.id)
        return Sent()

    async def aclose(self) -> None:
        self.closed_after.append(len(self.sent))


def noting(dsn: str, transport: Own) -> Outbox:
    outbox = Outbox(settings_for(dsn), transports=[transport])

    @outbox.handler("note")
    async def note(message: Message, ctx: Context) -> Content:
        return Notification("Hello", "Hi")

    return outbox


async def test_the_applications_transports_stay_open_on_the_callers_loop(dsn: str) -> None:
    transport = Own()
    outbox = noting(dsn, transport)
    calls = (asend_directly(outbox, "note", None, destination="own:1") for _ in range(3))
    assert await asyncio.gather(*calls) == [Sent()] * 3
    assert (len(transport.sent), transport.closed_after) == (3, [])


def test_sync_calls_take_turns_with_the_applications_transports_and_close_them(dsn: str) -> None:
    transport = Own()
    outbox = noting(dsn, transport)
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(send_directly, outbox, "note", None, destination="own:1") for _ in range(3)]
    assert [call.result() for call in calls] == [Sent()] * 3
    assert transport.closed_after == [1, 2, 3]
