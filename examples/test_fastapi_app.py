"""Test the application with the pytest plugin: a real PostgreSQL, no worker, and no e-mail leaves the machine.

python -m pytest test_fastapi_app.py
"""

from collections.abc import Callable

import psycopg
import pytest
from fastapi.testclient import TestClient
from fastapi_app import app, outbox
from sqlalchemy import URL

from pgoutbox import Outbox
from pgoutbox.testing import OutboxDriver


@pytest.fixture(autouse=True)
def _database(pgoutbox_url: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", pgoutbox_url.render_as_string(hide_password=False))


@pytest.fixture
def driver(pgoutbox_driver: Callable[[Outbox], OutboxDriver]) -> OutboxDriver:
    """A driver that delivers on demand."""
    return pgoutbox_driver(outbox)


def test_a_new_member_is_welcomed(driver: OutboxDriver) -> None:
    with TestClient(app) as client:
        assert client.post("/members", json={"email": "ada@example.org"}).status_code == 201
    driver.run_pass()
    assert [delivery.message.destination for delivery in driver.deliveries] == ["mailto:ada@example.org"]


def test_a_commit_that_fails_is_an_error_and_enqueues_nothing(driver: OutboxDriver, pgoutbox_dsn: str) -> None:
    with TestClient(app, raise_server_exceptions=False) as client:
        with psycopg.connect(pgoutbox_dsn) as connection:
            connection.execute("CREATE TABLE invited (email text PRIMARY KEY)")
            connection.execute("ALTER TABLE member ADD FOREIGN KEY (email) REFERENCES invited INITIALLY DEFERRED")
        assert client.post("/members", json={"email": "eve@example.org"}).status_code == 500
    driver.assert_enqueued("mail.welcome", count=0)
