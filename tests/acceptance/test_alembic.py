"""Tests that the Alembic recipes of docs/how-to/migrations.md work in projects that `alembic init` has created."""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import alembic.config
import psycopg
import pytest
from alembic.script import ScriptDirectory

from pgoutbox import migrate
from pgoutbox.message import State
from pgoutbox.testing import sqlalchemy_url
from tests.support.catalog import catalog
from tests.support.command_line import run_process
from tests.support.dump import dump_of, run_script
from tests.support.messages import put
from tests.support.outbox_actions import enqueue
from tests.support.pages import DOCS, blocks_of
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

    from tests.conftest import Server

pytestmark = pytest.mark.slow

PAGE: Final = DOCS / "how-to/migrations.md"
(INI,) = (block.text for block in blocks_of(PAGE, "ini"))
(LABEL,) = (block.text for block in blocks_of(PAGE, "python") if block.directive == "")
BEFORE, NOW = zip(*re.findall(r"^\| `(alembic .*)` \| `(alembic .*)` \|$", PAGE.read_text(), re.MULTILINE), strict=True)
(REMOVAL,) = re.findall(r"`(alembic -x .*)`", PAGE.read_text())
(LOCK,) = re.findall(r"^ *(connection\.exec_driver_sql.*)$", PAGE.read_text(), re.MULTILINE)
(EXCLUSION,) = re.findall(r"^context\.configure\((include_schemas=True, .*)\)$", PAGE.read_text(), re.MULTILINE)
(DEPENDENCY,) = re.findall(r"`depends_on = (.*)`", PAGE.read_text())
MODELS: Final = "from sqlalchemy import Column, MetaData, Table, Text\n\nmetadata = MetaData()\n"

# A revision of a later release of pgoutbox.
LATER: Final = """
from pathlib import Path

from alembic import op

from pgoutbox.database import revisions
from pgoutbox.migrate import FORGET_REVISION, is_applied_by_another_run, note_revision

revision = "pgoutbox_0002"
down_revision = "pgoutbox_0001"
revisions.MIGRATIONS = Path(__file__).resolve().parents[1]


def upgrade():
    if is_applied_by_another_run(revision, down_revision):
        return
    op.execute("CREATE TABLE pgoutbox.later ()")
    op.execute(note_revision(2, lowest_package="0.1"))


def downgrade():
    op.execute(FORGET_REVISION)
    op.execute("DROP TABLE pgoutbox.later")
"""

