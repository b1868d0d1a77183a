"""Tests the commands of an e-mail in one write (RFC 2920): the outcomes are those of one command after the other."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pytest
import trustme

from pgoutbox.message import Permanent, SendFailure, Sent, Unavailable
from pgoutbox.transports import SmtpTransport
from pgoutbox.transports.smtp.mail import Email, RawEmail
from pgoutbox.transports.tls import verifying_context
from tests.support.dialogues import HOST, listening
from tests.support.sends import closing, error_of, outgoing
from tests.support.settings import settings_with
from tests.support.smtp_server import Misbehaviour, Reply, ScriptedServer, mail_settings, parsed, scripted_server
from tests.support.waiting import turn, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from pgoutbox.message import Outcome

    Open = Callable[..., SmtpTransport]

OFFERED: Final = ("SIZE 1000000", "8BITMIME", "SMTPUTF8", "PIPELINING")
EMAIL: Final = Email(to="ann@example.com", subject="Hello", text="Hi")
TWO: Final = Email(to=["ann@example.com", "bob@example.com"], subject="Hello", text="Hi")
MAIL, ANN, BOB = b"MAIL FROM:<club@example.org>\r\n", b"RCPT TO:<ann@example.com>\r\n", b"RCPT TO:<bob@example.com>\r\n"
DATA, DOT, OK, GO = b"DATA\r\n", b"\r\n.\r\n", b"250 ok\r\n", b"354 go ahead\r\n"
SILENCE_SECONDS: Final = 1

STEPS: Final = ("MAIL", "RCPT", "RCPT TO:<ann@example.com>", "DATA", ".", "RCPT TO:<bob@example.com>")
ANSWERS: Final[Sequence[Reply]] = (
    "421 4.3.2 going down",
    "450 4.7.1 greylisted",
    "451 4.3.0 try later",
    "452 4.5.3 too many recipients",
    "452 4.3.1 disk full",
    "503 5.5.1 nested MAIL",
    "550 5.1.1 no such user",
    "550-5.7.26 no SPF\r\n550 5.7.26 see x.test",
    "552 5.3.4 too big",
    "554 5.7.1 Relay access denied",
    "554 5.7.1 <club@example.org>: Sender address rejected",
    "354 go ahead",
    "251 will forward",
    "nonsense",
    Misbehaviour.DROP,
)


@pytest.fixture
async def open_transport() -> AsyncIterator[Open]:
    def make(port: int, *, tls_context: ssl.SSLContext | None = None, **overrides: object) -> SmtpTransport:
        return SmtpTransport(settings_with(**(mail_settings(port) | overrides)), tls_context=tls_context)

    async with closing(make) as make_one:
        yield make_one


@dataclass
class Exchanges:
    """A server that, on each connection, waits in turn for these ends of what the client says, and gives the answers.

    `heard` has what the client has said before each answer, and after the last one.
    """

    answers: Sequence[Sequence[tuple[bytes, bytes]]]
    heard: list[bytes] = field(default_factory=list)
    connection_count: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run the dialogue with one client."""
        answers = self.answers[self.connection_count]
        self.connection_count += 1
        await say(writer, b"220 mx.test ESMTP\r\n")
        await reader.readline()
        await say(writer, b"250-mx.test\r\n250 PIPELINING\r\n")
        for end, answer in answers:
            self.heard.append(await reader.readuntil(end))
            await say(writer, answer)
        self.heard.append(await reader.read())
        writer.close()


async def say(writer: asyncio.StreamWriter, text: bytes) -> None:
    """Send each byte in a packet of its own, which the client reads in the turns of the event loop after it."""
    for byte in text:
        writer.write(bytes((byte,)))
        await turn(2)


def recipients_of(server: ScriptedServer) -> list[str]:
    return [parsed(content)["To"] for content in server.contents]


def shown(outcome: Outcome) -> str:
    return (
        f"{type(outcome).__name__} {sorted(vars(outcome).items())}" if isinstance(outcome, Exception) else repr(outcome)
    )


# --- one write --------------------------------------------------------------------------------------------------------


