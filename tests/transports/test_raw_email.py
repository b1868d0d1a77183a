"""Tests e-mail that is already encoded, and the envelope's sender, with real servers: bytes, envelopes and refusals."""

from __future__ import annotations

from dataclasses import replace
from email import policy
from email.message import EmailMessage
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox.message import Permanent, Postponed, Sent, Unavailable
from pgoutbox.transports import Content, SmtpTransport
from pgoutbox.transports.redirect import RedirectRules, covering
from pgoutbox.transports.smtp.mail import MAX_RAW_BYTES, MAX_RECIPIENT_COUNT, Email, RawEmail, RenderedEmail, render
from tests.support.sends import closing, error_of, outgoing
from tests.support.settings import settings_with
from tests.support.smtp_server import accepting_server, mail_settings, parsed, scripted_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    Open = Callable[..., SmtpTransport]

DATA = (
    b"Received: from a by b; Sun, 1 Mar 2026 12:00:00 +0000\r\n"
    b"From: Bob <bob@elsewhere.test>\r\n"
    b"To: list@example.org\r\n"
    b"Subject: Hello\r\n"
    b" again\r\n"
    b"Message-ID: <own@elsewhere.test>\r\n"
    b"\r\n"
    b".\r\n..\r\n.dot\r\n\r\nHi\r\n"
)
RAW = RawEmail(data=DATA, to="ann@example.com")
NON_ASCII_BODY = DATA + "schön\r\n".encode()
NON_ASCII_HEADER = DATA.replace(b"Hello", "Grüße".encode())


@pytest.fixture
async def open_transport() -> AsyncIterator[Open]:
    """Create transports for a local port, in plain text, and close them."""

    def make(port: int, **overrides: object) -> SmtpTransport:
        return SmtpTransport(settings_with(**(mail_settings(port) | overrides)))

    async with closing(make) as make_one:
        yield make_one


def rendered(
    email: RawEmail, *, destination: str | None = None, blackout: str | None = None, **overrides: object
) -> RenderedEmail:
    settings = settings_with(**({"smtp_sender": "Club <club@example.org>"} | overrides))
    redirect = covering(RedirectRules.of(settings.redirect).redirects(blackout=blackout), "greet")
    return render(email, outgoing(destination=destination), settings, redirect)


def test_a_raw_email_is_a_content_of_the_mailto_scheme_that_hides_its_data() -> None:
    assert isinstance(RAW, Content)
    assert RAW.scheme == "mailto"
    assert "Hello" not in repr(RAW)


# --- the bytes --------------------------------------------------------------------------------------------------------


async def test_an_encoded_email_arrives_byte_for_byte(open_transport: Open) -> None:
    async with accepting_server() as inbox, scripted_server() as server:
        assert await open_transport(inbox.port).send(outgoing(), RAW) == Sent()
        assert await open_transport(server.port).send(outgoing(), RAW) == Sent()
    (received,) = inbox.received
    assert (received.sender, received.recipients) == ("club@example.org", ["ann@example.com"])
    assert received.content == DATA
    assert parsed(received.content)["Message-ID"] == "<own@elsewhere.test>"
    assert server.contents[0].endswith(b"\r\n\r\n..\r\n...\r\n..dot\r\n\r\nHi\r\n")


async def test_an_email_of_the_standard_library_arrives_byte_for_byte(open_transport: Open) -> None:
    made = EmailMessage(policy=policy.SMTP)
    made["Subject"] = "Grüße"
    made.set_content("Schön.\n" * 100)
    made.add_attachment(bytes(range(256)) * 400, maintype="application", subtype="octet-stream", filename="a.bin")
    async with accepting_server() as inbox:
        email = RawEmail(data=made.as_bytes(), to="ann@example.com")
        assert await open_transport(inbox.port).send(outgoing(), email) == Sent()
    assert inbox.received[0].content == made.as_bytes()


@pytest.mark.parametrize("data", [b"Subject: Hello\r\n\r\nHi", b"Subject: Hello"])
async def test_only_a_missing_last_line_end_is_added(open_transport: Open, data: bytes) -> None:
    async with scripted_server() as server:
        email = RawEmail(data=data, to="ann@example.com")
        assert await open_transport(server.port).send(outgoing(), email) == Sent()
    assert server.contents == [data + b"\r\n"]


