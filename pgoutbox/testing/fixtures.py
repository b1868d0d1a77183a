"""The fixtures and hooks of the pytest plugin: see `pgoutbox.testing`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql as composable

from pgoutbox.database import connections
from pgoutbox.outbox import Outbox
from pgoutbox.testing.driver import ALLOW_COPIES, OutboxDriver, sqlalchemy_url
from pgoutbox.worker import asgi

if TYPE_CHECKING:
    from sqlalchemy import URL

_DRIVERS = pytest.StashKey[list[OutboxDriver]]()


def pytest_configure() -> None:
    """Let `pgoutbox.lifespan` start no worker: it would deliver by itself, and on the database of the environment."""
    asgi.is_under_pytest = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the outcomes that handlers raised to the report of a failed test: their messages wait for a retry."""
    report = yield
    if report.when == "call" and report.failed:
        tracebacks = [text for driver in item.stash.get(_DRIVERS, []) for text in driver._retried()]
        if tracebacks:
            report.sections.append(("outcomes that pgoutbox handlers raised", "\n".join(tracebacks)))
    return report


@pytest.fixture(scope="session")
def pgoutbox_server_dsn() -> Iterator[str]:
    """DSN of a superuser on the server of this test session: PGOUTBOX_TEST_DSN, or else an embedded server."""
    given = os.environ.get("PGOUTBOX_TEST_DSN")
    if given is not None:
        yield given
        return
    from pgoutbox.embedded import embedded_server

    with embedded_server(durable=False) as server:
        yield server.dsn


@pytest.fixture(scope="session")
def pgoutbox_migrate() -> Callable[[str], None]:
    """Create the schema in the database of a DSN. Override it if your Alembic history contains pgoutbox's branch."""
    from pgoutbox.migrate import upgrade

    return upgrade


_database_numbers = itertools.count(1)


@contextlib.contextmanager
def _new_database(server_dsn: str, template: str = "template0") -> Iterator[str]:
    """Create a database, yield its name, and drop it despite open connections."""
    name = f"pgoutbox_test_{os.getpid()}_{next(_database_numbers)}"
    create = composable.SQL("CREATE DATABASE {} TEMPLATE {} ENCODING 'UTF8'")
    names = (composable.Identifier(name), composable.Identifier(template))
    with connections.connect(server_dsn, purpose="testing", answer_seconds=None) as connection:
        connection.execute(create.format(*names))
        try:
            yield name
        finally:
            connection.execute(composable.SQL("DROP DATABASE {} WITH (FORCE)").format(names[0]))


@pytest.fixture(scope="session")
def _pgoutbox_template(pgoutbox_server_dsn: str, pgoutbox_migrate: Callable[[str], None]) -> Iterator[str]:
    """The name of a migrated database, which each test copies."""
    with _new_database(pgoutbox_server_dsn) as name:
        template = psycopg.conninfo.make_conninfo(pgoutbox_server_dsn, dbname=name)
        pgoutbox_migrate(template)
        with connections.connect(template, purpose="testing", answer_seconds=None) as connection:
            connection.execute(ALLOW_COPIES)  # A test may run a worker of its own.
        with connections.connect(pgoutbox_server_dsn, purpose="testing", answer_seconds=None) as connection:
            # A database with connections cannot be copied, and the application's migration may have left some.
            database = composable.Identifier(name)
            connection.execute(composable.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(database))
            connection.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s", (name,)
            )
        yield name


@pytest.fixture
def pgoutbox_dsn(pgoutbox_server_dsn: str, _pgoutbox_template: str) -> Iterator[str]:
    """DSN of a new database with the schema, dropped after the test. Override it to use your own database."""
    with _new_database(pgoutbox_server_dsn, _pgoutbox_template) as name:
        yield psycopg.conninfo.make_conninfo(pgoutbox_server_dsn, dbname=name)


@pytest.fixture
def pgoutbox_url(pgoutbox_dsn: str) -> URL:
    """The database of `pgoutbox_dsn` for `create_engine`; `.set(drivername=...)` gives the URL of another driver."""
    return sqlalchemy_url(pgoutbox_dsn)


@pytest.fixture
def pgoutbox_driver(pgoutbox_dsn: str, request: pytest.FixtureRequest) -> Callable[[Outbox], OutboxDriver]:
    """Create an `OutboxDriver` for an application's outbox on the database of `pgoutbox_dsn`."""
    drivers: list[OutboxDriver] = request.node.stash.setdefault(_DRIVERS, [])

    def make(outbox: Outbox) -> OutboxDriver:
        drivers.append(OutboxDriver(outbox, pgoutbox_dsn))
        return drivers[-1]

    return make
