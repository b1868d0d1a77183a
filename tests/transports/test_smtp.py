"""Tests the SMTP transport with real servers: deliveries, refusals, and the handling of connections."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import trustme

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Permanent, SendFailure, Sent, Transient, Unavailable
from pgoutbox.settings import Settings
from pgoutbox.transports import SmtpTransport
from pgoutbox.transports.smtp.mail import Attachment, Email
from pgoutbox.transports.tls import verifying_context
from tests.support.dialogues import HOST
from tests.support.sends import closing, error_of, outgoing
from tests.support.settings import settings_with
from tests.support.smtp_server import Misbehaviour, accepting_server, mail_settings, parsed, scripted_server
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    Open = Callable[..., SmtpTransport]

HANG, DROP, STALL = Misbehaviour.HANG, Misbehaviour.DROP, Misbehaviour.STALL
CANARY = "canary-password"
# A server is considered silent after this time; a real answer arrives earlier on a slow machine too.
SILENCE_SECONDS = 2
EMAIL = Email(to="ann@example.com", subject="Hello", text="Hi")
TWO = Email(to=["ann@example.com", "bob@example.com"], subject="Hello", text="Hi")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    """Create a server's certificate for the address that the tests connect to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    return context


@pytest.fixture(scope="module")
def client_tls(authority: trustme.CA) -> ssl.SSLContext:
    """Return the transport's usual context, which also trusts the tests' authority."""
    context = verifying_context()
    authority.configure_trust(context)
    return context


@pytest.fixture
async def open_transport() -> AsyncIterator[Open]:
    """Create transports for a local port, in plain text by default, and close them."""

    def make(
        port: int, *, tls_context: ssl.SSLContext | None = None, idle_seconds: float = 60.0, **overrides: object
    ) -> SmtpTransport:
        return SmtpTransport(settings_for(port, **overrides), tls_context=tls_context, idle_seconds=idle_seconds)

    async with closing(make) as make_one:
        yield make_one


def settings_for(port: int, **overrides: object) -> Settings:
    return settings_with(**(mail_settings(port) | overrides))


async def test_an_email_arrives_with_its_envelope_and_content(open_transport: Open) -> None:
    email = Email(
        to="Ann Lee <ann@example.com>",
        bcc="eve@example.com",
        subject="Grüße",
        text="Schön.\n.\n.dot\n" + "long " * 400 + "x" * 2_000,
        attachments=[Attachment("a.bin", bytes(range(256)))],
    )
    async with accepting_server() as inbox:
        assert await open_transport(inbox.port).send(outgoing(), email) == Sent()
    (received,) = inbox.received
    assert received.sender == "club@example.org"
    assert received.recipients == ["ann@example.com", "eve@example.com"]
    assert b"eve@" not in received.content
    message = parsed(received.content)
    assert message["Subject"] == "Grüße"
    body = message.get_body()
    assert body is not None
    assert body.get_content().splitlines() == (email.text or "").splitlines()
    assert [part.get_content() for part in message.iter_attachments()] == [bytes(range(256))]


async def test_text_html_and_an_attachment_arrive_as_one_email(open_transport: Open) -> None:
    email = Email(
        to="ann@example.com",
        subject="Hello",
        text="plain",
        html="<p>rich",
        attachments=[Attachment("a.pdf", b"%PDF", "application/pdf")],
    )
    async with accepting_server() as inbox:
        assert await open_transport(inbox.port).send(outgoing(), email) == Sent()
    message = parsed(inbox.received[0].content)
    plain, rich = message.get_body(("plain",)), message.get_body(("html",))
    assert plain is not None
    assert rich is not None
    assert (plain.get_content().strip(), rich.get_content().strip()) == ("plain", "<p>rich")
    assert [part.get_content() for part in message.iter_attachments()] == [b"%PDF"]


