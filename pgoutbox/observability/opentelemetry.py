"""The metrics for OpenTelemetry: the metrics of Prometheus, with names that begin with `pgoutbox.`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import TimeoutError as NotYetError
from typing import Final

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from pgoutbox.observability.backlog import PATIENCE_SECONDS, Backlog
from pgoutbox.observability.measures import (
    BACKLOG_AGE,
    BACKLOG_READ,
    BACKLOG_UP,
    OF_THE_DATABASE,
    OF_WORKERS,
    Kind,
    Measures,
    Metric,
    Sample,
    WorkerStatus,
    samples_of_events,
    samples_of_status,
)

_ABOUT_READING: Final = frozenset({BACKLOG_UP, BACKLOG_AGE, BACKLOG_READ})


def is_set_up() -> bool:
    """Whether the application has set a meter provider."""
    provider = metrics.get_meter_provider()
    # The proxy for a provider that is not yet set is not public.
    return not isinstance(provider, metrics.NoOpMeterProvider) and type(provider).__name__ != "_ProxyMeterProvider"


class Exporter:
    """Exports the counts of a worker to the application's meter provider, until `stop`."""

    def __init__(
        self,
        measures: Measures,
        status: Callable[[], WorkerStatus],
        event_counts: Callable[[], Mapping[str, int]],
        backlog: Backlog | None,
    ) -> None:
        self._measures = measures
        self._status = status
        self._event_counts = event_counts
        self._backlog = backlog
        self._is_open = True
        meter = metrics.get_meter("pgoutbox")
        histograms = {}
        for metric in (*OF_WORKERS, *(OF_THE_DATABASE if backlog is not None else ())):
            name, unit = f"pgoutbox.{metric.name}", "s" if metric.name.endswith("_seconds") else "1"
            match metric.kind:
                case Kind.COUNTER:
                    meter.create_observable_counter(name, [self._callback(metric)], unit, metric.meaning)
                case Kind.GAUGE:
                    meter.create_observable_gauge(name, [self._callback(metric)], unit, metric.meaning)
                case Kind.HISTOGRAM:
                    histograms[metric.name] = meter.create_histogram(
                        name, unit, metric.meaning, explicit_bucket_boundaries_advisory=metric.buckets
                    )

        def record(name: str, topic: str, seconds: float) -> None:
            histograms[name].record(seconds, {"topic": topic})

        measures.on_seconds = record

    def stop(self) -> None:
        """Stop exporting. An instrument cannot be removed."""
        self._is_open = False
        self._measures.on_seconds = None

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            if not self._is_open:
                return []
            return [
                Observation(sample.value, dict(zip(metric.labels, sample.labels, strict=True)))
                for sample in self._samples(metric)
            ]

        return observe

    def _samples(self, metric: Metric) -> Iterable[Sample]:
        if metric in OF_WORKERS:
            known = samples_of_events(self._event_counts()) | samples_of_status(self._status())
            return known[metric] if metric in known else self._measures.samples(metric)
        if self._backlog is None:
            return []
        try:
            reading = self._backlog.ask().result(PATIENCE_SECONDS)
        except NotYetError:
            return [Sample((), 0)] if metric is BACKLOG_UP else []
        if metric is BACKLOG_UP:
            return [Sample((), int(reading.is_up))]
        if metric in _ABOUT_READING:
            value = reading.age_seconds if metric is BACKLOG_AGE else reading.seconds
            return [Sample((), value)] if reading.is_up else []
        return reading.samples.get(metric, [])
