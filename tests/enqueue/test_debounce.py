"""Tests how long newer messages of a coalesce key can postpone the delivery, counted from the first waiting one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from pgoutbox.database.store import FinishRequest
from pgoutbox.message import AttemptOutcome
from tests.support import races
from tests.support.outbox_actions import claim, enqueue, finish, finish_sent, ids_in_flight

if TYPE_CHECKING:
    from datetime import datetime

    import psycopg

    from tests.conftest import Connect

HOUR = timedelta(hours=1)


def debounce(connection: psycopg.Connection) -> int:
    return enqueue(connection, coalesce_key="k", max_delay=HOUR)


def waiting_since(connection: psycopg.Connection) -> datetime | None:
    ((since,),) = connection.execute("SELECT waiting_since FROM pgoutbox.coalesce_head").fetchall()
    return since  # type: ignore[no-any-return] # that is the column's type


def age(connection: psycopg.Connection) -> datetime | None:
    """Age the first message, as if it had been enqueued a minute earlier."""
    connection.execute("UPDATE pgoutbox.coalesce_head SET waiting_since = waiting_since - interval '1 min'")
    return waiting_since(connection)


def test_a_limit_without_a_delay_delays_nothing(rolled_back: psycopg.Connection) -> None:
    message_id = debounce(rolled_back)
    assert ids_in_flight(claim(rolled_back)) == [message_id]


def test_a_message_without_a_limit_does_not_restart_the_wait_of_others(rolled_back: psycopg.Connection) -> None:
    debounce(rolled_back)
    since = age(rolled_back)
    enqueue(rolled_back, coalesce_key="k")
    debounce(rolled_back)
    assert waiting_since(rolled_back) == since


def test_an_attempted_message_no_longer_waits_for_newer_ones(rolled_back: psycopg.Connection) -> None:
    message_id = debounce(rolled_back)
    since = age(rolled_back)
    assert ids_in_flight(claim(rolled_back)) == [message_id]
    finish(rolled_back, FinishRequest(message_id, 1, AttemptOutcome.RETRY, "busy", 60.0))
    debounce(rolled_back)
    assert waiting_since(rolled_back) != since


@pytest.mark.parametrize("known", [True, False])
def test_the_second_of_two_concurrent_producers_waits_since_the_first(connect: Connect, known: bool) -> None:
    db, first, second = connect(autocommit=True), connect(), connect()
    if known:
        delivered = debounce(db)
        assert ids_in_flight(claim(db)) == [delivered]
        finish_sent(db, (delivered, 1))
    debounce(first)
    since = waiting_since(first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(debounce, second)
        races.until_blocked(db, second, waiting)
        first.commit()
        waiting.result()
    second.commit()
    assert waiting_since(db) == since
