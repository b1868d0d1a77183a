"""The poll loop: when a worker polls, for which messages, how many it claims, and when it sleeps.

The loop is in one `PollState` at a time. A step in that state has a result, and `next_state` chooses the next state.
Other parts only set `Signals`, which the loop reads between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
from collections import deque
from typing import Final

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.worker.backoff import Backoff
from pgoutbox.worker.claimer import Claimer
from pgoutbox.worker.doorbell import Doorbell, LockAnswer
from pgoutbox.worker.finisher import Finisher
from pgoutbox.worker.pool import AttemptPool
from pgoutbox.worker.run_state import RunState

_POLL_WITHOUT_LISTENER_SECONDS: Final = 1.0
# A worker halves its surplus of claimed messages if one waited this long for its handler.
_LONG_WAIT_SECONDS: Final = 0.1
# It releases messages that waited this long, and then claims no surplus for a while: handlers are slow.
_RELEASE_WAITING_SECONDS: Final = 1.0
_WITHOUT_SURPLUS_SECONDS: Final = 10.0
_NOTIFY_SECONDS: Final = 1.0
_FOREIGN_WORK_SECONDS: Final = 1.0
# After this many notifications in a row without a message, a worker pauses before each poll.
_FALSE_NOTIFICATIONS: Final = 20
_FALSE_NOTIFICATION_PAUSE_SECONDS: Final = 0.05
# A worker on watch that was woken eight times within this time polls, until it has found no work for a while.
_HIGH_RATE_WAKES: Final = 8
_HIGH_RATE_SECONDS: Final = 0.25
_LULL_SECONDS: Final = 0.1
_HIGH_RATE_PAUSE_SECONDS: Final = 0.008


class PollState(enum.Enum):
    """The step that the loop takes next."""

    POLLING = "poll from where the last claims ended"
    FRESH_POLL = "poll for fresh messages only, because of a notification"
    FULL_POLL = "poll for all due messages, from the beginning"
    ACQUIRING = "acquire the wake-up lock"
    CONFIRMING = "poll for all due messages once more, with the wake-up lock"
    PAUSING = "sleep for some milliseconds, without the wake-up lock: the rate is high"
    IDLE = "sleep until a notification, the next due time or the next sweep"


class PollResult(enum.Enum):
    """The result of a step. An attempt to acquire the lock has a `LockAnswer` instead, unless the rate is high."""

    BACKLOG = "claimed some messages, and more are due"
    SOME = "claimed all messages that it saw"
    UNREAD_KEYS = "found nothing so far, and has not read all ordering keys"
    NOTHING = "no message is due"
    FAILED = "a database error"
    NO_ROOM = "every handler is busy, and enough messages wait"
    HIGH_RATE = "the worker was woken often"
    SLEPT = "the sleep is over"


_POLLS: Final = (PollState.POLLING, PollState.FRESH_POLL, PollState.FULL_POLL)


def next_state(
    state: PollState, result: PollResult | LockAnswer, *, is_notified: bool = False, needs_full_poll: bool = False
) -> PollState:
    """Return the state after a step in `state` with this result.

    | state | result | next state |
    | --- | --- | --- |
    | POLLING, FULL_POLL | BACKLOG | POLLING, or FULL_POLL if `needs_full_poll` |
    | FULL_POLL | NOTHING | ACQUIRING |
    | ACQUIRING | ACQUIRED | CONFIRMING |
    | ACQUIRING | UNCHANGED, NO_LISTENER | IDLE |
    | ACQUIRING | HIGH_RATE | PAUSING |
    | CONFIRMING | UNREAD_KEYS | CONFIRMING |
    | CONFIRMING | NOTHING | IDLE |
    | POLLING, FRESH_POLL, FULL_POLL | NO_ROOM | the same |
    | any other combination | | FULL_POLL |

    If `is_notified`, FRESH_POLL comes before POLLING and FULL_POLL. It never follows itself, so that continuous
    notifications do not starve retries.
    """
    match state, result:
        case _, PollResult.NO_ROOM if state in _POLLS:
            return state
        case PollState.FULL_POLL, PollResult.NOTHING:
            return PollState.ACQUIRING
        case PollState.ACQUIRING, PollResult.HIGH_RATE:
            return PollState.PAUSING
        case PollState.ACQUIRING, LockAnswer.ACQUIRED:
            return PollState.CONFIRMING
        case PollState.CONFIRMING, PollResult.UNREAD_KEYS:
            return PollState.CONFIRMING
        case PollState.ACQUIRING, LockAnswer.UNCHANGED | LockAnswer.NO_LISTENER:
            return PollState.IDLE
        case PollState.CONFIRMING, PollResult.NOTHING:
            return PollState.IDLE
    if is_notified and state is not PollState.FRESH_POLL:
        return PollState.FRESH_POLL
    may_continue = (
        state in (PollState.POLLING, PollState.FULL_POLL) and result is PollResult.BACKLOG and not needs_full_poll
    )
    return PollState.POLLING if may_continue else PollState.FULL_POLL


class PollLoop:
    """The poll loop of one run of a worker."""

    def __init__(
        self, run: RunState, *, claimer: Claimer, pool: AttemptPool, finisher: Finisher, doorbell: Doorbell | None
    ) -> None:
        self._run = run
        self._settings = run.settings
        self._queues = run.queues
        self._signals = run.signals
        self._stopping = run.stopping
        self._claimer = claimer
        self._pool = pool
        self._finisher = finisher
        self._doorbell = doorbell
        self.state = PollState.FULL_POLL
        self.surplus = 0
        """The number of messages that may wait for a handler."""
        self._surplus_grows_at = -math.inf
        self._sweep_due_at = -math.inf
        self._was_notified = False  # A notification was answered, and no message was found since.
        self._false_notification_count = 0
        self.woken_at: deque[float] = deque(maxlen=_HIGH_RATE_WAKES)
        self._producers_pause = Backoff(0.001, 0.1)

    async def run(self) -> None:
        """Poll and sleep until the worker stops. Search all lanes from the beginning in every poll interval.

        A search passes over messages that another session has locked. Only this clock brings the worker back to them:
        the next due time and the searches for new messages leave them out, and traffic may never pause.
        """
        signals = self._signals
        while not self._stopping.is_set():
            if (now := elapsed_clock()) >= self._sweep_due_at:
                self._sweep_due_at = now + self._settings.poll_interval_seconds
                signals.poll_all_lanes()
            result = await self._step(self.state)
            self.state = next_state(
                self.state, result, is_notified=signals.is_notified, needs_full_poll=signals.needs_full_poll
            )

    async def deliver_due(self, *, most: int | None = None) -> int:
        """Poll until no message is due and none is in flight, or `most` were claimed, or the worker stops.

        Also return if the database refuses so many outcomes that the worker may claim nothing more. Return the number
        of claimed messages.
        """
        from_beginning = True
        claimed_count = 0
        while not self._stopping.is_set():
            self._signals.progress.clear()
            room = self._room() if most is None else min(self._room(), most - claimed_count)
            if room == 0:
                is_last = claimed_count == most or self._finisher.refuses_many
                if is_last and not self._finisher.unwritten_count:
                    return claimed_count
                await self._until_progress()
                continue
            # A message whose attempt ends during the claim may be due again, and the claim does not find it.
            was_idle = not self._finisher.unwritten_count
            if from_beginning:
                self._queues.search(now=elapsed_clock())
            found = await self._claimer.poll(room, from_beginning=from_beginning)
            claimed_count += found or 0
            if found == 0 and from_beginning and not self._claimer.work_ahead:
                if (owed_at := self._queues.search_owed_at) < math.inf:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(0.0, owed_at - elapsed_clock())):
                            await self._stopping.wait()
                elif was_idle:
                    return claimed_count
                else:
                    await self._until_progress()
            from_beginning = found == 0
        return claimed_count

    async def drain(self) -> None:
        """Deliver due messages, also those that other workers and retries make due, until none is owed."""
        run = self._run
        while not run.stopping.is_set():
            run.signals.wake.clear()
            await self.deliver_due()
            owed_count = await run.store.count_owed(run.queues.names, run.topics)
            if self._finisher.refuses_many or owed_count <= self._finisher.refused_count:
                return
            due = await self._claimer.next_due_seconds()
            # Another worker's messages may be pending again at any time, and no notification wakes a drain.
            await self.sleep(_FOREIGN_WORK_SECONDS if due is None else min(due, _FOREIGN_WORK_SECONDS))

    async def sleep(self, seconds: float) -> bool:
        """Sleep until woken. Return False if the time ran out first."""
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._signals.wake.wait()
        except TimeoutError:
            return False
        return True

    async def _step(self, state: PollState) -> PollResult | LockAnswer:
        match state:
            case PollState.ACQUIRING:
                return await self._acquire()
            case PollState.PAUSING:
                return await self._sleep_until_due(_HIGH_RATE_PAUSE_SECONDS)
            case PollState.IDLE:
                return await self._sleep_until_due(self._sweep_due_at - elapsed_clock())
            case _:
                return await self._poll(state)

    # --- poll ---------------------------------------------------------------------------------------------------------

    async def _poll(self, state: PollState) -> PollResult:
        signals = self._signals
        if state is not PollState.CONFIRMING:
            # A wake-up after the question for the lock may mean that the lock of another worker was released.
            signals.wake.clear()
        signals.progress.clear()
        room = self._room()
        if room == 0:
            if state in _POLLS:
                await self._wait_for_room()
            return PollResult.NO_ROOM
        if state is PollState.FRESH_POLL:
            signals.is_notified, self._was_notified = False, True
        elif state is PollState.FULL_POLL:
            signals.needs_full_poll = False
            if self._doorbell is not None:
                await self._doorbell.announce_look()
        found = await self._claimer.poll(
            room,
            from_beginning=state in (PollState.FULL_POLL, PollState.CONFIRMING),
            fresh_only=state is PollState.FRESH_POLL,
        )
        if found is None:
            return PollResult.FAILED
        if found == 0:
            return PollResult.UNREAD_KEYS if self._claimer.work_ahead else PollResult.NOTHING
        self._note_woken()
        self._false_notification_count = 0
        self._was_notified = False
        self._producers_pause.reset()
        if self._claimer.work_ahead:
            await self._let_others_help()
            return PollResult.BACKLOG
        await asyncio.sleep(0)  # The handlers of the claimed messages start before the next claim is sent.
        return PollResult.SOME

    def _room(self) -> int:
        """Return the number of messages to claim now: up to a batch, or none while enough wait for their handlers.

        It exceeds the free handlers only while they keep up: the surplus doubles when it was used up while more
        messages waited in the table, and halves while a message has waited long in this process.
        """
        pool = self._pool
        batch_size = self._settings.batch_size
        if pool.oldest_wait_seconds > _LONG_WAIT_SECONDS:
            self.surplus //= 2
        elif pool.waiting_count == 0 and self._claimer.work_ahead and elapsed_clock() >= self._surplus_grows_at:
            self.surplus = min(2 * batch_size, max(1, self.surplus * 2))
        open_limit = pool.capacity + self.surplus
        if self._finisher.refuses_many or pool.capacity == 0:
            return 0
        if pool.open_count >= pool.capacity and pool.waiting_count > self.surplus // 2:
            return 0
        in_flight_limit = open_limit + 2 * batch_size
        return max(0, min(batch_size, open_limit - pool.open_count, in_flight_limit - self._finisher.unwritten_count))

    async def _wait_for_room(self) -> None:
        """Wait until an attempt has ended. Wake idle workers if more messages are due."""
        await self._let_others_help()
        if self._claimer.work_ahead and elapsed_clock() - self._run.notifier.notified_at >= _NOTIFY_SECONDS:
            await self._run.notifier.notify(self._queues.names)
        await self._until_progress()

    async def _until_progress(self) -> None:
        """Wait until an attempt has ended. Meanwhile release messages that wait long for a handler."""
        while True:
            if self._pool.oldest_wait_seconds >= _RELEASE_WAITING_SECONDS:
                self._release_waiting()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RELEASE_WAITING_SECONDS if self._pool.waiting_count else None):
                    await self._signals.progress.wait()
                    return

    def _release_waiting(self) -> None:
        """Leave the waiting messages to idle workers, which the finisher notifies.

        The suspect stays: a released message is no longer known as a suspect. Messages of a queue with limits stay too:
        a second claim would take a second token.
        """
        suspect = self._signals.suspect
        self._pool.release_waiting(
            lambda attempt: attempt is not suspect and not self._queues[attempt.message.queue].has_limits
        )
        self.surplus = 0
        self._surplus_grows_at = elapsed_clock() + _WITHOUT_SURPLUS_SECONDS

    async def _let_others_help(self) -> None:
        """Release the locks, so that an idle worker goes on watch. Producers need not notify a worker that polls."""
        if self._doorbell is not None:
            if self._doorbell.is_on_watch:
                await asyncio.sleep(0)  # Handlers of claimed messages start first.
            await self._doorbell.release()

    # --- sleep --------------------------------------------------------------------------------------------------------

    async def _acquire(self) -> PollResult | LockAnswer:
        """Acquire the wake-up lock before this worker sleeps. At high rates, release it and poll."""
        self.surplus = 0
        was_notified, self._was_notified = self._was_notified, False
        self._false_notification_count = self._false_notification_count + 1 if was_notified else 0
        if was_notified:
            self._note_woken()
        if self._false_notification_count == _FALSE_NOTIFICATIONS:
            await self._let_others_help()  # The queue may be paused, or at its limit: then producers need not notify.
        # A worker with messages that wait for a handler is not idle, and must not appear idle to others.
        if self._room() == 0:
            return PollResult.NO_ROOM
        doorbell = self._doorbell
        if doorbell is None:
            return LockAnswer.NO_LISTENER
        if doorbell.is_on_watch and self._is_rate_high:
            await doorbell.release_wake_up_locks()
            return PollResult.HIGH_RATE
        answer = await doorbell.acquire(self._queues.names)
        if answer is LockAnswer.PRODUCERS:
            # Open transactions may have enqueued messages, and will not notify when they commit.
            await self.sleep(self._producers_pause.next())
        else:
            self._producers_pause.reset()
        return answer

    async def _sleep_until_due(self, limit: float) -> PollResult:
        """Sleep until woken, until a message falls due or until the limit."""
        if self._false_notification_count > _FALSE_NOTIFICATIONS:
            # Anyone may send a NOTIFY: this limits the claims a second that a flood of them can cost.
            await asyncio.sleep(_FALSE_NOTIFICATION_PAUSE_SECONDS)
        if self._doorbell is not None:
            if not self._doorbell.is_reliable:
                limit = min(limit, _POLL_WITHOUT_LISTENER_SECONDS)
            limit = min(limit, self._doorbell.max_sleep_seconds)
        try:
            due = await self._claimer.next_due_seconds()
        except (psycopg.Error, OSError) as error:
            await self._run.outage.pause_or_raise(error)
        else:
            limit = min(limit, self._queues.search_owed_at - elapsed_clock())
            seconds = limit if due is None else min(limit, due)
            if not await self.sleep(seconds) and seconds > _HIGH_RATE_PAUSE_SECONDS:
                self._queues.search(now=elapsed_clock())
        return PollResult.SLEPT

    def _note_woken(self) -> None:
        self.woken_at.append(elapsed_clock())

    @property
    def _is_rate_high(self) -> bool:
        """Whether this worker was woken often recently."""
        woken_at = self.woken_at
        return (
            len(woken_at) == _HIGH_RATE_WAKES
            and woken_at[-1] - woken_at[0] < _HIGH_RATE_SECONDS
            and elapsed_clock() - woken_at[-1] < _LULL_SECONDS
        )