REFUSED: dict[str, tuple[Any, str]] = {
    "text": ("Subject: x\r\n", "must be bytes, not str"),
    "bare LF": (b"Subject: x\r\n\r\none\ntwo\r\n", "line 3 has a bare LF; end each line with CR LF"),
    "bare CR": (b"Subject: x\r\n\r\none\rtwo\r\n", "line 3 has a bare CR"),
    "CR at the end": (b"Subject: x\r\n\r\none\r", "line 3 has a bare CR"),
    "NUL": (b"Subject: x\r\n\r\n\0\r\n", "line 3 has a NUL"),
    "smuggled by LF": (b"Subject: x\r\n\r\n\n.\r\nMAIL FROM:<eve@x.test>\r\n", "line 3 has a bare LF"),
    "smuggled by LF LF": (b"Subject: x\r\n\r\nx\n.\nMAIL FROM:<eve@x.test>\r\n", "line 3 has a bare LF"),
    "smuggled by CR": (b"Subject: x\r\n\r\nx\r.\rMAIL FROM:<eve@x.test>\r\n", "line 3 has a bare CR"),
    "smuggled by CR LF": (b"Subject: x\r\n\r\nx\r\n.\rMAIL FROM:<eve@x.test>\r\n", "line 4 has a bare CR"),
    "long line": (b"Subject: x\r\n\r\n" + b"x" * 999 + b"\r\n", "line 3 has 999 bytes, the limit is 998"),
    "long last line": (b"Subject: x\r\n\r\n" + b"x" * 999, "line 3 has 999 bytes, the limit is 998"),
    "empty": (b"", "has no headers"),
    "no headers": (b"\r\nHi\r\n", "has no headers"),
    "only a body": (b"Hello Ann\r\n", "line 1 is not a header"),
    "mbox": (b"From bob@x.test Sun Mar  1 12:00:00 2026\r\nSubject: x\r\n\r\n", "line 1 is not a header"),
    "folded at the start": (b" x\r\nSubject: x\r\n\r\n", "line 1 is not a header"),
    "no blank line": (b"Subject: x\r\nHi there\r\n", "line 2 is not a header; a blank line must end the headers"),
    "Latin-1 header": (b"Subject: Gr\xfc\xdfe\r\n\r\n", "line 1 is a header that is not UTF-8"),
    "too large": (b"Subject: x\r\n\r\n" + b"x" * MAX_RAW_BYTES, f"bytes are more than {MAX_RAW_BYTES}"),
}


@pytest.mark.parametrize(("data", "error"), REFUSED.values(), ids=REFUSED.keys())
async def test_invalid_data_is_refused_before_connecting(open_transport: Open, data: bytes, error: str) -> None:
    async with scripted_server() as server:
        outcome = await open_transport(server.port).send(outgoing(), RawEmail(data=data, to="ann@example.com"))
    assert error_of(outcome, Permanent).startswith("raw_email.data: ")
    assert error in error_of(outcome, Permanent)
    assert server.connection_count == 0


def test_lines_of_998_bytes_are_accepted() -> None:
    data = b"Subject: x\r\n\r\n" + b"x" * 998 + b"\r\n"
    assert rendered(RawEmail(data=data, to="ann@example.com")).content == data


async def test_bytes_beyond_ascii_need_8bitmime(open_transport: Open) -> None:
    email = RawEmail(data=NON_ASCII_BODY, to="ann@example.com")
    async with accepting_server() as inbox, scripted_server() as without:
        assert await open_transport(inbox.port).send(outgoing(), email) == Sent()
        error = error_of(await open_transport(without.port).send(outgoing(), email), Permanent)
    assert inbox.received[0].content == NON_ASCII_BODY
    assert "BODY=8BITMIME" in inbox.received[0].options
    assert "SMTPUTF8" not in inbox.received[0].options
    assert error == (
        "raw_email.data: has bytes that are not ASCII, and the server does not offer 8BITMIME; encode the body as "
        "base64 or quoted-printable"
    )
    assert without.contents == []


