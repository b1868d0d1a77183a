"""Tests worker processes that are killed, poisoned, and told to stop."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.support.app import BRIEF_COUNT, FAREWELL
from tests.support.waiting import wait_until
from tests.support.worker_process import connection_count

if TYPE_CHECKING:
    from tests.acceptance.conftest import Progress, StartWorker
    from tests.conftest import Connect

pytestmark = pytest.mark.slow


@pytest.fixture
def database(connect: Connect) -> psycopg.Connection:
    return connect(autocommit=True)


def enqueue(database: psycopg.Connection, topic: str) -> int:
    row = database.execute("SELECT pgoutbox.enqueue(%s, '{}')", (topic,)).fetchone()
    assert row is not None
    return int(row[0])


def state_and_attempts(database: psycopg.Connection, message_id: int) -> tuple[str, int, int]:
    row = database.execute(
        "SELECT state, attempt_count, max_attempts FROM pgoutbox.message WHERE id = %s", (message_id,)
    ).fetchone()
    assert row is not None
    return row


def test_exit_actions_of_the_application_run_after_handlers_in_threads(
    database: psycopg.Connection, start_worker: StartWorker
) -> None:
    for _ in range(BRIEF_COUNT):
        enqueue(database, "test.brief")
    process = start_worker("--drain", concurrency=str(BRIEF_COUNT), batch_size=str(BRIEF_COUNT))
    assert process.wait() == 0
    assert process.log.count(FAREWELL) == BRIEF_COUNT


@pytest.mark.parametrize("topic", ["test.patient", "test.patient.async"])
def test_a_stopping_worker_leaves_a_message_in_a_thread_to_its_lease_and_ends(
    database: psycopg.Connection, progress: Progress, start_worker: StartWorker, topic: str
) -> None:
    process = start_worker(shutdown_grace_seconds="0")
    message = enqueue(database, topic)
    progress.wait_for("patient")
    assert process.stop() == 0
    assert state_and_attempts(database, message)[:2] == ("sending", 1)


def test_a_killed_supervised_process_is_restarted_and_all_end_together(
    database: psycopg.Connection, progress: Progress, start_worker: StartWorker
) -> None:
    supervisor = start_worker("--processes", "2", shutdown_grace_seconds="0")
    message = enqueue(database, "test.endless")
    _, _, pid = progress.wait_for("endless")
    os.kill(pid, signal.SIGKILL)
    again, attempt_count, other = progress.wait_for("endless")
    assert (again, attempt_count) == (message, 2)
    assert other != pid
    wait_until(lambda: "process_died" in supervisor.events(), lambda: f"a death is told\n{supervisor.log}")
    assert supervisor.stop() == 0
    assert state_and_attempts(database, message)[0] == "pending"


def test_workers_stop_when_their_supervisor_is_killed(
    database: psycopg.Connection, progress: Progress, start_worker: StartWorker
) -> None:
    supervisor = start_worker("--processes", "2", shutdown_grace_seconds="0")
    message = enqueue(database, "test.endless")
    progress.wait_for("endless")
    wait_until(lambda: supervisor.events().count("worker_started") == 2, lambda: f"both work\n{supervisor.log}")
    supervisor.kill()
    wait_until(lambda: connection_count(database) == 0, lambda: f"both have ended\n{supervisor.log}")
    assert state_and_attempts(database, message)[0] == "pending", supervisor.log


def test_overlapping_cron_runs_deliver_each_message_once(
    database: psycopg.Connection, progress: Progress, start_worker: StartWorker
) -> None:
    messages = {enqueue(database, "test.good") for _ in range(40)}
    runs = [start_worker("--once"), start_worker("--once")]
    assert [run.wait() for run in runs] == [0, 0]
    delivered = [progress.wait_for("good")[0] for _ in messages]
    assert sorted(delivered) == sorted(messages)
    assert {state_and_attempts(database, message)[:2] for message in messages} == {("sent", 1)}
