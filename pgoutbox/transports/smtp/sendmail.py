"""The transport that hands e-mail to the program `sendmail` of a local mail server, for hosts without a port 25.

It starts one program for each e-mail, without a shell. Addresses are arguments after `--`, and the e-mail is the
program's input. The exit code, of sysexits.h, is the answer. No address, text or secret goes into the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import TYPE_CHECKING, Final, TypeVar, cast

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Message, Outcome, Permanent, SendFailure, Sent, Snooze, Unavailable
from pgoutbox.text import one_line
from pgoutbox.transports.redirect import RedirectRules, covering
from pgoutbox.transports.smtp.mail import Email, RawEmail, RenderedEmail
from pgoutbox.transports.smtp.outgoing import (
    SLOWEST_BYTES_PER_SECOND,
    OutgoingMail,
    check_sender,
    missing_sender,
    sender_keys,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.settings import Settings
    from pgoutbox.transports import Content

T = TypeVar("T")

_MAX_STDERR_BYTES: Final = 4_096
# Pipes end with the program, unless a delivery in the background keeps them open.
_PIPE_SECONDS: Final = 0.5
# The time for the end of a killed program.
_KILL_SECONDS: Final = 1.0
_NOT_EXECUTABLE: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.EISDIR}
)

_NAMES: Final = {
    64: "EX_USAGE", 65: "EX_DATAERR", 66: "EX_NOINPUT", 67: "EX_NOUSER", 68: "EX_NOHOST", 69: "EX_UNAVAILABLE",
    70: "EX_SOFTWARE", 71: "EX_OSERR", 72: "EX_OSFILE", 73: "EX_CANTCREAT", 74: "EX_IOERR", 75: "EX_TEMPFAIL",
    76: "EX_PROTOCOL", 77: "EX_NOPERM", 78: "EX_CONFIG",
}  # fmt: skip
_REFUSES_EMAIL: Final = frozenset({65, 67, 68})
# The last two are a shell's answer to a program that it cannot run.
_NEEDS_REPAIR: Final = frozenset({64, 69, 77, 78, 126, 127})


class SendmailTransport:
    """Sends `Email` and `RawEmail` by the program that `sendmail` names.

    One instance serves one event loop. At most `smtp.connections` programs run at once. The sender and the timeout are
    those of the SMTP settings. A program that does not end in time is killed.

    Raises `ConfigurationError` when a setting is missing or unusable.
    """

    schemes: tuple[str, ...] = ("mailto",)
    follows_redirect: bool = True

    def __init__(self, settings: Settings) -> None:
        if settings.sendmail is None:
            raise ConfigurationError("no sendmail program given: set PGOUTBOX_SENDMAIL")
        check_sender(settings.smtp)
        self._own_redirects = RedirectRules.of(settings.redirect).redirects()
        self._settings = settings
        self._smtp = settings.smtp
        self._path = settings.sendmail
        self._slots = asyncio.Semaphore(settings.smtp.connections)
        self._breaker_key = f"sendmail:{self._path}"

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Hand the e-mail over to the program, for all of its recipients or for none.

        `Sent` means that the program has accepted it. A program that is missing, or whose configuration is at fault, is
        `Unavailable`. If the program does not end in time, the outcome is unknown.
        """
        if not isinstance(content, (Email, RawEmail)):
            return Permanent(f"content: the sendmail transport sends an Email, not {type(content).__name__}")
        if (missing := missing_sender(content, self._smtp)) is not None:
            return Unavailable(missing, breaker=self.part_keys(message, content)[-1])
        mail = OutgoingMail(content, message, self._settings, covering(self._own_redirects, message.topic))
        try:
            await mail.pass_gate()
            async with self._slots:
                return await self._run(await mail.pass_gate())
        except (Permanent, Unavailable, Snooze) as refusal:
            return refusal

    def breaker_key(self, message: Message[object], content: Content | None) -> str:  # noqa: ARG002 - one for all
        """Return the program's key, for all recipients."""
        return self._breaker_key

    def part_keys(self, message: Message[object], content: Content) -> Sequence[str]:  # noqa: ARG002 - the content has it
        """Return the keys of the senders, as `SmtpTransport` does. Only a missing sender opens such a breaker."""
        return sender_keys(self._breaker_key, content, self._smtp)

    async def check(self) -> Outcome:
        """Check that the program exists and may be executed; start nothing."""
        return _check_program(Path(self._path))

    async def aclose(self) -> None:
        """Do nothing: a program ends with its e-mail."""

    async def _run(self, mail: RenderedEmail) -> Outcome:
        for address in (mail.sender, *mail.recipients):
            # Not every program knows `--`.
            if address.startswith("-"):
                return Permanent(f"address {address}: begins with -, which a program may take for an option")
        seconds = self._smtp.timeout_seconds + len(mail.content) // SLOWEST_BYTES_PER_SECOND
        arguments = ("-i", "-f", mail.sender or "<>", "--", *mail.recipients)
        try:
            # A program expects the line ends of its system.
            program = await _Program.start(
                self._path, *(text.encode() for text in arguments), data=mail.content.replace(b"\r\n", b"\n")
            )
        except OSError as error:
            reason = f"{self._path}: {error.strerror or error}"
            return Unavailable(reason, outage=error.errno not in _NOT_EXECUTABLE)
        try:
            async with asyncio.timeout(seconds):
                code = await program.exit_code()
        except TimeoutError:
            text = f"{self._path}: did not end within {seconds:g} s, and was killed; outcome unknown"
            return SendFailure(text, outage=True, unknown=True)
        finally:
            await program.end()
        return self._outcome(code, program, doubtful=f"mailto:{','.join(mail.recipients)}")

    def _outcome(self, code: int, program: _Program, *, doubtful: str) -> Outcome:
        if code == 0:
            if program.has_read_all:
                return Sent()
            text = f"{self._path}: it ended before it had read the e-mail, with exit code 0; outcome unknown"
            return SendFailure(text, outage=True, unknown=True)
        if code < 0:
            text = f"{self._path}: ended by signal {-code}, outcome unknown"
            return SendFailure(text, outage=True, unknown=True)
        name = f" ({_NAMES[code]})" if code in _NAMES else ""
        text = f"{self._path}: exit code {code}{name}: {program.complaint or 'no text on stderr'}"
        if code in _REFUSES_EMAIL:
            return Permanent(text)
        if code in _NEEDS_REPAIR:
            # Some programs answer so to one recipient.
            return Unavailable(text, doubtful=doubtful)
        return SendFailure(text, outage=True, doubtful=doubtful)