async def test_the_commands_to_one_recipient_go_in_one_write_and_their_replies_may_come_in_any_pieces(
    open_transport: Open,
) -> None:
    replies = b"250 ok\r\n250-yes\r\n250 ok\r\n354 go ahead\r\n"
    taken = b"250-2.0.0 it is\r\n250 2.0.0 taken\r\n"
    server = Exchanges([[(DATA, replies), (DOT, taken), (b"QUIT\r\n", b"221 bye\r\n")]])
    async with listening(server.serve) as port:
        transport = open_transport(port)
        assert await transport.send(outgoing(), EMAIL) == Sent()
        await transport.aclose()
        await until(lambda: len(server.heard) == 4)
    assert server.heard[0] == MAIL + ANN + DATA
    assert server.heard[1].startswith(b"From: club@example.org\r\n")
    assert server.heard[2:] == [b"QUIT\r\n", b""]


async def test_the_content_waits_until_the_recipient_is_accepted(open_transport: Open) -> None:
    replies = b"250 ok\r\n550 5.1.1 no such user\r\n554 5.5.1 no valid recipients\r\n"
    server = Exchanges([[(DATA, replies), (b"RSET\r\n", OK), (DATA, OK * 2 + GO), (DOT, OK)]])
    async with listening(server.serve) as port:
        transport = open_transport(port)
        error = error_of(await transport.send(outgoing(), EMAIL), Permanent)
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert error == "RCPT ann@example.com: 550 5.1.1 no such user"
    assert server.heard[:3] == [MAIL + ANN + DATA, b"RSET\r\n", MAIL + ANN + DATA]
    assert server.connection_count == 1


async def test_data_waits_until_all_of_several_recipients_are_accepted(open_transport: Open) -> None:
    async with scripted_server({BOB.decode().strip(): "550 5.1.1 no such user"}, extensions=OFFERED) as server:
        transport = open_transport(server.port)
        error = error_of(await transport.send(outgoing(), TWO), Permanent)
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert error == "RCPT bob@example.com: 550 5.1.1 no such user"
    assert server.verbs == ["EHLO", "MAIL", "RCPT", "RCPT", "RSET", "MAIL", "RCPT", "DATA"]
    assert server.connection_count == 1


@pytest.mark.slow
async def test_the_replies_to_a_thousand_recipients_are_read_whatever_their_length(open_transport: Open) -> None:
    many = Email(to=[f"user{number}@example.com" for number in range(1_000)], subject="Hello", text="Hi")
    async with scripted_server({"RCPT": "550 " + "no" * 200}, extensions=OFFERED) as server:
        outcome = await open_transport(server.port).send(outgoing(), many)
    assert isinstance(outcome, Unavailable | SendFailure)
    assert outcome.error.endswith("; and 995 more")
    assert server.verbs.count("RCPT") == 1_000


async def test_the_parameters_of_the_sender_and_stuffed_dots_are_the_same_in_one_write(open_transport: Open) -> None:
    data = b".X-Tag: 1\r\n\r\n.\r\n..\r\nGr\xc3\xbc\xc3\x9fe\r\n.end\r\n"
    async with scripted_server(extensions=OFFERED) as server, scripted_server(extensions=OFFERED[:-1]) as one_by_one:
        for port in (server.port, one_by_one.port):
            email = RawEmail(data=data, to="zo\u00eb@example.com")
            assert await open_transport(port).send(outgoing(), email) == Sent()
    assert server.commands[1:3] == [
        f"MAIL FROM:<club@example.org> SIZE={len(data)} BODY=8BITMIME SMTPUTF8",
        "RCPT TO:<zo\u00eb@example.com>",
    ]
    assert server.contents == [b"..X-Tag: 1\r\n\r\n..\r\n...\r\nGr\xc3\xbc\xc3\x9fe\r\n..end\r\n"]
    assert (server.commands, server.contents) == (one_by_one.commands, one_by_one.contents)


# --- the outcomes -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("step", "email"), [(step, EMAIL) for step in STEPS[:-1]] + [(step, TWO) for step in STEPS])
async def test_an_outcome_is_the_same_as_after_one_command_at_a_time(
    open_transport: Open, step: str, email: Email
) -> None:
    """Three e-mails go through one transport. The second one gets the answer."""
    before = {"DATA": ["354 go ahead"], "RCPT TO:<bob@example.com>": []}.get(step, ["250 ok"])
    for answer in ANSWERS:
        found = []
        for extensions in (OFFERED, OFFERED[:-1]):
            async with scripted_server({step: [*before, answer]}, extensions=extensions) as server:
                transport = open_transport(server.port)
                outcomes = [shown(await transport.send(outgoing(), one)) for one in (EMAIL, email, EMAIL)]
            found.append(([text.replace(str(server.port), "PORT") for text in outcomes], recipients_of(server)))
        in_one_write, one_by_one = found
        assert in_one_write == one_by_one, (step, answer)


