"""Tests runs that cron starts, by `run_once` and `drain`: what a worker does periodically, each run does once."""

from __future__ import annotations

import asyncio
import gc
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.types.json import Jsonb

from pgoutbox import Context, Email, Message, Outbox, Permanent, RetryPolicy, Skip, Transient
from pgoutbox.database import sql
from pgoutbox.message import State
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker import Worker
from pgoutbox.worker.breakers.circuit_breakers import CircuitBreakers
from tests.support.line_server import Line, LineTransport, Mood, line_host
from tests.support.messages import put
from tests.support.outbox_actions import attempts_of, enqueue, make_due, reports, row_of, rows_of, running, settings_for
from tests.support.partitions import drop_partitions, partitions_of
from tests.support.smtp_server import accepting_server, mail_settings
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect


def mail_outbox(dsn: str, port: int) -> Outbox:
    """Return the outbox of a new process."""
    outbox = Outbox(settings_for(dsn, **mail_settings(port)))

    @outbox.handler("greet", retry=RetryPolicy.steps(60, jitter=0))
    async def greet(message: Message, ctx: Context) -> Email:
        return Email(subject="Hello", text="Hello")

    return outbox


def line_worker(dsn: str) -> Worker:
    """Return the worker of a new process."""
    outbox = Outbox(settings_for(dsn), transports=[LineTransport(timeout_seconds=60)])

    @outbox.handler("greet", retry=RetryPolicy.steps(60, jitter=0))
    async def greet(message: Message, ctx: Context) -> Line:
        return Line(str(message.id))

    return Worker(outbox)


def failures_of(db: psycopg.Connection) -> dict[str, object]:
    """Return the failures in a row that the last run hands on."""
    ((failures,),) = db.execute("SELECT failures FROM pgoutbox.worker").fetchall()
    return dict(failures)


def let_pass(db: psycopg.Connection, *message_ids: int) -> None:
    """Age breaker and messages, as if the next run began when they are due."""
    db.execute("UPDATE pgoutbox.breaker SET retry_at = now() - interval '1 second'")
    for message_id in message_ids:
        make_due(db, message_id)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 20])
async def test_ten_runs_with_a_dead_mail_server_use_up_no_attempts_and_later_runs_deliver_everything(
    dsn: str, db: psycopg.Connection, count: int
) -> None:
    async with accepting_server() as inbox:
        port = inbox.port
    ids = [enqueue(db, destination=f"mailto:{n}@example.org") for n in range(count)]
    for _ in range(10):
        await Worker(mail_outbox(dsn, port)).run_once()
        let_pass(db, *ids)
    ((opened_count,),) = db.execute("SELECT count(*) FROM pgoutbox.breaker").fetchall()
    assert opened_count == 1
    for row in rows_of(db, *ids):
        assert (row.state, row.max_attempts - row.attempt_count >= 11 - 4) == ("pending", True)
    async with accepting_server(port=port) as inbox:
        await Worker(mail_outbox(dsn, port)).run_once()
        assert {row.state for row in rows_of(db, *ids)} == {"sent"}
        assert len(inbox.received) == count
    assert db.execute("SELECT count(*) FROM pgoutbox.breaker").fetchall() == [(0,)]
    assert failures_of(db) == {}


@pytest.mark.slow
async def test_runs_continue_the_count_of_failures_until_a_success(dsn: str, db: psycopg.Connection) -> None:
    async with line_host(Mood.DROP) as host:
        message_id = enqueue(db, destination=host.destination)
        for expected in (1, 2, 3):
            await line_worker(dsn).run_once()
            assert failures_of(db) == {host.key: {"failures": expected}}
            make_due(db, message_id)
        host.mood = Mood.TAKE
        await line_worker(dsn).run_once()
        assert (row_of(db, message_id).state, failures_of(db)) == ("sent", {})


