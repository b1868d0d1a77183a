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
from typing import TYPE_CHECKING, Final, cast

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Outcome, Permanent, SendFailure, Sent, Unavailable
from pgoutbox.text import one_line
from pgoutbox.transports.smtp.outgoing import SLOWEST_BYTES_PER_SECOND, MailTransport, OutgoingMail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.settings import Settings

_MAX_STDERR_BYTES: Final = 4_096
# Pipes end with the program, unless a delivery in the background keeps them open.
_PIPE_SECONDS: Final = 0.5
# The time for the end of a killed program.
_KILL_SECONDS: Final = 1.0
_NOT_EXECUTABLE: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.EISDIR}
)
_NAMES: Final = {getattr(os, name): name for name in dir(os) if name.startswith("EX_")}
_REFUSES_EMAIL: Final = frozenset({os.EX_DATAERR, os.EX_NOUSER, os.EX_NOHOST})
# The last two are a shell's answer to a program that it cannot run.
_NEEDS_REPAIR: Final = frozenset({os.EX_USAGE, os.EX_UNAVAILABLE, os.EX_NOPERM, os.EX_CONFIG, 126, 127})


class SendmailTransport(MailTransport):
    """Sends `Email` and `RawEmail` by the program that `sendmail` names.

    At most `smtp.connections` programs run at once. The sender and the timeout are those of the SMTP settings. A
    program that does not end in time is killed, and the outcome is unknown. A program that is missing, or whose
    configuration is at fault, is `Unavailable`.

    Raises `ConfigurationError` when a setting is missing or unusable.
    """

    _name = "sendmail"

    def __init__(self, settings: Settings) -> None:
        if settings.sendmail is None:
            raise ConfigurationError("no sendmail program given: set PGOUTBOX_SENDMAIL")
        super().__init__(settings)
        self._path = settings.sendmail
        self._breaker_key = f"sendmail:{self._path}"

    async def check(self) -> Outcome:
        """Check that the program exists and may be executed; start nothing."""
        return _check_program(Path(self._path))

    async def aclose(self) -> None:
        """Do nothing: a program ends with its e-mail."""

    async def _hand_over(self, mail: OutgoingMail) -> Outcome:
        rendered = await mail.pass_gate()
        for address in (rendered.sender, *rendered.recipients):
            # Not every program knows `--`.
            if address.startswith("-"):
                return Permanent(f"address {address}: begins with -, which a program may take for an option")
        seconds = self._smtp.timeout_seconds + len(rendered.content) // SLOWEST_BYTES_PER_SECOND
        command = (self._path, "-i", "-f", rendered.sender or "<>", "--", *rendered.recipients)
        try:
            # A program expects the line ends of its system.
            program = await _Program.start(command, rendered.content.replace(b"\r\n", b"\n"))
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
        return self._outcome(code, program, doubtful=f"mailto:{','.join(rendered.recipients)}")

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
    """A running program. It gets its input while its output is read, so neither can block the other.

    `Process.wait` of some versions of Python also waits for the pipes, which a child may keep open.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = loop.create_future()
        self._stderr_ended: asyncio.Future[None] = loop.create_future()
        self._stdin_ended: asyncio.Future[bool] = loop.create_future()
        self._is_fed = False
        self._stderr = b""
        self._transport: asyncio.SubprocessTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport of the new program."""
        self._transport = cast("asyncio.SubprocessTransport", transport)

    @classmethod
    async def start(cls, command: Sequence[str], data: bytes) -> _Program:
        """Start the program in a session of its own, so that it can be killed with its children."""
        starting = asyncio.ensure_future(
            asyncio.get_running_loop().subprocess_exec(
                cls,
                *[text.encode() for text in command],
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=PIPE,
                start_new_session=True,
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
        program._is_fed = not stdin.is_closing()  # Otherwise asyncio drops the data silently.
        stdin.write(data)
        stdin.write_eof()
        return program

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: ARG002 - only stderr is read
        """Keep the first bytes, and read on: a full pipe would stop the program."""
        self._stderr += data[: _MAX_STDERR_BYTES - len(self._stderr)]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Note the end of a pipe: of stdin with an error, if the program has not taken all data."""
        if fd == 0:
            self._stdin_ended.set_result(exc is None)
        else:
            self._stderr_ended.set_result(None)

    def process_exited(self) -> None:
        """Note the exit. Children of the program may still have its pipes."""
        self._exited.set_result(None)

    async def exit_code(self) -> int:
        """Wait for the exit, and then shortly for the end of the pipe that the outcome needs."""
        await asyncio.wait([self._exited])
        code = cast("int", self._transport.get_returncode())
        await asyncio.wait([self._stdin_ended if code == 0 else self._stderr_ended], timeout=_PIPE_SECONDS)
        return code

    @property
    def has_read_all(self) -> bool:
        """Whether the program has taken all data from the pipe."""
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


def _discard(starting: asyncio.Future[tuple[asyncio.SubprocessTransport, _Program]]) -> None:
    """Kill a program that was started for a cancelled send."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result()[1].kill()
