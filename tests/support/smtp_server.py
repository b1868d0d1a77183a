"""Real SMTP servers on real sockets: one that accepts everything (aiosmtpd) and one that misbehaves on request.

Both run on the test's own event loop, and stop when their context ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ssl
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email import policy
from email.message import EmailMessage
from email.parser import BytesParser
from typing import TYPE_CHECKING

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, Session

from tests.support.dialogues import HOST, listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence


def mail_settings(port: int) -> dict[str, object]:
    """Return settings of a transport for a server of this module, in plain text."""
    return {
        "smtp_host": HOST,
        "smtp_port": port,
        "smtp_security": "none",
        "smtp_sender": "club@example.org",
        "smtp_ehlo_name": "app.example.org",
        "smtp_timeout_seconds": 5,
    }


def parsed(content: bytes) -> EmailMessage:
    """Parse the message like a standard-conforming reader."""
    message = BytesParser(policy=policy.default).parsebytes(content)
    assert isinstance(message, EmailMessage)
    return message


@dataclass
class Received:
    """One message that the server received."""

    sender: str
    recipients: list[str]
    options: list[str]
    content: bytes
    was_encrypted: bool


@dataclass
class Inbox:
    """The address of an accepting server, and the messages that it received.

    The server does not answer a message that `delays` selects until `may_go_on` is set; until then it is in `delayed`.
    """

    port: int = 0
    received: list[Received] = field(default_factory=list)
    delays: Callable[[Received], bool] = lambda _: False
    delayed: list[Received] = field(default_factory=list)
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    logins: list[tuple[bytes, bytes]] = field(default_factory=list)
    connection_count: int = 0
    _servers: list[SMTP] = field(default_factory=list)

    def hang_up(self) -> None:
        """Abort every connection."""
        for server in self._servers:
            if isinstance(server.transport, asyncio.WriteTransport):
                server.transport.abort()

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802 - aiosmtpd
        content = envelope.original_content or b""
        assert envelope.mail_from is not None
        received = Received(
            envelope.mail_from, envelope.rcpt_tos, envelope.mail_options, content, session.ssl is not None
        )
        if self.delays(received):
            self.delayed.append(received)
            await self.may_go_on.wait()
            self.delayed.remove(received)
        self.received.append(received)
        return "250 2.0.0 taken"


@asynccontextmanager
async def accepting_server(
    inbox: Inbox | None = None,
    *,
    port: int = 0,
    starttls: ssl.SSLContext | None = None,
    tls: ssl.SSLContext | None = None,
    password: bytes | None = None,
    smtputf8: bool = False,
) -> AsyncIterator[Inbox]:
    """Run a server that accepts every message; with `password`, only after STARTTLS and AUTH."""
    inbox = inbox or Inbox()
    loop = asyncio.get_running_loop()

    def authenticate(server: SMTP, session: Session, envelope: Envelope, mechanism: str, data: object) -> AuthResult:
        login, given = getattr(data, "login", b""), getattr(data, "password", b"")
        inbox.logins.append((login, given))
        return AuthResult(success=given == password, handled=False)

    def connect() -> SMTP:
        inbox.connection_count += 1
        server = SMTP(
            inbox,
            hostname="mx.test",
            loop=loop,
            tls_context=starttls,
            require_starttls=starttls is not None,
            authenticator=authenticate if password is not None else None,
            auth_required=password is not None,
            enable_SMTPUTF8=smtputf8,
        )
        inbox._servers.append(server)
        return server

    listener = await loop.create_server(connect, HOST, port, ssl=tls)
    inbox.port = listener.sockets[0].getsockname()[1]
    try:
        yield inbox
    finally:
        listener.close()
        inbox.hang_up()
        for server in inbox._servers:
            if server._handler_coroutine is not None:
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await server._handler_coroutine


class Misbehaviour(enum.Enum):
    """The action of a scripted server instead of an answer."""

    HANG = "read on, say nothing"
    DROP = "close the connection"
    STALL = "ask for the content, read none of it until told to go on"


Reply = str | Misbehaviour


@dataclass
class ScriptedServer:
    """A server whose answers are given by step: `connect`, a verb, a whole command line, or `.` for the final dot.

    A single answer applies every time. Of a sequence each answer applies once, followed by the usual answer.
    """

    answers: Mapping[str, Reply | Sequence[Reply]]
    extensions: Sequence[str] = ()
    tls_context: ssl.SSLContext | None = None
    port: int = 0
    commands: list[str] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    connection_count: int = 0
    is_silent: asyncio.Event = field(default_factory=asyncio.Event)
    was_left: asyncio.Event = field(default_factory=asyncio.Event)
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    _given: dict[str, int] = field(default_factory=dict)

    @property
    def verbs(self) -> list[str]:
        """Return the commands without their arguments, in the order of arrival."""
        return [command.partition(" ")[0].upper() for command in self.commands]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run the dialogue with one client."""
        self.connection_count += 1
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            try:
                await self._converse(reader, writer)
            finally:
                self.was_left.set()
                writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not await self._answer(reader, writer, "connect", "connect", "220 mx.test ESMTP"):
            return
        accepted_count = 0
        while line := await reader.readline():
            command = line.decode().rstrip("\r\n")
            self.commands.append(command)
            verb = command.partition(" ")[0].upper()
            usual = self._usual_answer(verb) if accepted_count or verb != "DATA" else "503 5.5.1 no recipients"
            answer = await self._answer(reader, writer, command, verb, usual)
            if not answer:
                return
            accepted_count = accepted_count + answer.startswith("25") if verb == "RCPT" else 0
            if verb == "STARTTLS" and answer.startswith("220") and self.tls_context is not None:
                await writer.start_tls(self.tls_context)
            if verb == "DATA" and answer.startswith("354"):
                content = await reader.readuntil(b"\r\n.\r\n")
                self.contents.append(content[:-3])
                if not await self._answer(reader, writer, ".", ".", "250 2.0.0 taken"):
                    return

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, command: str, verb: str, usual: str
    ) -> str:
        """Answer, and return the answer; it is empty when the dialogue is over."""
        answer = self._next_answer(command if command in self.answers else verb, usual)
        if answer is Misbehaviour.DROP:
            return ""
        if answer is Misbehaviour.HANG:
            self.is_silent.set()
            await reader.read()
            return ""
        if answer is Misbehaviour.STALL:
            writer.write(b"354 go ahead\r\n")
            await self.may_go_on.wait()
            self.contents.append(await reader.read())
            return ""
        writer.write(answer.encode() + b"\r\n")
        await writer.drain()
        return "" if answer.startswith(("221", "421", "554 mx.test")) else answer

    def _next_answer(self, step: str, usual: str) -> Reply:
        answer = self.answers.get(step, usual)
        if isinstance(answer, str | Misbehaviour):
            return answer
        index = self._given.get(step, 0)
        self._given[step] = index + 1
        return answer[index] if index < len(answer) else usual

    def _usual_answer(self, verb: str) -> str:
        if verb == "EHLO":
            names = ["mx.test", *self.extensions]
            return "\r\n".join(f"250{' ' if name is names[-1] else '-'}{name}" for name in names)
        usual = {"STARTTLS": "220 go ahead", "DATA": "354 go ahead", "QUIT": "221 bye", "AUTH": "235 welcome"}
        return usual.get(verb, "250 ok")


@asynccontextmanager
async def scripted_server(
    answers: Mapping[str, Reply | Sequence[Reply]] | None = None,
    *,
    extensions: Sequence[str] = (),
    starttls: ssl.SSLContext | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[ScriptedServer]:
    """Run a server that behaves correctly except where `answers` says otherwise."""
    server = ScriptedServer(answers or {}, extensions=extensions, tls_context=starttls)
    async with listening(server.serve, tls=tls) as server.port:
        yield server
