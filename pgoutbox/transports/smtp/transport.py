"""The transport that hands e-mail to an SMTP server.

It keeps a few connections open. It never repeats a message that the server may have accepted: the retry policy decides
on that. The Message-ID, the same at every attempt, lets the receiver recognise the repetition. No address, text or
secret goes into the log.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from pgoutbox.errors import ConfigurationError, MissingExtraError
from pgoutbox.message import Outcome, Permanent, SendFailure, Sent, Transient, Unavailable
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.options import DOMAIN
from pgoutbox.text import one_line
from pgoutbox.transports.addresses import parse_mailbox
from pgoutbox.transports.smtp.outgoing import SLOWEST_BYTES_PER_SECOND, MailTransport, OutgoingMail
from pgoutbox.transports.smtp.refusals import Cause, Refusal, cause_of
from pgoutbox.transports.tls import client_context

try:
    import aiosmtplib

    from pgoutbox.transports.smtp.dialogue import Dialogue
except ImportError:
    raise MissingExtraError("the SMTP transport") from None

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pgoutbox.settings import Settings, SmtpSettings
    from pgoutbox.transports.smtp.mail import RenderedEmail

_telemetry = Telemetry(logging.getLogger("pgoutbox.transports.smtp"))

_DEFAULT_PORTS = {"starttls": 587, "tls": 465, "none": 25}
_QUIT_SECONDS = 2.0
_DATA = b"DATA\r\n"
_NAMED_REFUSAL_COUNT = 5
# A server that does not relay refuses this address. It exists nowhere, by RFC 2606.
_ELSEWHERE = "pgoutbox-doctor@example.com"
# A server that is busy may cause these. Other failures to connect need a repair: name, port, route or protocol. They
# have no common class: if a name has several addresses, asyncio joins their errors into one text.
_BUSY = (TimeoutError, ConnectionResetError, ConnectionAbortedError)


class SmtpTransport(MailTransport):
    """Sends `Email` and `RawEmail` through the SMTP server of the settings.

    At most `smtp.connections` connections are open at once. They are reused, unless they were idle for longer than
    `idle_seconds`, or the server has refused something other than a recipient or the e-mail: only new connections see
    its repaired settings. A connection that is dead before the server accepts MAIL is replaced; after that nothing is
    repeated. With `starttls` and `tls` nothing is sent in plain text, in particular no password: the certificate and
    its host name are verified against the CAs of the system and of `smtp.ca_file`, or by `tls_context`.

    Failures that pass with time or that the operator can fix are `Transient`. A refused sender or password is
    `Unavailable`. If the connection breaks after the content was sent, the outcome is unknown: the next attempt may be
    a duplicate, with the same Message-ID.

    Raises `ConfigurationError` when a setting is missing or unusable, `MissingExtraError` without aiosmtplib.
    """

    _name = "SMTP"

    def __init__(
        self, settings: Settings, *, tls_context: ssl.SSLContext | None = None, idle_seconds: float = 60.0
    ) -> None:
        smtp = settings.smtp
        _check_settings(smtp)
        super().__init__(settings)
        has_tls = smtp.security != "none"
        self._tls_context = client_context(
            "SMTP", smtp.ca_file, "SECURITY", "starttls or tls", has_tls=has_tls, given=tls_context
        )
        self._idle_seconds = idle_seconds
        self._idle: list[_Connection] = []
        self._ehlo_name = smtp.ehlo_name
        self._is_pipelined = True
        self._breaker_key = f"smtp:{smtp.host}:{_port_of(smtp)}"

    async def check(self) -> Outcome:
        """Name the sender and two recipients as for an e-mail, and return the outcome. No content follows.

        The recipients are the sender itself, and an address elsewhere, because the server of the sender's domain may
        accept e-mail to the sender from everybody.
        """
        try:
            connection = await self._open()
            try:
                if self._smtp.sender is not None:
                    sender = parse_mailbox("PGOUTBOX_SMTP_SENDER", self._smtp.sender).address.addr_spec
                    if sender.isascii():  # Other senders need SMTPUTF8, which only an e-mail requests.
                        await connection.rehearse(sender)
            finally:
                await connection.quit()
        except _Failure as failure:
            return failure.outcome((self._own_sender_key,))
        return Sent()

    async def aclose(self) -> None:
        """Close every open connection with QUIT."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(connection.quit() for connection in idle))

    async def _hand_over(self, mail: OutgoingMail) -> Outcome:
        """Hand the e-mail over on an open connection or a new one."""
        try:
            idle = self._take_idle()
            if idle is not None:
                try:
                    return await self._transact(idle, mail)
                except _Failure as failure:
                    # Once MAIL was accepted, only the retry policy may start over.
                    if failure.step != "MAIL" or not failure.ends_connection:
                        raise
                    text = "an idle connection had died"
                    _telemetry.report(logging.DEBUG, LogEvent.SMTP_CONNECTION_REPLACED, text)
            return await self._transact(await self._open(), mail)
        except _Failure as failure:
            return failure.outcome(self.part_keys(mail.message, mail.email))

    async def _transact(self, connection: _Connection, mail: OutgoingMail) -> Outcome:
        """Run one mail transaction. Keep the connection if its state is known, also after a cancellation."""
        try:
            return await connection.deliver(await mail.pass_gate(), is_pipelined=self._is_pipelined)
        except _Failure as failure:
            if failure.step in ("RCPT", "DATA") and failure.is_silent:
                self._is_pipelined = False  # Some servers offer PIPELINING, and lose all but the first command.
            raise
        finally:
            if connection.is_ready:
                connection.idle_since = asyncio.get_running_loop().time()
                self._idle.append(connection)
            else:
                connection.abort()

    def _take_idle(self) -> _Connection | None:
        """Return the connection used last, so that an oversized pool shrinks."""
        oldest = asyncio.get_running_loop().time() - self._idle_seconds
        while self._idle and self._idle[0].idle_since <= oldest:
            self._idle.pop(0).abort()
        while self._idle:
            connection = self._idle.pop()
            if connection.dialogue.is_open:
                return connection
            connection.abort()
        return None

    async def _open(self) -> _Connection:
        connection = _Connection(self._smtp, self._tls_context, self._ehlo_name)
        try:
            await connection.open()
        except BaseException:
            connection.abort()
            raise
        # Resolving the own host name can take seconds; once is enough.
        self._ehlo_name = connection.client.local_hostname
        _telemetry.report(logging.DEBUG, LogEvent.SMTP_CONNECTION_OPENED, "connection opened")
        return connection


