"""The finisher: collects the outcomes of attempts and writes them in fenced batches, with retries.

A locked row and a refused row delay no other row: their outcomes are collected again later, a refused one alone and
with growing pauses. Until then their messages stay in `in_flight`, so their leases are renewed and no worker hands them
over again. If a later attempt owns the message, the outcome is not written and the finisher reports a lost lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import psycopg

from pgoutbox.database.store import ClaimedRow, FinishRequest, LapsedRow
from pgoutbox.database.worker_connection import is_transient_error
from pgoutbox.message import (
    AttemptOutcome,
    Message,
    State,
)
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker.attempt import Attempt, AttemptResult
from pgoutbox.worker.backoff import Backoff
from pgoutbox.worker.outcomes import Outcomes
from pgoutbox.worker.run_state import RunState

_LOCKED_PAUSE_SECONDS = 0.1
_MANY_ENDED_CLAIMS = 100
_MANY_REFUSED = 10  # If the process is killed, these are handed over again.
_PENDING_AGAIN: Final = frozenset({AttemptOutcome.RETRY, AttemptOutcome.SNOOZED, AttemptOutcome.RELEASED})
_SENT: Final = State.SENT  # Looking up an enum member costs more than a comparison.

Write = Callable[[Sequence[Attempt]], Awaitable[Mapping[int, State]]]


@dataclass(slots=True)
class _Refusal:
    """The database refused to write the outcome of an attempt: a trigger, a constraint or a missing right does that.

    `request` is the refused outcome, None for sent, and `reason` the SQLSTATE.
    """

    request: FinishRequest | None
    reason: str
    backoff: Backoff = field(default_factory=lambda: Backoff(1.0, 15.0))


class Finisher:
    """Writes the outcomes of attempts and removes the attempts from `in_flight`.

    It wakes a worker for a message that is pending again, was released, or waited for a message of the batch.
    """

    def __init__(self, run: RunState) -> None:
        self._store = run.store
        self._in_flight = run.in_flight
        self._batch_size = run.settings.batch_size
        self._signals = run.signals
        self._notifier = run.notifier
        self._topics = run.topics
        self.outcomes = Outcomes(run)
        self._results: deque[tuple[Attempt, AttemptResult]] = deque()
        self._refused: dict[Attempt, _Refusal] = {}
        self._ready = asyncio.Event()
        self._is_announced = False

    @property
    def unwritten_count(self) -> int:
        """Number of attempts in flight, without those whose outcome the database refuses."""
        return max(0, len(self._in_flight) - len(self._refused))

    @property
    def refused_count(self) -> int:
        """Number of attempts whose outcome the database refuses."""
        return len(self._refused)

    @property
    def refuses_many(self) -> bool:
        """Whether the database refuses so many outcomes that the worker must claim nothing more."""
        return len(self._refused) >= _MANY_REFUSED

    def collect(self, attempt: Attempt, result: AttemptResult) -> None:
        """Take over the end of one attempt."""
        self._results.append((attempt, result))
        if not self._is_announced:
            # Woken once for all attempts that end within one turn of the event loop.
            self._is_announced = True
            asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        self._is_announced = False
        self._ready.set()
        self._signals.note_progress()

    async def note_unattempted(self, rows: Sequence[ClaimedRow]) -> None:
        """Report messages that a claim has ended, and wake workers for the next ones of their ordering keys."""
        self.outcomes.report_unattempted(rows)
        # They were not in flight, so no message of a coalesce key has waited for them.
        await self._wake_successors([row for row in rows if row.ordering_key is not None])

    async def note_lapsed(self, rows: Sequence[LapsedRow]) -> None:
        """Report lapsed attempts that were ended, and wake workers for the messages that may begin now."""
        retried = [row for row in rows if row.state == State.PENDING]
        for row in retried:
            self.outcomes.report_lost(row)
        ended = [row for row in rows if row.state != State.PENDING]
        self.outcomes.report_unattempted(ended)
        if rows:
            await self._notifier.wake({row.queue for row in rows})
        await self._wake_successors(ended)

    async def run(self) -> None:
        """Write the collected outcomes, until cancelled."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            await self.write_collected()

    async def write_collected(self) -> None:
        """Write the outcomes that are collected, and those that are collected meanwhile."""
        while self._results:
            await self._finish(self._next_batch())
            if len(self._in_flight.ended_claims) >= _MANY_ENDED_CLAIMS:
                await self.end_claims()
            self._signals.note_written()

    async def end_claims(self) -> None:
        """Delete the claims whose attempts have ended. The next finish as sent does so too, or else their lapse."""
        if not (ended := list(self._in_flight.ended_claims)):  # Others may end meanwhile.
            return
        with contextlib.suppress(psycopg.Error, OSError):
            await self._store.end_claims([claim.claimed_at for claim in ended])
        self._in_flight.note_deleted(ended)

    def _next_batch(self) -> list[tuple[Attempt, AttemptResult]]:
        """Return results to write together. A refused one comes alone: a batch with it would be refused."""
        results, refused = self._results, self._refused
        batch = [results.popleft()]
        while results and len(batch) < self._batch_size:
            if refused and (batch[0][0] in refused or results[0][0] in refused):
                break
            batch.append(results.popleft())
        return batch

    async def write_minimal_ends(self) -> None:
        """Write each refused outcome once more, or a minimal end: the worker is about to stop."""
        for attempt, refusal in list(self._refused.items()):
            for request in (refusal.request, _minimal_request(attempt, refusal.request, refusal.reason)):
                with contextlib.suppress(psycopg.Error, OSError):
                    done = await self._write_one(attempt, request)
                    if done:
                        requests = {} if request is None else {attempt: request}
                        self.outcomes.settle([attempt], done, {}, requests)
                        del self._refused[attempt]
                        break

    def report_unwritten(self) -> None:
        """Log the messages whose outcome is still refused."""
        for attempt, refusal in self._refused.items():
            self._in_flight.abandon(attempt)
            self.outcomes.report_message(
                logging.ERROR,
                LogEvent.OUTCOME_UNWRITTEN,
                "stopped with an outcome that the database refuses; its lease will expire",
                attempt.message,
                outcome=AttemptOutcome.SENT if refusal.request is None else refusal.request.outcome,
                reason=refusal.reason,
            )

    async def _finish(self, batch: Sequence[tuple[Attempt, AttemptResult]]) -> None:
        sent, requests = self.outcomes.sort(batch)
        if sent:
            await self._write(sent, self._write_sent, {})
        if requests:
            await self._write(
                list(requests), lambda part: self._store.finish([requests[attempt] for attempt in part]), requests
            )
            released = {
                attempt.message.queue
                for attempt, request in requests.items()
                if request.outcome is AttemptOutcome.RELEASED
            }
            if released:
                await self._notifier.notify(released)
        for attempt in [one for one in self._refused if self._in_flight.get(one.message.id) is not one]:
            del self._refused[attempt]
        for attempt, result in batch:
            if self._in_flight.get(attempt.message.id) is attempt:
                # Its row is refused, or locked by a transaction that may last.
                refusal = self._refused.get(attempt)
                pause = _LOCKED_PAUSE_SECONDS if refusal is None else refusal.backoff.next()
                asyncio.get_running_loop().call_later(pause, self._collect_again, attempt, result)
        await self._wake_successors([attempt.message for attempt, _ in batch])

    def _collect_again(self, attempt: Attempt, result: AttemptResult) -> None:
        self._results.append((attempt, result))
        self._ready.set()

    async def _write_one(self, attempt: Attempt, request: FinishRequest | None) -> Mapping[int, State]:
        if request is None:
            return await self._write_sent([attempt])
        return await self._store.finish([replace(request, token=attempt.token)])

    async def _write_sent(self, attempts: Sequence[Attempt]) -> Mapping[int, State]:
        ended = list(self._in_flight.ended_claims)
        states, are_deleted = await self._store.finish_sent(
            [attempt.token for attempt in attempts],
            {attempt.message.topic for attempt in attempts},
            ended_claims=[claim.claimed_at for claim in ended],
        )
        if are_deleted:
            self._in_flight.note_deleted(ended)
        return states

    async def _write(
        self, attempts: Sequence[Attempt], write: Write, requests: Mapping[Attempt, FinishRequest]
    ) -> None:
        """Write the ends of these attempts, with retries: the fence makes repetitions harmless."""
        backoff = Backoff(0.05, 5.0)
        while True:
            try:
                claims = [attempt.claim for attempt in attempts]
                done = await write(attempts)
                current = await self._current_states(
                    [attempt for attempt in attempts if attempt.message.id not in done]
                )
            except (psycopg.Error, OSError) as error:
                if not is_transient_error(error):
                    await self._write_apart(attempts, write, requests, error)
                    return
            else:
                # This process may have claimed a message again meanwhile: that attempt is written next time.
                same = [attempt for attempt, claim in zip(attempts, claims, strict=True) if attempt.claim is claim]
                self.outcomes.settle(same, done, current, requests)
                return
            await asyncio.sleep(backoff.next())
            # A claim has been answered meanwhile: a batch names only the last known attempt of a message.
            lost = [attempt for attempt in attempts if self._in_flight.get(attempt.message.id) is not attempt]
            for attempt in lost:
                self.outcomes.note_end(attempt.message, None, None)
            attempts = [attempt for attempt in attempts if attempt not in lost]

    async def _current_states(self, attempts: Sequence[Attempt]) -> Mapping[int, State]:
        if not attempts:
            return {}
        return await self._store.current_states([attempt.token for attempt in attempts])

    async def _write_apart(
        self, attempts: Sequence[Attempt], write: Write, requests: Mapping[Attempt, FinishRequest], error: BaseException
    ) -> None:
        """Find the row that made PostgreSQL refuse a batch, so that the others can be finished."""
        if len(attempts) > 1:
            middle = len(attempts) // 2
            await self._write(attempts[:middle], write, requests)
            await self._write(attempts[middle:], write, requests)
            return
        (attempt,) = attempts
        reason = getattr(error, "sqlstate", None) or type(error).__name__
        if attempt in self._refused:
            self._refused[attempt].reason = reason
            return
        self._refused[attempt] = _Refusal(requests.get(attempt), reason)
        text = "the database refused the outcome; it is kept and written again"
        self.outcomes.report_message(logging.ERROR, LogEvent.FINISH_REFUSED, text, attempt.message, reason=reason)

    async def _wake_successors(self, messages: Sequence[Message[object] | ClaimedRow | LapsedRow]) -> None:
        """Wake workers for the messages that waited for those of these messages that have a key."""
        keyed = [m for m in messages if m.coalesce_key is not None or m.ordering_key is not None]
        if not keyed:
            return
        try:
            found = await self._store.queues_of_successors(keyed, own_topics=self._topics)
        except (psycopg.Error, OSError) as error:
            if not is_transient_error(error):
                raise
            # It is not known whether a message waits; to find out costs one claim.
            found = [(message.queue, message.ordering_key is not None) for message in keyed]
        if own := {queue for queue, is_foreign in found if not is_foreign}:
            await self._notifier.wake(own)
        if foreign := {queue for queue, is_foreign in found if is_foreign}:
            await self._notifier.notify(foreign)


def _minimal_request(attempt: Attempt, request: FinishRequest | None, reason: str) -> FinishRequest:
    """Return a minimal finish request, which the database can hardly refuse: failed if it was handed over."""
    if request is not None and request.outcome in _PENDING_AGAIN:
        return replace(request, reason=f"the database refused to write its outcome ({reason})")
    outcome = AttemptOutcome.SENT if request is None else request.outcome
    text = f"it was handed over and ended {outcome}, which the database refused to write ({reason})"
    return FinishRequest(AttemptOutcome.FAILED, text, token=attempt.token)
