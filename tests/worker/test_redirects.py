"""Tests redirects of running workers, by the environment and by operators, on real SMTP servers; and blackouts."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest

from pgoutbox import Context, Email, Message, Outbox, Snooze
from pgoutbox.database.store import Store
from pgoutbox.errors import ArgumentError, ConfigurationError, StateError
from pgoutbox.message import Postponed, Sent
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.operations import ClearedRedirect, Operator
from pgoutbox.settings import load_settings
from pgoutbox.transports import SmtpTransport, current_gate, pass_gate
from pgoutbox.transports.redirect import RedirectRules, parse_target
from pgoutbox.worker import Worker
from pgoutbox.worker.redirects import Redirects
from tests.support.outbox_actions import (
    attempts_of,
    enqueue,
    make_due,
    row_of,
    running,
    settings_for,
    until_blocked,
)
from tests.support.sends import outgoing
from tests.support.smtp_server import accepting_server, mail_settings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pgoutbox.message import Outcome
    from pgoutbox.transports import Content
    from tests.conftest import Connect
    from tests.support.smtp_server import Inbox

ANN, ORGANISER, TESTER = "ann@example.com", "org@club.example", "tester@example.org"
TODAY = datetime.now(UTC).date()
AROUND_TODAY = f"{TODAY - timedelta(days=2)}/{TODAY + timedelta(days=2)}"
# Around midnight, today is another day for the server, and within these days.
BLACKOUT = f"INSERT INTO pgoutbox.blackout VALUES ('{TODAY - timedelta(days=2)}', '{TODAY + timedelta(days=2)}')"
SWITCH_ON = f"SELECT pgoutbox.set_redirect('{TESTER}')"


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    async with accepting_server() as opened:
        yield opened


def mailing(dsn: str, inbox: Inbox, **overrides: object) -> Worker:
    """Return a worker that sends each message to its destination."""
    outbox = Outbox(settings_for(dsn, **mail_settings(inbox.port) | overrides))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Content:
        return Email(subject="Hello", text="Hi")

    return Worker(outbox)


def mail_to(db: psycopg.Connection, address: str) -> int:
    return enqueue(db, destination=f"mailto:{address}")


def recipients(inbox: Inbox) -> list[str]:
    return [recipient for received in inbox.received for recipient in received.recipients]


def budget_of(db: psycopg.Connection, message_id: int) -> int:
    row = row_of(db, message_id)
    return row.max_attempts - row.attempt_count


# --- the redirect of the environment ----------------------------------------------------------------------------------


async def test_the_redirect_of_the_environment_is_followed_logged_and_reported(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    message_id = mail_to(db, ANN)
    worker = mailing(dsn, inbox, redirect_to="@test.example.org")
    await worker.run_once()
    assert (row_of(db, message_id).state, recipients(inbox)) == ("sent", ["ann=example.com@test.example.org"])
    assert worker.telemetry.counts[LogEvent.REDIRECTING] == 1
    async with running(worker):
        with Operator(dsn) as operator:
            await until(lambda: bool(operator.redirects().workers))
            found = operator.redirects()
    assert ([report.target for report in found.workers], found.blackout) == (["@test.example.org"], None)
    assert found.warnings() == ["PGOUTBOX_REDIRECT_TO=@test.example.org redirects all e-mail of 1 worker"]


async def test_a_report_counts_until_the_worker_stops_or_its_run_ends_or_it_reports_no_more(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    reported = "SELECT target, name FROM pgoutbox.redirect_view"
    worker = mailing(dsn, inbox, redirect_to=TESTER)
    async with running(worker):
        await until(lambda: db.execute(reported).fetchall())
        assert db.execute(reported).fetchall() == [(TESTER, worker.name)]
    assert db.execute(reported).fetchall() == []
    await worker.run_once()
    assert db.execute("SELECT redirect_to FROM pgoutbox.worker WHERE ended_at IS NOT NULL").fetchall() == [(TESTER,)]
    assert db.execute(reported).fetchall() == []
    db.execute("UPDATE pgoutbox.worker SET ended_at = NULL, run_interval_seconds = NULL")
    assert db.execute(reported).fetchall() == [(TESTER, worker.name)]
    db.execute("UPDATE pgoutbox.worker SET seen_at = now() - interval '3 minutes'")
    assert db.execute(reported).fetchall() == []


# --- the redirect of an operator --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_when_a_switch_returns_a_running_worker_hands_nothing_to_real_recipients(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    worker = mailing(dsn, inbox)
    with Operator(dsn, actor="ada") as operator:
        async with running(worker):
            mail_to(db, ANN)
            await until(lambda: len(inbox.received) == 1)
            switched = await asyncio.to_thread(operator.set_redirect, TESTER)
            mail_to(db, ANN)
            await until(lambda: len(inbox.received) == 2)
            assert operator.redirects().switched == switched
            assert await asyncio.to_thread(operator.clear_redirect) == ClearedRedirect(was_on=True, message_count=0)
            while not worker.telemetry.counts[LogEvent.REDIRECT_ENDED]:
                count = len(inbox.received)
                mail_to(db, ANN)
                await until(lambda count=count: len(inbox.received) > count)  # type: ignore[misc] # bound now
    assert recipients(inbox)[:2] == [ANN, TESTER]
    assert recipients(inbox)[-1] == ANN
    assert (switched.set_by, switched.until_at) == ("ada", None)
    assert worker.telemetry.counts[LogEvent.REDIRECTING] == 1


async def test_the_target_of_an_operator_overrides_that_of_the_environment_until_it_is_off(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    db.execute(SWITCH_ON)
    mail_to(db, ANN)
    await mailing(dsn, inbox, redirect_to="other@example.org").run_once()
    with Operator(dsn) as operator:
        operator.clear_redirect()
    mail_to(db, ANN)
    await mailing(dsn, inbox, redirect_to="other@example.org").run_once()
    assert recipients(inbox) == [TESTER, "other@example.org"]


@pytest.mark.slow
async def test_a_redirect_for_a_time_ends_by_itself(dsn: str, db: psycopg.Connection, inbox: Inbox) -> None:
    with Operator(dsn) as operator:
        switched = await asyncio.to_thread(operator.set_redirect, TESTER, duration=timedelta(hours=2))
        assert switched.until_at is not None
        assert timedelta(hours=2) - timedelta(seconds=1) < switched.until_at - switched.set_at < timedelta(hours=2.1)
        db.execute("UPDATE pgoutbox.redirect SET set_at = now() - interval '2 h', until_at = now()")
        assert operator.redirects().warnings() == []
        mail_to(db, ANN)
        await mailing(dsn, inbox).run_once()
        assert recipients(inbox) == [ANN]
        assert operator.clear_redirect() == ClearedRedirect(was_on=False, message_count=0)


async def test_a_target_that_is_not_an_address_holds_email_back(dsn: str, db: psycopg.Connection, inbox: Inbox) -> None:
    db.execute("INSERT INTO pgoutbox.redirect (target, set_by, set_at) VALUES ('tester@-', 'owner', now())")
    message_id = mail_to(db, ANN)
    worker = mailing(dsn, inbox)
    await worker.run_once()
    assert (row_of(db, message_id).state, inbox.received, budget_of(db, message_id)) == ("pending", [], 11)
    assert worker.telemetry.counts[LogEvent.REDIRECT_UNKNOWN] == 1


@pytest.mark.parametrize(
    ("function", "arguments", "field"),
    [
        ("set_redirect", "'tester'", "target"),
        ("set_redirect", "NULL", "target"),
        ("set_redirect", "'a b@c'", "target"),
        ("set_redirect", "'a@b@c'", "target"),
        ("set_redirect", "'@c', '0 s'", "duration"),
        ("set_redirect", "'@c', topics => '{Mail}'", "topics"),
        ("set_redirect", "'@c', topics => '{*}'", "topics"),
        ("set_redirect", "'@c', topics => '{mail,NULL}'", "topics"),
        ("set_redirect", "'@c', topics => array_fill('m'::text, ARRAY[51])", "topics"),
        ("set_redirect", "'@c', exempt_topics => '{\"a,b\"}'", "exempt_topics"),
        ("set_redirect", "'@c', exempt_topics => '{mail.*.x}'", "exempt_topics"),
        ("clear_redirect", "0", "at_most"),
        ("clear_redirect", "NULL", "at_most"),
    ],
)
def test_the_sql_functions_refuse_a_wrong_argument_by_name(
    db: psycopg.Connection, function: str, arguments: str, field: str
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=f"pgoutbox.{function}: {field}: must be") as caught:
        db.execute(f"SELECT pgoutbox.{function}({arguments})".encode())
    assert caught.value.diag.column_name == field


LONG_DOMAIN = ".".join(["a" * 60] * 3)  # 182 characters


@pytest.mark.parametrize(
    ("target", "is_accepted"),
    [
        ("tester@example.org", True),
        ("@example.org", True),
        ("o'brien+test.1@mail-2.example.org", True),
        ("TESTER@localhost", True),
        ("a@xn--bcher-kva.example", True),
        ("a@_spf.example.org", True),
        ("x" * 64 + "@example.org", True),
        ("x" * 65 + "@example.org", False),
        ("@" + LONG_DOMAIN + ".aaaaaa", True),
        ("@" + LONG_DOMAIN + ".aaaaaaa", False),
        ("x" * 64 + "@" + LONG_DOMAIN + ".aaaaaa", True),
        ("x" * 64 + "@" + LONG_DOMAIN + ".aaaaaaa", False),
        ("x@" + "a" * 63 + ".org", True),
        ("x@" + "a" * 64 + ".org", False),
        ("", False),
        ("tester", False),
        ("@", False),
        ("a@", False),
        ("a@b@c.example", False),
        ("a@b.example,c@d.example", False),
        ("a@b.example\n", False),
        (" a@b.example", False),
        ("Ann <ann@b.example>", False),
        ("Ann<ann@b.example>", False),
        ("a@b\u00fccher.example", False),
        ("m\u00fcller@b.example", False),
        (".a@b.example", False),
        ("a..b@b.example", False),
        ("a.@b.example", False),
        ("a@-b.example", False),
        ("a@b.example.", False),
        ("a@b..example", False),
        ("a@[127.0.0.1]", False),
        ('"a b"@b.example', False),
        ("=?utf-8?q?a?=@b.example", False),
        ("a(comment)@b.example", False),
        ('a"><img/src=x/onerror=alert(9)>@\u202eexample.org', False),
    ],
)
def test_an_operator_can_set_exactly_the_targets_that_workers_accept(
    db: psycopg.Connection, target: str, *, is_accepted: bool
) -> None:
    with nullcontext() if is_accepted else pytest.raises(ConfigurationError, match="target: "):
        parse_target("target", target)
    with nullcontext() if is_accepted else pytest.raises(psycopg.errors.InvalidParameterValue, match="target: must be"):
        db.execute("SELECT pgoutbox.set_redirect(%s)", (target,))
    assert db.execute("SELECT target FROM pgoutbox.redirect").fetchall() == [(target,)] * is_accepted


def test_an_operator_refuses_a_wrong_target_and_a_blackout(dsn: str, db: psycopg.Connection) -> None:
    with Operator(dsn) as operator:
        with pytest.raises(ArgumentError, match="target: has no @; give an address, or @ and a domain"):
            operator.set_redirect("tester")
        with pytest.raises(ArgumentError, match="duration: must be from 1 second to 3650 days, not 0:00:00"):
            operator.set_redirect(TESTER, duration=timedelta())
    db.execute(BLACKOUT)
    with (
        Operator(dsn) as operator,
        pytest.raises(
            StateError, match=f"set_redirect: target: refused within the blackout {AROUND_TODAY}. Only the owner"
        ),
    ):
        operator.set_redirect(TESTER)
    assert db.execute("SELECT count(*) FROM pgoutbox.redirect").fetchone() == (0,)


# --- the redirect of some topics --------------------------------------------------------------------------------------


def two_topics(dsn: str, inbox: Inbox, **overrides: object) -> Worker:
    """Return a worker whose two topics send to the destination of a message."""
    outbox = Outbox(settings_for(dsn, **mail_settings(inbox.port) | overrides))

    @outbox.handler("mail.user.welcome")
    @outbox.handler("mail.club.order")
    async def write(message: Message, ctx: Context) -> Content:
        return Email(subject=message.topic, text="Hi")

    return Worker(outbox)


@pytest.mark.parametrize(
    ("topics", "exempt_topics", "overrides", "expected"),
    [
        ("{mail.user.*}", None, {}, {TESTER, ANN}),
        (None, "{mail.club.*}", {}, {TESTER, ANN}),
        (None, None, {"redirect_exempt_topics": "mail.club.order"}, {TESTER, ANN}),
        ("{mail.user.*}", None, {"redirect_to": "env@example.org"}, {TESTER, "env@example.org"}),
        (None, "{mail.club.*}", {"redirect_to": "env@example.org"}, {TESTER, "env@example.org"}),
        (None, None, {}, {TESTER}),
    ],
)
async def test_mail_to_one_address_is_redirected_by_topic(
    dsn: str,
    db: psycopg.Connection,
    inbox: Inbox,
    topics: str | None,
    exempt_topics: str | None,
    overrides: dict[str, object],
    expected: set[str],
) -> None:
    db.execute("SELECT pgoutbox.set_redirect(%s, NULL, %s, %s)", (TESTER, topics, exempt_topics))
    for topic in ("mail.user.welcome", "mail.club.order"):
        enqueue(db, topic, destination=f"mailto:{ANN}")
    await two_topics(dsn, inbox, **overrides).run_once()
    assert len(inbox.received) == 2
    assert set(recipients(inbox)) == expected
    users = [received for received in inbox.received if b"Subject: mail.user.welcome" in received.content]
    assert [received.recipients for received in users] == [[TESTER]]


async def test_exempt_topics_of_the_environment_are_exempt_from_its_own_redirect(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    for topic in ("mail.user.welcome", "mail.club.order"):
        enqueue(db, topic, destination=f"mailto:{ANN}")
    worker = two_topics(dsn, inbox, redirect_to=TESTER, redirect_exempt_topics="mail.club.*")
    await worker.run_once()
    assert {received.recipients[0]: received.content.partition(b"Subject: ")[2][:9] for received in inbox.received} == {
        TESTER: b"mail.user",
        ANN: b"mail.club",
    }


async def test_in_a_blackout_only_the_mail_of_redirected_topics_waits(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    db.execute("SELECT pgoutbox.set_redirect(%s, NULL, '{mail.user.*}')", (TESTER,))
    db.execute(BLACKOUT)
    user, club = (enqueue(db, t, destination=f"mailto:{ANN}") for t in ("mail.user.welcome", "mail.club.order"))
    await two_topics(dsn, inbox).run_once()
    assert (row_of(db, user).state, row_of(db, club).state, recipients(inbox)) == ("pending", "sent", [ANN])
    with Operator(dsn) as operator:
        (warning,) = operator.redirects().warnings()
    assert warning.startswith("e-mail of mail.user.* is held back, except for exempt addresses and topics: ")
    assert warning.endswith(f"and the blackout {AROUND_TODAY} forbids that")


@pytest.mark.slow
def test_an_operator_switches_topics_and_finds_them_in_the_audit(dsn: str, db: psycopg.Connection) -> None:
    with Operator(dsn, actor="ada") as operator:
        switched = operator.set_redirect(TESTER, topics=["mail.user.*", "mail.a"], exempt_topics=["mail.user.vip"])
        assert operator.redirects().switched == switched
        assert (switched.topics, switched.exempt_topics) == (("mail.a", "mail.user.*"), ("mail.user.vip",))
        (warning,) = operator.redirects().warnings()
        assert f"ada redirects e-mail of mail.a, mail.user.* except that of mail.user.vip to {TESTER} since" in warning
        assert operator.list_acts()[0].details == {
            "target": TESTER,
            "topics": ["mail.a", "mail.user.*"],
            "exempt_topics": ["mail.user.vip"],
        }
        operator.set_redirect(TESTER)
        assert operator.redirects().warnings()[0].startswith(f"ada redirects all e-mail to {TESTER}")
        with pytest.raises(ArgumentError, match="topics: 'Mail' is not a topic"):
            operator.set_redirect(TESTER, topics=["Mail"])


@pytest.mark.parametrize("topics", ["{}", "{Mail}", "{mail,NULL}", "{*}", "{{a},{b}}", "{mail.*.x}"])
@pytest.mark.parametrize("column", ["topics", "exempt_topics"])
def test_the_table_refuses_lists_that_workers_would_read_differently(
    db: psycopg.Connection, column: LiteralString, topics: str
) -> None:
    statement = f"INSERT INTO pgoutbox.redirect (target, set_by, set_at, {column}) VALUES ('@c', 'o', now(), %s)"
    with pytest.raises(psycopg.errors.CheckViolation, match="redirect_sound"):
        db.execute(statement, (topics,))


# --- the window before a worker knows ---------------------------------------------------------------------------------


class Sink:
    """A transport that records its contents, and does not follow redirects."""

    schemes = ("https",)

    def __init__(self) -> None:
        self.sent: list[Content] = []

    async def send(self, message: Message[object], content: Content) -> Outcome:
        self.sent.append(content)
        return Sent()

    async def aclose(self) -> None: ...


class Following(Sink):
    """A transport that follows redirects."""

    follows_redirect = True

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str | None] = []

    async def send(self, message: Message[object], content: Content) -> Outcome:
        now = await pass_gate()
        if now is not None and (refusal := now.refusal(message)) is not None:
            return refusal
        self.targets.append(None if now is None else now.target)
        return Sent()


class Webhook:
    """A content of another scheme than e-mail."""

    scheme = "https"


class Sending:
    """The redirects of a worker with a clock that the test sets."""

    def __init__(self, dsn: str, **overrides: object) -> None:
        settings = settings_for(dsn, **overrides)
        self.now = 100.0
        self.store = Store(settings, worker="w")
        self.telemetry = Telemetry(logging.getLogger("pgoutbox.tests"))
        self.redirects = Redirects(settings, self.store, self.telemetry, clock=lambda: self.now)
        self.sink = Sink()

    async def send(self, topic: str = "greet") -> Outcome:
        message = outgoing(topic=topic, destination="https://example.com")
        return await self.redirects.send(self.sink, message, Webhook())

    async def close(self) -> None:
        await self.redirects.close()
        await self.store.close()


@pytest.fixture
async def sending(dsn: str) -> AsyncIterator[Sending]:
    made = Sending(dsn)
    yield made
    await made.close()


async def test_a_worker_reads_the_switch_once_a_second(sending: Sending, db: psycopg.Connection) -> None:
    assert isinstance(await sending.send(), Sent)
    db.execute(SWITCH_ON)
    sending.now += 0.99
    assert isinstance(await sending.send(), Sent)
    sending.now += 0.01
    assert isinstance(await sending.send(), Postponed)
    assert len(sending.sink.sent) == 2


async def test_a_topic_that_joins_the_redirect_is_followed_within_a_second(
    sending: Sending, db: psycopg.Connection
) -> None:
    db.execute("SELECT pgoutbox.set_redirect(%s, NULL, '{other}')", (TESTER,))
    assert isinstance(await sending.send(), Sent)
    assert isinstance(await sending.send("other"), Postponed)
    db.execute("SELECT pgoutbox.set_redirect(%s, NULL, '{greet}')", (TESTER,))
    sending.now += 1
    assert isinstance(await sending.send(), Postponed)
    assert isinstance(await sending.send("other"), Sent)


async def test_an_answer_counts_from_the_start_of_its_query(
    sending: Sending, db: psycopg.Connection, connect: Connect
) -> None:
    blocker = connect()
    blocker.execute("LOCK TABLE pgoutbox.redirect")
    first, second = asyncio.create_task(sending.send()), asyncio.create_task(sending.send())
    await until_blocked(db, first)
    sending.now += 2
    blocker.rollback()
    for outcome in await asyncio.gather(first, second):
        assert isinstance(outcome, Postponed)
        assert "the database answers too slowly" in (outcome.reason or "")
    assert sending.sink.sent == []


async def test_a_lease_that_is_lost_while_the_switch_is_read_hands_nothing_over(
    sending: Sending, db: psycopg.Connection, connect: Connect
) -> None:
    async def ensure() -> None:
        if is_lost:
            raise Snooze(0, "lease lost")

    is_lost = False
    current_gate.set(ensure)
    blocker = connect()
    blocker.execute("LOCK TABLE pgoutbox.redirect")
    task = asyncio.create_task(sending.send())
    await until_blocked(db, task)
    is_lost = True
    sending.now += 1.9  # The answer is still young enough.
    blocker.rollback()
    outcome = await task
    assert isinstance(outcome, Snooze)
    assert (outcome.reason, sending.sink.sent) == ("lease lost", [])


async def test_a_redirect_that_is_switched_on_while_the_lease_is_checked_is_followed(
    sending: Sending, db: psycopg.Connection
) -> None:
    async def ensure() -> None:
        asked.set()
        await answered.wait()

    asked, answered = asyncio.Event(), asyncio.Event()
    assert isinstance(await sending.send(), Sent)
    current_gate.set(ensure)
    task = asyncio.create_task(sending.send())
    await asked.wait()
    db.execute(SWITCH_ON)
    sending.now += 2
    answered.set()
    assert isinstance(await task, Postponed)
    assert len(sending.sink.sent) == 1


@pytest.mark.slow
async def test_nothing_is_handed_over_while_the_switch_cannot_be_read(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    sending = Sending(dsn, statement_timeout_seconds=1)
    blocker = connect()
    blocker.execute("LOCK TABLE pgoutbox.redirect")
    outcome = await sending.send()
    assert isinstance(outcome, Postponed)
    assert outcome.reason == "not sent: the redirect is unknown: QueryCanceled"
    assert (sending.sink.sent, sending.telemetry.counts[LogEvent.REDIRECT_UNKNOWN]) == ([], 1)
    blocker.rollback()
    assert isinstance(await sending.send(), Sent)
    await sending.close()


async def test_an_email_that_waited_for_a_connection_follows_a_redirect_of_the_meantime(inbox: Inbox) -> None:
    settings = load_settings(smtp={key.removeprefix("smtp_"): v for key, v in mail_settings(inbox.port).items()})
    (switched,) = RedirectRules.of(settings.redirect).redirects(TESTER)
    answers = iter([None, None])

    async def current() -> object:
        return next(answers, switched)

    transport = SmtpTransport(settings)
    email = Email(to=ANN, subject="Hello", text="Hi")
    token = current_gate.set(current)  # type: ignore[arg-type] # the same type
    assert isinstance(await transport.send(outgoing(), email), Sent)
    current_gate.reset(token)
    await transport.aclose()
    assert recipients(inbox) == [TESTER]


async def test_an_email_that_waited_for_a_connection_follows_its_topic_that_joined_meanwhile(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    """The worker asks once more right before the hand-over, when the connection is open."""
    db.execute("SELECT pgoutbox.set_redirect(%s, NULL, '{other}')", (TESTER,))
    sending = Sending(dsn)
    settings = load_settings(smtp={key.removeprefix("smtp_"): v for key, v in mail_settings(inbox.port).items()})
    transport = SmtpTransport(settings)
    asked = 0

    async def still_held() -> None:
        nonlocal asked
        asked += 1
        sending.now += 1
        if asked == 3:  # The worker has asked once, and the transport twice before the connection.
            db.execute("SELECT pgoutbox.set_redirect(%s, NULL, '{greet}')", (TESTER,))

    token = current_gate.set(still_held)
    outcome = await sending.redirects.send(
        transport, outgoing(topic="greet"), Email(to=ANN, subject="Hello", text="Hi")
    )
    current_gate.reset(token)
    await transport.aclose()
    await sending.close()
    assert isinstance(outcome, Sent)
    assert (recipients(inbox), asked) == ([TESTER], 5)


async def test_a_transport_with_a_redirect_of_its_own_keeps_it(inbox: Inbox) -> None:
    smtp = {key.removeprefix("smtp_"): v for key, v in mail_settings(inbox.port).items()}
    transport = SmtpTransport(load_settings(smtp=smtp, redirect={"to": TESTER}))
    email = Email(to=ANN, subject="Hello", text="Hi")
    assert isinstance(await transport.send(outgoing(), email), Sent)
    await transport.aclose()
    assert recipients(inbox) == [TESTER]


# --- blackouts --------------------------------------------------------------------------------------------------------


async def test_a_worker_starts_in_a_blackout_and_holds_user_mail_back_but_not_exempt_mail(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    user, organiser = mail_to(db, ANN), mail_to(db, ORGANISER)
    db.execute(BLACKOUT)
    worker = mailing(dsn, inbox, redirect_to=TESTER, redirect_exempt="@club.example")
    await worker.run_once()
    make_due(db, user)
    await worker.run_once()
    assert (row_of(db, user).state, budget_of(db, user), row_of(db, organiser).state) == ("pending", 11, "sent")
    assert recipients(inbox) == [ORGANISER]
    reason = f"refuses to redirect to {TESTER} within the blackout {AROUND_TODAY}"
    assert [outcome[1:] for outcome in attempts_of(db, user)] == [("snoozed", reason)] * 2
    assert db.execute("SELECT reason FROM pgoutbox.waiting_view").fetchall() == [("redirect",)]
    with Operator(dsn) as operator:
        warnings = operator.redirects().warnings()
    assert warnings == []  # Both runs have ended.


async def test_each_change_of_a_redirect_is_logged_once(dsn: str, db: psycopg.Connection) -> None:
    sending = Sending(dsn)
    counts = []
    for statement in (None, SWITCH_ON, None, "SELECT pgoutbox.clear_redirect()", None):
        if statement is not None:
            db.execute(statement)
        sending.now += 1
        await sending.send()
        counts.append([sending.telemetry.counts[e] for e in (LogEvent.REDIRECTING, LogEvent.REDIRECT_ENDED)])
    await sending.close()
    assert counts == [[0, 0], [1, 0], [1, 0], [1, 1], [1, 1]]


async def test_a_refusal_is_logged_once(dsn: str, db: psycopg.Connection) -> None:
    db.execute(BLACKOUT)
    sending = Sending(dsn, redirect_to=TESTER)
    for _ in range(3):
        await sending.send()
        sending.now += 1
    await sending.close()
    events = (LogEvent.REDIRECTING, LogEvent.REDIRECT_REFUSED)
    assert [sending.telemetry.counts[event] for event in events] == [0, 1]


@pytest.mark.slow
async def test_mail_held_back_in_a_blackout_goes_out_by_itself_when_the_redirect_is_off(
    dsn: str, db: psycopg.Connection, inbox: Inbox
) -> None:
    db.execute(SWITCH_ON)
    db.execute(BLACKOUT)
    message_id = mail_to(db, ANN)
    with Operator(dsn) as operator:
        async with running(mailing(dsn, inbox)):
            await until(lambda: bool(attempts_of(db, message_id)) and row_of(db, message_id).state == "pending")
            # As after many attempts: without the switch off, it would be due in five minutes.
            db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '5 min'")
            assert await asyncio.to_thread(operator.clear_redirect) == ClearedRedirect(was_on=True, message_count=1)
            await until(lambda: row_of(db, message_id).state == "sent")
    assert recipients(inbox) == [ANN]
    assert {outcome for _, outcome, _ in attempts_of(db, message_id)} == {"snoozed"}


def test_switching_on_again_replaces_the_target_and_the_end(db: psycopg.Connection) -> None:
    db.execute("SELECT pgoutbox.set_redirect('a@example.org', '1 hour')")
    db.execute("SELECT pgoutbox.set_redirect('b@example.org')")
    assert db.execute("SELECT target, until_at FROM pgoutbox.redirect").fetchall() == [("b@example.org", None)]


def record_attempt(db: psycopg.Connection, message_id: int, attempt_count: int, code: str) -> None:
    """Record an attempt that postponed its message for an hour."""
    db.execute(
        "UPDATE pgoutbox.message SET attempt_count = %s, lane = 1, available_at = now() + interval '1 h' WHERE id = %s",
        (attempt_count, message_id),
    )
    db.execute(
        "UPDATE pgoutbox.message SET attempts = coalesce(attempts, '[]')"
        " || to_jsonb((%s, 1, 'snoozed', 'w', now(), now(), NULL, NULL, %s, NULL)::pgoutbox.attempt) WHERE id = %s",
        (attempt_count, code, message_id),
    )


def test_one_call_wakes_a_limited_number_of_messages_and_the_operator_repeats_it(
    dsn: str, db: psycopg.Connection
) -> None:
    for _ in range(3):
        record_attempt(db, enqueue(db), 1, "redirect")
    assert db.execute("SELECT message_count FROM pgoutbox.clear_redirect(at_most => 1)").fetchall() == [(1,)]
    with Operator(dsn) as operator:
        assert operator.clear_redirect().message_count == 2


def test_switching_off_leaves_other_waiting_messages_alone(dsn: str, db: psycopg.Connection) -> None:
    held, retried, retried_since = enqueue(db), enqueue(db), enqueue(db)
    attempts = [(held, 1, "redirect"), (retried, 1, "unavailable")]
    attempts += [(retried_since, 1, "redirect"), (retried_since, 2, "unavailable")]
    for attempt in attempts:
        record_attempt(db, *attempt)
    with Operator(dsn) as operator:
        assert operator.clear_redirect() == ClearedRedirect(was_on=False, message_count=1)
    due_soon = [row_of(db, message_id).due_in_seconds < 3 for message_id in (held, retried, retried_since)]
    assert due_soon == [True, False, False]


# --- contents other than e-mail ---------------------------------------------------------------------------------------


def hooking(dsn: str, sink: Sink, **overrides: object) -> Worker:
    outbox = Outbox(settings_for(dsn, **overrides))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Content:
        return Webhook()

    return Worker(outbox, transports={"https": sink})


@pytest.mark.parametrize("by_operator", [True, False])
async def test_contents_that_cannot_be_redirected_wait_until_the_redirect_is_off(
    dsn: str, db: psycopg.Connection, by_operator: bool
) -> None:
    message_id = enqueue(db, destination="https://example.com/hook")
    sink = Sink()
    if by_operator:
        db.execute(SWITCH_ON)
    await hooking(dsn, sink, **({} if by_operator else {"redirect_to": TESTER})).run_once()
    assert (row_of(db, message_id).state, sink.sent, budget_of(db, message_id)) == ("pending", [], 11)
    ((_, outcome, error),) = attempts_of(db, message_id)
    assert (outcome, error) == (
        "snoozed",
        "not sent: a redirect is on, and the transport of 'https' does not follow it",
    )
    db.execute("SELECT pgoutbox.clear_redirect()")
    make_due(db, message_id)
    await hooking(dsn, sink).run_once()
    assert (row_of(db, message_id).state, len(sink.sent)) == ("sent", 1)


async def test_a_transport_that_follows_redirects_gets_the_one_that_is_on(dsn: str, db: psycopg.Connection) -> None:
    sink = Following()
    for overrides, is_blackout in (({}, False), ({"redirect_to": TESTER}, False), ({"redirect_to": TESTER}, True)):
        if is_blackout:
            db.execute(BLACKOUT)
        enqueue(db, destination="https://example.com/hook")
        await hooking(dsn, sink, **overrides).run_once()
    assert (sink.targets, sink.sent) == ([None, TESTER], [])