def _port_of(settings: SmtpSettings) -> int:
    return settings.port or _DEFAULT_PORTS[settings.security]


def _check_settings(settings: SmtpSettings) -> None:
    if settings.host is None:
        raise ConfigurationError("no SMTP server given: set PGOUTBOX_SMTP_HOST")
    if not settings.host.isprintable() or " " in settings.host:
        raise ConfigurationError(f"PGOUTBOX_SMTP_HOST={settings.host!r}: is not a host name or an IP address")
    if settings.username is not None and settings.password is None:
        raise ConfigurationError("PGOUTBOX_SMTP_USERNAME is set, PGOUTBOX_SMTP_PASSWORD is not")
    if settings.ehlo_name is not None and not DOMAIN.fullmatch(settings.ehlo_name):
        raise ConfigurationError(f"PGOUTBOX_SMTP_EHLO_NAME={settings.ehlo_name!r}: is not a host name")


@dataclass(eq=False)
class _Failure(Exception):  # noqa: N818 - it becomes an outcome
    """A step of the dialogue that the server refused, with its code, or that broke off, without a code."""

    step: str
    code: int | None
    text: str
    cause: Cause = Cause.CONNECTION
    unknown: bool = False
    is_silent: bool = False
    recipients: Sequence[str] = ()
    """The recipients that may be at fault."""

    @property
    def ends_connection(self) -> bool:
        """No answer, or an answer about the connection and not about the message."""
        return self.code in {None, 421} or (self.step == "MAIL" and self.code == 503)

    def outcome(self, sender_keys: Sequence[str]) -> Outcome:
        """Return the outcome of the attempt. `sender_keys`: see `SmtpTransport.part_keys`.

        Before the content the server knows only the sender of the envelope.
        """
        # The server knows the recipient. A group that only insiders may write to is refused like a missing password.
        # Until then no fault is one of this e-mail, so it uses up no attempt.
        doubtful = f"mailto:{','.join(self.recipients)}" if self.recipients else None
        match self.cause:
            case Cause.LIMIT:
                return Unavailable(self.text)
            case Cause.SERVER:
                return Unavailable(self.text, doubtful=doubtful)
            case Cause.SENDER:
                sender_key = sender_keys[-1 if self.step == "DATA" else 0]
                return Unavailable(self.text, doubtful=doubtful, breaker=sender_key)
            case Cause.RECIPIENT | Cause.EMAIL:
                return Permanent(self.text)
            case Cause.LATER:
                return Transient(self.text)
            case Cause.CONNECTION | Cause.UNCLEAR if self.step not in {"RCPT", "DATA"}:
                return Unavailable(self.text, outage=True)
            case Cause.CONNECTION:
                return SendFailure(self.text, outage=True, unknown=self.unknown)
            case Cause.UNCLEAR:
                return SendFailure(self.text, outage=True, doubtful=doubtful)


