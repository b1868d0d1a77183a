"""The counts of past messages in a process: the sent ones by latency, the ended ones of each queue and topic, and
those of a queue by the time of their enqueue.

A past slot of time does not change, so a process counts it only once. It counts from the newest minute to the oldest,
for a short time per request. Readers see the slots counted so far.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, LiteralString, NamedTuple, TypeAlias

import psycopg

from pgoutbox.dashboard.database import Connection, allowing_bitmaps
from pgoutbox.database import operator_connection, sql

MINUTES: Final = 60
# Of each request.
_BUDGET_SECONDS: Final = 0.05
# A transaction can commit later than the finish time that it writes.
_SETTLED: Final = timedelta(minutes=2)
MINUTE: Final = timedelta(minutes=1)
_TEN_MINUTES: Final = timedelta(minutes=10)
_BUCKETS_OF_A_DOUBLING: Final = 12
# A page has two seconds for a statement.
_MINUTE_SECONDS: Final = 1.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Those of the overview, of the lists, and of the queues that were shown last.
_MOST_CONTENTS: Final = 32


class Range(NamedTuple):
    """A range of time up to now, in slots of one width."""

    name: str
    width: timedelta
    slot_count: int

    def slots(self, now: datetime) -> list[datetime]:
        """Return the beginnings of the slots, the current one last."""
        return _newest_first(now, self.width, self.slot_count)[::-1]


RANGES: Final = {
    known.name: known
    for known in (
        Range("1h", MINUTE, MINUTES),
        Range("6h", _TEN_MINUTES, 36),
        Range("24h", timedelta(minutes=30), 48),
        Range("14d", timedelta(hours=6), 56),
    )
}
_LONGEST: Final = max(known.width * known.slot_count for known in RANGES.values())
LAST_HOUR: Final = Range("1h", 3 * MINUTE, 21)
"""The range of the lines of queues and topics: an hour and the current slot. Long slots keep their pages small."""


Latencies: TypeAlias = Counter[int]
"""The sent messages of a slot of time by bucket of their latency."""

_Known: TypeAlias = dict[tuple[datetime, timedelta], Counter[Any]]
"""Counted times by beginning and length: slots, and the minutes of a slot that is not counted as a whole yet."""


class Flow(NamedTuple):
    """The messages of `LAST_HOUR` by slot and by name: when they ended, and when they were enqueued."""

    ended: Mapping[datetime, Counter[str]]
    enqueued: Mapping[datetime, Counter[str]]


class History:
    """The counted times of a process, by their contents and the width of their slots. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, timedelta], tuple[datetime, _Known]] = {}
        self._lock = threading.Lock()

    def sent(self, connection: Connection, now: datetime, asked: Range) -> dict[datetime, Latencies]:
        """Return the sent messages of a range by slot. The oldest slots are missing until they are counted."""
        found: dict[datetime, Latencies] = {}
        for at, latencies in self._slots(connection, now, asked, "sent", sql.SENT_BY_TIME).items():
            found.setdefault(_slot(at, asked.width), Counter()).update(latencies)
        return found

    def flow(self, connection: Connection, now: datetime, by: Literal["queue", "topic"], cap: int) -> Flow:
        """Return the messages that ended and that were enqueued in `LAST_HOUR`, likewise.

        At most `cap` live messages count: then the oldest enqueued ones are missing.
        """
        begin, width = LAST_HOUR.slots(now)[0], LAST_HOUR.width
        counted = self._slots(connection, now, LAST_HOUR, _until_an_act(connection, by), sql.ENDED_BY_NAME, by=by)
        ended: dict[datetime, Counter[str]] = {at: Counter() for at in counted}
        enqueued: defaultdict[datetime, Counter[str]] = defaultdict(Counter)
        for at, counts in counted.items():
            for (name, created_at), messages in counts.items():
                ended[at][name] += messages
                enqueued[_slot(created_at, width)][name] += messages
        parameters = {"by": by, "width": width.total_seconds(), "since": begin, "cap": cap}
        rows = connection.execute(sql.LIVE_LATELY, parameters).fetchall()
        is_capped = sum(messages for *_, messages in rows) >= cap
        known_from = min(at for at, *_ in rows) + width if is_capped else begin
        for at, name, messages in rows:
            enqueued[at.astimezone(UTC)][name] += messages
        return Flow(ended, {at: enqueued[at] for at in counted if at >= known_from})

    def depth(self, connection: Connection, now: datetime, asked: Range, queue: str, cap: int) -> dict[datetime, int]:
        """Return how many messages of a queue were pending or in flight at the beginnings of the slots, and now.

        The oldest slots are missing until they are counted. At most `cap` live messages of each lane count.
        """
        slots = asked.slots(now)
        before = slots[0] - asked.width
        created: Counter[datetime] = Counter()
        ended: Counter[datetime] = Counter()
        what = _until_an_act(connection, f"depth of {queue}")
        counted = self._slots(connection, now, asked, what, sql.ENDED_BY_TIME, queue=queue)
        for at, by_created in counted.items():
            ended[_slot(at, asked.width)] += by_created.total()
            for created_at, messages in by_created.items():
                created[max(_slot(created_at, asked.width), before)] += messages
        parameters = {"queue": queue, "width": asked.width.total_seconds(), "since": before, "cap": cap}
        for created_at, messages in connection.execute(sql.LIVE_BY_TIME, parameters):
            created[created_at.astimezone(UTC)] += messages
        # Messages that ended at times that are not counted are missing from both numbers.
        counted_from = max(min(counted, default=now), slots[0])
        waiting, found = 0, dict[datetime, int]()
        for slot in [before, *slots]:
            if slot >= counted_from:
                found[slot] = waiting
            waiting += created[slot] - ended[slot]
        return {**found, now: waiting}

    def _slots(
        self, connection: Connection, now: datetime, asked: Range, what: str, statement: LiteralString, **names: str
    ) -> dict[datetime, Counter[Any]]:
        """Return the counted slots of a range, ten minutes long at most: the newest ones, without a gap."""
        width = min(asked.width, _TEN_MINUTES)
        wanted = _newest_first(now, width, asked.width * asked.slot_count // width)
        with self._lock:
            known = _still_valid(now, *self._known.get((what, width), (now, {})))

        def count(first: datetime, last: datetime, length: timedelta) -> None:
            parameters = {"width": length.total_seconds(), "from": first, "to": last + length, **names}
            rows = connection.execute(statement, parameters).fetchall()
            known.update({(at, length): Counter() for at in _newest_first(last, length, (last - first) // length + 1)})
            for at, key, *more, messages in rows:
                known[at.astimezone(UTC), length][(key, *more) if more else key] += messages

        with allowing_bitmaps(connection):
            _count_back(connection, now, wanted, width, known, count)
        found = _without_gap(now, wanted, width, known)
        known.update({(at, width): counts for at, counts in found.items()})
        oldest = now - (_LONGEST if width == _TEN_MINUTES else asked.width * asked.slot_count)
        with self._lock:
            known = _still_valid(now, *self._known.pop((what, width), (now, {}))) | known
            kept = {
                (at, length): counts
                for (at, length), counts in known.items()
                # The current minute is not over. A long slot would take too long to count again.
                if oldest < at <= now - length and (length == MINUTE or at <= now - length - _SETTLED)
            }
            self._known[what, width] = (
                now,
                {
                    (at, length): counts
                    for (at, length), counts in kept.items()
                    if length == width or (_slot(at, width), width) not in kept
                },
            )
            while len(self._known) > _MOST_CONTENTS:
                del self._known[next(iter(self._known))]
        return found


def _until_an_act(connection: Connection, what: str) -> str:
    """Return a name for these contents until the next act, which can make ended messages pending again."""
    ((_, last_act, *_),) = connection.execute(sql.PULSE)
    return f"{what} after act {last_act}"


def _still_valid(now: datetime, then: datetime, known: _Known) -> _Known:
    """Return the times counted by `then`, without those that have become settled since."""
    return {(at, length): counts for (at, length), counts in known.items() if not then < at + length + _SETTLED <= now}


def _newest_first(now: datetime, width: timedelta, count: int) -> list[datetime]:
    last = _slot(now, width)
    return [last - number * width for number in range(count)]


def _slot(moment: datetime, width: timedelta) -> datetime:
    """Return the beginning of the slot of this moment. Slots begin at the epoch, as in the statements."""
    return moment.astimezone(UTC) - (moment - _EPOCH) % width


def _minutes(slot: datetime, width: timedelta, now: datetime) -> list[datetime]:
    """Return the minutes of a slot that have begun, the newest first."""
    last = min(now, slot + width - MINUTE)
    return _newest_first(last, MINUTE, (last - slot) // MINUTE + 1)


def _without_gap(
    now: datetime, wanted: list[datetime], width: timedelta, known: _Known
) -> dict[datetime, Counter[Any]]:
    """Return the counted slots, without those older than one of which a minute is missing."""
    found: dict[datetime, Counter[Any]] = {}
    for slot in wanted:
        if (slot, width) in known:
            found[slot] = known[slot, width]
            continue
        minutes = [(at, MINUTE) for at in _minutes(slot, width, now)]
        if not known.keys() >= set(minutes):
            break
        found[slot] = Counter()
        for minute in minutes:
            found[slot].update(known[minute])
    return found


def _count_back(
    connection: Connection,
    now: datetime,
    wanted: list[datetime],
    width: timedelta,
    known: _Known,
    count: Callable[[datetime, datetime, timedelta], None],
) -> None:
    """Count the missing minutes of these slots, the newest first, until the time is over. Quick steps grow.

    A step that takes too long is repeated for one minute. If that takes too long, it and all older times stay missing.
    """
    ends_at = time.monotonic() + _BUDGET_SECONDS
    missing = [slot for slot in wanted if (slot, width) not in known]
    step, is_further = _SETTLED + MINUTE, False
    # The newest minutes are counted every time. At least one more is counted, however long it takes.
    while missing and (not is_further or time.monotonic() < ends_at):
        minutes = [at for at in _minutes(missing[0], width, now) if (at, MINUTE) not in known]
        if not minutes:
            missing = missing[1:]
            continue
        # A settled minute is not counted again: retention may have deleted its messages.
        begun = {_slot(at, width) for at, part in known if part == MINUTE}
        whole = [at for at in missing if at not in begun and at + width - MINUTE <= now]
        is_whole = step >= width and missing[0] in whole
        length, left = (width, whole) if is_whole else (MINUTE, minutes)
        adjacent = [at for number, at in enumerate(left) if left[0] - at == number * length < step]
        first, last = adjacent[-1], adjacent[0]
        is_minute = last + length - first == MINUTE
        began_at = time.monotonic()
        seconds = _MINUTE_SECONDS if is_minute else max(0.01, ends_at - began_at)
        try:
            with connection.transaction():
                with operator_connection.limiting(seconds):
                    operator_connection.prepare(connection)
                    count(first, last, length)
                # Without a savepoint, the transaction would not survive a RELEASE that takes too long.
                operator_connection.prepare(connection)
        except psycopg.errors.QueryCanceled:
            if is_minute:
                break
            step = MINUTE
            continue
        if is_whole:
            missing = [at for at in missing if at < first]
        is_further = is_further or first <= now - MINUTE - _SETTLED
        taken = time.monotonic() - began_at
        if taken < _BUDGET_SECONDS / 4:
            step *= 2
        elif taken > _BUDGET_SECONDS / 2:
            step = max(MINUTE, step / 2)


def percentiles(slots: Iterable[Latencies], shares: Iterable[float]) -> list[float | None]:
    """Return percentiles of the latency in seconds, at most a few per cent too high."""
    total = sum(slots, Latencies())
    return [_percentile(total, share) for share in shares]


def _percentile(latencies: Counter[int], share: float) -> float | None:
    wanted = math.ceil(latencies.total() * share)
    seen = 0
    for bucket in sorted(latencies):
        seen += latencies[bucket]
        if seen >= wanted:
            return float(2.0 ** ((bucket + 1) / _BUCKETS_OF_A_DOUBLING))
    return None
