"""Claims: fill the free room with rows, queue by queue, lane by lane, and key by key for ordered messages.

The rows of a claim go to the loader before the next claim begins, so that the first messages start while the others
are claimed. If two workers claim one coalesce key at the same time, one of them gets the message and the other claims
again.

A claim whose answer was lost may have been committed. Its attempts have the worker's name and no handler: they are
released before the next claim. A claim that the database refuses, for example by a trigger, ends the worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Sequence
from datetime import datetime
from typing import Final

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import ALL_TIME_SECONDS, ClaimedRow, LapsedOptions
from pgoutbox.database.worker_connection import is_lost_key, is_refusal
from pgoutbox.message import State
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker.claim_planner import ClaimPlanner, Cursor, Lane
from pgoutbox.worker.finisher import Finisher
from pgoutbox.worker.loader import Loader
from pgoutbox.worker.queues import ALL_QUEUES
from pgoutbox.worker.run_state import RunState

_ROUND_TRIP_SECONDS: Final = 0.002
_STUBBORN_CONFLICTS: Final = 3
_CONFLICT_PAUSE_SECONDS: Final = 0.01  # Time for the other claim, which has the key, to commit.
_LAPSED_LIMIT: Final = 100
_SURVEY_SECONDS: Final = 1.0
_SENDING: Final = State.SENDING  # Looking up an enum member costs more than a comparison.


class Claimer:
    """Claims for one worker, which adds and removes the attempts in `in_flight` and its suspect."""

    def __init__(self, run: RunState, *, hold_topics: Sequence[str], loader: Loader, finisher: Finisher) -> None:
        self._store = run.store
        self._queues = run.queues
        self._outage = run.outage
        self._topics = run.topics
        self._in_flight = run.in_flight
        self._signals = run.signals
        self._telemetry = run.telemetry
        self._hold_topics = hold_topics
        self._loader = loader
        self._finisher = finisher
        self._conflict_count = 0
        self._busy_since = -math.inf  # When a poll first found a message since the last survey.
        self._answered_at: datetime | None = None  # The time of the last answered claim, by the server's clock.
        self._is_unanswered = False  # Whether a later claim may have begun attempts that no handler knows.
        self.work_ahead = False

    async def poll(self, room: int, *, from_beginning: bool, fresh_only: bool = False) -> int | None:
        """Claim from the queues in their order until the room is used up. Return None after a database error.

        Otherwise return the number of claimed rows, including rows that the claim ended. `work_ahead` then says whether
        more messages are likely to wait. `from_beginning` searches all due messages, `fresh_only` only fresh ones.
        """
        found = 0
        self.work_ahead = False
        self._queues.polled_at = elapsed_clock()
        if not await self.release_unanswered():
            return None
        if not fresh_only and not await self._survey():
            return None
        if self._conflict_count > _STUBBORN_CONFLICTS:
            room = 1  # Claims of several rows can conflict at a coalesce key repeatedly: a claim of one row cannot.
        planners = self._queues.in_turn()
        if not fresh_only and self._queues.is_lapsed_due(self._queues.polled_at):
            counts = await self._take_lapsed(planners)
            if counts is None:
                return None
            found += sum(counts)
            room -= counts[1]
        claimed = 0
        for planner in planners:
            count = await self._claim(planner, room, from_beginning=from_beginning, fresh_only=fresh_only)
            if count is None:
                return None
            self._conflict_count = 0
            self._queues.record_turn(planner.queue, count, is_first=not claimed)
            claimed += count
            room -= count
            if room <= 0:
                break
        found += claimed
        if found:
            self._busy_since = min(self._busy_since, self._queues.polled_at)
        return found

    async def release_unanswered(self) -> bool:
        """Release the attempts of a claim whose answer was lost. Return False after a database error."""
        if not self._is_unanswered:
            return True
        try:
            count = await self._store.release_unanswered(self._in_flight, after=self._answered_at)
        except (psycopg.Error, OSError) as error:
            await self._outage.pause_or_raise(error)
            return False
        self._is_unanswered = False
        if count:
            self._signals.poll_all_lanes()  # They lie before the places where the next searches begin.
            self._telemetry.report(
                logging.WARNING, LogEvent.CLAIM_LOST, "claim whose answer was lost, released", released_count=count
            )
        return True

    async def next_due_seconds(self) -> float | None:
        """Return the seconds until a poll finds a message that was not due before; None if none is scheduled.

        Raises the error of a database that does not answer.
        """
        # The last claim may have missed messages that fell due since it began, so the query includes them. It may also
        # reach the server late.
        slack = _ROUND_TRIP_SECONDS
        while True:
            asked_at = elapsed_clock()
            rows = await self._store.next_due(
                self._queues.names,
                since_seconds=min(asked_at - self._queues.searched_at + slack, ALL_TIME_SECONDS),
                others_since_seconds=min(asked_at - self._queues.others_searched_at + slack, ALL_TIME_SECONDS),
            )
            answered_at = elapsed_clock()
            took = answered_at - asked_at
            self._busy_since = math.inf
            # A late query does not cover the time before it arrived.
            if self._queues.record_due(rows, asked_at=asked_at if took <= slack else None, now=answered_at):
                return 0.0
            due = min(
                (seconds for row in rows for seconds in (row.first_seconds, row.other_seconds) if seconds is not None),
                default=None,
            )
            if took <= slack or (due is not None and due <= 0):
                return due
            slack = 2 * took

    async def _survey(self) -> bool:
        """Ask for the state of the queues, once a second under load. Return False after a database error."""
        if self._queues.polled_at >= self._busy_since + _SURVEY_SECONDS:
            try:
                await self.next_due_seconds()
            except (psycopg.Error, OSError) as error:
                await self._handle_error(error, ALL_QUEUES, "survey")
                return False
        return True

    async def _take_lapsed(self, planners: Sequence[ClaimPlanner]) -> tuple[int, int] | None:
        """End lapsed attempts, so that their messages can be claimed again. Take over a suspect if none is in flight.

        Return the numbers of ended attempts and of suspects, or None after a transient error of the database.
        """
        began_at = elapsed_clock()
        options: LapsedOptions = {
            "topics": self._topics,
            "hold_topics": self._hold_topics,
            "in_flight": self._in_flight,
        }
        try:
            ended = await self._store.end_lapsed(self._queues.names, total=_LAPSED_LIMIT, **options)
        except (psycopg.Error, OSError) as error:
            await self._handle_error(error, ALL_QUEUES, "lapsed")
            return None
        self._outage.end()
        await self._finisher.note_lapsed(ended)
        suspect_count = 0
        for planner in planners:
            if self._signals.suspect is not None:
                break
            rows = await self._run(planner.queue, "suspect", self._store.claim_lapsed(planner.queue, **options))
            if rows is None:
                return None
            for row in rows:
                self._finisher.outcomes.report_lost(row)
            await self._hand_over(rows, began_at)
            suspect_count += len(rows)
        self._queues.record_lapsed(ended, _LAPSED_LIMIT, began_at=began_at, ended_at=elapsed_clock())
        return len(ended), suspect_count

    async def _claim(self, planner: ClaimPlanner, room: int, *, from_beginning: bool, fresh_only: bool) -> int | None:
        """Claim from the lanes of one queue in their order."""
        found = 0
        for lane in planner.turns(elapsed_clock(), fresh_only=fresh_only):
            if room - found <= 0:
                self.work_ahead = True
                break
            count: int | None
            match lane:
                case Lane.ORDERED:
                    count = await self._claim_ordered(planner, room - found, complete=from_beginning)
                case Lane.RETRIES:
                    count = await self._claim_due(planner, planner.retries, room - found)
                case Lane.FRESH:
                    count = await self._claim_due(
                        planner, planner.fresh, room - found, from_beginning=from_beginning, only_news=fresh_only
                    )
            if count is None:
                return None
            found += count
        return found

    async def _claim_due(
        self,
        planner: ClaimPlanner,
        cursor: Cursor,
        room: int,
        *,
        from_beginning: bool = False,
        only_news: bool = False,
    ) -> int | None:
        """Claim fresh messages or retries."""
        began_at = elapsed_clock()
        is_retries = cursor is planner.retries
        place = cursor.start(began_at, from_beginning=from_beginning, wanted_at=planner.wanted_at, only_news=only_news)
        rows = await self._run(
            planner.queue,
            (Lane.RETRIES if is_retries else Lane.FRESH).value,
            self._store.claim(
                planner.queue,
                topics=self._topics,
                total=room,
                place=place,
                retries=is_retries,
                by_permits=planner.is_limited,
                in_turn=cursor.is_waiting and not planner.is_limited,
            ),
        )
        if rows is None:
            return None
        cursor.record(rows, room, began_at=began_at, ended_at=elapsed_clock())
        self.work_ahead |= cursor.is_waiting
        await self._hand_over(rows, began_at)
        return len(rows)

    async def _run(self, queue: str, lane: str, claim: Awaitable[list[ClaimedRow]]) -> list[ClaimedRow] | None:
        """Return the rows of a claim; None after a transient error of the database."""
        self._is_unanswered = True
        try:
            rows = await claim
        except (psycopg.Error, OSError) as error:
            await self._handle_error(error, queue, lane)
            return None
        self._outage.end()
        return await self._mark_superseded(queue, rows)

    async def _mark_superseded(self, queue: str, rows: list[ClaimedRow]) -> list[ClaimedRow] | None:
        """Return the rows of a committed claim with the superseded ones marked, or None if the database failed.

        After a failure the attempts have begun, but no handler gets the messages: the next poll releases them.
        """
        try:
            marked = await self._store.mark_superseded(rows)
        except (psycopg.Error, OSError) as error:
            await self._outage.pause_or_raise(error)
            return None
        self._measure(queue, marked)
        return marked

    async def _hand_over(self, rows: Sequence[ClaimedRow], began_at: float) -> None:
        if rows:
            await self._loader.take_over(rows, began_at)
        self._is_unanswered = False
        self._answered_at = _time_of(rows) or self._answered_at

    async def _claim_ordered(self, planner: ClaimPlanner, room: int, *, complete: bool) -> int | None:
        """Claim from the next page of ordering keys. A complete poll continues until it has read all keys."""
        began_at = elapsed_clock()
        rows: Sequence[ClaimedRow] = ()
        try:
            found, last_key = await self._find_ordered(planner, room)
            if last_key and not planner.has_place:
                planner.after_key = await self._store.random_key(planner.queue)
                found, last_key = await self._find_ordered(planner, room)
            planner.has_place = True
            is_whole = planner.after_key == last_key == ""
            # A message with a new key need not wait for its turn in the round.
            if not is_whole and room > len(found):
                new = await self._store.find_new_ordered(
                    planner.queue,
                    topics=self._topics,
                    since_seconds=planner.fresh.since_seconds(began_at),
                    key_limit=room - len(found),
                )
                found = list({*found, *new})
            if found:
                self._is_unanswered = True
                rows = await self._store.claim_ordered(planner.queue, found)
                self._outage.end()  # A search proves nothing: a server that has become read-only answers it, too.
        except (psycopg.Error, OSError) as error:
            await self._handle_error(error, planner.queue, Lane.ORDERED.value)
            return None
        self._measure(planner.queue, rows)
        is_round_over = planner.turn_page(last_key, found=len(rows))
        self.work_ahead |= bool(rows) or (complete and not is_round_over)
        await self._hand_over(rows, began_at)
        return len(rows)

    async def _find_ordered(self, planner: ClaimPlanner, room: int) -> tuple[Sequence[int], str]:
        return await self._store.find_ordered(
            planner.queue, topics=self._topics, after_key=planner.after_key, key_limit=planner.page_limit(room)
        )

    async def _handle_error(self, error: psycopg.Error | OSError, queue: str, lane: str) -> None:
        """Pause after a transient error. Report and raise a permanent one: waiting does not change it."""
        if is_refusal(error):
            self._is_unanswered = False
        if is_lost_key(error):
            self._conflict_count += 1
            if self._conflict_count > _STUBBORN_CONFLICTS:
                await asyncio.sleep(_CONFLICT_PAUSE_SECONDS)
            return
        try:
            await self._outage.pause_or_raise(error)
        except psycopg.Error as refusal:
            self._telemetry.report(
                logging.ERROR,
                LogEvent.CLAIM_REFUSED,
                "the database refuses a claim, the worker ends: look for triggers, constraints, rights and damage of "
                "the tables in the schema pgoutbox",
                queue=queue,
                lane=lane,
                reason=refusal.sqlstate,
            )
            raise

    def _measure(self, queue: str, rows: Sequence[ClaimedRow]) -> None:
        if (measures := self._telemetry.measures) is not None:
            topics = [row.topic for row in rows if row.state == _SENDING]
            measures.claim(queue, topics, at=elapsed_clock())


def _time_of(rows: Sequence[ClaimedRow]) -> datetime | None:
    """Return the claim time of the attempts of one claim, by the server's clock."""
    return next((row.claimed_at for row in rows if row.state == _SENDING), None)
