"""Tests the alert rules fault by fault: scrapes of a real worker before and during the fault, judged by promtool."""

from __future__ import annotations

import asyncio
import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, LiteralString

import psycopg
import pytest
import yaml
from pydantic import BaseModel

from pgoutbox import Context, Message, Outbox, Permanent, RetryPolicy, SyncContext, Topic
from pgoutbox.database import sql
from pgoutbox.database.store import Store
from pgoutbox.message import State
from pgoutbox.observability.events import LogEvent
from pgoutbox.observability.measures import SERVED, WAIT_SECONDS
from pgoutbox.worker import Worker
from pgoutbox.worker.beside.maintenance import Maintenance
from pgoutbox.worker.multi_worker import MultiWorker
from tests.support.http_client import ask
from tests.support.messages import put
from tests.support.outbox_actions import enqueue, lapse, reports, running, settings_for
from tests.support.partitions import drop_partitions
from tests.support.prometheus import Scrapes, port_of, promtool
from tests.support.waiting import turn, until

if TYPE_CHECKING:
    from tests.conftest import Connect

pytestmark = pytest.mark.slow

RULES: Final = Path(__file__).parents[2] / "examples" / "deploy" / "alerts.yaml"
WATCHDOG: Final = {"PgoutboxWatchdog": "none"}
KEPT_MINUTES: Final = 10
"""`keep_firing_for` of the alerts whose gauges end with the workers."""


@pytest.fixture
def scrapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scrapes:
    monkeypatch.setattr("pgoutbox.observability.backlog._SHARE", 1)  # Readings are cached for 0.1 s.
    return Scrapes(tmp_path, RULES)


def outbox_at(dsn: str, **settings: object) -> Outbox:
    """Build an outbox whose workers serve metrics on any free port, and query the database at each scrape."""
    return Outbox(settings_for(dsn, metrics_address="127.0.0.1:0", metrics_cache_seconds=0.1, **settings))


@pytest.fixture
def outbox(dsn: str) -> Outbox:
    return outbox_at(dsn)


@pytest.fixture
def worker(outbox: Outbox) -> Worker:
    """Build a worker of the queue `default` whose handler succeeds."""

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    return Worker(outbox)


async def started(worker: Worker) -> None:
    await until(lambda: worker.status().is_started)


async def reported(worker: Worker, event: LogEvent, count: int) -> None:
    await until(lambda: worker.telemetry.counts[event] == count)


def age(db: psycopg.Connection, message_id: int, column: str, interval: str) -> None:
    """Move a time of a message into the past, instead of waiting."""
    db.execute(
        f"UPDATE pgoutbox.message SET {column} = now() - %s::interval WHERE id = %s".encode(), [interval, message_id]
    )


def open_breakers(db: psycopg.Connection, *keys: str) -> None:
    for key in keys:
        db.execute(
            "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
            " VALUES (%s, now() + interval '1 h', 30, 'w', 'refused')",
            [key],
        )


# --- the rules --------------------------------------------------------------------------------------------------------


