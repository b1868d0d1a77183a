"""Tests refusals of real mail servers, which are Debian's Postfix and Exim: none loses e-mail that a setting refuses.

Each refusal is made by the server's own means. The repair is a change of the server's configuration. Nobody changes
the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from pgoutbox import Context, Email, Message, Outbox, RetryPolicy
from pgoutbox.doctor import Finding, Level, examine
from pgoutbox.message import Permanent, Sent, State
from pgoutbox.transports import SmtpTransport
from pgoutbox.worker import Worker
from tests.support.dialogues import HOST, listening
from tests.support.mail_servers import (
    LOCAL_DOMAIN,
    LOCAL_USER,
    Exim,
    Postfix,
    running_exim,
    running_postfix,
)
from tests.support.outbox_actions import attempts_of, enqueue, row_of, rows_of, running, settings_for
from tests.support.ports import free_ports
from tests.support.sends import closing, outgoing
from tests.support.settings import settings_with
from tests.support.smtp_server import mail_settings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    import psycopg

    from pgoutbox.message import Outcome

pytestmark = pytest.mark.slow

COUNT: Final = 20
BRIEF: Final[dict[str, Any]] = {"breaker_cooldown_seconds": 0.1, "breaker_max_cooldown_seconds": 0.4}
SENDER: Final = "club@example.org"
NOT_OURS: Final = {"mynetworks": "192.0.2.1/32"}
UNKNOWN_NETWORK: Final = {"smtpd_client_event_limit_exceptions": ""}

# Each with the settings that refuse, words of Postfix' answer, and the part that a person has to repair.
REFUSALS: Final[dict[str, tuple[dict[str, str], str, str]]] = {
    "relay by default": (NOT_OURS, "454 4.7.1 .*Relay access denied", ""),
    "relay": (
        NOT_OURS | {"smtpd_relay_restrictions": "reject_unauth_destination"},
        "554 5.7.1 .*Relay access denied",
        "",
    ),
    "sender": (
        {"smtpd_sender_restrictions": f"check_sender_access inline:{{ {SENDER}=REJECT }}"},
        f"554 5.7.1 <{SENDER}>: Sender address rejected",
        "sender",
    ),
    "sender of another": (
        {
            "smtpd_sender_restrictions": "check_sender_access inline:{ {"
            f"{SENDER} = 553 5.7.1 <{SENDER}>: Sender address rejected: not owned by user club" + "} }"
        },
        "not owned by user club",
        "sender",
    ),
    "client": ({"smtpd_client_restrictions": "reject"}, "Client host rejected: Access denied", ""),
    "helo": (
        {
            "smtpd_helo_required": "yes",
            "smtpd_helo_restrictions": "check_helo_access inline:{ app.example.org=REJECT }",
        },
        "Helo command rejected",
        "",
    ),
    "blocklist": (
        {
            "smtpd_client_restrictions": "check_client_access inline:{ {127.0.0.1 = 554 5.7.1 Service unavailable; "
            "Client host [127.0.0.1] blocked using bl.example.org} }"
        },
        "blocked using bl.example.org",
        "",
    ),
    "client at connect": (
        {"smtpd_client_restrictions": "reject", "smtpd_delay_reject": "no"},
        "Client host rejected",
        "",
    ),
    "milter": ({"smtpd_milters": f"inet:{HOST}:1"}, "451 4.7.1 Service unavailable", ""),
    "soft bounce": (
        {"soft_bounce": "yes", "smtpd_recipient_restrictions": "reject"},
        "454 4.7.1 .*Recipient address rejected: Access denied",
        "",
    ),
    "rate": (UNKNOWN_NETWORK | {"smtpd_client_message_rate_limit": "3"}, "too much mail", ""),
    "rate of recipients": (UNKNOWN_NETWORK | {"smtpd_client_recipient_rate_limit": "3"}, "too many recipients", ""),
}
OTHERS: Final[dict[str, dict[str, str]]] = {
    "plain": {},
    "no relay": NOT_OURS,
    "size": {"message_size_limit": "100"},
    "recipients": {"smtpd_recipient_limit": "2"},
    "connections": UNKNOWN_NETWORK | {"smtpd_client_connection_count_limit": "2"},
    "connection rate": UNKNOWN_NETWORK | {"smtpd_client_connection_rate_limit": "2"},
    "quota": {
        "smtpd_recipient_restrictions": "check_recipient_access inline:{ {person7@x.test = 552 5.2.2 Mailbox full} }"
    },
}


@pytest.fixture(scope="module")
def policy_port() -> int:
    """Return the port of the policy service of the tests, which is free until a test starts it."""
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def postfix(policy_port: int) -> Iterator[Postfix]:
    policy = {"smtpd_recipient_restrictions": f"check_policy_service inet:{HOST}:{policy_port}"}
    services = {name: settings for name, (settings, _, _) in REFUSALS.items()}
    with running_postfix({**services, **OTHERS, "greylist": policy}) as server:
        yield server


@pytest.fixture(scope="module")
def exim() -> Iterator[Exim]:
    with running_exim() as server:
        yield server


def outbox_at(dsn: str, port: int, *, to: Sequence[str] = (), retry: RetryPolicy | None = None) -> Outbox:
    settings = mail_settings(port) | BRIEF | {"alert_destination": "mailto:ops@example.org"}
    outbox = Outbox(settings_for(dsn, **settings))

    @outbox.handler("greet", retry=retry or RetryPolicy.steps(0.02))
    async def greet(message: Message, ctx: Context) -> Email:
        text = "Hi " * 100
        return Email(subject="Hello", text=text, to=list(to)) if to else Email(subject="Hello", text=text)

    return outbox


def alerts(db: psycopg.Connection) -> list[str]:
    return [
        breaker
        for (breaker,) in db.execute(
            "SELECT payload ->> 'breaker' FROM pgoutbox.message"
            " WHERE topic = 'pgoutbox.alert' AND payload ->> 'event' = 'opened' ORDER BY id"
        ).fetchall()
    ]


def persons(db: psycopg.Connection) -> list[int]:
    return [enqueue(db, destination=f"mailto:person{n}@x.test", max_attempts=3) for n in range(COUNT)]


def are_sent(db: psycopg.Connection, ids: Sequence[int]) -> bool:
    return {row.state for row in rows_of(db, *ids)} == {State.SENT}


def has_error(db: psycopg.Connection, ids: Sequence[int], words: str) -> bool:
    return any(re.search(words, error or "") for one in ids for _, _, error in attempts_of(db, one))


async def doctor_says(port: int, sender: str = SENDER) -> list[Finding]:
    """Return the findings about the server of the doctor that is run before the first e-mail."""
    given = mail_settings(port) | {"smtp_sender": sender, "dsn": "host=127.0.0.1 port=1"}
    findings = await asyncio.to_thread(lambda: list(examine(settings_with(**given))))
    return [finding for finding in findings if finding.check == "smtp" and "PGOUTBOX_SMTP_SENDER=" not in finding.what]


async def expect_doctor(port: int, words: str, *, is_limit: bool) -> None:
    """Check that the doctor names a refusal before the first e-mail, unless only many e-mails meet it."""
    (finding,) = await doctor_says(port)
    assert finding.level is (Level.OK if is_limit else Level.PROBLEM), finding
    assert is_limit or re.search(words, finding.what), finding


@pytest.mark.parametrize("reason", REFUSALS)
async def test_a_refusal_by_postfix_loses_nothing_and_everything_is_sent_after_the_repair(
    dsn: str, db: psycopg.Connection, postfix: Postfix, reason: str
) -> None:
    _, words, part = REFUSALS[reason]
    port = postfix.ports[reason]
    await expect_doctor(port, words, is_limit=reason.startswith("rate"))
    async with running(Worker(outbox_at(dsn, port))):
        ids = persons(db)
        await until(lambda: has_error(db, ids, words) and alerts(db))
        key = f"smtp:{HOST}:{port}" + (" sender PGOUTBOX_SMTP_SENDER" if part else "")
        assert set(alerts(db)) == {key}
        assert State.FAILED not in {row.state for row in rows_of(db, *ids)}
        postfix.repair(reason)
        await until(lambda: are_sent(db, ids))


@pytest.mark.parametrize(
    ("reason", "words", "part"),
    [
        ("relay", "550 relay not permitted", ""),
        ("sender", "550 Sender verify failed", "sender"),
        ("helo", "550 Administrative prohibition", ""),
        ("rate", "has exceeded the max emails per hour", ""),
        ("silent", "550 Administrative prohibition", ""),
    ],
)
async def test_a_refusal_by_exim_loses_nothing_and_everything_is_sent_after_the_repair(
    dsn: str, db: psycopg.Connection, exim: Exim, reason: str, words: str, part: str
) -> None:
    with contextlib.ExitStack() as repair:
        repair.enter_context(exim.refusing(reason))
        await expect_doctor(exim.port, words, is_limit=reason == "rate")
        async with running(Worker(outbox_at(dsn, exim.port))):
            ids = persons(db)
            await until(lambda: has_error(db, ids, words) and alerts(db))
            assert set(alerts(db)) == {f"smtp:{HOST}:{exim.port}" + (" sender PGOUTBOX_SMTP_SENDER" if part else "")}
            assert State.FAILED not in {row.state for row in rows_of(db, *ids)}
            repair.close()
            await until(lambda: are_sent(db, ids))


async def test_the_doctor_tells_servers_apart_that_accept_the_sender_as_a_recipient(postfix: Postfix) -> None:
    """The server of the sender's domain takes e-mail to the sender, and may still refuse to relay."""
    local = f"{LOCAL_USER}@{LOCAL_DOMAIN}"
    levels = {
        (service, sender): [finding.level for finding in await doctor_says(postfix.ports[service], sender)]
        for service in ("plain", "no relay")
        for sender in (local, f"nobody@{LOCAL_DOMAIN}")
    }
    assert levels == {
        ("plain", local): [Level.OK],
        ("plain", f"nobody@{LOCAL_DOMAIN}"): [Level.WARNING],
        ("no relay", local): [Level.PROBLEM],
        ("no relay", f"nobody@{LOCAL_DOMAIN}"): [Level.PROBLEM],
    }