async def test_the_wire_format_has_short_lines_crlf_and_stuffed_dots(open_transport: Open) -> None:
    long_lines = Email(to="ann@example.com", subject="s" * 2_000, text="bare\nlone\rend" + "x" * 2_000)
    dots = Email(to="ann@example.com", subject="Hello", text=".\n.\n.dot\n..two", html=".<p>")
    async with scripted_server() as server:
        transport = open_transport(server.port)
        for email in (long_lines, dots):
            assert await transport.send(outgoing(), email) == Sent()
    assert len(server.contents) == 2
    for content in server.contents:
        assert re.search(rb"(?<!\r)\n|\r(?!\n)", content) is None
        lines = content.split(b"\r\n")
        assert max(map(len, lines)) <= 998
        assert not [line for line in lines if line.startswith(b".") and not line.startswith(b"..")]
    assert [line for line in server.contents[1].split(b"\r\n") if line.startswith(b".")] == [
        b"..", b"..", b"..dot", b"...two", b"..<p>",
    ]  # fmt: skip


async def test_the_destination_is_the_recipient_of_an_email_without_recipients(open_transport: Open) -> None:
    async with accepting_server() as inbox:
        transport = open_transport(inbox.port)
        assert (
            await transport.send(outgoing(destination="mailto:bob@example.com"), Email(subject="", text="")) == Sent()
        )
    assert inbox.received[0].recipients == ["bob@example.com"]


async def test_every_attempt_carries_the_same_message_id(open_transport: Open) -> None:
    async with accepting_server() as inbox:
        transport = open_transport(inbox.port)
        for attempt_count in (1, 2, 9):
            assert await transport.send(outgoing(attempt_count=attempt_count), EMAIL) == Sent()
    identifiers = {parsed(received.content)["Message-ID"] for received in inbox.received}
    assert identifiers == {f"<{outgoing().idempotency_key}@example.org>"}


async def test_starttls_and_auth_come_before_the_mail(
    open_transport: Open, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext
) -> None:
    async with accepting_server(starttls=server_tls, password=CANARY.encode()) as inbox:
        transport = open_transport(
            inbox.port, smtp_security="starttls", smtp_username="app", smtp_password=CANARY, tls_context=client_tls
        )
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert inbox.logins == [(b"app", CANARY.encode())]
    assert inbox.received[0].was_encrypted


async def test_tls_from_the_first_byte(
    open_transport: Open, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext
) -> None:
    async with accepting_server(tls=server_tls) as inbox:
        transport = open_transport(inbox.port, smtp_security="tls", tls_context=client_tls)
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert len(inbox.received) == 1


async def test_a_local_part_beyond_ascii_arrives_at_a_server_with_smtputf8(open_transport: Open) -> None:
    async with accepting_server(smtputf8=True) as inbox:
        email = Email(to="zoë@bücher.example", subject="Grüße", text="Hi")
        assert await open_transport(inbox.port).send(outgoing(), email) == Sent()
    assert inbox.received[0].recipients == ["zoë@xn--bcher-kva.example"]
    assert "SMTPUTF8" in inbox.received[0].options
    assert parsed(inbox.received[0].content)["Subject"] == "Grüße"


async def test_a_local_part_beyond_ascii_fails_by_name_without_smtputf8(open_transport: Open) -> None:
    async with scripted_server() as server:
        transport = open_transport(server.port)
        error = error_of(await transport.send(outgoing(), Email(to="zoë@x.test", subject="", text="")), Permanent)
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert error == "email.to: is not ASCII before @, and the server does not offer SMTPUTF8"
    assert server.connection_count == 1


async def test_the_size_is_announced_to_a_server_that_asks_for_it(open_transport: Open) -> None:
    async with scripted_server(extensions=["SIZE 1000"]) as server:
        assert await open_transport(server.port).send(outgoing(), EMAIL) == Sent()
    assert f"MAIL FROM:<club@example.org> SIZE={len(server.contents[0])}" in server.commands


async def test_an_invalid_email_is_refused_before_connecting(open_transport: Open) -> None:
    async with scripted_server() as server:
        email = Email(to="ann@example.com", subject="x\r\nBcc: eve@example.com", text="Hi")
        error = error_of(await open_transport(server.port).send(outgoing(), email), Permanent)
    assert error == "email.subject: contains CR, LF or NUL"
    assert server.connection_count == 0


