"""The doorbell: a commit wakes an idle worker, and producers do not notify while no worker is idle.

One idle worker of each queue is on watch, and only this one listens on the channel of producers. While its session has
the wake-up lock, every enqueue notifies. The other idle workers rely on the watch, which tells them on a channel of
their own when it ends. They ask for it now and then, because a worker that dies tells nobody.

One connection listens and has the locks (session-level advisory locks), so that all of them end together. Nothing else
runs on it, and its socket is always read, so that it never keeps the server's notification queue from shrinking. The
doorbell only saves time: a worker without a listener polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import psycopg

from pgoutbox.kernel import statements as sql
from pgoutbox.kernel.seams import Rest, Row, Step

_CHANNEL: Final = "pgoutbox"
_IDLE_CHANNEL: Final = "pgoutbox_idle"
_ALL: Final = "all"  # The prefix of acts that make messages claimable.
_POLL_SECONDS: Final = 1.0
# So long may messages wait for a watch that is frozen or dead. Idle workers look at different times.
_LOOK_SECONDS: Final = (3.0, 5.0)
# While producers have the wake-up lock it polls, with pauses that grow from the first to the second.
_FIRST_PAUSE_SECONDS: Final = 0.001
_PRODUCERS_SECONDS: Final = 0.1
_RECONNECT_SECONDS: Final = (0.1, 5.0)
_NEARLY_FULL: Final = 0.5  # Of the notification queue. Statements that notify other workers have the same bound.
# The standings of hold.sql.
_RELIES, _HOLDS, _PRODUCERS, _WATCH = "relies", "holds", "producers", "watch"

Connection = psycopg.AsyncConnection[Any]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the doorbell needs from the rest of a worker."""

    connect: Callable[[], Awaitable[Connection | None]]
    """Open a connection that keeps its session, and breaks if the server does not answer in time.

    None if there is a pooler that does not.
    """
    may_pass: Callable[[psycopg.Error | OSError], Awaitable[bool]]
    """Whether a later attempt to connect may succeed."""
    want: Callable[[str | None], None]
    """Claim from this queue, or from all."""
    wake: Callable[[], None]
    """Call `hold` again, if the worker is idle."""
    report: Callable[..., None]
    """Log an event by its name: `lost`, `back`, `filling` or `drained`."""
    heartbeat_seconds: float


