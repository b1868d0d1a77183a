"""A host that receives messages over TCP, one per connection, and a transport that sends them there.

The host can die, hang and recover under the same address. The transports of the package have no such host of their
own.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from pgoutbox.message import Message, Outcome, SendFailure, Sent, Transient
from tests.support.dialogues import HOST, listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pgoutbox.transports import Content

SCHEME = "line"


class Line(NamedTuple):
    """A content: one line of text."""

    text: str
    scheme: str = SCHEME


class Mood(enum.Enum):
    """The host's reaction to a line."""

    TAKE = "answer ok"
    REFUSE = "answer that this one must wait"
    DROP = "close the connection without an answer"
    HANG = "say nothing"


@dataclass
class LineHost:
    """The host's address, its behaviour, and the lines that it has received. `reached` is set at each new line."""

    mood: Mood = Mood.TAKE
    port: int = 0
    taken: list[str] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    _hanging: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def hung_count(self) -> int:
        """Count the clients that wait for an answer that never comes."""
        return len(self._hanging)

    @property
    def destination(self) -> str:
        """Return the URI of a message for this host."""
        return f"{SCHEME}://{HOST}:{self.port}"

    @property
    def key(self) -> str:
        """Return the key of its circuit breaker."""
        return f"{SCHEME}:{HOST}:{self.port}"

    def hang_up(self) -> None:
        """Close the connections that it has left without an answer."""
        for writer in self._hanging:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one line of one client."""
        with contextlib.suppress(ConnectionError):
            try:
                text = (await reader.readline()).decode().rstrip()
                self.attempts.append(text)
                self.reached.set()
                if self.mood is Mood.HANG:
                    self._hanging.add(writer)
                    try:
                        await reader.read()
                    finally:
                        self._hanging.discard(writer)
                elif self.mood is not Mood.DROP:
                    taken = self.mood is Mood.TAKE
                    if taken:
                        self.taken.append(text)
                    writer.write(b"ok\n" if taken else b"later\n")
                    await writer.drain()
            finally:
                writer.close()


@asynccontextmanager
async def line_host(mood: Mood = Mood.TAKE) -> AsyncIterator[LineHost]:
    """Run a host with this behaviour, which the test may change."""
    host = LineHost(mood)
    async with listening(host.serve) as host.port:
        yield host


class LineTransport:
    """Sends a `Line` to the host of the destination, and waits for its answer without a limit."""

    schemes = (SCHEME,)

    def __init__(self, *, timeout_seconds: float | None = None) -> None:
        self._timeout_seconds = timeout_seconds

    def breaker_key(self, message: Message[object], content: Content | None) -> str:
        """Use one breaker for each host."""
        return f"{SCHEME}:{urlsplit(message.destination or '').netloc}"

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Send the line."""
        assert isinstance(content, Line)
        address = urlsplit(message.destination or "")
        try:
            async with asyncio.timeout(self._timeout_seconds):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                try:
                    writer.write(content.text.encode() + b"\n")
                    answer = (await reader.readline()).decode().strip()
                finally:
                    writer.close()
        except OSError as error:  # This includes TimeoutError.
            return SendFailure(f"{type(error).__name__}: {error}", outage=True)
        if answer == "ok":
            return Sent()
        return Transient("the host says: later") if answer == "later" else SendFailure("no answer", outage=True)

    async def aclose(self) -> None:
        """Do nothing: every line has its own connection."""
