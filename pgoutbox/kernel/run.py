"""The loop of a worker: one round trip, in one transaction, finishes attempts and claims due messages.

It decides nothing about a message: the statements do. If this process stops at any line, the rows alone show the
remaining work.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Generic

import psycopg

from pgoutbox.kernel import statements as sql
from pgoutbox.kernel.lanes import KEY_LIMIT, KeyLane, KnownKeys, Lane, PagedKeys, Place, lanes_of, pause_after
from pgoutbox.kernel.seams import Attempts, Bell, E, End, Keys, Link, Rest, Row, Step, Turns

# A lease also runs while the machine is suspended.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# Nobody notifies a busy worker. These times limit how late it notices changed limits and new ordering keys, and lapsed
# attempts.
_SURVEY_SECONDS: Final = 1.0
_LAPSED_SECONDS: Final = 1.0
# The limit bounds the time of a trip. The messages fall due one after the other, because one of them may crash its
# process again, and then it meets few others.
_LAPSED_LIMIT: Final = 100
_LAPSED_DISTANCE_SECONDS: Final = 0.05
# After this time, rows that another session has locked are tried again.
_LOCKED_PAUSE_SECONDS: Final = 0.1
# Claims of several rows can conflict at a unique index again and again: then it claims one row.
_STUBBORN_CONFLICTS: Final = 3
_CONFLICT_PAUSE_SECONDS: Final = 0.01
# `Attempts.room` also depends on the time, so a worker without room asks again.
_ROOM_SECONDS: Final = 1.0
# Other workers get so long to claim the messages that this one has released.
_OTHERS_FIRST_SECONDS: Final = 0.05
# A question may take so much longer to the server than the last claim, and still covers the time since that one.
_ROUND_TRIP_SECONDS: Final = 0.002
_ALL_TIME_SECONDS: Final = 1e9
# After so many claims with messages within so long, it polls: transactions that notify commit one after the other.
_FAST_CLAIMS: Final = 8
_FAST_SECONDS: Final = 0.25
_FAST_POLL_SECONDS: Final = 0.01
_LULL_SECONDS: Final = 0.1  # Without a message for so long, it lets them notify again.
_GOES_ON: Final = ("pending", "sending")
_LOST_RACES: Final = (
    psycopg.errors.UniqueViolation,
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
)
# The columns of claim.sql.
_ID, _TOPIC, _ATTEMPT_COUNT, _AVAILABLE_AT, _COALESCE_KEY, _ORDERING_KEY = 0, 1, 5, 9, 10, 11
_STATE, _QUEUE, _LOST_SESSION, _LANE = 14, 17, 18, 19
_PERMIT_SECONDS, _PROBE_SECONDS = 2, 5  # The columns of next_due.sql.
_DUE_ORDER: Final = itemgetter(_AVAILABLE_AT, _ID)
_RETRIES, _KNOWN_KEYS, _PAGED_KEYS = 1, 2, 3
_AS_SENT: Final = End("sent")
_ESCAPED: Final = str.maketrans({"\\": "\\\\", '"': '\\"'})


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
    probe_seconds: float


@dataclass(slots=True, eq=False)
class _Trip(Generic[E]):
    """A round trip: what it finishes and claims, and the answer.

    `results` has the rows of each of `steps`, in the order of `Run._trip_of`. `Run._note_answers` takes the rows of the
    last question away: only after it, `lapsed`, `probed` and `claimed` find theirs, from the end.
    """

    began_at: float
    forgotten: Sequence[E]  # The sent ones whose messages may be deleted.
    sent: list[list[E]]  # The other sent ones.
    others: list[E]
    lanes: Sequence[Lane]
    room: int
    takes_lapsed: bool
    probes: bool
    surveys_at: int | None  # The place of the question about the queues.
    asks_due: bool
    steps: list[Step]
    results: Sequence[Sequence[Row]] = ()
    follows: Sequence[Step] = ()  # What its commit asks for.

    @property
    def ended(self) -> list[E]:
        """All attempts that it finishes."""
        return [one for same in (self.forgotten, *self.sent, self.others) for one in same]

    @property
    def has_unwritten(self) -> bool:
        """Whether some attempts were not finished: see `Run._settle`."""
        results = iter(self.results)
        written_count: int = len(next(results)) if self.forgotten else 0
        written_count += sum(next(results)[0][0] for _ in self.sent)
        written_count += len(next(results)) if self.others else 0
        return written_count < len(self.forgotten) + sum(map(len, self.sent)) + len(self.others)

    @property
    def is_for_others(self) -> bool:
        """Whether it finishes messages that another worker may be able to deliver."""
        return any(one.end is not None and one.end.is_for_others for one in self.others)

    @property
    def lapsed(self) -> Sequence[Row]:
        return self.results[-1 - bool(self.lanes) - self.probes] if self.takes_lapsed else ()

    @property
    def probed(self) -> Sequence[Row]:
        """The message that probes a breaker, if there is one."""
        return self.results[-1 - bool(self.lanes)] if self.probes else ()

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
        self._known = {lane.queue: lane for lane in self._lanes if isinstance(lane, KnownKeys)}
        self._paged = {lane.queue: lane for lane in self._lanes if isinstance(lane, PagedKeys)}
        self._bell = bell
        self._next_due = next_due
        self._handle_error = handle_error
        self._wake = asyncio.Event()
        self._swept_at = -math.inf
        self._lapsed_at = -math.inf
        self._surveyed_at = -math.inf
        self._is_lapsed_wanted = True
        self._limited: set[str] = set()  # The queues that are paused or have limits.
        self._probe_at = math.inf  # A breaker may be probed by a message of these queues.
        self._may_probe_at = -math.inf
        self._spread_until = -math.inf  # Until then, messages of lapsed attempts fall due one after the other.
        self.suspect: int | None = None
        """The message in flight that may crash this process: there is one at most."""
        self._may_sleep = False
        self._due_at: float | None = None  # When something falls due, as far as the last trip has asked.
        self._is_backlogged = False  # The last claim was filled.
        self._answered: _Trip[E] | None = None  # Its answer is still to be taken in, while the next trip is on its way.
        self._finished: list[Keys] = []  # Messages that their attempts have finished: not told to successors yet.
        self._found_ats: deque[float] = deque([-math.inf], maxlen=_FAST_CLAIMS)  # The last claims with messages.
        self._is_fast = False  # Messages come so fast that it polls.
        self._leaves_to_others = False  # The messages that it could not deliver fall due for other workers first.
        self._conflict_count = 0  # How many claims in a row have failed because of another session.
        self._end_limit = options.batch_size  # How many ends the next trip writes.
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

    async def write_last(self, ended: Sequence[E] = ()) -> None:
        """Write these ends after `run` has ended, and delete the rows of claims whose attempts have ended."""
        self._is_careful = True
        trip = await self._trip_of(ended, (), 0, now=_now())
        if trip.steps:
            trip.results = await self._link.trip(trip.steps)
            await self._settle(trip)

    @property
    def on_the_way(self) -> int:
        """How many messages are claimed but not begun."""
        return 0 if self._answered is None else len(self._answered.claimed)

    def sweep(self) -> None:
        """Look again for everything: messages that are due, and lapsed attempts."""
        self._is_lapsed_wanted = True
        self.want()

    def forget_suspect(self, message_id: int) -> None:
        """Take over the next suspect, if this message was one: it has ended or hangs, so it is not likely to crash."""
        if self.suspect == message_id:
            self.suspect = None
            self.sweep()

    def note_finished(self, keys: Keys) -> None:
        """Tell the messages that waited for this one: its attempt has finished it in a transaction of its own."""
        self._finished.append(keys)

    def wake(self) -> None:
        """Look again for ends to write, and for room."""
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        self._may_sleep = True
        try:
            while True:
                self._wake.clear()
                try:
                    if not await self._turn():
                        await self._rest()
                except (psycopg.Error, OSError) as error:
                    await self._handle_error(error)
        finally:
            if self._answered is not None:
                self._link.abandon()  # No attempt of this claim begins.
            self.has_stopped.set()

    async def run_once(self) -> None:
        """Claim and finish until nothing is due and nothing is in flight. It does not wait for due times."""
        self.claim()
        while True:
            self._wake.clear()
            if await self._turn():
                continue
            owed = min(lane.due_at() for lane in self._lanes) - _now()
            if not self._attempts.unwritten_count and owed == math.inf:
                return
            await self._wait(min(owed, _ROOM_SECONDS))

    # --- finish and claim

    async def _turn(self) -> bool:
        """Finish attempts and claim due messages. Return whether to do so again at once.

        While a trip is on its way, the answer to the last one is taken in, and handlers run.
        """
        if self._finished:
            # First: after a failed trip, all claimed attempts that have not begun are released.
            await self._take_in_answered()
            await self._tell_finished()
        trip = await self._plan(_now())
        if trip is None and self._answered is None:
            return bool(self._finished)
        if trip is None:
            await self._take_in_answered()
        elif self._answered is None:
            await self._receive(trip, self._link.trip(trip.steps))
        else:
            await self._receive(trip, await self._send_and_take_in_answered(trip))
        return True

    async def _send_and_take_in_answered(self, trip: _Trip[E]) -> Awaitable[list[list[Row]]]:
        answering = asyncio.ensure_future(self._link.trip(trip.steps))
        try:
            await asyncio.sleep(0)  # A task sends its trip in its first turn of the event loop.
            await self._take_in_answered()
        except BaseException:
            # Whatever its answer is: its ends are written again, and what it has begun is released.
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            self._attempts.put_back(trip.ended)
            self._abandon()
            raise
        return answering

    async def _plan(self, now: float) -> _Trip[E] | None:
        """Return the next trip, unless there is nothing to finish and nothing to claim."""
        if self.claims and now - self._swept_at >= self._options.poll_seconds:
            # Everything from the beginning, whatever the traffic: rows that were locked, and lost wake-ups.
            self._swept_at = now
            self._is_lapsed_wanted = True
            for lane in self._lanes:
                lane.want()
        if self.suspect is not None and self.suspect not in self._attempts.in_flight:
            self.forget_suspect(self.suspect)
        ended = self._attempts.take_ended(self._end_limit)
        self._want_next([one.keys for one in ended])
        self._is_careful &= bool(ended)  # Their messages may have been lost meanwhile.
        room = 0
        if self.claims and not self._is_careful:
            room = int(min(self._attempts.room(self.on_the_way), self.room_left))
            room = min(room, 1) if self._conflict_count > _STUBBORN_CONFLICTS else room
        lanes = self._wanted(now) if room > 0 else []
        # Not beside a claim that a message waits for: with the ends of the last ones.
        looks_again = bool(ended) and now - self._lapsed_at >= _LAPSED_SECONDS
        takes_lapsed = room > 0 and (self._is_lapsed_wanted or looks_again)
        probes = room > 0 and now >= max(self._probe_at, self._may_probe_at) and self._attempts.may_probe()
        if (takes_lapsed or probes) and room + takes_lapsed + probes > self.room_left:
            lanes = []  # A suspect or a probe may use up the room that is left.
            probes = probes and not takes_lapsed
        if takes_lapsed and self._lapsed_at == -math.inf:
            lanes = []  # It also prepares its statements: over a slow network, the lease of a claim would age.
        if not (ended or lanes or takes_lapsed or probes):
            return None
        try:
            return await self._trip_of(ended, lanes, room, takes_lapsed=takes_lapsed, probes=probes, now=now)
        except BaseException:
            self._attempts.put_back(ended)
            raise

    async def _trip_of(
        self,
        ended: Sequence[E],
        lanes: Sequence[Lane],
        room: int,
        *,
        takes_lapsed: bool = False,
        probes: bool = False,
        now: float,
    ) -> _Trip[E]:
        forgotten = _by_id(await self._attempts.forgotten(ended)) if ended else []
        sent, others = self._sorted(_without(forgotten, ended))
        steps: list[Step] = [(sql.FORGET_SENT, self._fence(forgotten))] if forgotten else []
        steps += [*self._finish(sent, others), *self._end_claims(ended)]
        asks_due = room > 0 and self._is_likely_last(lanes)
        surveys_at = None
        if lanes and not asks_due and now - self._surveyed_at >= _SURVEY_SECONDS:
            surveys_at = len(steps)
            steps.append(self._next(0.0, 0.0))
        if takes_lapsed:
            self._is_lapsed_wanted = False  # A wish from now on is one for a later look.
            steps += [(sql.FORGET_LAPSED, {}), self._lapsed()]
        if probes:
            steps.append(self._claim_probe())
        if lanes:
            steps.append(self._claim(lanes, room, now))
        if asks_due:
            steps.append(self._ask_due(lanes, takes_lapsed=takes_lapsed))
        return _Trip(now, forgotten, sent, others, lanes, room, takes_lapsed, probes, surveys_at, asks_due, steps)

    def _is_likely_last(self, lanes: Sequence[Lane]) -> bool:
        """Whether the worker will sleep after this trip. Then the trip also asks for the next due time."""
        # Ordering keys are read page after page.
        return self._may_sleep and not self._is_backlogged and all(lane.number != _PAGED_KEYS for lane in lanes)

    async def _tell_finished(self) -> None:
        has_room = self._attempts.room(self.on_the_way) > len(self._finished)
        (rows,) = await self._link.trip([self._tell_successors(self._finished, has_room=has_room)])
        for queue in {queue for queue, _ in rows}:
            self.want(queue)
        self._want_next(self._finished)
        self._finished.clear()

    def _want_next(self, ended: Iterable[Keys | None]) -> None:
        """Claim the next messages of the ordering keys whose messages have ended."""
        for keys in ended:
            if keys is not None and keys.ordering_key is not None:
                known = self._known[keys.queue]
                if known.has_keys:
                    known.want_key(keys.ordering_key)
                else:
                    self._paged[keys.queue].want()

    def _wanted(self, now: float) -> list[Lane]:
        """Return the lanes of the next claim: those of a queue take turns, so that no backlog delays another one.

        Beside a backlog, all lanes are read now and then: nobody tells a busy worker about new messages.
        """
        others: list[Lane] = []
        if any(lane.due_at() <= now for lane in self._lanes):
            learns_of_keys = self._is_likely_last(())  # By the question for due times, which costs less.
            others = [
                lane for lane in self._lanes if not isinstance(lane, KeyLane) or lane.has_keys or not learns_of_keys
            ]
        wanted = [lane for lane in self._lanes if lane.due_at() <= now or (lane in others and lane.may_begin(now))]
        # One claim does not read both lanes of ordering keys: it would find the same messages in both. The first one
        # reads a page at random: short processes would otherwise all begin with the newest messages.
        keyed: dict[str, Lane] = {}
        for lane in wanted:
            if isinstance(lane, KeyLane) and (lane.queue not in keyed or lane.read_at <= keyed[lane.queue].read_at):
                keyed[lane.queue] = lane
        wanted = [lane for lane in wanted if not isinstance(lane, KeyLane) or keyed[lane.queue] is lane]
        places = {queue: number for number, queue in enumerate(self._turns.order())}
        return sorted(wanted, key=lambda lane: (places[lane.queue], lane.served_at))

    async def _receive(self, trip: _Trip[E], answering: Awaitable[list[list[Row]]]) -> None:
        """Await the answer to a trip, and note where the next claim begins."""
        try:
            trip.results = await answering
        except BaseException as error:
            self._is_lapsed_wanted |= trip.takes_lapsed
            if not self._may_repeat(trip.ended, error):
                raise
            self._conflict_count += bool(trip.lanes)
            if self._conflict_count > _STUBBORN_CONFLICTS:
                await asyncio.sleep(_CONFLICT_PAUSE_SECONDS)
            return
        self._is_careful, self._end_limit = False, self._options.batch_size
        self._leaves_to_others |= trip.is_for_others
        due_at, self._due_at = self._due_at, None
        self._note_answers(trip)
        if due_at is not None and due_at <= _now() and not (trip.lanes and due_at <= trip.began_at):
            # A message that fell due while the question was on its way is neither in its answer nor claimed.
            self.want()
        if trip.lanes:
            self._conflict_count = 0
            self._leaves_to_others &= not trip.claimed
            self._record(trip)
        self._answered = trip
        if self._bell is not None and self._comes_fast(trip.claimed):
            await self._bell.hush()
        # Some need trips of their own, before the next one: beside an unanswered trip, they would release its claim.
        trip.follows = self._follow_steps(trip)
        if not trip.claimed or trip.lapsed or trip.probed or trip.follows or trip.has_unwritten:
            await self._take_in_answered()

    def _note_answers(self, trip: _Trip[E]) -> None:
        """Note what the answer says of due times, probes and queues."""
        if trip.takes_lapsed:
            self._lapsed_at = trip.began_at
        due = None
        if trip.asks_due:
            *trip.results, due = trip.results
        if trip.probes:
            self._note_probe(trip)  # The questions are newer.
        if due is not None:
            self._note_due(due)
        elif trip.surveys_at is not None:
            self._note_queues(trip.results[trip.surveys_at])

    async def _take_in_answered(self) -> None:
        trip = self._answered
        if trip is None:
            return
        self._answered = None
        try:
            overtaken = await self._follow(trip)
        except BaseException:
            # The ends are written again, which changes nothing.
            self._attempts.put_back(trip.ended)
            self._abandon()
            raise
        try:
            await self._settle(trip)
        finally:
            await self._begin(trip, overtaken)
        if trip.lapsed:
            await self._end_sessions(trip.lapsed)

    async def _begin(self, trip: _Trip[E], overtaken: Set[int]) -> None:
        try:
            if trip.takes_lapsed:
                await self._note_lapsed(trip.lapsed, trip.began_at)
            for row in trip.probed:
                self.is_quiet.clear()
                await self._attempts.begin_probe(row, overtaken, trip.began_at)
            if trip.claimed:
                self.is_quiet.clear()
                await self._attempts.begin(trip.claimed, overtaken, trip.began_at)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Release what the last claim has begun, and claim it again."""
        self._link.abandon()
        self.want()

    def _may_repeat(self, ended: Sequence[E], error: BaseException) -> bool:
        """Take back the ends of a trip that failed. Return whether to go on at once.

        The database refuses the outcome of a message, or another session has a key or a row. The outcomes are written
        without the claim, and then by halves until a refused one is alone.
        """
        is_refused = self._link.refuses(error)
        if is_refused and self._is_careful and len(ended) == 1:
            self._attempts.note_refused(ended[0], error)
            self._is_careful, self._end_limit = False, self._options.batch_size
            return True
        self._attempts.put_back(ended)
        if ended and (is_refused or isinstance(error, _LOST_RACES)):
            self._end_limit = max(1, len(ended) // 2) if self._is_careful else len(ended)
            self._is_careful = True
            return True
        return isinstance(error, _LOST_RACES) and not is_refused

    async def _note_lapsed(self, rows: Sequence[Row], began_at: float) -> None:
        """Note the ends of lapsed attempts, and begin that of a suspect."""
        now = _now()
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
            await self._attempts.begin(suspects, frozenset(), began_at)

    def _note_probe(self, trip: _Trip[E]) -> None:
        """Note when to look for a probe again: after one, another breaker may be due."""
        now, count = _now(), len(trip.probed)
        # Without a row, another session may have the lock of the breaker or of the queue.
        self._may_probe_at = now + max(pause_after(now - trip.began_at), 0.0 if count else _LOCKED_PAUSE_SECONDS)
        self._probe_at = now if count else math.inf
        self.room_left -= count
        self.claimed_count += count

    async def _end_sessions(self, rows: Sequence[Row]) -> None:
        """End the sessions of lost attempts, so that the next ones do not wait for their locks."""
        counts = [row[_ATTEMPT_COUNT] - (row[_STATE] == "sending") for row in rows]
        parameters = {
            "ids": array(row[_ID] for row in rows),
            "attempt_counts": array(counts),
            "sessions": list({row[_LOST_SESSION] for row in rows}),
        }
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
        return list(sent.values()), _by_id(others)

    def _finish(self, sent: Sequence[Sequence[E]], others: Sequence[E]) -> list[Step]:
        steps: list[Step] = [
            (
                sql.FINISH_SENT,
                {
                    "ids": array([one.message_id for one in same]),
                    "claimed_ats": array({one.claimed_at.isoformat() for one in same}),
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
                    sql.FINISH if all(end.held_delay_seconds is None for end in ends) else sql.FINISH_AND_HOLD,
                    {
                        **self._fence(others),
                        "outcomes": [end.outcome for end in ends],
                        "reasons": [end.reason for end in ends],
                        "reason_codes": [end.reason_code for end in ends],
                        "breaker_keys": [end.breaker_key for end in ends],
                        "error_places": [end.error_place for end in ends],
                        "delays": [end.delay_seconds for end in ends],
                        "fails_after": [end.fails_after_seconds for end in ends],
                        "held_delays": [end.held_delay_seconds for end in ends],
                        "hooks": self._options.hooks,
                    },
                )
            )
        return steps

    def _end_claims(self, ended: Sequence[E]) -> list[Step]:
        claimed_ats = self._attempts.take_ended_claims(ended)
        if not claimed_ats:
            return []
        ats = array(claimed_at.isoformat() for claimed_at in claimed_ats)
        return [(sql.END_CLAIMS, {"worker": self._options.worker, "claimed_ats": ats})]

    def _fence(self, ended: Sequence[E]) -> dict[str, object]:
        """Return the fence of attempts that are sorted by id, because it is searched by width_bucket."""
        return {
            "ids": array([one.message_id for one in ended]),
            "attempt_counts": array([one.attempt_count for one in ended]),
            "claimed_ats": array([one.claimed_at.isoformat() for one in ended]),
            "worker": self._options.worker,
        }

    async def _settle(self, trip: _Trip[E]) -> None:
        """Note the written ends. Ask about the others: a locked row, or a lost answer or lease."""
        unknown: list[E] = []
        results = iter(trip.results)
        if trip.forgotten:
            written = {row[0] for row in next(results)}
            self._attempts.settle_sent([one for one in trip.forgotten if one.message_id in written])
            unknown += [one for one in trip.forgotten if one.message_id not in written]
        for same in trip.sent:
            ((count,),) = next(results)
            if count == len(same):
                self._attempts.settle_sent(same)
            else:
                unknown += same
        if trip.others:
            states: dict[int, str] = dict(next(results))
            self._attempts.settle([one for one in trip.others if one.message_id in states], states)
            unknown += [one for one in trip.others if one.message_id not in states]
        if not unknown:
            return
        asked = _by_id(unknown)
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
            sql.CLAIM if any(lane.number >= _KNOWN_KEYS for lane in lanes) else sql.CLAIM_WITHOUT_KEYS,
            {
                "served": _queues_of(lanes),
                "queues": text_array(lane.queue for lane in lanes),
                "lanes": array(lane.number for lane in lanes),
                "after_ats": array(start.after_at.isoformat() if start.after_at else "NULL" for start in starts),
                "after_ids": array(start.after_id for start in starts),
                "since_seconds": array(start.since_seconds for start in starts),
                "after_keys": text_array(start.after_key for start in starts),
                "known_lanes": array([number for number, start in enumerate(starts, 1) for _ in start.keys]),
                "known_keys": text_array(key for start in starts for key in start.keys),
                "key_limit": KEY_LIMIT,
                "topics": text_array(self._options.topics),
                "total": room,
                "worker": self._options.worker,
                "lease_seconds": self._options.lease_seconds,
            },
        )

    def _claim_probe(self) -> Step:
        options = self._options
        return (
            sql.CLAIM_PROBE,
            {
                "queues": _queues_of(self._lanes),
                "topics": list(options.topics),
                "worker": options.worker,
                "lease_seconds": options.lease_seconds,
                "probe_seconds": options.probe_seconds,
            },
        )

    async def _follow(self, trip: _Trip[E]) -> Set[int]:
        """Run the statements that follow the commit of a trip. Return the claimed messages that are superseded."""
        results = await self._link.trip(trip.follows) if trip.follows else []
        overtaken: Set[int] = frozenset()
        for (statement, _), rows in zip(trip.follows, results, strict=True):
            if statement is sql.OVERTAKEN:
                overtaken = {row[0] for row in rows}
            elif statement is sql.TELL_SUCCESSORS:
                for queue, _ in rows:
                    self.want(queue)
            elif statement is sql.TELL_WORKERS:
                self.want()  # Released messages keep their due times, so only a search finds them.
        return overtaken

    def _follow_steps(self, trip: _Trip[E]) -> list[Step]:
        """Return what follows: messages that waited for those that have ended can begin, here or in another worker."""
        done = [one.keys for one in trip.ended if one.keys is not None]
        done += [
            _keys_of(row)
            for row in trip.lapsed
            if row[_STATE] not in _GOES_ON and (row[_COALESCE_KEY] or row[_ORDERING_KEY])
        ]
        # Messages that a claim ends were not in flight, so no message of a coalesce key has waited for them.
        done += [
            Keys(row[_ID], row[_TOPIC], row[_QUEUE], None, row[_ORDERING_KEY])
            for row in trip.claimed
            if row[_ORDERING_KEY] is not None and row[_STATE] != "sending"
        ]
        begun = [*trip.claimed, *trip.probed]
        keyed = [row[_ID] for row in begun if row[_COALESCE_KEY] is not None and row[_STATE] == "sending"]
        steps: list[Step] = []
        if done:
            is_filled = sum(row[_STATE] == "sending" for row in trip.claimed) >= trip.room
            steps.append(self._tell_successors(done, has_room=not is_filled))
        if trip.is_for_others:
            steps.append((sql.TELL_WORKERS, {"queues": _queues_of(self._lanes)}))
        if keyed:
            # A newer message may have been committed, delivered and finished since the claim's snapshot.
            steps.append((sql.OVERTAKEN, {"ids": array(keyed)}))
        return steps

    def _tell_successors(self, done: Sequence[Keys], *, has_room: bool) -> Step:
        # A worker that stops leaves them to others, and so does one without room: it may be full for long.
        begins_them = self.claims and has_room
        return (
            sql.TELL_SUCCESSORS,
            {
                "ids": array(one.id for one in done),
                "topics": [one.topic for one in done],
                "queues": [one.queue for one in done],
                "coalesce_keys": [one.coalesce_key for one in done],
                "ordering_keys": [one.ordering_key for one in done],
                "own_queues": _queues_of(self._lanes) if begins_them else [],
                "own_topics": list(self._options.topics) if begins_them else [],
            },
        )

    def _record(self, trip: _Trip[E]) -> None:
        """Note how far the claim has read its lanes, and put its rows in the order of the lanes and due times."""
        rows, lanes, now = trip.claimed, trip.lanes, _now()
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
            # The last one that was read: the statement reads keys by COLLATE "C", which is also Python's order.
            key = max(row[_ORDERING_KEY] for row in same) if lane.number == _PAGED_KEYS else None
            lasts[number] = Place(same[-1][_AVAILABLE_AT], same[-1][_ID], key)
        places = {lane.queue: number for number, lane in enumerate(lanes) if lane.number == _PAGED_KEYS}
        for row in pages:
            number = places[row[_QUEUE]]
            lasts[number] = Place(lasts[number].at if number in lasts else None, None, row[_ORDERING_KEY])
        # If the claim was filled, the last lane with rows may have more, and those behind it were not read. One that
        # looks unfilled may have missed a message that changed meanwhile: the act that changed it wakes the workers.
        self._is_backlogged = is_filled = len(trip.claimed) >= trip.room
        end = max(lasts, default=0) if is_filled else len(lanes)
        read = {lane.queue for lane in lanes}
        counts = {lane.queue: 0 for lane in self._lanes if lane.queue not in read}  # Nothing is due there.
        for number, lane in enumerate(lanes[: end + 1]):
            lane.record(lasts.get(number), is_filled=is_filled and number == end, now=now)
            counts[lane.queue] = counts.get(lane.queue, 0) + len(by_lane.get((lane.queue, lane.number), ()))
        if is_filled and not counts[lanes[end].queue]:
            del counts[lanes[end].queue]  # There was only room for the end of its page.
        self._turns.record(counts)
        self._note_keys(lanes, by_lane)
        self._want_rest([row for row in rows if row[_STATE] != "sending"], () if is_filled else pages)
        self.room_left -= len(rows)
        self.claimed_count += len(rows)
        trip.results = [*trip.results[:-1], rows]

    def _note_keys(self, lanes: Sequence[Lane], rows: Mapping[tuple[str, int], Sequence[Row]]) -> None:
        """Note where a round over all keys is long, and which known keys have their message claimed."""
        for lane in lanes:
            if isinstance(lane, KeyLane):
                self._note_known(lane.queue)
            if isinstance(lane, KnownKeys):
                lane.forget_keys(row[_ORDERING_KEY] for row in rows.get((lane.queue, lane.number), ()))

    def _want_rest(self, ended: Sequence[Row], pages: Sequence[Row]) -> None:
        """Claim again where messages that the claim has ended, or the ends of pages, took the place of others."""
        for row in ended:  # It has used no permit.
            self.want(row[_QUEUE])
        self._want_next(map(_keys_of, ended))
        # Nor has the end of a page, but the lanes behind it got less.
        cut = {row[_QUEUE] for row in pages if row[_QUEUE] in self._limited}
        for lane in self._lanes:
            if lane.queue in cut and lane.number != _PAGED_KEYS:
                lane.want()

    def _comes_fast(self, claimed: Sequence[Row] = ()) -> bool:
        """Return whether messages come fast: until none has come for a while."""
        now, found_ats = _now(), self._found_ats
        if claimed:
            found_ats.append(now)
        if self._is_fast:
            self._is_fast = now - found_ats[-1] < _LULL_SECONDS
        else:
            self._is_fast = len(found_ats) == _FAST_CLAIMS and now - found_ats[0] < _FAST_SECONDS
        return self._is_fast

    # --- rest

    async def _rest(self) -> None:
        """Sleep until something ends, a commit rings, a message falls due, or the next sweep."""
        if not self.claims:
            self.has_stopped.set()
            await self._wake.wait()
        elif self._attempts.room(0) <= 0 or self.room_left <= 0:
            if self._bell is not None:
                await self._bell.release()
            if not self._attempts.unwritten_count:
                self.is_quiet.set()
            await self._wait(_ROOM_SECONDS)  # Without an end: messages that wait for a slot may be left to others.
        elif self._bell is not None and self._comes_fast():
            await self._wait(_FAST_POLL_SECONDS)
            self.want()
        else:
            await self._sleep()

    async def _sleep(self) -> None:
        """Sleep until a commit rings, a message falls due, or the next sweep."""
        rest = Rest()
        if self._bell is not None:
            rest, rows = await self._bell.hold(self._ask_due)
            if rest.poll_seconds == 0:
                self.want()
                return
            if rows is not None:
                self._note_due(rows)
        await self._know_due()
        now = _now()
        if self._due_at is None or self._due_at <= now:
            self.sweep()
            return
        probe_at = max(self._probe_at, self._may_probe_at) if self._attempts.may_probe() else math.inf
        if probe_at <= now:
            return
        owed_at = min(lane.due_at() for lane in self._lanes)
        polls_at = min(now + rest.poll_seconds, self._swept_at + self._options.poll_seconds)
        sweeps_at = min(self._due_at, owed_at, probe_at, polls_at)
        if self._spread_until > now:
            sweeps_at = min(sweeps_at, self._spread_until)
        elif not self._attempts.unwritten_count and not self._wake.is_set() and owed_at == math.inf:
            self.is_quiet.set()
        if await self._wait(min(sweeps_at - now, rest.look_seconds)):
            return
        if now + rest.look_seconds < sweeps_at:
            self._due_at = None  # Another worker should have claimed the messages that have fallen due meanwhile.
        else:
            self.sweep()

    async def _know_due(self) -> None:
        steps = self._end_claims([])
        if self._due_at is not None:
            if steps:
                await self._link.trip(steps)
            return
        (*_, rows) = await self._link.trip([*steps, self._ask_due()])
        self._note_due(rows)

    async def _wait(self, seconds: float) -> bool:
        """Wait until woken. Return False if the time ran out first."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
        return loop.time() < timer.when()

    def _ask_due(self, lanes: Sequence[Lane] = (), *, takes_lapsed: bool = False) -> Step:
        """Ask when a claim will find something that was not due before: these lanes are claimed from in this trip."""
        now = _now()
        fresh_seconds = others_seconds = 0.0
        for lane in self._lanes:
            if lane in lanes or (isinstance(lane, KeyLane) and lane is not self._due_lane(lane.queue)):
                continue
            seconds = now - lane.covered_at + _ROUND_TRIP_SECONDS
            if lane.number == _RETRIES:
                others_seconds = max(others_seconds, seconds)
            else:
                fresh_seconds = max(fresh_seconds, seconds)
        if not takes_lapsed:
            others_seconds = max(others_seconds, now - self._lapsed_at + _ROUND_TRIP_SECONDS)
        return self._next(fresh_seconds, others_seconds)

    def _next(self, since_seconds: float, others_since_seconds: float) -> Step:
        return (
            sql.NEXT_DUE,
            {
                "queues": _queues_of(self._lanes),
                "topics": list(self._options.topics),
                "since_seconds": min(since_seconds, _ALL_TIME_SECONDS),
                "others_since_seconds": min(others_since_seconds, _ALL_TIME_SECONDS),
            },
        )

    def _note_due(self, rows: Sequence[Row]) -> None:
        """Note when something falls due."""
        due, is_news = self._note_queues(rows)
        later = _OTHERS_FIRST_SECONDS if self._leaves_to_others else 0.0
        self._due_at = None if is_news else math.inf if due is None else _now() + due + later

    def _note_queues(self, rows: Sequence[Row]) -> tuple[float | None, bool]:
        """Note what the queues have. Return the seconds to the next due time, and whether there are new lanes."""
        self._surveyed_at = _now()
        due = self._next_due(rows)
        limited = {row[0] for row in rows if row[_PERMIT_SECONDS] is not None}
        if not self._limited <= limited:
            self.sweep()  # A queue is free again: its suspects have lapsed before, and may begin now.
        self._limited = limited
        probes = [row[_PROBE_SECONDS] for row in rows if row[_PROBE_SECONDS] is not None]
        self._probe_at = self._surveyed_at + min(probes, default=math.inf)
        news = []
        for queue, has_keys, *_ in rows:
            self._paged[queue].note_limits(is_limited=queue in limited)
            news += [self._paged[queue].note_keys(has_keys=has_keys), self._note_known(queue)]
        return due, any(news)

    def _note_known(self, queue: str) -> bool:
        """Use the lane of known keys where a round over all keys is long. Return whether that is new."""
        known, paged = self._known[queue], self._paged[queue]
        if known.is_wanted and not paged.uses_known_keys:
            paged.want()  # The next round finds the messages of the known keys.
        return known.note_keys(has_keys=paged.uses_known_keys)

    def _due_lane(self, queue: str) -> KeyLane | None:
        """Return the lane that finds the messages with an ordering key which fall due, if the queue has any."""
        known, paged = self._known[queue], self._paged[queue]
        return known if known.has_keys else paged if paged.has_keys else None


def _now() -> float:
    return time.clock_gettime(_CLOCK)


def _keys_of(row: Row) -> Keys:
    return Keys(row[_ID], row[_TOPIC], row[_QUEUE], row[_COALESCE_KEY], row[_ORDERING_KEY])


def _by_id(attempts: Iterable[E]) -> list[E]:
    return sorted(attempts, key=lambda one: one.message_id)


def _without(some: Sequence[E], ended: Sequence[E]) -> Sequence[E]:
    ids = {one.message_id for one in some}
    return [one for one in ended if one.message_id not in ids] if ids else ended


def _queues_of(lanes: Sequence[Lane]) -> list[str]:
    return list(dict.fromkeys(lane.queue for lane in lanes))


def text_array(values: Iterable[str | None]) -> str:
    """Return PostgreSQL's text of an array of texts."""
    return array(["NULL" if value is None else f'"{value.translate(_ESCAPED)}"' for value in values])


def array(values: Iterable[object]) -> str:
    """Return PostgreSQL's text of an array: the driver's own conversion takes forty times as long."""
    return f"{{{','.join(map(str, values))}}}"
