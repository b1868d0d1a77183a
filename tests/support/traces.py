"""OpenTelemetry as an application sets it up, for the duration of a test; spans and metrics stay in memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pytest


def ids_of(span: ReadableSpan) -> tuple[int, int]:
    """Return the ids of the trace and of the span."""
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


class Traces:
    """The spans that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        """Return all spans, ordered by begin."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the spans with a name."""
        return [span for span in self.spans if span.name == name]

    def tree(self) -> list[str]:
        """Return one line for each span, indented by its depth."""
        depths: dict[int, int] = {}
        lines = []
        for span in self.spans:
            depth = 0 if span.parent is None else depths.get(span.parent.span_id, -1) + 1
            depths[ids_of(span)[1]] = depth
            lines.append("  " * depth + f"{span.name} [{span.kind.name}]")
        return lines


@contextlib.contextmanager
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """Set up the application's tracer provider; the API allows this only once per process."""
    traces = Traces()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", traces.provider)
    try:
        yield traces
    finally:
        traces.provider.shutdown()


class Point(NamedTuple):
    """A value of a metric, or the number of values in a histogram."""

    attributes: Mapping[str, object]
    value: float


@contextlib.contextmanager
def metered(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """Set up the application's meter provider."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr("opentelemetry.metrics._internal._METER_PROVIDER", provider)
    assert metrics.get_meter_provider() is provider
    try:
        yield reader
    finally:
        provider.shutdown()


def points_of(reader: InMemoryMetricReader) -> dict[str, list[Point]]:
    """Return the current values by the name of the metric."""
    found: dict[str, list[Point]] = {}
    data = reader.get_metrics_data()
    for resource in [] if data is None else data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                found[metric.name] = [
                    Point(dict(point.attributes or {}), float(getattr(point, "value", getattr(point, "count", 0))))
                    for point in metric.data.data_points
                ]
    return found
