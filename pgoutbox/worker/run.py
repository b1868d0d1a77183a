"""A run of a worker: connects its parts, starts them and stops them.

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
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import Store
from pgoutbox.database.worker_connection import is_unreachable
from pgoutbox.encryption import Keyring
from pgoutbox.handlers import Handler, Middleware
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.observability.measures import WorkerStatus
from pgoutbox.settings import Settings
from pgoutbox.transports import Transport
from pgoutbox.transports.readiness import lacks_of
from pgoutbox.worker.attempt import ABANDONED, Attempt, AttemptResult
from pgoutbox.worker.claim_planner import QueueSchedule
from pgoutbox.worker.claimer import Claimer
from pgoutbox.worker.django_orm import DjangoConnections
from pgoutbox.worker.doorbell import Doorbell
from pgoutbox.worker.executor import AttemptExecutor
from pgoutbox.worker.failure_alerts import FailureAlerts
from pgoutbox.worker.finisher import Finisher
from pgoutbox.worker.leases import LeaseKeeper
from pgoutbox.worker.loader import Collector, Loader
from pgoutbox.worker.maintenance import Maintenance
from pgoutbox.worker.payloads import LargeTexts, SampledPayload, find_unreadable, sample_parameters
from pgoutbox.worker.poll_loop import PollLoop
from pgoutbox.worker.pool import AttemptPool
from pgoutbox.worker.presence import Presence
from pgoutbox.worker.queues import QueueShare
from pgoutbox.worker.run_state import RunState
from pgoutbox.worker.signals import Signals
from pgoutbox.worker.threads import own_default_threads

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker has read from its outbox and its settings, for each of its runs.

    `unserved` are the topics of its handlers whose queue it does not serve, each with that queue, and `own_topics` are
    those whose queue it serves. `hooks` are the topics with a hook for failures, each with the attempts of that
    message.
    """

    settings: Settings
    telemetry: Telemetry
    handlers: Mapping[str, Handler]
    hooks: Mapping[str, int]
    middlewares: Sequence[Middleware]
    transports: Mapping[str, Transport]
    fixed_destinations: Mapping[str, str]
    keyring: Keyring | None
    queues: Sequence[QueueShare]
    defined_queues: Sequence[str]
    is_default: bool
    unserved: Mapping[str, str]
    own_topics: Set[str]
    stopping: asyncio.Event


