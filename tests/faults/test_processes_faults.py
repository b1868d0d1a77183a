"""Worker processes killed, poisoned, told to stop, hung and blocked: nothing is lost, and nothing is done twice unless
a crash made it unavoidable.

PGOUTBOX_TEST_ROUNDS sets how many processes are killed and stopped at random moments, PGOUTBOX_TEST_SEED which moments.
"""

from __future__ import annotations

import asyncio
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

from pgoutbox import Outbox
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.message import Message
from pgoutbox.processes import supervise
from pgoutbox.retry import RetryPolicy
from pgoutbox.telemetry import Event
from pgoutbox.worker import Worker
from tests.faults.judge import violations
from tests.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    claim,
    enqueue,
    lapse,
    reports,
    row_of,
    rows_of,
    running,
    settings_for,
    state_of,
)

if TYPE_CHECKING:
    from tests.conftest import Connect
    from tests.faults.fleet import Fleet

ROUNDS = int(os.environ.get("PGOUTBOX_TEST_ROUNDS", "6"))
AT_ONCE = RetryPolicy.steps(0, jitter=0)


@pytest.fixture
def choice() -> random.Random:
    """Random moments; the seed is shown when the test fails."""
    seed = int(os.environ.get("PGOUTBOX_TEST_SEED", random.randrange(2**32)))
    print(f"PGOUTBOX_TEST_SEED={seed}")  # noqa: T201 - shown when the test fails
    return random.Random(seed)


def is_drained(db: psycopg.Connection) -> bool:
    """Whether nothing is owed any more."""
    return db.execute("SELECT FROM pgoutbox.message_live LIMIT 1").fetchone() is None


def held_by(db: psycopg.Connection, process: subprocess.Popen[bytes]) -> set[int]:
    """The messages that this process has in flight."""
    rows = db.execute(
        "SELECT id FROM pgoutbox.message_live WHERE state = 'sending' AND split_part(worker, ':', 2) = %s",
        [str(process.pid)],
    )
    return {row[0] for row in rows}


# --- killed -----------------------------------------------------------------------------------------------------------


