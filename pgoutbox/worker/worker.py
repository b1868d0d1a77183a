"""The worker: connects its parts, starts them and stops them.

A worker has one event loop. Its main task runs the poll loop. Claimed messages go from the claimer through the loader
to the attempt pool, whose attempts run in tasks. The finisher, a separate task, writes their results in batches, on
another connection. So claims, handlers and finishes overlap, and none of them waits for a single message. Each part
knows only the parts below it; this module connects them.

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
from pgoutbox.topics import ALERT_TOPIC
from pgoutbox.transports import Transport
from pgoutbox.transports.readiness import lacks_of
from pgoutbox.transports.redirect import RedirectRules
from pgoutbox.transports.registry import complete
from pgoutbox.worker.alert import handlers_of
from pgoutbox.worker.attempt import ABANDONED
from pgoutbox.worker.claim_planner import QueueSchedule, name_all, parse_queues
from pgoutbox.worker.claimer import Claimer
from pgoutbox.worker.django_orm import DjangoConnections
from pgoutbox.worker.doorbell import Doorbell
from pgoutbox.worker.executor import AttemptExecutor
from pgoutbox.worker.failure_alerts import FailureAlerts
from pgoutbox.worker.finisher import Finisher
from pgoutbox.worker.leases import LeaseKeeper
from pgoutbox.worker.loader import Loader
from pgoutbox.worker.maintenance import Maintenance
from pgoutbox.worker.payloads import LargeTexts, SampledPayload, find_unreadable, sample_parameters
from pgoutbox.worker.poll_loop import PollLoop
from pgoutbox.worker.pool import AttemptPool
from pgoutbox.worker.presence import Presence
from pgoutbox.worker.run_state import RunState
from pgoutbox.worker.threads import own_default_threads

_log = logging.getLogger("pgoutbox.worker")

Mode = Literal["run", "once", "drain"]

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
# Threads beside those of the attempts, for the event loop's look-ups of names.
_LOOK_UP_THREADS = 4


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
        self._middlewares = outbox.middlewares
        self._fixed_destinations = {
            topic.name: topic.destination for topic in outbox.topics.values() if isinstance(topic.destination, str)
        }
        self._defined_queues = sorted({topic.queue for topic in outbox.topics.values() if topic.queue is not None})
        self._queues = name_all(parse_queues(queues), self._defined_queues)
        self._is_default = self._queues == name_all(parse_queues(outbox.default_queues), self._defined_queues)
        served = {share.name for share in self._queues}
        own = self._handlers.keys() - {ALERT_TOPIC, *outbox.hooks.values()}  # These follow the queues of others.
        queue_of = {name: topic.queue or "default" for name, topic in outbox.topics.items()}
        self._unserved = {name: q for name in sorted(own) if (q := queue_of.get(name, "default")) not in served}
        self._own_topics = own - self._unserved.keys()
        self.name: str = ""  # Of the last run. One that is drawn here would be that of all children of a fork.
        self.telemetry: Telemetry = Telemetry(_log)
        RedirectRules.of(self._settings.redirect)
        self._keyring = keyring_of(self._settings.encryption_keys)
        self._transports = transports if transports is not None else complete(outbox.transports, self._settings)
        self._stopping = asyncio.Event()
        self._run: _Run | None = None

    async def run(self) -> None:
        """Work until `stop()`. Wait first for a server that is down, starting or full, or for the adoption of a copy.

        Raises `ConfigurationError` or `SchemaError` for an unsuitable database, and the driver's error for a permanent
        refusal, such as a wrong password. Raises `PgOutboxError` if half of the slots are lost to handlers that do not
        return after their timeout: the error names their topics, and only a restart of the process helps.
        """
        async with self._at_work(ends_by_itself=False) as run:
            await run.poll_loop.run()

    async def run_once(self, *, max_messages: int | None = None, max_seconds: float | None = None) -> None:
        """Deliver all messages that are due now, then return. Overlapping runs share the work.

        It claims at most `max_messages`, and none after `max_seconds`. Then it stops like a worker: running handlers
        may end within the grace time.

        Unlike `run`, it and `drain` do not wait for the server: they raise an error of the first connection, and
        `SchemaError` in a copy of the database.

        Raises `ValueError` for a bound that is not positive.
        """
        for name, bound in (("max_messages", max_messages), ("max_seconds", max_seconds)):
            if bound is not None and not bound > 0:
                raise ValueError(f"{name}: must be greater than 0, not {bound}")
        async with self._ending_after(max_seconds), self._at_work(ends_by_itself=True) as run:
            claimed_count = await run.poll_loop.deliver_due(most=max_messages)
            if await run.failure_alerts.look():
                left = None if max_messages is None else max_messages - claimed_count
                await run.poll_loop.deliver_due(most=left)

    @contextlib.asynccontextmanager
    async def _ending_after(self, seconds: float | None) -> AsyncIterator[None]:
        if seconds is None:
            yield
            return
        is_over = False

        def end() -> None:
            nonlocal is_over
            is_over = not self._stopping.is_set()
            self.stop()

        timer = asyncio.get_running_loop().call_later(seconds, end)
        try:
            yield
        finally:
            timer.cancel()
            if is_over:
                self._stopping.clear()  # The time of one run does not stop the next one.

    async def drain(self) -> None:
        """Work until no message is due, in flight or waiting for a retry in these queues.

        It does not wait for scheduled messages that were never attempted.
        """
        async with self._at_work(ends_by_itself=True) as run:
            await run.poll_loop.drain()
            if await run.failure_alerts.look():
                await run.poll_loop.deliver_due()  # A drain does not wait for its own alerts.

    def stop(self) -> None:
        """Begin to stop: stop claiming, wait for handlers up to the grace time, release the rest. Idempotent.

        Call it on the event loop.
        """
        if self._run is None:
            self._stopping.set()
        else:
            self._run.state.stop()

    @property
    def has_running_handlers(self) -> bool:
        """Whether a handler still runs after the worker has ended: in a thread, or ignoring its cancellation."""
        return self._run is not None and self._run.pool.has_running_handlers

    def status(self) -> WorkerStatus:
        """The worker's health. It only reads attributes, so that any thread can call it."""
        run = self._run
        return WorkerStatus(is_stopping=self._stopping.is_set()) if run is None else run.status()

    @contextlib.asynccontextmanager
    async def _at_work(self, *, ends_by_itself: bool) -> AsyncIterator[_Run]:
        async with TelemetryServer(
            self, self._settings, self.telemetry, serves=not ends_by_itself
        ) as self.telemetry_server:
            run = self._run = self._new_run(ends_by_itself=ends_by_itself)
            async with run.at_work(), self.telemetry_server.at_work(run.state.store.server_time):
                yield run

    def _new_run(self, *, ends_by_itself: bool) -> _Run:
        if os.environ.get("OUTBOX_WORKER") == "kernel":
            from pgoutbox.worker.kernel_run import KernelRun

            return KernelRun(self, ends_by_itself=ends_by_itself)
        return _Run(self, ends_by_itself=ends_by_itself)


