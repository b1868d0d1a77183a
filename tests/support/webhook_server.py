"""A real HTTP server on a real socket that records requests, and answers or misbehaves as configured.

It runs on the test's own event loop, and stops when its context ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.dialogues import HOST, listening

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence


class Misbehaviour(enum.Enum):
    """The server's action instead of an answer."""

    HANG = "read the request, say nothing"
    DROP = "read the request, close the connection"
    REFUSE = "close the connection before anything is read"
    ENDLESS = "answer 200 with a body that never ends"
    DRIP_HEAD = "answer one byte of the head at a time, and never the last one"
    DRIP_BODY = "answer 200 at once, and the body one byte at a time"


Answer = bytes | Misbehaviour


def answer(status: int, body: bytes = b"", **headers: str) -> bytes:
    """Return an answer. Header names have underscores for hyphens."""
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@dataclass(frozen=True, slots=True)
class Received:
    """One request that the server received."""

    method: str
    target: str
    headers: dict[str, str]
    header_lines: list[str]
    body: bytes


@dataclass
class WebhookServer:
    """Gives the answers in order, and repeats the last one."""

    answers: Sequence[Answer]
    host: str = HOST
    port: int = 0
    received: list[Received] = field(default_factory=list)
    connection_count: int = 0
    resumed_count: int = 0
    is_silent: asyncio.Event = field(default_factory=asyncio.Event)
    was_left: asyncio.Event = field(default_factory=asyncio.Event)
    _answered: int = 0
    _idle: set[asyncio.StreamWriter] = field(default_factory=set)

    def close_idle(self, *, reset: bool = False) -> None:
        """Close the connections that wait for a request; with `reset` by a TCP reset."""
        for writer in self._idle:
            if reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    def say_to_idle(self, data: bytes) -> None:
        """Send data on the connections that wait for a request."""
        for writer in self._idle:
            writer.write(data)

    def url(self, path: str = "/hook", *, scheme: str = "https", host: str | None = None) -> str:
        """Return a URL of this server."""
        return f"{scheme}://{host or self.host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        self.connection_count += 1
        if (tls := writer.get_extra_info("ssl_object")) is not None:
            self.resumed_count += tls.session_reused
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                if self._next() is not Misbehaviour.REFUSE:
                    while await self._serve_request(reader, writer):
                        pass
            finally:
                self.was_left.set()
                writer.transport.abort()

    def _next(self) -> Answer:
        return self.answers[min(self._answered, len(self.answers) - 1)]

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self._idle.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        finally:
            self._idle.discard(writer)
        request_line, *lines = head.rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        method, target, _ = request_line.split(" ")
        self.received.append(Received(method, target, headers, lines, body))
        given = self._next()
        self._answered += 1
        if isinstance(given, bytes):
            writer.write(given)
            await writer.drain()
            return b"Connection: close" not in given
        await self._misbehave(given, reader, writer)
        return False

    async def _misbehave(self, what: Misbehaviour, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match what:
            case Misbehaviour.HANG:
                self.is_silent.set()
                await reader.read()
            case Misbehaviour.ENDLESS:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(b"x" * 65_536)
                    await writer.drain()
            case Misbehaviour.DRIP_HEAD:
                writer.write(b"HTTP/1.1 200 OK\r\nX-Drip: ")
                await self._drip(reader, writer)
            case Misbehaviour.DRIP_BODY:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                await self._drip(reader, writer)
            case Misbehaviour.DROP | Misbehaviour.REFUSE:
                pass

    async def _drip(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send a byte each tenth of a second until the client disconnects."""
        self.is_silent.set()
        left = asyncio.create_task(reader.read())
        while not left.done():
            writer.write(b"x")
            await asyncio.wait([left], timeout=0.1)


@asynccontextmanager
async def webhook_server(
    *answers: Answer, tls: ssl.SSLContext | None = None, host: str = HOST, port: int = 0
) -> AsyncIterator[WebhookServer]:
    """Run a server that gives these answers, or 200 without any."""
    server = WebhookServer(answers or (answer(200),), host)
    async with listening(server.serve, host=host, port=port, tls=tls) as server.port:
        yield server
