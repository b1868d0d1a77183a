"""Tests that one worker serves many databases: promptly, with one set of slots, and none harms another."""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier

from pgoutbox import migrate
from tests.support.command_line import run_process
from tests.support.many_databases import APPLICATION, Databases, StartFleet, locked, until_handled
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.conftest import Server
    from tests.promises.conftest import StartWorker


_WAKE_UP_LOCK = """
SELECT count(*)
FROM pg_locks AS l
WHERE l.locktype = 'advisory' AND l.classid = 1885826146 AND l.mode = 'ExclusiveLock'
    AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
"""


def test_each_message_is_delivered_when_its_database_tells_the_worker(
    databases: Databases, start_fleet: StartFleet
) -> None:
    databases.add("one", "two", "three")
    databases.enqueue("two")
    worker = start_fleet()
    until_handled(databases, worker, ["two single"])
    wait_until(lambda: len(worker.records("worker_started")) == 3, lambda: worker.log)
    for name in ("one", "two", "three", "one"):
        databases.enqueue(name)
    until_handled(databases, worker, ["two single", "one single", "two single", "three single", "one single"])
    assert worker.stop() == 0


def test_an_idle_database_has_one_session(databases: Databases, start_fleet: StartFleet) -> None:
    databases.add("one", "two")
    databases.enqueue("one", count=20)
    # It is read by the slot, on a connection of its own.
    databases["one"].execute("SELECT pgoutbox.enqueue('single', to_jsonb(repeat('x', 20000)))")
    worker = start_fleet()
    until_handled(databases, worker, ["one single"] * 21)
    wait_until(lambda: databases.sessions() == [("one", 1), ("two", 1)], lambda: f"{databases.sessions()}")
    wait_until(lambda: databases["two"].execute(_WAKE_UP_LOCK).fetchone() == (1,), lambda: worker.log)
    doctor = run_process("doctor", "--database", "two", "--json", PGOUTBOX_DSNS=str(databases.file))
    assert "workers" in {one["check"] for one in doctor.lines}
    # The session that has the lock also claims, and is not that of a stranger.
    assert "foreign-wake-up-lock" not in {one["code"] for one in doctor.lines}
    assert worker.stop() == 0
    wait_until(lambda: databases.sessions() == [("one", 0), ("two", 0)], lambda: f"{databases.sessions()}")


def test_the_connection_that_renews_leases_opens_no_other(databases: Databases, start_fleet: StartFleet) -> None:
    databases.add("one", "two")
    databases.enqueue("one", "waits")
    worker = start_fleet(lease_seconds="1")
    names = (
        "SELECT split_part(application_name, ' ', 2) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'pgoutbox %' ORDER BY 1"
    )
    renewing = ("lease",)
    wait_until(lambda: renewing in databases["one"].execute(names).fetchall(), lambda: worker.log)
    assert databases["one"].execute(names).fetchall() == [("claim",), renewing]
    databases.open_gate()
    until_handled(databases, worker, ["one waits"])
    wait_until(lambda: databases["one"].execute(names).fetchall() == [("claim",)], lambda: worker.log)
    assert worker.stop() == 0


def test_a_message_that_waits_for_its_turn_is_not_claimed_again_and_again(
    databases: Databases, start_fleet: StartFleet
) -> None:
    names = ["one", "two"]
    databases.add(*names)
    for name in names:
        databases.enqueue(name, "waits")
    worker = start_fleet(concurrency="1", lease_seconds="1")
    wait_until(lambda: len(databases.began()) == 1, lambda: worker.log)
    (waiting,) = {*names} - {*databases.began()}
    # The lease of its first claim is renewed.
    renewed = "SELECT lease_expires_at > claimed_at + interval '3 s' FROM pgoutbox.in_flight_view"
    wait_until(lambda: databases[waiting].execute(renewed).fetchone() == (True,), lambda: worker.log)
    assert len(databases.began()) == 1
    databases.open_gate()
    until_handled(databases, worker, [f"{name} waits" for name in names])
    assert worker.stop() == 0


