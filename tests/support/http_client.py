"""Raw HTTP requests of probes, scrapers and faulty clients, on a plain socket that corrects nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from tests.support.outbox_actions import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: Mapping[str, str]
    body: str


async def exchange(port: int, request: bytes) -> bytes:
    """Send these bytes and read until the server closes."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def ask(port: int, path: str, *, method: str = "GET", accept: str = "*/*") -> Answer:
    """Send one request and return its response."""
    raw = await exchange(port, f"{method} {path} HTTP/1.1\r\nHost: worker\r\nAccept: {accept}\r\n\r\n".encode())
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(status.split()[1]), headers, body.decode())
