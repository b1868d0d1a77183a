"""The metrics of a worker, counted in memory. The exporters read them on request.

This module is independent of Prometheus and OpenTelemetry. The labels are topic, queue, outcome and event, and never
contain message data. At most `max_label_values` topics and queues are labels; others count as `other`. The event
loop writes while other threads read: they read a copy, which a dictionary makes in one step.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import starmap
from typing import TYPE_CHECKING, Final, NamedTuple

from pgoutbox.message import State

if TYPE_CHECKING:
    from pgoutbox.message import Message

OTHER: Final = "other"


class Kind(enum.StrEnum):
    """The kind of a metric: it only grows, it goes up and down, or it is a distribution."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric: its name without the prefix `pgoutbox_` and, of a counter, without `_total`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()

    @property
    def series(self) -> str:
        """The name of the metric in PromQL; for a histogram without `_bucket`, `_sum` and `_count`."""
        return f"pgoutbox_{self.name}_total" if self.kind is Kind.COUNTER else f"pgoutbox_{self.name}"


def _gauge(name: str, meaning: str) -> Metric:
    return Metric(name, Kind.GAUGE, (), meaning)


_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0,
)  # fmt: skip

ATTEMPTS: Final = Metric(
    "attempts", Kind.COUNTER, ("topic", "queue", "outcome"),
    "Attempts that ended: sent, retry, failed, skipped, cancelled, snoozed, released, or lost to another owner.",
)  # fmt: skip
UNATTEMPTED: Final = Metric(
    "unattempted", Kind.COUNTER, ("topic", "queue", "outcome"),
    "Messages that ended without an attempt at their claim: superseded, expired, cancelled, or out of attempts.",
)  # fmt: skip
CLAIMS: Final = Metric("claims", Kind.COUNTER, ("queue",), "Answered claim statements that read the queue.")
CLAIMED: Final = Metric("claimed", Kind.COUNTER, ("topic", "queue"), "Messages that were claimed for an attempt.")
HANDLER_SECONDS: Final = Metric(
    "handler_seconds", Kind.HISTOGRAM, ("topic",),
    "Duration of an attempt, including the hand-over to the transport; one call for a batch handler.",
    _SECONDS,
)  # fmt: skip
WAIT_SECONDS: Final = Metric(
    "wait_seconds", Kind.HISTOGRAM, ("topic",),
    "Waiting time of a message, from its due time to the start of its handler.",
    _SECONDS,
)  # fmt: skip
EVENTS: Final = Metric("events", Kind.COUNTER, ("event",), "Events that this worker reported.")
LEASES_LOST: Final = Metric(
    "leases_lost", Kind.COUNTER, (), "Outcomes that were not written because the message had another owner by then."
)
RECONNECTS: Final = Metric(
    "reconnects", Kind.COUNTER, ("connection",), "Reconnections of the worker or its listener to the database."
)
ABANDONED: Final = Metric(
    "abandoned", Kind.COUNTER, (), "Attempts whose handler still ran in its thread after its timeout."
)

MESSAGES: Final = Metric(
    "messages", Kind.GAUGE, ("topic", "queue", "state"),
    "Messages in the database that are due, scheduled, sending or failed. Absent if counting takes two seconds.",
)  # fmt: skip
OLDEST_DUE: Final = Metric(
    "oldest_due_seconds", Kind.GAUGE, ("queue", "paused"),
    "Waiting time of the oldest due message; 0 without one. `paused` is true for a paused queue, topic or fair key.",
)  # fmt: skip
OLDEST_UNDELIVERED: Final = Metric(
    "oldest_undelivered_seconds", Kind.GAUGE, ("queue",),
    "Time since the oldest undelivered message was first due, whatever its due time after retries; 0 without one.",
)  # fmt: skip
OLDEST_ATTEMPT: Final = Metric(
    "oldest_attempt_seconds", Kind.GAUGE, ("topic", "queue"), "Time since the claim of the oldest attempt in flight."
)
LATELY_FAILED: Final = Metric(
    "lately_failed", Kind.GAUGE, ("topic", "queue"),
    "Messages that failed permanently within the last hour and are still failed.",
)  # fmt: skip
MAINTENANCE_AGE: Final = _gauge(
    "maintenance_age_seconds", "Time since the last successful turn of maintenance of any worker."
)
BREAKERS: Final = Metric(
    "breakers", Kind.GAUGE, ("scheme", "state"),
    "Open circuit breakers of all workers; half_open means that a probe is due.",
)  # fmt: skip
REDIRECTS: Final = Metric(
    "redirects", Kind.GAUGE, ("source",),
    "Redirects that are on: 1 if an operator has switched one on, and the workers with PGOUTBOX_REDIRECT_TO.",
)  # fmt: skip
BACKLOG_UP: Final = _gauge("backlog_up", "1 if the gauges of the database could be read; otherwise they are absent.")
BACKLOG_AGE: Final = _gauge("backlog_age_seconds", "Time since the gauges of the database were read.")
BACKLOG_READ: Final = _gauge("backlog_read_seconds", "Duration of reading the gauges of the database.")

