"""The metrics in the text formats of Prometheus. Needs the extra `metrics`.

It depends on no web framework: an HTTP server calls `Exposition.answer` and sends the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from pgoutbox.errors import MissingExtraError
from pgoutbox.observability.backlog import Backlog, Reading
from pgoutbox.observability.measures import (
    DATABASE_METRICS,
    WORKER_METRICS,
    Kind,
    Measures,
    Metric,
    Sample,
    WatchedWorker,
)

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError as _error:
    raise MissingExtraError("serving metrics (PGOUTBOX_METRICS_ADDRESS)", "metrics") from _error

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

    from pgoutbox.settings import Settings


class Page(NamedTuple):
    """An answer to an HTTP request: its status, `Content-Type` and body."""

    status: int
    content_type: str
    body: bytes


class Exposition:
    """The answers to scrapes: the gauges of the database and, with `worker`, the metrics of that worker.

    With a worker they also contain prometheus_client's own registry: metrics of the process and of your handlers. If
    the database does not answer within three seconds, only its gauges are missing.

        exposition = Exposition(load_settings())
        status, content_type, body = await exposition.answer(request.headers.get("accept"))
    """

    def __init__(self, settings: Settings, *, worker: WatchedWorker | None = None) -> None:
        self._worker = worker
        self._backlog = Backlog(settings) if settings.metrics.backlog else None

    async def answer(self, accept: str | None = None) -> Page:
        """Return the metrics in the format that the header `Accept` requests: OpenMetrics or Prometheus text."""
        return await asyncio.to_thread(self.answer_blocking, accept)

    def answer_blocking(self, accept: str | None = None) -> Page:
        """Do the same as `answer`, without an event loop."""
        reading = None if self._backlog is None else self._backlog.reading()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot(self._families(reading)))
        encoder, content_type = choose_encoder(accept or "")
        return Page(200, content_type, encoder(registry))

    def _families(self, reading: Reading | None) -> Iterator[Family]:
        build = GaugeMetricFamily("pgoutbox_build_info", "The version of pgoutbox.", labels=["version"])
        build.add_metric([version("pgoutbox")], 1)
        yield build
        if self._worker is not None:
            samples = self._worker.samples()
            for metric in WORKER_METRICS:
                if metric.kind is Kind.HISTOGRAM:
                    yield _histogram(metric, self._worker.measures)
                else:
                    yield _family(metric, samples[metric])
            yield from REGISTRY.collect()
        if reading is not None:
            for metric in DATABASE_METRICS:
                yield _family(metric, reading.samples_of(metric))


class _Snapshot(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(
        f"pgoutbox_{metric.name}", metric.meaning, labels=metric.labels
    )
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family


def _histogram(metric: Metric, measures: Measures) -> Family:
    family = HistogramMetricFamily(f"pgoutbox_{metric.name}", metric.meaning, labels=metric.labels)
    for topic, found in measures.distributions(metric).items():
        bounds = [*map(str, found.bounds), "+Inf"]
        family.add_metric([topic], list(zip(bounds, accumulate(found.counts), strict=True)), found.sum)
    return family
