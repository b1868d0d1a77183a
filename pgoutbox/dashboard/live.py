"""Server-sent events: one reader in the process watches the database, and tells all who look that something changed.

It reads only while somebody looks. Nobody is told what changed: browsers fetch their page again, as they may see it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psycopg
from starlette.responses import PlainTextResponse, Response

from pgoutbox.database import connections, sql
from pgoutbox.observability.events import Event

if TYPE_CHECKING:
    from psycopg.rows import TupleRow
    from starlette.types import Receive, Scope, Send

    from pgoutbox.dashboard.types import Viewer
    from pgoutbox.settings import Settings

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 1.5
_RETRY_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 5.0
_HEARTBEAT_SECONDS: Final = 15.0
# A stream ends after this time and the browser opens another, which has to show again who it is.
_LIFE_SECONDS: Final = 300.0
MAX_STREAMS: Final = 100
# A browser opens six connections to a server over HTTP/1.1: its pages need some of them.
_STREAMS_OF_A_BROWSER: Final = 4
_STREAMS_OF_A_NAME: Final = 25


@dataclass(slots=True, eq=False)
class Follower:
    """One open stream. `told` is set at each change, and when a newer stream takes its place."""

    viewer: Viewer
    told: asyncio.Event = field(default_factory=asyncio.Event)
    is_replaced: bool = False

    @property
    def browser(self) -> tuple[str, str, str]:
        """The session, or else the name and the address."""
        return self.viewer.name, self.viewer.csrf_token, self.viewer.origin


class Feed:
    """Counts the changes of one database for those who follow them."""

    def __init__(self, settings: Settings, *, most: int = MAX_STREAMS) -> None:
        self._settings = settings
        self._most = most
        self._followers: list[Follower] = []
        self._reader: asyncio.Task[None] | None = None
        self.changes = 0

    @property
    def followers(self) -> int:
        """How many streams are open."""
        return len(self._followers)

    @contextlib.contextmanager
    def following(self, viewer: Viewer) -> Iterator[Follower | None]:
        """A new follower, told of a change at first; None when there are too many streams already.

        Closes the oldest streams of the same browser and of the same name that exceed their share.
        """
        follower = Follower(viewer)
        self._make_room(
            [other for other in self._followers if other.browser == follower.browser], _STREAMS_OF_A_BROWSER
        )
        self._make_room([other for other in self._followers if other.viewer.name == viewer.name], _STREAMS_OF_A_NAME)
        if len(self._followers) >= self._most:
            yield None
            return
        self._followers.append(follower)
        if self._reader is None:
            self._reader = asyncio.create_task(self._watch())  # Its first look is a change.
        else:
            follower.told.set()  # The page may be older than the reader's last look.
        try:
            yield follower
        finally:
            if follower in self._followers:
                self._followers.remove(follower)
            if not self._followers and self._reader is not None:
                reader, self._reader = self._reader, None
                reader.cancel()

    def _make_room(self, oldest_first: list[Follower], most: int) -> None:
        for follower in oldest_first[: max(0, len(oldest_first) - most + 1)]:
            self._followers.remove(follower)
            follower.is_replaced = True
            follower.told.set()

    async def _watch(self) -> None:
        while True:
            try:
                await self._watch_connection()
            except (psycopg.Error, OSError) as error:
                logger.debug(
                    "the dashboard's reader lost the database",
                    extra={"event": Event.WEB_READER_LOST, "error": type(error).__name__},
                )
                await asyncio.sleep(_RETRY_SECONDS)

    async def _watch_connection(self) -> None:
        settings = self._settings
        listens = settings.listen and (settings.listen_dsn is not None or not settings.pooled)
        dsn = settings.require_listen_dsn() if listens else settings.require_dsn()
        connection = await connections.connect_async(
            dsn,
            purpose="web",
            connect_timeout_seconds=settings.connect_timeout_seconds,
            answer_seconds=_ANSWER_SECONDS,
        )
        async with connection:
            await connection.set_read_only(True)
            if listens:
                await connection.execute(sql.LISTEN)
            last: tuple[object, ...] | None = None
            while True:
                pulse = await _pulse(connection)
                if pulse != last:
                    last = pulse
                    self._tell()
                await _next_look(connection, listens=listens)

    def _tell(self) -> None:
        self.changes += 1
        for follower in self._followers:
            follower.told.set()


async def _pulse(connection: psycopg.AsyncConnection[TupleRow]) -> tuple[object, ...]:
    async with connection.transaction():
        await connection.execute(sql.PREPARE_OPERATION, {"statement_timeout": "2s"})
        rows = await (await connection.execute(sql.PULSE)).fetchall()
        return tuple(rows[0])


async def _next_look(connection: psycopg.AsyncConnection[TupleRow], *, listens: bool) -> None:
    """Return at the next ring, or after a while; never so soon that a flood of rings is a flood of looks."""
    if not listens:
        await asyncio.sleep(_POLL_SECONDS)
        return
    rings = 0
    async for _ in connection.notifies(timeout=_POLL_SECONDS, stop_after=1):
        rings += 1
    if rings:
        await asyncio.sleep(_POLL_SECONDS / 5)
        async for _ in connection.notifies(timeout=0):
            pass


class EventStream(Response):
    """The answer to a browser that follows: `change` at each change, a comment while there is none.

    Ends with `replaced` when newer streams of the same viewer take its place. The browser does not open it again then.
    """

    def __init__(self, feed: Feed, viewer: Viewer) -> None:
        super().__init__()
        self._feed = feed
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.following(self._viewer) as follower:
            if follower is None:
                refusal = PlainTextResponse("too many open streams", status_code=503, headers={"Retry-After": "30"})
                await refusal(scope, receive, send)
                return
            streaming = asyncio.create_task(_stream(self._feed, follower, send))
            leaving = asyncio.create_task(_until_disconnected(receive))
            try:
                await asyncio.wait((streaming, leaving), timeout=_LIFE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                is_gone = leaving.done() or (streaming.done() and not follower.is_replaced)
            finally:
                streaming.cancel()
                leaving.cancel()
                await asyncio.gather(streaming, leaving, return_exceptions=True)
            if not is_gone:
                await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _stream(feed: Feed, follower: Follower, send: Send) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await _write(send, "retry: 5000\n\n")
    while True:
        try:
            async with asyncio.timeout(_HEARTBEAT_SECONDS):
                await follower.told.wait()
        except TimeoutError:
            await _write(send, ": still here\n\n")
            continue
        follower.told.clear()
        if follower.is_replaced:
            await _write(send, "event: replaced\ndata:\n\n")
            return
        await _write(send, f"event: change\ndata: {feed.changes}\n\n")


async def _write(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
