"""Server-sent events: one reader per process watches the database, and notifies all open pages of a change.

The reader runs only while a page is open. Events contain no data: browsers fetch their page again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Final

import psycopg
from psycopg.rows import TupleRow
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pgoutbox.dashboard.credentials import Viewer
from pgoutbox.database import connections, sql
from pgoutbox.observability.events import LogEvent
from pgoutbox.settings import Settings

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 1.5
_RETRY_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 5.0
_HEARTBEAT_SECONDS: Final = 15.0
# A stream ends after this time. The browser opens another, which is authenticated again.
_LIFE_SECONDS: Final = 300.0
MAX_STREAMS: Final = 100
# Over HTTP/1.1 a browser opens at most six connections to a server, and its pages need some.
_STREAMS_OF_A_BROWSER: Final = 4
_STREAMS_OF_A_NAME: Final = 25


@dataclass(slots=True, eq=False)
class Follower:
    """One open stream. `changed` is set at each change, and when a newer stream replaces it."""

    viewer: Viewer
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_replaced: bool = False

    @property
    def browser(self) -> tuple[str, str, str]:
        """The session, or the name and the address."""
        return self.viewer.name, self.viewer.csrf_token, self.viewer.origin


class ChangeFeed:
    """Counts the changes of one database, and notifies the followers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._followers: list[Follower] = []
        self._reader: asyncio.Task[None] | None = None
        self.changes = 0

    @property
    def followers(self) -> int:
        """The number of open streams."""
        return len(self._followers)

    def stream(self, viewer: Viewer) -> ASGIApp:
        """Return an event stream: `change` at each change, and a comment as heartbeat.

        Ends with `replaced` if a newer stream of the same viewer replaces it. Then the browser does not reopen it.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            with self._following(viewer) as follower:
                response = (
                    PlainTextResponse("too many open streams", status_code=503, headers={"Retry-After": "30"})
                    if follower is None
                    else StreamingResponse(
                        self._events(follower), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
                    )
                )
                await response(scope, receive, send)

        return answer

    async def _events(self, follower: Follower) -> AsyncIterator[str]:
        yield "retry: 5000\n\n"
        ends_at = time.monotonic() + _LIFE_SECONDS
        while (left_seconds := ends_at - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(_HEARTBEAT_SECONDS, left_seconds)):
                    await follower.changed.wait()
            except TimeoutError:
                yield ": heartbeat\n\n"
                continue
            follower.changed.clear()
            if follower.is_replaced:
                yield "event: replaced\ndata:\n\n"
                return
            yield f"event: change\ndata: {self.changes}\n\n"

    @contextlib.contextmanager
    def _following(self, viewer: Viewer) -> Iterator[Follower | None]:
        """Add a follower, which gets a change at once; None if there are too many streams.

        Closes the oldest streams of the same browser and the same name above their limits.
        """
        follower = Follower(viewer)
        self._make_room(
            [other for other in self._followers if other.browser == follower.browser], _STREAMS_OF_A_BROWSER
        )
        self._make_room([other for other in self._followers if other.viewer.name == viewer.name], _STREAMS_OF_A_NAME)
        if len(self._followers) >= MAX_STREAMS:
            yield None
            return
        self._followers.append(follower)
        if self._reader is None:
            self._reader = asyncio.create_task(self._watch())  # Its first poll is a change.
        else:
            follower.changed.set()  # The page may be older than the last poll.
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
            follower.changed.set()

    async def _watch(self) -> None:
        while True:
            try:
                await self._watch_connection()
            except (psycopg.Error, OSError) as error:
                logger.debug(
                    "the dashboard's reader lost the database",
                    extra={"event": LogEvent.WEB_READER_LOST, "error": type(error).__name__},
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
            last = None
            while True:
                if (pulse := await _pulse(connection)) != last:
                    last = pulse
                    self.changes += 1
                    for follower in self._followers:
                        follower.changed.set()
                await _wait_for_poll(connection, listens=listens)


async def _pulse(connection: psycopg.AsyncConnection[TupleRow]) -> TupleRow | None:
    async with connection.transaction():
        await connection.execute(sql.PREPARE_OPERATION, {"statement_timeout": "2s"})
        return await (await connection.execute(sql.PULSE)).fetchone()


async def _wait_for_poll(connection: psycopg.AsyncConnection[TupleRow], *, listens: bool) -> None:
    """Return at the next notification, or after a poll interval. Limits the poll rate under many notifications."""
    if not listens:
        await asyncio.sleep(_POLL_SECONDS)
        return
    # One packet can contain many.
    if [one async for one in connection.notifies(timeout=_POLL_SECONDS, stop_after=1)]:
        await asyncio.sleep(_POLL_SECONDS / 5)
        async for _ in connection.notifies(timeout=0):
            pass
