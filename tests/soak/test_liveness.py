"""Tests that the onlooker notes exactly the messages that claims have passed over."""

from __future__ import annotations

from typing import TYPE_CHECKING, LiteralString

import pytest

from tests.soak.liveness import Onlooker, install_liveness, passed_over
from tests.support.outbox_actions import begin, enqueue

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect


@pytest.fixture
def database(connect: Connect) -> psycopg.Connection:
    connection = connect(autocommit=True)
    install_liveness(connection)
    return connection


def noted(database: psycopg.Connection, waiting: int, later: int | None) -> bool:
    """Look, begin the later message, look twice, and return whether the waiting one was noted."""
    onlooker = Onlooker(patience_looks=1)
    onlooker.look(database)
    if later is not None:
        database.execute("UPDATE pgoutbox.message SET available_at = clock_timestamp() WHERE id = %s", [later])
        begin(database, later)
    onlooker.look(database)
    if later is not None:
        database.execute("UPDATE pgoutbox.message SET claimed_at = clock_timestamp() WHERE id = %s", [later])
    onlooker.look(database)
    found = passed_over(database)
    assert len(found) <= 1
    return found == [f"{waiting} in default"]


def test_a_due_message_that_waits_while_a_later_one_began_is_noted_once(database: psycopg.Connection) -> None:
    waiting, later = enqueue(database), enqueue(database)
    assert noted(database, waiting, later)


def test_a_lapsed_attempt_that_nobody_ends_while_later_messages_begin_is_noted(database: psycopg.Connection) -> None:
    waiting, later = enqueue(database), enqueue(database)
    begin(database, waiting, lease_seconds=-1)
    assert noted(database, waiting, later)


def test_a_message_that_is_rescheduled_waits_anew(database: psycopg.Connection) -> None:
    waiting, later = enqueue(database), enqueue(database)
    onlooker = Onlooker(patience_looks=2)
    for _ in range(4):
        onlooker.look(database)
        database.execute("UPDATE pgoutbox.message SET available_at = clock_timestamp() WHERE id = %s", [later])
        begin(database, later)
        database.execute("UPDATE pgoutbox.message SET available_at = clock_timestamp() WHERE id = %s", [waiting])
    onlooker.look(database)
    assert passed_over(database) == []


def test_a_message_that_waits_while_nothing_begins_is_not_noted(database: psycopg.Connection) -> None:
    assert not noted(database, enqueue(database), None)


@pytest.mark.parametrize(
    "excuse",
    [
        "UPDATE pgoutbox.message SET available_at = now() + interval '1 minute' WHERE id = %s",
        "UPDATE pgoutbox.message SET coalesce_key = 'k' WHERE id = %s",
        "INSERT INTO pgoutbox.queue (name, paused_at) SELECT 'default', now() WHERE %s > 0",
    ],
    ids=["not due", "superseded", "paused"],
)
def test_a_message_that_is_not_claimable_is_not_noted(database: psycopg.Connection, excuse: LiteralString) -> None:
    waiting, later = enqueue(database), enqueue(database)
    database.execute("INSERT INTO pgoutbox.key_head (scope, key, newest_id) VALUES ('greet', 'k', 999)")
    database.execute(excuse, [waiting])
    assert not noted(database, waiting, later)


@pytest.mark.parametrize("is_locked", [True, False])
def test_a_message_that_an_open_transaction_has_locked_is_noted_only_afterwards(
    database: psycopg.Connection, connect: Connect, is_locked: bool
) -> None:
    waiting, later = enqueue(database), enqueue(database)
    canceller = connect()
    canceller.execute("SELECT pgoutbox.cancel(%s)", [waiting])
    if not is_locked:
        canceller.rollback()
    assert noted(database, waiting, later) is not is_locked
    canceller.rollback()


def test_a_retry_that_waits_for_its_time_does_not_count_as_begun(database: psycopg.Connection) -> None:
    """Its row has the time of the attempt before, and the due time of the next one."""
    waiting, later = enqueue(database), enqueue(database)
    begin(database, later)
    database.execute(
        "UPDATE pgoutbox.message SET state = 'pending', lane = 1, available_at = now() + interval '1 s' WHERE id = %s",
        [later],
    )
    assert not noted(database, waiting, None)