async def test_a_content_of_another_transport_is_permanent(open_transport: Open) -> None:
    class Webhook:
        scheme = "https"

    outcome = await open_transport(1).send(outgoing(), Webhook())
    assert error_of(outcome, Permanent) == "content: the SMTP transport sends an Email, not Webhook"


@pytest.mark.parametrize(
    ("step", "answer", "kind", "error"),
    [
        ("connect", "421 4.3.2 busy", Unavailable, "connect: 421 4.3.2 busy"),
        ("connect", "554 mx.test no service", Unavailable, "connect: 554 mx.test no service"),
        ("EHLO", "550 5.7.1 not for you", Unavailable, "EHLO: 550 5.7.1 not for you"),
        ("MAIL", "451 4.3.0 try later", Unavailable, "MAIL: 451 4.3.0 try later"),
        ("MAIL", "530 5.7.0 authenticate first", Unavailable, "MAIL: 530 5.7.0 authenticate first"),
        ("MAIL", "550 5.7.1 not from you", Unavailable, "MAIL: 550 5.7.1 not from you"),
        ("MAIL", "552 5.3.4 too big", Permanent, "MAIL: 552 5.3.4 too big"),
        ("RCPT", "421 4.4.5 busy", Transient, "RCPT ann@example.com: 421 4.4.5 busy"),
        ("RCPT", "451 4.7.1 greylisted", Transient, "RCPT ann@example.com: 451 4.7.1 greylisted"),
        ("RCPT", "550 5.1.1 no such user", Permanent, "RCPT ann@example.com: 550 5.1.1 no such user"),
        ("RCPT", "552 5.2.2 mailbox full", Transient, "RCPT ann@example.com: 552 5.2.2 mailbox full"),
        ("RCPT", "552 no", Transient, "RCPT ann@example.com: 552 no"),
        ("RCPT", "550 4.7.1 slow down", Transient, "RCPT ann@example.com: 550 4.7.1 slow down"),
        ("RCPT", "450 5.7.1 greylisted", Transient, "RCPT ann@example.com: 450 5.7.1 greylisted"),
        ("DATA", "421 4.3.2 going down", Transient, "DATA: 421 4.3.2 going down"),
        ("DATA", "451 4.3.0 try later", Transient, "DATA: 451 4.3.0 try later"),
        ("DATA", "554 5.5.1 no valid recipients", Transient, "DATA: 554 5.5.1 no valid recipients"),
        (".", "421 4.3.2 going down", Transient, "DATA: 421 4.3.2 going down"),
        (".", "451 4.7.1 greylisted", Transient, "DATA: 451 4.7.1 greylisted"),
        (".", "452 4.3.1 disk full", Transient, "DATA: 452 4.3.1 disk full"),
        (".", "552 5.3.4 too big", Permanent, "DATA: 552 5.3.4 too big"),
        (".", "554 5.7.1 spam", Permanent, "DATA: 554 5.7.1 spam"),
        (".", "550-5.7.26 no SPF\r\n550 5.7.26 see x.test", Unavailable, "DATA: 550 5.7.26 no SPF 5.7.26 see x.test"),
    ],
)
async def test_a_refusal_is_classified_and_quoted(
    open_transport: Open, step: str, answer: str, kind: type[Transient | Unavailable | Permanent], error: str
) -> None:
    async with scripted_server({step: answer}) as server:
        assert error_of(await open_transport(server.port).send(outgoing(), EMAIL), kind) == error


async def test_one_refused_recipient_refuses_the_email_for_all(open_transport: Open) -> None:
    async with scripted_server({"RCPT TO:<bob@example.com>": "550 5.1.1 no such user"}) as server:
        outcome = await open_transport(server.port).send(outgoing(), TWO)
    assert error_of(outcome, Permanent) == "RCPT bob@example.com: 550 5.1.1 no such user"
    assert server.contents == []
    assert server.verbs[-1] == "RSET"


