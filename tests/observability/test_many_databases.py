"""Tests the metrics and the probes of a worker that serves many databases: each is named, and none hides another."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from pgoutbox import Outbox, migrate
from pgoutbox.handlers import Context
from pgoutbox.message import Message
from pgoutbox.observability.backlog import Backlog, Reading, TurnsOfBacklogs
from pgoutbox.observability.measures import Measures, Sample, WorkerStatus
from pgoutbox.observability.watched import WatchedDatabases, WatchedWorker
from pgoutbox.worker import MultiWorker
from tests.support.many_databases import Databases, StartFleet, locked, until_handled
from tests.support.outbox_actions import running, settings_for
from tests.support.proxy import proxy_to
from tests.support.traces import Point, metered, points_of
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, until, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.conftest import Server
    from tests.support.worker_process import WorkerProcess

pytestmark = pytest.mark.slow

_SERVES = {"metrics_address": "127.0.0.1:0", "metrics_cache_seconds": "0.1"}


class Pages:
    """The metrics and probes of a worker."""

    def __init__(self, worker: WorkerProcess) -> None:
        wait_until(lambda: worker.records("metrics_served"), lambda: worker.log)
        self._worker = worker
        self._address = worker.records("metrics_served")[0]["address"]

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a page."""
        try:
            with urlopen(f"http://{self._address}{path}", timeout=PROCESS_PATIENCE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as refusal:
            return refusal.code, refusal.read().decode()

    def scrape(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Return the values by name and labels."""
        status, text = self.get("/metrics")
        assert status == 200
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in parse(text)
            for sample in family.samples
            if sample.name.startswith("pgoutbox_")
        }

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of a series."""
        return self.scrape().get((f"pgoutbox_{name}", tuple(sorted(labels.items()))))

    def until(self, name: str, expected: Mapping[str, float | None], **labels: str) -> None:
        """Wait until the series of the databases have these values."""

        def has_come() -> bool:
            return {database: self.value(name, database=database, **labels) for database in expected} == expected

        wait_until(has_come, lambda: f"{name}: {self.get('/metrics')[1]}\n{self._worker.log}")


def test_each_metric_names_its_database_and_the_slots_are_those_of_the_process(
    databases: Databases, start_fleet: StartFleet, server: Server
) -> None:
    databases.add("one", "two")
    databases.list("missing", server.dsn_for("there_is_no_such_database"))
    databases.enqueue("one", count=3)
    databases.enqueue("two", "unknown")
    databases.enqueue("two", "waits")
    worker = start_fleet(concurrency="5", **_SERVES)
    pages = Pages(worker)
    until_handled(databases, worker, ["one single"] * 3)
    pages.until("database_served", {"one": 1, "two": 1, "missing": 0})
    pages.until("attempts_total", {"one": 3, "two": None}, topic="single", queue="default", outcome="sent")
    pages.until("wait_seconds_count", {"one": 3, "two": None}, topic="single")
    pages.until("in_flight", {"one": 0, "two": 1, "missing": 0})
    pages.until("backlog_up", {"one": 1, "two": 1, "missing": 0})
    pages.until("messages", {"one": None, "two": 1}, topic="unknown", queue="default", state="due")
    found = pages.scrape()
    assert {name: found.get((f"pgoutbox_{name}", ())) for name in ("slots", "slots_busy", "slots_abandoned")} == {
        "slots": 5,
        "slots_busy": 1,
        "slots_abandoned": 0,
    }
    without = {name for name, labels in found if "database" not in dict(labels)}
    assert without == {"pgoutbox_slots", "pgoutbox_slots_busy", "pgoutbox_slots_abandoned", "pgoutbox_build_info"}
    databases.open_gate()
    assert worker.stop() == 0


def test_the_counts_of_a_database_continue_when_it_is_tried_again(
    databases: Databases, start_fleet: StartFleet
) -> None:
    databases.add("one")
    databases.add("bare", template="template1")
    worker = start_fleet(**_SERVES)
    pages = Pages(worker)
    pages.until("events_total", {"one": 0, "bare": 1}, event="database_left_out")
    assert "not served: bare: its worker has ended and tries again" in pages.get("/readyz")[1]
    migrate.upgrade(databases.dsn("bare"))
    pages.until("database_served", {"one": 1, "bare": 1})
    pages.until("events_total", {"one": 0, "bare": 1}, event="database_left_out")
    assert worker.stop() == 0


def test_a_database_that_has_left_the_list_has_no_metrics(databases: Databases, start_fleet: StartFleet) -> None:
    databases.add("one", "two")
    worker = start_fleet(**_SERVES)
    pages = Pages(worker)
    pages.until("backlog_up", {"one": 1, "two": 1})
    databases.remove("two")
    worker.send_signal(signal.SIGHUP)
    wait_until(lambda: worker.records("worker_stopped"), lambda: worker.log)
    worker.send_signal(signal.SIGHUP)  # Its worker ends first, then it is forgotten.
    wait_until(
        lambda: not any(("database", "two") in labels for _, labels in pages.scrape()),
        lambda: worker.log,
    )
    assert pages.value("database_served", database="one") == 1
    assert worker.stop() == 0


def test_a_database_that_cannot_be_read_hides_the_gauges_of_no_other(
    databases: Databases, start_fleet: StartFleet, tmp_path: Path
) -> None:
    databases.add("good", "locked", "hangs")
    with proxy_to(databases.dsn("hangs"), tmp_path) as proxy:
        databases.list("hangs", proxy.dsn)
        worker = start_fleet(connect_timeout_seconds="1", **_SERVES)
        pages = Pages(worker)
        pages.until("database_served", {"good": 1, "locked": 1, "hangs": 1})
        pages.until("backlog_up", {"good": 1, "locked": 1, "hangs": 1})
        with locked(databases.dsn("locked")), proxy.stalled("pgoutbox cli"):
            pages.until("backlog_up", {"locked": 0})
            databases.enqueue("good", "unknown")
            pages.until("messages", {"good": 1}, topic="unknown", queue="default", state="due")
        pages.until("backlog_up", {"good": 1, "locked": 1, "hangs": 1})
        assert worker.stop() == 0


def test_a_worker_is_ready_while_it_serves_one_of_its_databases(
    databases: Databases, start_fleet: StartFleet, server: Server
) -> None:
    databases.list("missing", server.dsn_for("there_is_no_such_database"))
    databases.list("canary", "postgresql://canary-user:canary-password@127.0.0.1:9/canary-db?connect_timeout=2")
    worker = start_fleet(**_SERVES)
    pages = Pages(worker)
    wait_until(lambda: len(worker.records("database_left_out")) == 2, lambda: worker.log)
    wait_until(lambda: pages.get("/readyz")[1].count("not served: ") == 2, lambda: f"{pages.get('/readyz')}")
    status, text = pages.get("/readyz")
    assert (status, text.splitlines()[0], pages.get("/livez")) == (503, "no database is served", (200, "ok\n"))
    databases.add("one")
    worker.send_signal(signal.SIGHUP)
    pages.until("database_served", {"one": 1, "missing": 0, "canary": 0})
    status, text = pages.get("/readyz")
    assert (status, text.splitlines()[0]) == (200, "ok")
    assert sorted(line.split(": ")[1] for line in text.splitlines()[1:]) == ["canary", "missing"]
    assert "canary-" not in text + pages.get("/metrics")[1]
    assert worker.stop() == 0


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.fixture
def outbox(databases: Databases) -> Outbox:
    databases.add("one", "two")
    settings = settings_for(databases.dsn("one"), dsns=str(databases.file))
    found = Outbox(settings.model_copy(update={"dsn": None}))

    @found.handler("single")
    async def single(message: Message, context: Context) -> None: ...

    return found


async def test_opentelemetry_gets_the_database_as_an_attribute(
    outbox: Outbox, databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    databases.enqueue("two")
    with metered(monkeypatch) as reader:
        worker = MultiWorker(outbox)
        async with running(worker):
            sent = {"database": "two", "topic": "single", "queue": "default", "outcome": "sent"}

            def is_sent() -> bool:
                points = points_of(reader)
                return Point(sent, 1) in points.get("pgoutbox.attempts", []) and "pgoutbox.wait_seconds" in points

            await until(is_sent)
            await until(lambda: len(points_of(reader).get("pgoutbox.backlog_up", [])) == 2)
            points = points_of(reader)
    assert points["pgoutbox.wait_seconds"] == [Point({"database": "two", "topic": "single"}, 1)]
    assert points["pgoutbox.slots"] == [Point({}, 4)]
    assert points["pgoutbox.database_served"] == [Point({"database": "one"}, 1), Point({"database": "two"}, 1)]


async def test_the_status_has_that_of_each_database(outbox: Outbox, databases: Databases) -> None:
    worker = MultiWorker(outbox)
    assert not worker.status().is_started
    async with running(worker):
        await until(lambda: all(one.is_idle for one in worker.status().databases.values()))
        await until(lambda: len(worker.status().databases) == 2)
        status = await asyncio.to_thread(worker.status)
        assert (status.is_started, status.is_database_up, status.slots, status.busy) == (True, True, 4, 0)
        assert {name: one.is_listener_up for name, one in status.databases.items()} == {"one": True, "two": True}
    assert worker.status().is_stopping


class Pauses(threading.Event):
    """Records the pauses without making them, and lets nobody ask any more after the second."""

    def __init__(self, turns: TurnsOfBacklogs) -> None:
        super().__init__()
        self._turns = turns
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        if len(self.seconds) % 2 == 0:
            self._turns._asked_at = -math.inf
        return self.is_set()


def test_reading_takes_a_twentieth_of_the_time_and_ends_when_nobody_asks(dsn: str) -> None:
    good, dead = Backlog(settings_for(dsn, metrics_cache_seconds=0.1)), Backlog(settings_for("host=127.0.0.1 port=9"))
    turns = TurnsOfBacklogs(lambda: {"good": good, "dead": dead})
    turns._ended = pauses = Pauses(turns)
    turns.keep_reading()
    wait_until(lambda: len(pauses.seconds) == 2, lambda: f"{pauses.seconds}")
    reading = good.last_reading
    assert reading is not None
    assert pauses.seconds == [19 * reading.seconds, 1]
    assert turns._reader is not None
    turns._reader.join(PROCESS_PATIENCE_SECONDS)
    assert not turns._reader.is_alive()
    turns.keep_reading()
    wait_until(lambda: len(pauses.seconds) > 2, lambda: f"{pauses.seconds}")
    turns.stop()
    turns._reader.join(PROCESS_PATIENCE_SECONDS)
    assert not turns._reader.is_alive()


def test_a_scrape_waits_for_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    asking: list[tuple[str, Backlog]] = []
    unanswered: Future[Reading] = Future()

    def ask(self: Backlog) -> Future[Reading]:
        asking.append((threading.current_thread().name, self))
        return unanswered

    monkeypatch.setattr(Backlog, "ask", ask)
    settings = settings_for("host=127.0.0.1 port=9")
    backlogs = {name: Backlog(settings) for name in ("served", "down")}
    statuses = {name: WorkerStatus(is_started=True, is_database_up=name == "served") for name in backlogs}
    workers = {
        name: WatchedWorker(Measures(max_label_values=1), partial(statuses.__getitem__, name), dict, backlogs[name])
        for name in backlogs
    }
    watched = WatchedDatabases(lambda: WorkerStatus(databases=statuses), lambda: workers, settings)
    samples = {metric.name: list(found) for metric, found in watched.gauge_samples().items()}
    assert samples["backlog_up"] == [Sample(("down",), 0)]
    wait_until(lambda: asking, lambda: "no database is read")
    watched.turns.stop()
    assert set(asking) == {("pgoutbox-backlogs", backlogs["served"])}
