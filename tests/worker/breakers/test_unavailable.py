"""Tests refused senders, wrong passwords and missing settings: messages wait without using up attempts, and are sent
later.

The mail servers and the workers are real. The repair is a server that accepts again, or a worker with other
settings. Nobody changes the messages.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from aiosmtpd.smtp import SMTP, Envelope, Session

from pgoutbox import Context, Email, Message, Outbox, RetryPolicy, Unavailable
from pgoutbox.message import Outcome, Sent
from pgoutbox.observability.events import LogEvent
from pgoutbox.transports import SmtpTransport
from pgoutbox.worker import Worker
from tests.support.dialogues import HOST
from tests.support.outbox_actions import attempts_of, cancel, enqueue, make_due, row_of, rows_of, running, settings_for
from tests.support.smtp_server import Inbox, Misbehaviour, accepting_server, mail_settings, scripted_server
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import psycopg

    from pgoutbox.transports import Content

pytestmark = pytest.mark.slow

HOUR = 3600.0
SOON = RetryPolicy.steps(0.02)
BRIEF: dict[str, Any] = {"breaker_cooldown_seconds": 0.1, "breaker_max_cooldown_seconds": 0.4}
LONG: dict[str, Any] = {"breaker_cooldown_seconds": HOUR, "breaker_max_cooldown_seconds": 8 * HOUR}
BUDGET = 11
ANN = "mailto:ann@example.com"
ALERT = "mailto:ops@example.org"


def outbox_for(
    dsn: str,
    settings: Mapping[str, object],
    *,
    sender: str | None = None,
    retry: RetryPolicy = SOON,
    tls_context: ssl.SSLContext | None = None,
) -> Outbox:
    """Build an outbox whose messages are e-mails; one with the payload "own" sets its own sender."""
    values = settings_for(dsn, **settings)
    transports = [] if tls_context is None else [SmtpTransport(values, tls_context=tls_context)]
    outbox = Outbox(values, transports=transports)

    @outbox.handler("greet", retry=retry)
    async def greet(message: Message, ctx: Context) -> Email:
        return Email(subject="Hello", text="Hi", sender=sender if message.payload == "own" else None)

    return outbox


def open_breakers(db: psycopg.Connection) -> list[str]:
    return [key for (key,) in db.execute("SELECT key FROM pgoutbox.breaker ORDER BY key").fetchall()]


def opening_alerts(db: psycopg.Connection) -> list[str]:
    """Return the keys of the breakers whose opening was announced."""
    rows = db.execute(
        "SELECT payload ->> 'breaker' FROM pgoutbox.message"
        " WHERE topic = 'pgoutbox.alert' AND payload ->> 'event' = 'opened' ORDER BY id"
    ).fetchall()
    return [key for (key,) in rows]


def are_held(db: psycopg.Connection, ids: Sequence[int]) -> bool:
    """Return whether each message is pending again after an attempt, or waits unclaimed for a breaker."""
    rows = rows_of(db, *ids)
    held = {row[0] for row in db.execute("SELECT id FROM pgoutbox.waiting_view WHERE reason = 'breaker'")}
    return all(row.state == "pending" and (row.attempt_count > 0 or row.id in held) for row in rows)


def are_sent(db: psycopg.Connection, ids: Sequence[int]) -> bool:
    return {row.state for row in rows_of(db, *ids)} == {"sent"}


def attempts_left(db: psycopg.Connection, ids: Sequence[int]) -> set[int]:
    """Return the remaining attempts of the unsent messages. A running attempt is not used up yet."""
    rows = rows_of(db, *ids)
    return {row.max_attempts - row.attempt_count + (row.state == "sending") for row in rows if row.state != "sent"}


def attempts_granted(db: psycopg.Connection, ids: Sequence[int]) -> set[int]:
    """Return how many attempts each message that is sent has left: the one that sent it is used up."""
    return {row.max_attempts - row.attempt_count for row in rows_of(db, *ids)}


def outcomes_of(db: psycopg.Connection, ids: Sequence[int]) -> set[str]:
    return {outcome for one in ids for _, outcome, _ in attempts_of(db, one)}


def error_of(db: psycopg.Connection, message_id: int) -> str:
    """Return why the latest attempt of this message did not send it, from its row and its history."""
    error = attempts_of(db, message_id)[-1][2]
    assert row_of(db, message_id).last_error == error
    return error or ""


def let_pass(db: psycopg.Connection, ids: Sequence[int]) -> None:
    """Age breakers and messages, as if the next run began when they are due."""
    db.execute("UPDATE pgoutbox.breaker SET retry_at = now()")
    for message_id in ids:
        make_due(db, message_id)


# --- the mail server refuses ------------------------------------------------------------------------------------------

# One answer of each cause: tests/transports/test_refusals.py has the causes of the others.
OF_SENDER = ["553 5.1.8 sender's domain does not exist", "450 4.1.8 sender's domain not found"]
OF_ACCOUNT = ["535 5.7.8 authentication failed"]


@pytest.mark.parametrize("answer", OF_SENDER + OF_ACCOUNT)
async def test_a_hundred_messages_survive_a_refusal_at_mail_and_are_sent_after_the_repair(
    dsn: str, db: psycopg.Connection, answer: str
) -> None:
    async with scripted_server({"MAIL": answer}) as server:
        settings = mail_settings(server.port) | BRIEF | {"alert_destination": ALERT}
        ids = [enqueue(db, destination=ANN) for _ in range(100)]
        async with running(Worker(outbox_for(dsn, settings))):
            await until(lambda: are_held(db, ids))
            key = f"smtp:{HOST}:{server.port}" + (" sender PGOUTBOX_SMTP_SENDER" if answer in OF_SENDER else "")
            assert open_breakers(db) == [key]
            assert opening_alerts(db) == [key]
            assert attempts_left(db, ids) == {BUDGET}
            assert answer in error_of(db, ids[0])
            server.answers = {}
            await until(lambda: are_sent(db, ids))
            await until(lambda: not open_breakers(db))
        # A message that has waited a second for a slot is released, for idle workers. That uses up no attempt either.
        assert {"snoozed"} <= outcomes_of(db, ids) <= {"snoozed", "released"}
        assert attempts_granted(db, ids) == {BUDGET - 1}
        assert len(opening_alerts(db)) == 1


@pytest.mark.parametrize(
    ("step", "answer", "state"),
    [
        ("RCPT", "550 5.1.1 no such user", "failed"),
        ("RCPT", "550 5.7.1 not to this recipient", "pending"),
        ("DATA", "554 5.7.1 looks like spam", "failed"),
        ("MAIL", "552 5.3.4 too big", "failed"),
        ("RCPT", "451 4.7.1 try later", "pending"),
        ("MAIL", "451 4.7.1 greylisted", "pending"),
    ],
)
async def test_a_refusal_of_one_email_uses_up_its_attempt_and_delays_no_other(
    dsn: str, db: psycopg.Connection, step: str, answer: str, state: str
) -> None:
    async with scripted_server({step: [answer]}) as server:
        outbox = outbox_for(dsn, mail_settings(server.port) | {"concurrency": 1}, retry=RetryPolicy.steps(HOUR))
        refused, other = (enqueue(db, destination=ANN) for _ in range(2))
        await Worker(outbox).run_once()
    assert row_of(db, refused).state == state
    assert attempts_left(db, [refused]) == {BUDGET - 1}
    assert row_of(db, other).state == "sent"
    assert open_breakers(db) == []


REFUSED_LATE = [
    ("RCPT", "554 5.7.1 <{rcpt}>: Relay access denied", ""),
    ("RCPT", "553 5.7.1 <{sender}>: Sender address rejected: not owned by user club", " sender PGOUTBOX_SMTP_SENDER"),
    (".", "550 5.7.1 From header does not match the account", " sender PGOUTBOX_SMTP_SENDER"),
    (".", "554 5.7.1 no", ""),
    ("RCPT", "451 Temporary local problem - please try later", ""),
    ("RCPT", "450 4.7.650 The mail server [192.0.2.7] has been temporarily rate limited", ""),
]


@pytest.mark.parametrize(("step", "answer", "part"), REFUSED_LATE)
async def test_forty_messages_survive_a_refusal_that_is_not_their_own_fault(
    dsn: str, db: psycopg.Connection, step: str, answer: str, part: str
) -> None:
    async with scripted_server({}) as server:
        settings = mail_settings(server.port) | BRIEF | {"alert_destination": ALERT}
        text = answer.format(rcpt="person0@example.com", sender=settings["smtp_sender"])
        server.answers = {step: text}
        ids = [enqueue(db, destination=f"mailto:person{n}@example.com", max_attempts=3) for n in range(40)]
        async with running(Worker(outbox_for(dsn, settings))):
            await until(lambda: are_held(db, ids))
            assert open_breakers(db) == [f"smtp:{HOST}:{server.port}{part}"]
            assert opening_alerts(db) == open_breakers(db)
            assert text in error_of(db, ids[0])
            server.answers = {}
            await until(lambda: are_sent(db, ids))
            await until(lambda: not open_breakers(db))


@pytest.mark.parametrize("answer", ["550 5.1.1 no such user", "554 5.7.1 no"])
async def test_one_refused_recipient_among_others_holds_nothing(dsn: str, db: psycopg.Connection, answer: str) -> None:
    async with scripted_server({"RCPT TO:<bad@example.com>": answer}) as server:
        settings = mail_settings(server.port) | LONG | {"concurrency": 1, "alert_destination": ALERT}
        bad = enqueue(db, destination="mailto:bad@example.com", max_attempts=6)
        others = [enqueue(db, destination=f"mailto:person{n}@example.com") for n in range(3)]
        async with running(Worker(outbox_for(dsn, settings))):
            await until(lambda: row_of(db, bad).state == "failed")
            await until(lambda: are_sent(db, others))
        assert open_breakers(db) == opening_alerts(db) == []


BEFORE_MAIL = [
    {"connect": "421 4.3.2 busy"},
    {"connect": Misbehaviour.DROP},
    {"EHLO": Misbehaviour.DROP},
    {"STARTTLS": "454 4.7.0 TLS not available due to local problem"},
    {"STARTTLS": "220 go ahead, without TLS"},
    {"AUTH": "454 4.7.0 Temporary authentication failure"},
    {"MAIL": "451 4.7.1 Service unavailable - try again later"},
    {"MAIL": "452 4.3.1 Insufficient system storage"},
]


@pytest.mark.parametrize("answers", BEFORE_MAIL)
async def test_a_single_attempt_survives_every_fault_before_the_email(
    dsn: str, db: psycopg.Connection, answers: dict[str, str]
) -> None:
    """Each run is a process of its own, as from cron. The fault lasts too short for a breaker."""
    authority = trustme.CA()
    server_tls, client_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert(HOST).configure_cert(server_tls)
    authority.configure_trust(client_tls)
    has_tls = "without TLS" not in answers.get("STARTTLS", "")
    message_id = enqueue(db, destination=ANN, max_attempts=1)
    async with scripted_server(answers, extensions=["STARTTLS", "AUTH PLAIN"], starttls=server_tls) as server:
        settings = mail_settings(server.port) | LONG | {"smtp_security": "starttls"}
        outbox = outbox_for(dsn, settings | {"smtp_username": "club", "smtp_password": "x"}, tls_context=client_tls)
        server.tls_context = server_tls if has_tls else None
        for _ in range(2):
            await Worker(outbox).run_once()
            make_due(db, message_id)
        assert (attempts_left(db, [message_id]), open_breakers(db)) == ({1}, [])
        server.answers, server.tls_context = {}, server_tls
        await Worker(outbox).run_once()
        assert are_sent(db, [message_id])


@pytest.mark.parametrize("runs", [1, 4])
async def test_messages_with_three_attempts_survive_a_wrong_host(dsn: str, db: psycopg.Connection, runs: int) -> None:
    message_id = enqueue(db, destination=ANN, max_attempts=3)
    wrong = mail_settings(25) | LONG | {"smtp_host": "no-such-host.invalid", "alert_destination": ALERT}
    for _ in range(runs):
        await Worker(outbox_for(dsn, wrong)).run_once()
        db.execute("UPDATE pgoutbox.breaker SET retry_at = now()")
        make_due(db, message_id)
    assert attempts_left(db, [message_id]) == {3}
    assert len(opening_alerts(db)) == 1
    async with accepting_server() as inbox:
        await Worker(outbox_for(dsn, mail_settings(inbox.port) | LONG)).run_once()
    assert are_sent(db, [message_id])


async def test_cron_runs_hold_refusals_without_a_reason_after_three_recipients(
    dsn: str, db: psycopg.Connection
) -> None:
    """Each run is a process of its own, and sends to one new recipient."""
    async with scripted_server({"RCPT": "554 5.7.1 no"}) as server:
        settings = mail_settings(server.port) | LONG | {"alert_destination": ALERT}
        ids: list[int] = []
        for number in range(12):
            ids.append(enqueue(db, destination=f"mailto:person{number}@example.com", max_attempts=6))
            await Worker(outbox_for(dsn, settings, retry=RetryPolicy.steps(3600, jitter=0))).run_once()
            let_pass(db, ids)
        assert opening_alerts(db) == [f"smtp:{HOST}:{server.port}"]
        assert {row.state for row in rows_of(db, *ids)} == {"pending"}
        assert min(attempts_left(db, ids)) >= 6 - 3
        server.answers = {}
        await Worker(outbox_for(dsn, settings, retry=RetryPolicy.steps(3600, jitter=0))).run_once()
        assert are_sent(db, ids)


async def test_cron_runs_hold_nothing_for_one_recipient_that_is_refused_without_a_reason(
    dsn: str, db: psycopg.Connection
) -> None:
    async with scripted_server({"RCPT": "554 5.7.1 no"}) as server:
        bad = enqueue(db, destination=ANN, max_attempts=7)
        for _ in range(7):
            await Worker(outbox_for(dsn, mail_settings(server.port) | LONG)).run_once()
            assert open_breakers(db) == []
            make_due(db, bad)
        assert row_of(db, bad).state == "failed"


async def test_a_worker_that_starts_while_refusals_without_a_reason_hold_e_mail_uses_up_no_attempt(
    dsn: str, db: psycopg.Connection
) -> None:
    async with scripted_server({"RCPT": "554 5.7.1 no"}) as server:
        settings = mail_settings(server.port) | LONG
        ids = [enqueue(db, destination=f"mailto:person{number}@example.com") for number in range(4)]
        await Worker(outbox_for(dsn, settings)).run_once()
        assert len(open_breakers(db)) == 1
        left = attempts_left(db, ids)
        attempted = sum(row.attempt_count for row in rows_of(db, *ids))
        let_pass(db, ids)
        async with running(Worker(outbox_for(dsn, settings))):
            await until(lambda: sum(row.attempt_count for row in rows_of(db, *ids)) > attempted)
            await until(lambda: are_held(db, ids))
        assert attempts_left(db, ids) == left


async def test_refused_recipients_do_not_keep_the_breaker_open_for_others(dsn: str, db: psycopg.Connection) -> None:
    """One message at a time is the probe, and each may be one of those that are refused."""
    refused = [f"bad{number}@example.com" for number in range(3)]
    async with scripted_server({f"RCPT TO:<{one}>": "554 5.7.1 no" for one in refused}) as server:
        settings = mail_settings(server.port) | BRIEF | {"alert_destination": ALERT, "concurrency": 1}
        bad = [enqueue(db, destination=f"mailto:{one}", max_attempts=4) for one in refused]
        async with running(Worker(outbox_for(dsn, settings))):
            await until(lambda: opening_alerts(db))
            good = enqueue(db, destination=ANN)
            await until(lambda: are_sent(db, [good]))
            await until(lambda: {row.state for row in rows_of(db, *bad)} == {"failed"})
            await until(lambda: not open_breakers(db))
        assert len(opening_alerts(db)) == 1


@pytest.mark.parametrize("others", [(), ("good@example.com",)])
async def test_one_refused_recipient_of_many_emails_holds_no_others(
    dsn: str, db: psycopg.Connection, others: tuple[str, ...]
) -> None:
    """The messages have different destinations. Only the answer names the recipient that is the same in all."""
    async with scripted_server({"RCPT TO:<bad@example.com>": "554 5.7.1 no"}) as server:
        outbox = Outbox(settings_for(dsn, **mail_settings(server.port), **LONG))

        @outbox.handler("greet", retry=RetryPolicy.steps(3600))
        async def greet(message: Message, ctx: Context) -> Email:
            return Email(to=("bad@example.com", *others), subject="Hello", text="Hello")

        for number in range(6):
            enqueue(db, destination=f"mailto:person{number}@example.com")
        await Worker(outbox).run_once()
        assert open_breakers(db) == []


GROUP = "550 5.7.1 RESOLVER.RST.AuthRequired; authentication required"


async def test_a_recipient_that_only_insiders_may_write_to_holds_the_others_once_and_fails(
    dsn: str, db: psycopg.Connection
) -> None:
    """The answer reads like one about the account. Other recipients that are accepted show that it is not."""
    async with scripted_server({"RCPT TO:<group@example.com>": GROUP}) as server:
        settings = mail_settings(server.port) | BRIEF | {"alert_destination": ALERT, "concurrency": 1}
        group = enqueue(db, destination="mailto:group@example.com", max_attempts=3)
        async with running(Worker(outbox_for(dsn, settings))):
            await until(lambda: opening_alerts(db))
            for number in range(4):
                other = enqueue(db, destination=f"mailto:person{number}@example.com")
                await until(lambda other=other: are_sent(db, [other]))  # type: ignore[misc]
            await until(lambda: row_of(db, group).state == "failed")
            await until(lambda: not open_breakers(db))
            assert len(opening_alerts(db)) == 1


async def test_cron_runs_remember_the_recipient_that_is_refused_alone(dsn: str, db: psycopg.Connection) -> None:
    async with scripted_server({"RCPT TO:<group@example.com>": GROUP}) as server:
        settings = mail_settings(server.port) | LONG | {"alert_destination": ALERT, "concurrency": 1}
        ids = [enqueue(db, destination="mailto:group@example.com")]
        for number in range(6):
            ids.append(enqueue(db, destination=f"mailto:person{number}@example.com"))
            await Worker(outbox_for(dsn, settings)).run_once()
            let_pass(db, ids)
        assert opening_alerts(db) == [f"smtp:{HOST}:{server.port}"]
        assert are_sent(db, ids[1:])
        assert open_breakers(db) == []


@pytest.mark.parametrize("step", ["RCPT", "."])
async def test_a_sender_refused_after_mail_is_recognised_by_its_code(
    dsn: str, db: psycopg.Connection, step: str
) -> None:
    """Postfix checks the sender with the recipient, and Exchange after the content."""
    async with scripted_server({step: "550 5.7.60 may not send as this sender"}) as server:
        ids = [enqueue(db, destination=ANN) for _ in range(5)]
        outbox = outbox_for(dsn, mail_settings(server.port) | LONG)
        await Worker(outbox).run_once()
    assert open_breakers(db) == [f"smtp:{HOST}:{server.port} sender PGOUTBOX_SMTP_SENDER"]
    assert attempts_left(db, ids) == {BUDGET}


async def test_a_refused_sender_of_an_email_holds_back_only_emails_of_that_sender(
    dsn: str, db: psycopg.Connection
) -> None:
    refused = "MAIL FROM:<tenant@example.net>"
    async with scripted_server({refused: "553 5.1.8 unknown"}) as server:
        outbox = outbox_for(dsn, mail_settings(server.port) | BRIEF, sender="A tenant <tenant@example.net>")
        own = [enqueue(db, payload="own", destination=ANN) for _ in range(10)]
        async with running(Worker(outbox)):
            await until(lambda: are_held(db, own))
            assert open_breakers(db) == [f"smtp:{HOST}:{server.port} sender tenant@example.net"]
            others = [enqueue(db, destination=ANN) for _ in range(10)]
            await until(lambda: are_sent(db, others))
            assert attempts_left(db, own) == {BUDGET}
            server.answers = {}
            await until(lambda: are_sent(db, own))
            await until(lambda: not open_breakers(db))


class TenantRefused(Inbox):
    """Refuses the `From` of one tenant after the content, as Exchange and providers do."""

    is_refusing = True

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802 - aiosmtpd
        if self.is_refusing and b"tenant@example.net" in (envelope.original_content or b""):
            return "550 5.7.60 may not send as this sender"
        return await super().handle_DATA(server, session, envelope)


async def test_a_refused_from_holds_no_other_sender_with_an_envelope_sender_of_the_same_domain(
    dsn: str, db: psycopg.Connection
) -> None:
    refusing = TenantRefused()
    async with accepting_server(refusing) as inbox:
        settings = mail_settings(inbox.port)
        outbox = Outbox(settings_for(dsn, **settings | BRIEF | {"alert_destination": ALERT}))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> Email:
            bounces = f"bounces+{message.id}@lists.example.org"
            return Email(subject="Hello", text="Hi", sender=str(message.payload), envelope_sender=bounces)

        async with running(Worker(outbox)):
            refused = [
                enqueue(db, payload="tenant@example.net", destination=f"mailto:person{n}@example.com", max_attempts=1)
                for n in range(5)
            ]
            await until(lambda: are_held(db, refused))
            others = [enqueue(db, payload="club@example.org", destination=ANN) for _ in range(5)]
            await until(lambda: are_sent(db, others))
            assert open_breakers(db) == [f"smtp:{HOST}:{inbox.port} sender tenant@example.net"]
            assert opening_alerts(db) == open_breakers(db)
            assert outcomes_of(db, others) <= {"sent"}
            refusing.is_refusing = False
            await until(lambda: are_sent(db, refused))


async def test_a_refused_sender_is_probed_by_one_message(dsn: str, db: psycopg.Connection) -> None:
    async with scripted_server({"MAIL": "553 5.1.8 unknown"}) as server:
        outbox = outbox_for(dsn, mail_settings(server.port) | LONG | {"concurrency": 1})
        ids = [enqueue(db, destination=ANN) for _ in range(20)]
        await Worker(outbox).run_once()
    assert server.verbs.count("MAIL") == 1
    assert are_held(db, ids)
    assert all(row.due_in_seconds > HOUR / 2 for row in rows_of(db, *ids))


async def test_a_refusal_at_mail_is_not_an_unknown_outcome(dsn: str, db: psycopg.Connection) -> None:
    async with scripted_server({"MAIL": "530 5.7.0 authentication required"}) as server:
        outbox = Outbox(settings_for(dsn, **mail_settings(server.port) | BRIEF))

        @outbox.handler("greet", on_unknown="hold")
        async def greet(message: Message, ctx: Context) -> Email:
            return Email(subject="Hello", text="Hi")

        ids = [enqueue(db, destination=ANN, max_attempts=1) for _ in range(5)]
        async with running(Worker(outbox)):
            await until(lambda: are_held(db, ids))
            server.answers = {}
            await until(lambda: are_sent(db, ids))


async def test_cron_runs_hold_messages_back_at_the_first_failure_and_pause_longer(
    dsn: str, db: psycopg.Connection
) -> None:
    """Each run is a new process without the counts of the previous one."""
    async with scripted_server({"MAIL": "553 5.1.8 unknown"}) as server:
        settings = mail_settings(server.port) | LONG | {"alert_destination": ALERT, "concurrency": 1}
        ids = [enqueue(db, destination=ANN) for _ in range(3)]
        pauses = []
        for _ in range(5):
            await Worker(outbox_for(dsn, settings)).run_once()
            pauses += [pause for (pause,) in db.execute("SELECT cooldown_seconds FROM pgoutbox.breaker").fetchall()]
            db.execute("UPDATE pgoutbox.breaker SET retry_at = now()")
            for message_id in ids:
                make_due(db, message_id)
        assert pauses == [HOUR, 2 * HOUR, 4 * HOUR, 8 * HOUR, 8 * HOUR]
        assert len(opening_alerts(db)) == 1
        assert attempts_left(db, ids) == {BUDGET}
        server.answers = {}
        await Worker(outbox_for(dsn, settings)).run_once()
        assert are_sent(db, ids)


async def test_without_breakers_messages_wait_longer_each_time_and_none_fails(dsn: str, db: psycopg.Connection) -> None:
    retry = RetryPolicy(base=10, cap=HOUR, jitter=0)
    async with scripted_server({"MAIL": "553 5.1.8 unknown"}) as server:
        outbox = outbox_for(dsn, mail_settings(server.port) | {"breaker_enabled": False}, retry=retry)
        message_id = enqueue(db, destination=ANN, max_attempts=2)
        for delay in (10, 20, 40, 80):
            await Worker(outbox).run_once()
            row = row_of(db, message_id)
            assert (row.state, row.max_attempts - row.attempt_count) == ("pending", 2)
            assert delay - 5 < row.due_in_seconds <= delay
            make_due(db, message_id)
        assert open_breakers(db) == []
        assert error_of(db, message_id) == "MAIL: 553 5.1.8 unknown"
        server.answers = {}
        await Worker(outbox).run_once()
    assert row_of(db, message_id).state == "sent"


# --- missing settings -------------------------------------------------------------------------------------------------


async def held_by(db: psycopg.Connection, ids: Sequence[int], outbox: Outbox) -> None:
    """Let a worker hold all of them back, without using up an attempt and with one alert."""
    await Worker(outbox).run_once()
    assert are_held(db, ids)
    assert attempts_left(db, ids) == {BUDGET}
    assert len(open_breakers(db)) == 1
    assert opening_alerts(db) == open_breakers(db)


async def delivered_by(db: psycopg.Connection, ids: Sequence[int], outbox: Outbox) -> None:
    """Let a worker that was started after the repair deliver them when they are due."""
    db.execute("UPDATE pgoutbox.breaker SET retry_at = now()")
    for message_id in ids:
        make_due(db, message_id)
    async with running(Worker(outbox)):
        await until(lambda: are_sent(db, ids))
        await until(lambda: not open_breakers(db))


async def test_messages_wait_for_a_worker_with_a_mail_server(dsn: str, db: psycopg.Connection) -> None:
    ids = [enqueue(db, destination=ANN) for _ in range(100)]
    await held_by(db, ids, outbox_for(dsn, LONG | {"alert_destination": ALERT}))
    assert open_breakers(db) == ["mailto:no-transport"]
    assert "set PGOUTBOX_SMTP_HOST" in error_of(db, ids[0])
    async with accepting_server() as inbox:
        await delivered_by(db, ids, outbox_for(dsn, mail_settings(inbox.port)))


async def test_messages_without_a_sender_wait_for_the_setting(dsn: str, db: psycopg.Connection) -> None:
    ids = [enqueue(db, destination=ANN) for _ in range(100)]
    own = enqueue(db, payload="own", destination=ANN)
    async with accepting_server() as inbox:
        settings = mail_settings(inbox.port)
        lacking = settings | LONG | {"smtp_sender": None, "alert_destination": ALERT}
        await held_by(db, ids, outbox_for(dsn, lacking, sender="own@example.org"))
        assert open_breakers(db) == [f"smtp:{HOST}:{inbox.port} sender PGOUTBOX_SMTP_SENDER"]
        assert "PGOUTBOX_SMTP_SENDER is not set" in error_of(db, ids[0])
        assert row_of(db, own).state == "sent"
        await delivered_by(db, ids, outbox_for(dsn, settings))


async def test_a_misspelt_scheme_waits_and_is_visible(dsn: str, db: psycopg.Connection) -> None:
    ids = [enqueue(db, destination="mial:ann@example.com") for _ in range(100)]
    async with accepting_server() as inbox:
        await held_by(db, ids, outbox_for(dsn, mail_settings(inbox.port) | LONG | {"alert_destination": ALERT}))
        assert open_breakers(db) == ["mial:no-transport"]
        assert "no transport for the scheme 'mial'" in error_of(db, ids[0])
        ((reasons,),) = db.execute(
            "SELECT array_agg(DISTINCT reason) FROM pgoutbox.waiting_view WHERE id = ANY (%s)", [ids]
        )
        assert reasons == ["breaker"]


async def test_messages_held_back_for_a_missing_transport_are_not_rendered(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1, **LONG))
    rendered: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Email:
        rendered.append(message.id)
        return Email(subject="Hello", text="Hi")

    first, *_ = [enqueue(db, destination=ANN) for _ in range(20)]
    await Worker(outbox).run_once()
    assert rendered == [first]


async def test_messages_wait_for_the_right_password(dsn: str, db: psycopg.Connection) -> None:
    authority = trustme.CA()
    server_tls, client_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert(HOST).configure_cert(server_tls)
    authority.configure_trust(client_tls)
    ids = [enqueue(db, destination=ANN) for _ in range(100)]
    async with accepting_server(starttls=server_tls, password=b"right") as inbox:

        def with_password(password: str, **overrides: object) -> Outbox:
            settings = mail_settings(inbox.port) | {"smtp_security": "starttls", "smtp_username": "club"}
            return outbox_for(dsn, settings | {"smtp_password": password} | overrides, tls_context=client_tls)

        await held_by(db, ids, with_password("wrong", **LONG, alert_destination=ALERT))
        assert open_breakers(db) == [f"smtp:{HOST}:{inbox.port}"]
        assert "AUTH: 535" in error_of(db, ids[0])
        await delivered_by(db, ids, with_password("right"))


async def test_an_alert_for_a_missing_transport_waits_and_creates_no_other_alert(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = outbox_for(dsn, LONG | {"alert_destination": ALERT})
    enqueue(db, destination=ANN)
    for _ in range(3):
        await Worker(outbox).run_once()
        db.execute("UPDATE pgoutbox.message_live SET available_at = now() - interval '1 ms' WHERE state = 'pending'")
    assert opening_alerts(db) == ["mailto:no-transport"]
    (alert,) = (row for row in rows_of(db) if row.id == max(row.id for row in rows_of(db)))
    assert (alert.state, alert.max_attempts - alert.attempt_count) == ("pending", BUDGET)


def alert_ids(db: psycopg.Connection) -> list[int]:
    return [one for (one,) in db.execute("SELECT id FROM pgoutbox.message WHERE topic = 'pgoutbox.alert'").fetchall()]


async def test_an_alert_uses_up_no_attempt_while_its_own_breaker_is_open(dsn: str, db: psycopg.Connection) -> None:
    """An alert never probes, so it may be sent while the breaker is half-open."""
    async with scripted_server({"RCPT": "554 5.7.1 no"}) as server:
        outbox = outbox_for(dsn, mail_settings(server.port) | BRIEF | {"alert_destination": ALERT})
        ids = [enqueue(db, destination=f"mailto:person{n}@example.com") for n in range(3)]
        async with running(Worker(outbox)):
            await until(lambda: are_held(db, ids) and opening_alerts(db))
            for message_id in ids:
                cancel(db, message_id)
            (alert,) = alert_ids(db)
            await until(lambda: "ops@" in str(server.commands) and row_of(db, alert).state == "pending")
            assert attempts_left(db, [alert]) == {BUDGET}
            server.answers = {}
            await until(lambda: are_sent(db, [alert]))


async def test_an_alert_uses_up_no_attempt_in_a_run_that_begins_with_it(dsn: str, db: psycopg.Connection) -> None:
    async with scripted_server({"RCPT": "554 5.7.1 no"}) as server:
        settings = mail_settings(server.port) | LONG | {"alert_destination": ALERT}
        for number in range(3):
            enqueue(db, destination=f"mailto:person{number}@example.com")
        await Worker(outbox_for(dsn, settings)).run_once()
        (alert,) = alert_ids(db)
        for _ in range(3):
            make_due(db, alert)
            await Worker(outbox_for(dsn, settings)).run_once()
        assert attempts_left(db, [alert]) == {BUDGET}
        assert "ops@" in str(server.commands)


# --- custom handlers and transports -----------------------------------------------------------------------------------


async def test_a_handler_that_raises_unavailable_waits_without_using_up_attempts(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn))
    refused = Unavailable("the token is refused")
    answers: list[Exception | None] = [refused, Unavailable("busy", 60), refused, None]

    @outbox.handler("greet", retry=RetryPolicy.steps(HOUR, 0))
    async def greet(message: Message, ctx: Context) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    message_id = enqueue(db, max_attempts=1)
    for delay in (HOUR, 60, 1):
        await Worker(outbox).run_once()
        row = row_of(db, message_id)
        assert (row.state, row.max_attempts - row.attempt_count) == ("pending", 1)
        ((paused,),) = db.execute(
            "SELECT extract(epoch FROM m.available_at - a.ended_at)::float8 FROM pgoutbox.message AS m"
            " JOIN pgoutbox.attempt_view AS a ON a.message_id = m.id AND a.attempt_count = m.attempt_count"
        ).fetchall()
        assert paused == delay
        make_due(db, message_id)
    await Worker(outbox).run_once()
    assert row_of(db, message_id).state == "sent"
    assert open_breakers(db) == []


async def test_a_breaker_key_unknown_before_the_send_opens_nothing(dsn: str, db: psycopg.Connection) -> None:
    """No later message would check that breaker, so none would close it."""

    class Pager:
        schemes = ("pager",)

        async def send(self, message: Message[object], content: Content) -> Outcome:
            return Unavailable("the token is refused", breaker="pager:token") if message.payload else Sent()

        async def aclose(self) -> None: ...

    outbox = Outbox(settings_for(dsn), transports=[Pager()])

    @outbox.handler("greet", retry=SOON)
    async def greet(message: Message, ctx: Context) -> Email:
        return Email(subject="Hello", text="Hi")

    refused = enqueue(db, payload="refused", destination="pager:1")
    other = enqueue(db, destination="pager:1")
    await Worker(outbox).run_once()
    assert row_of(db, other).state == "sent"
    assert attempts_left(db, [refused]) == {BUDGET}
    assert open_breakers(db) == []


# --- warnings at the start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "setting", "reason", "topics"),
    [
        ({}, "PGOUTBOX_SMTP_HOST", "is not set", ("greet",)),
        ({"smtp_host": "mail.club.org"}, "PGOUTBOX_SMTP_SENDER", "is not set", ()),
        (
            {"smtp_host": "mail.club.org", "smtp_sender": "you@example.org"},
            "PGOUTBOX_SMTP_SENDER",
            "is a placeholder",
            (),
        ),
    ],
)
async def test_a_worker_warns_at_its_start_of_incomplete_email_settings(
    dsn: str,
    db: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, object],
    setting: str,
    reason: str,
    topics: tuple[str, ...],
) -> None:
    worker = Worker(outbox_for(dsn, settings))
    await worker.run_once()
    (record,) = (record for record in caplog.records if getattr(record, "event", "") == LogEvent.TRANSPORT_NOT_READY)
    assert record.levelname == "WARNING"
    assert (vars(record)["setting"], vars(record)["reason"], vars(record)["topics"]) == (setting, reason, topics)


async def test_a_worker_with_complete_email_settings_logs_no_warning(
    dsn: str, db: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await Worker(outbox_for(dsn, {"smtp_host": "mail.club.org", "smtp_sender": "a@club.org"})).run_once()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
