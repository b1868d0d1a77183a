"""A worker keeps its messages no longer than its lease, and releases them when it stops."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Final, LiteralString

import pytest

from pgoutbox import Sent
from pgoutbox.operations import Operator
from tests.support.held import STOP_CLAIMS, Held
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    begin,
    enqueue,
    row_of,
    rows_of,
    state_of,
    until_blocked,
)
from tests.support.waiting import turn, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION = """
    import os

    from pgoutbox import Outbox

    outbox = Outbox()


    @outbox.handler("greet")
    async def greet(message, ctx):
        with open(os.environ["BEGUN"], "a") as file:
            file.write(f"{os.getpid()} {message.id} {message.attempt_count}\\n")
"""


def test_a_worker_that_was_suspended_during_its_claim_hands_over_nothing(
    db: psycopg.Connection, start_worker: StartWorker, tmp_path: Path
) -> None:
    db.execute(STOP_CLAIMS)
    db.execute("SELECT pg_advisory_lock(1)")
    message_id = enqueue(db)
    begun = tmp_path / "begun"
    settings = {"lease_seconds": "1", "lock_timeout_seconds": "60", "statement_timeout_seconds": "60"}
    suspended = start_worker(APPLICATION, "--drain", environment={"BEGUN": str(begun)}, worker_name="slow", **settings)
    waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 1"
    wait_until(lambda: db.execute(waits).fetchone() == (1,), lambda: suspended.log)
    os.killpg(suspended.pid, signal.SIGSTOP)
    db.execute("SELECT pg_advisory_unlock(1)")
    lapsed = "SELECT lease_expires_at < now() FROM pgoutbox.in_flight_view"
    wait_until(lambda: db.execute(lapsed).fetchone() == (True,), lambda: suspended.log)
    other = start_worker(APPLICATION, "--drain", environment={"BEGUN": str(begun)})
    assert other.wait() == 0
    os.killpg(suspended.pid, signal.SIGCONT)
    assert suspended.wait() == 0
    assert begun.read_text() == f"{other.pid} {message_id} 2\n"
    assert row_of(db, message_id).state == "sent"


LATE_THREAD = """
    import os
    import signal

    from pgoutbox import Outbox

    outbox = Outbox()


    @outbox.middleware
    async def suspend(messages, call_next):
        # The event loop has looked at the lease, and the thread has not begun.
        if messages[0].attempt_count == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return await call_next()


    @outbox.handler("greet")
    def greet(message, ctx):
        with open(os.environ["BEGUN"], "a") as file:
            file.write(f"{os.getpid()} {message.id} {message.attempt_count}\\n")


    @outbox.batch_handler("greet.all", max_size=10)
    def greet_all(messages, contexts):
        for message in messages:
            greet(message, None)
"""


@pytest.mark.parametrize("topic", ["greet", "greet.all"])
def test_a_handler_whose_process_was_suspended_before_its_thread_began_does_not_begin(
    db: psycopg.Connection, start_worker: StartWorker, tmp_path: Path, topic: str
) -> None:
    message_id = enqueue(db, topic)
    begun = tmp_path / "begun"
    environment = {"BEGUN": str(begun)}
    suspended = start_worker(LATE_THREAD, "--drain", environment=environment, worker_name="slow", lease_seconds="1")
    lapsed = "SELECT lease_expires_at < now() FROM pgoutbox.in_flight_view"
    wait_until(lambda: db.execute(lapsed).fetchone() == (True,), lambda: suspended.log)
    other = start_worker(LATE_THREAD, "--drain", environment=environment)
    assert other.wait() == 0
    os.killpg(suspended.pid, signal.SIGCONT)
    assert suspended.wait() == 0
    assert begun.read_text() == f"{other.pid} {message_id} 2\n"
    assert row_of(db, message_id).state == "sent"


DYING_THREAD = """
    import asyncio
    import ctypes
    import threading

    from pgoutbox import Outbox

    outbox = Outbox()


    @outbox.handler("greet")
    async def greet(message, ctx):
        if message.attempt_count > 1:
            return
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        await asyncio.Event().wait()
"""


def test_a_worker_whose_lease_thread_dies_ends_with_a_reason_and_another_one_delivers(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    message_id = enqueue(db)
    dying = start_worker(DYING_THREAD, shutdown_grace_seconds="0")
    assert dying.wait() == 1
    assert "leases are no longer renewed, and the worker has stopped: SystemExit" in dying.log
    assert start_worker(DYING_THREAD, "--drain").wait() == 0
    assert row_of(db, message_id).state == "sent"
    assert [outcome for _, outcome, _ in attempts_of(db, message_id)] == ["released"]


WITHOUT_FILES = """
    import asyncio
    import os
    import resource
    import signal

    from pgoutbox import Outbox

    outbox = Outbox()


    def allow(more_files):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + more_files, most))


    if "MORE_FILES" in os.environ:
        allow(int(os.environ["MORE_FILES"]))


    @outbox.handler("greet")
    async def greet(message, ctx):
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
        allow(0)
        await told.wait()
