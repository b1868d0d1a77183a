"""A run of a worker whose messages are claimed and finished by the kernel.

It gives the kernel its connections, doorbell and attempts, and reports the outcomes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, cast

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import ClaimedRow
from pgoutbox.database.worker_connection import is_lost_key, is_refusal, is_transient_error
from pgoutbox.kernel import seams, statements
from pgoutbox.kernel.run import Options, Run
from pgoutbox.kernel.seams import Row, Step
from pgoutbox.message import AttemptOutcome, State
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker.attempt import Attempt
from pgoutbox.worker.backoff import Backoff
from pgoutbox.worker.breakers.circuit_breakers import CircuitBreakers, Grant
from pgoutbox.worker.loader import Loader
from pgoutbox.worker.outcomes import Outcomes, minimal_end
from pgoutbox.worker.pool import AttemptPool
from pgoutbox.worker.run_state import RunState

MANY_REFUSED: Final = 10  # If the process is killed, these are handed over again.
# Messages that wait so long in this process are left to other workers. It claims ahead what begins in half this time.
_LONG_WAIT_SECONDS: Final = 1.0
# A message of one of many databases waits longer: it has its turn, and to claim it again costs two trips.
_TURN_SECONDS: Final = 10.0
_PROBE_SHARE: Final = 4
_GOES_ON: Final = (State.PENDING, State.SENDING)
_CLAIMS: Final = (statements.CLAIM, statements.CLAIM_WITHOUT_KEYS)
_SENDING: Final = State.SENDING  # Looking up an enum member costs more than a comparison.


@dataclass(slots=True)
class _Refusal:
    """The database refused to write the end of an attempt: a trigger, a constraint or a missing right does that.

    `reason` is the SQLSTATE.
    """

    reason: str = ""
    backoff: Backoff = field(default_factory=lambda: Backoff(1.0, 15.0))


class KernelAttempts:
    """The attempts of a run, as the kernel sees them."""

    def __init__(
        self, run: RunState, outcomes: Outcomes, *, pool: AttemptPool, loader: Loader, breakers: CircuitBreakers
    ) -> None:
        self._run = run
        self._batch_size = run.settings.batch_size
        self._outcomes = outcomes
        self._refused_again: deque[Attempt] = deque()
        self.refused: dict[Attempt, _Refusal] = {}
        """The attempts whose end the database refuses. Their messages stay in flight, so no worker gets them."""
        self._is_watching = False
        self._ended_at = -_LONG_WAIT_SECONDS
        self.in_flight = run.in_flight
        self.answered_at: datetime | None = None
        """The time of the last answered claim, by the server's clock."""
        self.pool = pool
        self.loader = loader
        self.breakers = breakers

    def room(self, on_the_way: int) -> int:
        """Return how many messages to claim now, for free slots and ahead: half of these wait, half are on their way.

        A message that waits for a slot here could begin in another worker, so slow handlers have few ahead, or none.
        """
        pool, batch = self.pool, self._batch_size
        if len(self.refused) >= MANY_REFUSED or pool.oldest_wait_seconds >= _LONG_WAIT_SECONDS:
            return 0
        size = pool.work_size
        free = pool.free_count * size
        if not free and elapsed_clock() - self._ended_at >= _LONG_WAIT_SECONDS:
            return 0  # They have become slow.
        # A slot takes its messages from one claim: a part that is claimed before the rest would be handled alone.
        ahead = min(batch, pool.turnover(_LONG_WAIT_SECONDS / 2))
        ahead -= ahead % min(size, batch)
        on_the_way += -on_the_way % size
        most = pool.capacity + batch - max(pool.open_count, self.unwritten_count - 2 * batch)
        room = min(free + ahead - pool.waiting_count, most) - on_the_way
        half = math.ceil(ahead / (2 * size)) * size
        return max(0, min(batch, room, free + half)) if room * 2 >= ahead and pool.capacity else 0

    def _watch_waiting(self) -> None:
        """Leave messages to other workers that have waited for a slot for long."""
        pool = self.pool
        self._is_watching = False
        patience = _TURN_SECONDS if self._run.is_one_of_many else _LONG_WAIT_SECONDS
        # With a free slot the process itself was slow, and the messages begin now.
        if pool.oldest_wait_seconds >= patience and pool.running_count >= pool.capacity:
            pool.release_waiting(self._may_be_released)
        if pool.waiting_count:
            self._is_watching = True
            asyncio.get_running_loop().call_later(_LONG_WAIT_SECONDS, self._watch_waiting)

    def _may_be_released(self, attempt: Attempt) -> bool:
        # A suspect would no longer be known as one, and a second claim would take a second token.
        is_suspect = self._run.kernel.suspect == attempt.message_id
        return not is_suspect and attempt.message.queue not in self._run.limited_queues

    def may_probe(self) -> bool:
        """Return whether less than a quarter of the slots is occupied by probes."""
        return len(self.breakers.grants) * _PROBE_SHARE < self.pool.capacity

    async def begin_probe(self, row: Row, overtaken: Set[int], claimed_at: float) -> None:
        """Begin the attempt of a claimed row that probes a breaker."""
        *columns, key, probe_id, hold = row
        self.breakers.grant(row[0], Grant(key, probe_id, hold))
        await self.begin([tuple(columns)], overtaken, claimed_at)

    async def begin(self, rows: Sequence[Row], overtaken: Set[int], claimed_at: float) -> None:
        """Begin the attempts of these claimed rows."""
        self.breakers.note_claim()
        claimed = list(map(ClaimedRow._make, rows))
        if overtaken:
            claimed = [row._replace(superseded=row.id in overtaken) for row in claimed]
        # A claim in each queue, in their order. Rows that the statement has ended belong to none.
        by_claim: dict[datetime | None, list[ClaimedRow]] = {}
        for row in claimed:
            by_claim.setdefault(row.claimed_at if row.state == _SENDING else None, []).append(row)
        if (measures := self._run.telemetry.measures) is not None:
            measures.claimed(((row.topic, row.queue) for row in claimed if row.state == _SENDING), at=elapsed_clock())
        for same in by_claim.values():
            await self.loader.take_over(same, claimed_at)
        # Not before: if one of them fails, those that have not begun are released.
        self.answered_at = max((at for at in by_claim if at is not None), default=self.answered_at)
        if not self._is_watching:
            self._watch_waiting()

    def take_ended(self, most: int) -> list[Attempt]:
        """Return up to `most` ends that are to be written."""
        ended: list[Attempt] = []
        waiting = self._outcomes.ended
        if self._refused_again:
            most = 1  # A batch with it would be refused.
            waiting.appendleft(self._refused_again.popleft())
        if waiting:
            self._run.note_ends()
        for _ in range(min(len(waiting), most)):
            one = waiting.popleft()
            if one is self.in_flight.get(one.message_id):
                ended.append(one)
            else:  # A later attempt has its message, or after a failover another message its id.
                self.refused.pop(one, None)
                self._outcomes.note_end(one.message, None, None)
        if any(one.end is None or one.end.outcome != AttemptOutcome.RELEASED for one in ended):
            self._ended_at = elapsed_clock()
        return ended

    async def forgotten(self, ended: Sequence[Attempt]) -> Sequence[Attempt]:
        """See `Attempts`."""
        topics = await self._run.store.forgotten_topics()
        if not topics:
            return ()
        return [one for one in ended if one.end is None and ("*" in topics or one.message.topic in topics)]

    def put_back(self, ended: Sequence[Attempt], after_seconds: float = 0.0) -> None:
        """Return these ends again later."""
        for one in ended:
            one.claim.is_closed = False  # Its row is not deleted.
        if after_seconds:
            asyncio.get_running_loop().call_later(after_seconds, self._return, ended)
        else:
            self._outcomes.ended.extendleft(reversed(ended))

    def _return(self, ended: Sequence[Attempt]) -> None:
        self._outcomes.ended.extend(ended)
        self._run.note_progress()

    def note_refused(self, one: Attempt, error: BaseException) -> None:
        """See `Attempts`. The refusal is reported once."""
        reason = getattr(error, "sqlstate", None) or type(error).__name__
        if one not in self.refused:
            self.refused[one] = _Refusal()
            text = "the database refused the outcome; it is kept and written again"
            self._outcomes.report_message(logging.ERROR, LogEvent.FINISH_REFUSED, text, one.message, reason=reason)
        refusal = self.refused[one]
        refusal.reason = reason
        asyncio.get_running_loop().call_later(refusal.backoff.next(), self._return_refused, one)

    def _return_refused(self, one: Attempt) -> None:
        self._refused_again.append(one)
        self._run.note_progress()

    async def write_last(self, kernel: Run[Attempt]) -> None:
        """Write each refused end once more, or a minimal one, and end the claims."""
        for attempt, refusal in list(self.refused.items()):
            refused = attempt.end
            for end in (refused, minimal_end(refused, refusal.reason)):
                attempt.end = end
                with contextlib.suppress(psycopg.Error, OSError):
                    await kernel.write_last([attempt])
                    break
            else:
                attempt.end = refused
        with contextlib.suppress(psycopg.Error, OSError):
            await kernel.write_last()

    def report_unwritten(self) -> None:
        """Report the messages whose end is still refused when the worker stops."""
        for attempt, refusal in self.refused.items():
            self.in_flight.abandon(attempt)
            self._outcomes.report_message(
                logging.ERROR,
                LogEvent.OUTCOME_UNWRITTEN,
                "stopped with an outcome that the database refuses; its lease will expire",
                attempt.message,
                outcome=AttemptOutcome.SENT if attempt.end is None else attempt.end.outcome,
                reason=refusal.reason,
            )

    @property
    def unwritten_count(self) -> int:
        """See `Attempts`."""
        return max(0, len(self.in_flight) - len(self.refused))

    def settle_sent(self, ended: Sequence[Attempt]) -> None:
        """Report messages that are written as sent, and forget the attempts."""
        self._forget_refusals(ended)
        self._outcomes.note_sent(ended)
        self._run.note_progress()

    def settle(self, ended: Sequence[Attempt], states: Mapping[int, str]) -> None:
        """Report the written ends, and forget the attempts."""
        self._forget_refusals(ended)
        self._outcomes.settle(ended, states)
        self._run.note_progress()

    def _forget_refusals(self, ended: Sequence[Attempt]) -> None:
        for attempt in ended if self.refused else ():
            self.refused.pop(attempt, None)

    def note_lapsed(self, rows: Sequence[Row]) -> None:
        """Report attempts of other workers that have lapsed."""
        # The rows have the columns of claim.sql.
        lapsed = list(map(ClaimedRow._make, rows))
        for row in lapsed:
            if row.state in _GOES_ON:
                self._outcomes.report_lost(row)
        self._outcomes.report_unattempted([row for row in lapsed if row.state not in _GOES_ON])

    def take_ended_claims(self, ended: Sequence[Attempt]) -> list[datetime]:
        """Return the claims whose attempts have all been written. If they are not deleted, they lapse."""
        claims = list(self.in_flight.ended_claims)
        if ended and len(ended) == len(self.in_flight):
            # All that is in flight is to be written, so all claims end.
            claims += {one.claim for one in ended if not one.claim.is_closed}
        self.in_flight.note_deleted(claims)
        return [claim.claimed_at for claim in claims]