class Doorbell:
    """Listens, and has the locks of an idle worker. Workers with the same `topics`, which may change, share a watch."""

    def __init__(self, queues: Sequence[str], topics: Sequence[str], around: Surroundings) -> None:
        self._queues = queues
        self._topics = topics
        self._around = around
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()  # Held from question to answer, so that the standings are those of the session.
        self._standings: dict[str, str] = {}
        self._topics_asked: tuple[str, ...] = ()
        self._listens = False
        self._pause = _FIRST_PAUSE_SECONDS
        self._lost = asyncio.Event()
        self._has_no_session = False
        self._is_nearly_full = False
        self._answered_at = 0.0
        self._watched_fd: int | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool | None:
        """Whether the listener is connected; None behind a pooler that keeps no session, where the worker polls."""
        return None if self._has_no_session else self._connection is not None and not self._lost.is_set()

    async def start(self) -> None:
        """Connect and listen before the first claim. From then on it reconnects by itself."""
        try:
            await self._open()
        except (psycopg.Error, OSError) as error:
            if not await self._around.may_pass(error):
                raise
            self._lose(error)
        if not self._has_no_session:
            self._task = asyncio.create_task(self._keep_alive(), name="pgoutbox-doorbell")

    async def stop(self) -> None:
        """Leave the watch to other idle workers, and close the connection. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.release()
        async with self._turn:
            await self._close()

    # --- the locks

    async def hold(self, also: Callable[[], Step]) -> tuple[Rest, list[Row] | None]:
        """See `Bell`."""
        if self.is_up is False:
            return Rest(_POLL_SECONDS), None  # A connection attempt has the turn, and may take long.
        async with self._turn:
            if self._topics_asked != (topics := tuple(self._topics)):
                await self._release()  # The former watch does not cover these topics.
                self._topics_asked = topics
            if not self.is_up or self._is_nearly_full:
                await self._release()
                return Rest(_POLL_SECONDS), None
            asked = [queue for queue in self._queues if self._standings.get(queue) != _HOLDS]
            if not asked:
                return Rest(), None
            keys = [_key_of_watch(queue, topics) for queue in asked]
            answers = await self._ask((sql.HOLD, {"queues": asked, "watch_keys": keys}), also())
            if answers is None:
                return Rest(_POLL_SECONDS), None
            rows, others = answers
            rest = self._note(rows)
            # After the locks, so that only a watch listens. A message that notified in between is found by the claim
            # that `_note` asks for with new locks.
            if self._listens != (listens := any(standing != _RELIES for standing in self._standings.values())):
                self._listens = listens
                await self._ask(("LISTEN pgoutbox" if listens else "UNLISTEN pgoutbox", {}))
        self._check_usage(rows[0][3])
        return rest, others

    def _note(self, rows: Sequence[Row]) -> Rest:
        """Note the standings, and return how long the worker may sleep with them."""
        before = dict(self._standings)
        self._standings.update((queue, standing) for queue, standing, _, _ in rows)
        if any(standing in (_HOLDS, _WATCH) and before.get(queue) != standing for queue, standing, _, _ in rows):
            return Rest(0.0)
        standings = self._standings.values()
        looks = random.uniform(*_LOOK_SECONDS) if _RELIES in standings or _WATCH in standings else math.inf
        if _PRODUCERS in standings:
            self._pause = min(2 * self._pause, _PRODUCERS_SECONDS)
            return Rest(self._pause, looks)
        self._pause = _FIRST_PAUSE_SECONDS
        return Rest(min((permit for _, _, permit, _ in rows if permit is not None), default=math.inf), looks)

    async def release(self) -> None:
        """See `Bell`."""
        if self.is_up is False:
            return  # The locks have ended with the connection.
        async with self._turn:
            await self._release()

    async def hush(self) -> None:
        """See `Bell`."""
        if _HOLDS not in self._standings.values() or self.is_up is False:
            return
        async with self._turn:
            queues = [queue for queue, standing in self._standings.items() if standing == _HOLDS]
            self._standings.update(dict.fromkeys(queues, _PRODUCERS))
            await self._ask((sql.HUSH, {"queues": queues}))

    async def _release(self) -> None:
        # With a limited queue, the session may have the watch from an earlier answer.
        queues = [queue for queue, standing in self._standings.items() if standing != _RELIES]
        self._standings.clear()
        if queues:
            await self._ask((sql.LET_GO, {"queues": queues}))

    def _check_usage(self, usage: float) -> None:
        """Poll without locks while the notification queue is nearly full: when it is full, a notifying COMMIT fails.

        The reason is a listening session that stays in a transaction. All databases share this queue.
        """
        if (usage >= _NEARLY_FULL) != self._is_nearly_full:
            self._is_nearly_full = not self._is_nearly_full
            self._around.report("filling" if self._is_nearly_full else "drained", usage=round(usage, 3))
            self._around.want(None)

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[Connection | None]:
        """Lend the connection to the other statements of a worker that has no connection for them; None if it is lost.

        A statement that enqueues notifies nobody, because its session has the wake-up lock itself. The worker finds the
        message when it asks for the next due time, as after each trip.
        """
        async with self._turn:
            connection = self._connection
            if connection is None or self._lost.is_set():
                yield None
                return
            self._stop_reading()
            try:
                yield connection
            finally:
                if connection.closed:
                    self._lose(ConnectionError("closed"))
                elif not self._lost.is_set():
                    self._start_reading(connection)
            self._answered_at = time.monotonic()

    # --- notifications

    def _receive(self, connection: Connection, sender: int, channel: str, message: str) -> None:
        """Producers send the queue. A prefix says that something else has become claimable, or that a watch polls.

        Without a queue, it has become claimable in all queues.
        """
        if sender == connection.pgconn.backend_pid:
            return
        prefix, _, queue = message.rpartition(" ")
        standing = self._standings.get(queue)
        if channel == _IDLE_CHANNEL and prefix != _ALL:
            # A watch has ended, or polls, which concerns only those that rely on its wake-up lock. While it asks, the
            # answer may already be an older one.
            if self._turn.locked() or standing == _WATCH or (standing == _RELIES and not prefix):
                self._around.wake()
        elif prefix or standing != _RELIES:
            self._around.want(queue or None)

    def _read(self, connection: Connection) -> None:
        try:
            connection.pgconn.consume_input()
            while (notify := connection.pgconn.notifies()) is not None:
                self._receive(
                    connection, notify.be_pid, notify.relname.decode(), notify.extra.decode("utf-8", "replace")
                )
        except psycopg.Error as error:
            self._lose(error)

    def _start_reading(self, connection: Connection) -> None:
        self._watched_fd = connection.fileno()
        asyncio.get_running_loop().add_reader(self._watched_fd, self._read, connection)
        # Notifications after the last answer are already in libpq's buffer, and the socket does not signal them.
        self._read(connection)

    def _stop_reading(self) -> None:
        if self._watched_fd is not None:
            asyncio.get_running_loop().remove_reader(self._watched_fd)
            self._watched_fd = None

    # --- the connection

    async def _ask(self, *steps: Step) -> list[list[Row]] | None:
        """Return the rows of each statement, or None without an answer: then the listener is lost."""
        connection = self._connection
        if connection is None or self._lost.is_set():
            return None
        self._stop_reading()  # A statement reads the socket itself, and event loops allow one reader for each socket.
        try:
            async with connection.pipeline():
                cursors = [await connection.execute(*step) for step in steps]
            rows = [await one.fetchall() if one.description is not None else [] for one in cursors]
        except psycopg.errors.ProgramLimitExceeded:
            return None  # The server has no room for notifications. The session keeps its locks as they are.
        except (psycopg.Error, OSError) as error:
            self._lose(error)
            return None
        finally:
            if not self._lost.is_set():
                self._start_reading(connection)
        self._answered_at = time.monotonic()
        return rows

    async def _open(self) -> None:
        connection = await self._around.connect()
        if connection is None:
            self._has_no_session = True
            return
        connection.add_notify_handler(
            lambda notify: self._receive(connection, notify.pid, notify.channel, notify.payload)
        )
        try:
            await connection.execute("LISTEN pgoutbox_idle", prepare=False)
        except BaseException:
            await connection.close()
            raise
        self._lost.clear()
        self._connection = connection
        self._answered_at = time.monotonic()
        self._start_reading(connection)

    async def _close(self) -> None:
        self._stop_reading()
        connection, self._connection = self._connection, None
        self._listens = False
        self._standings.clear()
        if connection is not None:
            with contextlib.suppress(psycopg.Error, OSError):
                if not connection.closed:
                    # The session of a pooler stays, and a server logs an error when it notifies a closed one.
                    await connection.execute("UNLISTEN *", prepare=False)
                await connection.close()

    def _lose(self, error: BaseException) -> None:
        self._stop_reading()
        if not self._lost.is_set():
            self._lost.set()
            self._around.report("lost", reason=type(error).__name__)
        self._around.want(None)

    async def _keep_alive(self) -> None:
        """Check the connection when it has been silent for long, and replace it when it is lost."""
        while not self._has_no_session:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._answered_at + self._around.heartbeat_seconds - time.monotonic()):
                    await self._lost.wait()
            if not self._lost.is_set():
                await self._heartbeat()
            if self._lost.is_set():
                await self._reconnect()

    async def _heartbeat(self) -> None:
        # Keepalives do not detect a stalled middlebox, and a pooler may have taken the LISTEN away.
        async with self._turn:
            answers = await self._ask((sql.HEARTBEAT, {}))
            wanted = {_IDLE_CHANNEL, _CHANNEL} if self._listens else {_IDLE_CHANNEL}
        for channels, usage in answers[0] if answers else ():
            if wanted.issubset(channels):
                self._check_usage(usage)
            else:
                self._lose(ConnectionError("the session no longer listens"))

    async def _reconnect(self) -> None:
        pause, longest = _RECONNECT_SECONDS
        while self.is_up is False:
            try:
                async with self._turn:
                    await self._close()
                    await self._open()
            except (psycopg.Error, OSError):
                await asyncio.sleep(pause * random.uniform(0.5, 1))
                pause = min(2 * pause, longest)
        if not self._has_no_session:
            self._around.report("back")
        self._around.want(None)  # No worker was notified of messages committed in between.


def _key_of_watch(queue: str, topics: Sequence[str]) -> int:
    """Return the key of a queue's watch. Workers of other topics have a watch of their own."""
    text = " ".join(["watch", queue, *sorted(topics)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