async def test_headers_beyond_ascii_need_smtputf8(open_transport: Open) -> None:
    email = RawEmail(data=NON_ASCII_HEADER, to="ann@example.com")
    async with accepting_server(smtputf8=True) as inbox, accepting_server() as without:
        assert await open_transport(inbox.port).send(outgoing(), email) == Sent()
        error = error_of(await open_transport(without.port).send(outgoing(), email), Permanent)
    assert inbox.received[0].content == NON_ASCII_HEADER
    assert {"BODY=8BITMIME", "SMTPUTF8"} <= set(inbox.received[0].options)
    assert error == "raw_email.data: has headers that are not ASCII, and the server does not offer SMTPUTF8"
    assert without.received == []


# --- the envelope -----------------------------------------------------------------------------------------------------


def test_the_recipients_are_those_of_the_envelope_and_never_those_of_the_headers() -> None:
    assert rendered(replace(RAW, to=["ann@example.com", "bob@example.com", "ann@example.com"])).recipients == (
        "ann@example.com",
        "bob@example.com",
    )
    assert rendered(replace(RAW, to=None), destination="mailto:dan@example.com").recipients == ("dan@example.com",)
    with pytest.raises(Permanent, match=r"raw_email\.to: no recipient"):
        rendered(replace(RAW, to=None))
    with pytest.raises(Permanent, match=r"raw_email\.to: 1001 addresses are more than 1000"):
        rendered(replace(RAW, to=["a@example.com"] * (MAX_RECIPIENT_COUNT + 1)))


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (None, "MAIL FROM:<club@example.org>"),
        ("bounces+ann=example.com@lists.example.org", "MAIL FROM:<bounces+ann=example.com@lists.example.org>"),
        ("", "MAIL FROM:<>"),
    ],
)
async def test_the_envelope_sender_gets_the_bounces(open_transport: Open, given: str | None, command: str) -> None:
    email = Email(to="ann@example.com", subject="Hello", text="Hi", envelope_sender=given)
    async with scripted_server() as server:
        transport = open_transport(server.port)
        assert await transport.send(outgoing(), email) == Sent()
        assert await transport.send(outgoing(), replace(RAW, envelope_sender=given)) == Sent()
    assert [line for line in server.commands if line.startswith("MAIL")] == [command, command]
    shown = parsed(server.contents[0])
    assert (shown["From"], shown["Return-Path"], shown["Sender"]) == ("club@example.org", None, None)
    assert shown["Message-ID"].endswith("@example.org>")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("a@example.org\r\nRCPT TO:<eve@example.org>", "contains CR, LF or NUL"),
        ("a@example.org\n", "contains CR, LF or NUL"),
        ("=?utf-8?q?a=0D=0A?=@example.org", "contains CR, LF or NUL"),
        ("a@example.org> BODY=8BITMIME", "the part after @ is not a domain"),
        ("a@example.org SIZE=1", "the part after @ is not a domain"),
        ("a@b@example.org", "has more than one @"),
        ("@relay.test:a@example.org", "has more than one @"),
        ("Ann <a@example.org>", "must be an address without a name and without <>"),
        ("<a@example.org>", "must be an address without a name and without <>"),
        ("<>", "is empty"),
        (" ", "is empty"),
        ("postmaster", "has no @"),
    ],
)
def test_an_email_with_an_invalid_envelope_sender_cannot_be_built(value: str, error: str) -> None:
    with pytest.raises(Permanent) as refused:
        Email(to="ann@example.com", subject="Hello", text="Hi", envelope_sender=value)
    assert refused.value.error.startswith(f"email.envelope_sender: {error}")
    with pytest.raises(Permanent) as refused:
        replace(RAW, envelope_sender=value)
    assert refused.value.error.startswith(f"raw_email.envelope_sender: {error}")


async def test_an_envelope_sender_beyond_ascii_needs_smtputf8(open_transport: Open) -> None:
    email = Email(to="ann@example.com", subject="Hello", text="Hi", envelope_sender="zoë@example.org")
    async with accepting_server(smtputf8=True) as inbox, accepting_server() as without:
        assert await open_transport(inbox.port).send(outgoing(), email) == Sent()
        error = error_of(await open_transport(without.port).send(outgoing(), email), Permanent)
    assert inbox.received[0].sender == "zoë@example.org"
    assert error == "email.envelope_sender: is not ASCII before @, and the server does not offer SMTPUTF8"