# Autovacuum may wait too.
WAITING: Final = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND backend_type = 'client backend'
"""

# A command of Alembic takes a second, mostly for its imports, so the processes are forked from one that has done them.
PROCESSES: Final = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["alembic.config", "asyncpg", "pgoutbox.migrate", "sqlalchemy.ext.asyncio", __name__])


def type_in(line: str, directory: Path, output: Path, errors: Path) -> None:
    """Run a command of Alembic in this process."""
    os.chdir(directory)
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
    alembic.config.main(shlex.split(line.removeprefix("alembic ")))


def commands(directive: str) -> list[str]:
    """Return the lines of a block of the page."""
    (block,) = (block for block in blocks_of(PAGE, "sh") if block.directive == f"run: {directive}")
    return block.text.splitlines()


@dataclass
class Project:
    """A project of `alembic init`, with the tables of `models.py`."""

    directory: Path
    dsn: str
    driver: str = "psycopg"

    def __post_init__(self) -> None:
        self.run(f"alembic init --template {'async' if self.driver == 'asyncpg' else 'generic'} migrations")
        url = sqlalchemy_url(self.dsn).set(drivername=f"postgresql+{self.driver}").render_as_string(hide_password=False)
        self.edit("alembic.ini", "sqlalchemy.url", url.replace("%", "%%"))
        self.edit("migrations/env.py", "target_metadata", "__import__('models').metadata")
        (self.directory / "models.py").write_text(MODELS)
        self.add_table("member")

    def edit(self, name: str, option: str, value: str) -> None:
        """Give an option of a file another value."""
        path = self.directory / name
        changed, count = re.subn(
            rf"(?m)^({option}\b.*?) = .*$", lambda match: f"{match[1]} = {value}", path.read_text()
        )
        assert count == 1, f"{name}: {option}"
        path.write_text(changed)

    def add_table(self, name: str) -> None:
        with (self.directory / "models.py").open("a") as models:
            models.write(f"Table({name!r}, metadata, Column('name', Text, primary_key=True))\n")

    def add_pgoutbox(self) -> None:
        """Change alembic.ini as the page says."""
        locations, separator = INI.splitlines()[2:]
        self.edit("alembic.ini", "path_separator", f"{separator.partition(' = ')[2]}\n{locations}")

    def add_later_release(self) -> None:
        """Upgrade pgoutbox to a release with one more revision."""
        later = self.directory / "later"
        shutil.copytree(Path(migrate.version_location()).parent, later)
        (later / "sql_0002").mkdir()
        (later / "versions" / "0002_later.py").write_text(LATER)
        locations = INI.splitlines()[2].partition(" = ")[2]
        assert "pgoutbox:migrations" in locations
        self.edit("alembic.ini", "version_locations", locations.replace("pgoutbox:migrations", "%(here)s/later"))

    def add_to_env(self, option: str) -> None:
        """Give an option to `context.configure` in env.py."""
        path = self.directory / "migrations/env.py"
        changed, count = re.subn(r"target_metadata=target_metadata\b", rf"\g<0>, {option}", path.read_text())
        assert count == 2, "offline and online"
        path.write_text(changed)

    def add_lock(self) -> None:
        """Change env.py as the page says."""
        path = self.directory / "migrations/env.py"
        before, after = path.read_text().rsplit("context.run_migrations()", 1)
        indent = before.rpartition("\n")[2]
        path.write_text(f"{before}{LOCK}\n{indent}context.run_migrations(){after}")

    def run(self, line: str, *, refusal: str = "") -> str:
        """Run a command of Alembic and return its output. With `refusal`, it must fail with this text."""
        output, errors = self.directory / "output", self.directory / "errors"
        process = self.start(line, output, errors)
        process.join()
        printed = output.read_text()
        assert (process.exitcode != 0) == (refusal != ""), printed + errors.read_text()
        assert refusal in printed + errors.read_text()
        assert "Traceback" not in printed + errors.read_text()
        return printed

    def start(self, line: str, output: Path, errors: Path) -> ForkServerProcess:
        process = PROCESSES.Process(target=type_in, args=(line, self.directory, output, errors))
        process.start()
        return process

    def upgrade_in_three_processes(self) -> list[str]:
        """Run `alembic upgrade heads` three times at once; return the errors of the runs that failed."""
        files = [self.directory / f"replica-{number}" for number in range(3)]
        with psycopg.connect(self.dsn) as gate, psycopg.connect(self.dsn, autocommit=True) as observer:
            gate.execute("LOCK TABLE pg_catalog.pg_class IN SHARE MODE")  # Nobody can create a table.
            processes = [self.start("alembic upgrade heads", file, file) for file in files]
            wait_until(
                lambda: observer.execute(WAITING).fetchone() == (3,),
                lambda: f"not all of them wait: {[file.read_text() for file in files]}",
            )
            gate.rollback()
            for process in processes:
                process.join()
        return [file.read_text() for file, process in zip(files, processes, strict=True) if process.exitcode != 0]

    @property
    def revisions(self) -> list[Path]:
        return list((self.directory / "migrations/versions").glob("*.py"))

    def tables(self) -> set[str]:
        return tables_of(self.dsn)


def tables_of(dsn: str) -> set[str]:
    """Return the application's tables, `message` for pgoutbox, and `later` for its later revision."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public' OR tablename IN ('message', 'later')"
        ).fetchall()
        return {name for (name,) in rows} - {"alembic_version"}


