"""Tests migrations up and down beside business transactions, autovacuum and open transactions, and interrupted ones: no
business transaction fails, and none waits for longer than the migration may."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from pgoutbox import migrate
from pgoutbox.errors import SchemaError
from tests.support.revisions import FIRST, add_revision, copy_revisions
from tests.support.servers import open_workshop
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Connect
    from tests.support.servers import OwnServer

ROLES: Final = (
    "pgoutbox_owner",
    "pgoutbox_producer",
    "pgoutbox_worker",
    "pgoutbox_operator",
    "pgoutbox_viewer",
)
RIGHTS_IN_A_DATABASE_THAT_IS_GONE: Final = """
CREATE ROLE pgoutbox_gone;
INSERT INTO pg_shdepend (dbid, classid, objid, objsubid, refclassid, refobjid, deptype)
SELECT 4000000000, 'pg_namespace'::regclass, 1, 0, 'pg_authid'::regclass, r.oid, 'a'
FROM pg_roles AS r
WHERE r.rolname LIKE 'pgoutbox\\_%'
"""
ROUNDS: Final = 3

BUSINESS: Final = (
    "SELECT pgoutbox.enqueue('mail', '1')",
    "SELECT pgoutbox.enqueue('mail', '1', coalesce_key => 'c')",
    "SELECT pgoutbox.enqueue('mail', '1', ordering_key => 'o')",
    "SELECT pgoutbox.cancel((SELECT max(id) FROM pgoutbox.message_live))",
)

# The first process that runs it stops in the midst, until a signal.
PAUSING: Final = """
import os
import signal
from pathlib import Path

from alembic import op

from pgoutbox.migrate import LOCK_MESSAGES

revision = "pgoutbox_0002"
down_revision = "pgoutbox_0001"


def upgrade():
    op.execute(LOCK_MESSAGES)
    op.execute("ALTER TABLE pgoutbox.message ADD COLUMN later text")
    print("the table of messages is changed")
    paused = Path(os.environ.get("PAUSED", os.devnull))
    if not paused.exists():
        signal.signal(signal.SIGUSR1, lambda *_: None)
        paused.touch()
        signal.pause()
    op.execute("CREATE TABLE pgoutbox.later ()")
"""
PROGRAM: Final = """
import sys
from pathlib import Path

from pgoutbox import migrate
from pgoutbox.database import revisions

revisions.MIGRATIONS = Path(sys.argv[2])
migrate.upgrade(sys.argv[1], report=print)
"""
# How long the sessions of an application have waited for a lock, in seconds.
WAITS: Final = """
SELECT l.relation::regclass::text, extract(epoch FROM clock_timestamp() - l.waitstart)
FROM pg_locks AS l
JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE a.datname = current_database() AND a.application_name = %s AND NOT l.granted
"""
# It sleeps for a tenth of a second after each page.
SLOW_VACUUM: Final = """
ALTER TABLE pgoutbox.message_live SET (
    autovacuum_vacuum_cost_delay = 100,
    autovacuum_vacuum_cost_limit = 1,
    autovacuum_vacuum_threshold = 1,
    autovacuum_vacuum_scale_factor = 0
)
"""
VACUUMED: Final = """
SELECT FROM pg_stat_progress_vacuum WHERE relid = 'pgoutbox.message_live'::regclass
"""


@pytest.fixture
def revisions(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let `pgoutbox.migrate` have a second revision, that changes the table of messages."""
    copied = copy_revisions(tmp_path, monkeypatch)
    (copied / "versions" / "0002_pausing.py").write_text(PAUSING)
    return copied


@pytest.fixture
def own_server() -> Iterator[OwnServer]:
    """Return a server that the test starts with its own settings."""
    with open_workshop(os.environ) as workshop, workshop.server() as server:
        yield server


