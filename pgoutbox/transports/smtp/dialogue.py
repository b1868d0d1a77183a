"""The dialogue with an SMTP server after the sign-in: several commands in one write, and their replies in order.

aiosmtplib connects and signs in, but keeps only one reply to a write. So the dialogue takes over its connection.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import aiosmtplib

if TYPE_CHECKING:
    from collections.abc import Collection

_MAX_UNREAD_BYTES = 1 << 20  # A thousand recipients may be refused at once.


class Dialogue(asyncio.Protocol):
    """The two sides of one connection. Raises the errors of aiosmtplib. `seconds` is the usual timeout of a reply.

    `outstanding_count` is the number of commands that were sent ahead and whose replies are still to be read.
    """

    def __init__(self, transport: asyncio.BaseTransport | None, *, seconds: float) -> None:
        if transport is None or transport.is_closing():
            raise aiosmtplib.SMTPServerDisconnected("Connection lost")
        self._transport = cast("asyncio.Transport", transport)
        self._seconds = seconds
        self._received = bytearray()
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.outstanding_count = 0
        transport.set_protocol(self)

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, and the server has sent nothing since the last reply."""
        return not (self._received or self._is_over)

    def send_ahead(self, commands: Collection[bytes]) -> None:
        """Send commands in one write. Then call `ask` for each of them, in this order."""
        self._transport.write(b"".join(commands))
        self.outstanding_count = len(commands)

    async def ask(self, command: bytes, *expected: int, seconds: float | None = None) -> None:
        """Send a command or the content, unless it was sent ahead. Raise an error for any other code of the reply."""
        if not self.outstanding_count:
            if self._received:  # It would count as the reply to the content.
                raise aiosmtplib.SMTPResponseException(-1, "a reply too many")
            self._transport.write(command)
        code, text = await self.reply(seconds)
        if code not in expected:
            raise aiosmtplib.SMTPResponseException(code, text)

    async def reply(self, seconds: float | None = None) -> tuple[int, str]:
        """Return the code and the text of the next reply, which must be complete within this time."""
        self.outstanding_count = max(0, self.outstanding_count - 1)
        until = self._loop.time() + (self._seconds if seconds is None else seconds)
        lines: list[bytes] = []
        begin = 0
        while not lines or lines[-1][3:4] == b"-":
            while not (end := self._received.find(b"\n", begin) + 1):
                await self._wait(until)
            lines.append(bytes(self._received[begin:end]))
            begin = end
        del self._received[:begin]
        text = b"".join(line[4:] for line in lines).decode(errors="replace")
        if not all(line[:3].isdigit() for line in lines):
            raise aiosmtplib.SMTPResponseException(-1, f"not a reply: {text}")
        return int(lines[-1][:3]), text

    async def _wait(self, until: float) -> None:
        if self._is_over:
            raise aiosmtplib.SMTPServerDisconnected("Connection lost")
        self._waiter = self._loop.create_future()
        try:
            async with asyncio.timeout_at(until):
                await self._waiter
        except TimeoutError:
            raise aiosmtplib.SMTPReadTimeoutError("no reply") from None

    def data_received(self, data: bytes) -> None:
        """Keep the data until `reply` reads it."""
        self._received += data
        if len(self._received) > _MAX_UNREAD_BYTES:
            self._transport.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason is not used
        """Note that the connection is gone."""
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
