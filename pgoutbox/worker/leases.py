"""The lease keeper: a thread with its own connection that renews the leases of this process.

It is a thread so that a handler that blocks the event loop does not lose its lease. It renews only attempts that have
been in flight for a while, and signals those that were cancelled, superseded or lost. It never ends an attempt: the
fence refuses the writes of a stale owner. If the server refuses it a connection, it borrows the spare one, which only
works while the event loop is not blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Coroutine

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import HeldRow, watch
from pgoutbox.database.worker_connection import REST_SECONDS, WorkerConnection, is_transient_error
from pgoutbox.errors import LeaseLostError, PgOutboxError
from pgoutbox.observability.events import LogEvent
from pgoutbox.text import describe
from pgoutbox.worker.attempt import Attempt
from pgoutbox.worker.backoff import Backoff
from pgoutbox.worker.pool import AttemptPool
from pgoutbox.worker.run_state import RunState
from pgoutbox.worker.stall_watch import StallWatch

_WATCH_SECONDS = 1.0


class LeaseThread:
    """A thread with an event loop, in which lease keepers work. It starts with the first of them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = asyncio.Event()
        self._ends: dict[asyncio.Task[None], Callable[[BaseException | None], None]] = {}

    def run(
        self, work: Callable[[], Coroutine[object, object, None]], end: Callable[[BaseException | None], None]
    ) -> None:
        """Do this work in the thread. Call `end` when it has ended, with the error if there is one."""
        if self._loop is None:
            try:
                self._loop = asyncio.new_event_loop()
            except OSError as error:
                end(error)
                return
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="pgoutbox-lease", daemon=True)
            self._thread.start()

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(work())
            self._ends[task] = end
            task.add_done_callback(self._note_end)

        self.call(begin)

    def call(self, function: Callable[[], object]) -> None:
        """Call this in the thread, unless it has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """End the thread, in which no work is left."""
        self.call(self._stopping.set)
        if self._thread is not None:
            self._thread.join()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._ends.pop(task)(task.exception())

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        async def serve() -> None:
            await self._stopping.wait()

        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(serve())
        except BaseException as error:  # noqa: BLE001 - the runs raise it
            for end in self._ends.values():
                end(error)


class LeaseKeeper:
    """Renews the leases of the attempts in flight, which the worker adds and removes on its own thread.

    The keepers of several databases share a `thread`.
    """

    def __init__(self, run: RunState, pool: AttemptPool, *, thread: LeaseThread | None = None) -> None:
        self._run = run
        self._stall_watch = StallWatch(run.telemetry, pool)
        self._worker = run.store.worker
        self._spare = run.store.claims
        self._settings = settings = run.settings
        self._in_flight = run.in_flight
        self._in_flight.stale_seconds = settings.lease_seconds / 2
        self._telemetry = run.telemetry
        self._link = run.store.new_connection("ensure lease", spare=self._spare)
        # Many databases have no connection to spare for what they rarely do.
        self._rest_seconds = math.inf if thread is None else REST_SECONDS
        self._owns_thread = thread is None
        self._thread = thread or LeaseThread()
        self._is_started = self._is_stopping = False
        self._wake = asyncio.Event()  # Used in the thread only.
        self._ended = asyncio.Event()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start to keep leases. If that ends before `stop`, leases lapse, and the worker stops."""
        loop = asyncio.get_running_loop()

        def note_end() -> None:
            self._ended.set()
            if (cause := self._error) is not None:
                error = PgOutboxError(f"leases are no longer renewed, and the worker has stopped: {describe(cause)}")
                error.__cause__ = cause
                self._run.stop(error)

        def end(error: BaseException | None) -> None:
            self._error = error
            with contextlib.suppress(RuntimeError):  # The event loop is closed, so no caller waits.
                loop.call_soon_threadsafe(note_end)

        self._is_started = True
        self._thread.run(self._keep, end)

    async def stop(self) -> None:
        """End the work in the thread, and close both connections."""
        self._is_stopping = True
        if self._is_started:
            self._thread.call(self._wake.set)
            await self._ended.wait()
            if self._owns_thread:
                self._thread.stop()
        await self._link.close()

    async def ensure(self, attempt: Attempt) -> None:
        """Check or renew one lease at once, on the event loop. Raise `LeaseLostError` if it is no longer held.

        A young lease is only checked: a renewal is a commit, and waits for the disk.
        """
        renews = self._is_renewable(attempt, elapsed_clock())
        was_open = self._link.is_open
        try:
            await self._look(self._link, [attempt], renews=renews)
        except (psycopg.OperationalError, OSError):
            if not was_open or self._link.is_open:
                raise
            await self._look(self._link, [attempt], renews=True)  # The session had ended while it was idle.
        if attempt.overtaken is not None:
            raise LeaseLostError(f"message {attempt.message.id}, attempt {attempt.attempt_count}: {attempt.overtaken}")

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        settings = self._settings
        link = self._run.store.new_connection("lease", spare=self._spare)
        tick = min(_WATCH_SECONDS, settings.renew_interval_seconds / 2)
        backoff = Backoff(tick, 1.5 * tick)
        failing = False
        pause = tick
        while not self._is_stopping:
            timer = loop.call_later(pause, self._wake.set)
            await self._wake.wait()
            timer.cancel()
            self._wake.clear()
            pause = tick
            if not self._in_flight:
                await link.rest(self._rest_seconds)
                continue
            self._stall_watch.check()
            try:
                await self._keep_once(link)
                failing = False
                backoff.reset()
            except Exception as error:  # noqa: BLE001 - leases that lapse unnoticed are worse than any error
                if not failing:
                    self._telemetry.report(
                        logging.WARNING, LogEvent.LEASE_KEEPER_FAILED, "leases not renewed", reason=type(error).__name__
                    )
                failing = True
                pause = backoff.next()
                if not is_transient_error(error):
                    await link.close()
        await link.close()

    async def _keep_once(self, link: WorkerConnection) -> None:
        now = elapsed_clock()
        renewable = []
        watchable = []
        for attempt in list(self._in_flight.values()):
            if self._is_renewable(attempt, now):
                renewable.append(attempt)
            elif now - attempt.leased_at >= _WATCH_SECONDS and attempt.overtaken is None and not attempt.done:
                watchable.append(attempt)
        size = self._settings.batch_size
        for attempts, renews in ((renewable, True), (watchable, False)):
            for start in range(0, len(attempts), size):
                await self._look(link, attempts[start : start + size], renews=renews)

    def _is_renewable(self, attempt: Attempt, now: float) -> bool:
        is_old = now - attempt.leased_at >= self._settings.renew_interval_seconds
        return is_old or attempt.leased_at <= self._in_flight.lost_at

    async def _look(self, link: WorkerConnection, attempts: list[Attempt], *, renews: bool) -> None:
        """Note which of these attempts still hold their message, after their claims are renewed if asked to."""
        asked_at = elapsed_clock()
        rows = await watch(
            link,
            [attempt.token for attempt in attempts],
            worker=self._worker,
            renewed_claims={attempt.claim.claimed_at for attempt in attempts} if renews else (),
            lease_seconds=self._settings.lease_seconds,
        )
        for attempt in attempts:
            self._note_row(attempt, rows.get(attempt.message.id), asked_at if renews else attempt.leased_at)

    def _note_row(self, attempt: Attempt, row: HeldRow | None, asked_at: float) -> None:
        if row is not None and row.in_lease:
            attempt.leased_at = max(attempt.leased_at, asked_at)
        if attempt.done:
            return
        if row is None or not row.in_lease:
            reason = "lease lost"
        elif row.cancelled:
            reason = "cancelled"
        elif row.superseded:
            reason = "superseded"
        else:
            return
        if attempt.overtaken is None:
            attempt.overtaken = reason
            self._telemetry.report(
                logging.INFO,
                LogEvent.ATTEMPT_OVERTAKEN,
                "attempt in flight overtaken",
                message_id=attempt.message.id,
                attempt_count=attempt.attempt_count,
                reason=reason,
            )
