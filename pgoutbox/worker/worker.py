"""The worker: connects its parts, starts them and stops them.

A worker has one event loop. Its main task runs the poll loop. Claimed messages go from the claimer through the loader
to the attempt pool, whose attempts run in tasks. The finisher, a separate task, writes their endings in batches, on
another connection. So claims, handlers and finishes overlap, and none of them waits for a single message. Each part
knows only the parts below it; this module connects them. Attempts are in `_in_flight` from the claim's answer to the
finish's answer.

Correctness does not depend on this module: every write is fenced in its statement. If this process stops at any line,
the rows alone show the remaining work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import Store
from pgoutbox.database.worker_connection import is_unreachable
from pgoutbox.encryption import keyring_of
from pgoutbox.errors import ConfigurationError
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.observability.measures import WorkerStatus
from pgoutbox.observability.server import TelemetryServer
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings
from pgoutbox.transports import Transport
from pgoutbox.transports.readiness import lacks_of
from pgoutbox.transports.redirect import RedirectRules
from pgoutbox.transports.registry import complete
from pgoutbox.worker.alert import ALERT_TOPIC, handlers_of
from pgoutbox.worker.attempt import ABANDONED, InFlight
from pgoutbox.worker.claim_planner import QueueSchedule, name_all, parse_queues
from pgoutbox.worker.claimer import Claimer
from pgoutbox.worker.django_orm import DjangoConnections
from pgoutbox.worker.doorbell import Doorbell
from pgoutbox.worker.executor import AttemptExecutor
from pgoutbox.worker.finisher import Finisher
from pgoutbox.worker.leases import LeaseKeeper
from pgoutbox.worker.loader import Loader
from pgoutbox.worker.maintenance import Maintenance
from pgoutbox.worker.notifier import Notifier
from pgoutbox.worker.outage import Outage
from pgoutbox.worker.poll_loop import PollLoop
from pgoutbox.worker.pool import AttemptPool
from pgoutbox.worker.presence import Presence
from pgoutbox.worker.signals import Signals
from pgoutbox.worker.stall_watch import StallWatch
from pgoutbox.worker.threads import own_default_threads

_log = logging.getLogger("pgoutbox.worker")

Mode = Literal["run", "once", "drain"]

_FOREIGN_WORK_SECONDS = 1.0
_OUTCOMES = (
    LogEvent.SENT,
    LogEvent.FAILED,
    LogEvent.RETRY,
    LogEvent.SKIPPED,
    LogEvent.CANCELLED,
    LogEvent.SNOOZED,
    LogEvent.RELEASED,
)
_FINAL_WRITE_SECONDS = 5.0


class Worker:
    """Delivers the messages of some queues with the handlers of an outbox.

    `await worker.run()` works until `stop()`; `await worker.run_once()` delivers all due messages and returns;
    `await worker.drain()` also waits for retries. Several workers, on any machines, share the work through the rows.
    Without `settings` and `transports` it takes those of the outbox. `queues` are served strictly in their order, or by
    weights: `["critical:6", "default:1"]`. The name `*` means `default` and all queues that the outbox's topics define.

        asyncio.run(Worker(outbox, queues=["critical", "default"]).run_once())
    """

    telemetry_server: TelemetryServer

    def __init__(
        self,
        outbox: Outbox,
        *,
        settings: Settings | None = None,
        queues: Sequence[str] = ("default",),
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        self._settings = settings if settings is not None else outbox.settings
        if not outbox.handlers:
            raise ConfigurationError("the outbox has no handlers: register one with @outbox.handler(topic)")
        self._handlers = handlers_of(outbox, self._settings)
        for topic in sorted(outbox.hooks.keys() - self._handlers.keys()):
            raise ConfigurationError(
                f"on_failed: topic {topic!r} has a hook and no handler in this outbox: register both in the same outbox"
            )
        self._hooks = {topic: self._handlers[hook].retry.max_attempts for topic, hook in outbox.hooks.items()}
        self._topics = sorted(self._handlers)
        self._middlewares = outbox.middlewares
        self._hold_topics = sorted(t for t, h in self._handlers.items() if h.on_unknown == "hold")
        self._defined_queues = sorted({topic.queue for topic in outbox.topics.values() if topic.queue is not None})
        self._fixed_destinations = {
            topic.name: topic.destination for topic in outbox.topics.values() if isinstance(topic.destination, str)
        }
        self._queues = QueueSchedule(name_all(parse_queues(queues), self._defined_queues), now=elapsed_clock())
        self.name: str = _name_for(self._settings)
        self.telemetry: Telemetry = Telemetry(_log)
        RedirectRules.of(self._settings.redirect)
        self._keyring = keyring_of(self._settings.encryption_keys)
        self._transports = transports if transports is not None else complete(outbox.transports, self._settings)
        self._in_flight = InFlight()
        self._is_started = False
        self._stopping = asyncio.Event()
        self._outage = Outage(self.telemetry, stopping=self._stopping)
        self._signals = Signals(self._queues, self._in_flight, lease_seconds=self._settings.lease_seconds)

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop()`. Wait first for a server that is down, starting or full, or for the adoption of a copy.

        Raises `ConfigurationError` or `SchemaError` for an unsuitable database, and the driver's error for a permanent
        refusal, such as a wrong password.
        """
        async with (
            self._at_work(listen=self._settings.listen, patient=True, serves=True),
            Maintenance(self._settings, self._store, self.telemetry),
            Presence(
                self._store,
                self.telemetry,
                queues=self._queues.names,
                topics=self._topics,
                defined=self._defined_queues,
            ),
        ):
            await self._poll_loop.run()

    async def run_once(self) -> None:
        """Deliver all messages that are due now, then return. Overlapping runs share the work.

        Unlike `run`, it and `drain` do not wait for the server: they raise an error of the first connection, and
        `SchemaError` in a copy of the database.
        """
        async with self._one_run():
            await self._poll_loop.deliver_due()

    async def drain(self) -> None:
        """Work until no message is due, in flight or waiting for a retry in these queues.

        It does not wait for scheduled messages that were never attempted.
        """
        async with self._one_run():
            while not self._stopping.is_set():
                self._signals.wake.clear()
                await self._poll_loop.deliver_due()
                refusals = self._finisher.refusals
                owed_count = await self._store.count_owed(self._queues.names, self._topics)
                if refusals.are_many or owed_count <= refusals.count:
                    return
                due = await self._claimer.next_due_seconds()
                # Another worker's messages may be pending again at any time, and no notification wakes a drain.
                await self._poll_loop.sleep(_FOREIGN_WORK_SECONDS if due is None else min(due, _FOREIGN_WORK_SECONDS))

    @contextlib.asynccontextmanager
    async def _one_run(self) -> AsyncIterator[None]:
        """Do what a worker does periodically once: a due turn of maintenance, and the count of failures in a row."""
        async with self._at_work(listen=False, is_run=True):
            await self._executor.breakers.inherit()
            yield
            async with Maintenance(self._settings, self._store, self.telemetry, is_periodic=False) as maintenance:
                await maintenance.turn_unless(self._stopping)

    def stop(self) -> None:
        """Begin to stop: stop claiming, wait for handlers up to the grace time, release the rest. Idempotent.

        Call it on the event loop.
        """
        if not self._stopping.is_set():
            self._stopping.set()
            self.telemetry.report(
                logging.INFO, LogEvent.WORKER_STOPPING, "worker stopping", in_flight_count=len(self._in_flight)
            )
        self._signals.wake.set()
        self._signals.progress.set()

    @contextlib.asynccontextmanager
    async def _at_work(
        self, *, listen: bool, patient: bool = False, serves: bool = False, is_run: bool = False
    ) -> AsyncIterator[None]:
        async with (
            TelemetryServer(self, self._settings, self.telemetry, serves=serves) as self.telemetry_server,
            self._running(listen=listen, patient=patient, is_run=is_run),
            self.telemetry_server.at_work(self._store.server_time),
        ):
            yield

    @property
    def has_running_threads(self) -> bool:
        """Whether a handler's thread runs, also after the worker has ended."""
        return self._is_started and self._pool.has_running_threads

    def status(self) -> WorkerStatus:
        """The worker's health. It only reads attributes, so that any thread can call it."""
        claimed_at = None if self.telemetry.measures is None else self.telemetry.measures.claimed_at
        now = elapsed_clock()
        is_started = self._is_started
        return WorkerStatus(
            is_started=is_started,
            is_stopping=self._stopping.is_set(),
            in_flight=len(self._in_flight),
            slots=self._pool.capacity if is_started else 0,
            busy=self._pool.running_count if is_started else 0,
            abandoned=self._pool.outlived_count if is_started else 0,
            is_listener_up=self._doorbell.is_up if is_started and self._doorbell is not None else None,
            is_database_up=is_started and not self._outage.is_ongoing,
            is_copy=self._outage.is_copy,
            polled_seconds_ago=now - self._queues.polled_at,
            claimed_seconds_ago=None if claimed_at is None else now - claimed_at,
            outcomes_refused=self._finisher.refusals.count if is_started else 0,
            breakers_open=self._executor.breakers.open_count if is_started else 0,
        )

    @contextlib.asynccontextmanager
    async def _running(self, *, listen: bool, patient: bool, is_run: bool) -> AsyncIterator[None]:
        own_default_threads()
        self._assemble(listen=listen)
        counts = self.telemetry.counts.copy()
        try:
            await self._check_server(patient=patient)
            self._lease_keeper.start(on_death=self.stop)
            if self._doorbell is not None and not self._stopping.is_set():
                await self._doorbell.start()
            self._finishing = asyncio.create_task(self._finisher.run(), name="pgoutbox-finisher")
            self._finishing.add_done_callback(lambda task: None if task.cancelled() else self.stop())
            self._is_started = True
            if not self._stopping.is_set():
                self._report_start(is_run=is_run)
            try:
                await self._executor.redirects.start()
                yield
            finally:
                await self._wind_down()
                if is_run:
                    self._report_run(counts)
        finally:
            await self._close()
            self.telemetry.report(
                logging.DEBUG if is_run else logging.INFO, LogEvent.WORKER_STOPPED, "worker stopped", worker=self.name
            )
        self._lease_keeper.check()

    def _report_run(self, before: Mapping[LogEvent, int]) -> None:
        counts = {event.value: self.telemetry.counts[event] - before.get(event, 0) for event in _OUTCOMES}
        self.telemetry.report(logging.INFO, LogEvent.RUN_DONE, "run done", worker=self.name, **counts)

    def _report_start(self, *, is_run: bool) -> None:
        self.telemetry.report(
            logging.DEBUG if is_run else logging.INFO,  # Cron starts a run every minute.
            LogEvent.WORKER_STARTED,
            "worker started",
            worker=self.name,
            queues=self._queues.names,
        )
        functions = {topic: handler.function for topic, handler in self._handlers.items()}
        for lack in lacks_of(self._settings, self._transports, functions, self._fixed_destinations):
            self.telemetry.report(
                logging.WARNING,
                LogEvent.TRANSPORT_NOT_READY,
                "messages cannot go out with these settings",
                setting=lack.variable,
                reason=lack.reason,
                topics=lack.topics,
            )

    def _assemble(self, *, listen: bool) -> None:
        """Create the parts of one run and connect them."""
        settings = self._settings
        if self._is_started:
            self.name = _name_for(settings)  # Handlers of the previous run may still hold messages in its name.
        handlers = self._handlers
        self._django = DjangoConnections.in_use()
        if self._django is not None:
            handlers = {topic: self._django.around(handler) for topic, handler in handlers.items()}
        self._store = Store(settings, worker=self.name, hooks=self._hooks)
        self._notifier = Notifier(self._store, self._queues, self._signals, self._outage)
        self._finisher = Finisher(
            self._store,
            self._in_flight,
            batch_size=settings.batch_size,
            redacted_names=settings.redacted_names,
            error_texts=settings.error_texts,
            signals=self._signals,
            notifier=self._notifier,
            telemetry=self.telemetry,
        )
        self._executor = AttemptExecutor(
            settings,
            self._store,
            self._transports,
            self.telemetry,
            middleware=self._middlewares,
            alert_queue=self._queues.names[0] if ALERT_TOPIC in self._handlers else None,
            finisher=self._finisher,
        )
        self._pool = AttemptPool(
            self._executor.run,
            concurrency=settings.concurrency,
            default_timeout_seconds=settings.handler_timeout_seconds,
            overtime_seconds=settings.lease_seconds,
            on_outcome=self._finisher.collect,
            on_free=self._signals.note_progress,
            telemetry=self.telemetry,
        )
        self._lease_keeper = LeaseKeeper(
            settings,
            self._in_flight,
            self.telemetry,
            worker=self.name,
            on_tick=StallWatch(self.telemetry, work_of=self._pool.work_of).check,
            spare=self._store.claims,
        )
        self._loader = Loader(
            self._store,
            handlers,
            self._in_flight,
            self._outage,
            keyring=self._keyring,
            pool=self._pool,
            finisher=self._finisher,
            lease_keeper=self._lease_keeper,
            signals=self._signals,
            telemetry=self.telemetry,
        )
        self._claimer = Claimer(
            self._store,
            self._queues,
            self._outage,
            topics=self._topics,
            hold_topics=self._hold_topics,
            in_flight=self._in_flight,
            signals=self._signals,
            loader=self._loader,
            stopping=self._stopping,
            telemetry=self.telemetry,
        )
        self._doorbell = None
        if listen:
            self._doorbell = Doorbell(
                settings,
                self._topics,
                on_notification=self._signals.note_notification,
                on_look_due=self._signals.poll_again,
                telemetry=self.telemetry,
            )
        self._poll_loop = PollLoop(
            settings,
            self._queues,
            self._signals,
            claimer=self._claimer,
            pool=self._pool,
            finisher=self._finisher,
            doorbell=self._doorbell,
            notifier=self._notifier,
            outage=self._outage,
            stopping=self._stopping,
        )

    async def _check_server(self, *, patient: bool) -> None:
        while not self._stopping.is_set():
            try:
                await self._store.check_server()
            except (psycopg.Error, OSError) as error:
                if not patient or not await is_unreachable(error, self._settings.require_dsn(), self._settings):
                    raise
                await self._outage.pause_or_raise(error)
            else:
                self._outage.end()
                return

    async def _wind_down(self) -> None:
        self._pool.release_waiting()
        deadline = asyncio.get_running_loop().time() + self._settings.shutdown_grace_seconds
        if self._doorbell is not None:
            await self._doorbell.stop()  # Producers must notify the remaining workers from now on.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._claimer.release_unanswered()  # The task may have been cancelled during a claim.
                await self._until_idle(finished=False)
        self._executor.breakers.stop()
        await self._pool.stop()
        for attempt in [attempt for attempt in self._in_flight.values() if not attempt.done]:
            attempt.done = True  # The handler has ignored its cancellation.
            self._finisher.collect(attempt, ABANDONED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(5.0, deadline - asyncio.get_running_loop().time())):
                await self._until_idle(finished=True)
                # Released messages are due, and no other worker knows of retries and successors.
                if self.telemetry.counts[LogEvent.CLAIMED] or self.telemetry.counts[LogEvent.CLAIM_LOST]:
                    await self._notifier.notify(self._queues.names)
        self._finishing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._finishing  # The finisher's error ends the worker.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINAL_WRITE_SECONDS):
                await self._finisher.write_minimal_ends()
        self._finisher.report_unwritten()

    async def _close(self) -> None:
        if self._doorbell is not None:
            await self._doorbell.stop()
        await self._lease_keeper.stop()
        await self._executor.close()
        if self._django is not None:
            await self._django.close()
        await self._store.close()

    async def _until_idle(self, *, finished: bool) -> None:
        """Wait until no handler runs, or with `finished` until all outcomes are written except refused ones."""
        while (self._finisher.unwritten_count and not self._finishing.done()) if finished else self._pool.open_count:
            self._signals.progress.clear()
            await self._signals.progress.wait()


def _name_for(settings: Settings) -> str:
    """Return a unique name for each run of a worker: it is part of the fence."""
    return f"{settings.worker_name or socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
