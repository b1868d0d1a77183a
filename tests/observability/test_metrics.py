"""Tests the metrics of a worker and the database, read over HTTP like Prometheus, during deliveries."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from pgoutbox import Outbox, RetryPolicy
from pgoutbox.database import sql
from pgoutbox.errors import ConfigurationError
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.message import Message, Permanent, Skip, Snooze, State, Transient
from pgoutbox.observability.backlog import Backlog
from pgoutbox.observability.events import LogEvent
from pgoutbox.observability.measures import (
    DATABASE_METRICS,
    LATELY_FAILED,
    MAINTENANCE_AGE,
    MESSAGES,
    OLDEST_ATTEMPT,
    OLDEST_DUE,
    REDIRECTS,
    UNATTEMPTED,
    WAIT_SECONDS,
    WORKER_METRICS,
    Measures,
)
from pgoutbox.observability.prometheus import Exposition
from pgoutbox.worker import Worker
from tests.support.http_client import ask, exchange
from tests.support.messages import put
from tests.support.outbox_actions import PATIENCE_SECONDS, enqueue, lapse, reports, running, settings_for
from tests.support.prometheus import port_of
from tests.support.roles import ROLES, login
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, until, until_idle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from prometheus_client.metrics_core import Metric as Family

    from pgoutbox.message import Outcome
    from tests.conftest import Connect

pytestmark = pytest.mark.slow

OUTCOMES: dict[str, Outcome] = {
    "transient": Transient("busy"),
    "permanent": Permanent("refused"),
    "skip": Skip("gone"),
    "snooze": Snooze(3600),
}


@pytest.fixture
def outbox(dsn: str) -> Outbox:
    """Build an outbox whose workers serve metrics on any free port, and query the database at each scrape."""
    return Outbox(settings_for(dsn, metrics_address="127.0.0.1:0", metrics_cache_seconds=0.1))


async def scrape(worker: Worker) -> dict[str, Family]:
    answer = await ask(port_of(worker), "/metrics")
    assert answer.status == 200
    return {family.name: family for family in parse(answer.body)}


def waits_of(worker: Worker, topic: str) -> int:
    """Return the number of recorded waiting times. They are counted slightly later than the messages are sent."""
    measures = worker.telemetry.measures
    assert measures is not None
    found = measures.distributions(WAIT_SECONDS).get(topic)
    return 0 if found is None else sum(found.counts)


def value(families: dict[str, Family], sample: str, **labels: str) -> float | None:
    """Return the value of one series."""
    for family in families.values():
        for found in family.samples:
            if found.name == sample and found.labels == labels:
                return float(found.value)
    return None


async def test_attempts_are_counted_by_topic_queue_and_outcome(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet", retry=RetryPolicy.steps(3600, jitter=0))
    async def greet(message: Message, ctx: Context) -> Outcome | None:
        return OUTCOMES.get(str(message.payload))

    @outbox.batch_handler("index")
    async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> None: ...

    for name in ["sent", "sent", *OUTCOMES]:
        enqueue(db, payload=name)
    enqueue(db, "index")
    enqueue(db, "index")
    superseded = enqueue(db, coalesce_key="k")
    enqueue(db, coalesce_key="k")
    worker = Worker(outbox)
    async with running(worker):
        await until_idle(worker)
        await until(lambda: waits_of(worker, "greet") == 7 and waits_of(worker, "index") == 2)
        families = await scrape(worker)
    counted = {
        outcome: value(families, "pgoutbox_attempts_total", topic="greet", queue="default", outcome=outcome)
        for outcome in ("sent", "retry", "failed", "skipped", "snoozed")
    }
    assert counted == {"sent": 3, "retry": 1, "failed": 1, "skipped": 1, "snoozed": 1}
    labels = {"topic": "greet", "queue": "default"}
    assert value(families, "pgoutbox_unattempted_total", **labels, outcome="skipped") == 1, superseded
    assert value(families, "pgoutbox_claimed_total", **labels) == 7
    assert (value(families, "pgoutbox_claims_total", queue="default") or 0) >= 2
    assert value(families, "pgoutbox_handler_seconds_count", topic="greet") == 7
    assert value(families, "pgoutbox_handler_seconds_count", topic="index") == 1, (
        "the batch handler was not called once"
    )
    assert value(families, "pgoutbox_wait_seconds_count", topic="index") == 2
    assert value(families, "pgoutbox_events_total", event="sent") == 5
    assert value(families, "pgoutbox_in_flight") == 0
    assert value(families, "pgoutbox_slots") == 4
    assert value(families, "pgoutbox_listener_up") == 1
    assert value(families, "pgoutbox_database_up") == 1
    assert value(families, "pgoutbox_last_claim_seconds") is not None
    assert "process_cpu_seconds" in families, "the application's own registry is missing"


async def test_the_wait_begins_when_a_message_falls_due(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    message_id = enqueue(db)
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '200 s' WHERE id = %s", [message_id])
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: worker.telemetry.counts[LogEvent.SENT])
        await until(lambda: waits_of(worker, "greet"))
        families = await scrape(worker)
    waited = value(families, "pgoutbox_wait_seconds_sum", topic="greet")
    assert waited is not None
    assert 200 <= waited < 260
    assert value(families, "pgoutbox_wait_seconds_bucket", topic="greet", le="60.0") == 0
    assert value(families, "pgoutbox_wait_seconds_bucket", topic="greet", le="300.0") == 1


async def test_a_handler_that_outlives_its_attempt_is_counted_as_abandoned(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, metrics_address="127.0.0.1:0", metrics_cache_seconds=0.1, lease_seconds=1))
    may_end = threading.Event()

    @outbox.handler("greet", timeout=1, retry=RetryPolicy.steps(3600))
    def greet(message: Message, ctx: SyncContext) -> None:
        may_end.wait(30)

    enqueue(db)
    worker = Worker(outbox)
    async with running(worker):
        try:
            await until(lambda: worker.telemetry.counts[LogEvent.ATTEMPT_ABANDONED])
            families = await scrape(worker)
            assert value(families, "pgoutbox_abandoned_total") == 1
            assert value(families, "pgoutbox_slots_abandoned") == 1
            assert value(families, "pgoutbox_slots") == 3
        finally:
            may_end.set()
        await until(lambda: worker.status().abandoned == 0)
        families = await scrape(worker)
    assert value(families, "pgoutbox_abandoned_total") == 1
    assert value(families, "pgoutbox_slots") == 4


async def test_a_lost_lease_and_a_reconnect_are_counted(
    outbox: Outbox, db: psycopg.Connection, connect: Connect
) -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        has_begun.set()
        await may_end.wait()

    message_id = enqueue(db)
    worker = Worker(outbox)
    with reports() as log:
        async with running(worker):
            await has_begun.wait()
            db.execute(
                "UPDATE pgoutbox.message SET attempt_count = attempt_count + 1, lane = 1 WHERE id = %s", [message_id]
            )
            lapse(db, message_id)
            may_end.set()
            await log.wait_for(LogEvent.LEASE_LOST)
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'pgoutbox listen'"
            )
            await log.wait_for(LogEvent.LISTENER_BACK)
            families = await scrape(worker)
    assert value(families, "pgoutbox_leases_lost_total") == 1
    assert value(families, "pgoutbox_attempts_total", topic="greet", queue="default", outcome="lost") == 1
    assert value(families, "pgoutbox_reconnects_total", connection="listener") == 1


async def test_exactly_the_metrics_of_the_catalogue_are_served(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    async with running(worker):
        families = await scrape(worker)
    own = {name for name in families if name.startswith("pgoutbox_")}
    assert own == {f"pgoutbox_{metric.name}" for metric in (*WORKER_METRICS, *DATABASE_METRICS)} | {
        "pgoutbox_build_info"
    }
    labels = {name for family in families.values() for sample in family.samples for name in sample.labels}
    assert "database" not in labels, "only a worker of many databases names them"


async def test_a_client_that_requests_openmetrics_gets_it(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    async with running(worker):
        answer = await ask(port_of(worker), "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = parse_openmetrics(answer.body)  # type: ignore[no-untyped-call]
    assert "pgoutbox_attempts" in {family.name for family in families}


SECRET = "canary-8d1f"


async def test_no_label_contains_data_of_a_message(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        raise Permanent(SECRET)

    enqueue(db, payload=SECRET, destination=f"https://{SECRET}.example.org/", dedupe_key=SECRET, coalesce_key=SECRET)
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
        " VALUES (%s, now() + interval '1 h', 30, 'w', %s)",
        [f"https:{SECRET}.example.org:443", SECRET],
    )
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: worker.telemetry.counts[LogEvent.FAILED])
        answer = await ask(port_of(worker), "/metrics")
    assert 'pgoutbox_breakers{scheme="https",state="open"} 1.0' in answer.body
    assert SECRET not in answer.body


def test_topics_and_queues_beyond_the_limit_are_counted_as_other(dsn: str, db: psycopg.Connection) -> None:
    for number in range(5):
        for _ in range(number + 1):
            enqueue(db, f"topic{number}", queue=f"queue{number}")
    backlog = Backlog(settings_for(dsn, metrics_max_label_values=2))
    reading = backlog.ask().result()
    due = {(s.labels[0], s.labels[1]): s.value for s in reading.samples[MESSAGES] if s.labels[2] == "due"}
    assert due == {("topic3", "queue3"): 4, ("topic4", "queue4"): 5, ("other", "other"): 6}
    measures = Measures(max_label_values=2)
    for number in range(5):
        measures.unattempted(f"topic{number}", "default", "failed")
    assert {s.labels[0]: s.value for s in measures.samples(UNATTEMPTED)} == {"topic0": 1, "topic1": 1, "other": 3}


def test_the_messages_in_the_database_are_counted_by_state(dsn: str, db: psycopg.Connection) -> None:
    enqueue(db)
    enqueue(db)
    later = enqueue(db, queue="bulk")
    db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 h' WHERE id = %s", [later])
    for state in (State.SENDING, State.FAILED, State.FAILED, State.SENT):
        put(db, state)
    reading = Backlog(settings_for(dsn)).ask().result()
    total: dict[str, float] = {}
    for sample in reading.samples[MESSAGES]:
        total[sample.labels[2]] = total.get(sample.labels[2], 0) + sample.value
    assert total == {"due": 2, "scheduled": 1, "sending": 1, "failed": 2}


def age(db: psycopg.Connection, column: str, seconds: int, *message_ids: int) -> None:
    """Move a time of these messages into the past."""
    db.execute(
        f"UPDATE pgoutbox.message SET {column} = now() - make_interval(secs => %s) WHERE id = ANY (%s)".encode(),
        [seconds, list(message_ids)],
    )


def test_the_oldest_due_message_of_each_lane_counts_and_a_pause_is_a_label(dsn: str, db: psycopg.Connection) -> None:
    age(db, "available_at", 100, enqueue(db, queue="fresh"), enqueue(db, queue="paused"), enqueue(db, queue="over"))
    enqueue(db, queue="fresh")
    age(db, "available_at", 200, retried := enqueue(db, queue="retry"))
    db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = %s", [retried])
    age(db, "available_at", 300, enqueue(db, queue="ordered", ordering_key="k"))
    age(db, "available_at", 250, enqueue(db, queue="shared", fair_key="k"))
    age(db, "available_at", -300, enqueue(db, queue="scheduled"))
    age(db, "available_at", 400, put(db, State.SENDING, queue="sending"))
    put(db, State.FAILED, queue="failed")
    db.execute(
        "INSERT INTO pgoutbox.queue (name, paused_at, resume_at) VALUES"
        " ('paused', now(), NULL), ('idle', now(), NULL), ('over', now() - interval '2 s', now() - interval '1 s')"
    )

    def seconds(most: int) -> dict[tuple[str, ...], int]:
        samples = Backlog(settings_for(dsn, metrics_max_label_values=most)).ask().result().samples[OLDEST_DUE]
        return {sample.labels: int(sample.value // 100) * 100 for sample in samples}

    assert seconds(100) == {
        ("fresh", "false"): 100,
        ("idle", "true"): 0,
        ("ordered", "false"): 300,
        ("over", "false"): 100,
        ("paused", "true"): 100,
        ("retry", "false"): 200,
        ("scheduled", "false"): 0,
        ("sending", "false"): 0,
        ("shared", "false"): 200,
    }
    assert seconds(3) == {
        ("ordered", "false"): 300,
        ("retry", "false"): 200,
        ("shared", "false"): 200,
        ("other", "false"): 100,
        ("other", "true"): 100,
    }


def test_messages_of_paused_topics_count_as_paused_and_hide_no_others(dsn: str, db: psycopg.Connection) -> None:
    db.execute("SELECT pgoutbox.pause_topic('digest')")
    for kind in ({"queue": "fresh"}, {"queue": "ordered", "ordering_key": "k"}, {"queue": "alone"}):
        age(db, "available_at", 300, *(enqueue(db, "digest", **kind) for _ in range(3)))  # type: ignore[arg-type]
        if kind["queue"] != "alone":
            age(db, "available_at", 100, enqueue(db, **kind))  # type: ignore[arg-type]
    samples = Backlog(settings_for(dsn)).ask().result().samples[OLDEST_DUE]
    assert {sample.labels: int(sample.value // 100) * 100 for sample in samples} == {
        ("alone", "false"): 0,
        ("alone", "true"): 300,
        ("fresh", "false"): 100,
        ("fresh", "true"): 300,
        ("ordered", "false"): 100,
        ("ordered", "true"): 300,
    }


def test_messages_of_paused_fair_keys_count_as_paused_and_hide_no_others(dsn: str, db: psycopg.Connection) -> None:
    db.execute("SELECT pgoutbox.set_fair_share('mail', 'big', max_in_flight => 0)")
    db.execute("SELECT pgoutbox.set_fair_share('bulk', max_in_flight => 0)")
    db.execute("SELECT pgoutbox.set_fair_share('bulk', 'free', max_in_flight => 5)")
    for queue, key, seconds in (
        ("mail", "big", 400), ("mail", "small", 100), ("mail", "tiny", 200),
        ("bulk", "big", 400), ("bulk", "free", 300),
    ):  # fmt: skip
        age(db, "available_at", seconds, enqueue(db, queue=queue, fair_key=key))
    samples = Backlog(settings_for(dsn)).ask().result().samples[OLDEST_DUE]
    assert {sample.labels: int(sample.value // 100) * 100 for sample in samples} == {
        ("bulk", "false"): 300,
        ("bulk", "true"): 400,
        ("mail", "false"): 200,
        ("mail", "true"): 400,
    }


def test_the_oldest_attempt_in_flight_is_known_by_topic_and_queue(dsn: str, db: psycopg.Connection) -> None:
    def began_ago(seconds: int, *message_ids: int) -> None:
        parameters = {"seconds": seconds, "ids": list(message_ids)}
        earlier: LiteralString = "SET claimed_at = claimed_at - make_interval(secs => %(seconds)s)"
        db.execute(f"UPDATE pgoutbox.message {earlier} WHERE id = ANY (%(ids)s)", parameters)
        db.execute(f"UPDATE pgoutbox.claim {earlier} WHERE ids && %(ids)s::bigint[]", parameters)

    began_ago(100, put(db, State.SENDING), put(db, State.SENDING, queue="bulk"))
    began_ago(200, put(db, State.SENDING), put(db, State.SENT))
    enqueue(db)

    def seconds(most: int) -> dict[tuple[str, ...], int]:
        samples = Backlog(settings_for(dsn, metrics_max_label_values=most)).ask().result().samples[OLDEST_ATTEMPT]
        return {sample.labels: int(sample.value // 100) * 100 for sample in samples}

    assert seconds(100) == {("mail", "default"): 200, ("mail", "bulk"): 100}
    assert seconds(1) == {("mail", "default"): 200}


def test_messages_that_failed_within_the_last_hour_are_counted(dsn: str, db: psycopg.Connection) -> None:
    put(db, State.FAILED, queue="bulk")
    for minutes in (0, 59, 61):
        put(db, State.FAILED, age=timedelta(minutes=minutes))
    put(db, State.SENT)

    def counts(most: int) -> dict[tuple[str, ...], float]:
        samples = Backlog(settings_for(dsn, metrics_max_label_values=most)).ask().result().samples[LATELY_FAILED]
        return {sample.labels: sample.value for sample in samples}

    assert counts(100) == {("mail", "default"): 2, ("mail", "bulk"): 1}
    assert counts(1) == {("mail", "default"): 2}


def test_the_age_of_maintenance_is_absent_until_a_worker_has_begun_a_turn(dsn: str, db: psycopg.Connection) -> None:
    def ages() -> list[int]:
        return [int(sample.value) for sample in Backlog(settings_for(dsn)).ask().result().samples[MAINTENANCE_AGE]]

    assert ages() == []
    db.execute("INSERT INTO pgoutbox.maintenance_run (due_at, began_at, worker) VALUES (now(), now(), 'w')")
    assert ages() == [0]


def test_the_redirects_are_counted_by_source(dsn: str, db: psycopg.Connection) -> None:
    def counts() -> dict[str, float]:
        samples = Backlog(settings_for(dsn)).ask().result().samples[REDIRECTS]
        return {sample.labels[0]: sample.value for sample in samples}

    assert counts() == {"operator": 0, "worker": 0}
    db.execute("SELECT pgoutbox.set_redirect('testers@example.org')")
    db.execute(
        "INSERT INTO pgoutbox.worker (name, queues, topics, redirect_to)"
        " SELECT name, '{}', '{}', 'a@example.org' FROM unnest('{a,b}'::text[]) AS w(name)"
    )
    assert counts() == {"operator": 1, "worker": 2}
    db.execute("SELECT pgoutbox.clear_redirect()")
    assert counts() == {"operator": 0, "worker": 2}


@pytest.mark.parametrize("role", [role for role in ROLES if role != "pgoutbox_producer"])
def test_a_worker_and_a_dashboard_may_read_every_gauge(dsn: str, db: psycopg.Connection, role: str) -> None:
    enqueue(db)
    put(db, State.SENDING)
    put(db, State.FAILED)
    db.execute("INSERT INTO pgoutbox.maintenance_run (due_at, began_at, worker) VALUES (now(), now(), 'w')")
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
        " VALUES ('k', now(), 1, 'w', '')"
    )
    with login(dsn, role) as login_dsn:
        reading = Backlog(settings_for(login_dsn)).ask().result()
    assert reading.is_up
    assert all(reading.samples.values())


def test_concurrent_scrapes_share_one_query_of_the_database(dsn: str, db: psycopg.Connection) -> None:
    backlog = Backlog(settings_for(dsn, metrics_cache_seconds=3600))
    first = backlog.ask()
    readings = {id(backlog.ask().result()) for _ in range(20)}
    assert readings == {id(first.result())}


async def test_a_locked_table_costs_only_the_gauges(outbox: Outbox, db: psycopg.Connection, connect: Connect) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    async with running(worker):
        blocker = connect()
        await asyncio.to_thread(blocker.execute, "LOCK TABLE pgoutbox.message IN ACCESS EXCLUSIVE MODE")
        families = await scrape(worker)
        blocker.rollback()
        await until(lambda: worker.status().is_database_up)
    assert value(families, "pgoutbox_backlog_up") == 0
    assert families["pgoutbox_messages"].samples == []
    assert value(families, "pgoutbox_slots") == 4


def test_a_slow_count_costs_only_the_counts(dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "COUNT_BACKLOG", "SELECT pg_sleep(600)")
    enqueue(db)
    reading = Backlog(settings_for(dsn)).ask().result(PATIENCE_SECONDS)
    assert (reading.is_up, reading.samples[MESSAGES]) == (True, [])
    assert [sample.labels for sample in reading.samples[OLDEST_DUE]] == [("default", "false")]


def test_a_slow_gauge_that_alerts_read_is_abandoned(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "OLDEST_DUE", "SELECT pg_sleep(600)")
    assert not Backlog(settings_for(dsn)).ask().result(PATIENCE_SECONDS).is_up


def test_the_gauges_of_alerts_run_with_the_settings_of_their_tested_plans(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "OLDEST_DUE", "SELECT current_setting('enable_seqscan'), 'false', 1")
    monkeypatch.setattr(sql, "COUNT_BACKLOG", "SELECT 'greet', current_setting('enable_seqscan'), 'due', 1")
    samples = Backlog(settings_for(dsn)).ask().result().samples
    assert (samples[OLDEST_DUE][0].labels[0], samples[MESSAGES][0].labels[1]) == ("off", "on")


async def test_each_event_is_counted_from_zero(outbox: Outbox, db: psycopg.Connection) -> None:
    """Prometheus sees no increase in a series that appears with its first event."""

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: worker.status().is_started)
        families = await scrape(worker)
    counted = {sample.labels["event"]: sample.value for sample in families["pgoutbox_events"].samples}
    assert counted.keys() == {event.value for event in LogEvent}
    assert counted["lease_expired"] == 0


async def test_the_dashboard_can_serve_the_gauges_without_a_worker(dsn: str, db: psycopg.Connection) -> None:
    enqueue(db)
    status, content_type, body = await Exposition(settings_for(dsn)).answer()
    assert (status, content_type.partition(";")[0]) == (200, "text/plain")
    names = {family.name for family in parse(body.decode())}
    assert names == {f"pgoutbox_{metric.name}" for metric in DATABASE_METRICS} | {"pgoutbox_build_info"}


async def test_an_address_in_use_ends_the_worker_with_an_error_that_names_it(outbox: Outbox, dsn: str) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    first = Worker(outbox)
    async with running(first):
        await until(lambda: first.status().is_started)
        taken = f"127.0.0.1:{port_of(first)}"
        second = Worker(outbox, settings=settings_for(dsn, metrics_address=taken))
        with pytest.raises(ConfigurationError, match=r"PGOUTBOX_METRICS_ADDRESS: cannot listen on 127\.0\.0\.1"):
            await second.run()
        await second.run_once()  # A cron run beside it serves no metrics.


async def test_a_worker_without_an_address_measures_nothing(dsn: str) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: worker.status().is_started)
        assert worker.telemetry_server.port is None
        assert worker.telemetry.measures is None


# --- probes -----------------------------------------------------------------------------------------------------------


async def test_a_working_worker_is_alive_and_ready(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: worker.status().is_started)
        answers = [await ask(port_of(worker), path) for path in ("/livez", "/readyz")]
    assert [(a.status, a.body) for a in answers] == [(200, "ok\n"), (200, "ok\n")]


async def test_a_worker_without_its_listener_is_alive_but_not_ready(
    outbox: Outbox, db: psycopg.Connection, dsn: str
) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    with psycopg.connect(dsn, dbname="postgres", autocommit=True) as admin, reports() as log:
        async with running(worker):
            await until(lambda: worker.status().is_started)
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'.encode())
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
                " AND application_name LIKE 'pgoutbox %%'",
                [name],
            )
            await log.wait_for(LogEvent.LISTENER_LOST)
            await log.wait_for(LogEvent.DATABASE_LOST)
            ready = await ask(port_of(worker), "/readyz")
            live = await ask(port_of(worker), "/livez")
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'.encode())
            await log.wait_for(LogEvent.LISTENER_BACK)
            await log.wait_for(LogEvent.DATABASE_BACK)
            again = await ask(port_of(worker), "/readyz")
    assert (ready.status, ready.body) == (503, "the database does not answer\nthe listener is not connected\n")
    assert (live.status, again.status) == (200, 200)


async def test_a_worker_that_waits_for_its_database_is_alive_but_not_ready() -> None:
    secret = "host=127.0.0.1 port=1 user=canary-user dbname=canary-db password=canary-password"
    outbox = Outbox(settings_for(secret, metrics_address="127.0.0.1:0"))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    with reports() as log:
        async with running(worker):
            await log.wait_for(LogEvent.DATABASE_LOST)
            live = await ask(port_of(worker), "/livez")
            ready = await ask(port_of(worker), "/readyz")
            metrics = await ask(port_of(worker), "/metrics")
    assert live.status == 200
    assert (ready.status, ready.body) == (503, "the worker has not started: it has not reached the database yet\n")
    assert "pgoutbox_backlog_up 0.0" in metrics.body
    assert "pgoutbox_database_up 0.0" in metrics.body
    assert "canary" not in ready.body + metrics.body


async def test_a_stopping_worker_is_not_ready(outbox: Outbox, db: psycopg.Connection) -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        has_begun.set()
        await may_end.wait()

    enqueue(db)
    worker = Worker(outbox)
    async with running(worker):
        await has_begun.wait()
        worker.stop()
        answer = await ask(port_of(worker), "/readyz")
        may_end.set()
    assert (answer.status, answer.body) == (503, "the worker is stopping\n")


# --- HTTP -------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(outbox: Outbox) -> AsyncIterator[int]:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: worker.status().is_started)
        yield port_of(worker)


async def test_only_get_and_head_are_answered(outbox: Outbox) -> None:
    async with served(outbox) as port:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            answer = await ask(port, "/livez", method=method)
            assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
        head = await ask(port, "/livez", method="HEAD")
        assert (head.status, head.headers["content-length"], head.body) == (200, "3", "")
        assert (await ask(port, "/")).status == 404
        assert (await ask(port, "/metrics?name=x")).status == 200


async def test_an_invalid_request_is_refused_and_does_no_harm(outbox: Outbox) -> None:
    async with served(outbox) as port:
        for request in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET\r\n\r\n"):
            assert (await exchange(port, request)).startswith(b"HTTP/1.1 400 ")
        endless = await exchange(port, b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000)
        assert endless == b"" or endless.startswith(b"HTTP/1.1 431 ")
        assert (await ask(port, "/livez")).status == 200


async def test_a_probe_is_answered_while_hundreds_of_requests_never_end(outbox: Outbox) -> None:
    async with served(outbox) as port, asyncio.timeout(PROCESS_PATIENCE_SECONDS):
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        for _, writer in slow:
            writer.write(b"GET /livez HTTP/1.1\r\n")
        assert (await ask(port, "/livez")).status == 200
        assert await slow[0][0].read() == b"", "the oldest request was not closed"
        for _, writer in slow:
            writer.close()


async def test_a_slow_client_is_disconnected_at_its_deadline(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgoutbox.observability.http_server._DEADLINE_SECONDS", 0.5)
    async with served(outbox) as port, asyncio.timeout(PROCESS_PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\n")
        assert await reader.read() == b""
        writer.close()