@pytest.fixture
def paused(dsn: str, revisions: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a migration that has changed the table of messages, and does nothing more until a signal."""
    sign = tmp_path / "paused"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, dsn, str(revisions)],
        env=os.environ | {"PAUSED": str(sign)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until(lambda: sign.exists() or process.poll() is not None, lambda: "the migration never paused")
            yield process
        finally:
            process.kill()


def test_no_business_transaction_fails_during_a_migration_up_or_down(
    empty_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = add_revision(tmp_path, monkeypatch)
    migrate.upgrade(empty_dsn, FIRST)
    stopping = threading.Event()

    def produce() -> int:
        done = 0
        with psycopg.connect(empty_dsn) as connection:
            while not stopping.is_set():
                for statement in BUSINESS:
                    connection.execute(statement.encode())
                connection.commit()
                done += 1
        return done

    with ThreadPoolExecutor(3) as threads:
        producers = [threads.submit(produce) for _ in range(3)]
        try:
            for _ in range(ROUNDS):
                patiently(lambda: migrate.upgrade(empty_dsn))
                assert migrate.current(empty_dsn) == newest
                patiently(lambda: migrate.downgrade(empty_dsn, FIRST))
        finally:
            stopping.set()
        done = sum(producer.result() for producer in producers)
    assert done > 0
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT count(*) FROM pgoutbox.message").fetchone() == (3 * done,)


def test_roles_remain_if_another_database_with_their_rights_is_dropped_concurrently() -> None:
    """Rights in a database that no longer exists simulate this: DROP ROLE raises the same error."""
    with open_workshop(os.environ) as workshop, workshop.server() as server:
        server.start()
        with server.connect() as db:
            db.execute("SET allow_system_table_mods = on")
            db.execute(RIGHTS_IN_A_DATABASE_THAT_IS_GONE)
            with pytest.raises(psycopg.errors.InternalError_, match="cache lookup failed for database"):
                db.execute("DROP ROLE pgoutbox_gone")
            migrate.downgrade(server.dsn, "base")
            roles = db.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE 'pgoutbox\\_%' ORDER BY 1").fetchall()
    assert [name for (name,) in roles] == ["pgoutbox_gone", *sorted(ROLES)]


def test_a_killed_migration_changes_nothing_and_is_run_again(
    dsn: str, db: psycopg.Connection, paused: subprocess.Popen[str]
) -> None:
    paused.kill()
    migrate.upgrade(dsn)
    assert migrate.current(dsn) == "pgoutbox_0002"
    assert db.execute("SELECT count(later) FROM pgoutbox.message").fetchone() == (0,)


def test_a_migration_whose_session_is_terminated_changes_nothing_and_is_run_again(
    dsn: str, db: psycopg.Connection, paused: subprocess.Popen[str]
) -> None:
    ended = (
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'pgoutbox migrate'"
    )
    assert db.execute(ended).fetchall() == [(True,)]
    assert migrate.current(dsn) == FIRST
    paused.send_signal(signal.SIGUSR1)
    _, said = paused.communicate()
    assert paused.returncode == 1
    assert "terminating connection due to administrator command" in said
    migrate.upgrade(dsn)
    assert migrate.current(dsn) == "pgoutbox_0002"


def test_a_suspended_migration_lets_business_transactions_go_on_and_begins_again(
    dsn: str, db: psycopg.Connection, paused: subprocess.Popen[str]
) -> None:
    db.execute(BUSINESS[0].encode())  # It waits for the end of the suspended session.
    assert migrate.current(dsn) == FIRST
    paused.send_signal(signal.SIGUSR1)
    said, errors = paused.communicate()
    assert paused.returncode == 0, errors
    assert "trying again and again" in said
    assert migrate.current(dsn) == "pgoutbox_0002"


@pytest.mark.usefixtures("revisions")
def test_no_enqueue_deadlocks_with_a_migration_that_waits_for_several_tables(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    """A reader of failed messages delays the migration. Meanwhile an enqueue locks live ones, and then needs others."""
    reader = connect(autocommit=False)
    reader.execute("SELECT count(*) FROM pgoutbox.message_failed")

    def produce() -> None:
        with psycopg.connect(dsn, application_name="producer") as connection:
            connection.execute(BUSINESS[0].encode())

    def has_waited(application: str, seconds: float) -> bool:
        return any(waited >= seconds for _, waited in db.execute(WAITS, [application]).fetchall())

    with ThreadPoolExecutor(2) as threads:
        migration = threads.submit(migrate.upgrade, dsn)
        wait_until(lambda: has_waited("pgoutbox migrate", 0), lambda: "the migration does not wait")
        producer = threads.submit(produce)
        wait_until(lambda: producer.done() or has_waited("producer", 0.3), lambda: "the producer does nothing")
        reader.rollback()
        producer.result()
        migration.result()
    assert migrate.current(dsn) == "pgoutbox_0002"


@pytest.mark.usefixtures("db", "revisions")
def test_a_migration_has_its_turn_among_transactions_that_overlap(dsn: str) -> None:
    """It lets nobody pass while it waits for the first table."""
    stopping = threading.Event()

    def produce() -> None:
        with psycopg.connect(dsn) as connection:
            while not stopping.is_set():
                connection.execute(BUSINESS[0].encode())
                connection.execute("SELECT pg_sleep(0.2 + 0.4 * random())")
                connection.commit()

    with ThreadPoolExecutor(6) as threads:
        producers = [threads.submit(produce) for _ in range(6)]
        try:
            migrate.upgrade(dsn)
        finally:
            stopping.set()
        for producer in producers:
            producer.result()
    assert migrate.current(dsn) == "pgoutbox_0002"


@pytest.mark.usefixtures("revisions")
def test_a_migration_that_would_wait_for_the_reports_of_workers_has_changed_nothing(
    dsn: str, db: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would have all locks while it waits, and would lose its work if it gave up."""
    with db.transaction():
        db.execute("LOCK TABLE pgoutbox.worker IN ROW EXCLUSIVE MODE")
        with pytest.raises(SchemaError, match="nothing was changed"):
            migrate.upgrade(dsn, patience_seconds=0)
    assert capsys.readouterr().out == ""
    migrate.upgrade(dsn, patience_seconds=0)
    assert "the table of messages is changed" in capsys.readouterr().out


@pytest.mark.usefixtures("own_server", "revisions")
def test_an_autovacuum_gives_way_to_a_migration(own_server: OwnServer) -> None:
    own_server.start(autovacuum_naptime="1s")
    with own_server.connect() as db:
        db.execute(SLOW_VACUUM.encode())
        db.execute("SELECT pgoutbox.enqueue('mail', '1') FROM generate_series(1, 20000)")
        db.execute("UPDATE pgoutbox.message SET headers = '{}'")
        wait_until(lambda: db.execute(VACUUMED).fetchall(), own_server.log.read_text)
        migrate.upgrade(own_server.dsn, patience_seconds=0)
    assert "canceling autovacuum task" in own_server.log.read_text()


@pytest.mark.usefixtures("own_server", "revisions")
def test_a_prepared_transaction_stops_a_migration_until_it_ends(own_server: OwnServer) -> None:
    own_server.start(max_prepared_transactions="1")
    with own_server.connect() as db, psycopg.connect(own_server.dsn) as producer:
        producer.execute(BUSINESS[0].encode())
        producer.execute("PREPARE TRANSACTION 'forgotten'")
        with pytest.raises(SchemaError, match="nothing was changed"):
            migrate.upgrade(own_server.dsn, patience_seconds=0)
        db.execute(BUSINESS[0].encode())
        db.execute("COMMIT PREPARED 'forgotten'")
        migrate.upgrade(own_server.dsn, patience_seconds=0)
        assert db.execute("SELECT count(later), count(*) FROM pgoutbox.message").fetchone() == (0, 2)


def patiently(run: Callable[[], None]) -> None:
    """Run it again, as its message says, while it cannot get a lock."""

    def succeeds() -> bool:
        with contextlib.suppress(SchemaError):
            run()
            return True
        return False

    wait_until(succeeds, lambda: "the migration never got its locks")
