"""Real databases for the tests: one server per session, one migrated template, and one cloned database per test.

The server is the embedded PostgreSQL 18, or the one that PGOUTBOX_TEST_DSN names (a superuser's DSN). A test whose
server is missing is skipped with the reason; with CI=true it fails.
"""

from __future__ import annotations

import gc
import logging
import os
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, urlencode

import psycopg
import pytest
from _pytest.logging import LogCaptureHandler
from psycopg import sql as composable
from pytest_postgresql.janitor import DatabaseJanitor

from pgoutbox import Outbox, migrate
from pgoutbox.embedded import embedded_server
from pgoutbox.errors import ConfigurationError
from tests.support import later_schema
from tests.support.missing import server_missing
from tests.support.outbox_actions import settings_for
from tests.support.pooler import pooled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
    from datetime import date

    from playwright.sync_api import Browser

# A statement that unexpectedly waits for a lock fails instead of hanging. Tests that expect the wait use a longer
# limit, because the lock may be released slowly.
CONNECTION_OPTIONS = "-c lock_timeout=10s"
DATABASE_PREFIX = f"pgoutbox_{os.getpid()}"

# `make test` leaves out these folders, wherever they are, and the tests that are marked `slow`.
SLOW_FOLDERS = frozenset({"budget", "faults", "model", "promises", "soak"})

# `make coverage` measures this process. Programs that tests start are not measured: coverage.py writes to stderr.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COVERAGE_PROCESS_START", None)

_database_numbers = count(1)


# A value of the fixture `dsn`: a database on a server with fsync on. There a terminated session often has committed and
# does not answer. Without fsync it hardly ever does.
DURABLE = pytest.param("durable", marks=pytest.mark.slow)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Use three processes more than cores: many tests wait for other processes, for locks and for timeouts."""
    return (yield) + 3


def pytest_collection_finish() -> None:
    """Take the collected tests out of the garbage collection, which otherwise visits them again and again."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # Before pytest selects by markers.
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if SLOW_FOLDERS.intersection(item.path.relative_to(Path(__file__).parent).parts):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def _own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the logs of runs that tests start out of the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Remove the handlers of a command that ran in this process.

    Their stream is closed after the test, and each record of later tests would print a traceback.
    """
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - {*before}:
        if not isinstance(handler, LogCaptureHandler):
            root.removeHandler(handler)
    root.setLevel(level)


class Connect(Protocol):
    """Opens one more connection to the test's database, and closes it when the test ends."""

    def __call__(self, *, autocommit: bool = False) -> psycopg.Connection: ...


class AsyncConnect(Protocol):
    """Opens one more async connection to the test's database, and closes it when the test ends."""

    async def __call__(self, *, autocommit: bool = False) -> psycopg.AsyncConnection: ...


