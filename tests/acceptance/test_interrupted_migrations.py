"""Tests that a migration that ends in the middle changes nothing, and that the next one succeeds."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from pgoutbox import migrate
from pgoutbox.testing import sqlalchemy_url
from tests.support.catalog import catalog
from tests.support.django_project import Project
from tests.support.dump import run_script
from tests.support.forks import LIBRARIES, Fork, forks, without_settings
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.slow

# The first view is created after all tables and functions. A run waits there for a lock, whatever its limits are.
STOP_AT_THE_FIRST_VIEW: Final = """
CREATE FUNCTION public.stop() RETURNS event_trigger LANGUAGE plpgsql SET lock_timeout = 0 AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(7);
END
$$;
CREATE EVENT TRIGGER stop ON ddl_command_start WHEN TAG IN ('CREATE VIEW') EXECUTE FUNCTION public.stop();
"""
STOPPED: Final = """
SELECT l.pid FROM pg_locks AS l
WHERE l.locktype = 'advisory' AND NOT l.granted
    AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
"""
ENV: Final = """
from alembic import context
from sqlalchemy import create_engine, pool

with create_engine({url!r}, poolclass=pool.NullPool{options}).connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
"""
INI: Final = """
[alembic]
script_location = %(here)s
version_locations = %(here)s/versions pgoutbox:migrations/sql/../versions
path_separator = space
"""
TERMINATED: Final = (
    "error: PostgreSQL: terminating connection due to administrator command [57P01]; "
    "the server is going down, or somebody has ended the session; try again\n"
)
WAYS: Final = ("pgoutbox", "alembic", "django")


@dataclass
class Way:
    """A command that migrates, in a project of its own."""

    command: Sequence[str]
    directory: Path
    dsn: str
    modules: tuple[str, ...] = LIBRARIES

    @classmethod
    def create(cls, name: str, directory: Path, dsn: str) -> Way:
        """Write the files of the project."""
        match name:
            case "pgoutbox":
                return cls(("-m", "pgoutbox", "migrate"), directory, dsn)
            case "alembic" | "autocommit":
                url = sqlalchemy_url(dsn).render_as_string(hide_password=False)
                (directory / "versions").mkdir()
                (directory / "env.py").write_text(
                    ENV.format(url=url, options=', isolation_level="AUTOCOMMIT"' if name == "autocommit" else "")
                )
                (directory / "alembic.ini").write_text(INI)
                return cls(("-m", "alembic.config", "upgrade", "heads"), directory, dsn)
            case _:
                Project.create(directory, dsn).call("migrate", "auth", "-v0")
                with psycopg.connect(dsn) as connection:
                    connection.execute("DROP SCHEMA pgoutbox CASCADE")
                return cls(("manage.py", "migrate"), directory, dsn)

    @property
    def output(self) -> Path:
        return self.directory / "output"

    def start(self) -> Fork:
        """Start the command, which writes to `output`."""
        variables = without_settings(os.environ) | {"PGOUTBOX_DSN": self.dsn}
        with self.output.open("w") as output, Path(os.devnull).open() as nothing:
            streams = (nothing.fileno(), output.fileno(), output.fileno())
            return forks(*self.modules).start(self.command, cwd=self.directory, env=variables, streams=streams)


@contextmanager
def stopped_in_the_middle(dsn: str) -> Iterator[psycopg.Connection]:
    """Stop each migration at its first view, until the block ends."""
    with psycopg.connect(dsn, autocommit=True) as db, psycopg.connect(dsn) as gate:
        db.execute(STOP_AT_THE_FIRST_VIEW)
        gate.execute("SELECT pg_advisory_xact_lock(7)")
        yield db


def has_objects(dsn: str) -> bool:
    with psycopg.connect(dsn) as connection:
        return connection.execute("SELECT to_regclass('pgoutbox.message') IS NOT NULL").fetchone() == (True,)


@pytest.mark.parametrize("end", ["killed", "terminated"])
@pytest.mark.parametrize("name", WAYS)
def test_a_migration_that_ends_in_the_middle_changes_nothing_and_the_next_one_succeeds(
    tmp_path: Path, empty_dsn: str, dsn: str, name: str, end: str
) -> None:
    way = Way.create(name, tmp_path, empty_dsn)
    with stopped_in_the_middle(empty_dsn) as db:
        run = way.start()
        ((pid,),) = wait_until(lambda: db.execute(STOPPED).fetchall(), way.output.read_text)
        if end == "killed":
            run.send_signal(signal.SIGKILL)
            assert run.wait() == -signal.SIGKILL
        else:
            db.execute("SELECT pg_terminate_backend(%s)", [pid])
            assert run.wait() == 1
            assert "terminating connection" in way.output.read_text()
            if name == "pgoutbox":
                assert way.output.read_text() == TERMINATED
        assert not has_objects(empty_dsn)
    again = way.start()  # The server may still run the statement of the process that was killed.
    assert again.wait() == 0, way.output.read_text()
    assert migrate.state(empty_dsn) == (migrate.head(), "application" if name == "alembic" else "pgoutbox", None)
    assert [one for one in catalog(empty_dsn) if "alembic" not in one[1]] == [
        one for one in catalog(dsn) if "alembic" not in one[1]
    ]


def test_an_upgrade_without_a_transaction_that_ends_in_the_middle_names_the_way_out(
    tmp_path: Path, empty_dsn: str
) -> None:
    way = Way.create("autocommit", tmp_path, empty_dsn)
    with stopped_in_the_middle(empty_dsn) as db:
        run = way.start()
        ((pid,),) = wait_until(lambda: db.execute(STOPPED).fetchall(), way.output.read_text)
        db.execute("SELECT pg_terminate_backend(%s)", [pid])
        assert run.wait() == 1
    assert has_objects(empty_dsn)
    assert way.start().wait() != 0
    assert (
        "the schema pgoutbox is incomplete: an upgrade with AUTOCOMMIT ended in the middle. If no message matters, "
        "run by psql: DROP SCHEMA pgoutbox CASCADE; then run: alembic upgrade heads"
    ) in way.output.read_text()
    run_script(empty_dsn, "DROP SCHEMA pgoutbox CASCADE")
    assert way.start().wait() == 0, way.output.read_text()
    assert migrate.state(empty_dsn) == (migrate.head(), "application", None)