@pytest.mark.parametrize("step", ["MAIL", "RCPT", "DATA", "."])
async def test_a_cancelled_send_leaves_its_connection_with_nothing_sent(open_transport: Open, step: str) -> None:
    async with scripted_server({step: [Misbehaviour.HANG]}, extensions=OFFERED) as server:
        transport = open_transport(server.port, smtp_connections=1)
        sending = asyncio.create_task(transport.send(outgoing(), EMAIL))
        await server.is_silent.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await server.was_left.wait()
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert server.connection_count == 2
    assert len(server.contents) == 1 + (step == ".")


async def test_an_idle_connection_that_ends_before_any_reply_is_replaced(open_transport: Open) -> None:
    async with scripted_server({"MAIL": ["250 ok", Misbehaviour.DROP]}, extensions=OFFERED) as server:
        transport = open_transport(server.port)
        for _ in range(2):
            assert await transport.send(outgoing(), EMAIL) == Sent()
    assert (server.connection_count, len(server.contents)) == (2, 2)


# --- servers that break the protocol ----------------------------------------------------------------------------------


async def test_a_server_that_asks_for_the_content_without_a_recipient_gets_not_even_its_end(
    open_transport: Open,
) -> None:
    """A dot alone may send an empty e-mail."""
    server = Exchanges([[(DATA, OK + b"550 5.1.1 no such user\r\n" + GO)], [(DATA, OK * 2 + GO), (DOT, OK)]])
    async with listening(server.serve) as port:
        transport = open_transport(port)
        error = error_of(await transport.send(outgoing(), EMAIL), Permanent)
        assert error == "RCPT ann@example.com: 550 5.1.1 no such user"
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert server.heard[:3] == [MAIL + ANN + DATA, b"", MAIL + ANN + DATA]


@pytest.mark.parametrize("extensions", [OFFERED, ()])
async def test_a_reply_before_the_content_is_not_one_to_the_content(
    open_transport: Open, extensions: Sequence[str]
) -> None:
    answers = {"DATA": ["354 go ahead\r\n250 2.0.0 taken"], ".": "554 5.7.1 spam"}
    async with scripted_server(answers, extensions=extensions) as server:
        transport = open_transport(server.port)
        outcome = await transport.send(outgoing(), EMAIL)
        assert error_of(outcome, SendFailure).endswith("DATA: -1 a reply too many")
        assert error_of(await transport.send(outgoing(), EMAIL), Permanent) == "DATA: 554 5.7.1 spam"
    assert len(server.contents) == 1


@pytest.mark.parametrize("extensions", [OFFERED, ()])
async def test_a_connection_with_a_text_that_nobody_asked_for_is_replaced(
    open_transport: Open, extensions: Sequence[str]
) -> None:
    async with scripted_server({".": ["250 ok\r\n250 ok"]}, extensions=extensions) as server:
        transport = open_transport(server.port)
        for _ in range(3):
            assert await transport.send(outgoing(), EMAIL) == Sent()
    assert server.connection_count == 2


@pytest.mark.parametrize("answer", ["250-ok\r\nok\r\n250 ok", "abc-ok\r\n250 ok", "", "ok", "25", "2\u00b250 ok"])
async def test_a_reply_that_is_none_ends_the_connection(open_transport: Open, answer: str) -> None:
    async with scripted_server({"MAIL": [answer]}, extensions=OFFERED) as server:
        transport = open_transport(server.port)
        outcome = await transport.send(outgoing(), EMAIL)
        assert error_of(outcome, Unavailable).startswith("MAIL: -1 ")
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert server.connection_count == 2


async def test_a_server_that_says_too_much_is_left(open_transport: Open) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mx.test ESMTP\r\n")
        await reader.readline()
        writer.write(b"250-mx.test\r\n250 PIPELINING\r\n")
        await reader.readuntil(DATA)
        writer.write(b"2" * 3_000_000)
        await reader.read()
        writer.transport.abort()

    async with listening(serve) as port:
        outcome = await open_transport(port).send(outgoing(), EMAIL)
    assert error_of(outcome, Unavailable) == "MAIL: Connection lost"


