"""A process that slept past its lease hands over nothing."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.held import STOP_CLAIMS
from tests.support.outbox_actions import enqueue, row_of
from tests.support.waiting import wait_until

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
