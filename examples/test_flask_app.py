"""Test the application with the pytest plugin: a real PostgreSQL, and no e-mail leaves the machine.

python -m pytest test_flask_app.py
"""

from collections.abc import Callable, Iterator

import pytest
from flask.testing import FlaskClient
from flask_app import create_app, db, outbox
from sqlalchemy import URL

from pgoutbox import Outbox
from pgoutbox.testing import OutboxDriver


@pytest.fixture
def client(pgoutbox_url: URL, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlaskClient]:
    """A client of the application on the database of the test."""
    monkeypatch.setenv("DATABASE_URL", pgoutbox_url.render_as_string(hide_password=False))
    app = create_app()
    yield app.test_client()
    with app.app_context():
        db.engine.dispose()


@pytest.fixture
def driver(pgoutbox_driver: Callable[[Outbox], OutboxDriver]) -> OutboxDriver:
    """A driver that delivers on demand."""
    return pgoutbox_driver(outbox)


def test_a_new_member_is_welcomed(client: FlaskClient, driver: OutboxDriver) -> None:
    assert client.post("/members", json={"email": "ada@example.org"}).status_code == 201
    driver.run_pass()
    assert [delivery.message.destination for delivery in driver.deliveries] == ["mailto:ada@example.org"]


def test_a_member_who_joins_twice_is_welcomed_once(client: FlaskClient, driver: OutboxDriver) -> None:
    answers = [client.post("/members", json={"email": "ada@example.org"}).status_code for _ in range(2)]
    assert answers == [201, 500]
    driver.assert_enqueued("mail.welcome", count=1)
