"""A relay between a worker and its server, which counts what passes: it knows only PostgreSQL's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

_EXECUTE, _QUERY, _READY, _IDLE, _NOTIFICATION = b"EQZIA"
_PIECE = 1 << 16

T = TypeVar("T")


class Relay:
    """Counts statements, answered round trips, ended transactions, notifications, and bytes in both directions."""

    def __init__(self, server: str) -> None:
        self.counts: Counter[str] = Counter()
        self._server = server
        self._connections: set[asyncio.Task[object]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until either side closes it."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        server_reader, server_writer = await asyncio.open_unix_connection(self._server)
        pipes = [
            asyncio.ensure_future(self._to_server(reader, server_writer)),
            asyncio.ensure_future(self._to_client(server_reader, writer)),
        ]
        try:
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)
            server_writer.close()
            writer.close()
            self._connections.discard(task)

    async def close(self) -> None:
        """End the connections that are left."""
        for task in (tasks := list(self._connections)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _to_server(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The first message of a connection has no type; requests for encryption do not pass a Unix socket."""
        rest = b""
        is_started = False
        while piece := await reader.read(_PIECE):
            rest += piece
            if not is_started and len(rest) >= 4:
                (length,) = struct.unpack("!i", rest[:4])
                rest = rest[length:]
                is_started = True
            messages, rest = _split(rest)
            self.counts["statements"] += sum(kind in (_EXECUTE, _QUERY) for kind, _ in messages)
            self.counts["bytes to the server"] += len(piece)
            writer.write(piece)
            await writer.drain()

    async def _to_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest = b""
        while piece := await reader.read(_PIECE):
            rest += piece
            messages, rest = _split(rest)
            states = [first for kind, first in messages if kind == _READY]
            self.counts["round trips"] += len(states)
            self.counts["transactions"] += states.count(_IDLE)
            self.counts["notifications"] += sum(kind == _NOTIFICATION for kind, _ in messages)
            self.counts["bytes to the client"] += len(piece)
            writer.write(piece)
            await writer.drain()


def _split(data: bytes) -> tuple[list[tuple[int, int]], bytes]:
    """Return the type and the first byte of each complete message, and the data behind them."""
    found = []
    place = 0
    while len(data) >= place + 5:
        (length,) = struct.unpack_from("!i", data, place + 1)
        if len(data) < place + 1 + length:
            break
        found.append((data[place], data[place + 5] if length > 4 else 0))
        place += 1 + length
    return found, data[place:]


@contextlib.contextmanager
def relay_to(server_directory: Path, directory: Path, *, port: int = 5432) -> Iterator[Relay]:
    """Relay the socket of a server to one with the same name in `directory`."""
    relay = Relay(str(server_directory / f".s.PGSQL.{port}"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    server = run(asyncio.start_unix_server(relay.serve, str(directory / f".s.PGSQL.{port}")))
    try:
        yield relay
    finally:
        server.close()
        run(relay.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