async def test_a_temporarily_refused_recipient_makes_the_refusal_transient(open_transport: Open) -> None:
    answers = {"RCPT TO:<ann@example.com>": "550 5.1.1 no such user", "RCPT TO:<bob@example.com>": "450 4.2.1 later"}
    async with scripted_server(answers) as server:
        outcome = await open_transport(server.port).send(outgoing(), TWO)
    assert error_of(outcome, Transient) == (
        "RCPT ann@example.com: 550 5.1.1 no such user; RCPT bob@example.com: 450 4.2.1 later"
    )


async def test_a_refusal_of_the_account_counts_more_than_one_of_a_recipient(open_transport: Open) -> None:
    answers = {
        "RCPT TO:<ann@example.com>": "550 5.1.1 no such user",
        "RCPT TO:<bob@example.com>": "554 5.7.1 <bob@example.com>: Relay access denied",
    }
    async with scripted_server(answers) as server:
        outcome = await open_transport(server.port).send(outgoing(), TWO)
    assert error_of(outcome, Unavailable).endswith("Relay access denied")


async def test_more_recipients_than_a_server_accepts_are_the_fault_of_the_email(open_transport: Open) -> None:
    too_many = "452 4.5.3 Error: too many recipients"
    async with scripted_server({"RCPT TO:<bob@example.com>": too_many}) as server:
        outcome = await open_transport(server.port).send(outgoing(), TWO)
    assert error_of(outcome, Permanent) == f"RCPT bob@example.com: {too_many}"
    async with scripted_server({"RCPT": too_many}) as server:
        error_of(await open_transport(server.port).send(outgoing(), TWO), Unavailable)


async def test_the_closing_text_of_a_server_amid_the_recipients_is_quoted(open_transport: Open) -> None:
    async with scripted_server({"RCPT TO:<ann@example.com>": "421 4.3.2 going down"}) as server:
        outcome = await open_transport(server.port).send(outgoing(), TWO)
    assert error_of(outcome, Transient) == "RCPT ann@example.com: 421 4.3.2 going down"


async def test_only_some_of_many_refused_recipients_are_named(open_transport: Open) -> None:
    many = Email(to=[f"user{number}@example.com" for number in range(12)], subject="Hello", text="Hi")
    async with scripted_server({"RCPT": "550 no"}) as server:
        error = error_of(await open_transport(server.port).send(outgoing(), many), Transient)
    assert error.count("RCPT") == 5
    assert error.endswith("; and 7 more")


async def test_the_text_of_a_server_is_made_printable_and_truncated(open_transport: Open) -> None:
    async with scripted_server({"RCPT": "550 \x1b[31mno\u202e " + "x" * 2_000}) as server:
        error = error_of(await open_transport(server.port).send(outgoing(), EMAIL), Transient)
    assert error.startswith("RCPT ann@example.com: 550 [31mno xxx")
    assert error.isprintable()
    assert len(error) < 600


async def test_a_refused_connection_needs_a_repair(open_transport: Open) -> None:
    with socket.socket() as deaf:
        deaf.bind((HOST, 0))  # The port is reserved, and nothing listens on it.
        outcome = await open_transport(deaf.getsockname()[1]).send(outgoing(), EMAIL)
    assert error_of(outcome, Unavailable).startswith("connect: ")


