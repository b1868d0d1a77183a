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
from asyncio.subprocess import Process
from io import FileIO
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
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Nothing reads stderr while the program runs: a program loses what the pipe does not hold, and never waits.
        with FileIO(reader) as complaint, FileIO(writer, "w") as stderr:
            try:
                program = await _start(command, stderr.fileno())
            except OSError as error:
                reason = f"{self._path}: {error.strerror or error}"
                return Unavailable(reason, outage=error.errno not in _NOT_EXECUTABLE)
            try:
                async with asyncio.timeout(seconds):
                    # A program expects the line ends of its system.
                    code, has_read_all = await _feed(program, rendered.content.replace(b"\r\n", b"\n"))
            except TimeoutError:
                text = f"{self._path}: did not end within {seconds:g} s, and was killed; outcome unknown"
                return SendFailure(text, outage=True, unknown=True)
            finally:
                await _end(program)
            text = one_line((complaint.read(_MAX_STDERR_BYTES) or b"").decode(errors="replace"))
        return self._outcome(code, text, has_read_all=has_read_all, doubtful=f"mailto:{','.join(rendered.recipients)}")

    def _outcome(self, code: int, complaint: str, *, has_read_all: bool, doubtful: str) -> Outcome:
        if code == 0:
            if has_read_all:
                return Sent()
            text = f"{self._path}: it ended before it had read the e-mail, with exit code 0; outcome unknown"
            return SendFailure(text, outage=True, unknown=True)
        if code < 0:
            text = f"{self._path}: ended by signal {-code}, outcome unknown"
            return SendFailure(text, outage=True, unknown=True)
        name = f" ({_NAMES[code]})" if code in _NAMES else ""
        text = f"{self._path}: exit code {code}{name}: {complaint or 'no text on stderr'}"
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


async def _start(command: Sequence[str], stderr: int) -> Process:
    """Start the program in a session of its own, so that it can be killed with its children."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *[text.encode() for text in command], stdin=PIPE, stdout=DEVNULL, stderr=stderr, start_new_session=True
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # asyncio does not survive a cancellation of the start. It takes milliseconds.
        starting.add_done_callback(_discard)
        await asyncio.wait([starting])
        if starting.exception() is None:
            await _end(starting.result())
        raise


async def _feed(program: Process, data: bytes) -> tuple[int, bool]:
    """Return the exit code, and whether the program has taken all data from the pipe."""
    stdin = cast("asyncio.StreamWriter", program.stdin)
    is_open = not stdin.is_closing()  # Otherwise asyncio drops the data silently.
    stdin.write(data)
    stdin.write_eof()
    code = await program.wait()
    with contextlib.suppress(TimeoutError, OSError):
        # A delivery in the background may keep the pipe open.
        async with asyncio.timeout(_PIPE_SECONDS):
            await stdin.wait_closed()
            return code, is_open
    return code, False


def _discard(starting: asyncio.Future[Process]) -> None:
    """Kill a program that was started for a cancelled send."""
    if not starting.cancelled() and starting.exception() is None:
        _kill(starting.result())


def _kill(program: Process) -> None:
    """Kill the program with its children if it runs."""
    if program.returncode is None:
        # A program with the rights of another user cannot be killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(program.pid, signal.SIGKILL)


async def _end(program: Process) -> None:
    """Kill the program if it runs, and wait shortly for its exit."""
    _kill(program)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILL_SECONDS):
            await program.wait()