class _Run:
    """The parts of one run of a worker. With `ends_by_itself` it does once what a worker does periodically."""

    def __init__(self, worker: Worker, *, ends_by_itself: bool) -> None:
        settings, telemetry, handlers = worker._settings, worker.telemetry, worker._handlers
        self._worker = worker
        self._settings = settings
        self._telemetry = telemetry
        self._ends_by_itself = ends_by_itself
        self._is_started = False
        # Another run of this worker may be at work, or its handlers may still hold messages in its name.
        worker.name = _name_for(settings)
        store = Store(settings, worker=worker.name, hooks=worker._hooks)
        self.state = state = RunState(
            settings,
            store,
            telemetry,
            queues=QueueSchedule(worker._queues, now=elapsed_clock()),
            topics=sorted(handlers),
            stopping=worker._stopping,
            own_topics=worker._own_topics,
        )
        self._django = DjangoConnections.in_use()
        if self._django is not None:
            handlers = {topic: self._django.around(handler) for topic, handler in handlers.items()}
        self._maintenance = Maintenance(settings, store, telemetry, is_periodic=not ends_by_itself)
        self.failure_alerts = FailureAlerts(state, is_periodic=not ends_by_itself)
        self._presence = Presence(state, defined=worker._defined_queues, ends_by_itself=ends_by_itself)
        self.finisher = Finisher(state)
        self.executor = AttemptExecutor(
            state, worker._transports, middleware=worker._middlewares, finisher=self.finisher
        )
        self._large_texts = LargeTexts(state, keyring=worker._keyring)
        self.pool = AttemptPool(
            state, self.executor.run, large_texts=self._large_texts, on_outcome=self.finisher.collect
        )
        self._lease_keeper = LeaseKeeper(state, self.pool)
        self._loader = loader = Loader(
            state,
            handlers,
            keyring=worker._keyring,
            pool=self.pool,
            finisher=self.finisher,
            lease_keeper=self._lease_keeper,
        )
        hold_topics = sorted(topic for topic, handler in handlers.items() if handler.on_unknown == "hold")
        self._claimer = Claimer(state, hold_topics=hold_topics, loader=loader, finisher=self.finisher)
        listens = settings.listen and not ends_by_itself
        self.doorbell = Doorbell(settings, state.topics, state.signals, telemetry) if listens else None
        self.poll_loop = PollLoop(
            state, claimer=self._claimer, pool=self.pool, finisher=self.finisher, doorbell=self.doorbell
        )

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Start all parts, and stop them at the end."""
        own_default_threads(self.state.settings.concurrency + _LOOK_UP_THREADS)
        counts = self._telemetry.counts.copy()
        try:
            finishing = await self._start()
            try:
                if not self.state.stopping.is_set():
                    self._report_start()
                    await self._report_unreadable()
                await self._presence.start()
                if self._ends_by_itself:
                    await self.executor.breakers.inherit()
                async with self._maintenance, self.failure_alerts:
                    yield
                    if self._ends_by_itself:
                        await self._maintenance.turn_unless(self.state.stopping)
            finally:
                await self._wind_down(finishing)
                if self._ends_by_itself:
                    await self._report_run(counts)
        finally:
            await self._close()
            self._telemetry.report(
                logging.DEBUG if self._ends_by_itself else logging.INFO,
                LogEvent.WORKER_STOPPED,
                "worker stopped",
                worker=self.state.store.worker,
            )
        if self.state.error is not None:
            raise self.state.error

    def status(self) -> WorkerStatus:
        """See `Worker.status`."""
        state, now = self.state, elapsed_clock()
        polled_seconds_ago = now - state.queues.polled_at
        is_stopping, is_copy = state.stopping.is_set(), state.outage.is_copy
        if not self._is_started:  # Without slots it does not count as a worker.
            return WorkerStatus(is_stopping=is_stopping, is_copy=is_copy, polled_seconds_ago=polled_seconds_ago)
        claimed_at = None if self._telemetry.measures is None else self._telemetry.measures.claimed_at
        return WorkerStatus(
            is_started=True,
            is_stopping=is_stopping,
            in_flight=len(state.in_flight),
            slots=self.pool.capacity,
            busy=self.pool.running_count,
            abandoned=self.pool.outlived_count,
            is_listener_up=None if self.doorbell is None else self.doorbell.is_up,
            is_database_up=not state.outage.is_ongoing,
            is_copy=is_copy,
            polled_seconds_ago=polled_seconds_ago,
            claimed_seconds_ago=None if claimed_at is None else now - claimed_at,
            outcomes_refused=self.finisher.refused_count,
            breakers_open=self.executor.breakers.open_count,
            failure=None if state.error is None else str(state.error),
        )

    async def _start(self) -> asyncio.Task[None]:
        """Connect, and return the task of the finisher. If it ends by an error, the worker stops."""
        await self._check_server()
        self._lease_keeper.start()
        if self.doorbell is not None and not self.state.stopping.is_set():
            await self.doorbell.start()
        finishing = asyncio.create_task(self.finisher.run(), name="pgoutbox-finisher")
        finishing.add_done_callback(lambda task: None if task.cancelled() else self.state.stop())
        self._is_started = True
        return finishing

    async def _check_server(self) -> None:
        state = self.state
        while not state.stopping.is_set():
            try:
                await state.store.check_server()
            except (psycopg.Error, OSError) as error:
                settings = self._settings
                if self._ends_by_itself or not await is_unreachable(error, settings.require_dsn(), settings):
                    raise
                await state.outage.pause_or_raise(error)
            else:
                state.outage.end()
                return

    async def _wind_down(self, finishing: asyncio.Task[None]) -> None:
        state = self.state
        self.pool.release_waiting()
        self._large_texts.stop()
        deadline = asyncio.get_running_loop().time() + self._settings.shutdown_grace_seconds
        if self.doorbell is not None:
            await self.doorbell.stop()  # Producers must notify the remaining workers from now on.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._claimer.release_unanswered()  # The task may have been cancelled during a claim.
                while self.pool.open_count:
                    await self._until_progress()
        self.executor.breakers.stop()
        await self.pool.stop()
        for attempt in [attempt for attempt in state.in_flight.values() if not attempt.done]:
            attempt.done = True  # The handler has ignored its cancellation.
            self.finisher.collect(attempt, ABANDONED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(5.0, deadline - asyncio.get_running_loop().time())):
                while self.finisher.unwritten_count and not finishing.done():  # A refused outcome may stay refused.
                    await self._until_progress()
                # Released messages are due, and no other worker knows of retries and successors.
                if self._telemetry.counts[LogEvent.CLAIMED] or self._telemetry.counts[LogEvent.CLAIM_LOST]:
                    await state.notifier.notify(state.queues.names)
        finishing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await finishing  # The finisher's error ends the worker.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINAL_WRITE_SECONDS):
                await self.finisher.write_minimal_ends()
                await self.finisher.end_claims()
        self.finisher.report_unwritten()

    async def _until_progress(self) -> None:
        self.state.signals.progress.clear()
        await self.state.signals.progress.wait()

    async def _close(self) -> None:
        if self.doorbell is not None:
            await self.doorbell.stop()
        await self._lease_keeper.stop()
        await self.executor.close()
        await self._presence.stop(self.executor.breakers.memory)
        if self._django is not None:
            await self._django.close()
        await self.state.store.close()

    def _report_start(self) -> None:
        worker = self._worker
        self._telemetry.report(
            logging.DEBUG if self._ends_by_itself else logging.INFO,  # Cron starts a run every minute.
            LogEvent.WORKER_STARTED,
            "worker started",
            worker=self.state.store.worker,
            queues=self.state.queues.names,
        )
        if worker._unserved:
            self._telemetry.report(
                # Queues that were named may share the work with other workers.
                logging.WARNING if worker._is_default and not self._ends_by_itself else logging.DEBUG,
                LogEvent.TOPICS_NOT_SERVED,
                "this worker does not serve the queues of these topics: name them with --queue, or use --queue '*'",
                queues=sorted(set(worker._unserved.values())),
                topics=list(worker._unserved),
            )
        functions = {topic: handler.function for topic, handler in worker._handlers.items()}
        for lack in lacks_of(self._settings, worker._transports, functions, worker._fixed_destinations):
            self._telemetry.report(
                logging.WARNING,
                LogEvent.TRANSPORT_NOT_READY,
                lack.text,
                setting=lack.variable,
                reason=lack.reason,
                topics=lack.topics,
            )

    async def _report_unreadable(self) -> None:
        """Warn about pending payloads that do not fit the models of this worker. A run of cron does not."""
        handlers = self._worker._handlers
        parameters = sample_parameters(handlers, served=self.state.queues.names)
        if self._ends_by_itself or not parameters["topics"]:
            return
        with contextlib.suppress(psycopg.Error, OSError):  # Only people depend on it.
            rows = map(SampledPayload._make, await self.state.store.pending_payloads(parameters))
            names = self._settings.redacted_names
            for topic, found in find_unreadable(rows, handlers, self._worker._keyring, names).items():
                self._telemetry.report(
                    logging.WARNING,
                    LogEvent.PAYLOAD_UNREADABLE,
                    "pending payloads do not fit the model of this worker",
                    topic=topic,
                    message_count=found.message_count,
                    sampled_count=found.sampled_count,
                    reason=found.reason,
                )

    async def _report_run(self, before: Mapping[LogEvent, int]) -> None:
        counts = {event.value: self._telemetry.counts[event] - before.get(event, 0) for event in _OUTCOMES}
        left: Mapping[str, int] = {}
        if unserved := sorted(set(self._worker._unserved.values())):
            with contextlib.suppress(psycopg.Error, OSError):  # The run itself has ended well.
                left = await self.state.store.count_due(unserved)
        self._telemetry.report(
            logging.INFO,
            LogEvent.RUN_DONE,
            "run done; messages are left due in queues that it does not serve: name them with --queue"
            if left
            else "run done",
            worker=self.state.store.worker,
            **counts,
            left_due=sum(left.values()),
            left_queues=list(left),
        )


def _name_for(settings: Settings) -> str:
    """Return a unique name for each run of a worker: it is part of the fence."""
    return f"{settings.worker_name or socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
