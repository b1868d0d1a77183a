"""Tests that an enqueue ends an older message of its coalesce key that is not due yet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import NewMessage, Outbox
from tests.support.outbox_actions import claim, enqueue, make_due, row_of, state_of

if TYPE_CHECKING:
    from tests.conftest import Connect

DAY = timedelta(days=1)


def tomorrow() -> datetime:
    return datetime.now(UTC) + DAY


@pytest.mark.parametrize("is_bulk", [False, True], ids=["one", "bulk"])
def test_a_scheduled_message_is_skipped_when_it_is_superseded(
    outbox: Outbox, connection: psycopg.Connection, *, is_bulk: bool
) -> None:
    older = enqueue(connection, coalesce_key="k", available_at=tomorrow())
    other = enqueue(connection, coalesce_key="l", available_at=tomorrow())
    if is_bulk:
        (newer,) = outbox.enqueue_many(connection, [NewMessage("greet", None, coalesce_key="k", delay=DAY)]).ids
    else:
        newer = enqueue(connection, coalesce_key="k", available_at=tomorrow())
    row = row_of(connection, older)
    assert (row.state, row.superseded_by, row.skip_reason) == ("skipped", newer, f"superseded by {newer}")
    assert [state_of(connection, i) for i in (other, newer)] == ["pending", "pending"]


def test_of_many_reminders_one_is_owed(connection: psycopg.Connection) -> None:
    ids = [enqueue(connection, coalesce_key="k", available_at=tomorrow()) for _ in range(50)]
    assert [state_of(connection, i) for i in ids] == ["skipped"] * 49 + ["pending"]
    assert connection.execute("SELECT id, reason FROM pgoutbox.waiting_view").fetchall() == [(ids[-1], "scheduled")]


def test_a_retry_in_its_back_off_is_skipped(connection: psycopg.Connection) -> None:
    older = enqueue(connection, coalesce_key="k", available_at=tomorrow())
    connection.execute(
        "UPDATE pgoutbox.message_live SET attempt_count = 1 WHERE id = %s AND state = 'pending'", [older]
    )
    newer = enqueue(connection, coalesce_key="k")
    assert row_of(connection, older).superseded_by == newer


def test_a_due_message_is_left_to_its_claim(connection: psycopg.Connection) -> None:
    older = enqueue(connection, coalesce_key="k")
    enqueue(connection, coalesce_key="k")
    assert state_of(connection, older) == "pending"
    view = "SELECT reason FROM pgoutbox.waiting_view WHERE id = %s"
    assert connection.execute(view, [older]).fetchone() == ("superseded",)


def test_a_message_that_fell_due_since_the_transaction_began_is_left_to_its_claim(
    db: psycopg.Connection, connect: Connect
) -> None:
    producer = connect()
    producer.execute("SELECT now()")
    older = enqueue(db, coalesce_key="k")
    enqueue(producer, coalesce_key="k")
    producer.commit()
    assert state_of(db, older) == "pending"


def test_an_attempt_in_flight_is_left_alone(db: psycopg.Connection) -> None:
    older = enqueue(db, coalesce_key="k")
    assert [row.id for row in claim(db)] == [older]
    enqueue(db, coalesce_key="k", available_at=tomorrow())
    assert state_of(db, older) == "sending"


def test_a_rollback_keeps_the_older_message(db: psycopg.Connection, connect: Connect) -> None:
    older, producer = enqueue(db, coalesce_key="k", available_at=tomorrow()), connect()
    enqueue(producer, coalesce_key="k")
    producer.rollback()
    assert state_of(db, older) == "pending"
    make_due(db, older)
    assert [row.id for row in claim(db)] == [older]


def test_an_enqueue_waits_for_no_lock_of_the_older_message(db: psycopg.Connection, connect: Connect) -> None:
    older, holder = enqueue(db, coalesce_key="k", available_at=tomorrow()), connect()
    holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [older])
    enqueue(db, coalesce_key="k")
    assert state_of(db, older) == "pending"


def test_a_repeatable_read_transaction_does_not_fail_because_a_worker_claimed(
    db: psycopg.Connection, connect: Connect
) -> None:
    older, producer = enqueue(db, coalesce_key="k", available_at=tomorrow()), connect()
    producer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    producer.execute("SELECT FROM pgoutbox.message")
    make_due(db, older)
    assert [row.id for row in claim(db)] == [older]
    newer = enqueue(producer, coalesce_key="k")
    producer.commit()
    assert [state_of(db, i) for i in (older, newer)] == ["sending", "pending"]


def test_messages_of_the_rule_pending_stay_scheduled(connection: psycopg.Connection) -> None:
    ids = [enqueue(connection, coalesce_key="k", coalesce_rule="pending", available_at=tomorrow()) for _ in range(2)]
    assert [state_of(connection, i) for i in ids] == ["pending", "pending"]
