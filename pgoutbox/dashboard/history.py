"""Sent messages by time and latency: those of the last hour by minute, and those of up to two weeks by ten minutes; and
the ended messages of the last hour by queue and by topic.

A past slot of time does not change, so a process counts it only once. It counts from the newest slot to the oldest, for
a short time per request. Readers see the slots counted so far. The depth of a queue is counted for each request.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, LiteralString, NamedTuple, TypeAlias

import psycopg

from pgoutbox.dashboard.database import allowing_bitmaps
from pgoutbox.database import operator_connection, sql

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pgoutbox.dashboard.types import Connection

MINUTES: Final = 60
_BUDGET_SECONDS: Final = 0.08
# A range of days has more to count, and nobody watches it all the time.
_RANGE_BUDGET_SECONDS: Final = 0.25
# A transaction can commit later than the finish time that it writes.
_SETTLED: Final = timedelta(minutes=2)
MINUTE: Final = timedelta(minutes=1)
_THREE_MINUTES: Final = timedelta(minutes=3)
_TEN_MINUTES: Final = timedelta(minutes=10)
# The first step counts all slots that are not settled, so that the next one makes progress.
_FIRST_STEP: Final = {MINUTE: 5, _THREE_MINUTES: 2, _TEN_MINUTES: 2}
_BUCKETS_OF_A_DOUBLING: Final = 12
# A page has two seconds for a statement.
_STEP_SECONDS: Final = 1.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


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
LAST_HOUR: Final = Range("1h", _THREE_MINUTES, 21)
"""The range of the lines of queues and topics: an hour and the current slot. Long slots keep their pages small."""


Latencies: TypeAlias = Counter[int]
"""The sent messages of a slot of time by bucket of their latency."""


class History:
    """The counted slots of a process, by their contents and their width. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, timedelta], dict[datetime, Counter[Any]]] = {}
        self._lock = threading.Lock()

    def sent(self, connection: Connection, now: datetime, asked: Range) -> dict[datetime, Latencies]:
        """Return the sent messages of a range by slot. The oldest slots are missing until they are counted."""
        return self._slots(connection, now, asked, "sent", sql.SENT_BY_TIME)

    def ended(
        self, connection: Connection, now: datetime, by: Literal["queue", "topic"]
    ) -> dict[datetime, Counter[str]]:
        """Return the ended messages of `LAST_HOUR` by slot and by name, likewise."""
        return self._slots(connection, now, LAST_HOUR, by, sql.ENDED_BY_NAME)

    def _slots(
        self, connection: Connection, now: datetime, asked: Range, by: str, statement: LiteralString
    ) -> dict[datetime, Counter[Any]]:
        width = min(asked.width, _TEN_MINUTES)
        wanted = _newest_first(now, width, asked.width * asked.slot_count // width)
        with self._lock:
            known = self._known.get((by, width), {})
            counted = {at: known[at] for at in wanted if at in known}

        def count(first: datetime, last: datetime) -> None:
            parameters = {"width": width.total_seconds(), "from": first, "to": last + width, "by": by}
            rows = connection.execute(statement, parameters).fetchall()
            counted.update({at: Counter() for at in _from_to(first, last, width)})
            for at, key, messages in rows:
                counted[at.astimezone(UTC)][key] += messages

        with allowing_bitmaps(connection):
            missing = [at for at in wanted if at not in counted]
            seconds = _RANGE_BUDGET_SECONDS if width == _TEN_MINUTES else _BUDGET_SECONDS
            _count_back(connection, missing, width, _FIRST_STEP[width], seconds, count)
        with self._lock:
            settled = {at: found for at, found in counted.items() if at + width + _SETTLED <= now}
            oldest = now - (_LONGEST if width == _TEN_MINUTES else asked.width * asked.slot_count)
            known = {**self._known.get((by, width), {}), **settled}
            self._known[by, width] = {at: found for at, found in known.items() if at > oldest}
        slots: dict[datetime, Counter[Any]] = {}
        for at in _without_gap(wanted, counted):
            slots.setdefault(_slot(at, asked.width), Counter()).update(counted[at])
        return slots


def depth(connection: Connection, queue: str, now: datetime, asked: Range, cap: int) -> dict[datetime, int]:
    """Return how many messages of a queue were pending or in flight at the beginnings of the slots, and now.

    The oldest times are missing if counting takes too long. At most `cap` live messages of each lane count.
    """
    slots = asked.slots(now)
    before = slots[0] - asked.width
    names = {"queue": queue, "width": asked.width.total_seconds(), "since": before}
    created: Counter[datetime] = Counter()
    ended: Counter[datetime] = Counter()
    part = min(asked.width, _TEN_MINUTES)
    parts = _newest_first(now, part, (now - slots[0]) // part + 1)
    counted_from = now

    def count(first: datetime, last: datetime) -> None:
        nonlocal counted_from
        rows = connection.execute(sql.ENDED_BY_TIME, {**names, "from": first, "to": last + part})
        for created_slot, ended_slot, messages in rows:
            created[created_slot.astimezone(UTC)] += messages
            ended[ended_slot.astimezone(UTC)] += messages
        counted_from = first

    with allowing_bitmaps(connection):
        _count_back(connection, parts, part, 1, _RANGE_BUDGET_SECONDS, count)
    for created_slot, messages in connection.execute(sql.LIVE_BY_TIME, {**names, "cap": cap}):
        created[created_slot.astimezone(UTC)] += messages
    # Messages that ended at times that are not counted are missing from both numbers.
    waiting, found = 0, dict[datetime, int]()
    for slot in [before, *slots]:
        if slot >= max(counted_from, slots[0]):
            found[slot] = waiting
        waiting += created[slot] - ended[slot]
    return {**found, now: waiting}


def _newest_first(now: datetime, width: timedelta, count: int) -> list[datetime]:
    last = _slot(now, width)
    return [last - number * width for number in range(count)]


def _slot(moment: datetime, width: timedelta) -> datetime:
    """Return the beginning of the slot of this moment. Slots begin at the epoch, as in the statements."""
    return moment.astimezone(UTC) - (moment - _EPOCH) % width


def _from_to(first: datetime, last: datetime, width: timedelta) -> list[datetime]:
    return [first + number * width for number in range((last - first) // width + 1)]


def _without_gap(wanted: list[datetime], counted: Mapping[datetime, object]) -> list[datetime]:
    """Return the counted slots, the oldest first, without those older than a missing one."""
    gap = next((place for place, at in enumerate(wanted) if at not in counted), len(wanted))
    return wanted[:gap][::-1]


def _count_back(
    connection: Connection,
    missing: list[datetime],
    width: timedelta,
    first_step: int,
    budget_seconds: float,
    count: Callable[[datetime, datetime], None],
) -> None:
    """Count the missing slots, the newest first, until the time is over. Quick steps grow.

    A step that takes too long is repeated for one slot. If that takes too long, it and all older slots stay missing.
    """
    ends_at = time.monotonic() + budget_seconds
    steps, step = 0, first_step
    with operator_connection.limiting(_STEP_SECONDS):
        operator_connection.prepare(connection)
        # The newest slots are counted every time. At least one more step is made, however long it takes.
        while missing and (steps < 2 or time.monotonic() < ends_at):
            began_at = time.monotonic()
            newest = missing[0]
            slots = [at for at in missing if newest - at < step * width]
            steps += 1
            try:
                with connection.transaction():
                    count(slots[-1], newest)
            except psycopg.errors.QueryCanceled:
                if len(slots) == 1:
                    break
                step = 1
                continue
            missing = missing[len(slots) :]
            is_quick = time.monotonic() - began_at < budget_seconds / 8
            step = step * 2 if is_quick else max(first_step, step // 2)
    operator_connection.prepare(connection)


def percentiles(slots: Iterable[Latencies], shares: Iterable[float]) -> list[float | None]:
    """Return percentiles of the latency in seconds, at most a few per cent too high."""
    total: Latencies = Counter()
    for slot in slots:
        total.update(slot)
    return [_percentile(total, share) for share in shares]


def _percentile(latencies: Counter[int], share: float) -> float | None:
    wanted = math.ceil(latencies.total() * share)
    seen = 0
    for bucket in sorted(latencies):
        seen += latencies[bucket]
        if seen >= wanted:
            return float(2.0 ** ((bucket + 1) / _BUCKETS_OF_A_DOUBLING))
    return None
