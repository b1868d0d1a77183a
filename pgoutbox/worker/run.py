"""A run of a worker: connects its parts, starts them and stops them.

A worker has one event loop. One task runs the kernel, which claims messages and writes the ends of attempts. Claimed
messages go through the loader to the attempt pool, whose attempts run in tasks. So a trip to the database and handlers
overlap, and none of them waits for a single message. Each part knows only those below it; this module connects them.

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
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database import sql
from pgoutbox.database.server import OldPackageError
from pgoutbox.database.store import Store, check_server
from pgoutbox.database.worker_connection import REST_SECONDS, is_unreachable
from pgoutbox.encryption import Keyring
from pgoutbox.handlers import Handler, Middleware, handled_by
from pgoutbox.kernel import statements
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.observability.measures import WorkerStatus
from pgoutbox.settings import Settings
from pgoutbox.transports import Transport
from pgoutbox.transports.readiness import lacks_of
from pgoutbox.worker.beside.failure_alerts import FailureAlerts
from pgoutbox.worker.beside.maintenance import Maintenance
from pgoutbox.worker.beside.presence import Presence
from pgoutbox.worker.breakers.circuit_breakers import CircuitBreakers
from pgoutbox.worker.executor import AttemptExecutor
from pgoutbox.worker.fair.turns import FairLink
from pgoutbox.worker.kernel_run import MANY_REFUSED, KernelAttempts, Link, kernel_of
from pgoutbox.worker.leases import LeaseKeeper, LeaseThread
from pgoutbox.worker.listener import new_doorbell
from pgoutbox.worker.loader import Loader
from pgoutbox.worker.outcomes import Outcomes
from pgoutbox.worker.payloads import LargeTexts, SampledPayload, find_unreadable, sample_parameters
from pgoutbox.worker.pool import AttemptPool
from pgoutbox.worker.queues import QueueShare, Turns
from pgoutbox.worker.run_state import RunState
from pgoutbox.worker.schedules.ticker import Declared, Ticker
from pgoutbox.worker.slots import Slots
from pgoutbox.worker.threads import AttemptThreads, own_default_threads
from pgoutbox.worker.transactional.django_orm import DjangoConnections

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
_REPORT_PAUSE_SECONDS = 0.2  # A migration has locked the reports of workers, and may refuse this package.
_MAX_OTHER_QUEUES = 1_000
_MAX_LEFT_DUE = 1_000
_POLL_SECONDS = 1.0  # For the retries of other workers during a drain.
# Threads beside those of the attempts, for the event loop's look-ups of names.
_LOOK_UP_THREADS = 4


@dataclass(frozen=True, slots=True)
class Shared:
    """What the workers of several databases share: the slots, the threads with their connections, the transports."""

    slots: Slots
    threads: AttemptThreads
    lease_thread: LeaseThread
    transports: Mapping[str, Transport]
    django: DjangoConnections | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker has read from its outbox and its settings, for each of its runs.

    `unserved` are the topics of its handlers whose queue it does not serve, each with that queue, and `own_topics` are
    those whose queue it serves. `hooks` are the topics with a hook for failures, each with the attempts of that
    message. `shared` is what the workers of several databases share in this process.
    """

    settings: Settings
    telemetry: Telemetry
    handlers: Mapping[str, Handler]
    hooks: Mapping[str, int]
    schedules: Sequence[Declared]
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
    shared: Shared | None = None


class _LeftQueue(NamedTuple):
    """A queue that a run does not serve and that has due messages, in the order of `sql.COUNT_DUE_ELSEWHERE`."""

    name: str
    messages: int
    is_capped: bool
    is_served: bool


