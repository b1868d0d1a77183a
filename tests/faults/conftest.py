"""The way to the test's database that fails when it is told to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.proxy import Proxy, proxy_to

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import psycopg

    from tests.conftest import Connect


@pytest.fixture
def proxy(dsn: str, tmp_path: Path) -> Iterator[Proxy]:
    """A proxy to the test's database, on a Unix socket."""
    with proxy_to(dsn, tmp_path) as proxy:
        yield proxy


@pytest.fixture
def db(connect: Connect) -> psycopg.Connection:
    """An autocommit connection to the test's database that no fault reaches."""
    return connect(autocommit=True)