class _Connection:
    """One connection to the server. `is_ready`: the next command may be MAIL."""

    def __init__(self, settings: SmtpSettings, tls_context: ssl.SSLContext | None, ehlo_name: str | None) -> None:
        self._settings = settings
        self.client = aiosmtplib.SMTP(
            hostname=settings.host,
            port=_port_of(settings),
            local_hostname=ehlo_name,
            timeout=settings.timeout_seconds,
            use_tls=settings.security == "tls",
            # The code below demands STARTTLS; the client's own option would use it only if offered.
            start_tls=False,
            tls_context=tls_context,
        )
        self.dialogue: Dialogue  # From `open` on.
        self.is_ready = False
        self.idle_since = 0.0

    async def open(self) -> None:
        """Greet, encrypt as configured, authenticate. Raises `_Failure`."""
        with self._step("connect"):
            await self.client.connect()
        with self._step("EHLO"):
            await self.client.ehlo()
        if self._settings.security == "starttls":
            if not self.client.supports_extension("starttls"):
                text = "STARTTLS: the server does not offer it, and plain text is refused"
                raise _Failure("STARTTLS", None, text, Cause.SERVER)
            with self._step("STARTTLS"):
                await self.client.starttls()
            with self._step("EHLO"):
                await self.client.ehlo()
        await self._authenticate()
        with self._step("connect"):
            self.dialogue = Dialogue(self.client.transport, seconds=self._settings.timeout_seconds)
        self.is_ready = True

    async def _authenticate(self) -> None:
        username, password = self._settings.username, self._settings.password
        if username is None or password is None:
            return
        if self._settings.security == "none":
            text = "AUTH: refused on a connection in plain text"
            raise _Failure("AUTH", None, text, Cause.SERVER)
        if not self.client.supported_auth_methods:
            text = "AUTH: the server offers no way to sign in that is known here"
            raise _Failure("AUTH", None, text, Cause.SERVER)
        secret = password.get_secret_value()
        with self._step("AUTH", hide=_spellings(username, secret)):
            await self.client.login(username, secret)

    async def deliver(self, mail: RenderedEmail, *, is_pipelined: bool) -> Outcome:
        """Run one mail transaction. Raises `_Failure`; nothing was handed over unless it says "outcome unknown".

        The commands go in one write if the server offers PIPELINING. The content waits until it accepts all recipients.
        """
        if mail.smtputf8_problem is not None and not self.client.supports_extension("smtputf8"):
            return Permanent(f"{mail.smtputf8_problem}, and the server does not offer SMTPUTF8")
        if mail.is_8bit and not self.client.supports_extension("8bitmime"):
            return Permanent(
                "raw_email.data: has bytes that are not ASCII, and the server does not offer 8BITMIME; encode the body "
                "as base64 or quoted-printable"
            )
        self.is_ready = False
        first = self._mail_command(mail)
        if is_pipelined and self.client.supports_extension("pipelining"):
            # Of several recipients some may be refused. Then DATA would begin an e-mail to the others.
            last = [_DATA] if len(mail.recipients) == 1 else []
            self.dialogue.send_ahead([first, *map(_rcpt_command, mail.recipients), *last])
        try:
            await self._mail(mail.sender, first)
            await self._rcpt(mail)
            await self._data(mail)
        except _Failure as failure:
            # A server that was repaired may judge only new connections by its new settings, as Postfix does.
            if not failure.ends_connection and failure.cause < Cause.UNCLEAR:
                await self._reset()
            raise
        self.is_ready = True
        return Sent()

    def _mail_command(self, mail: RenderedEmail) -> bytes:
        size = f" SIZE={len(mail.content)}" if self.client.supports_extension("size") else ""
        body = " BODY=8BITMIME" if mail.is_8bit or mail.smtputf8_problem is not None else ""
        utf8 = " SMTPUTF8" if mail.smtputf8_problem is not None else ""
        return f"MAIL FROM:<{mail.sender}>{size}{body}{utf8}\r\n".encode()

    async def _mail(self, sender: str, command: bytes) -> None:
        with self._step("MAIL", sender=sender):
            await self.dialogue.ask(command, 250)

    async def _rcpt(self, mail: RenderedEmail) -> None:
        """Name the recipients. One refusal refuses all: otherwise a retry would be a duplicate for the others."""
        refused = await self._refusals(mail.sender, mail.recipients)
        if refused:
            refusals = [*refused.values()]
            named = "; ".join(refusal.text for refusal in refusals[:_NAMED_REFUSAL_COUNT])
            rest = len(refusals) - _NAMED_REFUSAL_COUNT
            text = f"{named}; and {rest} more" if rest > 0 else named
            cause = max(refusal.cause for refusal in refusals)
            if cause is Cause.UNCLEAR and len(refused) < len(mail.recipients):
                cause = Cause.LATER  # The server takes e-mail for others.
            raise _Failure("RCPT", refusals[0].code, text, cause, recipients=[*refused])

    async def _refusals(self, sender: str, recipients: Sequence[str]) -> dict[str, _Failure]:
        """Name the recipients, and return those that the server refuses."""
        refusals: dict[str, _Failure] = {}
        for number, recipient in enumerate(recipients):
            is_first = number == len(refusals)
            try:
                with self._step("RCPT", sender=sender, recipient=recipient, has_accepted_others=not is_first):
                    await self.dialogue.ask(_rcpt_command(recipient), 250, 251)
            except _Failure as failure:
                if failure.ends_connection:
                    raise
                refusals[recipient] = replace(failure, recipients=[recipient])
        return refusals

    async def rehearse(self, sender: str) -> None:
        """Name the sender, and as recipients the sender itself and an address elsewhere. Raises `_Failure`.

        A refusal of the other address counts only if it would hold every e-mail: nobody reads there.
        """
        await self._mail(sender, f"MAIL FROM:<{sender}>\r\n".encode())
        refusals = await self._refusals(sender, (sender, _ELSEWHERE))
        await self._reset()
        if [refusal.cause for refusal in refusals.values()] == [Cause.UNCLEAR, Cause.UNCLEAR]:
            raise replace(refusals[sender], cause=Cause.SERVER)  # It refuses everybody.
        counted = [
            refusal
            for recipient, refusal in refusals.items()
            if recipient == sender or refusal.cause >= Cause.CONNECTION
        ]
        if counted:
            raise max(counted, key=lambda refusal: refusal.cause)

    async def _data(self, mail: RenderedEmail) -> None:
        seconds = self._settings.timeout_seconds + len(mail.content) // SLOWEST_BYTES_PER_SECOND
        try:
            with self._step("DATA", sender=mail.sender, seconds=seconds):
                await self.dialogue.ask(_DATA, 354, seconds=seconds)
                await self.dialogue.ask(_with_its_end(mail.content), 250, seconds=seconds)
        except _Failure as failure:
            if failure.code is not None:
                raise replace(failure, recipients=mail.recipients) from failure
            text = f"outcome unknown: connection lost after {failure.text}"
            raise _Failure("DATA", None, text, unknown=True) from failure

    async def _reset(self) -> None:
        with suppress(_Failure):
            with self._step("RSET"):
                while self.dialogue.outstanding_count:
                    code, _ = await self.dialogue.reply()
                    if code == 354:
                        return  # The server wants the content. A dot alone could send an empty e-mail.
                await self.dialogue.ask(b"RSET\r\n", 250)
            self.is_ready = True

    async def quit(self) -> None:
        """Send QUIT, wait for a short time, and close the connection."""
        try:
            with suppress(_Failure), self._step("QUIT"):
                await self.dialogue.ask(b"QUIT\r\n", 221, seconds=_QUIT_SECONDS)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close at once, without flushing unwritten data: half a message must not become a whole one."""
        self.is_ready = False
        if self.client.transport is not None:
            cast("asyncio.WriteTransport", self.client.transport).abort()
        self.client.close()

    @contextmanager
    def _step(
        self,
        step: str,
        *,
        sender: str = "",
        recipient: str = "",
        has_accepted_others: bool = False,
        hide: Sequence[str] = (),
        seconds: float | None = None,
    ) -> Iterator[None]:
        """Turn errors of aiosmtplib in one step of the dialogue into a `_Failure`."""
        where = f"{step} {recipient}".rstrip()
        try:
            yield
        except aiosmtplib.SMTPResponseException as error:
            reply = one_line(error.message, hide=hide)
            code = error.code if 200 <= error.code <= 599 else None
            cause = cause_of(Refusal(step, error.code, reply, sender, recipient, has_accepted_others))
            raise _Failure(step, code, f"{where}: {error.code} {reply}".rstrip(), cause) from error
        except aiosmtplib.SMTPReadTimeoutError as error:
            text = f"{where}: no answer within {seconds or self._settings.timeout_seconds:g} s"
            raise _Failure(step, None, text, is_silent=True) from error
        except (aiosmtplib.SMTPException, OSError, UnicodeError) as error:
            # A server that restarts refuses connections too: the probe finds it.
            reason = error.__cause__ or error
            is_unconnected = step == "connect" and not isinstance(reason, (*_BUSY, aiosmtplib.SMTPException))
            needs_repair = is_unconnected or isinstance(reason, ssl.SSLCertVerificationError)
            cause = Cause.SERVER if needs_repair else Cause.CONNECTION
            raise _Failure(step, None, f"{where}: {one_line(str(error), hide=hide)}", cause) from error


def _rcpt_command(recipient: str) -> bytes:
    return f"RCPT TO:<{recipient}>\r\n".encode()


def _with_its_end(content: bytes) -> bytes:
    """Add the dot that ends the content, and another one to each line that begins with one."""
    stuffed = content.replace(b"\r\n.", b"\r\n..")
    return (b"." if content.startswith(b".") else b"") + stuffed + b".\r\n"


def _spellings(username: str, password: str) -> tuple[str, ...]:
    """Return the password in every form on the wire, because a server might quote it."""
    plain = f"\0{username}\0{password}".encode()
    return base64.b64encode(plain).decode(), base64.b64encode(password.encode()).decode(), password