@pytest.mark.parametrize("program", ["postfix", "exim"])
async def test_an_unknown_user_fails_alone(
    dsn: str, db: psycopg.Connection, postfix: Postfix, exim: Exim, program: str
) -> None:
    port = postfix.ports["plain"] if program == "postfix" else exim.port
    ids = [enqueue(db, destination=f"mailto:{LOCAL_USER}@{LOCAL_DOMAIN}") for _ in range(5)]
    unknown = enqueue(db, destination=f"mailto:nobody@{LOCAL_DOMAIN}")
    await Worker(outbox_at(dsn, port)).run_once()
    assert are_sent(db, ids)
    row = row_of(db, unknown)
    assert (row.state, "nknown" in (row.last_error or "")) == (State.FAILED, True), row.last_error
    assert alerts(db) == []


@pytest.mark.parametrize("program", ["postfix", "exim"])
async def test_an_email_beyond_the_size_limit_fails_alone(
    dsn: str, db: psycopg.Connection, postfix: Postfix, exim: Exim, program: str
) -> None:
    message_id = enqueue(db, destination="mailto:person@x.test")
    with exim.refusing("size"):
        await Worker(outbox_at(dsn, postfix.ports["size"] if program == "postfix" else exim.port)).run_once()
    row = row_of(db, message_id)
    assert (row.state, "MAIL: 552" in (row.last_error or "")) == (State.FAILED, True), row.last_error
    assert alerts(db) == []


