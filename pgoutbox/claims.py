"""From room for so many messages to their rows: which queue, which lane and which ordering key have their turn.

What a claim returned goes to `take_over` before the next one begins, so that the first messages are on their way while
the rest is claimed. Where two workers meet at one coalesce key, one of them has its message and the other claims again.

A claim whose answer was lost may have been committed. Its attempts have the worker's name and no handler: they are
released before anything else is claimed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime
from typing import Final

import psycopg

from pgoutbox.dispatch import elapsed_clock
from pgoutbox.lanes import Lanes, Queues
from pgoutbox.link import is_lost_key, is_of_a_row, is_refusal
from pgoutbox.message import State
from pgoutbox.outage import Outage
from pgoutbox.server_clock import ServerClock
from pgoutbox.set_aside import SetAside
from pgoutbox.store import ClaimedRow, ClaimRefusedError, Store
from pgoutbox.telemetry import Event, Telemetry
from pgoutbox.unanswered import UnansweredClaims

_ROUND_TRIP_SECONDS: Final = 0.002
_STUBBORN_CONFLICTS: Final = 3
_CONFLICT_PAUSE_SECONDS: Final = 0.01  # Until then the other claim commits, which has the key and fails ours.
_ENDED_ELSEWHERE: Final = 100
_ELSEWHERE_SECONDS: Final = 300.0
_SENDING: Final = State.SENDING  # To look a member up costs more than to compare with it.


class Claims:
    """Claims for one worker. `held` and `suspects` are what is in flight, which the worker fills and empties."""

    def __init__(
        self,
        store: Store,
        queues: Queues,
        outage: Outage,
        *,
        topics: Sequence[str],
        hold_topics: Sequence[str],
        held: Collection[int],
        suspects: Collection[object],
        take_over: Callable[[Sequence[ClaimedRow], float], Awaitable[None]],
        stopping: asyncio.Event,
        telemetry: Telemetry,
    ) -> None:
        self._store = store
        self._queues = queues
        self._outage = outage
        self._topics = topics
        self._hold_topics = hold_topics
        self._held = held
        self._suspects = suspects
        self._take_over = take_over
        self._stopping = stopping
        self._telemetry = telemetry
        self._clock = ServerClock(store.lease_seconds)
        self._set_aside = SetAside(telemetry)
        self._elsewhere_due_at = -math.inf
        self._conflict_count = 0
        self._unanswered = UnansweredClaims(again_seconds=store.lease_seconds)
        self.work_ahead = False

    async def look(self, room: int, *, from_beginning: bool, fresh_only: bool = False) -> int | None:
        """Claim from the queues in their order until the room is used up. None if the database did not let us.

        How many rows were claimed, those counted that ended thereby. Whether more is likely to wait for the next look
        is then in `work_ahead`. `from_beginning` looks at everything that is due, `fresh_only` at fresh messages alone.
        """
        found = 0
        self.work_ahead = False
        self._queues.looked_at = elapsed_clock()
        if not await self.release_unanswered():
            return None
        if self._is_check_due(self._queues.looked_at) and not await self._check():
            return None
        if self._conflict_count > _STUBBORN_CONFLICTS:
            room = 1  # Claims of several rows meet at one coalesce key again and again: one row cannot.
        for lanes in self._queues.in_turn():
            count = await self._claim(lanes, room, from_beginning=from_beginning, fresh_only=fresh_only)
            if count is None:
                return None
            self._conflict_count = 0
            found += count
            room -= count
            if room <= 0:
                break
        return found

    async def release_unanswered(self) -> bool:
        """Release attempts that a claim began and whose rows never arrived. False if the database did not let us."""
        now = elapsed_clock()
        for span in self._unanswered.due(now):
            try:
                count = await self._store.release_unanswered(
                    self._queues.names, self._held, after=span.after, before=span.before
                )
            except (psycopg.Error, OSError) as error:
                await self._outage.endure(error)
                return False
            self._unanswered.note_looked(span, now)
            if count:
                self._telemetry.report(
                    logging.WARNING, Event.CLAIM_LOST, "claim whose answer was lost, released", released_count=count
                )
        return True

    async def next_due_seconds(self) -> float | None:
        """How long until a look finds something that the last one could not; None if nothing is scheduled.

        Raises what a database that does not answer raises.
        """
        # What fell due since the last claim began is in neither answer unless it is asked for; and the question may
        # reach the server later than it was asked.
        slack = _ROUND_TRIP_SECONDS
        while True:
            asked_at = elapsed_clock()
            due, ordered, now = await self._store.next_due_seconds(
                self._queues.names, since_seconds=asked_at - self._queues.looked_at + slack
            )
            if self._queues.note_ordered(ordered):
                return 0.0
            answered_at = elapsed_clock()
            self._note_server_time(now, asked_at, answered_at)
            took = answered_at - asked_at
            if took <= slack or (due is not None and due <= 0):
                return due
            slack = 2 * took

    def _is_check_due(self, at: float) -> bool:
        return self._clock.is_due(at) or at >= self._elsewhere_due_at

    async def _check(self) -> bool:
        """Compare the clocks, and now and then end what blocks a key from other queues. False after an error."""
        try:
            if self._clock.is_due(asked_at := elapsed_clock()):
                self._note_server_time(await self._store.server_time(), asked_at, elapsed_clock())
            if (began_at := elapsed_clock()) >= self._elsewhere_due_at:
                rows = await self._store.end_superseded_elsewhere(
                    self._queues.names,
                    topics=self._topics,
                    total=_ENDED_ELSEWHERE,
                    clock_limit=self._clock.limit(began_at),
                )
                self._elsewhere_due_at = began_at + _ELSEWHERE_SECONDS
                if rows:
                    await self._take_over(rows, began_at)
        except (psycopg.Error, OSError) as error:
            if is_of_a_row(error):
                self._elsewhere_due_at = elapsed_clock() + _ELSEWHERE_SECONDS
                self._telemetry.report(
                    logging.ERROR,
                    Event.CLAIM_REFUSED,
                    "the database refuses to end superseded messages of other queues; they are tried again later",
                    reason=getattr(error, "sqlstate", None),
                )
                return True
            await self._outage.endure(error)
            return False
        return True

    def _note_server_time(self, now: datetime, asked_at: float, answered_at: float) -> None:
        stepped = self._clock.note(now, asked_at=asked_at, answered_at=answered_at)
        if stepped is not None:
            self._telemetry.report(
                logging.WARNING,
                Event.SERVER_CLOCK_STEPPED,
                "server clock stepped forward, lapsed leases left alone for a lease",
                seconds=round(stepped),
            )

    async def _claim(self, lanes: Lanes, room: int, *, from_beginning: bool, fresh_only: bool) -> int | None:
        """Claim from one queue. Messages with an ordering key and the others take turns at being first."""
        if fresh_only or not lanes.has_ordered:
            return await self._claim_unordered(lanes, room, from_beginning=from_beginning, fresh_only=fresh_only)
        lanes.ordered_first = not lanes.ordered_first
        found = 0
        for ordered in (lanes.ordered_first, not lanes.ordered_first):
            if room - found <= 0:
                self.work_ahead = True
                break
            if ordered:
                count = await self._claim_ordered(lanes, room - found, complete=from_beginning)
            else:
                count = await self._claim_unordered(
                    lanes, room - found, from_beginning=from_beginning, fresh_only=False
                )
            if count is None:
                return None
            found += count
        return found

    async def _claim_ordered(self, lanes: Lanes, room: int, *, complete: bool) -> int | None:
        """Go on behind the key where the last look ended; a complete look goes round once if it finds nothing."""
        began_after, end_count = lanes.after_key, 0
        kind = f"{lanes.queue} ordered"
        room = self._set_aside.within(kind, room)
        while not self._stopping.is_set():
            began_at, began_here = elapsed_clock(), lanes.after_key
            set_aside = self._set_aside.ids(began_at)
            message_ids: Sequence[int] = ()
            try:
                found, lanes.after_key = await self._store.find_ordered(
                    lanes.queue, topics=self._topics, after_key=lanes.after_key, key_limit=room
                )
                message_ids = [message_id for message_id in found if message_id not in set_aside]
                rows = []
                if message_ids:
                    self._unanswered.begin()
                    rows = await self._store.claim_ordered(lanes.queue, message_ids, hold_topics=self._hold_topics)
            except (psycopg.Error, OSError) as error:
                lanes.after_key = began_here
                await self._endure(error, lanes.queue, kind, len(message_ids))
                return None
            self._outage.end()
            self._measure(lanes.queue, rows)
            if rows:
                self._set_aside.note_claimed(kind, room)
                lanes.is_limited = rows[0].is_limited
                self.work_ahead = True
                await self._take_over(rows, began_at)
                self._unanswered.end(_time_of(rows))
                return len(rows)
            self._unanswered.end()
            end_count += lanes.after_key == ""
            # The keys behind which it began may be gone by now: then the second end is all there is.
            if not complete or end_count == 2 or (end_count == 1 and lanes.after_key >= began_after):
                break
        return 0

    async def _claim_unordered(self, lanes: Lanes, room: int, *, from_beginning: bool, fresh_only: bool) -> int | None:
        began_at = elapsed_clock()
        leaves_out_others = fresh_only or (not from_beginning and lanes.is_for_fresh_alone(began_at))
        kind = f"{lanes.queue} fresh" if leaves_out_others else lanes.queue
        room = self._set_aside.within(kind, room)
        if leaves_out_others:
            plan = lanes.plan_fresh(room, from_beginning=fresh_only)
        else:
            plan = lanes.plan(room, now=began_at, from_beginning=from_beginning, suspects_in_flight=len(self._suspects))
        self._unanswered.begin()
        try:
            rows = await self._store.claim(
                lanes.queue,
                topics=self._topics,
                hold_topics=self._hold_topics,
                fresh_limit=plan.fresh_limit,
                total=plan.total,
                fresh_floor=plan.fresh_floor,
                retry_floor=plan.retry_floor,
                suspect_limit=plan.suspect_limit,
                clock_limit=self._clock.limit(began_at),
                fresh_only=plan.fresh_only,
                held=self._held if plan.is_full else None,
                set_aside=self._set_aside.ids(began_at),
            )
        except (psycopg.Error, OSError) as error:
            await self._endure(error, lanes.queue, kind, plan.total)
            return None
        self._outage.end()
        self._set_aside.note_claimed(kind, plan.total)
        self._measure(lanes.queue, rows)
        self.work_ahead |= lanes.learn(plan, rows, began_at=began_at, ended_at=elapsed_clock())
        if rows:
            await self._take_over(rows, began_at)
        self._unanswered.end(_time_of(rows))
        return len(rows)

    async def _endure(self, error: psycopg.Error | OSError, queue: str, kind: str, total: int) -> None:
        if is_refusal(error):
            self._unanswered.end()
        if is_lost_key(error):
            self._conflict_count += 1
            if self._conflict_count > _STUBBORN_CONFLICTS:
                await asyncio.sleep(_CONFLICT_PAUSE_SECONDS)
        elif is_of_a_row(error) and (total > 1 or isinstance(error, ClaimRefusedError)):
            self._set_aside.note_refused(kind, total)
            if self._set_aside.is_hopeless(kind):
                raise error
            if isinstance(error, ClaimRefusedError):
                self._set_aside.add(error.message_ids, queue, error.sqlstate or "", elapsed_clock())
        else:
            await self._outage.endure(error)

    def _measure(self, queue: str, rows: Sequence[ClaimedRow]) -> None:
        if (measures := self._telemetry.measures) is not None:
            topics = [row.topic for row in rows if row.state == _SENDING]
            measures.claim(queue, topics, at=elapsed_clock())


def _time_of(rows: Sequence[ClaimedRow]) -> datetime | None:
    """When the attempts that a claim began were claimed, by the server's clock."""
    return next((row.claimed_at for row in rows if row.state == _SENDING), None)