def version_rows(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as connection:
        return {name for (name,) in connection.execute("SELECT version_num FROM alembic_version")}


def test_an_existing_project_takes_pgoutbox_in(tmp_path: Path, empty_dsn: str, server: Server) -> None:
    project = Project(tmp_path, empty_dsn)
    project.run("alembic revision --autogenerate -m first")
    project.run("alembic upgrade head")
    (first,) = project.revisions

    project.add_pgoutbox()
    project.edit(str(first.relative_to(tmp_path)), "branch_labels", LABEL.strip().partition(" = ")[2])
    upgrade, script, revision, undo, downgrade = NOW
    project.run(BEFORE[0], refusal="Multiple head revisions")
    project.run(BEFORE[1], refusal="Multiple head revisions")
    project.run(upgrade)
    project.add_table("place")
    project.run(BEFORE[2], refusal="Multiple heads")
    project.run(revision)
    (second,) = set(project.revisions) - {first}
    project.edit(str(second.relative_to(tmp_path)), "depends_on", DEPENDENCY)
    project.run(upgrade)
    assert project.tables() == {"member", "place", "message"}
    project.run("alembic check")
    with server.database() as other:
        run_script(server.dsn_for(other), project.run(script))
        assert tables_of(server.dsn_for(other)) == {"member", "place", "message"}
        assert catalog(server.dsn_for(other)) == catalog(empty_dsn)
        assert version_rows(server.dsn_for(other)) == version_rows(empty_dsn)

    project.run(BEFORE[-1], refusal="the outbox would be dropped")
    assert project.tables() == {"member", "place", "message"}
    project.run(undo)
    assert project.tables() == {"member", "message"}
    project.run(downgrade)
    assert project.tables() == {"message"}
    project.run(upgrade)
    with psycopg.connect(empty_dsn) as connection:
        enqueue(connection)
    project.run(REMOVAL)
    assert project.tables() == {"member"}


@pytest.mark.parametrize("state", ["nothing", "sent"])
def test_undoing_the_last_revision_never_drops_the_outbox(tmp_path: Path, empty_dsn: str, state: str) -> None:
    project = Project(tmp_path, empty_dsn)
    project.run(commands("first")[0])
    project.add_pgoutbox()
    project.run("alembic upgrade heads")
    project.add_table("place")
    for line in commands("then")[1:]:
        project.run(line)
    if state == "sent":
        with psycopg.connect(empty_dsn) as connection:
            put(connection, State.SENT)
    # Alembic takes the row of its table that it finds first. The last upgrade has moved that of the project.
    project.run("alembic downgrade -1", refusal="alembic downgrade YOUR_BRANCH@-1")
    assert project.tables() == {"member", "place", "message"}
    project.run("alembic downgrade club@-1")
    assert project.tables() == {"member", "message"}


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_replicas_that_upgrade_an_existing_project_at_once_all_succeed(
    tmp_path: Path, empty_dsn: str, driver: str
) -> None:
    project = Project(tmp_path, empty_dsn, driver)
    project.run(commands("first")[0])
    project.run("alembic upgrade heads")
    project.add_pgoutbox()
    assert project.upgrade_in_three_processes() == []
    assert project.tables() == {"member", "message"}
    assert migrate.state(empty_dsn) == (migrate.head(), "application", None)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_replicas_that_upgrade_an_empty_database_at_once_all_succeed_with_the_lock_of_the_page(
    tmp_path: Path, empty_dsn: str, driver: str
) -> None:
    project = Project(tmp_path, empty_dsn, driver)
    project.run(commands("first")[0])
    project.add_pgoutbox()
    project.add_lock()
    assert project.upgrade_in_three_processes() == []
    assert project.tables() == {"member", "message"}


def test_an_async_project_takes_pgoutbox_in(tmp_path: Path, empty_dsn: str) -> None:
    project = Project(tmp_path, empty_dsn, "asyncpg")
    project.add_pgoutbox()
    project.run("alembic upgrade heads")
    assert project.tables() == {"message"}
    project.run("alembic downgrade pgoutbox@base", refusal="the outbox would be dropped")
    project.run(REMOVAL)
    assert project.tables() == set()


@pytest.mark.parametrize("has_pgoutbox", [False, True])
def test_a_new_project_creates_its_first_revision(tmp_path: Path, empty_dsn: str, has_pgoutbox: bool) -> None:
    project = Project(tmp_path, empty_dsn)
    if has_pgoutbox:
        project.add_pgoutbox()
        (first,) = commands("first")
        project.run(first, refusal="Target database is not up to date")
        project.run(first.replace("--autogenerate ", ""), refusal="is not represented in current version locations")
    for line in commands("instead of first" if has_pgoutbox else "first"):
        project.run(line)
    if not has_pgoutbox:
        project.add_pgoutbox()
    project.add_table("place")
    for line in commands("then"):
        project.run(line)
    assert project.tables() == {"member", "place", "message"}
    assert sorted(path.stem.partition("_")[2] for path in project.revisions) == ["add_places", "first"]
    assert migrate.state(empty_dsn) == (migrate.head(), "application", None)


@pytest.mark.filterwarnings("ignore:The version_path_separator:DeprecationWarning")
@pytest.mark.parametrize("separator", ["path_separator = newline", "version_path_separator = newline"])
def test_each_location_may_have_its_own_line(tmp_path: Path, separator: str) -> None:
    home = tmp_path / "my project"
    (home / "migrations/versions").mkdir(parents=True)
    *head, locations, _ = INI.splitlines()
    lines = locations.replace(" = ", " =\n    ").replace("versions pgoutbox:", "versions\n    pgoutbox:")
    (home / "alembic.ini").write_text("\n".join((*head, lines, separator)))
    scripts = ScriptDirectory.from_config(alembic.config.Config(home / "alembic.ini"))
    assert [revision.revision for revision in scripts.walk_revisions()] == ["pgoutbox_0001"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_replicas_that_upgrade_a_database_that_is_a_revision_behind_at_once_all_succeed(
    tmp_path: Path, empty_dsn: str, driver: str
) -> None:
    project = Project(tmp_path, empty_dsn, driver)
    project.run(commands("first")[0])
    project.add_pgoutbox()
    project.run("alembic upgrade heads")
    project.add_later_release()
    assert project.upgrade_in_three_processes() == []
    assert project.tables() == {"member", "message", "later"}
    assert migrate.state(empty_dsn).revision == "pgoutbox_0002"


def test_replicas_that_upgrade_two_revisions_of_pgoutbox_at_once_all_succeed(tmp_path: Path, empty_dsn: str) -> None:
    project = Project(tmp_path, empty_dsn)
    project.run(commands("first")[0])
    project.run("alembic upgrade heads")
    project.add_pgoutbox()
    project.add_later_release()
    assert project.upgrade_in_three_processes() == []
    assert project.tables() == {"member", "message", "later"}
    assert "pgoutbox_0002" in version_rows(empty_dsn)


def test_replicas_that_upgrade_both_histories_at_once_all_succeed_with_the_lock_of_the_page(
    tmp_path: Path, empty_dsn: str
) -> None:
    project = Project(tmp_path, empty_dsn)
    project.run(commands("first")[0])
    project.add_pgoutbox()
    project.run("alembic upgrade heads")
    project.add_table("place")
    project.run(commands("then")[1])
    project.add_later_release()
    project.add_lock()
    assert project.upgrade_in_three_processes() == []
    assert project.tables() == {"member", "place", "message", "later"}


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_one_step_back_reverts_the_branch_that_it_names(tmp_path: Path, empty_dsn: str, driver: str) -> None:
    project = Project(tmp_path, empty_dsn, driver)
    project.run(commands("first")[0])
    project.add_pgoutbox()
    project.run("alembic upgrade heads")
    project.add_later_release()
    project.run("alembic upgrade heads")
    # Alembic takes the row of its table that it finds first: here that of the project.
    project.run("alembic downgrade -1")
    assert project.tables() == {"message", "later"}
    project.run("alembic upgrade heads")
    project.run("alembic downgrade pgoutbox@-1")
    assert project.tables() == {"member", "message"}
    assert version_rows(empty_dsn) >= {"pgoutbox_0001"}
    project.run("alembic downgrade pgoutbox@-1", refusal="FAILED: the outbox would be dropped")
    output = (project.directory / "output").read_text()
    assert "To undo a revision of your own, run: alembic downgrade YOUR_BRANCH@-1" in " ".join(output.split())
    assert "CONTEXT" not in output
    project.run("alembic -x pgoutbox_drop=yes downgrade pgoutbox@-1")
    assert project.tables() == {"member"}


def test_a_project_with_two_branches_of_its_own_takes_pgoutbox_in(tmp_path: Path, empty_dsn: str) -> None:
    project = Project(tmp_path, empty_dsn)
    project.run(commands("first")[0])
    project.run('alembic revision -m "shop" --branch-label shop --head base')
    project.add_pgoutbox()
    project.run("alembic upgrade heads")
    assert len(version_rows(empty_dsn)) == 3
    project.run("alembic downgrade shop@base")
    project.run("alembic downgrade base", refusal="the outbox would be dropped")
    project.run("alembic downgrade club@base")
    assert (project.tables(), version_rows(empty_dsn)) == ({"message"}, {"pgoutbox_0001"})
    project.run("alembic upgrade heads")
    project.run(REMOVAL)
    assert (project.tables(), len(version_rows(empty_dsn))) == ({"member"}, 2)


@pytest.mark.parametrize("all_schemas", [False, True])
def test_autogenerate_finds_nothing_of_pgoutbox(tmp_path: Path, empty_dsn: str, all_schemas: bool) -> None:
    project = Project(tmp_path, empty_dsn)
    project.run(commands("first")[0])
    project.add_pgoutbox()
    project.run("alembic upgrade heads")
    before = set(project.revisions)
    if all_schemas:
        project.add_to_env("include_schemas=True")
        project.run("alembic check", refusal="New upgrade operations detected")
        project.add_to_env(
            EXCLUSION.partition(", ")[2].replace(
                "include_name=", "include_name=__import__('pgoutbox.migrate').migrate."
            )
        )
    project.run("alembic check")
    project.run(commands("then")[1])
    (made,) = set(project.revisions) - before
    assert "pgoutbox" not in made.read_text()
    assert "op." not in made.read_text()


STAMPED: Final = "public.alembic_version names revision pgoutbox_0001, but the database has no tables of pgoutbox"
UNSTAMP: Final = "DELETE FROM public.alembic_version WHERE version_num = 'pgoutbox_0001'"


def test_a_project_that_is_stamped_without_the_schema_reads_what_is_wrong(tmp_path: Path, empty_dsn: str) -> None:
    project = Project(tmp_path, empty_dsn)
    project.run(commands("first")[0])
    project.run("alembic upgrade heads")
    project.add_pgoutbox()
    project.run("alembic stamp heads")
    project.run("alembic upgrade heads")
    assert project.tables() == {"member"}, "Alembic believes its table"
    refused = run_process("migrate", dsn=empty_dsn)
    advice = f"run by psql: {UNSTAMP}; then run: alembic upgrade heads"
    assert refused.err == f"error: {STAMPED}; nothing was changed. To fix it, {advice}\n"
    examined = " ".join(run_process("doctor", dsn=empty_dsn, COLUMNS="2000").out.split())
    assert STAMPED in examined
    assert advice in examined
    worker = run_process("worker", "--app", "tests.support.app:outbox", "--once", dsn=empty_dsn)
    assert worker.exit_code == 1
    assert "the database has no schema pgoutbox; run: pgoutbox migrate (or: alembic upgrade heads" in worker.err
    assert "if that does nothing, run: pgoutbox doctor" in worker.err
    run_script(empty_dsn, UNSTAMP)
    project.run("alembic upgrade heads")
    assert migrate.state(empty_dsn) == (migrate.head(), "application", None)


@pytest.mark.parametrize("origin", ["pgoutbox migrate", "dump"])
def test_a_project_that_meets_the_schema_without_its_row_reads_how_to_continue(
    tmp_path: Path, empty_dsn: str, dsn: str, origin: str
) -> None:
    project = Project(tmp_path, empty_dsn)
    project.run(commands("first")[0])
    project.run("alembic upgrade heads")
    project.add_pgoutbox()
    if origin == "dump":
        run_script(empty_dsn, dump_of(dsn, "--exclude-table=pgoutbox.alembic_version"))
    else:
        assert run_process("migrate", dsn=empty_dsn).exit_code == 0
    project.run(
        "alembic upgrade heads",
        refusal="the schema pgoutbox exists, and alembic_version does not name its revision: `pgoutbox migrate` or a "
        "restore has created it. To continue it in this history, run: alembic stamp pgoutbox_0001, and by psql: DROP "
        "TABLE IF EXISTS pgoutbox.alembic_version",
    )
    project.run("alembic stamp pgoutbox_0001")
    run_script(empty_dsn, "DROP TABLE IF EXISTS pgoutbox.alembic_version")
    project.run("alembic upgrade heads")
    assert migrate.state(empty_dsn) == (migrate.head(), "application", None)
    assert len(version_rows(empty_dsn)) == 2
