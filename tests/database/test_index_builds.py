"""Tests the builds of a later revision's indexes: they wait for others, and nobody waits for them."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from pgoutbox import SchemaError, migrate, migration_plan
from pgoutbox.database import index_builds, revisions
from pgoutbox.database.index_builds import Index
from tests.support.outbox_actions import enqueue
from tests.support.revisions import FIRST, INDEXES, add_revision, adding
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Connect

pytestmark = pytest.mark.slow

LEAVES: Final = "SELECT count(*) FROM pg_partition_tree('pgoutbox.message') AS t WHERE t.isleaf"
ADOPTED: Final = """
SELECT count(*) FILTER (WHERE t.isleaf), bool_and(i.indisvalid)
FROM pg_partition_tree('pgoutbox.message_worker') AS t
JOIN pg_index AS i ON i.indexrelid = t.relid
"""
# Those on the column of the made-up index.
INVALID: Final = """
SELECT i.indexrelid::regclass::text FROM pg_index AS i WHERE NOT i.indisvalid AND i.indrelid IN
(SELECT t.relid FROM pg_partition_tree('pgoutbox.message') AS t WHERE t.isleaf)
"""
BUILDING: Final = """
SELECT p.pid FROM pg_stat_progress_create_index AS p WHERE p.datname = current_database() AND p.phase LIKE 'waiting%'
"""
OF_ALL: Final = Index("message_x", "pgoutbox.message", "(claimed_at)")
BY_WORKER: Final = Index("message_worker", "pgoutbox.message", "(worker) WHERE worker IS NOT NULL")  # Of `INDEXES`.
OF_FAILED: Final = Index("message_failed_x", "pgoutbox.message_failed", "(worker)")
WAITING_FOR_THE_TABLE: Final = """
SELECT count(*) FROM pg_locks WHERE mode = 'ShareUpdateExclusiveLock' AND locktype = 'relation' AND NOT granted
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

AT_THE_END_OF_A_BUILD: Final = """
CREATE FUNCTION public.wait_at_the_end() RETURNS event_trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_lock_shared(77);
    PERFORM pg_advisory_unlock_shared(77);
END
$$;
CREATE EVENT TRIGGER at_the_end ON ddl_command_end WHEN TAG IN ('CREATE INDEX') EXECUTE FUNCTION wait_at_the_end();
"""
HELD_AT_THE_END: Final = """
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
# The session of the other run.
LOOKS_OR_WAITS: Final = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
AND (wait_event = 'transactionid' OR query LIKE '%virtualtransaction%' AND pid <> pg_backend_pid())
"""


@pytest.fixture(autouse=True)
def newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template_of_today: Callable[[], str]) -> str:
    """A revision with two indexes, which databases do not have yet."""
    template_of_today()
    return add_revision(tmp_path, monkeypatch, INDEXES)


@pytest.fixture
def reader(connect: Connect) -> psycopg.Connection:
    """An open transaction that has read all messages: a build waits for its end."""
    reader = connect()
    reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    reader.execute("SELECT count(*) FROM pgoutbox.message")
    return reader


def builder(db: psycopg.Connection) -> int:
    """Wait until a build waits for the reader, and return its session."""
    (row,) = wait_until(lambda: db.execute(BUILDING).fetchall(), lambda: "no build waits")
    return int(row[0])


