"""The loop of a worker: one round trip, in one transaction, finishes attempts and claims due messages.

It decides nothing about a message: the statements do. If this process stops at any line, the rows alone show the
remaining work.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Generic

import psycopg

from pgoutbox.kernel import statements as sql
from pgoutbox.kernel.lanes import Lane, OrderedLane, Place, lanes_of
from pgoutbox.kernel.seams import Attempts, Bell, E, End, Keys, Link, Row, Step, Turns

# Beside a backlog, retries and lapsed attempts are looked for now and then.
_OTHERS_SECONDS: Final = 0.25
_LAPSED_SECONDS: Final = 1.0
_LAPSED_LIMIT: Final = 100
_LAPSED_DISTANCE_SECONDS: Final = 0.05
_LOCKED_PAUSE_SECONDS: Final = 0.1
_ROOM_SECONDS: Final = 1.0
_ROUND_TRIP_SECONDS: Final = 0.002
_ALL_TIME_SECONDS: Final = 1e9
_SENT: Final = "sent"
_GOES_ON: Final = ("pending", "sending")
_LOST_RACES: Final = (
    psycopg.errors.UniqueViolation,
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
)
# The columns of claim.sql.
_ID, _TOPIC, _ATTEMPT_COUNT, _AVAILABLE_AT, _COALESCE_KEY, _ORDERING_KEY = 0, 1, 5, 9, 10, 11
_STATE, _QUEUE, _LANE = 14, 17, 19
_DUE_ORDER: Final = itemgetter(_AVAILABLE_AT, _ID)
# The ordering keys of one page: a few milliseconds of the server's time.
_KEY_LIMIT: Final = 500
_ORDERED: Final = 2
_AS_SENT: Final = End("sent")


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a run. `topics` may change while it runs."""

    worker: str
    topics: Sequence[str]
    hold_topics: Sequence[str]
    hooks: str
    batch_size: int
    lease_seconds: float
    poll_seconds: float


@dataclass(slots=True, eq=False)
class _Trip(Generic[E]):
    """A round trip: what it finishes and claims, and the answer."""

    began_at: float
    sent: list[list[E]]
    others: list[E]
    lanes: Sequence[Lane]
    room: int
    takes_lapsed: bool
    steps: list[Step]
    results: Sequence[Sequence[Row]] = ()

    @property
    def ended(self) -> list[E]:
        """All attempts that it finishes."""
        return [one for same in (*self.sent, self.others) for one in same]

    @property
    def lapsed(self) -> Sequence[Row]:
        return self.results[-2 if self.lanes else -1] if self.takes_lapsed else ()

    @property
    def claimed(self) -> Sequence[Row]:
        return self.results[-1] if self.lanes else ()


