"""The doorbell: how a sleeping worker learns of a commit, and how producers learn that nobody sleeps.

One connection listens and holds the bells (session-level advisory locks), so that both end together. Nothing else runs
on it, and its socket is read at all times, so that it never holds back the server's notification queue. The bell only
saves time: a worker whose listener is gone works on by its sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import LiteralString

import psycopg
from psycopg.rows import TupleRow

from pgoutbox import sql
from pgoutbox.connections import deadline
from pgoutbox.link import connect, is_out_of_reach, keeps_session, prepare_session
from pgoutbox.settings import Settings
from pgoutbox.telemetry import Event, Telemetry

CHANNEL = "pgoutbox"
_MAX_PAUSE_SECONDS = 5.0

# How full the server's notification queue is: from where on it is reported, and until where; from where on bells are
# given up, and until where. PostgreSQL lets an idle listener stay four pages behind until somebody notifies again, and
# the smallest queue has 64 pages: below that share it may never come.
_FILLING = 0.1
_CALM = 0.08
_FULL = 0.5
_ROOM_AGAIN = 0.25


class Bell(enum.Enum):
    """How the try to arm the bells of some queues went, worst case first."""

    PRODUCERS = "producers"  # Enqueuing transactions are open: look again when they have committed.
    ARMED = "armed"  # From now on every commit rings, by this bell or another sleeper's: look once more.
    STILL_ARMED = "still armed"  # As it was before the last claim.
    DOWN = "down"  # No listener: only the sweep is left.


class Doorbell:
    """Listens and arms. `on_ring` is called on the event loop with the queue's name, and with None when any queue may
    have work: after the listener was lost and is back."""

    def __init__(self, settings: Settings, on_ring: Callable[[str | None], None], telemetry: Telemetry) -> None:
        self._dsn = settings.require_listen_dsn()
        self._settings = settings
        self._on_ring = on_ring
        self._telemetry = telemetry
        self._connection: psycopg.AsyncConnection[TupleRow] | None = None
        self._turn = asyncio.Lock()
        # Held over question and answer: to take a bell twice would need giving it up twice.
        self._bells = asyncio.Lock()
        self._armed: set[str] = set()
        self._trusted: set[str] = set()  # Another sleeper has these.
        self._permit_seconds: dict[str, float] = {}  # Of queues at their limit, when they were asked for.
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._watched_fd: int | None = None
        self._is_pooled = False
        self._has_no_session = False
        self._is_filling = False
        self._is_full = False

    @property
    def is_up(self) -> bool:
        """Whether the listener is connected."""
        return self._connection is not None and not self._lost.is_set()

    @property
    def is_reliable(self) -> bool:
        """Whether the bell rings for what is committed: the listener is connected, and NOTIFY has room to spare."""
        return self.is_up and not self._is_full

    @property
    def is_armed(self) -> bool:
        """Whether producers ring this worker for one of its queues."""
        return bool(self._armed)

    @property
    def unarmed_seconds(self) -> float | None:
        """How long the caller may sleep at most since it asked: then a queue without a bell has its next permit."""
        return min(self._permit_seconds.values(), default=None)

    async def start(self) -> None:
        """Connect and listen before the first claim; from then on the connection mends itself.

        A server that has no connection left for it now may have one later, and the sweep goes on meanwhile.
        """
        try:
            await self._connect()
        except (psycopg.Error, OSError) as error:
            if not await is_out_of_reach(error, self._dsn, self._settings):
                raise
            self._lose(error)
        if not self._has_no_session:
            self._task = asyncio.create_task(self._keep_alive(), name="pgoutbox-doorbell")

    async def stop(self) -> None:
        """Give up the bells, so that other sleepers take them over, and close the connection. Twice is not wrong."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self.is_up:
            await self.disarm()
        if self.is_up:
            await self._ask(sql.UNLISTEN, {})  # A ring that finds nobody is an error in the server's log.
        await self._disconnect()

    async def arm(self, queues: Sequence[str]) -> Bell:
        """Ask for the bells of these queues. After `ARMED` the caller must claim once more before it sleeps."""
        async with self._bells:
            unarmed = [queue for queue in queues if queue not in self._armed]
            if self._connection is None or self._is_full:
                return Bell.DOWN
            if not unarmed:
                return Bell.STILL_ARMED
            answers = await self._ask_for(unarmed)
            if answers is None:
                return Bell.DOWN
            return Bell.PRODUCERS if "producers" in answers.values() else Bell.ARMED

    async def disarm(self) -> None:
        """Give up the bells: the worker is awake, and producers need not ring. Another sleeper takes them over."""
        async with self._bells:
            self._trusted.clear()
            if self._armed:
                queues, self._armed = sorted(self._armed), set()
                await self._ask(sql.DISARM, {"queues": queues})

    async def _ask_for(self, queues: Sequence[str]) -> dict[str, str] | None:
        rows = await self._ask(sql.ARM, {"queues": queues})
        if rows is None:
            return None
        answers: dict[str, str] = {queue: answer for queue, answer, _ in rows}
        for queue, _, permit_seconds in rows:
            self._permit_seconds.pop(queue, None)
            if permit_seconds is not None:
                self._permit_seconds[queue] = permit_seconds
        self._armed.update(queue for queue, answer in answers.items() if answer == "armed")
        self._trusted.difference_update(answers)
        self._trusted.update(queue for queue, answer in answers.items() if answer == "sleeper")
        return answers

    async def _doubt(self) -> None:
        """Ask again for the bells that another sleeper has: one that ends with its session is announced to nobody."""
        async with self._bells:
            answers = await self._ask_for(sorted(self._trusted)) if self._trusted else None
        for queue, answer in (answers or {}).items():
            if answer != "sleeper":
                self._on_ring(queue)  # Nobody rang for what was committed since.

    async def _ask(self, statement: LiteralString, parameters: dict[str, object]) -> list[TupleRow] | None:
        """Rows, or None when the listener did not answer in time and is therefore given up."""
        async with self._turn:
            connection = self._connection
            if connection is None:
                return None
            try:
                async with (
                    self._reading_suspended(connection),
                    deadline(connection, self._settings.probe_timeout_seconds),
                ):
                    cursor = await connection.execute(statement, parameters)
                    return await cursor.fetchall() if cursor.description is not None else []
            except psycopg.errors.ProgramLimitExceeded:
                return []  # The server has no room to tell others. What this session holds or gave up stays so.
            except (psycopg.Error, OSError) as error:
                self._lose(error)
                return None

    @contextlib.asynccontextmanager
    async def _reading_suspended(self, connection: psycopg.AsyncConnection[TupleRow]) -> AsyncIterator[None]:
        # A statement reads the socket by itself, and event loops allow one reader for each socket.
        self._stop_reading()
        try:
            yield
        finally:
            if not connection.closed and connection is self._connection:
                self._start_reading(connection)

    def _start_reading(self, connection: psycopg.AsyncConnection[TupleRow]) -> None:
        self._watched_fd = connection.fileno()
        asyncio.get_running_loop().add_reader(self._watched_fd, self._read, connection)
        # What came in behind the last answer is in libpq's buffer already, and the socket says nothing of it.
        self._read(connection)

    def _stop_reading(self) -> None:
        if self._watched_fd is not None:
            asyncio.get_running_loop().remove_reader(self._watched_fd)
            self._watched_fd = None

    def _read(self, connection: psycopg.AsyncConnection[TupleRow]) -> None:
        try:
            connection.pgconn.consume_input()
            while (notify := connection.pgconn.notifies()) is not None:
                self._hear(connection, notify.be_pid, notify.extra.decode("utf-8", "replace"))
        except psycopg.Error as error:
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        self._stop_reading()
        if not self._lost.is_set():
            self._telemetry.report(
                logging.WARNING, Event.LISTENER_LOST, "listener lost, working by sweep", reason=type(error).__name__
            )
        self._lost.set()
        self._on_ring(None)

    def _hear(self, connection: psycopg.AsyncConnection[TupleRow], sender: int, queue: str) -> None:
        # What this session says when it gives up a bell is meant for the others.
        if sender != connection.pgconn.backend_pid:
            self._on_ring(queue)

    async def _connect(self) -> None:
        connection, is_direct = await connect(self._dsn, self._settings, purpose="listen")
        if is_direct:
            await prepare_session(connection, self._settings)
        elif await self._is_without_session(connection):
            return
        connection.add_notify_handler(lambda notify: self._hear(connection, notify.pid, notify.payload))
        try:
            async with deadline(connection, self._settings.connect_timeout_seconds):
                await connection.execute(sql.LISTEN, prepare=False)
        except BaseException:
            await connection.close()
            raise
        self._lost.clear()
        self._permit_seconds.clear()
        self._armed.clear()
        self._trusted.clear()
        self._connection = connection
        self._start_reading(connection)

    async def _is_without_session(self, connection: psycopg.AsyncConnection[TupleRow]) -> bool:
        """Whether a pooler takes the session away after each transaction; closes the connection then.

        A LISTEN and a bell would stay behind in the pool, and nobody could end them: producers would ring for nobody.
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
                Event.LISTENER_POOLED,
                "a pooler stands between the listener and PostgreSQL: name a direct connection in PGOUTBOX_LISTEN_DSN "
                "or set PGOUTBOX_LISTEN=false",
                polls=self._has_no_session,
            )
        return self._has_no_session

    async def _disconnect(self) -> None:
        self._stop_reading()
        connection, self._connection = self._connection, None
        self._armed.clear()
        if connection is not None:
            with contextlib.suppress(psycopg.Error, OSError):
                if self._is_pooled and not connection.closed:
                    async with deadline(connection, self._settings.probe_timeout_seconds):
                        await connection.execute(sql.UNLISTEN, prepare=False)  # The session lives on in the pool.
                await connection.close()

    async def _keep_alive(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.probe_seconds):
                    await self._lost.wait()
            if not self._lost.is_set():
                await self._probe()
            if not self._lost.is_set():
                await self._doubt()
            if self._lost.is_set():
                await self._reconnect()
            if self._has_no_session:
                return  # From now on it polls.

    async def _probe(self) -> None:
        # Keepalives do not see a stalled middlebox, and a pooler may have taken the LISTEN away: only an answer counts.
        rows = await self._ask(sql.PROBE, {})
        if not rows:
            return
        ((is_listening, usage),) = rows
        if not is_listening:
            self._lose(ConnectionError("the session does not listen any more"))
            return
        await self._judge_usage(usage)

    async def _judge_usage(self, usage: float) -> None:
        """Do without bells while the notification queue is filling up: once it is full, COMMIT fails for who rings.

        Some session that listens stays in a transaction then. What it holds back is shared by all databases.
        """
        is_full = usage >= (_ROOM_AGAIN if self._is_full else _FULL)
        if is_full != self._is_full:
            self._is_full = is_full
            if is_full:
                await self.disarm()
            self._on_ring(None)  # From now on it polls, or is rung again: either way it looks first.
        is_filling = usage >= (_CALM if self._is_filling else _FILLING)
        if is_filling != self._is_filling:
            self._is_filling = is_filling
            if is_filling:
                self._telemetry.report(
                    logging.WARNING,
                    Event.NOTIFY_QUEUE_FILLING,
                    "the server's notification queue is filling up: a session that listens stays in a transaction",
                    usage=round(usage, 3),
                )
            else:
                self._telemetry.report(logging.INFO, Event.NOTIFY_QUEUE_DRAINED, "the notification queue has drained")

    async def _reconnect(self) -> None:
        async with self._turn:
            await self._disconnect()
        pause = 0.1
        while True:
            try:
                async with self._turn:
                    await self._connect()
            except (psycopg.Error, OSError):
                await asyncio.sleep(pause * (0.5 + random.random() / 2))  # noqa: S311 - jitter guards nothing
                pause = min(pause * 2, _MAX_PAUSE_SECONDS)
            else:
                break
        if not self._has_no_session:
            self._telemetry.report(logging.INFO, Event.LISTENER_BACK, "listener back")
        # What was committed in between has rung for nobody.
        self._on_ring(None)