def build_as_a_server(dsn: str) -> None:
    """Build the first index, like a server whose client is gone."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(index_builds.missing_builds(connection, BY_WORKER)[0].statement.encode())


def expect_all_built(db: psycopg.Connection) -> None:
    (leaf_count,) = db.execute(LEAVES).fetchone() or (0,)
    assert db.execute(ADOPTED).fetchone() == (leaf_count, True)
    assert leaf_count > 3
    assert db.execute(INVALID).fetchall() == []
    assert db.execute("SELECT to_regclass('pgoutbox.message_failed_by_worker')").fetchone() != (None,)


def test_messages_are_enqueued_and_claimed_while_an_index_is_built(
    dsn: str, db: psycopg.Connection, reader: psycopg.Connection, newest: str
) -> None:
    reports: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(migrate.upgrade, dsn, report=reports.put)
        try:
            builder(db)
            db.execute("SET lock_timeout = '1s'")
            message_id = enqueue(db, "mail", coalesce_key="ada")
            db.execute("SELECT pgoutbox.cancel(%s)", [message_id])
            assert migrate.current(dsn) == FIRST
        finally:
            reader.rollback()
        run.result(timeout=60)
    assert migrate.current(dsn) == newest
    expect_all_built(db)
    (first,) = db.execute("SELECT min(p.name) FROM pgoutbox.partitions() AS p").fetchone() or ("",)
    assert reports.get_nowait().startswith(f"building index {first}_worker on pgoutbox.{first} (")


def interrupt(work: Callable[[str], None], dsn: str, db: psycopg.Connection, reader: psycopg.Connection) -> None:
    """End the session that builds an index, and leave that index half built."""
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(work, dsn)
        try:
            db.execute("SELECT pg_terminate_backend(%s)", [builder(db)])
            with pytest.raises(psycopg.OperationalError, match="terminating connection"):
                run.result(timeout=60)
        finally:
            reader.rollback()
    assert len(db.execute(INVALID).fetchall()) == 1


@pytest.mark.parametrize("again", [migrate.upgrade, migrate.build_indexes])
def test_a_build_that_was_interrupted_is_dropped_and_done_again(
    dsn: str, db: psycopg.Connection, reader: psycopg.Connection, again: Callable[[str], None]
) -> None:
    interrupt(migrate.upgrade, dsn, db, reader)
    assert migrate.current(dsn) == FIRST
    again(dsn)
    assert db.execute(INVALID).fetchall() == []
    migrate.upgrade(dsn)
    expect_all_built(db)


def test_a_revision_does_not_adopt_an_index_that_was_left_half_built(
    dsn: str, db: psycopg.Connection, reader: psycopg.Connection
) -> None:
    """An application's own history may run it without a build before."""
    interrupt(migrate.build_indexes, dsn, db, reader)
    db.execute(migrate.upgrade_sql(f"{FIRST}:head").encode())
    expect_all_built(db)


def test_the_build_of_a_killed_program_is_awaited_and_used(
    dsn: str, db: psycopg.Connection, reader: psycopg.Connection
) -> None:
    """The server does not notice that the program is gone, and goes on."""
    program = (
        "import pathlib, sys\nfrom pgoutbox import migrate\nfrom pgoutbox.database import revisions\n"
        "revisions.MIGRATIONS = pathlib.Path(sys.argv[1])\nmigrate.upgrade(sys.argv[2])"
    )
    killed = subprocess.Popen([sys.executable, "-c", program, str(revisions.MIGRATIONS), dsn])
    reports: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor(1) as threads:
        try:
            builder(db)
            killed.send_signal(signal.SIGKILL)
            assert killed.wait() == -signal.SIGKILL
            ((name,),) = db.execute(INVALID).fetchall()
            oid_of = f"SELECT '{name}'::regclass::oid".encode()
            before = db.execute(oid_of).fetchone()
            run = threads.submit(migrate.upgrade, dsn, report=reports.put)
            wait_until(lambda: db.execute(WAITING_FOR_THE_TABLE).fetchone() == (1,), lambda: "nobody waits")
        finally:
            reader.rollback()
        run.result(timeout=60)
    expect_all_built(db)
    assert db.execute(oid_of).fetchone() == before
    assert name.removeprefix("pgoutbox.") not in reports.get_nowait()


