"""With one setting of the schema every enqueue notifies at its commit, also while no worker sleeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    from tests.conftest import Connect

SINGLE = "SELECT pgoutbox.enqueue('greet', '1')"
CALLS = {
    "single": (SINGLE, ["default"]),
    "queue": ("SELECT pgoutbox.enqueue('greet', '1', queue => 'other')", ["other"]),
    "coalesce key": ("SELECT pgoutbox.enqueue('greet', '1', coalesce_key => 'k')", ["default"]),
    "ordering key": ("SELECT pgoutbox.enqueue('greet', '1', ordering_key => 'k')", ["default"]),
    "dedupe key": ("SELECT pgoutbox.enqueue('greet', '1', dedupe_key => 'k')", ["default"]),
    "bulk": (
        (
            'SELECT pgoutbox.enqueue_many(\'[{"topic": "greet", "payload": 1}, {"topic": "greet", "payload": 2},'
            ' {"topic": "greet", "payload": 3, "queue": "other"}]\')'
        ),
        ["default", "other"],
    ),
}


@pytest.fixture
def listener(connect: Connect) -> psycopg.Connection:
    """Listen on the channel. No worker runs."""
    connection = connect(autocommit=True)
    connection.execute("LISTEN pgoutbox")
    return connection


@pytest.fixture
def producer(connect: Connect, db: psycopg.Connection) -> psycopg.Connection:
    """Connect and enqueue before the setting changes, as the pool of an application does."""
    connection = connect()
    connection.execute(SINGLE.encode())
    connection.commit()
    db.execute("SELECT pgoutbox.notify_every_enqueue(true)")
    return connection


def payloads(listener: psycopg.Connection, db: psycopg.Connection) -> list[str]:
    """Return the notifications until one that is sent now."""
    db.execute("SELECT pg_notify('pgoutbox', 'end of the test')")
    found: list[str] = []
    for notification in listener.notifies(timeout=30):
        if notification.payload == "end of the test":
            return sorted(found)
        found.append(notification.payload)
    raise AssertionError(found)


@pytest.mark.parametrize("name", CALLS)
def test_each_transaction_notifies_once_for_each_of_its_queues_at_its_commit(
    producer: psycopg.Connection, listener: psycopg.Connection, db: psycopg.Connection, name: str
) -> None:
    call, queues = CALLS[name]
    producer.execute(call.encode())
    producer.execute(call.encode())
    assert payloads(listener, db) == []
    producer.commit()
    assert payloads(listener, db) == queues


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_heard_of_a_transaction_that_rolls_back(
    producer: psycopg.Connection, listener: psycopg.Connection, db: psycopg.Connection, name: str
) -> None:
    producer.execute(CALLS[name][0].encode())
    producer.rollback()
    assert payloads(listener, db) == []


def test_a_savepoint_that_rolls_back_takes_its_notification_along(
    producer: psycopg.Connection, listener: psycopg.Connection, db: psycopg.Connection
) -> None:
    for end, heard in (("ROLLBACK TO SAVEPOINT s", ["default"]), ("RELEASE SAVEPOINT s", ["default", "other"])):
        producer.execute(CALLS["single"][0].encode())
        producer.execute("SAVEPOINT s")
        producer.execute(CALLS["queue"][0].encode())
        producer.execute(end.encode())
        producer.commit()
        assert payloads(listener, db) == heard


def test_an_enqueue_that_asks_for_no_notification_sends_none(
    producer: psycopg.Connection, listener: psycopg.Connection, db: psycopg.Connection
) -> None:
    producer.execute("SELECT pgoutbox.enqueue('greet', '1', notify => false)")
    producer.commit()
    assert payloads(listener, db) == []


def test_it_is_off_by_default_and_can_be_switched_off_again(
    producer: psycopg.Connection, listener: psycopg.Connection, db: psycopg.Connection
) -> None:
    db.execute("SELECT pgoutbox.notify_every_enqueue(false)")
    producer.execute(SINGLE.encode())
    producer.commit()
    assert payloads(listener, db) == []


def test_only_the_owner_of_the_schema_switches_it(db: psycopg.Connection) -> None:
    db.execute("SET ROLE pgoutbox_operator")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        db.execute("SELECT pgoutbox.notify_every_enqueue(true)")
