"""Fixtures: a faulty proxy to the test's database, a judge in the database, and workers as processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.fleet import Fleet, fleet_on
from tests.support.judge import install_judge
from tests.support.proxy import Proxy, proxy_to

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import psycopg

    from tests.conftest import Connect


@pytest.fixture
def proxy(dsn: str, tmp_path: Path) -> Iterator[Proxy]:
    """Run a proxy to the test's database, on a Unix socket."""
    with proxy_to(dsn, tmp_path) as proxy:
        yield proxy


@pytest.fixture
def db(connect: Connect) -> psycopg.Connection:
    """Return an autocommit connection to the test's database that bypasses the proxy. The judge checks every change of
    a message."""
    connection = connect(autocommit=True)
    install_judge(connection)
    return connection


@pytest.fixture
def fleet(dsn: str, tmp_path: Path) -> Iterator[Fleet]:
    """Return a fleet of workers on the test's database."""
    with fleet_on(dsn, tmp_path) as fleet:
        yield fleet