"""


def test_a_worker_that_can_open_no_file_renews_its_leases(db: psycopg.Connection, start_worker: StartWorker) -> None:
    message_id = enqueue(db)
    worker = start_worker(WITHOUT_FILES, lease_seconds="1")
    renewed = "SELECT lease_expires_at > claimed_at + interval '2 s' FROM pgoutbox.in_flight_view"
    wait_until(lambda: db.execute(renewed).fetchone() == (True,), lambda: worker.log)
    assert start_worker(WITHOUT_FILES, "--once").wait() == 0
    os.kill(worker.pid, signal.SIGUSR1)
    wait_until(lambda: row_of(db, message_id).state == "sent", lambda: worker.log)
    assert row_of(db, message_id).attempt_count == 1


def test_a_worker_with_too_few_files_to_renew_leases_ends_with_a_reason(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    message_id = enqueue(db)
    # Enough for an event loop and a connection, but not for the event loop of the lease thread.
    worker = start_worker(WITHOUT_FILES, environment={"MORE_FILES": "5"})
    assert worker.wait() == 1
    assert "error: leases are no longer renewed, and the worker has stopped: OSError" in worker.log
    assert row_of(db, message_id).state == "pending"


async def test_a_worker_that_is_stopped_during_its_claim_releases_the_messages(
    dsn: str, db: psycopg.Connection
) -> None:
    held = Held(
        dsn,
        worker_name="slow",
        lock_timeout_seconds=PATIENCE_SECONDS,
        shutdown_grace_seconds=0,
        listen=False,
        poll_interval_seconds=0.1,
    )
    running = enqueue(db)
    run = asyncio.create_task(held.worker.run())
    await held.until_begun(running)
    db.execute(STOP_CLAIMS)
    db.execute("SELECT pg_advisory_lock(1)")
    claimed = enqueue(db)
    await until_blocked(db, run)
    held.worker.stop()
    await turn(20)  # The worker ends all that it can end without an answer of the server.
    db.execute("SELECT pg_advisory_unlock(1)")
    await run
    assert [row.state for row in rows_of(db, running, claimed)] == ["pending", "pending"]


END_LEASES: Final[LiteralString] = """
    UPDATE pgoutbox.claim SET lease_expires_at = now() - interval '1 ms' WHERE released_from IS NOT NULL
"""


async def test_a_released_message_waits_for_the_lease_of_its_worker(dsn: str, db: psycopg.Connection) -> None:
    last = enqueue(db, max_attempts=1)
    older, first = enqueue(db, coalesce_key="k"), enqueue(db, ordering_key="k")
    careful = enqueue(db, "careful")
    released = [last, older, first, careful]
    for message_id in released:
        begin(db, message_id, worker="owner")
    newer, second = enqueue(db, coalesce_key="k"), enqueue(db, ordering_key="k")
    assert {Operator(db).release(message_id).result.value for message_id in released} == {"released"}
    other = Held(dsn)
    for row in rows_of(db):
        other.end(row.id, Sent())

    await other.run_once()
    assert other.begun == []
    # The worker may have renewed its lease until the release was committed: the message gets that lease, once.
    for _ in range(2):
        assert other.begun == []
        db.execute(END_LEASES)
        await other.run_once()
    assert sorted(other.begun) == sorted([(last, 2), (first, 2), (second, 1), (newer, 1)])
    states = {message_id: state_of(db, message_id) for message_id in (*released, newer, second)}
    assert states == dict.fromkeys((last, first, second, newer), "sent") | {older: "skipped", careful: "failed"}
