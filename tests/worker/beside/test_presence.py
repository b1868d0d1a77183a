"""Tests that workers report their queues and topics, and warn about messages that no worker claims.

The workers are real, and the messages are aged. The first look at messages comes some seconds after the start of a
worker; these tests set that time to zero, and the interval between two looks to some milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import pgoutbox.worker.beside.presence
from pgoutbox import Context, Message, Outbox, Sent, Topic, __version__
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker import Worker
from pgoutbox.worker.beside.presence import Presence
from tests.support.held import Held
from tests.support.outbox_actions import enqueue, row_of, running, settings_for, state_of
from tests.support.waiting import until
from tests.support.worker_sql import run_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import psycopg


HOUR = 3600.0
LATE = "UPDATE pgoutbox.message SET available_at = now() - interval '2 minutes' WHERE state = 'pending'"


def outbox_for(dsn: str, *, topics: tuple[str, ...] = ("greet",), queues: tuple[str, ...] = (), **given: int) -> Outbox:
    """Build an outbox with handlers for these topics, and with a topic in each of these queues."""
    outbox = Outbox(settings_for(dsn, **given))
    for queue in queues:
        outbox.define(Topic(f"of.{queue}", queue=queue))
    for topic in topics:

        @outbox.handler(topic)
        async def deliver(message: Message, ctx: Context) -> None:
            pass

    return outbox


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgoutbox.worker.beside.presence, "_FIRST_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(pgoutbox.worker.beside.presence, "_INTERVAL_SECONDS", 0.02)


class Reporter:
    """The presence of one worker, without the rest of it. `now` is its clock."""

    def __init__(self, dsn: str, name: str, queues: tuple[str, ...], defined: tuple[str, ...] = ()) -> None:
        self.now = 0.0
        state = run_state(settings_for(dsn), name=name, queues=queues)
        self.store = state.store
        self.telemetry = state.telemetry
        self.presence = Presence(state, defined=defined, clock=lambda: self.now)

    async def warnings(self, *, after: float = 0.0) -> int:
        """Return how many warnings the next report logs."""
        self.now += after
        counts = self.telemetry.counts
        before = counts[LogEvent.MESSAGES_UNCLAIMED] + counts[LogEvent.BREAKER_STILL_OPEN]
        await self.presence.report()
        return counts[LogEvent.MESSAGES_UNCLAIMED] + counts[LogEvent.BREAKER_STILL_OPEN] - before


@pytest.fixture
async def reporter(dsn: str) -> AsyncIterator[Callable[..., Reporter]]:
    made: list[Reporter] = []

    def make(name: str = "a", queues: tuple[str, ...] = ("default",), defined: tuple[str, ...] = ()) -> Reporter:
        made.append(Reporter(dsn, name, queues, defined))
        return made[-1]

    yield make
    for one in made:
        await one.store.close()


def names(db: psycopg.Connection) -> list[str]:
    return [name for (name,) in db.execute("SELECT name FROM pgoutbox.worker_view ORDER BY name").fetchall()]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[tuple[str, list[str], str]]:
    """Return queue, topics and text of the warnings about unclaimed messages."""
    return [
        (vars(record)["queue"], vars(record)["topics"], record.message.partition(" event=")[0])
        for record in caplog.records
        if getattr(record, "event", "") == LogEvent.MESSAGES_UNCLAIMED
    ]


# --- the report -------------------------------------------------------------------------------------------------------


async def test_an_idle_worker_reports_its_queues_and_topics_until_it_stops(dsn: str, db: psycopg.Connection) -> None:
    worker = Worker(outbox_for(dsn, topics=("greet", "bye")), queues=["critical", "bulk"])
    query = "SELECT name, queues, topics, started_at = seen_at FROM pgoutbox.worker_view"
    async with running(worker):
        await until(lambda: names(db))
        assert db.execute(query).fetchall() == [(worker.name, ["critical", "bulk"], ["bye", "greet"], True)]
    assert names(db) == []


async def test_starts_and_stops_can_be_read_for_two_weeks(
    dsn: str, db: psycopg.Connection, reporter: Callable[..., Reporter]
) -> None:
    stopped = Worker(outbox_for(dsn))
    events = "SELECT name, event, version FROM pgoutbox.worker_event_view ORDER BY name, at"
    async with running(stopped):
        await until(lambda: names(db))
        assert db.execute(events).fetchall() == [(stopped.name, "started", __version__)]
    await reporter("killed").warnings()
    await reporter("old").warnings()
    db.execute("UPDATE pgoutbox.worker SET seen_at = now() - interval '4 minutes'")
    db.execute("UPDATE pgoutbox.worker SET seen_at = now() - interval '15 days' WHERE name = 'old'")
    await reporter("other").warnings()
    expected = {(stopped.name, "started"), (stopped.name, "stopped"), ("killed", "started"), ("killed", "lost")}
    assert {row[:2] for row in db.execute(events)} == {*expected, ("other", "started")}
    assert names(db) == ["other"]


async def test_of_many_stopped_workers_the_newest_can_be_read(
    db: psycopg.Connection, reporter: Callable[..., Reporter]
) -> None:
    db.execute(
        "INSERT INTO pgoutbox.worker (name, queues, topics, seen_at, stopped_at)"
        " SELECT 'w' || n, '{}', '{}', now() - n * interval '0.1 s', now() FROM generate_series(1, 1050) AS n"
    )
    db.execute(  # All run.
        "INSERT INTO pgoutbox.worker (name, queues, topics, seen_at)"
        " SELECT 'r' || n, '{}', '{}', now() - interval '2 min' FROM generate_series(1, 10) AS n"
    )
    await reporter("other").warnings()
    assert len(names(db)) == 11
    stopped = db.execute("SELECT count(*), max(substr(name, 2)::integer) FROM pgoutbox.worker WHERE name LIKE 'w%'")
    assert stopped.fetchone() == (1000, 1000)


@pytest.mark.slow
async def test_a_worker_and_the_last_run_report_their_version_and_slots(dsn: str, db: psycopg.Connection) -> None:
    query = "SELECT version, slots, ended_at IS NOT NULL FROM pgoutbox.worker_view"
    async with running(Worker(outbox_for(dsn, concurrency=7))):
        await until(lambda: names(db))
        assert db.execute(query).fetchall() == [(__version__, 7, False)]
    await Worker(outbox_for(dsn, concurrency=8)).run_once()
    await Worker(outbox_for(dsn, concurrency=9)).run_once()
    assert db.execute(query).fetchall() == [(__version__, 9, True)]


async def test_the_last_run_is_not_deleted_and_serves_nothing(
    dsn: str, db: psycopg.Connection, reporter: Callable[..., Reporter]
) -> None:
    run = Worker(outbox_for(dsn), queues=["bulk"])
    await run.run_once()
    enqueue(db, queue="bulk")
    db.execute(LATE)
    a = reporter("a", ("critical",), defined=("bulk",))
    assert await a.warnings() == 1
    db.execute("UPDATE pgoutbox.worker SET seen_at = now() - interval '3 days' WHERE ended_at IS NOT NULL")
    await a.warnings()
    assert sorted(names(db)) == sorted(["a", run.name])


async def test_a_worker_that_was_suspended_reports_again(
    db: psycopg.Connection, reporter: Callable[..., Reporter]
) -> None:
    a, b = reporter("a"), reporter("b")
    await a.warnings()
    db.execute(
        "UPDATE pgoutbox.worker SET seen_at = now() - interval '1 hour', started_at = now() - interval '2 hours'"
    )
    await a.warnings()
    await b.warnings()
    rows = db.execute("SELECT name, now() - started_at > interval '1 hour' FROM pgoutbox.worker_view ORDER BY 1")
    assert rows.fetchall() == [("a", True), ("b", False)]


@pytest.mark.usefixtures("at_once")
async def test_a_worker_reports_until_its_handlers_have_ended(dsn: str, db: psycopg.Connection) -> None:
    held = Held(dsn)
    message_id = enqueue(db)
    async with running(held.worker):
        await held.until_begun(message_id)
        held.worker.stop()
        await until(lambda: held.worker.status().is_listener_up is False)  # It no longer claims.
        db.execute("UPDATE pgoutbox.worker SET seen_at = now() - interval '1 hour'")
        await until(lambda: names(db))
        held.end(message_id, Sent())
    assert names(db) == []


@pytest.mark.usefixtures("at_once")
async def test_a_failed_report_is_logged_once_and_the_worker_continues(
    dsn: str, db: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    db.execute("ALTER TABLE pgoutbox.worker RENAME TO elsewhere")
    worker = Worker(outbox_for(dsn))
    async with running(worker):
        await until(lambda: worker.telemetry.counts[LogEvent.PRESENCE_UNKNOWN])
        message_id = enqueue(db)
        await until(lambda: state_of(db, message_id) == "sent")
        db.execute("ALTER TABLE pgoutbox.elsewhere RENAME TO worker")
        await until(lambda: names(db))
    assert worker.telemetry.counts[LogEvent.PRESENCE_UNKNOWN] == 1


# --- messages that no worker claims -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
async def test_a_worker_warns_about_a_queue_of_its_outbox_that_no_worker_serves(
    dsn: str, db: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = outbox_for(dsn, topics=("greet", "of.bulk"), queues=("bulk",))
    message_id = enqueue(db, "of.bulk", queue="bulk")
    enqueue(db, "of.other", queue="of-another-application")
    db.execute(LATE)
    async with running(Worker(outbox)):
        await until(lambda: warnings_in(caplog))
        assert warnings_in(caplog) == [("bulk", ["of.bulk"], "no worker serves the queue of due messages")]
        async with running(Worker(outbox, queues=["bulk"])):
            await until(lambda: state_of(db, message_id) == "sent")
    assert len(warnings_in(caplog)) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
async def test_a_worker_warns_about_topics_without_a_handler_in_its_queues(
    dsn: str, db: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    message_id = enqueue(db, "mail.lost")
    db.execute(LATE)
    async with running(Worker(outbox_for(dsn))):
        await until(lambda: warnings_in(caplog))
        assert warnings_in(caplog) == [("default", ["mail.lost"], "no worker has a handler for due messages")]
        async with running(Worker(outbox_for(dsn, topics=("mail.lost",)))):
            await until(lambda: state_of(db, message_id) == "sent")
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize(
    ("queues", "count"), [(("default", "bulk"), 0), (("default",), 1)], ids=["the same queue", "another queue"]
)
async def test_a_handler_of_another_worker_counts_only_in_the_queues_that_it_serves(
    db: psycopg.Connection, reporter: Callable[..., Reporter], queues: tuple[str, ...], count: int
) -> None:
    enqueue(db, queue="bulk")
    db.execute(LATE)
    await reporter("other", queues).warnings()
    assert await reporter("a", ("critical",), defined=("bulk",)).warnings() == count


@pytest.mark.parametrize(("topic", "version"), [("mail.lost", 1), ("greet", 2)])
@pytest.mark.parametrize("lane", ["fresh", "retries", "ordered"])
async def test_late_messages_of_every_lane_are_found_and_others_are_not(
    db: psycopg.Connection, reporter: Callable[..., Reporter], lane: str, topic: str, version: int
) -> None:
    enqueue(db, topic, payload_version=version, ordering_key="order-7" if lane == "ordered" else None)
    if lane == "retries":
        db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1")
    a = reporter()
    assert await a.warnings() == 0
    db.execute(LATE)
    assert await a.warnings() == 1


async def test_a_backlog_of_claimable_messages_is_no_warning(
    db: psycopg.Connection, reporter: Callable[..., Reporter]
) -> None:
    enqueue(db)
    db.execute(LATE)
    assert await reporter().warnings() == 0


async def test_the_first_report_does_not_judge_messages(
    db: psycopg.Connection, reporter: Callable[..., Reporter]
) -> None:
    enqueue(db, "mail.lost")
    db.execute(LATE)
    a = reporter()
    await a.presence.report(is_first=True)
    assert a.telemetry.counts[LogEvent.MESSAGES_UNCLAIMED] == 0


# --- open breakers ----------------------------------------------------------------------------------------------------


async def test_an_open_breaker_is_named_at_the_start_and_every_hour(
    dsn: str, db: psycopg.Connection, reporter: Callable[..., Reporter], caplog: pytest.LogCaptureFixture
) -> None:
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
        " VALUES ('smtp:mail:587', now() + interval '1 day', 1, 'w', 'RCPT ann@example.org: no')"
    )
    a = reporter()
    await a.presence.report(is_first=True)
    (record,) = caplog.records
    assert (record.levelname, vars(record)["breaker"]) == ("WARNING", "smtp:mail:587")
    assert "ann@" not in str(vars(record))
    assert [await a.warnings(after=seconds) for seconds in (60, HOUR, 60)] == [0, 1, 0]


# --- all queues -------------------------------------------------------------------------------------------------------


async def test_a_star_serves_the_default_and_all_defined_queues(dsn: str, db: psycopg.Connection) -> None:
    outbox = outbox_for(dsn, queues=("bulk", "critical"))
    ids = [enqueue(db, queue=queue) for queue in ("default", "bulk", "critical")]
    other = enqueue(db, queue="other")
    await Worker(outbox, queues=["*"]).run_once()
    assert {row_of(db, one).state for one in ids} == {"sent"}
    assert state_of(db, other) == "pending"
