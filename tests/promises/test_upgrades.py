"""A schema says which versions of the package may work with it, and from which files its revisions were made."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

import pgoutbox
from pgoutbox import SchemaError, migrate
from tests.support.command_line import run_process
from tests.support.outbox_actions import enqueue
from tests.support.revisions import add_revision
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Connect
    from tests.promises.conftest import StartWorker
    from tests.support.worker_process import WorkerProcess

APPLICATION: Final = """
    from pgoutbox import Outbox

    outbox = Outbox()


    @outbox.handler("mail")
    async def mail(message, ctx):
        pass
"""
# Its minute lasts a tenth of a second.
REPORTING: Final = (
    APPLICATION
    + """
    from pgoutbox.worker.beside import presence

    presence._FIRST_LOOK_SECONDS = presence._INTERVAL_SECONDS = 0.1
"""
)
# It reports only at its start. A message is handed over by a session that begins with it.
TRANSACTIONAL: Final = """
    from pgoutbox import Outbox
    from pgoutbox.worker.beside import presence

    presence._FIRST_LOOK_SECONDS = 3600
    outbox = Outbox()


    @outbox.handler("mail", transactional=True)
    async def mail(message, ctx):
        pass
"""
CONTRACT: Final = """
from alembic import op

from pgoutbox.migrate import note_revision

revision = "pgoutbox_0002"
down_revision = "pgoutbox_0001"


def upgrade():
    op.execute("CREATE TABLE pgoutbox.later ()")
    op.execute(note_revision(2, lowest_package="99.1"))
