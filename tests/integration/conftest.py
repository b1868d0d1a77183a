"""Fixtures: an autocommit connection and an outbox, beside the workers that a test starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgoutbox import Outbox
from tests.support.outbox_actions import settings_for

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect


@pytest.fixture
def db(connect: Connect) -> psycopg.Connection:
    """Open an autocommit connection to the test's database."""
    return connect(autocommit=True)


@pytest.fixture
def outbox(dsn: str) -> Outbox:
    """Build an outbox without handlers, with settings that let only events wake a worker."""
    return Outbox(settings_for(dsn))