async def test_a_first_run_without_failures_records_none(dsn: str, db: psycopg.Connection) -> None:
    async with line_host(Mood.TAKE) as host:
        message_id = enqueue(db, destination=host.destination)
        await line_worker(dsn).run_once()
    assert (row_of(db, message_id).state, failures_of(db)) == ("sent", {})


@pytest.mark.slow
async def test_a_run_leaves_the_count_of_destinations_that_it_does_not_use(dsn: str, db: psycopg.Connection) -> None:
    async with line_host(Mood.DROP) as dead, line_host(Mood.TAKE) as good:
        enqueue(db, destination=dead.destination)
        await line_worker(dsn).run_once()
        sent = enqueue(db, destination=good.destination)
        await line_worker(dsn).run_once()
        assert (row_of(db, sent).state, failures_of(db)) == ("sent", {dead.key: {"failures": 1}})


async def test_a_run_that_is_cancelled_before_it_claims_leaves_no_work_unawaited(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python warns of a coroutine that is never awaited, and pytest makes that an error of this test."""
    reading = asyncio.Event()

    async def never_read(_: CircuitBreakers) -> None:
        reading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(CircuitBreakers, "inherit", never_read)
    run = asyncio.create_task(line_worker(dsn).run_once())
    await reading.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    del run
    gc.collect()


def test_destinations_that_are_never_used_again_do_not_pile_up(rolled_back: psycopg.Connection) -> None:
    """A destination keeps its count until a run uses it again."""
    for failures in ({f"smtp {number:090}": 1 for number in range(1_100)}, {"smtp": 2}):
        rolled_back.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w', '{}', '{}')")
        rolled_back.execute(sql.END_RUN, {"worker": "w", "failures": Jsonb(failures)})
        rolled_back.execute("UPDATE pgoutbox.worker SET name = 'last'")
    assert failures_of(rolled_back) == {"smtp": 2}


@pytest.mark.slow
async def test_each_failed_run_after_the_pause_doubles_it_even_if_runs_are_hours_apart(
    dsn: str, db: psycopg.Connection
) -> None:
    async with line_host(Mood.DROP) as host:
        message_id = enqueue(db, destination=host.destination)
        cooldowns = []
        for _ in range(8):
            await line_worker(dsn).run_once()
            cooldowns += [seconds for (seconds,) in db.execute("SELECT cooldown_seconds FROM pgoutbox.breaker")]
            db.execute("UPDATE pgoutbox.breaker SET retry_at = now() - interval '20 hours'")
            make_due(db, message_id)
    assert cooldowns == [30.0, 60.0, 120.0, 240.0]


@pytest.mark.slow
async def test_a_run_takes_the_due_turn_of_maintenance(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, maintenance_interval_seconds=300))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    put(db, State.SENT, age=timedelta(days=9))
    db.execute("INSERT INTO pgoutbox.retention VALUES ('5 days', '*', 'sent')")
    drop_partitions(db)
    await Worker(outbox).run_once()
    assert db.execute("SELECT count(*) FROM pgoutbox.message").fetchall() == [(0,)]
    assert partitions_of(db) != []
    ((began_at,),) = db.execute("SELECT began_at FROM pgoutbox.maintenance_run").fetchall()
    await Worker(outbox).drain()
    assert db.execute("SELECT began_at FROM pgoutbox.maintenance_run").fetchall() == [(began_at,)]


async def test_a_run_logs_one_line_with_its_counts(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        match message.payload:
            case "refused":
                raise Permanent("no")
            case "busy":
                raise Transient("busy")
            case "gone":
                raise Skip("gone")

    for payload in ("sent", "sent too", "refused", "busy", "gone"):
        enqueue(db, payload=payload)
    worker = Worker(outbox)
    for expected in (
        {"sent": 2, "failed": 1, "retry": 1, "skipped": 1, "cancelled": 0, "snoozed": 0, "released": 0},
        dict.fromkeys(("sent", "failed", "retry", "skipped", "cancelled", "snoozed", "released"), 0),
    ):
        with reports() as heard:
            await worker.run_once()
        (record,) = [record for record in heard.records if getattr(record, "event", None) == LogEvent.RUN_DONE]
        assert {name: getattr(record, name) for name in expected} == expected
        lifecycle = {
            e: r.levelname for e, r in zip(heard.events, heard.records, strict=True) if e.startswith("worker_")
        }
        assert lifecycle == {LogEvent.WORKER_STARTED: "DEBUG", LogEvent.WORKER_STOPPED: "DEBUG"}


async def test_a_run_records_its_end_and_the_time_since_the_last_one(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    first, second = Worker(outbox), Worker(outbox)
    await first.run_once()
    row = "SELECT name, queues, topics, run_interval_seconds FROM pgoutbox.worker"
    assert db.execute(row).fetchall() == [(first.name, ["default"], ["greet"], None)]
    db.execute("UPDATE pgoutbox.worker SET ended_at = ended_at - interval '1 hour'")
    await second.drain()
    ((name, *_, seconds),) = db.execute(row).fetchall()
    assert (name, round(seconds / 3600)) == (second.name, 1)
    was_now = "SELECT abs(extract(epoch FROM now() - ended_at)) < 1800, run_interval_seconds FROM pgoutbox.worker"
    assert db.execute(was_now).fetchall() == [(True, seconds)]
    # The server's clock has been set back since the last run.
    db.execute("UPDATE pgoutbox.worker SET ended_at = ended_at + interval '1 hour'")
    await second.drain()
    assert db.execute(was_now).fetchall() == [(True, 0)]


async def test_a_worker_that_keeps_running_hands_no_failures_on(dsn: str, db: psycopg.Connection) -> None:
    async with line_host(Mood.DROP) as host:
        message_id = enqueue(db, destination=host.destination)
        worker = line_worker(dsn)
        async with running(worker):
            await until(lambda: len(attempts_of(db, message_id)) == 1)
    assert db.execute("SELECT failures FROM pgoutbox.worker").fetchall() == [({},)]


@pytest.mark.slow
async def test_overlapping_runs_and_a_running_worker_keep_their_rows_apart(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    inner: list[Worker] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        inner.append(Worker(outbox))
        await inner[-1].run_once()
        seen.append(rows())

    def rows() -> set[tuple[str, bool]]:
        return set(db.execute("SELECT name, ended_at IS NOT NULL FROM pgoutbox.worker_view").fetchall())

    seen: list[set[tuple[str, bool]]] = []
    enqueue(db)
    run = Worker(outbox)
    await run.run_once()
    assert seen == [{(run.name, False), (inner[0].name, True)}]
    assert rows() == {(run.name, True)}
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: len(rows()) == 2)
        assert rows() == {(run.name, True), (worker.name, False)}
    assert rows() == {(run.name, True)}


async def test_runs_that_end_at_the_same_time_do_not_wait_and_the_next_run_replaces_both(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    for name in ("last", "first", "second", "third"):
        db.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES (%s, '{}', '{}')", [name])
    end_run(db, "last", {"smtp:a": {"failures": 1}})
    first, second = connect(), connect()
    end_run(first, "first", {"smtp:b": {"failures": 2}})
    end_run(second, "second", {"smtp:c": {"failures": 3}})
    first.commit()
    second.commit()
    end_run(db, "third", {"smtp:a": None})
    ((name, failures, seconds),) = db.execute(
        "SELECT name, failures, run_interval_seconds FROM pgoutbox.worker"
    ).fetchall()
    assert (name, seconds is not None) == ("third", True)
    # One of the two failures is lost, because neither run has seen the other.
    assert failures in ({"smtp:b": {"failures": 2}}, {"smtp:c": {"failures": 3}})


def end_run(connection: psycopg.Connection, name: str, failures: object) -> None:
    assert connection.execute(sql.END_RUN, {"worker": name, "failures": Jsonb(failures)}).fetchall() == [(name,)]


async def test_the_lines_of_a_crontab_keep_their_rows_and_their_intervals(db: psycopg.Connection) -> None:
    for name, queues in (("a1", "{a}"), ("b1", "{b}"), ("a2", "{a}"), ("a-b", "{a,b,c}"), ("b2", "{b}")):
        db.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES (%s, %s, '{t}')", [name, queues])
        end_run(db, name, {name: 1})
        db.execute("UPDATE pgoutbox.worker SET ended_at = ended_at - interval '1 hour'")
        rows = db.execute(
            "SELECT name, round(run_interval_seconds / 3600)::integer FROM pgoutbox.worker ORDER BY ended_at DESC"
        ).fetchall()
        expected = {
            "a1": [("a1", None)],
            "b1": [("b1", None), ("a1", None)],
            "a2": [("a2", 2), ("b1", None)],
            "a-b": [("a-b", None)],  # It serves what the others serve.
            "b2": [("b2", None), ("a-b", None)],
        }
        assert rows == expected[name]
    # The newest one has the failures of all.
    (row,) = db.execute("SELECT failures FROM pgoutbox.worker WHERE name = 'b2'").fetchall()
    assert row[0].keys() == {"a1", "b1", "a2", "a-b", "b2"}


async def test_a_run_does_not_warn_about_open_breakers_and_unclaimed_messages(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
        " VALUES ('smtp:mail:587', now() + interval '1 day', 1, 'w', 'no')"
    )
    worker = Worker(outbox)
    await worker.run_once()
    assert worker.telemetry.counts[LogEvent.BREAKER_STILL_OPEN] == 0


# --- bounded runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "sent"), [(1, 1), (7, 7), (10, 10), (11, 10)])
async def test_a_run_claims_at_most_so_many_messages(dsn: str, db: psycopg.Connection, most: int, sent: int) -> None:
    outbox = Outbox(settings_for(dsn, batch_size=3))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    ids = [enqueue(db) for _ in range(10)]
    await Worker(outbox).run_once(max_messages=most)
    states = [row.state for row in rows_of(db, *ids)]
    assert (states.count("sent"), states.count("pending")) == (sent, 10 - sent)


async def test_a_bounded_run_waits_for_the_messages_that_it_has_claimed(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    may_end = asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        await may_end.wait()

    ids = [enqueue(db) for _ in range(3)]
    run = asyncio.create_task(Worker(outbox).run_once(max_messages=2))
    await until(lambda: [row.state for row in rows_of(db, *ids)].count("sending") == 2)
    assert not run.done()
    may_end.set()
    await run
    assert sorted(row.state for row in rows_of(db, *ids)) == ["pending", "sent", "sent"]


async def test_a_run_ends_after_its_seconds_although_messages_are_due(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1, batch_size=1))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        enqueue(db)  # Without a bound the run would never end.

    first = enqueue(db)
    while row_of(db, first).state == "pending":  # A slow machine needs longer to begin.
        await Worker(outbox).run_once(max_seconds=0.2)
    assert row_of(db, first).state == "sent"
    (pending,) = db.execute("SELECT count(*) FROM pgoutbox.message WHERE state = 'pending'").fetchone() or (0,)
    assert pending >= 1


@pytest.mark.slow
async def test_the_time_of_a_run_does_not_stop_the_next_run_of_its_worker(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1, batch_size=1))
    goes_on = True

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        if goes_on:
            enqueue(db)

    enqueue(db)
    worker = Worker(outbox)
    await worker.run_once(max_seconds=0.2)
    goes_on = False
    await worker.run_once()
    assert db.execute("SELECT DISTINCT state FROM pgoutbox.message").fetchall() == [("sent",)]


@pytest.mark.parametrize("bound", [{"max_messages": 0}, {"max_messages": -1}, {"max_seconds": 0.0}])
async def test_a_bound_that_is_not_positive_is_refused(dsn: str, bound: dict[str, Any]) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    with pytest.raises(ValueError, match="must be greater than 0"):
        await Worker(outbox).run_once(**bound)