def test_a_hook_is_called_although_its_worker_cannot_be_told(databases: Databases, start_fleet: StartFleet) -> None:
    databases.add("one", "two")
    worker = start_fleet()
    wait_until(lambda: len(worker.records("worker_started")) == 2, lambda: worker.log)
    databases.enqueue("one", "fails")
    until_handled(databases, worker, ["one fails.failed"])


def test_a_database_that_cannot_be_served_harms_no_other(
    databases: Databases, start_fleet: StartFleet, server: Server
) -> None:
    databases.add("good", "locked")
    databases.add("bare", template="template1")
    databases.list("missing", server.dsn_for("there_is_no_such_database"))
    databases.list("dead", "postgresql://nobody@127.0.0.1:9/nothing?connect_timeout=2")
    databases.enqueue("locked")
    with locked(databases.dsn("locked")):
        worker = start_fleet()
        databases.enqueue("good")
        until_handled(databases, worker, ["good single"])
        wait_until(
            lambda: {one["database"] for one in worker.records("database_left_out")} == {"bare", "missing", "dead"},
            lambda: worker.log,
        )
        assert worker.records("worker_stopped") == []
        databases.enqueue("good")
        until_handled(databases, worker, ["good single"] * 2)
    migrate.upgrade(databases.dsn("bare"))
    databases.enqueue("bare")
    until_handled(databases, worker, ["good single", "good single", "locked single", "bare single"])
    assert worker.stop() == 0


def test_the_list_is_read_again(databases: Databases, start_fleet: StartFleet) -> None:
    databases.add("one", "two")
    worker = start_fleet()
    wait_until(lambda: len(worker.records("worker_started")) == 2, lambda: worker.log)
    databases.add("three")
    databases.enqueue("three")
    databases.remove("one")
    worker.send_signal(signal.SIGHUP)
    until_handled(databases, worker, ["three single"])
    wait_until(lambda: len(worker.records("worker_stopped")) == 1, lambda: worker.log)
    assert [one["database"] for one in worker.records("worker_stopped")] == ["one"]
    databases.file.write_text("two without\nnonsense\n")
    worker.send_signal(signal.SIGHUP)
    wait_until(lambda: len(worker.records("databases_unknown")) == 1, lambda: worker.log)
    databases.enqueue("two")
    until_handled(databases, worker, ["three single", "two single"])
    assert worker.stop() == 0


def test_one_database_leaves_slots_to_the_others(databases: Databases, start_fleet: StartFleet) -> None:
    databases.add("big", "small")
    databases.enqueue("big", "waits", 20)
    worker = start_fleet(concurrency="5")
    wait_until(lambda: databases.began() == ["big"] * 4, lambda: f"{databases.began()}\n{worker.log}")
    databases.enqueue("small")
    until_handled(databases, worker, ["small single"])
    assert databases.began() == ["big"] * 4
    databases.open_gate()
    until_handled(databases, worker, ["small single", *["big waits"] * 20])
    assert worker.stop() == 0


def test_databases_take_turns_when_there_are_more_of_them_than_slots(
    databases: Databases, start_fleet: StartFleet
) -> None:
    names = [f"db{number}" for number in range(4)]
    databases.add(*names)
    for name in names:
        databases.enqueue(name, "waits", 3)
    worker = start_fleet(concurrency="1")

    def has_one_in_hand(name: str) -> bool:
        row = databases[name].execute("SELECT FROM pgoutbox.message_live WHERE state = 'sending' LIMIT 1").fetchone()
        return row is not None

    def has_begun(count: int) -> bool:
        return len(databases.began()) == count

    turns = []
    for number in range(1, 9):
        wait_until(partial(has_begun, number), lambda: f"{databases.began()}\n{worker.log}")
        # One begins, and each of the others has the next message in hand.
        wait_until(lambda: all(map(has_one_in_hand, names)), lambda: worker.log)
        turns.append(databases.go_on())
    assert [sorted(turns[:4]), sorted(turns[4:])] == [names, names]
    databases.open_gate()
    until_handled(databases, worker, [f"{name} waits" for name in names for _ in range(3)])
    assert worker.stop() == 0