async def test_a_refusal_at_every_address_of_a_host_needs_a_repair(
    open_transport: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This replaces `socket.getaddrinfo`, because the test cannot give a name several addresses."""
    real = socket.getaddrinfo

    def look_up(host: str | bytes | None, port: int, *rest: int, **options: int) -> list[object]:
        hosts = ("127.0.0.1", "::1") if host in {"mx.test", b"mx.test"} else (host,)
        return [found for one in hosts for found in real(one, port, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with socket.socket() as deaf:
        deaf.bind((HOST, 0))
        outcome = await open_transport(deaf.getsockname()[1], smtp_host="mx.test").send(outgoing(), EMAIL)
    error = error_of(outcome, Unavailable)
    assert "127.0.0.1" in error
    assert "::1" in error


async def test_a_host_that_does_not_resolve_needs_a_repair(open_transport: Open) -> None:
    for host in ("no-such-host.invalid", "x" * 70 + ".invalid"):
        outcome = await open_transport(25, smtp_host=host).send(outgoing(), EMAIL)
        assert error_of(outcome, Unavailable).startswith("connect: ")


@pytest.mark.parametrize("step", ["connect", "EHLO", "MAIL", "RCPT", "DATA"])
async def test_a_connection_lost_before_the_content_is_an_outage(open_transport: Open, step: str) -> None:
    async with scripted_server({step: DROP}) as server:
        outcome = await open_transport(server.port).send(outgoing(), EMAIL)
    assert isinstance(outcome, SendFailure if step in {"RCPT", "DATA"} else Unavailable)
    assert outcome.outage
    error = outcome.error
    assert step in error
    assert server.connection_count == 1
    assert server.contents == []


async def test_a_connection_lost_after_the_final_dot_leaves_the_outcome_unknown(open_transport: Open) -> None:
    async with scripted_server({".": DROP}) as server:
        transport = open_transport(server.port)
        outcome = await transport.send(outgoing(), EMAIL)
        assert error_of(outcome, Transient).startswith("outcome unknown: connection lost after DATA")
        assert len(server.contents) == 1
        await transport.send(outgoing(attempt_count=2), EMAIL)
    first, second = (parsed(content)["Message-ID"] for content in server.contents)
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("connect", "connect: Timed out waiting for server ready message"),
        ("EHLO", "EHLO: no answer within 2 s"),
        ("MAIL", "MAIL: no answer within 2 s"),
        ("DATA", "outcome unknown: connection lost after DATA: no answer within 2 s"),
        (".", "outcome unknown: connection lost after DATA: no answer within 2 s"),
    ],
)
async def test_a_silent_server_is_abandoned(open_transport: Open, step: str, error: str) -> None:
    async with scripted_server({step: HANG}) as server:
        transport = open_transport(server.port, smtp_timeout_seconds=SILENCE_SECONDS)
        outcome = await transport.send(outgoing(), EMAIL)
        assert error_of(outcome, Transient if error.startswith("outcome unknown") else Unavailable) == error
        await server.was_left.wait()


@pytest.mark.slow
async def test_a_server_has_more_time_for_a_large_email(open_transport: Open) -> None:
    email = Email(to="ann@example.com", subject="Hello", text="x\n" * 40_000)
    async with scripted_server({"DATA": HANG}) as server:
        transport = open_transport(server.port, smtp_timeout_seconds=SILENCE_SECONDS)
        error = error_of(await transport.send(outgoing(), email), Transient)
    assert error == "outcome unknown: connection lost after DATA: no answer within 3 s"


@pytest.mark.slow
async def test_a_partial_email_is_not_completed_after_the_attempt_was_cancelled(open_transport: Open) -> None:
    large = Email(
        to="ann@example.com", subject="Hello", text="Hi", attachments=[Attachment("a.bin", bytes(16_000_000))]
    )
    async with scripted_server({"DATA": STALL}) as server:
        sending = asyncio.create_task(open_transport(server.port).send(outgoing(), large))
        await until(lambda: "DATA" in server.verbs)
        # The server reads nothing, so the buffers are full long before this time.
        assert not (await asyncio.wait([sending], timeout=SILENCE_SECONDS))[0]
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        server.may_go_on.set()
        await server.was_left.wait()
    assert server.contents[0]
    assert not server.contents[0].endswith(b"\r\n.\r\n")


async def test_without_starttls_nothing_is_sent_in_plain_text(open_transport: Open, client_tls: ssl.SSLContext) -> None:
    async with scripted_server(extensions=["AUTH PLAIN LOGIN"]) as server:
        transport = open_transport(
            server.port, smtp_security="starttls", smtp_username="app", smtp_password=CANARY, tls_context=client_tls
        )
        error = error_of(await transport.send(outgoing(), EMAIL), Unavailable)
        await server.was_left.wait()
    assert error == "STARTTLS: the server does not offer it, and plain text is refused"
    assert server.verbs == ["EHLO"]


async def test_a_refused_starttls_sends_nothing_in_plain_text(open_transport: Open, client_tls: ssl.SSLContext) -> None:
    extensions = ["STARTTLS", "AUTH PLAIN LOGIN"]
    async with scripted_server({"STARTTLS": "454 4.7.0 no TLS today"}, extensions=extensions) as server:
        transport = open_transport(
            server.port, smtp_security="starttls", smtp_username="app", smtp_password=CANARY, tls_context=client_tls
        )
        error = error_of(await transport.send(outgoing(), EMAIL), Unavailable)
        await server.was_left.wait()
    assert error == "STARTTLS: 454 4.7.0 no TLS today"
    assert server.verbs == ["EHLO", "STARTTLS"]


@pytest.mark.parametrize("security", ["starttls", "tls"])
async def test_a_certificate_of_an_unknown_authority_is_refused(
    open_transport: Open, server_tls: ssl.SSLContext, security: str
) -> None:
    starttls, tls = (server_tls, None) if security == "starttls" else (None, server_tls)
    async with scripted_server(extensions=["STARTTLS"], starttls=starttls, tls=tls) as server:
        transport = open_transport(server.port, smtp_security=security)
        error = error_of(await transport.send(outgoing(), EMAIL), Unavailable)
    assert "certificate verify failed" in error
    assert "MAIL" not in server.verbs


@pytest.mark.parametrize("security", ["starttls", "tls"])
async def test_a_certificate_for_another_host_is_refused(
    open_transport: Open, authority: trustme.CA, client_tls: ssl.SSLContext, security: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("other.example.org").configure_cert(context)
    starttls, tls = (context, None) if security == "starttls" else (None, context)
    async with scripted_server(extensions=["STARTTLS"], starttls=starttls, tls=tls) as server:
        transport = open_transport(server.port, smtp_security=security, tls_context=client_tls)
        error = error_of(await transport.send(outgoing(), EMAIL), Unavailable)
    assert "IP address mismatch" in error
    assert "MAIL" not in server.verbs


@pytest.mark.parametrize("security", ["starttls", "tls"])
async def test_a_certificate_that_has_expired_is_refused(
    open_transport: Open, authority: trustme.CA, client_tls: ssl.SSLContext, security: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    expired = authority.issue_cert(HOST, not_after=datetime.now(UTC) - timedelta(days=1))
    expired.configure_cert(context)
    starttls, tls = (context, None) if security == "starttls" else (None, context)
    async with scripted_server(extensions=["STARTTLS"], starttls=starttls, tls=tls) as server:
        transport = open_transport(server.port, smtp_security=security, tls_context=client_tls)
        error = error_of(await transport.send(outgoing(), EMAIL), Unavailable)
    assert "certificate has expired" in error
    assert "MAIL" not in server.verbs


async def test_an_answer_injected_before_tls_is_ignored(
    open_transport: Open, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext
) -> None:
    slipped_in = "220 go ahead\r\n250-mx.test\r\n250 AUTH PLAIN"
    async with scripted_server({"STARTTLS": slipped_in}, extensions=["STARTTLS"], starttls=server_tls) as server:
        transport = open_transport(
            server.port, smtp_security="starttls", smtp_username="app", smtp_password=CANARY, tls_context=client_tls
        )
        error_of(await transport.send(outgoing(), EMAIL), Unavailable)
    assert not {"AUTH", "MAIL"} & set(server.verbs)


async def test_a_password_is_never_sent_in_plain_text_under_any_settings(open_transport: Open) -> None:
    encrypted = settings_for(25, smtp_security="starttls", smtp_username="app", smtp_password=CANARY)
    async with scripted_server(extensions=["AUTH PLAIN LOGIN"]) as server:
        forced = encrypted.smtp.model_copy(update={"security": "none", "port": server.port})
        transport = SmtpTransport(encrypted.model_copy(update={"smtp": forced}))
        error = error_of(await transport.send(outgoing(), EMAIL), Unavailable)
        await transport.aclose()
        await server.was_left.wait()
    assert error == "AUTH: refused on a connection in plain text"
    assert server.verbs == ["EHLO"]


async def test_refused_credentials_are_an_outage_and_the_password_is_never_shown(
    open_transport: Open, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    encoded = "AGFwcABjYW5hcnktcGFzc3dvcmQ="
    answers = {"AUTH": f"535 5.7.8 wrong: {CANARY} {encoded}"}
    async with scripted_server(answers, extensions=["STARTTLS", "AUTH PLAIN"], starttls=server_tls) as server:
        transport = open_transport(
            server.port, smtp_security="starttls", smtp_username="app", smtp_password=CANARY, tls_context=client_tls
        )
        error = error_of(await transport.send(outgoing(), EMAIL), Unavailable)
    assert f"AUTH PLAIN {encoded}" in server.commands
    assert error == "AUTH: 535 5.7.8 wrong: (hidden) (hidden)"
    assert CANARY not in caplog.text
    assert encoded not in caplog.text


async def test_the_log_contains_no_address_and_no_text(open_transport: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="pgoutbox")
    async with scripted_server({"MAIL": ["250 ok", DROP], "RCPT": ["250 ok", "550 no"]}) as server:
        transport = open_transport(server.port)
        for _ in range(2):
            await transport.send(outgoing(), EMAIL)
    logged = [str(record.__dict__) for record in caplog.records if record.name.startswith("pgoutbox")]
    assert logged
    assert not [line for line in logged if "example" in line or "Hello" in line]


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ({"smtp_host": None}, "set PGOUTBOX_SMTP_HOST"),
        ({"smtp_host": "mx.test\r\n"}, "PGOUTBOX_SMTP_HOST='mx.test.r.n': is not a host name or an IP address"),
        ({"smtp_ehlo_name": "app test"}, "PGOUTBOX_SMTP_EHLO_NAME='app test': is not a host name"),
        ({"smtp_sender": "club\n@x.test"}, "PGOUTBOX_SMTP_SENDER: contains CR, LF or NUL"),
        ({"smtp_username": "app"}, "PGOUTBOX_SMTP_USERNAME is set, PGOUTBOX_SMTP_PASSWORD is not"),
    ],
)
def test_an_unusable_setting_is_refused_by_name_at_the_start(overrides: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        SmtpTransport(settings_for(25, **overrides))


async def test_a_connection_is_reused(open_transport: Open) -> None:
    async with accepting_server() as inbox:
        transport = open_transport(inbox.port)
        for message_id in range(5):
            assert await transport.send(outgoing(message_id=message_id), EMAIL) == Sent()
    assert len(inbox.received) == 5
    assert inbox.connection_count == 1


async def test_the_number_of_connections_is_limited_by_the_setting(open_transport: Open) -> None:
    async with accepting_server() as inbox:
        transport = open_transport(inbox.port, smtp_connections=3)
        outcomes = await asyncio.gather(*(transport.send(outgoing(message_id=number), EMAIL) for number in range(30)))
    assert outcomes == [Sent()] * 30
    assert inbox.connection_count == 3


async def test_a_connection_survives_a_refused_recipient(open_transport: Open) -> None:
    async with scripted_server({"RCPT": ["550 5.1.1 no such user"]}) as server:
        transport = open_transport(server.port)
        assert isinstance(await transport.send(outgoing(), EMAIL), Permanent)
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert server.connection_count == 1


@pytest.mark.parametrize(
    "refusal", ["454 4.7.1 Recipient address rejected: Access denied", "550 5.7.1 Relay access denied"]
)
async def test_a_connection_is_not_kept_after_a_refusal_that_a_person_may_repair(
    open_transport: Open, refusal: str
) -> None:
    """A process of Postfix that serves an open connection never reads its new settings."""
    async with scripted_server({"RCPT": [refusal]}) as server:
        transport = open_transport(server.port)
        assert await transport.send(outgoing(), EMAIL) != Sent()
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert server.connection_count == 2


async def test_a_connection_with_a_failed_reset_is_not_reused(open_transport: Open) -> None:
    async with scripted_server({"RCPT": ["550 5.1.1 no such user"], "RSET": "500 what"}) as server:
        transport = open_transport(server.port)
        assert isinstance(await transport.send(outgoing(), EMAIL), Permanent)
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert server.connection_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("answer", [DROP, HANG, "421 4.4.2 idle for too long", "503 5.5.1 nested MAIL"])
async def test_an_idle_connection_that_fails_at_mail_is_replaced(
    open_transport: Open, answer: str | Misbehaviour
) -> None:
    async with scripted_server({"MAIL": ["250 ok", answer]}) as server:
        transport = open_transport(server.port, smtp_timeout_seconds=SILENCE_SECONDS)
        assert await transport.send(outgoing(), EMAIL) == Sent()
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert server.connection_count == 2
    assert len(server.contents) == 2


async def test_a_connection_that_broke_while_idle_is_replaced(open_transport: Open) -> None:
    async with accepting_server(smtputf8=True) as inbox:
        transport = open_transport(inbox.port)
        assert await transport.send(outgoing(), EMAIL) == Sent()
        inbox.hang_up()
        # Another dialogue runs the loop often enough for the first connection to detect its end.
        assert await open_transport(inbox.port).send(outgoing(), EMAIL) == Sent()
        email = Email(to="zoë@example.com", subject="Hello", text="Hi")
        assert await transport.send(outgoing(), email) == Sent()
    assert inbox.connection_count == 3


async def test_a_replaced_connection_is_not_kept(open_transport: Open) -> None:
    async with scripted_server({"MAIL": ["250 ok", "503 5.5.1 nested MAIL"]}) as server:
        transport = open_transport(server.port)
        assert await transport.send(outgoing(), EMAIL) == Sent()
        assert await transport.send(outgoing(), EMAIL) == Sent()
        await server.was_left.wait()
    assert "RSET" not in server.verbs


async def test_a_dead_connection_is_replaced_only_once(open_transport: Open) -> None:
    async with scripted_server({"MAIL": ["250 ok", DROP, DROP]}) as server:
        transport = open_transport(server.port)
        assert await transport.send(outgoing(), EMAIL) == Sent()
        assert isinstance(await transport.send(outgoing(), EMAIL), Unavailable)
    assert server.connection_count == 2


@pytest.mark.parametrize("step", ["RCPT", "DATA", "."])
async def test_nothing_is_sent_again_after_mail_was_accepted(open_transport: Open, step: str) -> None:
    usual = {"RCPT": "250 ok", "DATA": "354 go ahead", ".": "250 ok"}[step]
    async with scripted_server({step: [usual, DROP]}) as server:
        transport = open_transport(server.port)
        assert await transport.send(outgoing(), EMAIL) == Sent()
        assert isinstance(await transport.send(outgoing(), EMAIL), Transient)
    assert server.verbs.count("MAIL") == 2
    assert server.connection_count == 1


async def test_a_connection_beyond_its_idle_time_is_not_reused(open_transport: Open) -> None:
    async with accepting_server() as inbox:
        transport = open_transport(inbox.port, idle_seconds=0.0)
        for _ in range(3):
            assert await transport.send(outgoing(), EMAIL) == Sent()
    assert inbox.connection_count == 3


@pytest.mark.parametrize("step", ["EHLO", "MAIL", "RCPT", "DATA", "."])
async def test_a_cancelled_send_closes_its_connection(open_transport: Open, step: str) -> None:
    async with scripted_server({step: [HANG]}) as server:
        transport = open_transport(server.port, smtp_connections=1)
        sending = asyncio.create_task(transport.send(outgoing(), EMAIL))
        await server.is_silent.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await server.was_left.wait()
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert server.connection_count == 2


async def test_closing_sends_quit_to_the_server(open_transport: Open) -> None:
    async with scripted_server() as server:
        transport = open_transport(server.port)
        assert await transport.send(outgoing(), EMAIL) == Sent()
        await transport.aclose()
        await server.was_left.wait()
    assert server.verbs[-1] == "QUIT"
