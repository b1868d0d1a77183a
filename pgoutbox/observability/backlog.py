"""The gauges of the database, read on request: counts of messages, and the ages and faults that alerts read.

Readings are cached for a few seconds, longer if they are slow, so that monitoring cannot overload the database. Only
one reading runs at a time, in a thread of its own, so that callers can stop waiting even if the network is dead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, LiteralString

import psycopg
from psycopg.errors import LockNotAvailable, QueryCanceled

from pgoutbox.database import operator_connection, sql
from pgoutbox.errors import PgOutboxError
from pgoutbox.observability.measures import (
    BACKLOG_AGE,
    BACKLOG_READ,
    BACKLOG_UP,
    BREAKERS,
    LATELY_FAILED,
    MAINTENANCE_AGE,
    MESSAGES,
    OLDEST_ATTEMPT,
    OLDEST_DUE,
    OLDEST_UNDELIVERED,
    OTHER,
    REDIRECTS,
    Metric,
    Sample,
)
from pgoutbox.settings import Settings

_PATIENCE_SECONDS: Final = 3.0
_SHARE: Final = 20
_QUEUES: Final = 100_000
_ROWS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one reading; without samples if the database did not answer."""

    is_up: bool
    samples: Mapping[Metric, Sequence[Sample]] = field(default_factory=dict)
    read_at: float = 0.0
    seconds: float = 0.0

    @property
    def age_seconds(self) -> float:
        """The age of the reading, in seconds."""
        return time.monotonic() - self.read_at

    def samples_of(self, metric: Metric) -> Sequence[Sample]:
        """Return the values of a metric of the database, or of the reading itself."""
        about_reading = {BACKLOG_AGE: self.age_seconds, BACKLOG_READ: self.seconds} if self.is_up else {}
        about_reading[BACKLOG_UP] = int(self.is_up)
        return [Sample((), about_reading[metric])] if metric in about_reading else self.samples.get(metric, ())


NO_READING: Final = Reading(is_up=False)


class Backlog:
    """Reads the gauges, with a new connection for each reading. Any thread may call it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._turn = threading.Lock()
        self._last: Future[Reading] | None = None

    def ask(self) -> Future[Reading]:
        """Return a future of the cached reading if it is recent enough, else of the next one. Never raises."""
        with self._turn:
            if self._last is None or (self._last.done() and not self._is_good(self._last.result())):
                self._last = Future()
                threading.Thread(
                    target=self._read_into, args=[self._last], name="pgoutbox-backlog", daemon=True
                ).start()
            return self._last

    def reading(self) -> Reading:
        """Return the reading of `ask`, or `NO_READING` if it takes more than three seconds."""
        try:
            return self.ask().result(_PATIENCE_SECONDS)
        except TimeoutError:
            return NO_READING

    def _is_good(self, reading: Reading) -> bool:
        return reading.age_seconds < max(self._settings.metrics.cache_seconds, _SHARE * reading.seconds)

    def _read_into(self, future: Future[Reading]) -> None:
        began_at = time.monotonic()
        samples = None
        try:
            samples = self._read()
        except (psycopg.Error, PgOutboxError, OSError):
            pass  # The worker's log has the reason: it uses the same database.
        except BaseException as error:
            future.set_exception(error)
            raise
        ended_at = time.monotonic()
        future.set_result(Reading(samples is not None, samples or {}, read_at=ended_at, seconds=ended_at - began_at))

    def _read(self) -> dict[Metric, list[Sample]]:
        names = {
            "max_label_values": self._settings.metrics.max_label_values,
            "other": OTHER,
            "prefix": "",
            "queues": _QUEUES,
            "rows": _ROWS,
        }
        with operator_connection.connect(self._settings, read_only=True) as connection:

            def look() -> dict[Metric, list[Sample]]:
                def samples(statement: LiteralString) -> list[Sample]:
                    return [
                        Sample(tuple(labels), value)
                        for *labels, value in connection.execute(statement, names).fetchall()
                    ]

                connection.execute(sql.LIMIT_GAUGES)
                messages = []
                # All messages may be too many to count. The other gauges read a few rows each.
                with contextlib.suppress(QueryCanceled, LockNotAvailable), connection.transaction():
                    messages = samples(sql.COUNT_BACKLOG)
                connection.execute(sql.PREPARE_PAGE)
                return {
                    MESSAGES: messages,
                    OLDEST_DUE: samples(sql.OLDEST_DUE),
                    OLDEST_UNDELIVERED: samples(sql.OLDEST_UNDELIVERED),
                    OLDEST_ATTEMPT: samples(sql.OLDEST_ATTEMPTS),
                    LATELY_FAILED: samples(sql.COUNT_LATELY_FAILED),
                    MAINTENANCE_AGE: samples(sql.MAINTENANCE_AGE),
                    BREAKERS: samples(sql.COUNT_BREAKERS),
                    REDIRECTS: samples(sql.COUNT_REDIRECTS),
                }

            return operator_connection.transact(connection, look)
