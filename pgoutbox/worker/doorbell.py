"""The doorbell: a commit wakes an idle worker, and producers do not notify while no worker is idle.

One worker of a queue is on watch: a notification wakes only this worker. It holds the wake-up lock, so that producers
notify, or polls at high rates, so that they need not. The other idle workers rely on the watch until it notifies them
of its end. They poll a little later than the watch, in case it does not answer.

One connection listens and holds the locks (session-level advisory locks), so that all of them end together. Nothing
else runs on it, and its socket is always read, so that it never keeps the server's notification queue from shrinking.
The doorbell only saves time: a worker without a listener polls periodically.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import LiteralString

import psycopg
from psycopg.rows import TupleRow

from pgoutbox.database import sql
from pgoutbox.database.connections import deadline
from pgoutbox.database.worker_connection import connect, is_unreachable, keeps_session, prepare_session
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.settings import Settings
from pgoutbox.worker.backoff import Backoff
from pgoutbox.worker.signals import Signals

CHANNEL = "pgoutbox"
# A worker that is not on watch polls at a random time after a notification, because the watch, which answers at once,
# may be frozen.
_LOOK_SECONDS = (0.25, 1.0)
# The share of the server's notification queue from which workers poll. The workers' statements notify up to this share.
_NEARLY_FULL = 0.5


class LockAnswer(enum.Enum):
    """The result of acquiring the wake-up locks of some queues, worst case first."""

    PRODUCERS = "producers"  # Enqueuing transactions are open: poll again after they have committed.
    ACQUIRED = "acquired"  # Every later commit wakes this worker or the one on watch: poll once more.
    UNCHANGED = "unchanged"  # As before the last claim.
    NO_LISTENER = "no listener"  # Only the periodic poll finds messages.


class Doorbell:
    """Listens, and holds the locks of an idle worker.

    It signals notifications, and a look that is due: when the watch has had time to answer, or polls. Workers with the
    same `topics`, which may change, share a watch.
    """

    def __init__(self, settings: Settings, topics: Sequence[str], signals: Signals, telemetry: Telemetry) -> None:
        self._dsn = settings.require_listen_dsn()
        self._settings = settings
        self._topics = topics
        self._signals = signals
        self._telemetry = telemetry
        self._connection: psycopg.AsyncConnection[TupleRow] | None = None
        self._statement = asyncio.Lock()
        # Held from question to answer: a lock that is acquired twice must be released twice.
        self._locking = asyncio.Lock()
        self._on_watch: set[str] = set()
        self._wake_up_locks: set[str] = set()
        self._relied_on: set[str] = set()  # Another session has their wake-up lock, until it notifies otherwise.
        self._asking: set[str] = set()
        self._news: set[str] = set()  # Another session has released a lock while this one asked for it.
        self._topics_on_watch: tuple[str, ...] = ()
        # Relied-on queues with a notification that the watch may not have answered, and those to look at now.
        self._unanswered: set[str] = set()
        self._looking: set[str] = set()
        self._look_timer: asyncio.TimerHandle | None = None
        self._permit_seconds: dict[str, float] = {}  # Of queues at their limit, at the time of the question.
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._watched_fd: int | None = None
        self._is_pooled = False
        self._has_no_session = False
        self._is_nearly_full = False

    @property
    def is_up(self) -> bool | None:
        """Whether the listener is connected; None behind a pooler that keeps no session, where the worker polls."""
        return None if self._has_no_session else self._connection is not None and not self._lost.is_set()

    @property
    def is_reliable(self) -> bool:
        """Whether every commit notifies: the listener is connected, and the notification queue has room."""
        return bool(self.is_up) and not self._is_nearly_full

    @property
    def has_wake_up_lock(self) -> bool:
        """Whether producers notify this worker for one of its queues."""
        return bool(self._wake_up_locks)

    @property
    def is_on_watch(self) -> bool:
        """Whether other workers rely on this one as their watch, for one of its queues."""
        return bool(self._on_watch)

    @property
    def max_sleep_seconds(self) -> float:
        """The seconds from the caller's question for the locks to the next permit of a queue at its limit."""
        return min(self._permit_seconds.values(), default=math.inf)

    async def start(self) -> None:
        """Connect and listen before the first claim. From then on it reconnects automatically.

        If the server has no free connection now, it may have one later; until then the worker polls periodically.
        """
        try:
            await self._connect()
        except (psycopg.Error, OSError) as error:
            if not await is_unreachable(error, self._dsn, self._settings):
                raise
            self._lose(error)
        if not self._has_no_session:
            self._task = asyncio.create_task(self._keep_alive(), name="pgoutbox-doorbell")

    async def stop(self) -> None:
        """Release the locks, so that other idle workers acquire them, and close the connection. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self.is_up:
            await self.release()
        if self.is_up:
            await self._ask(sql.UNLISTEN, {})  # A notification for a closed connection is an error in the server's log.
        await self._disconnect()

    async def acquire(self, queues: Sequence[str]) -> LockAnswer:
        """Ask for the locks of these queues. After `ACQUIRED` the caller must claim once more before it sleeps."""
        async with self._locking:
            if self._connection is None or self._is_nearly_full:
                return LockAnswer.NO_LISTENER
            if self._topics_on_watch != (topics := tuple(self._topics)):
                await self._release()  # The previous watch does not cover these topics.
                self._topics_on_watch = topics
            unasked = [queue for queue in queues if queue not in self._wake_up_locks and queue not in self._relied_on]
            if not unasked:
                return LockAnswer.UNCHANGED
            answers = await self._ask_for(unasked)
            if answers is None:
                return LockAnswer.NO_LISTENER
            has_producers = any(lock == "free" and queue in self._on_watch for queue, lock in answers.items())
            return LockAnswer.PRODUCERS if has_producers else LockAnswer.ACQUIRED

    async def announce_look(self) -> None:
        """Spare the other idle workers their look, if one is due here: the caller polls afterwards."""
        if self._looking:
            queues, self._looking = sorted(self._looking), set()
            await self._ask(sql.NOTIFY_LOOK, self._watches(queues))

    async def release_wake_up_locks(self) -> None:
        """Release the wake-up locks and stay on watch: the worker polls, and producers need not notify."""
        async with self._locking:
            if self._wake_up_locks:
                queues, self._wake_up_locks = sorted(self._wake_up_locks), set()
                await self._ask(sql.RELEASE_WAKE_UP_LOCKS, {"queues": queues})

    async def release(self) -> None:
        """Release all locks and stop relying on a watch: the worker is busy. Another idle worker takes over."""
        async with self._locking:
            await self._release()

    async def _release(self) -> None:
        queues = sorted(self._on_watch)
        self._forget_locks()
        if queues:
            await self._ask(sql.RELEASE_LOCKS, {"queues": queues})

    def _forget_locks(self) -> None:
        for queues in (self._on_watch, self._wake_up_locks, self._relied_on, self._unanswered, self._looking):
            queues.clear()
        self._cancel_needless_timer()

    def _watches(self, queues: Sequence[str]) -> dict[str, object]:
        keys = [key_of_watch(queue, self._topics_on_watch) for queue in queues]
        return {"queues": queues, "watch_keys": keys}

    async def _ask_for(self, queues: Sequence[str]) -> dict[str, str | None] | None:
        """Ask for the locks of these queues. Return the holders of their wake-up locks, or None without a listener."""
        self._asking, self._news = set(queues), set()
        rows = await self._ask(sql.ACQUIRE_LOCKS, self._watches(queues))
        self._asking = set()
        if rows is None:
            return None
        for queue, is_on_watch, wake_up_lock, permit_seconds in rows:
            self._permit_seconds.pop(queue, None)
            if permit_seconds is not None:
                self._permit_seconds[queue] = permit_seconds
            self._record(queue, is_on_watch=is_on_watch, wake_up_lock=wake_up_lock)
        return {queue: wake_up_lock for queue, _, wake_up_lock, _ in rows}

    def _record(self, queue: str, *, is_on_watch: bool | None, wake_up_lock: str | None) -> None:
        has_news = queue in self._news
        if is_on_watch is not None:  # In a queue at its limit the session keeps its locks.
            _put(self._on_watch, queue, is_in=is_on_watch)
            _put(self._wake_up_locks, queue, is_in=wake_up_lock == "own")
        _put(self._relied_on, queue, is_in=wake_up_lock == "other" and not has_news)
        if is_on_watch is False and wake_up_lock == "free":
            self._look_later(queue)  # The watch polls.
        if has_news:
            self._signals.note_notification(queue)  # The notification may be later than the answer: ask again.

    async def _recheck(self) -> None:
        """Request the locks of other sessions again: a lock that ends with its session sends no notification."""
        async with self._locking:
            answers = await self._ask_for(sorted(self._relied_on)) if self._relied_on else None
        for queue, wake_up_lock in (answers or {}).items():
            if wake_up_lock != "other":
                self._signals.note_notification(queue)  # No worker was notified of messages committed since then.

    async def _ask(self, statement: LiteralString, parameters: dict[str, object]) -> list[TupleRow] | None:
        """Return the rows, or None if the listener did not answer in time and was therefore closed."""
        async with self._statement:
            connection = self._connection
            if connection is None:
                return None
            try:
                with (
                    self._reading_suspended(connection),
                    deadline(connection, self._settings.listener_heartbeat_timeout_seconds),
                ):
                    cursor = await connection.execute(statement, parameters)
                    return await cursor.fetchall() if cursor.description is not None else []
            except psycopg.errors.ProgramLimitExceeded:
                return []  # The server has no room for notifications. The session keeps its locks as they are.
            except (psycopg.Error, OSError) as error:
                self._lose(error)
                return None

    @contextlib.contextmanager
    def _reading_suspended(self, connection: psycopg.AsyncConnection[TupleRow]) -> Iterator[None]:
        # A statement reads the socket itself, and event loops allow one reader for each socket.
        self._stop_reading()
        try:
            yield
        finally:
            if not connection.closed and connection is self._connection:
                self._start_reading(connection)

    def _start_reading(self, connection: psycopg.AsyncConnection[TupleRow]) -> None:
        self._watched_fd = connection.fileno()
        asyncio.get_running_loop().add_reader(self._watched_fd, self._read, connection)
        # Notifications after the last answer are already in libpq's buffer, and the socket does not signal them.
        self._read(connection)

    def _stop_reading(self) -> None:
        if self._watched_fd is not None:
            asyncio.get_running_loop().remove_reader(self._watched_fd)
            self._watched_fd = None

    def _read(self, connection: psycopg.AsyncConnection[TupleRow]) -> None:
        try:
            connection.pgconn.consume_input()
            while (notify := connection.pgconn.notifies()) is not None:
                self._receive(connection, notify.be_pid, notify.extra.decode("utf-8", "replace"))
        except psycopg.Error as error:
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        self._stop_reading()
        if not self._lost.is_set():
            self._telemetry.report(
                logging.WARNING,
                LogEvent.LISTENER_LOST,
                "listener lost, polling periodically",
                reason=type(error).__name__,
            )
        self._lost.set()
        self._signals.note_notification(None)

    def _receive(self, connection: psycopg.AsyncConnection[TupleRow], sender: int, message: str) -> None:
        """Read a notification: producers send the queue, for its watch; workers and operators send a prefix too."""
        if sender == connection.pgconn.backend_pid:
            return  # This session's own notifications are for the others.
        kind, _, queue = message.rpartition(" ")
        if kind.startswith("look "):
            if queue in self._unanswered and kind == f"look {key_of_watch(queue, self._topics_on_watch)}":
                self._unanswered.discard(queue)
                self._cancel_needless_timer()
                if queue not in self._relied_on:
                    self._look_later(queue)  # The watch polls, so later messages send no notification.
            return
        is_for_all = kind == "all"
        if kind and queue in self._asking:
            self._news.add(queue)
        if is_for_all or queue in self._on_watch:
            self._signals.note_notification(queue, is_new=not is_for_all)
        elif queue in self._relied_on:
            self._look_later(queue)
        if kind:
            self._relied_on.discard(queue)

    def _look_later(self, queue: str) -> None:
        self._unanswered.add(queue)
        if self._look_timer is None:
            seconds = random.uniform(*_LOOK_SECONDS)  # So that one worker looks first.
            self._look_timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _cancel_needless_timer(self) -> None:
        if self._look_timer is not None and not self._unanswered:
            self._look_timer.cancel()
            self._look_timer = None

    def _look(self) -> None:
        self._look_timer = None
        self._looking |= self._unanswered
        self._unanswered.clear()
        self._signals.poll_again()

    async def _connect(self) -> None:
        connection, is_direct = await connect(self._dsn, self._settings, purpose="listen")
        if is_direct:
            await prepare_session(connection, self._settings)
        elif await self._is_without_session(connection):
            return
        connection.add_notify_handler(lambda notify: self._receive(connection, notify.pid, notify.payload))
        try:
            with deadline(connection, self._settings.connect_timeout_seconds):
                await connection.execute(sql.LISTEN, prepare=False)
        except BaseException:
            await connection.close()
            raise
        self._lost.clear()
        self._permit_seconds.clear()
        self._forget_locks()
        self._connection = connection
        self._start_reading(connection)

    async def _is_without_session(self, connection: psycopg.AsyncConnection[TupleRow]) -> bool:
        """Whether a pooler changes the session after each transaction. If so, close the connection.

        Otherwise a LISTEN and a lock would stay in the pool, and producers would notify without a receiver.
        """
        try:
            self._has_no_session = not await keeps_session(connection, self._dsn, self._settings)
        except BaseException:
            await connection.close()
            raise
        if self._has_no_session:
            await connection.close()
        if not self._is_pooled:
            self._is_pooled = True
            self._telemetry.report(
                logging.WARNING,
                LogEvent.LISTENER_POOLED,
                "a pooler is between the listener and PostgreSQL: set a direct connection in PGOUTBOX_LISTEN_DSN "
                "or set PGOUTBOX_LISTEN=false",
                polls=self._has_no_session,
            )
        return self._has_no_session

    async def _disconnect(self) -> None:
        self._stop_reading()
        connection, self._connection = self._connection, None
        self._forget_locks()
        if connection is not None:
            with contextlib.suppress(psycopg.Error, OSError):
                if self._is_pooled and not connection.closed:
                    with deadline(connection, self._settings.listener_heartbeat_timeout_seconds):
                        await connection.execute(sql.UNLISTEN, prepare=False)  # The session stays in the pool.
                await connection.close()

    async def _keep_alive(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.listener_heartbeat_seconds):
                    await self._lost.wait()
            if not self._lost.is_set():
                await self._heartbeat()
            if not self._lost.is_set():
                await self._recheck()
            if self._lost.is_set():
                await self._reconnect()
            if self._has_no_session:
                return  # From now on it polls.

    async def _heartbeat(self) -> None:
        # Keepalives do not detect a stalled middlebox, and a pooler may have taken the LISTEN away: only an answer
        # counts.
        rows = await self._ask(sql.LISTENER_HEARTBEAT, {})
        if not rows:
            return
        ((is_listening, usage),) = rows
        if not is_listening:
            self._lose(ConnectionError("the session no longer listens"))
            return
        await self._check_usage(usage)

    async def _check_usage(self, usage: float) -> None:
        """Poll without locks while the notification queue is nearly full: when it is full, a notifying COMMIT fails.

        The reason is a listening session that stays in a transaction. All databases share this queue.
        """
        if (usage >= _NEARLY_FULL) == self._is_nearly_full:
            return
        self._is_nearly_full = not self._is_nearly_full
        if self._is_nearly_full:
            self._telemetry.report(
                logging.WARNING,
                LogEvent.NOTIFY_QUEUE_FILLING,
                "the server's notification queue is filling up: a session that listens stays in a transaction",
                usage=round(usage, 3),
            )
            await self.release()
        else:
            self._telemetry.report(logging.INFO, LogEvent.NOTIFY_QUEUE_DRAINED, "the notification queue has drained")
        self._signals.note_notification(None)  # The worker polls, and then sleeps without or with its locks.

    async def _reconnect(self) -> None:
        async with self._statement:
            await self._disconnect()
        backoff = Backoff(0.1, 5.0)
        while True:
            try:
                async with self._statement:
                    await self._connect()
            except (psycopg.Error, OSError):
                await asyncio.sleep(backoff.next())
            else:
                break
        if not self._has_no_session:
            self._telemetry.report(logging.INFO, LogEvent.LISTENER_BACK, "listener back")
        # No worker was notified of messages committed in between.
        self._signals.note_notification(None)


def key_of_watch(queue: str, topics: Sequence[str]) -> int:
    """Return the key of a queue's watch. Workers of other topics have a watch of their own."""
    text = " ".join(["watch", queue, *sorted(topics)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _put(queues: set[str], queue: str, *, is_in: bool) -> None:
    if is_in:
        queues.add(queue)
    else:
        queues.discard(queue)
