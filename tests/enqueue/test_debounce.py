"""Tests how long newer messages of a coalesce key can postpone the delivery, counted from the first waiting one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Transient
from tests.support import races
from tests.support.drafts import enqueue_many
from tests.support.held import Held, delivered_once
from tests.support.outbox_actions import begin, enqueue, row_of, state_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    import psycopg

    from tests.conftest import Connect

HOUR = timedelta(hours=1)


def debounce(connection: psycopg.Connection) -> int:
    return enqueue(connection, coalesce_key="k", max_delay=HOUR)


def waiting_since(connection: psycopg.Connection) -> datetime | None:
    ((since,),) = connection.execute("SELECT waiting_since FROM pgoutbox.key_head").fetchall()
    return since  # type: ignore[no-any-return] # that is the column's type


def age(connection: psycopg.Connection) -> datetime | None:
    """Age the first message, as if it had been enqueued a minute earlier."""
    connection.execute("UPDATE pgoutbox.key_head SET waiting_since = waiting_since - interval '1 min'")
    return waiting_since(connection)


async def test_a_limit_without_a_delay_delays_nothing(dsn: str, db: psycopg.Connection) -> None:
    message_id = debounce(db)
    assert await delivered_once(dsn, "greet") == [message_id]


def test_a_message_without_a_limit_does_not_restart_the_wait_of_others(rolled_back: psycopg.Connection) -> None:
    debounce(rolled_back)
    since = age(rolled_back)
    enqueue(rolled_back, coalesce_key="k")
    debounce(rolled_back)
    assert waiting_since(rolled_back) == since


async def test_an_attempted_message_no_longer_waits_for_newer_ones(dsn: str, db: psycopg.Connection) -> None:
    message_id = debounce(db)
    since = age(db)
    held = Held(dsn)
    held.end(message_id, Transient("busy"))
    await held.run_once()
    assert held.begun == [(message_id, 1)]
    debounce(db)
    assert waiting_since(db) != since


# --- several messages in one call -------------------------------------------------------------------------------------

LIMITED: Mapping[str, object] = {"topic": "greet", "payload": 1, "coalesce_key": "k", "delay": 60, "max_delay": 90}


def due_in(connection: psycopg.Connection, *ids: int) -> list[tuple[str, float]]:
    """Return the states of the messages, and after how many seconds of this transaction they are due."""
    return connection.execute(
        """
        SELECT m.state, extract(epoch FROM m.available_at - now())::float8
        FROM pgoutbox.message AS m
        WHERE m.id = ANY (%s)
        ORDER BY m.id
        """,
        [list(ids)],
    ).fetchall()


def test_the_newest_message_of_a_bulk_waits_and_the_others_are_skipped(rolled_back: psycopg.Connection) -> None:
    ids = [message_id for _, message_id, _ in enqueue_many(rolled_back, LIMITED, LIMITED, LIMITED)]
    assert due_in(rolled_back, *ids) == [("skipped", 60), ("skipped", 60), ("pending", 60)]
    assert rolled_back.execute("SELECT waiting_since = now() FROM pgoutbox.key_head").fetchall() == [(True,)]
    assert [row_of(rolled_back, older).superseded_by for older in ids[:2]] == [ids[2], ids[2]]


@pytest.mark.parametrize(("waited", "left"), [(20, 60), (50, 40), (100, 0)])
def test_every_message_of_a_bulk_waits_up_to_the_limit_of_the_first_waiting_one(
    rolled_back: psycopg.Connection, waited: int, left: int
) -> None:
    ((_, first, _),) = enqueue_many(rolled_back, LIMITED)
    aged = "UPDATE pgoutbox.key_head SET waiting_since = waiting_since - make_interval(secs => %s)"
    rolled_back.execute(aged, [waited])
    since = waiting_since(rolled_back)
    ids = [message_id for _, message_id, _ in enqueue_many(rolled_back, LIMITED, LIMITED)]
    assert due_in(rolled_back, *ids) == [("skipped" if left else "pending", left), ("pending", left)]
    assert state_of(rolled_back, first) == "skipped"
    assert waiting_since(rolled_back) == since


def test_each_key_of_a_bulk_has_its_own_wait(rolled_back: psycopg.Connection) -> None:
    enqueue_many(rolled_back, LIMITED)
    rolled_back.execute("UPDATE pgoutbox.key_head SET waiting_since = waiting_since - interval '50 s'")
    others = (
        {**LIMITED, "coalesce_key": "l"},
        {**LIMITED, "topic": "mail"},
        {"topic": "greet", "payload": 1, "delay": 60},
    )
    ids = [message_id for _, message_id, _ in enqueue_many(rolled_back, *others, LIMITED)]
    assert due_in(rolled_back, *ids) == [("pending", 60)] * 3 + [("pending", 40)]


def test_a_bulk_does_not_touch_the_wait_of_another_topics_key(rolled_back: psycopg.Connection) -> None:
    enqueue_many(rolled_back, {**LIMITED, "topic": "mail"})
    since = age(rolled_back)
    enqueue_many(rolled_back, LIMITED, LIMITED)
    heads = rolled_back.execute("SELECT scope, waiting_since = %s FROM pgoutbox.key_head ORDER BY scope", [since])
    assert heads.fetchall() == [("greet", False), ("mail", True)]


def test_only_messages_with_a_limit_are_limited(rolled_back: psycopg.Connection) -> None:
    enqueue_many(rolled_back, LIMITED)
    since = age(rolled_back)
    unlimited = {name: value for name, value in LIMITED.items() if name != "max_delay"}
    ids = [message_id for _, message_id, _ in enqueue_many(rolled_back, LIMITED, unlimited)]
    assert due_in(rolled_back, *ids) == [("skipped", 30), ("pending", 60)]
    assert waiting_since(rolled_back) == since


def test_a_duplicate_in_a_bulk_does_not_restart_the_wait(rolled_back: psycopg.Connection) -> None:
    deduped = {**LIMITED, "dedupe_key": "d"}
    ((_, first, _),) = enqueue_many(rolled_back, deduped)
    since = age(rolled_back)
    ids = [message_id for _, message_id, _ in enqueue_many(rolled_back, deduped, {"topic": "mail", "payload": 1})]
    assert ids[0] == first
    assert due_in(rolled_back, first) == [("pending", 60)]
    assert waiting_since(rolled_back) == since


@pytest.mark.parametrize("known", [True, False])
def test_a_bulk_that_waited_for_another_producer_counts_from_that_ones_message(connect: Connect, known: bool) -> None:
    db, first, second = connect(autocommit=True), connect(), connect()
    if known:
        begin(db, enqueue(db, coalesce_key="k"))
    enqueue_many(first, LIMITED)
    since = age(first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(enqueue_many, second, LIMITED, LIMITED)
        races.until_blocked(db, second, waiting)
        first.commit()
        waiting.result()
    second.commit()
    assert waiting_since(db) == since
    assert db.execute(
        "SELECT state, count(*) FROM pgoutbox.message WHERE attempt_count = 0 GROUP BY 1 ORDER BY 1"
    ).fetchall() == [("pending", 1), ("skipped", 2)]
