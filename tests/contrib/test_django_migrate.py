"""Tests `manage.py migrate` as people run it: forwards, back, twice at once, with its options, and on wrong schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import psycopg
import pytest

import pgoutbox
from pgoutbox import migrate
from tests.support.catalog import catalog
from tests.support.dump import run_script
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.django_project import Project

pytestmark = pytest.mark.slow

RESULTS: Final = "pgoutbox_task_result"
AT_HEAD: Final = "pgoutbox: the schema is at pgoutbox_0001"
OTHER_FILES: Final = (
    "revision pgoutbox_0001 of this database was applied by pgoutbox 0.0.7 from other files than those of this package "
    f"({pgoutbox.__version__})"
)


def has(project: Project, *tables: str) -> list[bool]:
    with psycopg.connect(project.dsn) as connection:
        return [
            connection.execute("SELECT to_regclass(%s) IS NOT NULL", [table]).fetchone() == (True,) for table in tables
        ]


def test_the_schema_is_that_of_pgoutbox_migrate(new_project: Project, dsn: str) -> None:
    assert AT_HEAD in new_project.call("migrate")
    assert catalog(new_project.dsn) == catalog(dsn)
    assert AT_HEAD not in new_project.call("migrate")


def test_zero_keeps_the_messages_and_migrate_brings_the_results_back(project: Project) -> None:
    project.call("pgoutbox", "enqueue", "mail.welcome", "{}")
    assert "Unapplying pgoutbox.0001_initial" in project.call("migrate", "pgoutbox", "zero")
    assert has(project, RESULTS, "pgoutbox.message") == [False, True]
    assert "mail.welcome" in project.call("pgoutbox", "list")
    assert "Applying pgoutbox.0001_initial" in project.call("migrate")
    assert has(project, RESULTS, "pgoutbox.message") == [True, True]
    assert "mail.welcome" in project.call("pgoutbox", "list")


def test_the_removal_of_the_page_and_back(project: Project) -> None:
    project.call("migrate", "pgoutbox", "zero")
    project.call("pgoutbox", "migrate", "downgrade", "base", "--yes")
    assert has(project, RESULTS, "pgoutbox.message") == [False, False]
    assert AT_HEAD in project.call("migrate")
    assert has(project, RESULTS, "pgoutbox.message") == [True, True]


def test_results_of_tasks_stop_zero_in_words(project: Project) -> None:
    with psycopg.connect(project.dsn) as connection:
        connection.execute("INSERT INTO pgoutbox_task_result VALUES (1, now(), 1, '{}')")
    assert (
        "CommandError: 1 results of tasks would be deleted. If nobody needs them, stop the workers and delete the rows "
        "of pgoutbox_task_result first"
    ) in project.call("migrate", "pgoutbox", "zero", code=1)
    assert has(project, RESULTS) == [True]


def test_two_at_once_wait_for_each_other(project: Project) -> None:
    """Django's own migrations are applied: Django itself has no lock for them."""
    with psycopg.connect(project.dsn, autocommit=True) as db, psycopg.connect(project.dsn) as gate:
        db.execute("DROP SCHEMA pgoutbox CASCADE")
        gate.execute("CREATE SCHEMA pgoutbox")  # Like a run that has just begun.
        runs = [project.start("migrate") for _ in range(2)]
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'pgoutbox migrate' AND wait_event_type = 'Lock'"
        )
        wait_until(lambda: db.execute(waiting).fetchone() == (2,), lambda: f"{[run.poll() for run in runs]}")
        gate.rollback()
        assert [run.wait() for run in runs] == [0, 0]
    assert migrate.state(project.dsn) == (migrate.head(), "pgoutbox", None)


def test_a_fake_migration_brings_the_schema_and_no_results(new_project: Project) -> None:
    new_project.call("migrate", "auth")
    new_project.call("migrate", "--fake", "pgoutbox")
    assert has(new_project, RESULTS, "pgoutbox.message") == [False, True]
    new_project.call("migrate", "--fake", "pgoutbox", "zero")
    new_project.call("migrate", "pgoutbox")
    assert has(new_project, RESULTS, "pgoutbox.message") == [True, True]


def test_plan_and_sql_change_nothing_and_those_of_pgoutbox_show_its_schema(new_project: Project, dsn: str) -> None:
    assert "pgoutbox.0001_initial" in new_project.call("migrate", "--plan")
    assert "schema pgoutbox: base -> pgoutbox_0001" in new_project.call("pgoutbox", "migrate", "--plan")
    statements = new_project.call("sqlmigrate", "pgoutbox", "0001")
    assert f'CREATE TABLE "{RESULTS}"' in statements
    assert "message_view" not in statements
    script = new_project.call("pgoutbox", "migrate", "--sql")
    assert has(new_project, "django_migrations", "pgoutbox.message") == [False, False]
    run_script(new_project.dsn, script)
    assert catalog(new_project.dsn) == catalog(dsn)
    assert AT_HEAD not in new_project.call("migrate"), "the script has done it"
    assert has(new_project, RESULTS) == [True]


def test_a_revision_of_other_files_stops_migrate_and_check_names_it(project: Project) -> None:
    with psycopg.connect(project.dsn) as connection:
        connection.execute("UPDATE pgoutbox.revision SET digest = 'other', applied_by = '0.0.7'")
    shown = project.call("migrate", code=1)
    assert f"CommandError: {OTHER_FILES}; nothing was changed. To fix it, install" in shown
    assert "Traceback" not in shown
    warned = project.call("check", "--database", "default")
    assert f"(pgoutbox.schema-faulty) {OTHER_FILES}" in warned


def test_a_stamped_schema_stops_migrate_and_check_names_it(project: Project) -> None:
    with psycopg.connect(project.dsn) as connection:
        connection.execute("UPDATE pgoutbox.alembic_version SET version_num = 'pgoutbox_0002'")
    what = "pgoutbox.alembic_version names revision pgoutbox_0002, but the schema has pgoutbox_0001"
    assert f"CommandError: {what}" in project.call("migrate", code=1)
    assert f"(pgoutbox.schema-faulty) {what}" in project.call("check", "--database", "default")
