"""The metrics in the text formats of Prometheus. Needs the extra `metrics`.

It depends on no web framework: an HTTP server calls `Exposition.answer` and sends the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from pgoutbox.errors import MissingExtraError
from pgoutbox.observability.backlog import Backlog
from pgoutbox.observability.measures import Distribution, Kind, Metric, Sample
from pgoutbox.observability.watched import Watched

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
    """The answers to scrapes: the gauges of the database, or with `worker` all metrics of that worker.

    With a worker they also contain prometheus_client's own registry: metrics of the process and of your handlers. If
    the database does not answer within three seconds, only its gauges are missing.

        exposition = Exposition(load_settings())
        status, content_type, body = await exposition.answer(request.headers.get("accept"))
    """

    def __init__(self, settings: Settings, *, worker: Watched | None = None) -> None:
        self._worker = worker
        self._gauge_samples: Callable[[], Mapping[Metric, Iterable[Sample]]] = dict
        if worker is not None:
            self._gauge_samples = worker.gauge_samples
        elif settings.metrics.backlog:
            backlog = Backlog(settings)
            self._gauge_samples = lambda: backlog.reading().all_samples()

    async def answer(self, accept: str | None = None) -> Page:
        """Return the metrics in the format that the header `Accept` requests: OpenMetrics or Prometheus text."""
        return await asyncio.to_thread(self.answer_blocking, accept)

    def answer_blocking(self, accept: str | None = None) -> Page:
        """Do the same as `answer`, without an event loop."""
        gauges = self._gauge_samples()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot(self._families(gauges)))
        encoder, content_type = choose_encoder(accept or "")
        return Page(200, content_type, encoder(registry))

    def _families(self, gauges: Mapping[Metric, Iterable[Sample]]) -> Iterator[Family]:
        build = GaugeMetricFamily("pgoutbox_build_info", "The version of pgoutbox.", labels=["version"])
        build.add_metric([version("pgoutbox")], 1)
        yield build
        if self._worker is not None:
            samples = self._worker.samples()
            for metric in self._worker.metrics:
                if metric.kind is Kind.HISTOGRAM:
                    yield _histogram(metric, self._worker.distributions(metric))
                else:
                    yield _family(metric, samples[metric])
            yield from REGISTRY.collect()
        for metric, found in gauges.items():
            yield _family(metric, found)


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


def _histogram(metric: Metric, distributions: Mapping[tuple[str, ...], Distribution]) -> Family:
    family = HistogramMetricFamily(f"pgoutbox_{metric.name}", metric.meaning, labels=metric.labels)
    for labels, found in distributions.items():
        bounds = [*map(str, found.bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(found.counts), strict=True)), found.sum)
    return family