@dataclass(frozen=True, slots=True)
class Server:
    """A server, and a superuser's session that creates and drops databases."""

    host: str
    port: int
    user: str
    password: str | None
    maintenance_dbname: str
    admin: psycopg.Connection = field(repr=False)
    strategy: composable.SQL

    @classmethod
    @contextmanager
    def at(cls, dsn: str) -> Iterator[Server]:
        """Connect to the server of this DSN."""
        with psycopg.connect(dsn, autocommit=True) as admin:
            (fsync,) = admin.execute("SHOW fsync").fetchone() or ("on",)
            # To copy the files of a template is faster, unless the server has to flush each of them.
            strategy = composable.SQL("wal_log" if fsync == "on" else "file_copy")
            info = admin.info
            yield cls(info.host, info.port, info.user, info.password or None, info.dbname, admin, strategy)

    def dsn_for(self, database: str) -> str:
        """Return the URL of `database`, which psycopg, asyncpg and SQLAlchemy all accept."""
        password = f":{quote(self.password, safe='')}" if self.password else ""
        place = urlencode({"host": self.host, "port": self.port})
        return f"postgresql://{quote(self.user, safe='')}{password}@/{quote(database, safe='')}?{place}"

    @contextmanager
    def database(self, *, template: str = "template1") -> Iterator[str]:
        """Create a database and yield its name. Drop it at the end, and end all its sessions.

        This takes about 13 ms if the session already exists and fsync is off. It is faster than to empty a database and
        to prove that it is as new.
        """
        name = f"{DATABASE_PREFIX}_{next(_database_numbers)}"
        names = (composable.Identifier(name), composable.Identifier(template), self.strategy)
        self.admin.execute(composable.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY {}").format(*names))
        try:
            yield name
        finally:
            self.admin.execute(composable.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(names[0]))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Start or find the server of the session."""
    with ExitStack() as stack:
        dsn = os.environ.get("PGOUTBOX_TEST_DSN")
        try:
            if dsn is None:
                dsn = stack.enter_context(embedded_server(durable=False)).dsn
            found = stack.enter_context(Server.at(dsn))
        except (ConfigurationError, psycopg.OperationalError) as error:
            server_missing(f"no PostgreSQL server: {error}")
        yield found


@pytest.fixture(scope="session")
def durable_server() -> Iterator[Server]:
    """Start a server that waits for its disk at each commit, for tests with `DURABLE`."""
    try:
        with embedded_server() as started, Server.at(started.dsn) as server:
            # A fast disk behaves like a slow one. PostgreSQL ignores the delay if fsync is off.
            server.admin.execute("ALTER SYSTEM SET commit_delay = 5000")
            server.admin.execute("ALTER SYSTEM SET commit_siblings = 0")
            server.admin.execute("SELECT pg_reload_conf()")
            yield server
    except ConfigurationError as error:
        server_missing(f"no durable PostgreSQL server: {error}")


@pytest.fixture(scope="session")
def template_of_today(server: Server) -> Iterator[Callable[[], str]]:
    """Return the name of a migrated database. Each day has its own: which partitions exist depends on the day."""
    with ExitStack() as stack:

        @cache
        def template_of(_: date) -> str:
            janitor = DatabaseJanitor(
                host=server.host,
                port=server.port,
                user=server.user,
                password=server.password,
                dbname=f"{DATABASE_PREFIX}_{next(_database_numbers)}",
                maintenance_dbname=server.maintenance_dbname,
            )
            database = str(stack.enter_context(janitor).dbname)
            with psycopg.connect(server.dsn_for(database)) as connection:
                later_schema.upgrade(server.dsn_for(database), connection)
                connection.execute("UPDATE pgoutbox.home SET database_id = NULL")  # Its copies may send.
            return database

        yield lambda: template_of(datetime.now(UTC).date())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run one Chromium for the tests of a module. In other modules its event loop would disturb async tests."""
    from tests.support.browsers import open_browser

    with open_browser() as opened:
        yield opened


@pytest.fixture
def empty_dsn(server: Server) -> Iterator[str]:
    """Return the DSN of a new database without the schema."""
    with server.database() as database:
        yield server.dsn_for(database)


@pytest.fixture
def dsn(request: pytest.FixtureRequest, server: Server, template_of_today: Callable[[], str]) -> Iterator[str]:
    """Return the DSN of a new migrated database that only this test uses."""
    if getattr(request, "param", None) == "durable":
        durable: Server = request.getfixturevalue("durable_server")
        with durable.database() as database:
            migrate.upgrade(durable.dsn_for(database))
            yield durable.dsn_for(database)
        return
    with server.database(template=template_of_today()) as database:
        yield server.dsn_for(database)


@pytest.fixture
def connect(dsn: str) -> Iterator[Connect]:
    """Open sync connections to the test's database."""
    with ExitStack() as stack:

        def connect_once(*, autocommit: bool = False) -> psycopg.Connection:
            connection = psycopg.connect(dsn, autocommit=autocommit, options=CONNECTION_OPTIONS)
            stack.callback(connection.close)
            return connection

        yield connect_once


@pytest.fixture
async def aconnect(dsn: str) -> AsyncIterator[AsyncConnect]:
    """Open async connections to the test's database."""
    async with AsyncExitStack() as stack:

        async def connect_once(*, autocommit: bool = False) -> psycopg.AsyncConnection:
            connection = await psycopg.AsyncConnection.connect(dsn, autocommit=autocommit, options=CONNECTION_OPTIONS)
            stack.push_async_callback(connection.close)
            return connection

        yield connect_once


@pytest.fixture
def connection(connect: Connect) -> psycopg.Connection:
    """Return one connection to the test's database; its writes are visible to others only after a commit."""
    return connect()


@pytest.fixture(scope="session")
def shared_dsn(server: Server, template_of_today: Callable[[], str]) -> Iterator[str]:
    """Return the DSN of the migrated database that all tests with `rolled_back` share."""
    with server.database(template=template_of_today()) as database:
        yield server.dsn_for(database)


@pytest.fixture
def rolled_back(shared_dsn: str) -> Iterator[psycopg.Connection]:
    """Return a connection to the shared migrated database, rolled back at the end: cheap, for tests that never
    commit."""
    connection = psycopg.connect(shared_dsn, options=CONNECTION_OPTIONS)
    try:
        yield connection
        connection.rollback()
    finally:
        connection.close()


@pytest.fixture
def pooled_dsn(dsn: str, server: Server) -> Iterator[str]:
    """Return a DSN through pgbouncer, which runs every transaction in the same session."""
    with pooled(dsn, server, mode="transaction", size=1) as pooled_dsn:
        yield pooled_dsn


@pytest.fixture
def db(connect: Connect) -> psycopg.Connection:
    """Open an autocommit connection to the test's database."""
    return connect(autocommit=True)


@pytest.fixture
def outbox(dsn: str) -> Outbox:
    """Build an outbox without handlers, with settings that let only events wake a worker."""
    return Outbox(settings_for(dsn))