"""
NOTE: Final = "SELECT pgoutbox._note_revision(2, '99.1', '99.1', 'x')"
LATER: Final = (
    "INSERT INTO pgoutbox.revision (number, lowest_package, applied_by, digest) VALUES (2, '99.1', '99.1', 'x')"
)
REFUSAL: Final = (
    "the schema pgoutbox needs version 99.1 of the package or a later one, and this is "
    f"{pgoutbox.__version__}; install it: pip install -U pgoutbox"
)
OTHER_FILES: Final = (
    "revision pgoutbox_0001 of this database was applied by pgoutbox {} from other files than those of this package "
    f"({pgoutbox.__version__})"
)
ATTEMPTS: Final = "SELECT state, attempt_count FROM pgoutbox.message WHERE id = %s"


@pytest.fixture
def started(dsn: str, db: psycopg.Connection, start_worker: StartWorker) -> Callable[..., WorkerProcess]:
    """Start a worker, and wait until it has reported."""

    def start(application: str = APPLICATION, *, at: str = dsn) -> WorkerProcess:
        worker = start_worker(application, dsn=at)
        wait_until(lambda: db.execute("SELECT FROM pgoutbox.worker_view").rowcount, lambda: worker.log)
        return worker

    return start


def expect_end(worker: WorkerProcess) -> None:
    assert worker.wait() == 1, worker.log
    assert REFUSAL in worker.log


@pytest.mark.parametrize("arguments", [(), ("--once",), ("--drain",), ("--processes", "2")])
def test_a_later_schema_refuses_a_worker_in_words(
    db: psycopg.Connection, start_worker: StartWorker, arguments: tuple[str, ...]
) -> None:
    message_id = enqueue(db, "mail")
    db.execute(LATER)
    expect_end(start_worker(APPLICATION, *arguments))
    assert db.execute(ATTEMPTS, [message_id]).fetchone() == ("pending", 0)


@pytest.mark.parametrize("command", ["list", "pause default", "doctor"])
def test_a_later_schema_refuses_a_command_in_words(dsn: str, db: psycopg.Connection, command: str) -> None:
    db.execute(LATER)
    done = run_process(*command.split(), dsn=dsn, COLUMNS="400")
    assert done.exit_code == 1, done.out
    assert REFUSAL in " ".join((done.out + done.err).split())


def test_a_worker_of_the_lowest_version_or_a_later_one_works(db: psycopg.Connection, start_worker: StartWorker) -> None:
    for number, lowest in enumerate(("0.1", pgoutbox.__version__, "0.0.99"), start=2):
        db.execute(
            "INSERT INTO pgoutbox.revision (number, lowest_package, applied_by, digest) VALUES (%s, %s, '99.1', 'x')",
            [number, lowest],
        )
        message_id = enqueue(db, "mail")
        worker = start_worker(APPLICATION, "--drain")
        assert worker.wait() == 0, worker.log
        assert db.execute(ATTEMPTS, [message_id]).fetchone() == ("sent", 1)


def test_a_running_worker_ends_when_its_connection_is_replaced(
    db: psycopg.Connection, started: Callable[..., WorkerProcess]
) -> None:
    worker = started()
    db.execute(LATER)
    db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'"
    )
    message_id = enqueue(db, "mail")
    expect_end(worker)
    assert db.execute(ATTEMPTS, [message_id]).fetchone() == ("pending", 0)


def test_a_running_worker_behind_a_pooler_ends_at_its_next_transaction(
    db: psycopg.Connection, pooled_dsn: str, started: Callable[..., WorkerProcess]
) -> None:
    worker = started(at=pooled_dsn)
    db.execute(LATER)
    message_id = enqueue(db, "mail")
    expect_end(worker)
    assert db.execute(ATTEMPTS, [message_id]).fetchone() == ("pending", 0)


def test_a_running_worker_ends_at_its_next_report(
    db: psycopg.Connection, started: Callable[..., WorkerProcess]
) -> None:
    worker = started(REPORTING)
    db.execute(LATER)
    expect_end(worker)


def test_a_running_worker_ends_when_a_session_of_its_handlers_is_refused(
    db: psycopg.Connection, started: Callable[..., WorkerProcess]
) -> None:
    worker = started(TRANSACTIONAL)
    db.execute(LATER)
    message_id = enqueue(db, "mail")
    expect_end(worker)
    assert "handlers_limited" not in worker.events()
    unused = "SELECT state, max_attempts - attempt_count = attempt_budget FROM pgoutbox.message WHERE id = %s"
    assert db.execute(unused, [message_id]).fetchone() == ("pending", True)


def test_a_revision_changes_nothing_while_workers_run_that_are_too_old_for_it(
    dsn: str,
    db: psycopg.Connection,
    started: Callable[..., WorkerProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_revision(tmp_path, monkeypatch, CONTRACT)
    worker = started()
    names = "SELECT name FROM pgoutbox.worker_view"
    ((name,),) = db.execute(names).fetchall()
    with pytest.raises(SchemaError) as caught:
        migrate.upgrade(dsn)
    assert str(caught.value) == (
        f"pgoutbox: workers run that are too old for revision 2: {name} ({pgoutbox.__version__}). "
        "Replace them by workers of version 99.1 or later. A killed worker counts for three minutes."
    )
    assert db.execute("SELECT to_regclass('pgoutbox.later')").fetchone() == (None,)
    assert worker.stop() == 0
    migrate.upgrade(dsn)
    assert migrate.current(dsn) == "pgoutbox_0002"
    applied = "SELECT number, lowest_package, applied_by FROM pgoutbox.revision ORDER BY number"
    version = pgoutbox.__version__
    assert db.execute(applied).fetchall() == [(1, "0.1", version), (2, "99.1", version)]


def test_a_worker_that_starts_during_such_a_revision_claims_nothing(
    db: psycopg.Connection, connect: Connect, start_worker: StartWorker
) -> None:
    """However long the migration takes: the report waits for its lock again and again."""
    message_id = enqueue(db, "mail")
    migration = connect()
    migration.execute(NOTE)
    worker = start_worker(APPLICATION, lock_timeout_seconds="0.1")
    waits = "SELECT count(*) FROM pg_locks WHERE relation = 'pgoutbox.worker'::regclass AND NOT granted"
    for expected in (1, 0, 1):
        wait_until(lambda count=expected: db.execute(waits).fetchone() == (count,), lambda: worker.log)  # type: ignore[misc]
    migration.commit()
    expect_end(worker)
    assert db.execute(ATTEMPTS, [message_id]).fetchone() == ("pending", 0)


def test_a_later_revision_that_needs_less_lets_no_older_package_in_again(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    db.execute(LATER)
    db.execute("SELECT pgoutbox._note_revision(3, '0.1', '99.2', 'y')")
    expect_end(start_worker(APPLICATION))
    assert db.execute("SELECT pgoutbox._require_package('99.1')").fetchone() == (3,)


@pytest.mark.parametrize(
    ("lowest", "package", "is_refused"),
    [
        ("0.10", "0.9.9", True),
        ("0.9", "0.10", False),
        ("0.2.1", "0.2", True),
        ("0.2", "0.2.0", False),
        ("1.0", "1.0rc1", False),
    ],
)
def test_versions_are_compared_number_by_number(
    db: psycopg.Connection, lowest: str, package: str, is_refused: bool
) -> None:
    db.execute("SELECT pgoutbox._note_revision(2, %s, '99.1', 'x')", [lowest])
    with (
        pytest.raises(psycopg.Error, match=f"needs version {lowest} of the package or a later one, and this is")
        if is_refused
        else contextlib.nullcontext()
    ):
        db.execute("SELECT pgoutbox._require_package(%s)", [package])


def test_a_run_that_has_ended_holds_up_no_revision(db: psycopg.Connection, start_worker: StartWorker) -> None:
    worker = start_worker(APPLICATION, "--once")
    assert worker.wait() == 0, worker.log
    assert db.execute("SELECT ended_at IS NOT NULL FROM pgoutbox.worker_view").fetchall() == [(True,)]
    db.execute(NOTE)
    assert db.execute("SELECT max(number) FROM pgoutbox.revision").fetchone() == (2,)


def test_a_revision_that_is_applied_again_counts_with_its_last_row(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    """A downgrade may have left the row of the first time."""
    row = "SELECT lowest_package, applied_by, digest, applied_at FROM pgoutbox.revision WHERE number = 2"
    db.execute(NOTE)
    ((*_, first_at),) = db.execute(row).fetchall()
    db.execute("SELECT pgoutbox._note_revision(2, '0.1', '99.2', 'y')")
    ((*values, last_at),) = db.execute(row).fetchall()
    assert values == ["0.1", "99.2", "y"]
    assert last_at > first_at
    message_id = enqueue(db, "mail")
    assert start_worker(APPLICATION, "--drain").wait() == 0
    assert db.execute(ATTEMPTS, [message_id]).fetchone() == ("sent", 1)


@pytest.mark.parametrize("command", ["migrate", "migrate downgrade base --yes"])
def test_a_revision_of_other_files_is_refused(dsn: str, db: psycopg.Connection, command: str) -> None:
    db.execute("UPDATE pgoutbox.revision SET digest = 'other', applied_by = '0.0.7'")
    done = run_process(*command.split(), dsn=dsn, COLUMNS="400")
    assert (done.exit_code, done.out) == (1, "")
    assert f"{OTHER_FILES.format('0.0.7')}; nothing was changed. To fix it, install the package" in done.err
    assert db.execute("SELECT count(*) FROM pgoutbox.revision").fetchone() == (1,)
    examined = run_process("doctor", dsn=dsn, COLUMNS="400")
    assert OTHER_FILES.format("0.0.7") in " ".join(examined.out.split())


def test_a_schema_of_an_unreleased_version_is_refused_and_the_advice_helps(dsn: str, db: psycopg.Connection) -> None:
    db.execute("DROP TABLE pgoutbox.revision")
    done = run_process("migrate", dsn=dsn)
    assert done.exit_code == 1
    assert OTHER_FILES.format("an unreleased version") in done.err
    assert "DROP SCHEMA pgoutbox CASCADE" in done.err
    db.execute("DROP SCHEMA pgoutbox CASCADE")
    assert run_process("migrate", dsn=dsn).exit_code == 0
    assert enqueue(db, "mail")
