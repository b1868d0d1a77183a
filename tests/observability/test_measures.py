"""Tests measurements without a worker: buckets, limits, clocks, and a worker's health."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from pgoutbox.observability import measures, watched
from pgoutbox.observability.health import LoopWatch, reasons_not_ready
from pgoutbox.observability.measures import (
    HANDLER_SECONDS,
    WAIT_SECONDS,
    Distribution,
    Measures,
    Sample,
    WorkerStatus,
)
from pgoutbox.observability.opentelemetry import Exporter
from pgoutbox.observability.watched import WatchedWorker
from tests.support.sends import outgoing
from tests.support.traces import Point, metered, points_of

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
WELL = WorkerStatus(
    is_started=True,
    is_stopping=False,
    in_flight=0,
    slots=4,
    busy=0,
    abandoned=0,
    is_listener_up=True,
    is_database_up=True,
    is_copy=False,
    polled_seconds_ago=1.0,
    claimed_seconds_ago=None,
    outcomes_refused=0,
    breakers_open=0,
)


def test_a_value_on_a_bound_is_in_its_bucket_and_one_above_all_in_the_last() -> None:
    distribution = Distribution((1.0, 2.0))
    distribution.add([3.0, 1.0, 2.0, 0.5, 1.5])
    distribution.add([-0.25])
    assert distribution.counts == [3, 2, 1]
    assert distribution.sum == 8.0


def test_a_wait_is_computed_only_from_the_clock_of_the_database() -> None:
    measures = Measures(max_label_values=10)
    message = replace(outgoing(), available_at=NOW - timedelta(seconds=20))
    measures.attempted([(message.topic, (message.available_at,), 100.0, 100.5)])
    assert measures.distributions(WAIT_SECONDS) == {}, "that clock is still unknown"
    measures.set_server_time(NOW, 90.0)
    measures.attempted([(message.topic, (message.available_at,), 100.0, 100.5)])
    assert measures.distributions(WAIT_SECONDS)["welcome"].sum == 30.0
    assert measures.distributions(HANDLER_SECONDS)["welcome"].sum == 1.0


def test_an_export_to_opentelemetry_makes_each_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []

    def make(labels: tuple[str, ...], value: float) -> Sample:
        made.append(labels)
        return Sample(labels, value)

    counts = Measures(max_label_values=10)
    counts.claimed([("welcome", "bulk")], at=0.0)
    counts.sent([replace(outgoing(), queue="bulk")])
    with metered(monkeypatch) as reader:
        Exporter(WatchedWorker(counts, lambda: WELL, dict, None))
        for module in (measures, watched):
            monkeypatch.setattr(module, "Sample", make)
        points = points_of(reader)
    assert points["pgoutbox.claimed"] == [Point({"topic": "welcome", "queue": "bulk"}, 1)]
    assert sorted(labels for labels in made if "bulk" in labels) == [("welcome", "bulk"), ("welcome", "bulk", "sent")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"is_listener_up": None}, None),
        ({"polled_seconds_ago": 151.0, "busy": 4}, None),
        ({"is_listener_up": False}, "the listener is not connected"),
        ({"is_database_up": False}, "the database does not answer"),
        ({"is_copy": True}, "the database is a copy, nothing is claimed: see `pgoutbox doctor` and `pgoutbox adopt`"),
        ({"polled_seconds_ago": 151.0}, "the last poll was 151 s ago"),
        ({"is_started": False}, "the worker has not started: it has not reached the database yet"),
        ({"is_stopping": True, "is_started": False}, "the worker is stopping"),
    ],
)
def test_a_worker_is_ready_unless_there_is_a_reason(change: dict[str, object], reason: str | None) -> None:
    status = replace(WELL, **change)  # type: ignore[arg-type] # the names and types are those of the fields
    assert reasons_not_ready(status, poll_interval_seconds=60) == ([] if reason is None else [reason])


class Loop:
    """An event loop in a thread that can be blocked."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def call(self, function: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(function)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.mark.slow
def test_a_blocked_event_loop_is_not_alive_until_it_runs_again() -> None:
    watched = Loop()
    may_go_on = threading.Event()
    try:
        watch = LoopWatch(watched.loop, limit_seconds=0.7)
        assert watch.reason_not_alive() is None
        watched.call(may_go_on.wait)
        assert watch.reason_not_alive() is None, "not blocked for long enough yet"
        began_at = time.monotonic()
        while (reason := watch.reason_not_alive()) is None:
            assert time.monotonic() < began_at + 30
        assert reason.startswith("the event loop has been blocked for ")
        may_go_on.set()
        assert watch.reason_not_alive() is None
    finally:
        may_go_on.set()
        watched.end()
    assert watch.reason_not_alive() == "the event loop is closed"