GAUGES: Final = {
    "in_flight": _gauge("in_flight", "Messages that this worker has claimed and not finished."),
    "slots": _gauge("slots", "Maximum number of concurrent attempts, less the abandoned slots."),
    "busy": _gauge("slots_busy", "Messages in running handlers."),
    "abandoned": _gauge("slots_abandoned", "Slots of handlers that still run after their timeout."),
    "is_listener_up": _gauge("listener_up", "1 while the listener is connected. Absent when polling."),
    "is_database_up": _gauge("database_up", "1 while the database answers this worker."),
    "is_copy": _gauge("held_in_copy", "1 while the worker claims nothing because the database is a copy."),
    "polled_seconds_ago": _gauge("last_poll_seconds", "Time since the worker last polled for messages."),
    "claimed_seconds_ago": _gauge(
        "last_claim_seconds", "Time since the worker last claimed a message. Absent before the first."
    ),
    "outcomes_refused": _gauge(
        "outcomes_refused", "Messages whose outcome the database refuses to write; the worker tries again."
    ),
    "breakers_open": _gauge("breakers_open", "Open circuit breakers, as far as this worker knows."),
}
"""The gauges of a worker, by the field of `WorkerStatus`."""

WORKER_METRICS: Final = (
    ATTEMPTS, UNATTEMPTED, CLAIMS, CLAIMED, HANDLER_SECONDS, WAIT_SECONDS, EVENTS, LEASES_LOST, RECONNECTS, ABANDONED,
    *GAUGES.values(),
)  # fmt: skip
PROCESS_METRICS: Final = (GAUGES["slots"], GAUGES["busy"], GAUGES["abandoned"])
"""The gauges that count the whole process, if it serves many databases."""
SERVED: Final = Metric(
    "database_served", Kind.GAUGE, ("database",), "1 while the worker would find a new message of the database in time."
)
"""Served by a worker of many databases."""
DATABASE_METRICS: Final = (
    MESSAGES, OLDEST_DUE, OLDEST_UNDELIVERED, OLDEST_ATTEMPT, LATELY_FAILED, MAINTENANCE_AGE, BREAKERS, REDIRECTS,
    BACKLOG_UP, BACKLOG_AGE, BACKLOG_READ,
)  # fmt: skip

_BUCKETS: Final = {metric.name: metric.buckets for metric in WORKER_METRICS if metric.kind is Kind.HISTOGRAM}


Attempted = tuple[str, tuple[datetime, ...], float, float]
"""An attempt: its topic, the due times of its messages, and its start and end.

A tuple of plain values: thousands of messages that wait to be counted would slow down the garbage collector.
"""


class Sample(NamedTuple):
    """The value of one series."""

    labels: tuple[str, ...]
    value: float