async def test_a_raw_email_with_an_envelope_sender_needs_no_sender_setting(open_transport: Open) -> None:
    async with scripted_server() as server:
        transport = open_transport(server.port, smtp_sender=None)
        error = error_of(await transport.send(outgoing(), RAW), Unavailable)
        assert await transport.send(outgoing(), replace(RAW, envelope_sender="a@example.org")) == Sent()
        assert await transport.send(outgoing(), replace(RAW, envelope_sender="")) == Sent()
    assert error == "raw_email.envelope_sender: none is given, and PGOUTBOX_SMTP_SENDER is not set"


@pytest.mark.parametrize(
    ("email", "part"),
    [
        (RAW, "PGOUTBOX_SMTP_SENDER"),
        (replace(RAW, envelope_sender="b+1@Lists.example.org"), "@lists.example.org"),
        (replace(RAW, envelope_sender=""), "<>"),
        (Email(subject="", text="", envelope_sender="b+2@lists.example.org"), "@lists.example.org"),
        (Email(subject="", text="", sender="Ann <ann@example.org>"), "ann@example.org"),
    ],
)
async def test_a_refused_envelope_sender_holds_back_only_its_domain(
    open_transport: Open, email: Email | RawEmail, part: str
) -> None:
    if isinstance(email, Email):
        email = replace(email, text="Hi", to="ann@example.com")
    async with scripted_server({"MAIL": "553 5.1.8 not yours"}) as server:
        outcome = await open_transport(server.port).send(outgoing(), email)
    assert isinstance(outcome, Unavailable)
    assert outcome.breaker == f"smtp:127.0.0.1:{server.port} sender {part}"


# --- the redirect -----------------------------------------------------------------------------------------------------

TWO = replace(RAW, to=["ann@example.com", "zoë@example.net"])


def test_a_redirected_raw_email_names_its_recipients_in_a_first_header() -> None:
    mail = rendered(TWO, redirect_to="tester@example.org")
    assert mail.recipients == ("tester@example.org",)
    assert mail.content.endswith(b"\r\n" + DATA)
    assert mail.content.startswith(b"X-Pgoutbox-Original-To: ")
    assert parsed(mail.content)["X-Pgoutbox-Original-To"] == "ann@example.com, zoë@example.net"
    assert parsed(mail.content)["Message-ID"] == "<own@elsewhere.test>"
    assert (mail.is_8bit, mail.smtputf8_problem) == (False, None)


def test_the_destination_of_a_raw_email_is_redirected_too() -> None:
    mail = rendered(replace(RAW, to=None), destination="mailto:dan@example.com", redirect_to="@test.example.org")
    assert mail.recipients == ("dan=example.com@test.example.org",)


def test_exempt_recipients_get_the_bytes_unchanged_and_see_no_other_recipient() -> None:
    mail = rendered(TWO, redirect_to="tester@example.org", redirect_exempt="ann@example.com")
    assert mail.recipients == ("ann@example.com", "tester@example.org")
    assert mail.content == DATA


def test_a_raw_email_goes_to_nobody_during_a_blackout() -> None:
    with pytest.raises(Postponed) as caught:
        rendered(TWO, redirect_to="tester@example.org", blackout="2026-04-01/2026-09-30")
    assert "refuses to redirect to tester@example.org within" in (caught.value.reason or "")


def test_many_original_recipients_of_a_raw_email_create_no_long_line() -> None:
    many = replace(RAW, to=[f"user{number}@example.com" for number in range(1_000)])
    mail = rendered(many, redirect_to="tester@example.org")
    assert max(map(len, mail.content.split(b"\r\n"))) <= 998
    assert len(parsed(mail.content)["X-Pgoutbox-Original-To"].split(", ")) == 1_000


async def test_a_redirected_raw_email_reaches_only_the_testers(open_transport: Open) -> None:
    async with accepting_server() as inbox:
        transport = open_transport(inbox.port, redirect_to="tester@example.org")
        assert await transport.send(outgoing(), TWO) == Sent()
    assert [received.recipients for received in inbox.received] == [["tester@example.org"]]