def test_a_lost_session_is_opened_again(databases: Databases, start_fleet: StartFleet) -> None:
    databases.add("one", "two")
    worker = start_fleet()
    wait_until(lambda: databases.sessions() == [("one", 1), ("two", 1)], lambda: f"{databases.sessions()}")
    databases["one"].execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'"
    )
    for name in ("one", "two", "one"):
        databases.enqueue(name)
    until_handled(databases, worker, ["one single", "two single", "one single"])
    wait_until(lambda: databases.sessions() == [("one", 1), ("two", 1)], lambda: f"{databases.sessions()}")
    databases.enqueue("one")
    until_handled(databases, worker, ["one single", "two single", "one single", "one single"])
    assert worker.stop() == 0


@pytest.mark.parametrize("mode", ["--once", "--drain"])
def test_a_run_serves_all_databases_and_names_those_that_it_could_not(
    mode: str, databases: Databases, start_fleet: StartFleet, server: Server
) -> None:
    databases.add("one", "two")
    databases.list("missing", server.dsn_for("there_is_no_such_database"))
    databases.enqueue("one", count=3)
    databases.enqueue("two", count=2)
    worker = start_fleet(mode)
    assert worker.wait() == 1
    assert sorted(databases.handled()) == ["one single"] * 3 + ["two single"] * 2
    assert "not served, see the log: missing" in worker.log
    databases.remove("missing")
    assert start_fleet(mode).wait() == 0


def test_a_database_that_is_removed_and_listed_again_is_served_again(
    databases: Databases, start_fleet: StartFleet
) -> None:
    databases.add("one", "two")
    databases.enqueue("one", "waits")
    worker = start_fleet()
    wait_until(lambda: databases.began() == ["one"], lambda: worker.log)
    dsn = databases.dsn("one")
    databases.remove("one")
    worker.send_signal(signal.SIGHUP)
    wait_until(lambda: len(worker.records("worker_stopping")) == 1, lambda: worker.log)
    databases.list("one", dsn)
    worker.send_signal(signal.SIGHUP)
    databases.add("three")
    worker.send_signal(signal.SIGHUP)
    databases.enqueue("three")
    until_handled(databases, worker, ["three single"])
    databases.open_gate()
    wait_until(lambda: len(worker.records("worker_stopped")) == 1, lambda: worker.log)
    databases.enqueue("one")
    until_handled(databases, worker, ["three single", "one waits", "one single"])
    assert worker.stop() == 0


def test_a_handler_that_outlives_its_database_does_not_keep_the_process_alive(
    databases: Databases, start_fleet: StartFleet
) -> None:
    databases.add("one", "two")
    databases.enqueue("one", "waits")
    worker = start_fleet(shutdown_grace_seconds="0")
    wait_until(lambda: databases.began() == ["one"], lambda: worker.log)
    databases.remove("one")
    worker.send_signal(signal.SIGHUP)
    wait_until(lambda: len(worker.records("worker_stopped")) == 1, lambda: worker.log)
    databases.add("three")
    worker.send_signal(signal.SIGHUP)
    databases.enqueue("three")
    until_handled(databases, worker, ["three single"])
    assert worker.stop() == 0


def test_a_reload_of_several_processes_reads_the_list_again(databases: Databases, start_fleet: StartFleet) -> None:
    databases.add("one")
    worker = start_fleet("--processes", "2")
    wait_until(lambda: len(worker.records("worker_started")) == 2, lambda: worker.log)
    databases.add("two")
    databases.enqueue("two")
    worker.send_signal(signal.SIGHUP)
    until_handled(databases, worker, ["two single"])
    assert worker.stop() == 0


def test_a_listener_of_one_database_is_refused_for_several(databases: Databases, start_fleet: StartFleet) -> None:
    databases.add("one", "two")
    databases.enqueue("two")
    worker = start_fleet(listen_dsn=databases.dsn("one"))
    assert worker.wait() == 2
    assert "PGOUTBOX_LISTEN_DSN" in worker.log


