"""Finished messages and latencies of the last hour, by minute.

A past minute does not change, so a process counts it only once. It counts from the newest minute to the oldest, for a
short time per request. Readers see the minutes counted so far.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from pgoutbox.database import sql
from pgoutbox.message import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pgoutbox.dashboard.types import Connection

MINUTES: Final = 60
_STEP: Final = 5
_BUDGET_SECONDS: Final = 0.08
# A transaction can commit later than the finish time that it writes.
_SETTLED: Final = timedelta(minutes=2)
_MINUTE: Final = timedelta(minutes=1)
_BUCKETS_OF_A_DOUBLING: Final = 12


@dataclass(slots=True)
class Minute:
    """The finished messages of one minute by state, and the latencies of sent messages by bucket."""

    at: datetime
    states: Counter[State] = field(default_factory=Counter)
    latencies: Counter[int] = field(default_factory=Counter)


class History:
    """The counted minutes of a process. Thread-safe."""

    def __init__(self) -> None:
        self._minutes: dict[datetime, Minute] = {}
        self._lock = threading.Lock()

    def of_last_hour(self, connection: Connection, now: datetime) -> list[Minute]:
        """Return the minutes of the last hour, the current one last. The oldest are missing until they are counted."""
        last = now.astimezone(UTC).replace(second=0, microsecond=0)
        wanted = [last - minutes * _MINUTE for minutes in range(MINUTES)]
        with self._lock:
            counted = {at: self._minutes[at] for at in wanted if at in self._minutes}
        ends_at = time.monotonic() + _BUDGET_SECONDS
        missing = [at for at in wanted if at not in counted]
        steps = 0
        # The newest minutes are counted every time. At least one more step is made, however long it takes.
        while missing and (steps < 2 or time.monotonic() < ends_at):
            newest = missing[0]
            step = [at for at in missing if newest - at < _STEP * _MINUTE]
            counted |= _count(connection, step[-1], newest)
            missing = missing[len(step) :]
            steps += 1
        with self._lock:
            self._minutes = {at: counted[at] for at in wanted if at in counted and at + _MINUTE + _SETTLED <= now}
        # Show no gap: leave out minutes older than a missing one.
        recent = []
        for at in wanted:
            if at not in counted:
                break
            recent.append(counted[at])
        return recent[::-1]


def _count(connection: Connection, first: datetime, last: datetime) -> dict[datetime, Minute]:
    minutes: dict[datetime, Minute] = {}
    at = first
    while at <= last:
        minutes[at] = Minute(at)
        at += _MINUTE
    connection.execute(sql.ALLOW_BITMAPS)
    rows = connection.execute(sql.FINISHED_BY_MINUTE, {"from": first, "to": last + _MINUTE})
    for at, state, bucket, count in rows:
        minute = minutes[at.astimezone(UTC)]
        minute.states[State(state)] += count
        if bucket is not None:
            minute.latencies[bucket] += count
    return minutes


def percentiles(minutes: Iterable[Minute], shares: Iterable[float]) -> list[float | None]:
    """Return percentiles of the latency in seconds, at most a few per cent too high."""
    total: Counter[int] = Counter()
    for minute in minutes:
        total += minute.latencies
    return [_percentile(total, share) for share in shares]


def _percentile(latencies: Counter[int], share: float) -> float | None:
    wanted = math.ceil(latencies.total() * share)
    seen = 0
    for bucket in sorted(latencies):
        seen += latencies[bucket]
        if seen >= wanted:
            return float(2.0 ** ((bucket + 1) / _BUCKETS_OF_A_DOUBLING))
    return None
