"""The worker: claim, dispatch, finish, and sleep until there is more to do.

A worker has one event loop. The main task decides when to poll and when to sleep. Claimed messages go from the claimer
through the loader to the attempt pool, whose attempts run in tasks. The finisher, a separate task, writes their endings
in batches, on another connection. So claims, handlers and finishes overlap, and none of them waits for a single
message. Each part knows only the parts below it; this module connects them. Attempts in flight are in `_held`, from the
claim's answer to the finish's answer. Those whose previous attempt was lost are also in `_suspects`: any of them may
crash this process.

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
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Literal

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import ClaimedRow, Store
from pgoutbox.database.worker_connection import is_unreachable
from pgoutbox.encryption import keyring_of
from pgoutbox.errors import ConfigurationError
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.observability.measures import WorkerStatus
from pgoutbox.observability.server import TelemetryServer
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings
from pgoutbox.transports import Transport
from pgoutbox.transports.readiness import lacks_of_mail
from pgoutbox.transports.redirect import Redirect
from pgoutbox.transports.registry import complete
from pgoutbox.worker.alert import ALERT_TOPIC, alert_handler
from pgoutbox.worker.claim_planner import QueueSchedule, QueueShare
from pgoutbox.worker.claimer import Claimer
from pgoutbox.worker.django_orm import DjangoConnections
from pgoutbox.worker.doorbell import Bell, Doorbell, post_keys
from pgoutbox.worker.executor import AttemptExecutor
from pgoutbox.worker.finisher import Finisher
from pgoutbox.worker.leases import LeaseKeeper
from pgoutbox.worker.loader import Loader
from pgoutbox.worker.maintenance import Maintenance
from pgoutbox.worker.pool import AttemptPool
from pgoutbox.worker.reconnect import Reconnector
from pgoutbox.worker.results import ABANDONED, Attempt
from pgoutbox.worker.stall_watch import StallWatch

_log = logging.getLogger("pgoutbox.worker")

Mode = Literal["run", "once", "drain"]

_MAX_PRODUCERS_PAUSE_SECONDS = 0.1
_LISTENER_DOWN_SWEEP_SECONDS = 1.0
_FOREIGN_WORK_SECONDS = 1.0
_PATIENCE_SECONDS = 0.1
_RING_SECONDS = 1.0
_HOARD_SECONDS = 1.0
_GIVE_UP_SECONDS = 5.0
_FRUITLESS_WAKES = 20
_FRUITLESS_PAUSE_SECONDS = 0.05
# A worker on watch that was woken eight times within this time polls, until it has found no work for a while.
_BRISK_WAKES = 8
_BRISK_SECONDS = 0.25
_LULL_SECONDS = 0.1
_POLL_SECONDS = 0.008


class Worker:
    """Delivers the messages of some queues with the handlers of an outbox.

    `await worker.run()` works until `stop()`; `await worker.run_once()` delivers all due messages and returns;
    `await worker.drain()` also waits for retries. Several workers, on any machines, share the work through the rows.
    Without `settings` and `transports` it takes those of the outbox.

        asyncio.run(Worker(outbox, queues=[QueueShare("critical"), QueueShare("default")]).run_once())
    """

    observer: TelemetryServer

    def __init__(
        self,
        outbox: Outbox,
        *,
        settings: Settings | None = None,
        queues: Sequence[QueueShare] = (QueueShare("default"),),
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        self._settings = settings if settings is not None else outbox.settings
        self._handlers = dict(outbox.handlers)
        if not self._handlers:
            raise ConfigurationError("the outbox has no handlers: register one with @outbox.handler(topic)")
        if self._settings.alert_destination is not None:
            self._handlers.setdefault(ALERT_TOPIC, alert_handler())
        self._topics = sorted(self._handlers)
        self._middlewares = outbox.middlewares
        self._hold_topics = sorted(t for t, h in self._handlers.items() if h.on_unknown == "hold")
        self._queues = QueueSchedule(queues, now=elapsed_clock())
        self.name: str = _name_for(self._settings)
        self.telemetry: Telemetry = Telemetry(_log)
        self._redirect = Redirect.at_start(self._settings.redirect)
        self._keyring = keyring_of(self._settings.encryption_keys)
        self._transports = transports if transports is not None else complete(outbox.transports, self._settings)
        self._open_topics = list(self._topics)  # Topics whose outcomes the database does not refuse.
        self._held: dict[int, Attempt] = {}
        self._suspects: list[Attempt] = []
        self._prefetch = 0
        self._look_from_beginning = True
        self._ring_is_unanswered = False
        self._was_rung = False
        self._rang_at = 0.0
        self._asked_for_idle_at = 0.0
        self._fruitless_count = 0
        self._woken_at: deque[float] = deque(maxlen=_BRISK_WAKES)
        self._is_started = False
        self._stopping = asyncio.Event()
        self._outage = Reconnector(self.telemetry, stopping=self._stopping)
        self._wake = asyncio.Event()  # There may be messages to claim, or the worker must stop.
        self._progress = asyncio.Event()  # An attempt has ended, or its end is written.

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop()`. Wait first for a server that is down, starting or full.

        Raises `ConfigurationError` or `SchemaError` for an unsuitable database, and the driver's error for a permanent
        refusal, such as a wrong password.
        """
        async with (
            self._at_work(listen=self._settings.listen, patient=True, serves=True),
            Maintenance(self._settings, self._store, self.telemetry),
        ):
            await self._work()

    async def run_once(self) -> None:
        """Deliver all messages that are due now, then return. Overlapping runs share the work.

        Unlike `run`, it and `drain` do not wait for the server: they raise an error of the first connection.
        """
        async with self._at_work(listen=False):
            await self._work_off()

    async def drain(self) -> None:
        """Work until no message is due, in flight or waiting for a retry in these queues.

        It does not wait for scheduled messages that were never attempted.
        """
        async with self._at_work(listen=False):
            while not self._stopping.is_set():
                self._wake.clear()
                await self._work_off()
                refused_count = self._finisher.refusals.count_of_open_topics
                if await self._store.count_owed(self._queues.names, self._open_topics) <= refused_count:
                    return
                due = await self._claims.next_due_seconds()
                # Another worker's messages may be pending again at any time, and nothing rings for a drain.
                await self._sleep(_FOREIGN_WORK_SECONDS if due is None else min(due, _FOREIGN_WORK_SECONDS))

    def stop(self) -> None:
        """Begin to stop: stop claiming, wait for handlers up to the grace time, release the rest. Idempotent.

        Call it on the event loop.
        """
        if not self._stopping.is_set():
            self._stopping.set()
            self.telemetry.report(logging.INFO, LogEvent.WORKER_STOPPING, "worker stopping", held_count=len(self._held))
        self._wake.set()
        self._progress.set()

    @contextlib.asynccontextmanager
    async def _at_work(self, *, listen: bool, patient: bool = False, serves: bool = False) -> AsyncIterator[None]:
        async with (
            TelemetryServer(self, self._settings, self.telemetry, serves=serves) as self.telemetry_server,
            self._running(listen=listen, patient=patient),
            self.telemetry_server.at_work(self._store.server_time),
        ):
            yield

    def status(self) -> WorkerStatus:
        """The worker's health. It only reads attributes, so that any thread can call it."""
        claimed_at = None if self.telemetry.measures is None else self.telemetry.measures.claimed_at
        now = elapsed_clock()
        is_started = self._is_started
        return WorkerStatus(
            is_started=is_started,
            is_stopping=self._stopping.is_set(),
            in_flight=len(self._held),
            slots=self._slots.capacity if is_started else 0,
            busy=self._slots.running_count if is_started else 0,
            abandoned=self._slots.outlived_count if is_started else 0,
            is_listener_up=None if not is_started or self._bell is None else self._bell.is_up,
            is_database_up=is_started and not self._outage.is_on,
            looked_seconds_ago=now - self._queues.looked_at,
            claimed_seconds_ago=None if claimed_at is None else now - claimed_at,
            outcomes_refused=self._finisher.refusals.count if is_started else 0,
            topics_halted=len(self._finisher.refusals.halted_topics) if is_started else 0,
            breakers_open=self._attempts.breakers.open_count if is_started else 0,
        )

    @contextlib.asynccontextmanager
    async def _running(self, *, listen: bool, patient: bool = False) -> AsyncIterator[None]:
        self._assemble(listen=listen)
        try:
            await self._check_server(patient=patient)
            self._keeper.start(on_death=self.stop)
            if self._bell is not None and not self._stopping.is_set():
                await self._bell.start()
            self._finishing = asyncio.create_task(self._finisher.run(), name="pgoutbox-finisher")
            self._finishing.add_done_callback(lambda task: None if task.cancelled() else self.stop())
            self._is_started = True
            if not self._stopping.is_set():
                self._report_start()
            try:
                yield
            finally:
                await self._wind_down()
        finally:
            await self._close()
            self.telemetry.report(logging.INFO, LogEvent.WORKER_STOPPED, "worker stopped", worker=self.name)
        self._keeper.check()

    def _report_start(self) -> None:
        self.telemetry.report(
            logging.INFO, LogEvent.WORKER_STARTED, "worker started", worker=self.name, queues=self._queues.names
        )
        if self._redirect is not None:
            self.telemetry.report(logging.WARNING, LogEvent.REDIRECTING, "e-mail is redirected, the rest held back")
        functions = {topic: handler.function for topic, handler in self._handlers.items()}
        for lack in lacks_of_mail(self._settings, self._transports, functions):
            self.telemetry.report(
                logging.WARNING,
                LogEvent.MAIL_NOT_READY,
                "e-mail cannot go out with these settings",
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
        self._store = Store(settings, worker=self.name)
        self._finisher = Finisher(
            self._store,
            self._held,
            batch_size=settings.batch_size,
            redacted_names=settings.redacted_names,
            on_ended=self._note_progress,
            on_written=self._note_written,
            on_released=self._ring_all,
            on_successors=self._wake_for_successors,
            on_pending=self._look_at_everything,
            on_halted=self._halt_topic,
            on_resumed=self._resume_topic,
            telemetry=self.telemetry,
        )
        self._attempts = AttemptExecutor(
            settings,
            self._store,
            self._transports,
            self.telemetry,
            middleware=self._middlewares,
            alert_queue=self._queues.names[0] if ALERT_TOPIC in self._handlers else None,
            collect=self._finisher.collect,
        )
        self._slots = AttemptPool(
            self._attempts.run,
            concurrency=settings.concurrency,
            default_timeout_seconds=settings.handler_timeout_seconds,
            overtime_seconds=settings.lease_seconds,
            on_outcome=self._finisher.collect,
            on_free=self._note_progress,
            telemetry=self.telemetry,
        )
        self._keeper = LeaseKeeper(
            settings,
            self._held,
            self.telemetry,
            worker=self.name,
            on_tick=StallWatch(self.telemetry, work_of=self._slots.work_of).look,
            spare=self._store.claims,
        )
        self._intake = Loader(
            self._store,
            handlers,
            self._held,
            self._outage,
            keyring=self._keyring,
            ensure_lease=self._keeper.ensure,
            telemetry=self.telemetry,
        )
        self._claims = Claimer(
            self._store,
            self._queues,
            self._outage,
            topics=self._open_topics,
            hold_topics=self._hold_topics,
            held=self._held,
            suspects=self._suspects,
            take_over=self._take_over,
            stopping=self._stopping,
            telemetry=self.telemetry,
        )
        self._bell = None
        if listen:
            self._bell = Doorbell(
                settings,
                self._open_topics,
                on_ring=self._on_ring,
                on_check=self._look_again,
                telemetry=self.telemetry,
            )

    async def _check_server(self, *, patient: bool) -> None:
        while not self._stopping.is_set():
            try:
                await self._store.check_server()
            except (psycopg.Error, OSError) as error:
                if not patient or not await is_unreachable(error, self._settings.require_dsn(), self._settings):
                    raise
                await self._outage.retry_or_raise(error)
            else:
                self._outage.end()
                return

    async def _wind_down(self) -> None:
        self._slots.give_back()
        deadline = asyncio.get_running_loop().time() + self._settings.shutdown_grace_seconds
        if self._bell is not None:
            await self._bell.stop()  # Producers must ring the remaining workers from now on.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._claims.release_unanswered()  # The task may have been cancelled during a claim.
                await self._until_idle(finished=False)
        self._attempts.breakers.stop()
        await self._slots.stop()
        for attempt in [attempt for attempt in self._held.values() if not attempt.done]:
            attempt.done = True  # The handler has ignored its cancellation.
            self._finisher.collect(attempt, ABANDONED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(5.0, deadline - asyncio.get_running_loop().time())):
                await self._until_idle(finished=True)
                # Released messages are due, and no other worker knows of retries and successors.
                if self.telemetry.counts[LogEvent.CLAIMED]:
                    await self._ring_all(self._queues.names)
        self._finishing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._finishing  # The finisher's error ends the worker.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                await self._finisher.give_up()
        self._finisher.report_unwritten()

    async def _close(self) -> None:
        if self._bell is not None:
            await self._bell.stop()
        await self._keeper.stop()
        await self._attempts.close()
        if self._django is not None:
            await self._django.close()
        await self._store.close()

    @property
    def _unwritten_count(self) -> int:
        """Number of messages in flight, without those whose outcome the database refuses."""
        return max(0, len(self._held) - self._finisher.refusals.count)

    async def _until_idle(self, *, finished: bool) -> None:
        """Wait until no handler runs, or with `finished` until all outcomes are written except refused ones."""
        while (self._unwritten_count and not self._finishing.done()) if finished else self._slots.open_count:
            self._progress.clear()
            await self._progress.wait()

    # --- claim --------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        may_leave_out_others = True
        while not self._stopping.is_set():
            self._wake.clear()
            self._progress.clear()
            room = self._room()
            if room == 0:
                await self._stand_down()
                await self._ring_if_saturated()
                await self._until_progress()
                continue
            # A ring means a fresh message, so poll for those first; then poll all lanes, so that retries are not
            # starved.
            fresh_only = may_leave_out_others and self._ring_is_unanswered
            may_leave_out_others = not fresh_only
            from_beginning = False
            if fresh_only:
                self._ring_is_unanswered = False
            else:
                from_beginning, self._look_from_beginning = self._look_from_beginning, False
            found = await self._claims.look(room, from_beginning=from_beginning, fresh_only=fresh_only)
            # The worker may only sleep after a poll for all due messages.
            self._look_from_beginning |= not (found and self._claims.work_ahead)
            if found:
                await self._note_found()
            elif found == 0 and from_beginning and not self._claims.work_ahead:
                await self._rest()

    async def _work_off(self) -> None:
        from_beginning = True
        while not self._stopping.is_set():
            self._progress.clear()
            room = self._room()
            if room == 0:
                await self._until_progress()
                continue
            # A message whose attempt ends during the claim may be due again, and the claim does not find it.
            was_idle = not self._unwritten_count
            if from_beginning:
                self._queues.search(now=elapsed_clock())
            found = await self._claims.look(room, from_beginning=from_beginning)
            if found == 0 and from_beginning and not self._claims.work_ahead:
                if was_idle:
                    return
                await self._until_progress()
            from_beginning = found == 0

    def _room(self) -> int:
        """Return the number of messages to claim now: up to a batch, or none while enough wait for their handlers.

        It exceeds the free handlers only while they keep up: the surplus doubles when it was used up while more
        messages waited in the table, and halves when a message waited long in this process.
        """
        slots = self._slots
        settings = self._settings
        if slots.longest_wait_seconds > _PATIENCE_SECONDS:
            self._prefetch //= 2
        elif slots.waiting_count == 0 and self._claims.work_ahead:
            self._prefetch = min(2 * settings.batch_size, max(1, self._prefetch * 2))
        slots.longest_wait_seconds = 0.0
        open_limit = slots.capacity + self._prefetch
        if slots.capacity == 0 or (slots.open_count >= slots.capacity and slots.waiting_count > self._prefetch // 2):
            return 0
        held_limit = open_limit + 2 * settings.batch_size
        return max(0, min(settings.batch_size, open_limit - slots.open_count, held_limit - self._unwritten_count))

    async def _until_progress(self) -> None:
        """Wait until an attempt has ended. Meanwhile messages that wait long for a handler go to idle workers."""
        while True:
            await self._give_back_hoard()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HOARD_SECONDS if self._slots.waiting_count else None):
                    await self._progress.wait()
                    return

    async def _give_back_hoard(self) -> None:
        """Release messages that wait too long if another worker is idle. The finisher rings when they are written.

        Suspects stay: a released message is no longer known as a suspect.
        """
        now = elapsed_clock()
        if self._slots.oldest_wait_seconds < _HOARD_SECONDS or now - self._asked_for_idle_at < _HOARD_SECONDS:
            return
        self._asked_for_idle_at = now
        try:
            watch_keys = post_keys("watch", self._queues.names, self._open_topics)
            idle_queues = set(await self._store.idle_queues(self._queues.names, watch_keys))
        except (psycopg.Error, OSError) as error:
            await self._outage.retry_or_raise(error)
            return
        if idle_queues:
            suspects = set(self._suspects)
            self._slots.give_back(lambda c: c.message.queue in idle_queues and c not in suspects)
            self._prefetch = 0
            self._claims.work_ahead = False  # The surplus does not grow until a poll finds other messages.

    def _halt_topic(self, topic: str) -> None:
        """Stop claiming a topic whose outcomes the database refuses, and release its waiting messages."""
        self._open_topics.remove(topic)
        self._look_at_everything()  # The watch belongs to this set of topics.
        self._slots.give_back(lambda c: c.message.topic == topic)

    def _resume_topic(self, topic: str) -> None:
        self._open_topics.append(topic)
        self._look_at_everything()

    async def _take_over(self, rows: Sequence[ClaimedRow], leased_at: float) -> None:
        taken = await self._intake.take(rows, leased_at)
        for attempt, ending in taken.endings:
            self._finisher.collect(attempt, ending)
        self._watch_suspects(taken.suspects)
        self._slots.put(taken.works)
        if taken.ended:
            await self._finisher.note_unattempted(taken.ended)

    # --- suspects -----------------------------------------------------------------------------------------------------

    def _watch_suspects(self, suspects: list[Attempt]) -> None:
        """Count these as suspects in flight until they have ended, but for no longer than a lease."""
        if suspects:
            self._suspects += suspects
            asyncio.get_running_loop().call_later(self._settings.lease_seconds, self._trust, suspects)

    def _trust(self, suspects: Sequence[Attempt]) -> None:
        self._suspects[:] = [attempt for attempt in self._suspects if attempt not in suspects]
        if self._queues.may_take_suspects(len(self._suspects)):
            self._progress.set()
            self._look_at_everything()

    def _note_progress(self) -> None:
        """React to the end of an attempt, before or after it is written."""
        self._progress.set()
        if self._suspects:
            ended = [attempt for attempt in self._suspects if self._held.get(attempt.message.id) is not attempt]
            if ended:
                self._trust(ended)

    def _note_written(self) -> None:
        self._note_progress()
        if self._queues.may_wait_for_ends:
            self._wake.set()

    # --- sleep --------------------------------------------------------------------------------------------------------

    def _on_ring(self, queue: str | None, /, *, is_new: bool = False) -> None:
        """Poll a queue, or with None all of them. `is_new` means that a new message was enqueued there."""
        if queue is None or queue in self._queues:
            self._ring_is_unanswered = self._was_rung = True
            if is_new:
                self._wake.set()
            else:
                self._look_at_everything()

    def _look_again(self) -> None:
        self._look_from_beginning = True
        self._wake.set()

    def _look_at_everything(self) -> None:
        """Poll all lanes: messages may have become claimable in any of them."""
        self._queues.search(now=elapsed_clock())
        self._look_again()

    async def _wake_for_successors(self, queues: Sequence[str]) -> None:
        """Wake a worker for messages that waited for messages of this worker: itself, or workers of their queues."""
        if any(queue in self._queues for queue in queues):
            self._look_at_everything()
        foreign = [queue for queue in queues if queue not in self._queues]
        if foreign:
            await self._ring_all(foreign)

    async def _note_found(self) -> None:
        """Stay on watch after a claim that took all due messages. If more wait, let other workers help."""
        self._note_woken()
        self._fruitless_count = 0
        self._was_rung = False
        if self._claims.work_ahead:
            await self._stand_down()
        else:
            await asyncio.sleep(0)  # The handlers of the claimed messages start before the next claim is sent.

    async def _stand_down(self) -> None:
        """Wake other sleepers, so that one goes on watch. Producers need not ring for a worker that polls."""
        if self._bell is not None:
            if self._bell.is_on_duty:
                await asyncio.sleep(0)  # Handlers of claimed messages start first.
            await self._bell.disarm()

    def _note_woken(self) -> None:
        self._woken_at.append(elapsed_clock())

    @property
    def _is_brisk(self) -> bool:
        """Whether this worker was woken often recently."""
        woken_at = self._woken_at
        return (
            len(woken_at) == _BRISK_WAKES
            and woken_at[-1] - woken_at[0] < _BRISK_SECONDS
            and elapsed_clock() - woken_at[-1] < _LULL_SECONDS
        )

    async def _rest(self) -> None:
        """Sleep until a bell rings, a message falls due or the sweep. At high rates, poll instead."""
        self._prefetch = 0
        self._fruitless_count = self._fruitless_count + 1 if self._was_rung else 0
        if self._was_rung:
            self._note_woken()
        self._was_rung = False
        if self._fruitless_count == _FRUITLESS_WAKES:
            await self._stand_down()  # The queue may be paused, or at its limit: then producers need not ring.
        if self._bell is not None and self._bell.is_on_watch and self._is_brisk and self._room():
            await self._bell.lower()
            await self._sleep_long(_POLL_SECONDS)
        elif await self._arm_and_look():
            await self._sleep_long(self._settings.poll_interval_seconds)

    async def _arm_and_look(self) -> bool:
        """Arm the bell and poll once more. Return False if there is work before this worker may sleep."""
        pause = 0.001
        while not self._stopping.is_set():
            # A worker with messages that wait for a handler is not idle, and must not appear idle to others.
            room = self._room()
            if room == 0:
                return False
            bell = Bell.DOWN if self._bell is None else await self._bell.arm(self._queues.names)
            if bell in (Bell.DOWN, Bell.STILL_ARMED):
                return True
            # Keep wake-ups since the question for the bell: one may mean that this bell was given up.
            if self._stopping.is_set():
                return False
            found = await self._claims.look(room, from_beginning=True)
            while found == 0 and self._claims.work_ahead and not self._stopping.is_set():
                found = await self._claims.look(room, from_beginning=True)  # The next page of ordering keys.
            if found is None:
                self._look_from_beginning = True
                return False
            if found or self._claims.work_ahead:
                await self._note_found()
                return False
            if bell is Bell.ARMED:
                return True
            # Open transactions may have enqueued messages, and will not ring when they commit.
            await self._sleep(pause)
            if self._stopping.is_set():
                return False
            self._wake.clear()  # The claim after the next answer covers this wake-up.
            pause = min(pause * 2, _MAX_PRODUCERS_PAUSE_SECONDS)
        return False

    async def _sleep_long(self, limit: float) -> None:
        if self._fruitless_count > _FRUITLESS_WAKES:
            # Anyone may send a NOTIFY: this limits the claims a second that a flood of false rings can cost.
            await asyncio.sleep(_FRUITLESS_PAUSE_SECONDS)
        if self._bell is not None and not self._bell.is_reliable:
            limit = min(limit, _LISTENER_DOWN_SWEEP_SECONDS)
        if self._bell is not None and self._bell.unarmed_seconds is not None:
            limit = min(limit, self._bell.unarmed_seconds)
        self._look_from_beginning = True
        try:
            due = await self._claims.next_due_seconds()
        except (psycopg.Error, OSError) as error:
            await self._outage.retry_or_raise(error)
        else:
            seconds = limit if due is None else min(limit, due)
            if not await self._sleep(seconds) and seconds > _POLL_SECONDS:
                self._queues.search(now=elapsed_clock())

    async def _sleep(self, seconds: float) -> bool:
        """Sleep until woken. Return False if the time ran out first."""
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _ring_if_saturated(self) -> None:
        """Wake idle workers if every handler is busy and more messages wait."""
        now = elapsed_clock()
        if self._claims.work_ahead and now - self._rang_at >= _RING_SECONDS:
            await self._ring_all(self._queues.names)

    async def _ring_all(self, queues: Collection[str]) -> None:
        self._rang_at = elapsed_clock()
        try:
            await self._store.notify_workers(sorted(queues))
        except psycopg.errors.ProgramLimitExceeded:
            pass  # The notification queue is full. A ring is only a hint, and sleepers poll then.
        except (psycopg.Error, OSError) as error:
            await self._outage.retry_or_raise(error)


def _name_for(settings: Settings) -> str:
    """Return a unique name for each run of a worker: it is part of the fence."""
    return f"{settings.worker_name or socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