def test_a_build_of_a_killed_program_that_has_still_to_commit_is_used(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    """At its end, a build has no lock of the table any more."""
    gate = connect()
    gate.execute("SELECT pg_advisory_lock(77)")
    db.execute(AT_THE_END_OF_A_BUILD)
    with ThreadPoolExecutor(2) as threads, closing(gate):
        killed = threads.submit(build_as_a_server, dsn)
        wait_until(lambda: db.execute(HELD_AT_THE_END).fetchone() == (1,), lambda: "no build ends")
        ((name,),) = db.execute(INVALID).fetchall()
        oid_of = f"SELECT '{name}'::regclass::oid".encode()
        before = db.execute(oid_of).fetchone()
        run = threads.submit(migrate.upgrade, dsn)
        wait_until(lambda: db.execute(LOOKS_OR_WAITS).fetchone() == (1,), lambda: "nobody waits")
        gate.execute("SELECT pg_advisory_unlock(77)")
        killed.result(timeout=60)
        run.result(timeout=60)
    expect_all_built(db)
    assert db.execute(oid_of).fetchone() == before


def test_of_two_runs_one_builds_and_the_other_waits(
    dsn: str, db: psycopg.Connection, reader: psycopg.Connection
) -> None:
    reports: queue.Queue[str] = queue.Queue()
    said = [""]
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(migrate.upgrade, dsn, report=reports.put) for _ in range(2)]
        try:
            builder(db)
            while not said[-1].startswith("another migration is running"):
                said.append(reports.get(timeout=60))
            assert len(db.execute(BUILDING).fetchall()) == 1
        finally:
            reader.rollback()
        for run in runs:
            run.result(timeout=60)
    while not reports.empty():
        said.append(reports.get())
    built = [line for line in said if line.startswith("building")]
    assert len(built) == len({*built})
    expect_all_built(db)


def test_a_build_uses_up_no_patience(
    dsn: str, db: psycopg.Connection, reader: psycopg.Connection, connect: Connect
) -> None:
    patience = 2.0
    reports: queue.Queue[str] = queue.Queue()
    gate = connect()
    gate.execute("LOCK TABLE pgoutbox.worker IN ROW EXCLUSIVE MODE")
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(
            migrate.upgrade, dsn, report=reports.put, lock_timeout_seconds=0.05, patience_seconds=patience
        )
        try:
            builder(db)
            (begun_at,) = db.execute("SELECT clock_timestamp()").fetchone() or (None,)
            waits = "SELECT WHERE clock_timestamp() > %s::timestamptz + make_interval(secs => %s)"
            wait_until(lambda: db.execute(waits, [begun_at, patience]).rowcount, lambda: "time stands still")
            reader.rollback()
            while "has a lock that the migration needs" not in reports.get(timeout=30):
                assert not run.done()
        finally:
            reader.rollback()
            gate.rollback()
        run.result(timeout=60)
    expect_all_built(db)