async def test_a_full_mailbox_is_retried_alone(dsn: str, db: psycopg.Connection, postfix: Postfix) -> None:
    ids = persons(db)
    await Worker(outbox_at(dsn, postfix.ports["quota"], retry=RetryPolicy.steps(60))).run_once()
    full = row_of(db, ids.pop(7))
    assert (full.state, "552 5.2.2" in (full.last_error or "")) == (State.PENDING, True), full.last_error
    assert are_sent(db, ids)
    assert alerts(db) == []


async def test_an_email_with_more_recipients_than_postfix_accepts_fails_alone(
    dsn: str, db: psycopg.Connection, postfix: Postfix
) -> None:
    message_id = enqueue(db)
    many = [f"person{n}@x.test" for n in range(3)]
    await Worker(outbox_at(dsn, postfix.ports["recipients"], to=many)).run_once()
    row = row_of(db, message_id)
    assert (row.state, "452 4.5.3" in (row.last_error or "")) == (State.FAILED, True), row.last_error
    assert alerts(db) == []


@pytest.mark.parametrize("limit", ["connections", "connection rate"])
async def test_more_connections_than_postfix_accepts_lose_nothing(
    dsn: str, db: psycopg.Connection, postfix: Postfix, limit: str
) -> None:
    async with running(Worker(outbox_at(dsn, postfix.ports[limit]))):
        ids = [enqueue(db, destination=f"mailto:person{n}@x.test", max_attempts=1) for n in range(COUNT)]
        await until(lambda: has_error(db, ids, "connect: 421 .*too many connections"))
        postfix.repair(limit)
        await until(lambda: are_sent(db, ids))


