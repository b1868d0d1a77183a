"""A server that accepts everything at once: `smtp`, `http`, or `https CERT KEY`.

It says its port, and on SIGTERM how many e-mails or requests it has accepted.
"""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
import sys

from benchmarks.programs.lifeline import hold_lifeline, say

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ANSWERS = {
    b"EHLO": b"250-sink\r\n250-PIPELINING\r\n250-8BITMIME\r\n250 SIZE 10000000\r\n",
    b"DATA": b"354 go on\r\n",
    b"QUIT": b"221 bye\r\n",
}


class _Http(asyncio.Protocol):
    accepted_count = 0
    _received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while answer := self._answer():
            self._transport.write(answer)

    def _answer(self) -> bytes:
        """Take the next complete message and return its answer; nothing if there is none."""
        head, end, rest = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not end or length is None or len(rest) < int(length[1]):
            return b""
        self._received = rest[int(length[1]) :]
        _Http.accepted_count += 1
        return b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class _Smtp(_Http):
    _command = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport.write(b"220 sink\r\n")

    def _answer(self) -> bytes:
        is_content = self._command == b"DATA"
        line, end, rest = self._received.partition(b"\r\n.\r\n" if is_content else b"\r\n")
        if not end:
            return b""
        self._received = rest
        _Http.accepted_count += is_content
        self._command = b"" if is_content else line[:4].upper()
        return _ANSWERS.get(self._command, b"250 ok\r\n")


async def main(kind: str, *files: str) -> None:
    hold_lifeline()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if files else None
    if context is not None:
        context.load_cert_chain(*files)
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    server = await loop.create_server(_Smtp if kind == "smtp" else _Http, "127.0.0.1", 0, ssl=context)
    say(port=server.sockets[0].getsockname()[1])
    await told.wait()
    say(accepted_count=_Http.accepted_count)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
