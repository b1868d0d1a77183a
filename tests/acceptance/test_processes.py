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


@pytest.mark.slow
def test_a_message_that_kills_its_worker_fails_after_its_attempts_and_others_are_delivered(
    database: psycopg.Connection, progress: Progress, start_worker: StartWorker
) -> None:
    good_before = enqueue(database, "test.good")
    poison = enqueue(database, "test.poison")
    database.execute("UPDATE pgoutbox.message SET max_attempts = 3 WHERE id = %s", (poison,))
    good_after = enqueue(database, "test.good")
    deaths = 0
    while state_and_attempts(database, poison)[0] != "failed":
        process = start_worker("--drain")
        deaths += process.wait() == 137
    assert deaths == 3
    assert state_and_attempts(database, poison)[:2] == ("failed", 3)
    assert [state_and_attempts(database, message)[0] for message in (good_before, good_after)] == ["sent", "sent"]
    outcomes = database.execute(
        "SELECT outcome FROM pgoutbox.attempt_view WHERE message_id = %s ORDER BY attempt_count", (poison,)
    ).fetchall()
    assert outcomes == [("lost",), ("lost",), ("lost",)]


def test_exit_actions_of_the_application_run_after_handlers_in_threads(
    database: psycopg.Connection, start_worker: StartWorker
) -> None:
    for _ in range(BRIEF_COUNT):
        enqueue(database, "test.brief")
    process = start_worker("--drain", concurrency=str(BRIEF_COUNT), batch_size=str(BRIEF_COUNT))
    assert process.wait() == 0
    assert process.log.count(FAREWELL) == BRIEF_COUNT


def test_a_message_in_flight_at_the_kill_of_its_worker_is_delivered_by_another(
    database: psycopg.Connection, progress: Progress, start_worker: StartWorker
) -> None:
    process = start_worker()
    message = enqueue(database, "test.patient")
    assert progress.wait_for("patient")[:2] == (message, 1)
    process.kill()
    start_worker()
    assert progress.wait_for("patient")[:2] == (message, 2)


def test_a_stopping_worker_releases_messages_in_flight_without_using_up_attempts(
    database: psycopg.Connection, progress: Progress, start_worker: StartWorker
) -> None:
    process = start_worker(shutdown_grace_seconds="0")
    message = enqueue(database, "test.endless")
    progress.wait_for("endless")
    assert process.stop() == 0
    state, attempt_count, max_attempts = state_and_attempts(database, message)
    assert (state, max_attempts - attempt_count) == ("pending", 11)


@pytest.mark.parametrize("topic", ["test.patient", "test.patient.async"])
def test_a_stopping_worker_leaves_a_message_in_a_thread_to_its_lease_and_ends(
    database: psycopg.Connection, progress: Progress, start_worker: StartWorker, topic: str
) -> None:
    process = start_worker(shutdown_grace_seconds="0")
    message = enqueue(database, topic)
    progress.wait_for("patient")
    assert process.stop() == 0
    assert state_and_attempts(database, message)[:2] == ("sending", 1)


def test_a_second_signal_ends_a_worker_that_still_waits_for_its_handlers(
    database: psycopg.Connection, progress: Progress, start_worker: StartWorker
) -> None:
    process = start_worker(shutdown_grace_seconds="3600")
    enqueue(database, "test.patient")
    progress.wait_for("patient")
    process.terminate()
    wait_until(lambda: "worker_stopping" in process.events(), lambda: f"the worker stops\n{process.log}")
    assert process.stop() == 128 + signal.SIGTERM


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