@asynccontextmanager
async def greylisting(port: int) -> AsyncIterator[None]:
    """Run a policy service of Postfix that defers each recipient once."""
    seen: set[bytes] = set()
    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                request = await reader.readuntil(b"\n\n")
                (recipient,) = (line for line in request.splitlines() if line.startswith(b"recipient="))
                action = b"DUNNO" if recipient in seen else b"DEFER Greylisted for a moment"
                seen.add(recipient)
                writer.write(b"action=" + action + b"\n\n")

    async with listening(answer, port=port):
        yield
        for writer in writers:  # Postfix keeps its connections.
            writer.close()
            await writer.wait_closed()


async def test_greylisting_by_postfix_delays_each_email_and_holds_nothing(
    dsn: str, db: psycopg.Connection, postfix: Postfix, policy_port: int
) -> None:
    async with greylisting(policy_port), running(Worker(outbox_at(dsn, postfix.ports["greylist"]))):
        ids = persons(db)
        await until(lambda: are_sent(db, ids))
    assert has_error(db, ids, "Greylisted")
    assert alerts(db) == []


async def test_greylisting_by_exim_delays_each_email_and_holds_nothing(
    dsn: str, db: psycopg.Connection, exim: Exim
) -> None:
    ids = persons(db)
    worker = Worker(outbox_at(dsn, exim.port, retry=RetryPolicy.steps(3600)))
    with exim.refusing("greylist"):
        await worker.run_once()
    assert all(has_error(db, [one], "greylisted") for one in ids)
    db.execute("UPDATE pgoutbox.message SET available_at = now()")
    await worker.run_once()
    assert are_sent(db, ids)
    assert alerts(db) == []


@dataclass
class Turns:
    """A relay to a mail server. `count` is how often the client has spoken after the server, on all connections."""

    target_port: int
    count: int = 0
    connection_count: int = 0
    _speaker: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        far_reader, far_writer = await asyncio.open_connection(HOST, self.target_port)
        try:
            await asyncio.gather(self._pass(reader, far_writer, "client"), self._pass(far_reader, writer, "server"))
        finally:
            far_writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, speaker: str) -> None:
        while piece := await reader.read(65_536):
            self.count += speaker == "client" != self._speaker
            self._speaker = speaker
            writer.write(piece)
        writer.close()


@pytest.mark.parametrize("program", ["postfix", "exim"])
async def test_an_email_takes_two_round_trips_and_a_refused_recipient_stops_it_for_all(
    postfix: Postfix, exim: Exim, program: str
) -> None:
    turns = Turns(postfix.ports["plain"] if program == "postfix" else exim.port)
    log = postfix.place / "log" if program == "postfix" else exim.place / "log-main"
    async with listening(turns.serve) as port, closing(SmtpTransport) as make:
        transport = make(settings_with(**mail_settings(port)))

        async def turns_of(*addresses: str) -> tuple[type[Outcome], int]:
            before = turns.count
            outcome = await transport.send(outgoing(), Email(to=addresses, subject="Hello", text="Hi\n.\n"))
            return type(outcome), turns.count - before

        await turns_of("ada1@x.test")
        assert await turns_of("ada2@x.test") == (Sent, 2)
        assert await turns_of("ada3@x.test", "ada4@x.test") == (Sent, 3)
        assert await turns_of("ada5@x.test", f"nobody@{LOCAL_DOMAIN}") == (Permanent, 2)  # The second one resets.
        assert await turns_of(f"nobody@{LOCAL_DOMAIN}") == (Permanent, 2)
        assert await turns_of("ada6@x.test") == (Sent, 2)
        assert turns.connection_count == 1

    def delivered() -> list[str]:
        return re.findall(r"(?:to=<|=> \S+ <)(ada\d)@x\.test>.*(?:status=sent|R=all)", log.read_text())

    await until(lambda: "ada6" in delivered() and len(delivered()) >= 5)
    assert sorted(delivered()) == ["ada1", "ada2", "ada3", "ada4", "ada6"]
