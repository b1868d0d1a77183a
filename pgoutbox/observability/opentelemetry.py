"""The metrics for OpenTelemetry: the metrics of Prometheus, with names that begin with `pgoutbox.`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from pgoutbox.observability.measures import Kind, Measures, Metric, Sample
from pgoutbox.observability.watched import Watched


def is_set_up() -> bool:
    """Whether the application has set a meter provider."""
    provider = metrics.get_meter_provider()
    # The proxy for a provider that is not yet set is not public.
    return not isinstance(provider, metrics.NoOpMeterProvider) and type(provider).__name__ != "_ProxyMeterProvider"


class Exporter:
    """Exports the counts of one or many workers to the application's meter provider, until `stop`."""

    def __init__(self, worker: Watched) -> None:
        self._worker = worker
        self._is_open = True
        meter = metrics.get_meter("pgoutbox")
        self._histograms = {}
        for metric in (*worker.metrics, *worker.gauges):
            name, unit = f"pgoutbox.{metric.name}", "s" if metric.name.endswith("_seconds") else "1"
            match metric.kind:
                case Kind.COUNTER:
                    meter.create_observable_counter(name, [self._callback(metric)], unit, metric.meaning)
                case Kind.GAUGE:
                    meter.create_observable_gauge(name, [self._callback(metric)], unit, metric.meaning)
                case Kind.HISTOGRAM:
                    self._histograms[metric.name] = meter.create_histogram(
                        name, unit, metric.meaning, explicit_bucket_boundaries_advisory=metric.buckets
                    )

    def record(self, measures: Measures, **attributes: str) -> None:
        """Export each single duration too, with these attributes."""

        def record(name: str, topic: str, seconds: float) -> None:
            if self._is_open:
                self._histograms[name].record(seconds, {**attributes, "topic": topic})

        measures.on_seconds = record

    def stop(self) -> None:
        """Stop exporting. An instrument cannot be removed."""
        self._is_open = False

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
        found = self._worker.samples() if metric in self._worker.metrics else self._worker.gauge_samples()
        return found.get(metric, ())