class Link:
    """The connection of the kernel. What a claim without an answer has begun is released before the next trip."""

    def __init__(self, run: RunState, attempts: KernelAttempts) -> None:
        self._run = run
        self._attempts = attempts
        self._is_unanswered = False

    async def trip(self, steps: Sequence[Step]) -> list[list[Row]]:
        """See `Link`."""
        if self._is_unanswered:
            await self.release_unanswered()
        self._is_unanswered = True
        try:
            results = await self._run.store.claims.trip(steps)
        except psycopg.Error as error:
            self._is_unanswered = not is_refusal(error)
            raise
        self._is_unanswered = False
        self._run.polled_at = elapsed_clock()
        self._run.outage.end()
        if (measures := self._run.telemetry.measures) is not None:
            for statement, parameters in steps:
                if statement in _CLAIMS:
                    measures.answered(cast("list[str]", parameters["served"]))
        return results

    def abandon(self) -> None:
        """See `Link`."""
        self._is_unanswered = True

    def refuses(self, error: BaseException) -> bool:
        """See `Link`."""
        return refuses(error)

    async def release_unanswered(self) -> None:
        """Release what a claim without an answer has begun."""
        if self._is_unanswered:
            count = await self._run.store.release_unanswered(self._run.in_flight, after=self._attempts.answered_at)
            self._is_unanswered = False
            if count:
                self._run.kernel.sweep()
                text = "claim whose answer was lost, released"
                self._run.telemetry.report(logging.WARNING, LogEvent.CLAIM_LOST, text, released_count=count)


def refuses(error: BaseException) -> bool:
    """Return whether the database would answer the same statements with this error again."""
    return is_refusal(error) and not is_transient_error(error) and not is_lost_key(error)


def kernel_of(
    state: RunState,
    attempts: KernelAttempts,
    link: seams.Link,
    *,
    hold_topics: Sequence[str],
    handle_error: Callable[[BaseException], Awaitable[None]],
    bell: seams.Bell | None = None,
) -> Run[Attempt]:
    """Return the kernel of a run, which gets it."""
    settings = state.settings
    options = Options(
        worker=state.store.worker,
        topics=state.topics,
        hold_topics=hold_topics,
        hooks=state.store.hooks,
        batch_size=settings.batch_size,
        lease_seconds=settings.lease_seconds,
        poll_seconds=settings.poll_interval_seconds,
        probe_seconds=settings.breaker.probe_timeout_seconds,
    )
    kernel = state.kernel = Run(
        options,
        link,
        attempts,
        state.queues,
        bell=bell,
        next_due=state.read_due,
        handle_error=handle_error,
    )
    return kernel
