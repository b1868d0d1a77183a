"""What the exporters read: the metrics of a worker, or of the workers of many databases in one process.

With many databases, each metric of a worker and of a database has the label `database`. The slots are those of the
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pgoutbox.observability.backlog import NO_READING, Backlog, TurnsOfBacklogs
from pgoutbox.observability.health import databases_not_served
from pgoutbox.observability.measures import (
    ABANDONED,
    ATTEMPTS,
    CLAIMED,
    CLAIMS,
    DATABASE_METRICS,
    EVENTS,
    GAUGES,
    LEASES_LOST,
    PROCESS_METRICS,
    RECONNECTS,
    SERVED,
    UNATTEMPTED,
    WORKER_METRICS,
    Distribution,
    Measures,
    Metric,
    Sample,
    WorkerStatus,
)
from pgoutbox.settings import Settings


@dataclass(frozen=True, slots=True)
class WatchedWorker:
    """The observable state of a worker, from any thread. Without `backlog` it has no gauges of its database."""

    measures: Measures
    status: Callable[[], WorkerStatus]
    event_counts: Callable[[], Mapping[str, int]]
    backlog: Backlog | None

    @property
    def metrics(self) -> Sequence[Metric]:
        """The metrics of the worker."""
        return WORKER_METRICS

    @property
    def gauges(self) -> Sequence[Metric]:
        """The gauges of the database."""
        return () if self.backlog is None else DATABASE_METRICS

    def samples(self) -> Mapping[Metric, Iterable[Sample]]:
        """Return the values of all counters and gauges of the worker, at one time."""
        counts = self.event_counts()
        return {
            **_gauges_of(self.status()),
            **{metric: self.measures.samples(metric) for metric in (ATTEMPTS, UNATTEMPTED, CLAIMS, CLAIMED)},
            EVENTS: (Sample((event,), count) for event, count in counts.items()),
            LEASES_LOST: [Sample((), counts.get("lease_lost", 0))],
            ABANDONED: [Sample((), counts.get("attempt_abandoned", 0))],
            RECONNECTS: [Sample((place,), counts.get(f"{place}_back", 0)) for place in ("database", "listener")],
        }

    def distributions(self, metric: Metric) -> Mapping[tuple[str, ...], Distribution]:
        """Return the distributions of a histogram by their labels."""
        return {(topic,): found for topic, found in self.measures.distributions(metric).items()}

    def gauge_samples(self) -> Mapping[Metric, Iterable[Sample]]:
        """Return the values of the gauges of the database. Waits up to three seconds for them."""
        return {} if self.backlog is None else self.backlog.reading().all_samples()


class WatchedDatabases:
    """The observable state of a process with a worker for each of many databases, from any thread."""

    def __init__(
        self,
        status: Callable[[], WorkerStatus],
        workers: Callable[[], Mapping[str, WatchedWorker]],
        settings: Settings,
    ) -> None:
        self._status = status
        self._workers = workers
        self._poll_interval_seconds = settings.poll_interval_seconds
        self.turns: Final = TurnsOfBacklogs(self._backlogs_of_served)
        self.metrics: Final[Sequence[Metric]] = (*map(_by_database, WORKER_METRICS), SERVED)
        """The metrics of the workers and of the process."""
        self.gauges: Final[Sequence[Metric]] = (
            tuple(map(_by_database, DATABASE_METRICS)) if settings.metrics.backlog else ()
        )
        """The gauges of the databases."""

    def samples(self) -> Mapping[Metric, Iterable[Sample]]:
        """Return the values of all counters and gauges of the workers and the process, at one time."""
        status = self._status()
        not_served = databases_not_served(status, poll_interval_seconds=self._poll_interval_seconds)
        return {
            **_merged(WORKER_METRICS, {name: worker.samples() for name, worker in self._workers().items()}),
            **{metric: samples for metric, samples in _gauges_of(status).items() if metric in PROCESS_METRICS},
            SERVED: [Sample((name,), int(name not in not_served)) for name in status.databases],
        }

    def distributions(self, metric: Metric) -> Mapping[tuple[str, ...], Distribution]:
        """Return the distributions of a histogram by their labels."""
        return {
            (name, *labels): found
            for name, worker in self._workers().items()
            for labels, found in worker.distributions(metric).items()
        }

    def gauge_samples(self) -> Mapping[Metric, Iterable[Sample]]:
        """Return the last values of the gauges of all databases, and let them be read again in turn. Never waits."""
        self.turns.keep_reading()
        served = self._backlogs_of_served()
        readings = {name: served[name].last_reading if name in served else NO_READING for name in self._workers()}
        found = {name: reading.all_samples() for name, reading in readings.items() if reading is not None}
        return _merged(DATABASE_METRICS, found)

    def _backlogs_of_served(self) -> dict[str, Backlog]:
        """Return those of databases that answer their worker."""
        return {
            name: worker.backlog
            for name, worker in self._workers().items()
            if worker.backlog is not None and worker.status().is_database_up
        }


Watched: TypeAlias = WatchedWorker | WatchedDatabases


def _gauges_of(status: WorkerStatus) -> dict[Metric, list[Sample]]:
    values = {metric: getattr(status, name) for name, metric in GAUGES.items()}
    return {metric: [] if value is None else [Sample((), float(value))] for metric, value in values.items()}


def _by_database(metric: Metric) -> Metric:
    return metric if metric in PROCESS_METRICS else metric._replace(labels=("database", *metric.labels))


def _merged(
    metrics: Sequence[Metric], found: Mapping[str, Mapping[Metric, Iterable[Sample]]]
) -> dict[Metric, Iterable[Sample]]:
    """Return the samples of all databases by their metrics. Each sample is made when it is read."""
    return {_by_database(metric): _labelled(metric, found) for metric in metrics}


def _labelled(metric: Metric, found: Mapping[str, Mapping[Metric, Iterable[Sample]]]) -> Iterator[Sample]:
    for name, samples in found.items():
        for sample in samples.get(metric, ()):
            yield Sample((name, *sample.labels), sample.value)