def rules() -> dict[str, str]:
    """Return the expression of each alert."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def test_prometheus_accepts_the_rules() -> None:
    promtool("check", "rules", RULES)


def test_each_alert_has_a_test_in_which_it_fires() -> None:
    expected = re.findall(r'"(Pgoutbox\w+)": "(?:page|ticket|none)"', Path(__file__).read_text())
    assert set(expected) == rules().keys()


# --- no fault ---------------------------------------------------------------------------------------------------------


async def test_half_an_hour_of_deliveries_raises_no_alert_but_the_watchdog(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    put(db, State.FAILED, age=timedelta(hours=2))
    async with running(worker):
        for round_number in range(1, 7):
            enqueue(db)
            await reported(worker, LogEvent.SENT, round_number)
            await scrapes.take(worker, minutes=5)
    scrapes.assert_firing(WATCHDOG)


async def test_each_metric_of_a_rule_is_served_by_a_worker(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    enqueue(db, payload="x")
    put(db, State.FAILED)
    put(db, State.SENDING)
    open_breakers(db, "smtp:mail.example.org:25")
    db.execute("INSERT INTO pgoutbox.maintenance_run (due_at, began_at, worker) VALUES (now(), now(), 'w')")
    async with running(worker):
        measures = worker.telemetry.measures
        assert measures is not None
        await until(lambda: measures.distributions(WAIT_SECONDS))
        await scrapes.take(worker, minutes=1)
    read = {name for expression in rules().values() for name in re.findall(r"\b(?:pgoutbox_\w+|up)\b", expression)}
    # Only a worker of many databases serves the last one: see its alert.
    assert read <= scrapes.names() | {SERVED.series}


# --- messages ---------------------------------------------------------------------------------------------------------


async def test_the_first_permanent_failure_of_a_new_worker_is_a_ticket(
    outbox: Outbox, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        raise Permanent("refused")

    worker = Worker(outbox)
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=5)
        enqueue(db)
        await until(lambda: worker.telemetry.counts[LogEvent.FAILED])
        await scrapes.take(worker, minutes=5)
    scrapes.assert_firing({"PgoutboxMessagesFailed": "ticket"} | WATCHDOG)


async def test_a_failure_is_told_even_if_its_worker_died_before_the_next_scrape(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    put(db, State.FAILED)
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=2)
        scrapes.assert_firing({"PgoutboxMessagesFailed": "ticket"} | WATCHDOG)
        db.execute("UPDATE pgoutbox.message_failed SET finished_at = now() - interval '61 min'")
        await scrapes.take(worker, minutes=KEPT_MINUTES + 1)
    scrapes.assert_firing(WATCHDOG)


async def test_a_hundred_failed_messages_are_a_ticket_until_someone_decides(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    for _ in range(101):
        put(db, State.FAILED, age=timedelta(hours=2))
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=62)
    scrapes.assert_firing({"PgoutboxFailedMessagesPileUp": "ticket"} | WATCHDOG)


async def test_a_handler_that_fails_each_attempt_is_a_ticket(
    outbox: Outbox, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    @outbox.handler("greet", retry=RetryPolicy.steps(3600, jitter=0))
    async def greet(message: Message, ctx: Context) -> None:
        raise ValueError

    worker = Worker(outbox)
    async with running(worker):
        for round_number in range(1, 8):
            enqueue(db)
            await reported(worker, LogEvent.RETRY, round_number)
            await scrapes.take(worker, minutes=5)
    scrapes.assert_firing({"PgoutboxRetriesDominate": "ticket"} | WATCHDOG)


async def test_messages_that_start_late_are_a_ticket(worker: Worker, db: psycopg.Connection, scrapes: Scrapes) -> None:
    async with running(worker):
        await started(worker)
        for round_number in range(1, 8):
            with db.transaction():
                age(db, enqueue(db), "available_at", "10 min")
            await reported(worker, LogEvent.SENT, round_number)
            await scrapes.take(worker, minutes=5)
    scrapes.assert_firing({"PgoutboxSlowStart": "ticket"} | WATCHDOG)


async def test_messages_that_no_worker_claims_are_a_page(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    """Their queue has no worker, or their topic no handler."""
    async with running(worker):
        await started(worker)
        age(db, enqueue(db, queue="bulk"), "available_at", "2 h")
        await scrapes.take(worker, minutes=7)
    scrapes.assert_firing({"PgoutboxDueMessagesWait": "page"} | WATCHDOG)


async def test_messages_behind_a_halted_ordering_key_are_a_page(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    failed = put(db, State.FAILED, topic="greet", ordering_key="k", age=timedelta(hours=2))
    db.execute("UPDATE pgoutbox.message SET halts_key = true WHERE id = %s", [failed])
    with db.transaction():
        age(db, enqueue(db, ordering_key="k"), "available_at", "10 min")
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=7)
    scrapes.assert_firing({"PgoutboxDueMessagesWait": "page"} | WATCHDOG)


async def test_a_backlog_too_large_to_count_is_still_a_page(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "COUNT_BACKLOG", "SELECT pg_sleep(600)")
    age(db, enqueue(db, queue="bulk"), "available_at", "10 min")
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=7)
    assert "pgoutbox_messages" not in scrapes.names()
    scrapes.assert_firing({"PgoutboxDueMessagesWait": "page"} | WATCHDOG)


@pytest.mark.parametrize(
    "pause",
    [
        "INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('default', now())",
        "SELECT pgoutbox.pause_topic('greet')",
    ],
    ids=["queue", "topic"],
)
async def test_a_forgotten_pause_is_a_ticket_and_no_page(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes, pause: LiteralString
) -> None:
    db.execute(pause)
    waiting = enqueue(db)
    async with running(worker):
        await started(worker)
        age(db, waiting, "available_at", "50 min")
        await scrapes.take(worker, minutes=7)
        scrapes.assert_firing(WATCHDOG)
        age(db, waiting, "available_at", "70 min")
        await scrapes.take(worker, minutes=2)
    scrapes.assert_firing({"PgoutboxPausedQueueWaits": "ticket"} | WATCHDOG)


async def test_a_message_that_is_postponed_for_more_than_a_day_is_a_ticket(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    enqueue(db)
    later = "available_at = now() + interval '1 h'"
    db.execute(f"UPDATE pgoutbox.message SET {later}, attempt_count = 1, lane = 1".encode())
    enqueue(db)
    db.execute(f"UPDATE pgoutbox.message SET {later}, created_at = now() - interval '9 days' WHERE lane = 0".encode())
    history = '[{"started_at": "2026-01-01T00:00:00Z"}]'
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=70)
        scrapes.assert_firing(WATCHDOG)
        db.execute("UPDATE pgoutbox.message SET attempts = %s WHERE lane = 1", [history])
        await scrapes.take(worker, minutes=70)
    scrapes.assert_firing({"PgoutboxMessagesUndelivered": "ticket"} | WATCHDOG)


async def test_a_hung_handler_is_a_ticket(outbox: Outbox, db: psycopg.Connection, scrapes: Scrapes) -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        has_begun.set()
        await may_end.wait()

    hung = enqueue(db)
    worker = Worker(outbox)
    async with running(worker):
        await has_begun.wait()
        await scrapes.take(worker, minutes=2)
        scrapes.assert_firing(WATCHDOG)
        # Both rows name the time: the message belongs to the claim.
        db.execute("UPDATE pgoutbox.claim SET claimed_at = claimed_at - interval '16 min'")
        db.execute("UPDATE pgoutbox.message SET claimed_at = claimed_at - interval '16 min' WHERE id = %s", [hung])
        await scrapes.take(worker, minutes=2)
        may_end.set()
    scrapes.assert_firing({"PgoutboxAttemptHangs": "ticket"} | WATCHDOG)


async def test_a_thread_that_outlives_its_timeout_is_a_ticket(
    dsn: str, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    outbox = outbox_at(dsn, lease_seconds=1)
    may_end = threading.Event()

    @outbox.handler("greet", timeout=1, retry=RetryPolicy.steps(3600))
    def greet(message: Message, ctx: SyncContext) -> None:
        may_end.wait(30)

    enqueue(db)
    worker = Worker(outbox)
    async with running(worker):
        try:
            await until(lambda: worker.telemetry.counts[LogEvent.ATTEMPT_ABANDONED])
            await scrapes.take(worker, minutes=17)
        finally:
            may_end.set()
    scrapes.assert_firing({"PgoutboxHandlersAbandoned": "ticket"} | WATCHDOG)


async def test_payloads_that_no_worker_can_read_are_a_ticket_before_they_fail(
    outbox: Outbox, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    class Greeting(BaseModel):
        name: str

    @outbox.handler(Topic("greet", payload=Greeting))
    async def greet(message: Message[Greeting], ctx: Context) -> None: ...

    worker = Worker(outbox)
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=5)
        enqueue(db)
        await reported(worker, LogEvent.PAYLOAD_UNREADABLE, 1)
        await scrapes.take(worker, minutes=12)
    scrapes.assert_firing({"PgoutboxPayloadsUnreadable": "ticket"} | WATCHDOG)


async def test_attempts_that_died_with_their_process_are_a_ticket(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=5)
        lapse(db, put(db, State.SENDING, topic="greet"))
        enqueue(db)
        await until(lambda: worker.telemetry.counts[LogEvent.LEASE_EXPIRED])
        await scrapes.take(worker, minutes=2)
    scrapes.assert_firing({"PgoutboxAttemptsLost": "ticket"} | WATCHDOG)


async def test_a_lost_lease_is_a_ticket(outbox: Outbox, db: psycopg.Connection, scrapes: Scrapes) -> None:
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
            await scrapes.take(worker, minutes=5)
            db.execute(
                "UPDATE pgoutbox.message SET attempt_count = attempt_count + 1, lane = 1 WHERE id = %s", [message_id]
            )
            may_end.set()
            await log.wait_for(LogEvent.LEASE_LOST)
            await scrapes.take(worker, minutes=2)
    scrapes.assert_firing({"PgoutboxLeasesLost": "ticket"} | WATCHDOG)


async def test_outcomes_that_the_database_refuses_are_a_page(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    db.execute("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''full''; END'")
    db.execute("CREATE TRIGGER refuse BEFORE INSERT ON pgoutbox.message_done FOR EACH ROW EXECUTE FUNCTION refuse()")
    enqueue(db)
    async with running(worker):
        await until(lambda: worker.status().outcomes_refused == 1)
        await scrapes.take(worker, minutes=7)
        db.execute("DROP FUNCTION refuse CASCADE")
        await until(lambda: worker.status().outcomes_refused == 0)
    scrapes.assert_firing({"PgoutboxOutcomesRefused": "page"} | WATCHDOG)


# --- receivers --------------------------------------------------------------------------------------------------------

SHOPS: Final = [f"https:shop{number}.example.org:443" for number in range(6)]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (SHOPS[:1], {"PgoutboxReceiverDown": "ticket"}),
        (["apprise:ops"], {"PgoutboxReceiverDown": "ticket"}),
        (SHOPS, {"PgoutboxReceiverDown": "ticket", "PgoutboxTransportDown": "page"}),
        (["smtp:mail.example.org:587"], {"PgoutboxTransportDown": "page"}),
        (["kafka"], {"PgoutboxTransportDown": "page"}),
    ],
    ids=["one web host", "one notification service", "six web hosts", "the mail server", "a broker"],
)
async def test_one_receiver_of_many_is_a_ticket_and_a_transport_is_a_page(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes, keys: list[str], told: dict[str, str]
) -> None:
    async with running(worker):
        await started(worker)
        open_breakers(db, *keys)
        # A probe is due at one of them.
        db.execute("UPDATE pgoutbox.breaker SET retry_at = now() WHERE key = %s", keys[:1])
        await scrapes.take(worker, minutes=12)
    scrapes.assert_firing(told | WATCHDOG)


async def test_a_redirect_that_was_left_on_is_a_ticket(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    db.execute("SELECT pgoutbox.set_redirect('testers@example.org')")
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=62)
    scrapes.assert_firing({"PgoutboxRedirectOn": "ticket"} | WATCHDOG)


async def test_a_worker_that_holds_everything_in_a_copy_is_a_page(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    db.execute("UPDATE pgoutbox.home SET server_id = 1, database_id = 1")
    async with running(worker):
        await until(lambda: worker.status().is_copy)
        await scrapes.take(worker, minutes=7)
    # It has not started, so it counts as no worker too, and its database as down.
    others = {"PgoutboxDatabaseDown": "page", "PgoutboxNoWorker": "page"}
    scrapes.assert_firing({"PgoutboxHeldInCopy": "page"} | others | WATCHDOG)


# --- workers and the database -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["pgoutbox", "kubernetes-pods"])
async def test_one_of_two_workers_that_is_gone_is_a_ticket(
    outbox: Outbox, worker: Worker, db: psycopg.Connection, scrapes: Scrapes, job: str
) -> None:
    scrapes.job = job
    other = Worker(outbox)
    async with running(worker):
        async with running(other):
            await started(worker)
            await started(other)
            await scrapes.take(worker, other, minutes=5)
            scrapes.assert_firing(WATCHDOG)
        await scrapes.take(worker, None, minutes=7)
    scrapes.assert_firing({"PgoutboxWorkerDown": "ticket"} | WATCHDOG)


async def test_all_workers_that_are_gone_are_a_page(worker: Worker, db: psycopg.Connection, scrapes: Scrapes) -> None:
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=5)
    await scrapes.take(None, minutes=7)
    scrapes.assert_firing({"PgoutboxNoWorker": "page", "PgoutboxWorkerDown": "ticket"} | WATCHDOG)


async def test_no_alert_about_messages_is_resolved_before_the_page_about_their_dead_workers(
    worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    age(db, enqueue(db, queue="bulk"), "available_at", "2 h")
    put(db, State.FAILED)
    open_breakers(db, "smtp:mail.example.org:587")
    about_messages = {
        "PgoutboxDueMessagesWait": "page",
        "PgoutboxMessagesFailed": "ticket",
        "PgoutboxTransportDown": "page",
    }
    about_workers = {"PgoutboxNoWorker": "page", "PgoutboxWorkerDown": "ticket"}
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=12)
    scrapes.assert_firing(about_messages | WATCHDOG)
    for _ in range(5):
        await scrapes.take(None, minutes=1)
        scrapes.assert_firing(about_messages | WATCHDOG)
    await scrapes.take(None, minutes=1)
    scrapes.assert_firing(about_messages | about_workers | WATCHDOG)
    await scrapes.take(None, minutes=KEPT_MINUTES)
    scrapes.assert_firing(about_workers | WATCHDOG)


async def test_a_database_that_is_down_is_one_page(
    worker: Worker, db: psycopg.Connection, dsn: str, scrapes: Scrapes
) -> None:
    name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    with psycopg.connect(dsn, dbname="postgres", autocommit=True) as admin, reports() as log:
        async with running(worker):
            await started(worker)
            await scrapes.take(worker, minutes=5)
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'.encode())
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            await log.wait_for(LogEvent.DATABASE_LOST)
            await log.wait_for(LogEvent.LISTENER_LOST)
            await scrapes.take(worker, minutes=7)
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'.encode())
    scrapes.assert_firing({"PgoutboxDatabaseDown": "page", "PgoutboxListenerDown": "ticket"} | WATCHDOG)


async def test_a_database_of_many_that_is_not_served_is_a_page_that_names_it(
    dsn: str, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    dsns = f"good {dsn}\ndead host=127.0.0.1 port=9 dbname=none"
    settings = settings_for(dsn, dsns=dsns, metrics_address="127.0.0.1:0", metrics_cache_seconds=0.1)
    outbox = Outbox(settings.model_copy(update={"dsn": None}))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = MultiWorker(outbox)
    async with running(worker):
        await until(lambda: worker.status().is_started)
        await until(lambda: any(one.failure for one in worker.status().databases.values()))
        # The first scrapes begin the reading of the gauges, and do not wait for it.
        while 'pgoutbox_backlog_up{database="good"} 1' not in (await ask(port_of(worker), "/metrics")).body:
            await turn(1)
        await scrapes.take(worker, minutes=7)
    scrapes.assert_firing({"PgoutboxDatabaseNotServed": "page"} | WATCHDOG)


async def test_gauges_that_are_missing_are_a_page(
    worker: Worker, db: psycopg.Connection, connect: Connect, scrapes: Scrapes
) -> None:
    blocker = connect()
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=5)
        await asyncio.to_thread(blocker.execute, "LOCK TABLE pgoutbox.message IN ACCESS EXCLUSIVE MODE")
        await scrapes.take(worker, minutes=7)
        blocker.rollback()
        await until(lambda: worker.status().is_database_up)
    scrapes.assert_firing({"PgoutboxGaugesMissing": "page"} | WATCHDOG)


async def test_workers_that_all_omit_the_gauges_are_a_page(dsn: str, db: psycopg.Connection, scrapes: Scrapes) -> None:
    outbox = outbox_at(dsn, metrics_backlog=False)

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    async with running(worker):
        await started(worker)
        await scrapes.take(worker, minutes=7)
    scrapes.assert_firing({"PgoutboxGaugesMissing": "page"} | WATCHDOG)


async def test_maintenance_that_fails_is_a_ticket_until_a_turn_succeeds(
    dsn: str, worker: Worker, db: psycopg.Connection, scrapes: Scrapes
) -> None:
    settings = settings_for(dsn, maintenance_interval_seconds=300)
    store = Store(settings, worker="w")
    maintenance = Maintenance(settings, store, worker.telemetry)
    drop_partitions(db)
    db.execute("ALTER FUNCTION pgoutbox.make_partition RENAME TO elsewhere")
    async with running(worker):
        await started(worker)
        assert await maintenance.turn()
        assert worker.telemetry.counts[LogEvent.MAINTENANCE_FAILED] == 1
        db.execute(
            "UPDATE pgoutbox.maintenance_run"
            " SET succeeded_at = succeeded_at - interval '3 h', due_at = now() - interval '1 s'"
        )
        await scrapes.take(worker, minutes=2)
        scrapes.assert_firing({"PgoutboxMaintenanceFails": "ticket"} | WATCHDOG)
        db.execute("ALTER FUNCTION pgoutbox.elsewhere RENAME TO make_partition")
        assert await maintenance.turn()
        await scrapes.take(worker, minutes=KEPT_MINUTES + 1)
    await store.close()
    scrapes.assert_firing(WATCHDOG)