def test_builds_for_an_applications_history_exclude_each_other(
    dsn: str, db: psycopg.Connection, reader: psycopg.Connection
) -> None:
    db.execute("ALTER TABLE pgoutbox.alembic_version SET SCHEMA public")
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(migrate.build_indexes, dsn)
        try:
            builder(db)
            db.execute("SET lock_timeout = '10ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable), db.transaction():
                db.execute(migrate._LOCK_BUILDS.encode())
            with db.transaction(force_rollback=True):
                db.execute("SELECT pgoutbox._note_revision(2, '0.1', '0.1', 'x')")
        finally:
            reader.rollback()
        run.result(timeout=60)
    assert migrate.state(dsn) == (FIRST, "application", None)
    db.execute("RESET lock_timeout")
    db.execute(migrate.upgrade_sql(f"{FIRST}:head").replace("pgoutbox.alembic_version", "alembic_version").encode())
    expect_all_built(db)


def test_a_run_goes_on_where_the_last_one_ended(dsn: str, db: psycopg.Connection) -> None:
    db.execute("CREATE INDEX message_live_worker ON pgoutbox.message_live (worker) WHERE worker IS NOT NULL")
    reports: list[str] = []
    migrate.build_indexes(dsn, report=reports.append)
    assert not any("message_live" in line for line in reports)
    reports.clear()
    migrate.upgrade(dsn, report=reports.append)
    assert reports == []
    expect_all_built(db)


def test_timeouts_of_the_role_end_no_build(dsn: str, db: psycopg.Connection, reader: psycopg.Connection) -> None:
    with ThreadPoolExecutor(1) as threads:
        names = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
        short = f"{dsn}&options=" + "%20".join(f"-c%20{name}%3D100" for name in names)
        run = threads.submit(migrate.upgrade, short)
        try:
            session = builder(db)
            age = "SELECT clock_timestamp() - query_start > interval '300 ms' FROM pg_stat_activity WHERE pid = %s"
            wait_until(lambda: db.execute(age, [session]).fetchone() == (True,), lambda: "the build ended")
        finally:
            reader.rollback()
        run.result(timeout=60)
    expect_all_built(db)


def test_the_plan_names_the_builds_and_no_long_lock(dsn: str, db: psycopg.Connection) -> None:
    for number in range(400):
        enqueue(db, "mail", "x" * 2_000, owner=f"{number}")
    steps = migration_plan.plan(dsn)
    assert [step for step in steps if step.lock == "unknown"] == []
    builds = [step for step in steps if "CONCURRENTLY" in step.statement]
    (leaf_count,) = db.execute(LEAVES).fetchone() or (0,)
    assert len(builds) == leaf_count + 1
    assert {step.lock for step in builds} == {"SHARE UPDATE EXCLUSIVE"}
    (live,) = [step for step in builds if step.relation == "pgoutbox.message_live"]
    assert live.statement == (
        "CREATE INDEX CONCURRENTLY message_live_worker ON pgoutbox.message_live (worker) WHERE worker IS NOT NULL"
    )
    assert live.size_bytes > 0
    assert [(step.relation, step.lock, step.seconds) for step in steps[len(builds) :]] == [
        ("pgoutbox.message", "SHARE", 0.0),
        ("pgoutbox.message_failed", "SHARE", 0.0),
        ("pgoutbox.worker", "SHARE", 0.0),
    ]


@pytest.mark.parametrize(
    ("indexes", "taken"),
    [
        pytest.param((OF_ALL, OF_FAILED), "message_failed_x", id="the part of an index before it"),
        pytest.param((OF_FAILED, OF_ALL), "message_failed_x", id="an index before it"),
        pytest.param((Index("message_ordered", *OF_ALL[1:]),), "message_failed_ordered", id="an index of revision 1"),
        pytest.param((Index("message_live_ordered", *OF_ALL[1:]),), "message_live_ordered", id="another table's index"),
        pytest.param((Index("message_done", *OF_ALL[1:]),), "message_done", id="a table"),
    ],
)
def test_a_revision_fails_if_something_else_has_the_name_of_its_index(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexes: tuple[Index, ...], taken: str
) -> None:
    add_revision(tmp_path / "other", monkeypatch, adding(*indexes))
    name = indexes[-1].name
    error = f"^index {name} on .* needs the name pgoutbox.{taken}, which something else has; rename index {name}\n"
    with pytest.raises(psycopg.errors.DuplicateObject, match=error):
        migrate.upgrade(dsn)
    assert migrate.current(dsn) == FIRST


def test_a_new_schema_needs_no_build(empty_dsn: str, newest: str) -> None:
    reports: list[str] = []
    migrate.upgrade(empty_dsn, report=reports.append)
    assert reports == []
    assert migrate.current(empty_dsn) == newest
    with psycopg.connect(empty_dsn) as connection:
        expect_all_built(connection)


def test_the_way_back_and_up_again(dsn: str, db: psycopg.Connection) -> None:
    migrate.upgrade(dsn)
    migrate.downgrade(dsn, FIRST)
    migrate.upgrade(dsn)
    expect_all_built(db)


def test_indexes_of_a_database_without_the_schema_are_refused(empty_dsn: str) -> None:
    with pytest.raises(SchemaError, match="run: pgoutbox migrate"):
        migrate.build_indexes(empty_dsn)


def test_indexes_of_a_schema_that_other_files_made_are_refused(dsn: str, db: psycopg.Connection) -> None:
    db.execute("UPDATE pgoutbox.revision SET digest = 'other'")
    with pytest.raises(SchemaError, match="from other files"):
        migrate.build_indexes(dsn)
