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
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(dialogue(reader, writer)))

    listener = await asyncio.start_server(accept, host, port, ssl=tls)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
