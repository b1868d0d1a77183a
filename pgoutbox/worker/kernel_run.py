"""A run of a worker whose messages are claimed and finished by the kernel.

It gives the kernel its connections, doorbell and attempts, and reports the outcomes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Set
from datetime import datetime
from typing import TYPE_CHECKING, Final, cast

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import ClaimedRow, DueRow, LapsedRow
from pgoutbox.database.worker_connection import is_refusal
from pgoutbox.handlers import Handler
from pgoutbox.kernel.run import Options, Run
from pgoutbox.kernel.seams import Bell, Link, Row, Step
from pgoutbox.message import State
from pgoutbox.worker.attempt import Attempt, AttemptResult
from pgoutbox.worker.backoff import Backoff
from pgoutbox.worker.doorbell import Doorbell, LockAnswer
from pgoutbox.worker.loader import Loader
from pgoutbox.worker.outcomes import Outcomes
from pgoutbox.worker.queues import QueueShare, Turns
from pgoutbox.worker.run import WorkerRun
from pgoutbox.worker.run_state import RunState
from pgoutbox.worker.signals import Signals

if TYPE_CHECKING:
    from pgoutbox.worker.pool import AttemptPool

# Without a listener, and for the retries of other workers during a drain.
_POLL_SECONDS: Final = 1.0
# Messages that wait so long in this process are left to other workers.
_LONG_WAIT_SECONDS: Final = 1.0
_GOES_ON: Final = (State.PENDING, State.SENDING)
_SENDING: Final = State.SENDING  # Looking up an enum member costs more than a comparison.


class KernelSignals(Signals):
    """Passes on to the kernel what the parts of a worker report to its poll loop."""

    kernel: Run[Attempt]
    waits_for_ends: bool = False
    """Whether the end of an attempt may make another message claimable: a queue has a limit."""

    due_seconds: float | None = None
    """The seconds to the next due time, by the last answer."""

    def read_due(self, rows: Iterable[Row]) -> float | None:
        """Return the seconds to the next due time."""
        due = [DueRow._make(row) for row in rows]
        self.waits_for_ends = any(row.is_limited for row in due)
        known = [s for row in due for s in (row.first_seconds, row.other_seconds) if s is not None]
        self.due_seconds = min(known, default=None)
        return self.due_seconds

    def note_notification(self, queue: str | None, /, *, is_new: bool = False) -> None:  # noqa: ARG002
        self.kernel.want(queue)

    def poll_again(self) -> None:
        self.kernel.want()

    def poll_all_lanes(self) -> None:
        self.kernel.sweep()

    def forget_suspect(self, suspect: Attempt) -> None:
        self.kernel.forget_suspect(suspect.message.id)

    def note_progress(self) -> None:
        super().note_progress()
        self.kernel.wake()

    def note_written(self) -> None:
        self.note_progress()
        if self.waits_for_ends:
            self.kernel.want()


class KernelAttempts:
    """The attempts of a run, as the kernel sees them."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._batch_size = run.settings.batch_size
        self._outcomes = Outcomes(run)
        self._results: deque[tuple[Attempt, AttemptResult]] = deque()
        self._again: deque[Attempt] = deque()
        self._is_announced = False
        self._ended_at = -_LONG_WAIT_SECONDS
        self.in_flight = run.in_flight
        self.on_the_way = 0
        """The number of messages that are claimed but not begun."""
        self.answered_at: datetime | None = None
        """The time of the last answered claim, by the server's clock."""
        self.pool: AttemptPool
        self.loader: Loader

    def collect(self, attempt: Attempt, result: AttemptResult) -> None:
        """Take over the end of an attempt."""
        self._results.append((attempt, result))
        if not self._is_announced:
            # Woken once for all attempts that end within one turn of the event loop.
            self._is_announced = True
            asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        self._is_announced = False
        self._run.signals.note_progress()

    async def note_unattempted(self, rows: Sequence[ClaimedRow]) -> None:
        """Report messages that a claim has ended."""
        self._outcomes.report_unattempted(rows)

    def room(self) -> int:
        """Return how many messages to claim now: half a batch waits for the slots, and half is on its way."""
        pool, batch = self.pool, self._batch_size
        if pool.oldest_wait_seconds >= _LONG_WAIT_SECONDS:
            pool.release_waiting(self._may_be_released)
            return 0
        if pool.open_count >= pool.capacity and elapsed_clock() - self._ended_at >= _LONG_WAIT_SECONDS:
            return 0  # Its handlers last long: a message that waits for a slot here could begin in another worker.
        room = min(pool.capacity + batch - pool.open_count, pool.capacity + 3 * batch - len(self.in_flight))
        room -= self.on_the_way
        return min(batch, room, (pool.capacity + batch + 1) // 2) if room * 2 >= batch and pool.capacity else 0

    def _may_be_released(self, attempt: Attempt) -> bool:
        # A suspect would no longer be known as one, and a second claim would take a second token.
        suspect = cast("KernelSignals", self._run.signals).kernel.suspect
        return attempt.message.id != suspect and not self._run.queues[attempt.message.queue].has_limits

    def note_claimed(self, rows: Sequence[Row]) -> None:
        """Note rows whose attempts will begin."""
        self.on_the_way += len(rows)
        self.answered_at = max((row[13] for row in rows if row[14] == _SENDING), default=self.answered_at)

    async def begin(self, rows: Sequence[Row], overtaken: Set[int], seconds_ago: float) -> None:
        """Begin the attempts of these claimed rows."""
        leased_at = elapsed_clock() - seconds_ago
        self.on_the_way -= len(rows)
        claimed = list(map(ClaimedRow._make, rows))
        if overtaken:
            claimed = [row._replace(superseded=row.id in overtaken) for row in claimed]
        names = {row.claimed_at if row.state == _SENDING else None for row in claimed}
        for name in names:
            same = (
                claimed
                if len(names) == 1
                else [row for row in claimed if (row.claimed_at if row.state == _SENDING else None) == name]
            )
            await self.loader.take_over(same, leased_at)

    def take_ended(self, most: int) -> list[Attempt]:
        """Return up to `most` ends that are to be written."""
        ended: list[Attempt] = []
        while self._again and len(ended) < most:
            one = self._again.popleft()
            if one is self.in_flight.get(one.message_id):
                ended.append(one)
            else:
                self._outcomes.note_end(one.message, None, None)
        batch = [self._results.popleft() for _ in range(min(len(self._results), most - len(ended)))]
        sent, requests = self._outcomes.sort(batch)
        for attempt, request in requests.items():
            attempt.end = request
        ended += sent
        ended += requests
        if ended:
            self._ended_at = elapsed_clock()
        return ended

    def put_back(self, ended: Sequence[Attempt], after_seconds: float = 0.0) -> None:
        """Return these ends again later."""
        if after_seconds:
            asyncio.get_running_loop().call_later(after_seconds, self._return, ended)
        else:
            self._again.extendleft(reversed(ended))

    def _return(self, ended: Sequence[Attempt]) -> None:
        self._again.extend(ended)
        self._run.signals.note_progress()

    def settle_sent(self, ended: Sequence[Attempt]) -> None:
        """Report messages that are written as sent, and forget the attempts."""
        self._outcomes.note_sent(ended)
        self._run.signals.note_written()

    def settle(self, ended: Sequence[Attempt], states: Mapping[int, str]) -> None:
        """Report the written ends, and forget the attempts."""
        requests = {attempt: attempt.end for attempt in ended if attempt.end is not None}
        done = {message_id: State(state) for message_id, state in states.items()}
        self._outcomes.settle(ended, done, {}, requests)
        self._run.signals.note_written()

    def note_lapsed(self, rows: Sequence[Row]) -> None:
        """Report attempts of other workers that have lapsed."""
        # The rows have the columns of claim.sql.
        self.on_the_way -= sum(row[14] != _SENDING for row in rows)
        lapsed = [LapsedRow(row[0], row[1], row[17], row[5], row[10], row[11], row[14], 0.0) for row in rows]
        for row in lapsed:
            if row.state in _GOES_ON:
                self._outcomes.report_lost(row)
        self._outcomes.report_unattempted([row for row in lapsed if row.state not in _GOES_ON])

    def take_ended_claims(self) -> list[datetime]:
        """Return the claims whose attempts have all been written. If they are not deleted, they lapse."""
        ended = list(self.in_flight.ended_claims)
        self.in_flight.note_deleted(ended)
        return [claim.claimed_at for claim in ended]


class _Link:
    """The connection of the kernel. What a claim without an answer has begun is released before the next trip."""

    def __init__(self, run: RunState, attempts: KernelAttempts) -> None:
        self._run = run
        self._attempts = attempts
        self._is_unanswered = False

    async def trip(self, steps: Sequence[Step]) -> list[list[Row]]:
        """See `Link`."""
        await self.release_unanswered()
        self._is_unanswered = True
        try:
            results = await self._run.store.claims.trip(steps)
        except psycopg.Error as error:
            self._is_unanswered = not is_refusal(error)
            raise
        self._is_unanswered = False
        self._run.queues.polled_at = elapsed_clock()
        self._run.outage.end()
        return results

    def abandon(self) -> None:
        """See `Link`."""
        self._is_unanswered = True

    async def release_unanswered(self) -> None:
        """Release what a claim without an answer has begun."""
        if self._is_unanswered:
            await self._run.store.release_unanswered(self._run.in_flight, after=self._attempts.answered_at)
            self._is_unanswered = False


class _Bell:
    """The doorbell of these queues, as the kernel sees it."""

    def __init__(self, doorbell: Doorbell, queues: Sequence[str]) -> None:
        self._doorbell = doorbell
        self._queues = queues
        self._backoff = Backoff(0.001, 0.1)

    async def hold(self) -> float:
        """See `Bell`."""
        answer = await self._doorbell.acquire(self._queues)
        if answer is LockAnswer.PRODUCERS:  # Open transactions may have enqueued messages, and will not notify.
            return self._backoff.next()
        self._backoff.reset()
        if answer is LockAnswer.ACQUIRED:
            return 0.0
        is_reliable = answer is LockAnswer.UNCHANGED and self._doorbell.is_reliable
        return min(self._doorbell.max_sleep_seconds, float("inf") if is_reliable else _POLL_SECONDS)

    async def release(self) -> None:
        """See `Bell`."""
        await self._doorbell.release()


def kernel_of(
    state: RunState,
    attempts: KernelAttempts,
    link: Link,
    *,
    shares: Sequence[QueueShare],
    hold_topics: Sequence[str],
    bell: Bell | None = None,
) -> Run[Attempt]:
    """Return the kernel of a run, which gets its signals."""
    settings, signals = state.settings, cast("KernelSignals", state.signals)
    options = Options(
        worker=state.store.worker,
        topics=state.topics,
        hold_topics=hold_topics,
        hooks=state.store.hooks,
        batch_size=settings.batch_size,
        lease_seconds=settings.lease_seconds,
        poll_seconds=settings.poll_interval_seconds,
    )
    signals.kernel = Run(
        options,
        link,
        attempts,
        Turns(shares),
        bell=bell,
        next_due=signals.read_due,
        handle_error=state.outage.pause_or_raise,
    )
    return signals.kernel


class KernelRun(WorkerRun):
    """The parts of one run, around the kernel."""

    signals = KernelSignals

    def _compose(self, handlers: Mapping[str, Handler]) -> None:
        state = self.state
        self._attempts = KernelAttempts(state)
        self._attempts.loader = self._new_loader(handlers, self._attempts)
        self._attempts.pool = self.pool
        self._link = _Link(state, self._attempts)
        self.kernel = kernel_of(
            state,
            self._attempts,
            self._link,
            shares=self._setup.queues,
            hold_topics=self._hold_topics,
            bell=None if self.doorbell is None else _Bell(self.doorbell, state.queues.names),
        )

    def _write(self) -> Coroutine[None, None, None]:
        return self.kernel.run()

    async def _release_unanswered(self) -> None:
        await self.kernel.has_stopped.wait()
        self.pool.release_waiting()  # Messages of the last claim.
        with contextlib.suppress(psycopg.Error, OSError):
            await self._link.release_unanswered()

    @property
    def unwritten_count(self) -> int:
        return len(self.state.in_flight) + self._attempts.on_the_way

    @property
    def refused_count(self) -> int:
        return 0

    async def _write_last(self) -> None:
        with contextlib.suppress(psycopg.Error, OSError):
            await self.kernel.end_claims()

    def collect(self, attempt: Attempt, result: AttemptResult) -> None:
        self._attempts.collect(attempt, result)

    async def work(self) -> None:
        self.kernel.claim()
        await self._until(asyncio.Event())
        self.kernel.stop()

    async def deliver_due(self, *, most: int | None = None) -> int:
        before = self.kernel.claimed_count
        self.kernel.claim(most)
        await self._until(self.kernel.is_quiet)
        self.kernel.stop()
        return self.kernel.claimed_count - before

    async def drain(self) -> None:
        state = self.state
        while not state.stopping.is_set():
            await self.deliver_due()
            if state.stopping.is_set() or not await state.store.count_owed(state.queues.names, state.topics):
                return
            await self._until(
                asyncio.Event(), min(_POLL_SECONDS, cast("KernelSignals", state.signals).due_seconds or _POLL_SECONDS)
            )

    async def _until(self, event: asyncio.Event, seconds: float | None = None) -> None:
        """Wait for the event, for the end of the run, or for so long."""
        wake = self.state.signals.wake  # Only the stop of the run sets it.
        waits = [asyncio.ensure_future(one.wait()) for one in (event, wake)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
