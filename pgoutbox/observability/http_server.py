"""A small HTTP server in a thread, for probes and scrapes: it answers while the application's event loop is blocked.

It accepts only GET and HEAD without bodies, and one request for each connection. The number of connections is limited,
and each exchange has one deadline. At the limit, the connection that has waited longest for its request is closed, so
that slow clients never keep a probe out. HTTP is parsed by h11. Needs the extra `metrics`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from pgoutbox.errors import ConfigurationError, MissingExtraError

try:
    import h11
except ImportError as error:
    raise MissingExtraError("serving metrics (PGOUTBOX_METRICS_ADDRESS)", "metrics") from error

if TYPE_CHECKING:
    from pgoutbox.observability.prometheus import Page

_MAX_CONNECTIONS: Final = 32
_DEADLINE_SECONDS: Final = 10.0
_MAX_HEAD_BYTES: Final = 16_384
_CHUNK_BYTES: Final = 65_536
_TEXT: Final = "text/plain; charset=utf-8"

Answer = Callable[[str, str | None], Awaitable["Page | None"]]
"""Called with the path and the header `Accept`. None means that the page does not exist."""


class HttpServer:
    """Serves what `answer` returns, on the event loop of a thread of its own, from `start` to `stop`."""

    def __init__(self, host: str, port: int, answer: Answer) -> None:
        self._host = host
        self._wanted_port = port
        self._answer = answer
        self._sockets: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._open_count = 0
        # Connections whose request has not arrived, oldest first.
        self._waiting: dict[asyncio.StreamWriter, None] = {}
        self._thread = threading.Thread(target=self._run, name="pgoutbox-http", daemon=True)

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self._sockets[0].getsockname()[1])

    def start(self) -> None:
        """Listen, then start the thread. Raise `ConfigurationError` if the address is not available."""
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._sockets = [socket.create_server((self._host, self._wanted_port), family=family, backlog=64)]
        except OSError as error:
            raise ConfigurationError(
                f"PGOUTBOX_METRICS_ADDRESS: cannot listen on {self._host} port {self._wanted_port}: "
                f"{error.strerror or error}"
            ) from None
        self._thread.start()

    async def stop(self) -> None:
        """Close every connection and end the thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The server has ended by itself.
                self._loop.call_soon_threadsafe(self._stopped.set)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        for listening in self._sockets:
            listening.close()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._serve())

    async def _serve(self) -> None:
        servers = [
            await asyncio.start_server(self._converse, sock=listening, limit=_MAX_HEAD_BYTES)
            for listening in self._sockets
        ]
        try:
            await self._stopped.wait()
        finally:
            for server in servers:
                server.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open_count >= _MAX_CONNECTIONS and not self._make_room():
            writer.transport.abort()
            return
        self._open_count += 1
        self._waiting[writer] = None
        try:
            async with asyncio.timeout(_DEADLINE_SECONDS):
                await self._exchange(reader, writer)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, h11.ProtocolError):
            pass
        finally:
            self._open_count -= 1
            self._waiting.pop(writer, None)
            writer.transport.abort()

    def _make_room(self) -> bool:
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return False
        del self._waiting[oldest]
        oldest.transport.abort()
        return True

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        further: list[tuple[bytes, bytes]] = []
        try:
            request = await _read_request(connection, reader)
        except h11.RemoteProtocolError as error:
            status, content_type, body, has_body = error.error_status_hint, _TEXT, b"not a request\n", True
        else:
            if request is None:
                return
            self._waiting.pop(writer, None)
            has_body = request.method != b"HEAD"
            if request.method in (b"GET", b"HEAD"):
                status, content_type, body = await self._page(request)
            else:
                status, content_type, body = 405, _TEXT, b"GET or HEAD only\n"
                further.append((b"Allow", b"GET, HEAD"))
        head = h11.Response(
            status_code=status,
            headers=[
                (b"Content-Type", content_type.encode()),
                (b"Content-Length", str(len(body)).encode()),
                (b"Cache-Control", b"no-store"),
                (b"X-Content-Type-Options", b"nosniff"),
                (b"Connection", b"close"),
                *further,
            ],
        )
        writer.write(connection.send(head) or b"")
        if has_body:
            writer.write(connection.send(h11.Data(data=body)) or b"")
        await writer.drain()

    async def _page(self, request: h11.Request) -> tuple[int, str, bytes]:
        path = request.target.partition(b"?")[0].decode("ascii", "replace")
        accept = next((value.decode("latin-1") for name, value in request.headers if name == b"accept"), None)
        page = await self._answer(path, accept)
        return (404, _TEXT, b"no such page\n") if page is None else page


async def _read_request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_CHUNK_BYTES))
        elif isinstance(event, h11.Request):
            return event
        else:
            return None  # The client has disconnected.
