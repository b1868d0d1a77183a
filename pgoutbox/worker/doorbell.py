"""The doorbell: a commit wakes an idle worker, and producers do not notify while no worker is idle.

One worker of a queue is on watch: a notification wakes only this worker. It holds the wake-up lock, so that producers
notify, or polls at high rates, so that they need not. Its deputy polls a little later, in case the watch does not
answer. The other idle workers rely on the watch until it notifies them of its end.

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
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Literal, LiteralString, Protocol

import psycopg
from psycopg.rows import TupleRow

from pgoutbox.database import sql
from pgoutbox.database.connections import deadline
from pgoutbox.database.worker_connection import connect, is_unreachable, keeps_session, prepare_session
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.settings import Settings
from pgoutbox.worker.backoff import Backoff

CHANNEL = "pgoutbox"
_ANSWER_SECONDS = 0.25  # If a watch has not answered a notification by then, its deputy polls.

# Shares of the server's notification queue: the start and the end of the report, and the share above which a worker
# releases its locks and the share below which it acquires them again. PostgreSQL lets an idle listener stay four pages
# behind until the next notification, and the smallest queue has 64 pages: the usage may never fall below that share.
_FILLING = 0.1
_CALM = 0.08
_FULL = 0.5
_ROOM_AGAIN = 0.25


class LockAnswer(enum.Enum):
    """The result of acquiring the wake-up locks of some queues, worst case first."""

    PRODUCERS = "producers"  # Enqueuing transactions are open: poll again after they have committed.
    ACQUIRED = "acquired"  # Every later commit wakes this worker or the one on watch: poll once more.
    UNCHANGED = "unchanged"  # As before the last claim.
    NO_LISTENER = "no listener"  # Only the periodic poll finds messages.


class OnNotification(Protocol):
    """Called with a queue that may have work, or with None for any queue after the listener has reconnected.

    `is_new` means that a new message was enqueued there, and no other change.
    """

    def __call__(self, queue: str | None, /, *, is_new: bool = False) -> None: ...


class Doorbell:
    """Listens, and holds the locks of an idle worker.

    `on_notification` is called on the event loop. `on_deputy_due` is called when the watch has had time to answer, or
    polls. Workers with the same `topics`, which may change, share a watch.
    """

    def __init__(
        self,
        settings: Settings,
        topics: Sequence[str],
        *,
        on_notification: OnNotification,
        on_deputy_due: Callable[[], None],
        telemetry: Telemetry,
    ) -> None:
        self._dsn = settings.require_listen_dsn()
        self._settings = settings
        self._topics = topics
        self._on_notification = on_notification
        self._on_deputy_due = on_deputy_due
        self._telemetry = telemetry
        self._connection: psycopg.AsyncConnection[TupleRow] | None = None
        self._statement = asyncio.Lock()
        # Held from question to answer: a lock that is acquired twice must be released twice.
        self._locking = asyncio.Lock()
        self._on_watch: set[str] = set()
        self._wake_up_locks: set[str] = set()
        self._deputy_of: set[str] = set()
        self._relied_on: set[str] = set()  # Queues with a watch in another session, until it notifies otherwise.
        self._polled: set[str] = set()  # This worker is the deputy of a watch that polls.
        self._asking: set[str] = set()
        self._news: set[str] = set()  # Another session has released a lock while this one asked for it.
        self._topics_on_watch: tuple[str, ...] = ()
        self._deputy_timer: asyncio.TimerHandle | None = None
        self._permit_seconds: dict[str, float] = {}  # Of queues at their limit, at the time of the question.
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._watched_fd: int | None = None
        self._is_pooled = False
        self._has_no_session = False
        self._is_filling = False
        self._is_full = False

    @property
    def is_up(self) -> bool | None:
        """Whether the listener is connected; None behind a pooler that keeps no session, where the worker polls."""
        return None if self._has_no_session else self._connection is not None and not self._lost.is_set()

    @property
    def is_reliable(self) -> bool:
        """Whether every commit notifies: the listener is connected, and the notification queue has room."""
        return bool(self.is_up) and not self._is_full

    @property
    def has_wake_up_lock(self) -> bool:
        """Whether producers notify this worker for one of its queues."""
        return bool(self._wake_up_locks)

    @property
    def is_on_watch(self) -> bool:
        """Whether other workers rely on this one as their watch, for one of its queues."""
        return bool(self._on_watch)

    @property
    def is_on_duty(self) -> bool:
        """Whether other workers rely on this one, as watch or as deputy."""
        return bool(self._on_watch or self._deputy_of)

    @property
    def max_sleep_seconds(self) -> float:
        """The maximum sleep of the caller since it asked for the locks, in seconds.

        After that a queue at its limit has its next permit, or the polling watch has had time to answer.
        """
        polled = _ANSWER_SECONDS if self._polled else math.inf
        return min([*self._permit_seconds.values(), polled])

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
            if self._connection is None or self._is_full:
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
            return LockAnswer.PRODUCERS if "producers" in answers.values() else LockAnswer.ACQUIRED

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
        held = self._on_watch | self._deputy_of | self._wake_up_locks
        self._forget_locks()
        if held:
            await self._ask(sql.RELEASE_LOCKS, {"queues": sorted(held)})

    def _forget_locks(self) -> None:
        for queues in (self._on_watch, self._wake_up_locks, self._deputy_of, self._relied_on, self._polled):
            queues.clear()
        if self._deputy_timer is not None:
            self._deputy_timer.cancel()
            self._deputy_timer = None

    async def _ask_for(self, queues: Sequence[str]) -> dict[str, str] | None:
        self._asking, self._news = set(queues), set()
        rows = await self._ask(
            sql.ACQUIRE_LOCKS,
            {
                "queues": queues,
                "watch_keys": lock_keys("watch", queues, self._topics_on_watch),
                "deputy_keys": lock_keys("deputy", queues, self._topics_on_watch),
                "deputy_of": sorted(self._deputy_of),
            },
        )
        self._asking = set()
        if rows is None:
            return None
        for queue, answer, permit_seconds in rows:
            self._permit_seconds.pop(queue, None)
            if permit_seconds is not None:
                self._permit_seconds[queue] = permit_seconds
            self._record(queue, answer)
        return {queue: answer for queue, answer, _ in rows}

    def _record(self, queue: str, answer: str) -> None:
        has_news = queue in self._news
        if answer != "limited":  # In that case the session keeps its locks.
            _put(self._on_watch, queue, is_in=answer in ("acquired", "notified", "producers"))
            _put(self._wake_up_locks, queue, is_in=answer == "acquired")
            _put(self._deputy_of, queue, is_in=answer in ("deputy", "polled"))
        _put(self._polled, queue, is_in=answer == "polled")
        _put(self._relied_on, queue, is_in=answer in ("notified", "deputy", "idle") and not has_news)
        if has_news:
            self._on_notification(queue)  # The notification may be later than the answer: ask again.

    async def _recheck(self) -> None:
        """Request the locks of other sessions again: a lock that ends with its session sends no notification."""
        async with self._locking:
            answers = await self._ask_for(sorted(self._relied_on)) if self._relied_on else None
        for queue, answer in (answers or {}).items():
            if answer not in ("notified", "deputy", "idle"):
                self._on_notification(queue)  # No worker was notified of messages committed since then.

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
        self._on_notification(None)

    def _receive(self, connection: psycopg.AsyncConnection[TupleRow], sender: int, message: str) -> None:
        """Read a notification: producers send the queue, for its watch; workers and operators send a prefix too."""
        if sender == connection.pgconn.backend_pid:
            return  # This session's own notifications are for the others.
        kind, _, queue = message.rpartition(" ")
        is_for_all = kind == "all"
        if kind and queue in self._asking:
            self._news.add(queue)
        if is_for_all or (kind and queue in self._on_watch | self._deputy_of):
            self._relied_on.discard(queue)
        if is_for_all or queue in self._on_watch:
            self._on_notification(queue, is_new=not is_for_all)
        elif queue in self._deputy_of and self._deputy_timer is None:
            self._deputy_timer = asyncio.get_running_loop().call_later(_ANSWER_SECONDS, self._end_deputy_timer)

    def _end_deputy_timer(self) -> None:
        self._deputy_timer = None
        self._on_deputy_due()

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
        """Release the locks while the notification queue fills up: when it is full, every notifying COMMIT fails.

        The reason is a listening session that stays in a transaction. All databases share this queue.
        """
        is_full = usage >= (_ROOM_AGAIN if self._is_full else _FULL)
        if is_full != self._is_full:
            self._is_full = is_full
            if is_full:
                await self.release()
            self._on_notification(
                None
            )  # From now on the worker polls, or acquires its locks again: in both cases it polls first.
        is_filling = usage >= (_CALM if self._is_filling else _FILLING)
        if is_filling != self._is_filling:
            self._is_filling = is_filling
            if is_filling:
                self._telemetry.report(
                    logging.WARNING,
                    LogEvent.NOTIFY_QUEUE_FILLING,
                    "the server's notification queue is filling up: a session that listens stays in a transaction",
                    usage=round(usage, 3),
                )
            else:
                self._telemetry.report(
                    logging.INFO, LogEvent.NOTIFY_QUEUE_DRAINED, "the notification queue has drained"
                )

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
        self._on_notification(None)


def lock_keys(role: Literal["watch", "deputy"], queues: Sequence[str], topics: Sequence[str]) -> list[int]:
    """Return the advisory lock key of a role for each queue. Workers with other topics have separate roles."""
    texts = [" ".join([role, queue, *sorted(topics)]) for queue in queues]
    return [int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True) for text in texts]


def _put(queues: set[str], queue: str, *, is_in: bool) -> None:
    if is_in:
        queues.add(queue)
    else:
        queues.discard(queue)