class WorkerRun:
    """The parts of one run of a worker. With `ends_by_itself` it does once what a worker does periodically."""

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
            queues=Turns(setup.queues),
            topics=handled_by(handlers),
            stopping=setup.stopping,
            own_topics=setup.own_topics,
            is_one_of_many=setup.shared is not None,
        )
        self._django = DjangoConnections.in_use() if setup.shared is None else setup.shared.django
        if self._django is not None:
            handlers = {topic: self._django.around(handler) for topic, handler in handlers.items()}
        self._maintenance = Maintenance(settings, store, telemetry)
        self.failure_alerts = FailureAlerts(state)
        self._presence = Presence(state, defined=setup.defined_queues, ends_by_itself=ends_by_itself)
        listens = settings.listen and not ends_by_itself
        self.doorbell = new_doorbell(state) if listens else None
        self._hold_topics = sorted(topic for topic, handler in handlers.items() if handler.on_unknown == "hold")
        self._compose(handlers)

    def _compose(self, handlers: Mapping[str, Handler]) -> None:
        """Create the kernel, and what runs its attempts."""
        state, setup = self.state, self._setup
        self.breakers = CircuitBreakers(state, setup.transports)
        self._outcomes = outcomes = Outcomes(state, self.breakers)
        self.executor = AttemptExecutor(
            state,
            setup.transports,
            middleware=setup.middlewares,
            on_outcome=outcomes.collect,
            breakers=self.breakers,
            threads=None if setup.shared is None else setup.shared.threads,
        )
        self._large_texts = LargeTexts(state, keyring=setup.keyring)
        self.pool = AttemptPool(
            state,
            self.executor.run,
            large_texts=self._large_texts,
            on_outcome=outcomes.collect,
            slots=None if setup.shared is None else setup.shared.slots,
        )
        self._lease_keeper = LeaseKeeper(
            state, self.pool, thread=None if setup.shared is None else setup.shared.lease_thread
        )
        loader = Loader(
            state,
            handlers,
            keyring=setup.keyring,
            pool=self.pool,
            outcomes=outcomes,
            lease_keeper=self._lease_keeper,
        )
        self._attempts = KernelAttempts(state, outcomes, pool=self.pool, loader=loader, breakers=self.breakers)
        self._link = Link(state, self._attempts)
        self._refusal: Exception | None = None
        self._is_refused = asyncio.Event()
        self.kernel = kernel_of(
            state,
            self._attempts,
            FairLink(self._link, state),
            hold_topics=self._hold_topics,
            handle_error=self._handle_error,
            bell=self.doorbell,
        )
        self._ticker = Ticker(state.store, self._telemetry, setup.schedules, wake=self.kernel.want)

    async def _handle_error(self, error: BaseException) -> None:
        """Pause after an error that may pass. Any other ends the worker; the ends of its attempts are still written."""
        try:
            await self.state.outage.pause_or_raise(error)
        except Exception as refusal:
            if self._refusal is not None:
                raise  # It can write no ends either.
            self._refusal = refusal
            self.kernel.stop()
            self._is_refused.set()
            if isinstance(refusal, psycopg.Error) and not isinstance(refusal, OldPackageError):
                self._telemetry.report(
                    logging.ERROR,
                    LogEvent.CLAIM_REFUSED,
                    "the database refuses a claim, the worker ends: look for triggers, constraints, rights and damage "
                    "of the tables in the schema pgoutbox",
                    reason=refusal.sqlstate,
                )

    async def _release_unanswered(self) -> None:
        await self.kernel.has_stopped.wait()
        self.pool.release_waiting()  # Messages of the last claim.
        with contextlib.suppress(psycopg.Error, OSError):
            await self._link.release_unanswered()

    @property
    def unwritten_count(self) -> int:
        """Number of attempts whose end must still be written."""
        return self._attempts.unwritten_count + self.kernel.on_the_way

    @property
    def refused_count(self) -> int:
        """Number of attempts whose end the database refuses."""
        return len(self._attempts.refused)

    async def work(self) -> None:
        """Claim until the run stops."""
        self.kernel.claim()
        await self._until(asyncio.Event())
        self.kernel.stop()

    async def deliver_due(self, *, most: int | None = None) -> int:
        """Claim and deliver due messages, at most this number. Return the number."""
        before = self.kernel.claimed_count
        self.kernel.claim(most)
        while not self.state.stopping.is_set():
            await self._until(self.kernel.is_quiet)
            await self.breakers.settle()  # The end of a breaker frees messages.
            if self.kernel.is_quiet.is_set():
                break
        self.kernel.stop()
        return self.kernel.claimed_count - before

    async def drain(self) -> None:
        """Claim and deliver until no message is owed."""
        state = self.state
        while not state.stopping.is_set():
            await self.deliver_due()
            if state.stopping.is_set() or self.refused_count >= MANY_REFUSED:
                return
            parameters = {"queues": state.queues.names, "topics": state.topics}
            ((owed_count,),) = await state.store.claims.fetch(sql.COUNT_OWED, parameters)
            if owed_count <= self.refused_count:
                return
            await self._until(asyncio.Event(), min(_POLL_SECONDS, state.due_seconds or _POLL_SECONDS))

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Start all parts, and stop them at the end."""
        own_default_threads(self.state.settings.concurrency + _LOOK_UP_THREADS)
        counts = self._telemetry.counts.copy()
        background: list[asyncio.Task[None]] = []
        try:
            finishing = await self._start()
            try:
                if not self.state.stopping.is_set():
                    self._report_start()
                    await self._report_unreadable()
                while not await self._presence.report(is_first=True) and not self.state.stopping.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_REPORT_PAUSE_SECONDS):
                            await self.state.stopping.wait()
                if self._ends_by_itself:
                    await self.breakers.inherit()
                    while not (self.state.stopping.is_set() or await self._ticker.tick()):
                        pass  # More schedules may be due.
                works = {"presence": self._presence.keep_reporting()}
                if not self._ends_by_itself:
                    works["maintenance"] = self._maintenance.keep_taking_turns()
                    works["failure-alerts"] = self.failure_alerts.keep_looking()
                    works["schedules"] = self._ticker.keep_ticking()
                background += [asyncio.create_task(work, name=f"pgoutbox-{name}") for name, work in works.items()]
                yield
                if self._ends_by_itself:
                    await self._maintenance.turn_unless(self.state.stopping)
            finally:
                try:
                    await _end(background[1:])
                    await self._maintenance.stop()
                finally:
                    await self._wind_down(finishing)
                if self._ends_by_itself:
                    await self._report_run(counts)
        finally:
            try:
                await _end(background[:1])  # The worker is present until its handlers have ended.
            finally:
                await self._close()
            # One of several databases that cannot be served is tried again and again.
            if self._is_started or self._setup.shared is None:
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
        polled_seconds_ago = now - state.polled_at
        is_stopping, is_copy = state.stopping.is_set(), state.outage.is_copy
        if not self._is_started:  # Without slots it does not count as a worker.
            return WorkerStatus(is_stopping=is_stopping, is_copy=is_copy, polled_seconds_ago=polled_seconds_ago)
        claimed_at = None if self._telemetry.measures is None else self._telemetry.measures.claimed_at
        return WorkerStatus(
            is_started=True,
            is_stopping=is_stopping,
            is_idle=self.kernel.is_quiet.is_set(),
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
            breakers_open=self.breakers.open_count,
            failure=None if state.error is None else str(state.error),
        )

    async def _start(self) -> asyncio.Task[None]:
        """Connect, and return the task of the kernel. If it ends by an error, the worker stops."""
        await self._check_server()
        self._lease_keeper.start()
        if self.doorbell is not None and not self.state.stopping.is_set():
            await self.doorbell.start()
        finishing = asyncio.create_task(self.kernel.run(), name="pgoutbox-kernel")
        finishing.add_done_callback(lambda task: None if task.cancelled() else self.state.stop())
        self._is_started = True
        return finishing

    async def _check_server(self) -> None:
        state = self.state
        while not state.stopping.is_set():
            try:
                await check_server(self._settings)
                await state.store.server_time()  # Refused in a copy of the database.
            except (psycopg.Error, OSError) as error:
                settings = self._settings
                # The worker of several databases tries again by itself, whatever the reason.
                waits = not self._ends_by_itself and self._setup.shared is None
                if not waits or not await is_unreachable(error, settings.require_dsn(), settings):
                    raise
                await state.outage.pause_or_raise(error)
            else:
                state.outage.end()
                return

    async def _wind_down(self, finishing: asyncio.Task[None]) -> None:
        state = self.state
        self.kernel.stop()
        self.pool.release_waiting()
        self._large_texts.stop()
        deadline = state.begin_grace()
        if self.doorbell is not None:
            await self.doorbell.stop()  # Producers must notify the remaining workers from now on.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._release_unanswered()  # The task may have been cancelled during a claim.
                while self.pool.open_count:
                    await self._until_progress()
        self.breakers.stop()
        await self.pool.stop()
        for attempt in [attempt for attempt in state.in_flight.values() if not attempt.done]:
            self._outcomes.abandon(attempt)  # A thread, or a handler that has ignored its cancellation.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(5.0, deadline - asyncio.get_running_loop().time())):
                while self.unwritten_count and not finishing.done():  # A refused outcome may stay refused.
                    await self._until_progress()
        finishing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await finishing  # The kernel's error ends the worker.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINAL_WRITE_SECONDS):
                with contextlib.suppress(psycopg.Error, OSError):
                    await self._link.release_unanswered()
                await self._attempts.write_last(self.kernel)
                # Released messages are due, and no other worker knows of retries and successors.
                if self._telemetry.counts[LogEvent.CLAIMED] or self._telemetry.counts[LogEvent.CLAIM_LOST]:
                    with contextlib.suppress(psycopg.Error, OSError):  # Idle workers look for themselves later.
                        await state.store.claims.fetch(statements.TELL_WORKERS, {"queues": state.queues.names})
        self._attempts.report_unwritten()

    async def _until(self, event: asyncio.Event, seconds: float | None = None) -> None:
        """Wait for the event, for the end of the run, or for so long."""
        waits = [asyncio.ensure_future(one.wait()) for one in (event, self.state.stopping, self._is_refused)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        if self._refusal is not None:
            raise self._refusal

    async def _until_progress(self) -> None:
        self.state.progress.clear()
        await self.state.progress.wait()

    async def _close(self) -> None:
        if self.doorbell is not None:
            await self.doorbell.stop()
        await self._lease_keeper.stop()
        await self.breakers.close()
        shared = self._setup.shared
        await self.executor.close(keeps=() if shared is None else tuple(shared.transports.values()))
        await self._presence.end(self.breakers.memory)
        if self._django is not None and shared is None:
            await self._django.close()
        await self.state.store.close()

    async def rest(self) -> None:
        """Close connections that have not been used for a while, except that of the listener."""
        await self.state.store.rest(REST_SECONDS)

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
                logging.INFO if lack.is_doubtful else logging.WARNING,
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
            rows = map(SampledPayload._make, await self.state.store.claims.fetch(sql.PENDING_PAYLOADS, parameters))
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
        state, paused = self.state, Counter[str]()
        claims, served = state.store.claims, {"queues": state.queues.names, "topics": state.topics}
        elsewhere = {"served": state.queues.names, "prefix": "", "queues": _MAX_OTHER_QUEUES, "cap": _MAX_LEFT_DUE}
        left: list[_LeftQueue] = []
        with contextlib.suppress(psycopg.Error, OSError):  # The run itself has ended well.
            left = list(map(_LeftQueue._make, await claims.fetch(sql.COUNT_DUE_ELSEWHERE, elsewhere)))
            paused.update(dict(await claims.fetch(sql.COUNT_DUE_BY_PAUSED_TOPIC, served)))
        # Another line of the crontab may serve the rest.
        if unserved := [queue for queue in left if not queue.is_served]:
            count = sum(queue.messages for queue in unserved)
            self._telemetry.report(
                logging.WARNING,
                LogEvent.MESSAGES_UNCLAIMED,
                "due messages wait in queues that no worker serves: name the queues with --queue",
                queues=[queue.name for queue in unserved],
                message_count=f"at least {count}" if any(queue.is_capped for queue in unserved) else count,
            )
        text = "run done"
        if left:
            text += "; messages are left due in queues that it does not serve: name them with --queue"
        if paused:
            text += "; messages of paused topics are left due: pgoutbox resume --topic"
        self._telemetry.report(
            logging.INFO,
            LogEvent.RUN_DONE,
            text,
            worker=state.store.worker,
            **counts,
            left_due=sum(queue.messages for queue in left) + paused.total(),
            left_queues=[queue.name for queue in left],
            left_topics=list(paused),
        )


def _name_for(settings: Settings) -> str:
    """Return a unique name for each run of a worker: it is part of the fence."""
    return f"{settings.worker_name or socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel these tasks, and raise the first error of one that failed."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if result is not None and not isinstance(result, asyncio.CancelledError):
            raise result