class Distribution:
    """A histogram of one series: the number of values in each bucket, one more than there are bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, values: list[float]) -> None:
        """Count these values, and sort them. Negative values, from differing clocks, count as zero."""
        values.sort()
        before = 0
        for index, bound in enumerate(self.bounds):
            up_to = bisect_right(values, bound)
            self.counts[index] += up_to - before
            before = up_to
            if before == len(values):
                break
        else:
            self.counts[-1] += len(values) - before
        self.sum += sum(values[bisect_right(values, 0.0) :])


class LabelSet(dict[str, str]):
    """The label of each name: the first `most` names themselves, and `other` for all further ones."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __missing__(self, name: str) -> str:
        return self.setdefault(name, name) if len(self) < self._most else OTHER


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The current state of a worker. Ages are in seconds. None means never, or a disabled listener.

    `is_idle` means that it knows of no message that is due or in flight. `failure` is the reason why the worker ends by
    itself: it claims nothing more. `databases` has the state of each database, if the process serves many.
    """

    is_started: bool = False
    is_stopping: bool = False
    is_idle: bool = False
    in_flight: int = 0
    slots: int = 0
    busy: int = 0
    abandoned: int = 0
    is_listener_up: bool | None = None
    is_database_up: bool = False
    is_copy: bool = False
    polled_seconds_ago: float = 0.0
    claimed_seconds_ago: float | None = None
    outcomes_refused: int = 0
    breakers_open: int = 0
    failure: str | None = None
    databases: Mapping[str, WorkerStatus] = field(default_factory=dict)


class Measures:
    """The counts of one worker. All methods are called on its event loop, if possible once per batch."""

    def __init__(self, *, max_label_values: int) -> None:
        self._topics = LabelSet(max_label_values)
        self._queues = LabelSet(max_label_values)
        self._counts: dict[str, Counter[tuple[str, ...]]] = {
            metric.name: Counter() for metric in (ATTEMPTS, UNATTEMPTED, CLAIMS, CLAIMED)
        }
        self._seconds: dict[str, dict[str, Distribution]] = {name: {} for name in _BUCKETS}
        self._server_time: tuple[datetime, float] | None = None
        self.claimed_at: float | None = None
        # Called with the metric's name, the topic and the value, for an exporter that needs each single value.
        self.on_seconds: Callable[[str, str, float], None] | None = None

    def set_server_time(self, server_time: datetime, loop_time: float) -> None:
        """Remember the database's time at this time of the event loop."""
        self._server_time = server_time, loop_time

    @property
    def knows_server_time(self) -> bool:
        """Whether the database's time is known. Without it, waiting times are not counted."""
        return self._server_time is not None

    def answered(self, queues: Iterable[str]) -> None:
        """Count an answered claim statement, which has read these queues."""
        for queue in queues:
            self._counts[CLAIMS.name][self._queues[queue],] += 1

    def claimed(self, messages: Iterable[tuple[str, str]], *, at: float) -> None:
        """Count messages of these topics and queues that were claimed for an attempt."""
        for (topic, queue), count in Counter(messages).items():
            self._counts[CLAIMED.name][self._topics[topic], self._queues[queue]] += count
            self.claimed_at = at

    def unattempted(self, topic: str, queue: str, outcome: str) -> None:
        """Count a message that ended without an attempt at its claim."""
        self._counts[UNATTEMPTED.name][self._topics[topic], self._queues[queue], outcome] += 1

    def attempted(self, attempts: Iterable[Attempted]) -> None:
        """Count attempts that have ended, by the times of the event loop."""
        server_time, loop_time = self._server_time or (None, 0.0)
        took: dict[str, list[float]] = defaultdict(list)
        waited: dict[str, list[float]] = defaultdict(list)
        for topic, available, began_at, ended_at in attempts:
            took[topic].append(ended_at - began_at)
            if server_time is not None:
                since = began_at - loop_time
                for available_at in available:
                    waited[topic].append((server_time - available_at).total_seconds() + since)
        self._add(HANDLER_SECONDS.name, took)
        self._add(WAIT_SECONDS.name, waited)

    def _add(self, name: str, seconds: Mapping[str, list[float]]) -> None:
        distributions = self._seconds[name]
        for topic, values in seconds.items():
            label = self._topics[topic]
            if label not in distributions:
                distributions[label] = Distribution(_BUCKETS[name])
            distributions[label].add(values)
            if self.on_seconds is not None:
                for value in values:
                    self.on_seconds(name, label, value)

    def sent(self, messages: Iterable[Message[object]]) -> None:
        """Count messages that were finished as sent."""
        counts = self._counts[ATTEMPTS.name]
        for (topic, queue), count in Counter([(message.topic, message.queue) for message in messages]).items():
            counts[self._topics[topic], self._queues[queue], State.SENT.value] += count

    def ended(self, message: Message[object], outcome: str) -> None:
        """Count one attempt with another outcome."""
        self._counts[ATTEMPTS.name][self._topics[message.topic], self._queues[message.queue], outcome] += 1

    def samples(self, metric: Metric) -> Iterator[Sample]:
        """Return the current values of a counter of messages. Each sample is made when it is read."""
        return starmap(Sample, dict(self._counts[metric.name]).items())

    def distributions(self, metric: Metric) -> Mapping[str, Distribution]:
        """Return the distributions of a histogram by topic."""
        return self._seconds[metric.name].copy()
