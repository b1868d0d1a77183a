"""Tests handlers that use Django's ORM: in a worker whose database connections are cut, and in `manage.py test`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.support.forks import run_command
from tests.support.outbox_actions import enqueue, row_of, state_of
from tests.support.waiting import wait_until
from tests.support.worker_process import WorkerProcess, environment_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Connect

pytestmark = pytest.mark.slow

EMAIL: Final = "ada@example.org"
GREETINGS: Final = ("greet.sync", "greet.async", "greet.batch", "greet.transactional")

# How long Django keeps a connection, and whether it checks a kept connection before use.
CLOSED_AFTER_USE: Final = {"CLUB_MAX_AGE": "0"}
KEPT_UNCHECKED: Final = {"CLUB_MAX_AGE": "unlimited"}
KEPT_AND_CHECKED: Final = {"CLUB_MAX_AGE": "unlimited", "CLUB_HEALTH_CHECKS": "true"}


@pytest.fixture
def db(connect: Connect) -> psycopg.Connection:
    connection = connect(autocommit=True)
    connection.execute("CREATE TABLE django_club_member (email text PRIMARY KEY, greeting_count integer NOT NULL)")
    connection.execute("INSERT INTO django_club_member VALUES (%s, 0)", (EMAIL,))
    return connection


@pytest.fixture
def start_worker(dsn: str, tmp_path: Path) -> Iterator[Callable[[dict[str, str]], WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start(environment: dict[str, str]) -> WorkerProcess:
        worker = WorkerProcess(
            "tests.django_club.handlers:outbox",
            log=tmp_path / "worker.log",
            settings={"dsn": dsn},
            environment={"CLUB_DSN": dsn, **environment},
        )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.end()


def greeting_count(db: psycopg.Connection) -> int:
    ((count,),) = db.execute("SELECT greeting_count FROM django_club_member").fetchall()
    return int(count)


def orm_pids(db: psycopg.Connection) -> list[int]:
    rows = db.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'club' AND datname = current_database()"
    )
    return [pid for (pid,) in rows.fetchall()]


def is_delivered(db: psycopg.Connection, ids: list[int]) -> bool:
    states = {state_of(db, message_id) for message_id in ids}
    assert "failed" not in states, [row_of(db, message_id) for message_id in ids]
    return states == {"sent"}


@pytest.mark.parametrize("keeping", [CLOSED_AFTER_USE, KEPT_AND_CHECKED], ids=["closed after use", "kept and checked"])
def test_a_message_is_delivered_after_the_orm_lost_its_connections(
    db: psycopg.Connection, start_worker: Callable[[dict[str, str]], WorkerProcess], keeping: dict[str, str]
) -> None:
    worker = start_worker(keeping)
    first = [enqueue(db, topic, EMAIL) for topic in GREETINGS]
    wait_until(lambda: is_delivered(db, first), lambda: worker.log)
    if keeping is KEPT_AND_CHECKED:
        assert orm_pids(db) != []
    else:
        wait_until(lambda: orm_pids(db) == [], lambda: "the worker closes connections older than CONN_MAX_AGE")
    for pid in orm_pids(db):
        db.execute("SELECT pg_terminate_backend(%s, 30000)", (pid,))
    second = [enqueue(db, topic, EMAIL) for topic in GREETINGS]
    wait_until(lambda: is_delivered(db, second), lambda: worker.log)
    assert [row_of(db, message_id).attempt_count for message_id in second] == [1] * len(second)
    assert greeting_count(db) == len(first) + len(second)
    assert worker.stop() == 0


@pytest.mark.parametrize("topic", ["cut.sync", "cut.async"])
@pytest.mark.parametrize("keeping", [CLOSED_AFTER_USE, KEPT_UNCHECKED], ids=["closed after use", "kept"])
def test_the_attempt_after_a_lost_orm_connection_gets_a_new_one(
    db: psycopg.Connection,
    start_worker: Callable[[dict[str, str]], WorkerProcess],
    keeping: dict[str, str],
    topic: str,
) -> None:
    worker = start_worker(keeping | {"PGOUTBOX_CONCURRENCY": "1"})
    message = enqueue(db, topic, EMAIL)
    wait_until(lambda: is_delivered(db, [message]), lambda: worker.log)
    assert row_of(db, message).attempt_count == 2
    assert worker.stop() == 0


def test_an_async_handlers_orm_connection_stays_open_while_other_handlers_run(
    db: psycopg.Connection, start_worker: Callable[[dict[str, str]], WorkerProcess]
) -> None:
    emails = [EMAIL, *(f"{letter}@example.org" for letter in "bcde")]
    for email in emails[1:]:
        db.execute("INSERT INTO django_club_member VALUES (%s, 0)", (email,))
    messages = [enqueue(db, "list", emails), enqueue(db, "pass", 1), enqueue(db, "pass", 2)]
    worker = start_worker(CLOSED_AFTER_USE | {"PGOUTBOX_CONCURRENCY": "2"})
    wait_until(lambda: is_delivered(db, messages), lambda: worker.log)
    assert row_of(db, messages[0]).attempt_count == 1
    wait_until(lambda: orm_pids(db) == [], lambda: "the last one closes it")


def test_an_async_handler_past_its_timeout_keeps_its_message_while_its_query_runs(
    db: psycopg.Connection, connect: Connect, start_worker: Callable[[dict[str, str]], WorkerProcess]
) -> None:
    blocker = connect()
    blocker.execute("SELECT FROM django_club_member FOR UPDATE")
    message = enqueue(db, "lock", EMAIL)
    worker = start_worker(CLOSED_AFTER_USE | {"PGOUTBOX_LEASE_SECONDS": "60"})
    wait_until(lambda: "attempt_overdue" in worker.events(), lambda: worker.log)
    blocker.rollback()
    wait_until(lambda: is_delivered(db, [message]), lambda: worker.log)
    assert (row_of(db, message).attempt_count, greeting_count(db)) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("keeping", [CLOSED_AFTER_USE, KEPT_UNCHECKED], ids=["closed after use", "kept"])
def test_manage_py_test_drops_its_database_after_handlers_that_use_the_orm(
    dsn: str, connect: Connect, keeping: dict[str, str]
) -> None:
    command = ("-m", "django", "test", "tests.django_club", "--settings=tests.django_club.settings")
    result = run_command(*command, cwd=Path.cwd(), env=environment_with() | {"CLUB_DSN": dsn, **keeping})
    assert result.returncode == 0, result.stderr
    assert "Ran 1 test" in result.stderr
    name = f"test_{conninfo_to_dict(dsn)['dbname']}"
    rows = connect().execute("SELECT datname FROM pg_database WHERE datname = %s", (name,)).fetchall()
    assert rows == []
