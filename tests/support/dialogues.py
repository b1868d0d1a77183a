"""A local port on which a test server runs each client's dialogue in a task of the test's own event loop."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Coroutine

    Dialogue = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[object, object, None]]

HOST = "127.0.0.1"


@asynccontextmanager
async def listening(
    dialogue: Dialogue, *, host: str = HOST, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve the port, and cancel open dialogues at the end."""
    writers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers[asyncio.create_task(dialogue(reader, writer))] = writer

    listener = await asyncio.start_server(accept, host, port, ssl=tls)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        # A server that is closed leaks connections that it has just accepted. So accept no more, and close it after the
        # three turns of the loop between an accept and the call of `accept` above.
        for socket in listener.sockets:
            asyncio.get_running_loop().remove_reader(socket.fileno())
        for _ in range(3):
            await asyncio.sleep(0)
        listener.close()
        for task in writers:
            task.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
        for writer in writers.values():
            writer.transport.abort()  # A task that was cancelled before its first step has not closed its connection.