class WorkerRun:
    """The parts of one run of a worker. With `ends_by_itself` it does once what a worker does periodically."""

    signals: type[Signals] = Signals

    def __init__(self, setup: Setup, *, ends_by_itself: bool) -> None:
        settings, telemetry, handlers = setup.settings, setup.telemetry, setup.handlers
        self._setup = setup
        self._settings = settings
        self._telemetry = telemetry
        self._ends_by_itself = ends_by_itself
        self._is_started = False
        # Another run of this worker may be at work, or its handlers may still hold messages in its name.
        store = Store(settings, worker=_name_for(settings), hooks=setup.hooks)
        self.state = state = RunState(
            settings,
            store,
            telemetry,
            queues=QueueSchedule(setup.queues, now=elapsed_clock()),
            topics=sorted(handlers),
            stopping=setup.stopping,
            own_topics=setup.own_topics,
            signals=self.signals,
        )
        self._django = DjangoConnections.in_use()
        if self._django is not None:
            handlers = {topic: self._django.around(handler) for topic, handler in handlers.items()}
        self._maintenance = Maintenance(settings, store, telemetry, is_periodic=not ends_by_itself)
        self.failure_alerts = FailureAlerts(state, is_periodic=not ends_by_itself)
        self._presence = Presence(state, defined=setup.defined_queues, ends_by_itself=ends_by_itself)
        listens = settings.listen and not ends_by_itself
        self.doorbell = Doorbell(settings, state.topics, state.signals, telemetry) if listens else None
        self._hold_topics = sorted(topic for topic, handler in handlers.items() if handler.on_unknown == "hold")
        self._compose(handlers)

    def _compose(self, handlers: Mapping[str, Handler]) -> None:
        """Create what claims and finishes."""
        self.finisher = Finisher(self.state)
        loader = self._new_loader(handlers, self.finisher)
        self._claimer = Claimer(self.state, hold_topics=self._hold_topics, loader=loader, finisher=self.finisher)
        self.poll_loop = PollLoop(
            self.state, claimer=self._claimer, pool=self.pool, finisher=self.finisher, doorbell=self.doorbell
        )

    def _new_loader(self, handlers: Mapping[str, Handler], collector: Collector) -> Loader:
        """Create what runs attempts, whose ends go to the collector."""
        state, setup = self.state, self._setup
        self.executor = AttemptExecutor(state, setup.transports, middleware=setup.middlewares, collector=collector)
        self._large_texts = LargeTexts(state, keyring=setup.keyring)
        self.pool = AttemptPool(state, self.executor.run, large_texts=self._large_texts, on_outcome=collector.collect)
        self._lease_keeper = LeaseKeeper(state, self.pool)
        return Loader(
            state,
            handlers,
            keyring=setup.keyring,
            pool=self.pool,
            collector=collector,
            lease_keeper=self._lease_keeper,
        )

    def _write(self) -> Coroutine[None, None, None]:
        """Write the ends of attempts, until cancelled."""
        return self.finisher.run()

    async def _release_unanswered(self) -> None:
        await self._claimer.release_unanswered()

    @property
    def unwritten_count(self) -> int:
        """Number of attempts whose end must still be written."""
        return self.finisher.unwritten_count

    @property
    def refused_count(self) -> int:
        """Number of attempts whose end the database refuses."""
        return self.finisher.refused_count

    async def _write_last(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINAL_WRITE_SECONDS):
                await self.finisher.write_minimal_ends()
                await self.finisher.end_claims()
        self.finisher.report_unwritten()

    def collect(self, attempt: Attempt, result: AttemptResult) -> None:
        """Take over the end of an attempt."""
        self.finisher.collect(attempt, result)

    async def work(self) -> None:
        """Claim until the run stops."""
        await self.poll_loop.run()

    async def deliver_due(self, *, most: int | None = None) -> int:
        """Claim and deliver due messages, at most this number. Return the number."""
        return await self.poll_loop.deliver_due(most=most)

    async def drain(self) -> None:
        """Claim and deliver until no message is owed."""
        await self.poll_loop.drain()

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
            outcomes_refused=self.refused_count,
            breakers_open=self.executor.breakers.open_count,
            failure=None if state.error is None else str(state.error),
        )

    async def _start(self) -> asyncio.Task[None]:
        """Connect, and return the task of the finisher. If it ends by an error, the worker stops."""
        await self._check_server()
        self._lease_keeper.start()
        if self.doorbell is not None and not self.state.stopping.is_set():
            await self.doorbell.start()
        finishing = asyncio.create_task(self._write(), name="pgoutbox-finisher")
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
                await self._release_unanswered()  # The task may have been cancelled during a claim.
                while self.pool.open_count:
                    await self._until_progress()
        self.executor.breakers.stop()
        await self.pool.stop()
        for attempt in [attempt for attempt in state.in_flight.values() if not attempt.done]:
            attempt.done = True  # The handler has ignored its cancellation.
            self.collect(attempt, ABANDONED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(5.0, deadline - asyncio.get_running_loop().time())):
                while self.unwritten_count and not finishing.done():  # A refused outcome may stay refused.
                    await self._until_progress()
                # Released messages are due, and no other worker knows of retries and successors.
                if self._telemetry.counts[LogEvent.CLAIMED] or self._telemetry.counts[LogEvent.CLAIM_LOST]:
                    await state.notifier.notify(state.queues.names)
        finishing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await finishing  # The finisher's error ends the worker.
        await self._write_last()

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
        setup = self._setup
        self._telemetry.report(
            logging.DEBUG if self._ends_by_itself else logging.INFO,  # Cron starts a run every minute.
            LogEvent.WORKER_STARTED,
            "worker started",
            worker=self.state.store.worker,
            queues=self.state.queues.names,
        )
        if setup.unserved:
            self._telemetry.report(
                # Queues that were named may share the work with other workers.
                logging.WARNING if setup.is_default and not self._ends_by_itself else logging.DEBUG,
                LogEvent.TOPICS_NOT_SERVED,
                "this worker does not serve the queues of these topics: name them with --queue, or use --queue '*'",
                queues=sorted(set(setup.unserved.values())),
                topics=list(setup.unserved),
            )
        functions = {topic: handler.function for topic, handler in setup.handlers.items()}
        for lack in lacks_of(self._settings, setup.transports, functions, setup.fixed_destinations):
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
        handlers = self._setup.handlers
        parameters = sample_parameters(handlers, served=self.state.queues.names)
        if self._ends_by_itself or not parameters["topics"]:
            return
        with contextlib.suppress(psycopg.Error, OSError):  # Only people depend on it.
            rows = map(SampledPayload._make, await self.state.store.pending_payloads(parameters))
            names = self._settings.redacted_names
            for topic, found in find_unreadable(rows, handlers, self._setup.keyring, names).items():
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
        if unserved := sorted(set(self._setup.unserved.values())):
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