@pytest.mark.parametrize("turns", range(8))
async def test_a_server_that_leaves_before_the_first_command_is_an_outage(open_transport: Open, turns: int) -> None:
    """The connection may end before, while or after the dialogue takes it over."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mx.test ESMTP\r\n")
        await reader.readline()
        writer.write(b"250-mx.test\r\n250 PIPELINING\r\n")
        await turn(turns)
        writer.close()

    async with listening(serve) as port:
        outcome = await open_transport(port).send(outgoing(), EMAIL)
    assert error_of(outcome, Unavailable) in {"connect: Connection lost", "MAIL: Connection lost"}


@pytest.mark.slow
async def test_a_silent_connection_says_nothing_about_the_next_one(open_transport: Open) -> None:
    server = Exchanges([[(DATA, OK * 2 + GO), (DOT, OK), (DATA, b"")], [(DATA, OK * 2 + GO), (DOT, OK)]])
    async with listening(server.serve) as port:
        transport = open_transport(port, smtp_timeout_seconds=SILENCE_SECONDS)
        for _ in range(2):
            assert await transport.send(outgoing(), EMAIL) == Sent()
    assert server.connection_count == 2


@pytest.mark.slow
async def test_a_server_that_loses_all_but_the_first_command_gets_one_at_a_time_from_then_on(
    open_transport: Open,
) -> None:
    """Its e-mails would never arrive: the next e-mail would wait in vain too."""
    contents = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = {b"EHLO": b"250-mx.test\r\n250 PIPELINING\r\n", DATA: b"354 go ahead\r\n"}
        writer.write(b"220 mx.test ESMTP\r\n")
        while said := await reader.read(65_536):
            if said.endswith(b"\r\n.\r\n"):
                contents.append(said)
            command = said.partition(b"\n")[0] + b"\n"
            writer.write(answers.get(command, answers.get(command[:4], b"250 ok\r\n")))
        writer.close()

    async with listening(serve) as port:
        transport = open_transport(port, smtp_timeout_seconds=SILENCE_SECONDS)
        error = error_of(await transport.send(outgoing(), EMAIL), SendFailure)
        assert error == "RCPT ann@example.com: no answer within 1 s"
        for count in (1, 2):
            assert await transport.send(outgoing(), EMAIL) == Sent()
            assert len(contents) == count


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("security", ["starttls", "tls"])
async def test_the_commands_go_in_one_write_over_tls_too(open_transport: Open, security: str) -> None:
    authority, server_tls, client_tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), verifying_context()
    authority.issue_cert(HOST).configure_cert(server_tls)
    authority.configure_trust(client_tls)
    starttls, tls = (server_tls, None) if security == "starttls" else (None, server_tls)
    answers: dict[str, Sequence[Reply]] = {"RCPT": ["250 ok", Misbehaviour.DROP]}
    async with scripted_server(answers, extensions=("STARTTLS", *OFFERED), starttls=starttls, tls=tls) as server:
        transport = open_transport(server.port, smtp_security=security, tls_context=client_tls)
        assert await transport.send(outgoing(), EMAIL) == Sent()
        outcome = await transport.send(outgoing(), EMAIL)
        assert error_of(outcome, SendFailure) == "RCPT ann@example.com: Connection lost"
        assert await transport.send(outgoing(), EMAIL) == Sent()
    assert server.connection_count == 2


async def test_an_idle_connection_with_a_reply_that_nobody_asked_for_is_closed(open_transport: Open) -> None:
    """A proxy may keep it open after `421`."""
    closed = [asyncio.Event() for _ in range(2)]
    connections = iter(closed)
    has_said = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        its_end = next(connections)
        writer.write(b"220 mx ESMTP\r\n")
        await reader.readline()
        writer.write(b"250-mx\r\n250 PIPELINING\r\n")
        await reader.readuntil(DATA)
        writer.write(OK + OK + GO)
        await reader.readuntil(DOT)
        writer.write(OK)
        if its_end is closed[0]:
            writer.write(b"421 4.4.2 idle\r\n")
            await writer.drain()
            has_said.set()
        await reader.read()
        its_end.set()
        writer.close()

    async with listening(serve) as port:
        transport = open_transport(port, smtp_connections=1)
        assert await transport.send(outgoing(), EMAIL) == Sent()
        await has_said.wait()
        await turn(20)  # The transport hears it.
        assert await transport.send(outgoing(), EMAIL) == Sent()
        await closed[0].wait()