def test_kills_at_random_moments_lose_nothing_and_repeat_only_what_was_in_flight(
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
    assert in_flight, "no kill met anything"
    assert {row.id for row in rows_of(db)} == committed
    assert {row.state for row in rows_of(db)} == {"sent"}
    assert deliveries.keys() == committed
    assert rolled_back.isdisjoint(deliveries)
    # Only what a killed worker had in flight was handed over again, and its lost attempt is in the history.
    repeated = {message_id for message_id, count in deliveries.items() if count > 1}
    assert all(deliveries[i] - 1 <= len(attempts_of(db, i)) for i in repeated)
    assert sum(deliveries.values()) - len(committed) <= len(in_flight), f"in flight at kills: {in_flight}"
    assert repeated <= set(in_flight)
    assert violations(db) == []


def test_a_kill_while_the_finish_is_on_its_way_repeats_nothing(db: psycopg.Connection, fleet: Fleet) -> None:
    """The statement has reached the server, which commits it; nobody is there to read the answer."""
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

    def finishing() -> list[tuple[str | None, bool]]:
        """What the session waits for, and whether it runs the statement that waits for longer than 20 ms."""
        return db.execute(
            "SELECT wait_event_type, query LIKE '%WITH held AS%' FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgoutbox finish'"
        ).fetchall()

    message_id = enqueue(db, "fault.deliver")
    worker = fleet.start(lock_timeout_seconds="600")
    fleet.until(lambda: finishing() == [("Lock", True)], "the finish waits in the server")
    worker.kill()
    worker.wait(PATIENCE_SECONDS)
    db.execute("SELECT pg_advisory_unlock(4711)")
    fleet.until(lambda: not finishing(), "the server has ended it")
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
def test_a_message_that_ends_its_process_fails_after_exactly_its_attempts(
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
def test_the_neighbours_of_a_message_that_ends_its_process_outlive_it(
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


def test_nobody_loses_more_than_two_attempts_by_a_message_that_ends_its_process(
    db: psycopg.Connection, fleet: Fleet, choice: random.Random
) -> None:
    """The poison gets up to six processes, and is somewhere among the others whenever suspects come in groups."""
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


def test_a_message_that_exhausts_the_memory_fails_and_the_others_are_delivered(
    db: psycopg.Connection, fleet: Fleet
) -> None:
    """Python survives that: the attempt ends with its error, and the same process goes on."""
    poison = enqueue(db, "fault.memory", max_attempts=2)
    good = [enqueue(db, "fault.deliver") for _ in range(20)]
    assert fleet.start("--drain").wait(PATIENCE_SECONDS) == 0
    assert state_of(db, poison) == "failed"
    assert [outcome for _, outcome, _ in attempts_of(db, poison)] == ["retry", "failed"]
    assert "MemoryError" in (row_of(db, poison).last_error or "")
    assert {row.state for row in rows_of(db, *good)} == {"sent"}


# --- told to stop -----------------------------------------------------------------------------------------------------


def test_stops_under_load_leave_nothing_in_flight_lose_no_attempt_and_repeat_nothing(
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


def test_a_worker_that_waits_for_its_handlers_to_end_renews_their_leases(db: psycopg.Connection, fleet: Fleet) -> None:
    message_id = enqueue(db, "fault.gated")
    worker = fleet.start(shutdown_grace_seconds="3600")
    fleet.until(fleet.hand_overs, "the handler runs")
    worker.terminate()
    fleet.until(lambda: "worker_stopping" in fleet.log, "the worker stops")
    db.execute("CREATE TABLE first_lease AS SELECT lease_expires_at AS ends_at FROM pgoutbox.message_live")
    # Well after the lease has ended that it had when the worker was told to stop, it is still held.
    fleet.until(
        lambda: db.execute("SELECT ends_at + interval '1 s' < now() FROM first_lease").fetchone() == (True,),
        "a lease has passed",
    )
    assert claim(db, topics=["fault.gated"], worker="thief") == []
    assert worker.poll() is None
    fleet.gate.touch()
    assert worker.wait(PATIENCE_SECONDS) == 0
    assert (state_of(db, message_id), row_of(db, message_id).attempt_count) == ("sent", 1)
    assert fleet.deliveries() == {message_id: 1}


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


def test_processes_that_are_told_to_stop_while_they_start_stop(db: psycopg.Connection, fleet: Fleet) -> None:
    supervisor = fleet.start("--processes", "3")
    fleet.until(lambda: fleet.log.count("process_started") == 3, "all have been started")
    supervisor.terminate()
    assert supervisor.wait(PATIENCE_SECONDS) == 0
    assert "process_died" not in fleet.log
    # Their group is the supervisor's session; its last process is gone when no connection is left.
    fleet.until_disconnected(db)


def test_a_signal_that_comes_while_a_process_is_being_started_reaches_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor gets it before it knows of its new child."""
    children: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_and_signal(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        child: subprocess.Popen[bytes] = start(*arguments, **options)  # type: ignore[call-overload] # passed on
        children.append(child)
        signal.raise_signal(signal.SIGTERM)
        return child

    monkeypatch.setenv("PGOUTBOX_DSN", dsn)
    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    # A child that nobody tells ends by itself, with 0.
    assert supervise(["--app", "tests.faults.fleet_app:outbox", "--drain"], 3) == 0
    assert [child.returncode for child in children] == [-signal.SIGTERM]


# --- hung and blocked -------------------------------------------------------------------------------------------------


async def test_a_message_whose_handler_hangs_in_its_thread_is_delivered_by_another_worker(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1, lease_seconds=2))
    let_go, late_delivered = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    delivered: list[tuple[int, int]] = []

    # The others are to end in time on a slow machine too.
    @outbox.handler("greet", timeout=2, retry=AT_ONCE)
    def greet(message: Message, ctx: SyncContext) -> None:
        if message.id == hung and message.attempt_count == 1:
            let_go.wait(PATIENCE_SECONDS)
        else:
            delivered.append((message.id, message.attempt_count))
            if let_go.is_set():
                loop.call_soon_threadsafe(late_delivered.set)

    hung = enqueue(db)
    first, second = Worker(outbox), Worker(outbox)
    with reports() as heard:
        async with running(first):
            try:
                await heard.wait_for(Event.ATTEMPT_ABANDONED)
                # The one slot is taken by a thread that nobody can end: this worker takes nothing.
                others = [enqueue(db) for _ in range(3)]
                await second.drain()
                assert {row.worker for row in rows_of(db)} == {second.name}
                assert delivered.count((hung, 2)) == 1
            finally:
                let_go.set()
            # The thread has ended, and its slot serves again.
            late = enqueue(db)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await late_delivered.wait()
    assert row_of(db, late).worker == first.name
    assert sorted(delivered) == sorted([(hung, 2), *((i, 1) for i in others), (late, 1)])
    assert first.telemetry.counts[Event.ATTEMPT_ABANDONED] == 1
    assert second.telemetry.counts[Event.ATTEMPT_ABANDONED] == 0
    assert {row.state for row in rows_of(db)} == {"sent"}


async def test_a_handler_that_holds_the_interpreter_lock_in_short_turns_keeps_its_lease(
    dsn: str, db: psycopg.Connection
) -> None:
    """An extension module that does not release the lock stops every thread of the process while it computes."""
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
    assert worker.telemetry.counts[Event.LEASE_LOST] == 0
