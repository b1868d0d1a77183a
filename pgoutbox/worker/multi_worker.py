"""The worker of many databases: a worker for each of them, in one process, with one set of slots.

A database that is down, slow, locked or without the right schema costs the others nothing: its worker tries again by
itself, with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.databases import read_databases, settings_of
from pgoutbox.errors import ConfigurationError, PgOutboxError
from pgoutbox.observability.backlog import Backlog
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.observability.measures import WorkerStatus
from pgoutbox.observability.server import TelemetryServer, backlog_of
from pgoutbox.observability.watched import WatchedWorker
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings
from pgoutbox.text import describe
from pgoutbox.transports.registry import complete
from pgoutbox.worker.backoff import Backoff
from pgoutbox.worker.handler_errors import traceback_of
from pgoutbox.worker.leases import LeaseThread
from pgoutbox.worker.run import Shared
from pgoutbox.worker.slots import Slots, SlotsLostError
from pgoutbox.worker.threads import AttemptThreads, own_default_threads
from pgoutbox.worker.transactional.django_orm import DjangoConnections
from pgoutbox.worker.worker import Worker

_log = logging.getLogger("pgoutbox.worker")

_READ_SECONDS: Final = 30.0
_REST_CHECK_SECONDS: Final = 1.0
_NOTIFY_CHECK_SECONDS: Final = 0.1
_LEFT_OUT: Final = "its worker has ended and tries again: the log event database_left_out has the reason"
_STEADY_SECONDS: Final = 60.0
_AT_ONCE: Final = 8
_START_PAUSE_SECONDS: Final = 0.01  # Between the starts of two databases.
_LOOK_UP_THREADS: Final = 16


@dataclass(slots=True, eq=False)
class _Member:
    """A database that the worker serves."""

    name: str
    dsn: str
    worker: Worker
    backlog: Backlog | None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    refusal: str | None = None
    """Why its worker has ended by itself. It tries again."""
    is_waiting: bool = False
    """Whether its worker has ended, and the next one has not begun."""

    def stop(self) -> None:
        self.stopping.set()
        self.worker.stop()

    def status(self) -> WorkerStatus:
        """The state of its worker. It only reads attributes, so that any thread can call it."""
        status = WorkerStatus() if self.is_waiting else self.worker.status()
        is_left_out = self.refusal is not None and not status.is_started
        return replace(status, failure=_LEFT_OUT) if is_left_out else status

    def note_refusal(self, error: Exception) -> None:
        """Report why its worker has ended, once for each reason. Further lines may quote values of rows."""
        reason = describe(error).partition("\n")[0]
        if reason != self.refusal:
            self.refusal = reason
            text = "this database is not served"
            # A defect is looked for by its place in the code.
            is_defect = not isinstance(error, (PgOutboxError, psycopg.Error, OSError))
            traceback = traceback_of(error, with_texts=False) if is_defect else None
            report = self.worker.telemetry.report
            report(logging.ERROR, LogEvent.DATABASE_LEFT_OUT, text, traceback=traceback, reason=reason)


class MultiWorker:
    """Delivers the messages of many databases, those of `PGOUTBOX_DSNS` or of the outbox's `databases`.

    It is used like a `Worker`. All databases share `concurrency` slots: while one has more work than the others, it
    gets at most four fifths of them. `run` reads the list again twice a minute: it begins with new databases, and ends
    with those that are gone. Each has one connection while it is idle.

    Raises `ConfigurationError` if there is no list, or a wrong one.
    """

    def __init__(
        self, outbox: Outbox, *, settings: Settings | None = None, queues: Sequence[str] = ("default",)
    ) -> None:
        self._outbox = outbox
        self._settings = settings = settings if settings is not None else outbox.settings
        self._queues = queues
        self.telemetry: Telemetry = Telemetry(_log)
        self._stopping = asyncio.Event()
        self._reading = asyncio.Event()
        self._members: dict[str, _Member] = {}
        self._error: SlotsLostError | None = None
        self._trouble: str | None = None
        self._ended: list[Worker] = []  # Workers that have ended before their handlers.
        self._transports = complete(outbox.transports, settings)
        self._shared: Shared | None = None
        self.telemetry_server: TelemetryServer
        self._read()

    async def run(self) -> None:
        """Work until `stop()`. A database that cannot be served is left out, and tried again.

        Raises the errors of `Worker` about handlers, queues and settings. Raises `PgOutboxError` if half of the slots
        are lost to handlers that do not return after their timeout.
        """
        async with self._at_work(ends_by_itself=False):
            await self._begin(self._read())
            while not self._stopping.is_set():
                await _until(self._reading, _READ_SECONDS)
                self._reading.clear()
                await self._follow()

    async def run_once(self, *, max_messages: int | None = None, max_seconds: float | None = None) -> None:
        """Do for each database what `Worker.run_once` does. `max_messages` counts for each of them.

        Raises `PgOutboxError` with the databases that could not be served, after the others.
        """
        await self._each(lambda worker: worker.run_once(max_messages=max_messages, max_seconds=max_seconds))

    async def drain(self) -> None:
        """Do for each database what `Worker.drain` does. Raises as `run_once`."""
        await self._each(lambda worker: worker.drain())

    def stop(self) -> None:
        """Begin to stop, as `Worker.stop`."""
        self._stopping.set()
        self._reading.set()
        for member in self._members.values():
            member.stop()

    def read_databases(self) -> None:
        """Read the list of databases again now. Call it on the event loop."""
        self._reading.set()

    @property
    def has_running_handlers(self) -> bool:
        """Whether a handler still runs after the worker has ended: in a thread, or ignoring its cancellation."""
        workers = (*self._ended, *(member.worker for member in self._members.values()))
        return any(worker.has_running_handlers for worker in workers)

    def status(self) -> WorkerStatus:
        """The health of the process, with that of each database. Any thread can call it.

        Times are those of the last poll and the last claim of any database.
        """
        slots = self._shared.slots if self._shared is not None else Slots(self._settings.concurrency)
        databases = {member.name: member.status() for member in list(self._members.values())}
        every = list(databases.values())
        claimed = [one.claimed_seconds_ago for one in every if one.claimed_seconds_ago is not None]
        return WorkerStatus(
            is_started=any(one.is_started for one in every),
            is_stopping=self._stopping.is_set(),
            is_idle=all(one.is_idle for one in every if one.is_started),
            in_flight=sum(one.in_flight for one in every),
            slots=slots.count - slots.lost_count,
            busy=sum(one.busy for one in every),
            abandoned=slots.lost_count,
            is_database_up=any(one.is_database_up for one in every),
            is_copy=bool(every) and all(one.is_copy for one in every),
            polled_seconds_ago=min((one.polled_seconds_ago for one in every), default=0.0),
            claimed_seconds_ago=min(claimed, default=None),
            outcomes_refused=sum(one.outcomes_refused for one in every),
            breakers_open=sum(one.breakers_open for one in every),
            failure=None if self._error is None else str(self._error),
            databases=databases,
        )

    def _watched(self) -> dict[str, WatchedWorker]:
        return {
            member.name: WatchedWorker(measures, member.status, telemetry.event_counts, member.backlog)
            for member in list(self._members.values())
            if (measures := (telemetry := member.worker.telemetry).measures) is not None
        }

    # --- the databases

    def _read(self) -> dict[str, str]:
        found = read_databases(self._settings, self._outbox)
        if found is None:
            raise ConfigurationError("no databases given: set PGOUTBOX_DSNS, or pass Outbox(databases=...)")
        return found

    async def _follow(self) -> None:
        """Read the list again, and serve its databases."""
        if self._stopping.is_set():
            return
        try:
            wanted = await asyncio.to_thread(self._read)
        except Exception as error:  # noqa: BLE001 - the worker goes on with the last list
            reason = describe(error)
            if reason != self._trouble:
                self._trouble = reason
                text = "the list of databases cannot be read, going on with the last one"
                self.telemetry.report(logging.ERROR, LogEvent.DATABASES_UNKNOWN, text, reason=reason)
            return
        self._trouble = None
        for name, member in list(self._members.items()):
            if wanted.get(name) != member.dsn:
                member.stop()
            if member.task is not None and member.task.done():
                self._note_end(member.worker)
                del self._members[name]
        await self._begin(wanted)

    async def _begin(self, wanted: Mapping[str, str]) -> None:
        for name, dsn in wanted.items():
            if name not in self._members and not self._stopping.is_set():
                member = self._add(name, dsn)
                member.task = asyncio.create_task(self._serve(member), name=f"pgoutbox-database-{name}")
                # The name may have been listed again meanwhile, maybe with another DSN.
                member.task.add_done_callback(lambda _: self._reading.set())
                await _until(self._stopping, _START_PAUSE_SECONDS)

    def _add(self, name: str, dsn: str) -> _Member:
        telemetry = Telemetry(_log, database=name)
        telemetry.measures = self.telemetry_server.measures_of(name)
        settings = settings_of(self._settings, name, dsn)
        member = _Member(name, dsn, self._new_worker(settings, telemetry), backlog_of(settings))
        self._members[name] = member
        return member

    def _new_worker(self, settings: Settings, telemetry: Telemetry) -> Worker:
        return Worker(
            self._outbox,
            settings=settings,
            queues=self._queues,
            transports=self._transports,
            _shared=self._shared,
            _telemetry=telemetry,
        )

    async def _serve(self, member: _Member) -> None:
        """Run the worker of a database, and another one if it ends by itself."""
        backoff = Backoff(1.0, 60.0)
        while not member.stopping.is_set():
            began_at = elapsed_clock()
            try:
                await member.worker.run()
            except SlotsLostError as error:
                if not self._stopping.is_set():  # Otherwise they have outlived the grace time.
                    self._error = error
                    self.stop()
                return
            except Exception as error:  # noqa: BLE001 - the others go on
                if elapsed_clock() - began_at > _STEADY_SECONDS:
                    backoff.reset()
                    member.refusal = None
                member.note_refusal(error)
            member.is_waiting = True
            await _until(member.stopping, backoff.next())
            if not member.stopping.is_set():
                self._note_end(member.worker)
                settings = settings_of(self._settings, member.name, member.dsn)
                member.worker = self._new_worker(settings, member.worker.telemetry)
                member.is_waiting = False

    def _note_end(self, worker: Worker) -> None:
        self._ended = [one for one in (*self._ended, worker) if one.has_running_handlers]

    # --- the work

    @contextlib.asynccontextmanager
    async def _at_work(self, *, ends_by_itself: bool) -> AsyncIterator[None]:
        count = self._settings.concurrency
        own_default_threads(count + _LOOK_UP_THREADS)
        django = DjangoConnections.in_use()
        shared = self._shared = Shared(Slots(count), AttemptThreads(count), LeaseThread(), self._transports, django)
        self._members = {}
        async with TelemetryServer(
            self.status, self._settings, self.telemetry, serves=not ends_by_itself, workers=self._watched
        ) as self.telemetry_server:
            works = [
                asyncio.create_task(self._keep_resting(), name="pgoutbox-rest"),
                asyncio.create_task(self._notify(), name="pgoutbox-notify"),
            ]
            try:
                yield
            finally:
                for member in self._members.values():
                    member.stop()
                tasks = [member.task for member in self._members.values() if member.task is not None]
                await asyncio.gather(*tasks)
                for work in works:
                    work.cancel()
                await asyncio.wait(works)
                for transport in {id(one): one for one in self._transports.values()}.values():
                    await transport.aclose()
                if django is not None:
                    await django.close()
                shared.lease_thread.stop()
                shared.threads.shutdown(wait=False, cancel_futures=True)
        if self._error is not None:
            raise self._error

    async def _notify(self) -> None:
        """Notify systemd when the first database is served, and when the worker stops."""
        while not self._stopping.is_set() and not self.status().is_started:
            await _until(self._stopping, _NOTIFY_CHECK_SECONDS)
        async with self.telemetry_server.at_work():
            await self._stopping.wait()

    async def _keep_resting(self) -> None:
        while True:
            await asyncio.sleep(_REST_CHECK_SECONDS)
            for member in list(self._members.values()):
                await member.worker.rest()

    async def _each(self, run: Callable[[Worker], Awaitable[None]]) -> None:
        """Let a worker for each database do this, some at a time."""
        turns = asyncio.Semaphore(_AT_ONCE)

        async def serve(member: _Member) -> None:
            async with turns:
                if not (self._stopping.is_set() or member.stopping.is_set()):
                    try:
                        await run(member.worker)
                    except SlotsLostError as error:
                        self._error = error
                        self.stop()
                    except Exception as error:  # noqa: BLE001 - the others go on
                        member.note_refusal(error)

        async with self._at_work(ends_by_itself=True):
            for name, dsn in self._read().items():
                member = self._add(name, dsn)
                member.task = asyncio.create_task(serve(member), name=f"pgoutbox-database-{name}")
            await asyncio.gather(*(member.task for member in self._members.values() if member.task is not None))
        refused = [member.name for member in self._members.values() if member.refusal is not None]
        if refused:
            raise PgOutboxError(f"not served, see the log: {', '.join(refused)}")


async def _until(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