class Run(Generic[E]):
    """Claims for `attempts` and writes their ends, from `run` until it is cancelled.

    `handle_error` waits after an error that may pass, and raises any other.
    """

    def __init__(
        self,
        options: Options,
        link: Link,
        attempts: Attempts[E],
        turns: Turns,
        *,
        bell: Bell | None,
        next_due: Callable[[Sequence[Row]], float | None],
        handle_error: Callable[[BaseException], Awaitable[None]],
    ) -> None:
        self._options = options
        self._link = link
        self._attempts = attempts
        self._turns = turns
        self._lanes = lanes_of(turns.order())
        self._bell = bell
        self._next_due = next_due
        self._handle_error = handle_error
        self._wake = asyncio.Event()
        self._swept_at = -math.inf
        self._lapsed_at = -math.inf
        self._is_lapsed_wanted = True
        self._spread_until = -math.inf  # Until then, messages of lapsed attempts fall due one after the other.
        self.suspect: int | None = None
        """The message in flight that may crash this process: there is one at most."""
        self._is_confirmed = False  # It has the bell, and has claimed once more since.
        self._answered: _Trip[E] | None = None  # Its answer is still to be taken in, while the next trip is on its way.
        self._is_careful = False  # The last trip has failed: outcomes go alone, and without waiting for a lock.
        self.claims = False
        """Whether it claims messages."""
        self.room_left: float = math.inf
        """How many messages it may still claim."""
        self.claimed_count = 0
        self.has_stopped = asyncio.Event()
        """Set while it claims nothing, and no claim is on its way."""
        self.is_quiet = asyncio.Event()
        """Set while nothing is due and nothing is in flight, as far as this worker knows."""

    def want(self, queue: str | None = None) -> None:
        """Claim again, from all lanes of a queue or of all: messages may have become due."""
        for lane in self._lanes:
            if queue is None or lane.queue == queue:
                lane.want()
        self.is_quiet.clear()
        self._is_confirmed = False
        self._wake.set()

    def claim(self, most: int | None = None) -> None:
        """Begin to claim, at most this number of messages."""
        self.room_left = math.inf if most is None else most
        self.claims = True
        self.has_stopped.clear()
        self.want()

    def stop(self) -> None:
        """Claim no more. Ends are still written. `has_stopped` is set when no claim is on its way."""
        self.claims = False
        self._wake.set()

    async def end_claims(self) -> None:
        """Delete the rows of claims whose attempts have ended."""
        if steps := self._end_claims():
            await self._link.trip(steps)

    def sweep(self) -> None:
        """Look again for everything: messages that are due, and lapsed attempts."""
        self._is_lapsed_wanted = True
        self.want()

    def forget_suspect(self, message_id: int) -> None:
        """Take over the next suspect, if this message was one: it has ended or hangs, so it is not likely to crash."""
        if self.suspect == message_id:
            self.suspect = None
            self.sweep()

    def wake(self) -> None:
        """Look again for ends to write, and for room."""
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            while True:
                self._wake.clear()
                try:
                    if not await self._turn():
                        await self._rest()
                except (psycopg.Error, OSError) as error:
                    await self._handle_error(error)
        finally:
            self.has_stopped.set()

    # --- finish and claim

    async def _turn(self) -> bool:
        """Finish attempts and claim due messages. Return whether to do so again at once.

        While a trip is on its way, the answer to the last one is taken in, and handlers run.
        """
        trip = self._plan(time.monotonic())
        if trip is None and self._answered is None:
            return False
        answering = None if trip is None else asyncio.ensure_future(self._link.trip(trip.steps))
        try:
            if self._answered is not None:
                if answering is not None:
                    await asyncio.sleep(0)  # A task sends its trip in its first turn of the event loop.
                await self._take_in_answered()
        except BaseException:
            if trip is not None and answering is not None:
                # Whatever its answer is: its ends are written again, and what it has begun is released.
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
                self._attempts.put_back(trip.ended)
                self._is_lapsed_wanted |= trip.takes_lapsed
                self._link.abandon()
            raise
        if trip is not None and answering is not None:
            await self._receive(trip, answering)
        return True

    def _plan(self, now: float) -> _Trip[E] | None:
        """Return the next trip, unless there is nothing to finish and nothing to claim."""
        if self.claims and now - self._swept_at >= self._options.poll_seconds:
            # Everything from the beginning, whatever the traffic: rows that were locked, and lost wake-ups.
            self._swept_at = now
            self._is_lapsed_wanted = True
            for lane in self._lanes:
                lane.want()
        if self.suspect is not None and self.suspect not in self._attempts.in_flight:
            self.forget_suspect(self.suspect)
        ended = self._attempts.take_ended(self._options.batch_size)
        self._want_next_of(ended)
        room = 0
        if self.claims and not self._is_careful:
            room = int(min(self._attempts.room(), self.room_left))
        lanes = self._wanted(now) if room > 0 else []
        looks_again = bool(lanes) and now - self._lapsed_at >= _LAPSED_SECONDS
        takes_lapsed = room > 0 and (self._is_lapsed_wanted or looks_again)
        if takes_lapsed and room >= self.room_left:
            lanes = []  # A suspect may use up the room that is left.
        if not (ended or lanes or takes_lapsed):
            return None
        sent, others = self._sorted(ended)
        steps = [*self._finish(sent, others), *self._end_claims()]
        if takes_lapsed:
            self._is_lapsed_wanted = False  # A wish from now on is one for a later look.
            steps += [(sql.FORGET_LAPSED, {}), self._lapsed()]
        if lanes:
            steps.append(self._claim(lanes, room, now))
        return _Trip(now, sent, others, lanes, room, takes_lapsed, steps)

    def _want_next_of(self, ended: Sequence[E]) -> None:
        """Claim the next messages of the ordering keys whose messages this trip finishes."""
        ordered = {one.keys.queue for one in ended if one.keys is not None and one.keys.ordering_key is not None}
        for lane in self._lanes if ordered else ():
            if lane.number == _ORDERED and lane.queue in ordered:
                lane.want()

    def _wanted(self, now: float) -> list[Lane]:
        """Return the lanes of the next claim: those of a queue take turns, so that no backlog delays another one.

        Beside a backlog, the lanes of retries and of ordering keys are read now and then.
        """
        is_busy = any(lane.due_at() <= now for lane in self._lanes)
        wanted = [
            lane
            for lane in self._lanes
            if lane.due_at() <= now or (is_busy and lane.number != 0 and now - lane.searched_at >= _OTHERS_SECONDS)
        ]
        places = {queue: number for number, queue in enumerate(self._turns.order())}
        return sorted(wanted, key=lambda lane: (places[lane.queue], lane.served_at))

    async def _receive(self, trip: _Trip[E], answering: asyncio.Future[list[list[Row]]]) -> None:
        """Await the answer to a trip, and note where the next claim begins."""
        try:
            trip.results = await answering
        except _LOST_RACES:
            # Another session has a key or a row: the outcomes are written alone, and the claim begins again.
            self._is_lapsed_wanted |= trip.takes_lapsed
            self._attempts.put_back(ended := trip.ended)
            self._is_careful = bool(ended)
            return
        except BaseException:
            self._attempts.put_back(trip.ended)
            self._is_lapsed_wanted |= trip.takes_lapsed
            raise
        self._is_careful = False
        if trip.takes_lapsed:
            self._lapsed_at = trip.began_at
        if trip.lanes:
            self._record(trip)
        if trip.takes_lapsed or trip.lanes:
            self._attempts.note_claimed([*trip.lapsed, *trip.claimed])
        self._answered = trip
        if trip.lapsed or self._follow_steps(trip):
            await self._take_in_answered()

    async def _take_in_answered(self) -> None:
        trip = self._answered
        if trip is None:
            return
        overtaken = await self._follow(trip)
        self._answered = None
        try:
            await self._settle(trip)
        finally:
            if trip.takes_lapsed:
                await self._note_lapsed(trip.lapsed, trip.began_at)
            if trip.claimed:
                self.is_quiet.clear()
                await self._attempts.begin(trip.claimed, overtaken, time.monotonic() - trip.began_at)
        if trip.lapsed:
            await self._end_sessions(trip.lapsed)

    async def _note_lapsed(self, rows: Sequence[Row], began_at: float) -> None:
        """Note the ends of lapsed attempts, and begin that of a suspect."""
        now = time.monotonic()
        suspects = [row for row in rows if row[_STATE] == "sending"]
        self._is_lapsed_wanted |= len(rows) - len(suspects) == _LAPSED_LIMIT
        self._attempts.note_lapsed(rows)
        self._spread_until = max(self._spread_until, now + _LAPSED_DISTANCE_SECONDS * len(rows))
        if rows:
            self.want()
        if suspects:
            self.suspect = suspects[0][_ID]
            # Others wait for it, but for no longer than a lease.
            asyncio.get_running_loop().call_later(self._options.lease_seconds, self.forget_suspect, self.suspect)
            self.room_left -= 1
            self.claimed_count += 1
            # Its key was in flight all the time, so no newer message of the key was delivered meanwhile.
            await self._attempts.begin(suspects, frozenset(), now - began_at)

    async def _end_sessions(self, rows: Sequence[Row]) -> None:
        """End the sessions of lost attempts, so that the next ones do not wait for their locks."""
        counts = [row[_ATTEMPT_COUNT] - (row[_STATE] == "sending") for row in rows]
        parameters = {"ids": array(row[_ID] for row in rows), "attempt_counts": array(counts)}
        await self._link.trip([(sql.END_ATTEMPTS, parameters)])

    def _sorted(self, ended: Sequence[E]) -> tuple[list[list[E]], list[E]]:
        """Return the sent attempts, those with the same number together, and the others in the order of their ids."""
        sent: dict[int, list[E]] = {}
        others = []
        for one in ended:
            if one.end is None and not self._is_careful:
                sent.setdefault(one.attempt_count, []).append(one)
            else:
                others.append(one)
        others.sort(key=lambda one: one.message_id)
        return list(sent.values()), others

    def _finish(self, sent: Sequence[Sequence[E]], others: Sequence[E]) -> list[Step]:
        steps: list[Step] = [
            (
                sql.FINISH_SENT,
                {
                    "ids": array([one.message_id for one in same]),
                    "claimed_ats": list({one.claimed_at for one in same}),
                    "attempt_count": same[0].attempt_count,
                    "worker": self._options.worker,
                },
            )
            for same in sent
        ]
        if others:
            ends = [one.end or _AS_SENT for one in others]
            steps.append(
                (
                    sql.FINISH,
                    {
                        **self._fence(others),
                        "outcomes": [end.outcome for end in ends],
                        "reasons": [end.reason for end in ends],
                        "reason_codes": [end.reason_code for end in ends],
                        "breaker_keys": [end.breaker_key for end in ends],
                        "error_places": [end.error_place for end in ends],
                        "delays": [end.delay_seconds for end in ends],
                        "fails_after": [end.fails_after_seconds for end in ends],
                        "hooks": self._options.hooks,
                    },
                )
            )
        return steps

    def _end_claims(self) -> list[Step]:
        claimed_ats = self._attempts.take_ended_claims()
        return [(sql.END_CLAIMS, {"worker": self._options.worker, "claimed_ats": claimed_ats})] if claimed_ats else []

    def _fence(self, ended: Sequence[E]) -> dict[str, object]:
        return {
            "ids": array([one.message_id for one in ended]),
            "attempt_counts": array([one.attempt_count for one in ended]),
            "claimed_ats": array([one.claimed_at.isoformat() for one in ended]),
            "worker": self._options.worker,
        }

    async def _settle(self, trip: _Trip[E]) -> None:
        """Note the written ends. Ask about the others: a locked row, or a lost answer or lease."""
        unknown: dict[int, E] = {}
        for same, ((count,),) in zip(trip.sent, trip.results, strict=False):
            if count == len(same):
                self._attempts.settle_sent(same)
            else:
                unknown |= {one.message_id: one for one in same}
        states: dict[int, str] = {}
        if trip.others:
            states = dict(trip.results[len(trip.sent)])
            self._attempts.settle([one for one in trip.others if one.message_id in states], states)
            unknown |= {one.message_id: one for one in trip.others if one.message_id not in states}
        if not unknown:
            return
        asked = [unknown[message_id] for message_id in sorted(unknown)]
        try:
            (found,) = await self._link.trip([(sql.STATES, self._fence(asked))])
        except BaseException:
            self._attempts.put_back(asked)
            raise
        states = dict(found)
        locked = [one for one in asked if states.get(one.message_id) == "sending"]
        if locked:
            self._attempts.put_back(locked, _LOCKED_PAUSE_SECONDS)
        self._attempts.settle([one for one in asked if states.get(one.message_id) != "sending"], states)

    def _lapsed(self) -> Step:
        options = self._options
        return (
            sql.LAPSED,
            {
                "queues": list({lane.queue for lane in self._lanes}),
                "topics": options.topics,
                "hold_topics": options.hold_topics,
                "in_flight": array(self._attempts.in_flight),
                "worker": options.worker,
                "total": _LAPSED_LIMIT,
                "suspects": int(self.suspect is None),
                "lease_seconds": options.lease_seconds,
                "distance_seconds": _LAPSED_DISTANCE_SECONDS,
                "hooks": options.hooks,
            },
        )

    def _claim(self, lanes: Sequence[Lane], room: int, now: float) -> Step:
        starts = [lane.begin(now) for lane in lanes]
        return (
            sql.CLAIM if any(lane.number == _ORDERED for lane in lanes) else sql.CLAIM_WITHOUT_KEYS,
            {
                "served": _queues_of(lanes),
                "queues": [lane.queue for lane in lanes],
                "lanes": array(lane.number for lane in lanes),
                "after_ats": [start.after_at for start in starts],
                "after_ids": array(start.after_id for start in starts),
                "since_seconds": [start.since_seconds for start in starts],
                "after_keys": [start.after_key for start in starts],
                "key_limit": _KEY_LIMIT,
                "topics": list(self._options.topics),
                "total": room,
                "worker": self._options.worker,
                "lease_seconds": self._options.lease_seconds,
            },
        )

    async def _follow(self, trip: _Trip[E]) -> Set[int]:
        """Run the statements that follow the commit of a trip. Return the claimed messages that are superseded."""
        steps = self._follow_steps(trip)
        results = await self._link.trip(steps) if steps else []
        overtaken: Set[int] = frozenset()
        for (statement, _), rows in zip(steps, results, strict=True):
            if statement is sql.OVERTAKEN:
                overtaken = {row[0] for row in rows}
            else:
                for queue, _ in rows:
                    self.want(queue)
        return overtaken

    def _follow_steps(self, trip: _Trip[E]) -> list[Step]:
        """Return what follows: messages that waited for those that have ended can begin, here or in another worker."""
        done = [one.keys for one in trip.ended if one.keys is not None]
        done += [
            Keys(row[_ID], row[_TOPIC], row[_QUEUE], row[_COALESCE_KEY], row[_ORDERING_KEY])
            for row in trip.lapsed
            if row[_STATE] not in _GOES_ON and (row[_COALESCE_KEY] or row[_ORDERING_KEY])
        ]
        # Messages that a claim ends were not in flight, so no message of a coalesce key has waited for them.
        done += [
            Keys(row[_ID], row[_TOPIC], row[_QUEUE], None, row[_ORDERING_KEY])
            for row in trip.claimed
            if row[_ORDERING_KEY] is not None and row[_STATE] != "sending"
        ]
        keyed = [row[_ID] for row in trip.claimed if row[_COALESCE_KEY] is not None and row[_STATE] == "sending"]
        steps: list[Step] = []
        if done:
            steps.append(self._tell_successors(done))
        if keyed:
            # A newer message may have been committed, delivered and finished since the claim's snapshot.
            steps.append((sql.OVERTAKEN, {"ids": array(keyed)}))
        return steps

    def _tell_successors(self, done: Sequence[Keys]) -> Step:
        return (
            sql.TELL_SUCCESSORS,
            {
                "ids": array(one.id for one in done),
                "topics": [one.topic for one in done],
                "queues": [one.queue for one in done],
                "coalesce_keys": [one.coalesce_key for one in done],
                "ordering_keys": [one.ordering_key for one in done],
                # A worker that stops leaves them to others.
                "own_queues": _queues_of(self._lanes) if self.claims else [],
                "own_topics": list(self._options.topics) if self.claims else [],
            },
        )

    def _record(self, trip: _Trip[E]) -> None:
        """Note how far the claim has read its lanes, and put its rows in the order of the lanes and due times."""
        rows, lanes, now = trip.claimed, trip.lanes, time.monotonic()
        pages = [row for row in rows if row[_ID] is None]
        if pages:
            rows = [row for row in rows if row[_ID] is not None]
        by_lane: dict[tuple[str, int], list[Row]] = {}
        for row in rows:
            by_lane.setdefault((row[_QUEUE], row[_LANE]), []).append(row)
        rows = []
        lasts: dict[int, Place] = {}
        for number, lane in enumerate(lanes):
            same = by_lane.get((lane.queue, lane.number))
            if same is None:
                continue
            same.sort(key=_DUE_ORDER)
            rows += same
            key = max(row[_ORDERING_KEY] for row in same) if lane.number == _ORDERED else None
            lasts[number] = Place(same[-1][_AVAILABLE_AT], same[-1][_ID], key)
        places = {lane.queue: number for number, lane in enumerate(lanes) if lane.number == _ORDERED}
        lasts |= {places[row[_QUEUE]]: Place(None, None, row[_ORDERING_KEY]) for row in pages}
        # If the claim was filled, the last lane with rows may have more, and those behind it were not read.
        is_filled = len(trip.claimed) >= trip.room
        end = max(lasts, default=0) if is_filled else len(lanes)
        read = {lane.queue for lane in lanes}
        counts = {lane.queue: 0 for lane in self._lanes if lane.queue not in read}  # Nothing is due there.
        for number, lane in enumerate(lanes[: end + 1]):
            lane.record(lasts.get(number), is_filled=is_filled and number == end, now=now)
            counts[lane.queue] = counts.get(lane.queue, 0) + len(by_lane.get((lane.queue, lane.number), ()))
        if is_filled and not counts[lanes[end].queue]:
            del counts[lanes[end].queue]  # There was only room for the end of its page.
        self._turns.record(counts)
        if not is_filled:
            # The limits of a queue may have cut the claim, and messages that it ended have used no permit.
            for row in rows:
                if row[_STATE] != "sending":
                    self.want(row[_QUEUE])
        self.room_left -= len(rows)
        self.claimed_count += len(rows)
        trip.results = [*trip.results[:-1], rows]

    # --- rest

    async def _rest(self) -> None:
        """Sleep until something ends, a commit rings, a message falls due, or the next sweep."""
        if not self.claims:
            self.has_stopped.set()
            await self._wake.wait()
        elif self._attempts.room() <= 0 or self.room_left <= 0:
            self._is_confirmed = False
            if self._bell is not None:
                await self._bell.release()
            if self.room_left <= 0 and not self._attempts.in_flight:
                self.is_quiet.set()
            await self._wait(_ROOM_SECONDS)  # Without an end: messages that wait for a slot may be left to others.
        else:
            await self._sleep(self._swept_at + self._options.poll_seconds - time.monotonic())

    async def _sleep(self, seconds: float) -> None:
        """Sleep for so long at most. A worker that holds the bell misses no commit, so it sleeps until one is due."""
        if self._bell is not None and not self._is_confirmed:
            may_sleep = await self._bell.hold()
            if may_sleep == 0:
                self.want()
                self._is_confirmed = True
                return
            seconds = min(seconds, may_sleep)
        self._is_confirmed = False
        due = await self._ask_due()
        if due <= 0:
            self.sweep()
            return
        owed = min(lane.due_at() for lane in self._lanes) - time.monotonic()
        if (spread := self._spread_until - time.monotonic()) > 0:
            seconds = min(seconds, spread)
        elif not self._attempts.in_flight and not self._wake.is_set() and owed == math.inf:
            self.is_quiet.set()
        if not await self._wait(min(seconds, due, owed)):
            self.sweep()

    async def _wait(self, seconds: float) -> bool:
        """Wait until woken. Return False if the time ran out first."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _ask_due(self) -> float:
        """Return the seconds until a claim finds something that was not due before."""
        now = time.monotonic()
        read = [lane for lane in self._lanes if not isinstance(lane, OrderedLane) or lane.has_keys]
        fresh_at = min(lane.covered_at for lane in read if lane.number != 1)
        others_at = min(self._lapsed_at, *(lane.covered_at for lane in read if lane.number == 1))
        ask: Step = (
            sql.NEXT_DUE,
            {
                "queues": _queues_of(self._lanes),
                "since_seconds": min(now - fresh_at + _ROUND_TRIP_SECONDS, _ALL_TIME_SECONDS),
                "others_since_seconds": min(now - others_at + _ROUND_TRIP_SECONDS, _ALL_TIME_SECONDS),
            },
        )
        (*_, rows) = await self._link.trip([*self._end_claims(), ask])
        due = self._next_due(rows)
        has_keys = {row[0]: row[1] for row in rows}
        news = [lane.note_keys(has_keys=has_keys[lane.queue]) for lane in self._lanes if isinstance(lane, OrderedLane)]
        if any(news):
            return 0.0
        return math.inf if due is None else due


def _queues_of(lanes: Sequence[Lane]) -> list[str]:
    return list(dict.fromkeys(lane.queue for lane in lanes))


def array(values: Iterable[object]) -> str:
    """Return PostgreSQL's text of an array: the driver's own conversion takes forty times as long."""
    return f"{{{','.join(map(str, values))}}}"
