"""Tests that an enqueue ends an older message of its coalesce key that is not due yet."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import NewMessage, Outbox
from tests.support import races
from tests.support.outbox_actions import cancel, enqueue, make_due, row_of, state_of
from tests.support.worker_sql import claim

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from tests.conftest import Connect

    EnqueueNewer: TypeAlias = Callable[[psycopg.Connection], int]

DAY = timedelta(days=1)


def tomorrow() -> datetime:
    return datetime.now(UTC) + DAY


def one(connection: psycopg.Connection) -> int:
    return enqueue(connection, coalesce_key="k", available_at=tomorrow())


def bulk(connection: psycopg.Connection) -> int:
    item = NewMessage("greet", None, coalesce_key="k", delay=DAY)
    return Outbox().on(connection).enqueue_many([item], require_transaction=False).ids[0]


in_both_ways = pytest.mark.parametrize("enqueue_newer", [one, bulk])


@in_both_ways
def test_a_scheduled_message_is_skipped_when_it_is_superseded(
    connection: psycopg.Connection, enqueue_newer: EnqueueNewer
) -> None:
    older = enqueue(connection, coalesce_key="k", available_at=tomorrow())
    other = enqueue(connection, coalesce_key="l", available_at=tomorrow())
    newer = enqueue_newer(connection)
    row = row_of(connection, older)
    assert (row.state, row.superseded_by, row.skip_reason) == ("skipped", newer, f"superseded by {newer}")
    assert [state_of(connection, i) for i in (other, newer)] == ["pending", "pending"]


def test_a_bulk_survives_a_cancel_of_a_message_that_it_supersedes(connect: Connect, db: psycopg.Connection) -> None:
    """Its statement has begun, so it sees a row that has moved to another partition meanwhile."""
    items = [NewMessage("greet", None, coalesce_key=f"k{n:03}", delay=DAY) for n in range(100)]
    older = Outbox().on(db).enqueue_many(items, require_transaction=False).ids
    db.execute(
        "CREATE FUNCTION public.stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF current_setting('test.stops', true) = 'yes' THEN PERFORM pg_advisory_xact_lock_shared(4711); END IF;"
        " RETURN NEW; END $$;"
        "CREATE TRIGGER stop BEFORE UPDATE ON pgoutbox.message_live FOR EACH ROW EXECUTE FUNCTION public.stop();"
        "SELECT pg_advisory_lock(4711)"
    )
    producer, canceller = connect(), connect(autocommit=True)
    producer.execute("SET test.stops = 'yes'")
    with ThreadPoolExecutor(1) as thread:
        enqueued = thread.submit(Outbox().on(producer).enqueue_many, items)
        races.until_blocked(db, producer, enqueued)
        assert cancel(canceller, older[90]) == "cancelled"
        db.execute("SELECT pg_advisory_unlock(4711)")
        newer = enqueued.result().ids
    producer.commit()
    assert {state_of(db, one) for one in newer} == {"pending"}
    assert state_of(db, older[90]) == "cancelled"


@pytest.mark.slow
def test_of_many_reminders_one_is_owed(connection: psycopg.Connection) -> None:
    ids = [enqueue(connection, coalesce_key="k", available_at=tomorrow()) for _ in range(50)]
    assert [state_of(connection, i) for i in ids] == ["skipped"] * 49 + ["pending"]
    assert connection.execute("SELECT id, reason FROM pgoutbox.waiting_view").fetchall() == [(ids[-1], "scheduled")]


@pytest.mark.parametrize("payload", [None, "x" * 2_000])
def test_of_many_reminders_in_one_bulk_one_is_owed(connection: psycopg.Connection, payload: str | None) -> None:
    items = [NewMessage("greet", payload, coalesce_key=key, delay=DAY) for key in "kklk"]
    items.insert(0, NewMessage("greet", payload, coalesce_key="k"))
    due, first, second, other, last = Outbox().on(connection).enqueue_many(items).ids
    for message_id in (first, second):
        row = row_of(connection, message_id)
        assert (row.state, row.superseded_by, row.skip_reason) == ("skipped", last, f"superseded by {last}")
    # A message that is due is left to its claim.
    assert [state_of(connection, i) for i in (due, other, last)] == ["pending"] * 3


def test_a_retry_in_its_back_off_is_skipped(connection: psycopg.Connection) -> None:
    older = enqueue(connection, coalesce_key="k", available_at=tomorrow())
    connection.execute(
        "UPDATE pgoutbox.message_live SET attempt_count = 1, lane = 1 WHERE id = %s AND state = 'pending'", [older]
    )
    newer = enqueue(connection, coalesce_key="k")
    assert row_of(connection, older).superseded_by == newer


@in_both_ways
def test_an_attempt_in_flight_is_left_alone(db: psycopg.Connection, enqueue_newer: EnqueueNewer) -> None:
    older = enqueue(db, coalesce_key="k")
    assert [row.id for row in claim(db)] == [older]
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '1 day' WHERE state = 'sending'")
    enqueue_newer(db)
    assert state_of(db, older) == "sending"


def test_a_rollback_keeps_the_older_message(db: psycopg.Connection, connect: Connect) -> None:
    older, producer = enqueue(db, coalesce_key="k", available_at=tomorrow()), connect()
    enqueue(producer, coalesce_key="k")
    producer.rollback()
    assert state_of(db, older) == "pending"
    make_due(db, older)
    assert [row.id for row in claim(db)] == [older]


@in_both_ways
def test_an_enqueue_waits_for_no_lock_of_the_older_message(
    db: psycopg.Connection, connect: Connect, enqueue_newer: EnqueueNewer
) -> None:
    older, holder = enqueue(db, coalesce_key="k", available_at=tomorrow()), connect()
    holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [older])
    enqueue_newer(db)
    assert state_of(db, older) == "pending"
