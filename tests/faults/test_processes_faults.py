"""Tests worker processes that are killed, poisoned, told to stop, hung and blocked: no message is lost, and no message
is handed over twice unless a crash made it unavoidable.

PGOUTBOX_TEST_ROUNDS sets how many processes are killed and stopped at random moments, and PGOUTBOX_TEST_SEED sets the
moments.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Outbox, PgOutboxError
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.message import Message
from pgoutbox.observability.events import LogEvent
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from pgoutbox.worker.supervisor import supervise
from tests.conftest import DURABLE
from tests.support.judge import violations
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    enqueue,
    lapse,
    row_of,
    rows_of,
    settings_for,
    state_of,
)
from tests.support.worker_process import is_asleep
from tests.support.worker_sql import claim

if TYPE_CHECKING:
    from tests.conftest import Connect
    from tests.support.fleet import Fleet
    from tests.support.worker_process import WorkerProcess

ROUNDS = int(os.environ.get("PGOUTBOX_TEST_ROUNDS", "6"))
AT_ONCE = RetryPolicy.steps(0, jitter=0)


@pytest.fixture
def choice() -> random.Random:
    """Return a source of random moments. The seed is shown when the test fails."""
    seed = int(os.environ.get("PGOUTBOX_TEST_SEED", random.randrange(2**32)))
    print(f"PGOUTBOX_TEST_SEED={seed}")  # noqa: T201 - shown when the test fails
    return random.Random(seed)


def is_drained(db: psycopg.Connection) -> bool:
    """Return whether no message is owed any more."""
    return db.execute("SELECT FROM pgoutbox.message_live LIMIT 1").fetchone() is None


def held_by(db: psycopg.Connection, process: WorkerProcess) -> set[int]:
    """Return the messages that this process has in flight."""
    rows = db.execute(
        "SELECT id FROM pgoutbox.message_live WHERE state = 'sending' AND split_part(worker, ':', 2) = %s",
        [str(process.pid)],
    )
    return {row[0] for row in rows}


# --- killed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dsn", [DURABLE], indirect=True)
def test_random_kills_lose_nothing_and_repeat_only_messages_in_flight(
    connect: Connect, db: psycopg.Connection, fleet: Fleet, choice: random.Random
) -> None:
    producer = connect()
    committed: set[int] = set()
    rolled_back: set[int] = set()
    in_flight: list[int] = []
    workers = [fleet.start(concurrency="4") for _ in range(2)]
    for _ in range(ROUNDS):
        for _ in range(6):
            batch = {enqueue(producer, "fault.slow") for _ in range(choice.randint(1, 10))}
            if choice.random() < 0.3:
                producer.rollback()
                rolled_back |= batch
            else:
                producer.commit()
                committed |= batch
        seen = len(fleet.hand_overs())
        moment = seen + choice.randint(0, max(len(committed) - seen - 1, 0))
        fleet.until(lambda moment=moment: len(fleet.hand_overs()) >= moment, "hand-overs")  # type: ignore[misc] # each round has its own moment
        victim = workers.pop(choice.randrange(2))
        victim.kill()
        victim.wait(PATIENCE_SECONDS)
        in_flight += held_by(db, victim)
        workers.append(fleet.start(concurrency="4"))
    fleet.until(lambda: is_drained(db), "everything sent")
    deliveries = fleet.deliveries()
    assert in_flight, "no kill hit a message in flight"
    assert {row.id for row in rows_of(db)} == committed
    assert {row.state for row in rows_of(db)} == {"sent"}
    assert deliveries.keys() == committed
    assert rolled_back.isdisjoint(deliveries)
    # Only messages in flight at a kill were handed over again, and the history has their lost attempts.
    repeated = {message_id for message_id, count in deliveries.items() if count > 1}
    assert all(deliveries[i] - 1 <= len(attempts_of(db, i)) for i in repeated)
    assert sum(deliveries.values()) - len(committed) <= len(in_flight), f"in flight at kills: {in_flight}"
    assert repeated <= set(in_flight)
    assert violations(db) == []


@pytest.mark.parametrize("dsn", [DURABLE], indirect=True)
def test_a_kill_during_the_finish_repeats_nothing(db: psycopg.Connection, fleet: Fleet) -> None:
    """The statement has reached the server, which commits it; the worker is gone and cannot read the answer."""
    db.execute(
        """
        CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_advisory_xact_lock_shared(4711);
            RETURN NEW;
        END
        $$;
        CREATE TRIGGER wait BEFORE UPDATE ON pgoutbox.message
        FOR EACH ROW WHEN (NEW.state = 'sent') EXECUTE FUNCTION wait();
        SELECT pg_advisory_lock(4711)
        """
    )

    def finishing() -> list[tuple[str | None]]:
        """Return what the finish waits for: the statement that skips locked rows, after one that fails in 20 ms."""
        return db.execute(
            "SELECT wait_event_type FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'pgoutbox %' "
            "AND query LIKE '%held AS MATERIALIZED%'"
        ).fetchall()

    message_id = enqueue(db, "fault.deliver")
    worker = fleet.start(lock_timeout_seconds="600")
    fleet.until(lambda: finishing() == [("Lock",)], "the finish waits in the server")
    worker.kill()
    worker.wait(PATIENCE_SECONDS)
    db.execute("SELECT pg_advisory_unlock(4711)")
    fleet.until_disconnected(db)  # The finish is one of several statements of its transaction.
    assert state_of(db, message_id) == "sent"
    lapse(db, message_id)
    assert fleet.start("--drain").wait(PATIENCE_SECONDS) == 0
    assert fleet.deliveries() == {message_id: 1}


def test_a_kill_before_the_commit_of_a_transactional_handler_repeats_nothing(
    db: psycopg.Connection, fleet: Fleet
) -> None:
    db.execute("CREATE TABLE effect (message_id bigint)")
    message_id = enqueue(db, "fault.transactional")
    assert fleet.start("--drain").wait(PATIENCE_SECONDS) == 9
    fleet.until_disconnected(db)
    assert db.execute("SELECT * FROM effect").fetchall() == []
    lapse(db, message_id)
    assert fleet.start("--drain").wait(PATIENCE_SECONDS) == 0
    assert db.execute("SELECT * FROM effect").fetchall() == [(message_id,)]
    assert (state_of(db, message_id), row_of(db, message_id).attempt_count) == ("sent", 2)


# --- poison -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["segv", "killed"])
def test_a_message_that_crashes_its_process_fails_after_exactly_its_attempts(
    db: psycopg.Connection, fleet: Fleet, how: str
) -> None:
    poison = enqueue(db, f"fault.{how}", max_attempts=2)
    good = [enqueue(db, "fault.deliver") for _ in range(5)]
    codes: list[int] = []
    while state_of(db, poison) != "failed":
        assert len(codes) < 10
        codes.append(fleet.start("--drain", concurrency="2").wait(PATIENCE_SECONDS))
        fleet.until_disconnected(db)
        for message_id in (poison, *good):
            lapse(db, message_id)
    fleet.start("--drain").wait(PATIENCE_SECONDS)
    number = -signal.SIGSEGV if how == "segv" else -signal.SIGKILL
    assert codes[:2] == [number] * 2
    assert codes[2:] in ([], [0])
    assert [(number, outcome) for number, outcome, _ in attempts_of(db, poison)] == [(1, "lost"), (2, "lost")]
    assert {row.state for row in rows_of(db, *good)} == {"sent"}
    assert violations(db) == []


@pytest.mark.parametrize("poison_first", [True, False], ids=["poison first", "poison last"])
def test_the_neighbours_of_a_message_that_crashes_its_process_are_delivered(
    db: psycopg.Connection, fleet: Fleet, *, poison_first: bool
) -> None:
    poison = enqueue(db, "fault.killed", max_attempts=2)
    good = [enqueue(db, "fault.deliver", max_attempts=2) for _ in range(3)]
    in_order = [poison, *good] if poison_first else [*good, poison]
    for _ in range(3):
        fleet.start("--drain", concurrency="4", lease_seconds="60").wait(PATIENCE_SECONDS)
        fleet.until_disconnected(db)
        for message_id in in_order:
            lapse(db, message_id)
    assert {row.state for row in rows_of(db, *good)} == {"sent"}
    assert violations(db) == []


def test_a_message_that_crashes_its_process_costs_the_others_at_most_two_attempts(
    db: psycopg.Connection, fleet: Fleet, choice: random.Random
) -> None:
    """The poison kills up to six processes, and is at a random place whenever suspects come in groups."""
    poison = enqueue(db, "fault.killed", max_attempts=6)
    good = [enqueue(db, "fault.deliver", max_attempts=3) for _ in range(40)]
    for _ in range(8):
        fleet.start("--drain", concurrency="50", lease_seconds="60").wait(PATIENCE_SECONDS)
        fleet.until_disconnected(db)
        ids = [poison, *good]
        choice.shuffle(ids)
        for message_id in ids:
            lapse(db, message_id)
    assert state_of(db, poison) == "failed"
    assert [outcome for _, outcome, _ in attempts_of(db, poison)] == ["lost"] * 6
    assert {row.state for row in rows_of(db, *good)} == {"sent"}
    assert violations(db) == []


def test_a_message_that_exhausts_memory_fails_and_the_others_are_delivered(
    db: psycopg.Connection, fleet: Fleet
) -> None:
    """Python survives the memory error: the attempt ends with it, and the same process continues."""
    poison = enqueue(db, "fault.memory", max_attempts=2)
    good = [enqueue(db, "fault.deliver") for _ in range(20)]
    assert fleet.start("--drain").wait(PATIENCE_SECONDS) == 0
    assert state_of(db, poison) == "failed"
    assert [outcome for _, outcome, _ in attempts_of(db, poison)] == ["retry", "failed"]
    assert "MemoryError" in (row_of(db, poison).last_error or "")
    assert {row.state for row in rows_of(db, *good)} == {"sent"}


# --- frozen -----------------------------------------------------------------------------------------------------------


def test_frozen_idle_workers_do_not_keep_a_message_from_a_healthy_one(db: psycopg.Connection, fleet: Fleet) -> None:
    """No poll and no heartbeat is due, so only the notification can help."""
    workers = []
    for _ in range(3):
        worker = fleet.start(poll_interval_seconds="3600", listener_heartbeat_seconds="600")
        fleet.until(lambda worker=worker: is_asleep(db, worker), "it falls asleep")  # type: ignore[misc] # each round has its own worker
        workers.append(worker)
    for frozen in workers[:2]:
        os.kill(frozen.pid, signal.SIGSTOP)
    ids = []
    for _ in range(2):
        ids.append(enqueue(db, "fault.deliver"))
        fleet.until(lambda: len(fleet.hand_overs()) == len(ids), "the healthy worker delivers")
    assert fleet.deliveries() == dict.fromkeys(ids, 1)


# --- told to stop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dsn", [DURABLE], indirect=True)
def test_stops_under_load_leave_nothing_in_flight_and_lose_or_repeat_nothing(
    db: psycopg.Connection, fleet: Fleet, choice: random.Random
) -> None:
    ids: set[int] = set()
    for _ in range(max(2, ROUNDS // 2)):
        ids |= {enqueue(db, "fault.deliver") for _ in range(60)}
        worker = fleet.start(concurrency="4")
        seen = len(fleet.hand_overs())
        moment = seen + choice.randint(1, len(ids) - seen)
        fleet.until(lambda moment=moment: len(fleet.hand_overs()) >= moment, "hand-overs")  # type: ignore[misc] # each round has its own moment
        worker.terminate()
        assert worker.wait(PATIENCE_SECONDS) == 0
        rows = rows_of(db)
        assert {row.state for row in rows} <= {"pending", "sent"}
        assert all(row.max_attempts - row.attempt_count == 11 for row in rows if row.state == "pending")
    assert fleet.start("--drain").wait(PATIENCE_SECONDS) == 0
    assert {row.state for row in rows_of(db)} == {"sent"}
    assert fleet.deliveries() == dict.fromkeys(ids, 1)
    assert violations(db) == []


def test_a_stopping_worker_renews_the_leases_of_its_running_handlers(db: psycopg.Connection, fleet: Fleet) -> None:
    message_id = enqueue(db, "fault.gated")
    worker = fleet.start(shutdown_grace_seconds="3600")
    fleet.until(fleet.hand_overs, "the handler runs")
    worker.terminate()
    fleet.until(lambda: "worker_stopping" in fleet.log, "the worker stops")
    db.execute("CREATE TABLE first_lease AS SELECT lease_expires_at AS ends_at FROM pgoutbox.in_flight_view")
    # The worker still holds its lease long after the end of the lease that it had when it was told to stop.
    fleet.until(
        lambda: db.execute("SELECT ends_at + interval '1 s' < now() FROM first_lease").fetchone() == (True,),
        "a lease has passed",
    )
    assert claim(db, topics=["fault.gated"], worker="thief") == []
    assert not worker.has_ended
    fleet.gate.touch()
    assert worker.wait(PATIENCE_SECONDS) == 0
    assert (state_of(db, message_id), row_of(db, message_id).attempt_count) == ("sent", 1)
    assert fleet.deliveries() == {message_id: 1}


@pytest.mark.parametrize("dsn", [DURABLE], indirect=True)
def test_a_second_signal_under_load_loses_nothing(db: psycopg.Connection, fleet: Fleet) -> None:
    ids = [enqueue(db, topic) for topic in ("fault.gated", "fault.deliver") for _ in range(20)]
    worker = fleet.start(concurrency="4", shutdown_grace_seconds="3600")
    fleet.until(lambda: len(fleet.hand_overs()) == 4, "every slot has a handler that waits")
    worker.terminate()
    fleet.until(lambda: "worker_stopping" in fleet.log, "the worker stops")
    worker.terminate()
    assert worker.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
    fleet.until_disconnected(db)
    in_flight = held_by(db, worker)
    for message_id in in_flight:
        lapse(db, message_id)
    fleet.gate.touch()
    assert fleet.start("--drain").wait(PATIENCE_SECONDS) == 0
    assert {row.state for row in rows_of(db)} == {"sent"}
    deliveries = fleet.deliveries()
    assert deliveries.keys() == set(ids)
    assert {message_id for message_id, count in deliveries.items() if count > 1} <= in_flight
    assert max(deliveries.values()) == 2


def test_processes_told_to_stop_while_starting_stop(db: psycopg.Connection, fleet: Fleet) -> None:
    supervisor = fleet.start("--processes", "3")
    fleet.until(lambda: fleet.log.count("process_started") == 3, "all have been started")
    supervisor.terminate()
    assert supervisor.wait(PATIENCE_SECONDS) == 0
    assert "process_died" not in fleet.log
    # Their group is the supervisor's session. Its last process is gone when no connection is left.
    fleet.until_disconnected(db)


def test_a_signal_during_the_start_of_a_process_reaches_it(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor gets the signal before it has registered its new child."""
    children: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_and_signal(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        child: subprocess.Popen[bytes] = start(*arguments, **options)  # type: ignore[call-overload] # passed on
        children.append(child)
        signal.raise_signal(signal.SIGTERM)
        return child

    monkeypatch.setenv("PGOUTBOX_DSN", dsn)
    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    # A child that gets no signal ends by itself with exit code 0.
    assert supervise(["--app", "tests.support.fleet_app:outbox", "--drain"], 3) == 0
    assert [child.returncode for child in children] == [-signal.SIGTERM]


# --- hung and blocked -------------------------------------------------------------------------------------------------


async def test_a_message_whose_handler_hangs_in_its_thread_is_delivered_by_another_worker(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1, lease_seconds=2))
    let_go = threading.Event()
    delivered: list[tuple[int, int]] = []

    # The other handlers must end in time on a slow machine too.
    @outbox.handler("greet", timeout=2, retry=AT_ONCE)
    def greet(message: Message, ctx: SyncContext) -> None:
        if message.id == hung and message.attempt_count == 1:
            let_go.wait(PATIENCE_SECONDS)
        else:
            delivered.append((message.id, message.attempt_count))

    hung = enqueue(db)
    first, second = Worker(outbox), Worker(outbox)
    try:
        # A thread that cannot be ended occupies the only slot, so this worker ends.
        with pytest.raises(PgOutboxError, match="topics: greet"):
            await first.run()
        others = [enqueue(db) for _ in range(3)]
        await second.drain()
    finally:
        let_go.set()
    assert {row.worker for row in rows_of(db)} == {second.name}
    assert sorted(delivered) == sorted([(hung, 2), *((i, 1) for i in others)])
    assert first.telemetry.counts[LogEvent.ATTEMPT_ABANDONED] == 1
    assert second.telemetry.counts[LogEvent.ATTEMPT_ABANDONED] == 0
    assert {row.state for row in rows_of(db)} == {"sent"}


async def test_a_handler_that_holds_the_gil_in_short_turns_keeps_its_lease(dsn: str, db: psycopg.Connection) -> None:
    """An extension module that does not release the GIL stops every thread of the process while it computes."""
    lease = 2.0
    outbox = Outbox(settings_for(dsn, lease_seconds=lease))
    hold = ctypes.PyDLL(None).usleep
    delivered: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        ends_at = time.monotonic() + 2 * lease
        while time.monotonic() < ends_at:
            hold(20_000)
        assert claim(db, worker="thief") == []
        delivered.append(message.attempt_count)

    message_id = enqueue(db)
    worker = Worker(outbox)
    await worker.run_once()
    assert delivered == [1]
    assert (state_of(db, message_id), row_of(db, message_id).attempt_count) == ("sent", 1)
    assert worker.telemetry.counts[LogEvent.LEASE_LOST] == 0