def test_a_small_database_gets_its_share_beside_a_backlog(databases: Databases, start_fleet: StartFleet) -> None:
    databases.add("big", "small")
    databases.enqueue("big", "waits", 30)
    worker = start_fleet(concurrency="5")
    wait_until(lambda: databases.began() == ["big"] * 4, lambda: worker.log)
    databases.enqueue("small", "waits")
    wait_until(lambda: "small" in databases.began(), lambda: worker.log)
    databases.enqueue("small", "waits")
    # A slot is free now, and the backlog has three.
    (databases.folder / f"go-{next(databases.folder.glob('began-big-*')).name}").touch()
    wait_until(
        lambda: databases.began() == [*["big"] * 4, *["small"] * 2], lambda: f"{databases.began()}\n{worker.log}"
    )


def test_a_database_with_room_for_one_session_is_served_by_a_listener(
    databases: Databases, start_fleet: StartFleet
) -> None:
    databases.add("one")
    role = f"one_session_{time.time_ns()}"
    session = databases["one"]
    session.execute(SQL("CREATE ROLE {} LOGIN IN ROLE pgoutbox_worker CONNECTION LIMIT 1").format(Identifier(role)))
    databases.list("one", make_conninfo(databases.dsn("one"), user=role))
    worker = start_fleet()
    try:
        for count in (1, 2):
            databases.enqueue("one")
            until_handled(databases, worker, ["one single"] * count)
            wait_until(lambda: worker.records("worker_started"), lambda: worker.log)
            # Between the session of the first look and the listener, there is none.
            wait_until(lambda: databases.sessions() == [("one", 1)], lambda: worker.log)
        # Until the server has ended the session of the first look, the listener is refused, and tries again.
        wait_until(lambda: session.execute(_WAKE_UP_LOCK).fetchone() == (1,), lambda: worker.log)
        assert worker.stop() == 0
    finally:
        worker.end()
        session.execute(SQL("DROP ROLE {}").format(Identifier(role)))


_DJANGO = """
    import os
    from pathlib import Path

    import django
    from django.conf import settings
    from django.db import connection

    folder = Path(os.environ["FOLDER"])
    settings.configure(
        DATABASES={
            "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "orm"), "CONN_MAX_AGE": None}
        }
    )
    django.setup()
"""
_ORM_HANDLER = """
    @outbox.handler("orm")
    def orm(message, context):
        connection.ensure_connection()
        session = connection.connection
        if message.database == "two":
            waits(message, context)
        with (folder / "handled").open("a") as handled:
            handled.write(f"{message.database} {'kept' if connection.connection is session else 'closed'} 0\\n")
"""


def test_the_end_of_one_database_closes_no_orm_connection_of_another(
    databases: Databases, start_worker: StartWorker
) -> None:
    databases.add("one", "two")
    databases.enqueue("one", "orm")
    worker = start_worker(
        _DJANGO + APPLICATION + _ORM_HANDLER,
        environment={"FOLDER": str(databases.folder)},
        dsn=None,
        dsns=str(databases.file),
        concurrency="1",
        poll_interval_seconds="3600",
    )
    until_handled(databases, worker, ["one kept"])
    wait_until(lambda: len(worker.records("worker_started")) == 2, lambda: worker.log)
    databases.enqueue("two", "orm")
    wait_until(lambda: databases.began() == ["two"], lambda: worker.log)
    databases.remove("one")
    worker.send_signal(signal.SIGHUP)
    wait_until(lambda: len(worker.records("worker_stopped")) == 1, lambda: worker.log)
    databases.open_gate()
    until_handled(databases, worker, ["one kept", "two orm", "two kept"])
    assert worker.stop() == 0


def test_hung_handlers_of_databases_that_are_gone_keep_their_slots_until_the_process_has_to_end(
    databases: Databases, start_fleet: StartFleet
) -> None:
    """They also keep the threads that all databases share."""
    databases.add("one", "two", "three")
    worker = start_fleet(concurrency="4", shutdown_grace_seconds="0")
    for number, name in enumerate(("one", "two"), start=1):
        databases.enqueue(name, "waits")
        wait_until(lambda name=name: name in databases.began(), lambda: worker.log)  # type: ignore[misc]
        databases.remove(name)
        worker.send_signal(signal.SIGHUP)
        wait_until(lambda number=number: len(worker.records("worker_stopped")) >= number, lambda: worker.log)  # type: ignore[misc]
    assert worker.wait() == 1
    assert "half of the slots are held by handlers" in worker.log
