"""Tests what a person reads if the schema, its version table and the package do not belong together, and that the
advice helps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

import pgoutbox
from pgoutbox import migrate
from tests.support.catalog import catalog
from tests.support.command_line import Done, run_process
from tests.support.dump import dump_of, run_script
from tests.support.roles import login

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Server

pytestmark = pytest.mark.slow

VERSION: Final = pgoutbox.__version__
HINT: Final = (
    "run: pgoutbox migrate (or: alembic upgrade heads, where your application's history includes it; if that does "
    "nothing, run: pgoutbox doctor)"
)
STAMPED: Final = (
    "pgoutbox.alembic_version names revision pgoutbox_0001, but the database has no tables of pgoutbox",
    "run by psql: DELETE FROM pgoutbox.alembic_version WHERE version_num = 'pgoutbox_0001'; then run: pgoutbox migrate",
)
STAMPED_AS_LATER: Final = "pgoutbox.alembic_version names revision pgoutbox_0002, but the schema has pgoutbox_0001"
CORRECTION: Final = (
    "run by psql: UPDATE pgoutbox.alembic_version SET version_num = 'pgoutbox_0001' "
    "WHERE version_num = 'pgoutbox_0002'; then run: pgoutbox migrate"
)
RECORD: Final = (
    "run by psql, as the role that migrates: CREATE TABLE IF NOT EXISTS pgoutbox.alembic_version "
    "(version_num varchar(32) PRIMARY KEY); INSERT INTO pgoutbox.alembic_version VALUES ('pgoutbox_0001'); "
    "then run: pgoutbox migrate"
)
UNRECORDED: Final = ("the schema pgoutbox has tables, but no version table names their revision", RECORD)
LATER: Final = (
    f"the schema pgoutbox is at pgoutbox_0002, and this version of the package ({VERSION}) ends at pgoutbox_0001; "
    "nothing was changed. Install the version that migrated it: pip install -U pgoutbox"
)
FOREIGN: Final = (
    "the tables in schema pgoutbox belong to another Alembic history{}; "
    "run `alembic upgrade heads` in the application that created them"
)
MISSING: Final = f"the database has no schema pgoutbox; {HINT}"


@pytest.fixture
def run(dsn: str) -> Callable[[str], Done]:
    return lambda command: run_process(*command.split(), dsn=dsn, COLUMNS="2000")


def expect_refusals(run: Callable[[str], Done], what: str, fix: str) -> None:
    """Every command that migrates or examines says both, and changes nothing."""
    for command in ("migrate", "migrate downgrade base --yes --delete-messages"):
        done = run(command)
        assert (done.exit_code, done.out, done.err) == (
            1,
            "",
            f"error: {what}; nothing was changed. To fix it, {fix}\n",
        )
    done = run("migrate --plan")
    assert (done.exit_code, done.err) == (1, f"error: {what}; {fix}\n")
    done = run("migrate current")
    assert (done.exit_code, done.err) == (0, "")
    assert f"({what}; {fix})" in done.out
    assert run("migrate current --json").json["fault"] == f"{what}; {fix}"
    examined = " ".join(run("doctor").out.split())
    assert what in examined
    assert fix in examined


def follow(dsn: str, run: Callable[[str], Done], advice: str) -> None:
    """Run the statements and the command of an advice."""
    (statements, command) = re.findall(r"run by psql(?:, as the role that migrates)?: (.*); then run: (.*)", advice)[0]
    run_script(dsn, statements)
    done = run(command.removeprefix("pgoutbox "))
    assert done.exit_code == 0, done.err
    assert migrate.state(dsn) == (migrate.head(), "pgoutbox", None)
    assert run("worker --app tests.support.app:outbox --once").exit_code == 0


def test_a_stamped_database_without_the_schema(dsn: str, db: psycopg.Connection, run: Callable[[str], Done]) -> None:
    before = catalog(dsn)
    db.execute("ALTER TABLE pgoutbox.alembic_version SET SCHEMA public")
    db.execute("DROP SCHEMA pgoutbox CASCADE")
    db.execute("CREATE SCHEMA pgoutbox")
    db.execute("ALTER TABLE alembic_version SET SCHEMA pgoutbox")
    expect_refusals(run, *STAMPED)
    for command in ("worker --app tests.support.app:outbox --once", "list"):
        done = run(command)
        assert (done.exit_code, MISSING in done.err) == (1, True), done.err
    follow(dsn, run, STAMPED[1])
    assert catalog(dsn) == before


def test_a_database_that_is_stamped_with_a_later_revision(
    dsn: str, db: psycopg.Connection, run: Callable[[str], Done]
) -> None:
    db.execute("UPDATE pgoutbox.alembic_version SET version_num = 'pgoutbox_0002'")
    expect_refusals(run, STAMPED_AS_LATER, CORRECTION)
    assert run("worker --app tests.support.app:outbox --once").exit_code == 0, "the schema itself is fine"
    follow(dsn, run, CORRECTION)


@pytest.mark.parametrize("lost", ["row", "table"])
def test_a_dump_that_is_restored_without_the_version(
    dsn: str, server: Server, run: Callable[[str], Done], lost: str
) -> None:
    option = "--exclude-table-data" if lost == "row" else "--exclude-table"
    dump = dump_of(dsn, f"{option}=pgoutbox.alembic_version")
    with server.database() as other:
        restored = server.dsn_for(other)
        run_script(restored, dump)

        def run_there(command: str) -> Done:
            return run(f"{command} --dsn {restored}")

        expect_refusals(run_there, *UNRECORDED)
        assert run_there("adopt --yes").exit_code == 0
        assert run_there("worker --app tests.support.app:outbox --once").exit_code == 0, "the schema itself is fine"
        follow(restored, run_there, UNRECORDED[1])


def test_a_schema_of_a_later_package(dsn: str, db: psycopg.Connection, run: Callable[[str], Done]) -> None:
    db.execute("UPDATE pgoutbox.alembic_version SET version_num = 'pgoutbox_0002'")
    db.execute("INSERT INTO pgoutbox.revision SELECT now(), 2, '0.1', '99.1', 'x'")
    for command in ("migrate", "migrate downgrade base --yes"):
        done = run(command)
        assert (done.exit_code, done.out, done.err) == (1, "", f"error: {LATER}\n")
    assert run("migrate current").out == "pgoutbox_0002 (newest: pgoutbox_0001)\n"
    assert run("worker --app tests.support.app:outbox --once").exit_code == 0
    assert "the schema has version 2" in run("doctor").out


@pytest.mark.parametrize("named", [True, False])
def test_the_schema_of_an_application(
    dsn: str, db: psycopg.Connection, run: Callable[[str], Done], named: bool
) -> None:
    """The version table of an application does not name the revision if one of its own depends on it."""
    db.execute("ALTER TABLE pgoutbox.alembic_version SET SCHEMA public")
    if not named:
        db.execute("UPDATE alembic_version SET version_num = 'club_0002'")
    expected = FOREIGN.format(" (public.alembic_version)" if named else "")
    if not named:
        expected += f". If `pgoutbox migrate` did, {RECORD}"
    for command in ("migrate", "migrate downgrade base --yes"):
        done = run(command)
        assert (done.exit_code, done.out, done.err) == (1, "", f"error: {expected}\n")
    assert run("migrate current").out == (
        "pgoutbox_0001 (up to date; migrated by the application's own Alembic history: "
        "upgrade it with `alembic upgrade heads`)\n"
    )


def test_a_version_table_that_the_role_may_not_read_raises_no_false_alarm(dsn: str, db: psycopg.Connection) -> None:
    db.execute("ALTER TABLE pgoutbox.alembic_version SET SCHEMA public")
    with login(dsn, "pgoutbox_viewer") as theirs:
        examined = run_process("doctor", dsn=theirs, COLUMNS="2000").out
    assert "no version table names" not in examined
    assert "the schema has version 1" in examined