def _check_program(path: Path) -> Outcome:
    if not path.is_file():
        return Unavailable(f"{path}: no such program")
    if not os.access(path, os.X_OK):
        return Unavailable(f"{path}: this user may not execute it")
    return Sent()


class _Program(asyncio.SubprocessProtocol):
    """A running program. It gets its input while its output is read, so neither can block the other."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = loop.create_future()
        self._stderr_ended: asyncio.Future[None] = loop.create_future()
        self._is_fed = False
        self._stdin_ended: asyncio.Future[bool] = loop.create_future()
        self._stderr = b""
        self._transport: asyncio.SubprocessTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport of the new program."""
        self._transport = cast("asyncio.SubprocessTransport", transport)

    @classmethod
    async def start(cls, path: str, *arguments: bytes, data: bytes) -> _Program:
        """Start the program in a session of its own, so that it can be killed with its children."""
        starting = asyncio.ensure_future(
            asyncio.get_running_loop().subprocess_exec(
                cls, path, *arguments, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, start_new_session=True
            )
        )
        try:
            transport, program = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # asyncio does not survive a cancellation of the start. It takes milliseconds.
            starting.add_done_callback(_discard)
            await asyncio.wait([starting])
            if starting.exception() is None:
                await starting.result()[1].end()
            raise
        stdin = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
        program._is_fed = not stdin.is_closing()  # Otherwise asyncio drops the input silently.
        stdin.write(data)
        stdin.write_eof()
        return program

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: ARG002 - only stderr is read
        """Keep the first bytes, and read on: a full pipe would stop the program."""
        self._stderr += data[: _MAX_STDERR_BYTES - len(self._stderr)]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Note the end of a pipe: of stdin with an error, if the program has not taken its whole input."""
        if fd == 0:
            _settle(self._stdin_ended, exc is None)
        else:
            _settle(self._stderr_ended, None)

    def process_exited(self) -> None:
        """Note the exit. Children of the program may still have its pipes."""
        _settle(self._exited, None)

    async def exit_code(self) -> int:
        """Wait for the exit, and then shortly for the ends of the pipes."""
        await asyncio.shield(self._exited)
        code = cast("int", self._transport.get_returncode())
        await asyncio.wait([self._stdin_ended if code == 0 else self._stderr_ended], timeout=_PIPE_SECONDS)
        return code

    @property
    def has_read_all(self) -> bool:
        """Whether the program has taken its whole input from the pipe."""
        return self._is_fed and self._stdin_ended.done() and self._stdin_ended.result()

    @property
    def complaint(self) -> str:
        """The text of stderr on one line."""
        return one_line(self._stderr.decode(errors="replace"))

    def kill(self) -> None:
        """Kill the program with its children if it runs. Its exit closes the pipes."""
        if not self._exited.done():
            # A program with the rights of another user cannot be killed.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._transport.get_pid(), signal.SIGKILL)
        self._exited.add_done_callback(lambda _: self._transport.close())

    async def end(self) -> None:
        """Kill the program if it runs, and wait shortly for its exit."""
        self.kill()
        await asyncio.wait([self._exited], timeout=_KILL_SECONDS)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _discard(starting: asyncio.Future[tuple[asyncio.SubprocessTransport, _Program]]) -> None:
    """Kill a program that was started for a cancelled send."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result()[1].kill()
