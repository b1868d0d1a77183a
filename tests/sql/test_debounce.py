"""For how long newer messages of a coalesce key can put off the first: since when one of them has been waiting."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from pgoutbox.message import AttemptOutcome
from pgoutbox.store import Verdict
from tests import races
from tests.outbox_actions import claim, enqueue, finish, finish_sent, ids_in_flight

if TYPE_CHECKING:
    from datetime import datetime

    import psycopg

    from tests.conftest import Connect

HOUR = timedelta(hours=1)


def debounce(connection: psycopg.Connection) -> int:
    return enqueue(connection, coalesce_key="k", max_delay=HOUR)


def waiting_since(connection: psycopg.Connection) -> datetime | None:
    ((since,),) = connection.execute("SELECT waiting_since FROM pgoutbox.coalesce").fetchall()
    return since  # type: ignore[no-any-return] # that is the column's type


def age(connection: psycopg.Connection) -> datetime | None:
    """As if the first had been enqueued a minute earlier."""
    connection.execute("UPDATE pgoutbox.coalesce SET waiting_since = waiting_since - interval '1 min'")
    return waiting_since(connection)


def test_a_bound_without_a_delay_delays_nothing(rolled_back: psycopg.Connection) -> None:
    message_id = debounce(rolled_back)
    assert ids_in_flight(claim(rolled_back)) == [message_id]


def test_one_without_a_bound_does_not_make_the_others_wait_anew(rolled_back: psycopg.Connection) -> None:
    debounce(rolled_back)
    since = age(rolled_back)
    enqueue(rolled_back, coalesce_key="k")
    debounce(rolled_back)
    assert waiting_since(rolled_back) == since


def test_one_that_was_attempted_does_not_wait_for_newer_ones_any_more(rolled_back: psycopg.Connection) -> None:
    message_id = debounce(rolled_back)
    since = age(rolled_back)
    assert ids_in_flight(claim(rolled_back)) == [message_id]
    finish(rolled_back, Verdict(message_id, 1, AttemptOutcome.RETRY, "busy", 60.0))
    debounce(rolled_back)
    assert waiting_since(rolled_back) != since


@pytest.mark.parametrize("known", [True, False])
def test_of_two_producers_at_once_the_second_waits_since_the_first(connect: Connect, known: bool) -> None:
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
