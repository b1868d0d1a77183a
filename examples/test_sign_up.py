"""Test an application with the pytest plugin: real statements and claims, and nothing leaves the machine.

python -m pytest examples/test_sign_up.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from examples import sign_up
from pgoutbox import CancelResult, Email, Outbox, Sent, State, Transient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgoutbox.testing import OutboxDriver


@pytest.fixture
def connection(pgoutbox_dsn: str) -> Iterator[psycopg.Connection]:
    """A connection of the application."""
    with psycopg.connect(pgoutbox_dsn) as connection:
        sign_up.create_tables(connection)
        connection.commit()
        yield connection


@pytest.fixture
def driver(pgoutbox_driver: Callable[[Outbox], OutboxDriver]) -> OutboxDriver:
    """A driver that delivers on demand."""
    return pgoutbox_driver(sign_up.outbox)


def test_a_member_is_welcomed(connection: psycopg.Connection, driver: OutboxDriver) -> None:
    sign_up.join(connection, "ada@example.org")
    connection.commit()
    driver.run_pass()
    (delivery,) = driver.deliveries
    assert delivery.message.destination == "mailto:ada@example.org"
    assert isinstance(delivery.content, Email)
    assert delivery.content.subject == "Welcome"


def test_a_rollback_removes_the_welcome(connection: psycopg.Connection, driver: OutboxDriver) -> None:
    sign_up.join(connection, "ada@example.org")
    connection.rollback()
    driver.assert_enqueued("mail.welcome", count=0)


def test_a_busy_server_is_tried_again(connection: psycopg.Connection, driver: OutboxDriver) -> None:
    sign_up.join(connection, "ada@example.org")
    connection.commit()
    driver.answer_with(lambda delivery: Transient("451 busy") if delivery.message.attempt_count == 1 else Sent())
    driver.run_pass()
    assert driver.messages(state=State.PENDING)[0].last_error == "451 busy"
    driver.make_due()
    driver.run_pass()
    assert driver.messages(state=State.SENT)[0].attempt_count == 2


def test_a_member_who_left_gets_no_welcome(connection: psycopg.Connection, driver: OutboxDriver) -> None:
    sign_up.join(connection, "ada@example.org")
    assert sign_up.leave(connection, "ada@example.org") is CancelResult.CANCELLED
    connection.commit()
    driver.drain()
    assert driver.deliveries == []
    assert driver.messages(state=State.CANCELLED)
