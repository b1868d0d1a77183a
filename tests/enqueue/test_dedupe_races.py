"""Tests races for the dedupe key of a cancelled message: two real connections, and a gate where the order matters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Enqueued, NewMessage, Outbox
from pgoutbox.message import State
from pgoutbox.operations import ActResult, MessageResult, Operator
from tests.support import races
from tests.support.messages import put
from tests.support.outbox_actions import drained, redrive, settings_for, state_of

if TYPE_CHECKING:
    from pgoutbox import Context, Message
    from tests.conftest import Connect

BOTH = ("one", "bulk")


def again(outbox: Outbox, connection: psycopg.Connection, way: str, payload: str = "again") -> Enqueued:
    """Enqueue again with the key."""
    if way == "one":
        return outbox.on(connection).enqueue("mail", payload, dedupe_key="k")
    (answer,) = outbox.on(connection).enqueue_many([NewMessage("mail", payload, dedupe_key="k")])
    return answer


def live_count(db: psycopg.Connection) -> int:
    ((count,),) = db.execute("SELECT count(*) FROM pgoutbox.message_live WHERE dedupe_key = 'k'").fetchall()
    return int(count)


@pytest.mark.parametrize("way", BOTH)
def test_concurrent_enqueues_of_a_freed_key_make_one_message(
    outbox: Outbox, connect: Connect, db: psycopg.Connection, way: str
) -> None:
    winner, waiting = connect(), connect()
    put(db, State.CANCELLED, topic="mail", dedupe_key="k")
    first = again(outbox, winner, way)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(again, outbox, waiting, way)
        races.until_blocked(db, waiting, second)
        winner.commit()
        assert second.result() == Enqueued(first.id, True)
    assert not first.duplicate
    assert live_count(db) == 1


def test_a_waiting_enqueue_gets_a_freed_key_when_the_first_rolls_back(
    outbox: Outbox, connect: Connect, db: psycopg.Connection
) -> None:
    winner, waiting = connect(), connect()
    put(db, State.CANCELLED, topic="mail", dedupe_key="k")
    again(outbox, winner, "one")
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(again, outbox, waiting, "one", "another payload")
        races.until_blocked(db, waiting, second)
        winner.rollback()
        assert not second.result().duplicate
        waiting.commit()
    assert live_count(db) == 1


def test_a_key_taken_between_the_query_and_the_lock_is_not_taken_twice(
    outbox: Outbox, connect: Connect, db: psycopg.Connection
) -> None:
    """The gate stops the second enqueue after it has found the key's message, and before it reads that message."""
    gate, winner, waiting = connect(autocommit=True), connect(), connect()
    put(db, State.CANCELLED, topic="mail", dedupe_key="k")
    ((definition,),) = db.execute("SELECT pg_get_functiondef('pgoutbox._has_freed_key'::regproc)").fetchall()
    stop = "IF current_setting('test.stops', true) = 'yes' THEN PERFORM pg_advisory_xact_lock_shared(4711); END IF;"
    stopped = definition.replace("BEGIN", f"BEGIN {stop}")
    assert stopped != definition
    db.execute(stopped.encode())
    gate.execute("SELECT pg_advisory_lock(4711)")
    waiting.execute("SET test.stops = 'yes'")
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(again, outbox, waiting, "one")
        races.until_blocked(db, waiting, second)
        first = again(outbox, winner, "one")
        winner.commit()
        gate.execute("SELECT pg_advisory_unlock(4711)")
        assert second.result() == Enqueued(first.id, True)
    waiting.commit()
    assert live_count(db) == 1


def test_a_redrive_is_refused_during_and_after_another_message_takes_the_key(
    outbox: Outbox, connect: Connect, db: psycopg.Connection
) -> None:
    producer, operator = connect(), connect(autocommit=True)
    first = put(db, State.CANCELLED, topic="mail", dedupe_key="k")
    second = again(outbox, producer, "one")
    answer = Operator(operator).redrive(first)
    assert answer == MessageResult(first, ActResult.LOCKED, None, "is locked by another transaction; try again")
    producer.commit()
    answer = Operator(operator).redrive(first)
    assert answer == MessageResult(
        first, ActResult.DEDUPE_KEY_TAKEN, second.id, f"has lost its dedupe key to message {second.id}"
    )
    assert state_of(db, first) == State.CANCELLED


def test_an_enqueue_with_a_snapshot_older_than_a_redrive_does_not_take_the_key(
    outbox: Outbox, connect: Connect, db: psycopg.Connection
) -> None:
    producer = connect()
    first = put(db, State.CANCELLED, topic="mail", dedupe_key="k")
    producer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    producer.execute("SELECT count(*) FROM pgoutbox.message")
    assert redrive(db, first)
    with pytest.raises(psycopg.errors.SerializationFailure):
        again(outbox, producer, "one")
    producer.rollback()
    assert live_count(db) == 1


@pytest.mark.slow
async def test_a_repeated_registration_after_a_withdrawal_gets_its_mail(
    dsn: str, connect: Connect, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn))
    seen: list[object] = []

    @outbox.handler("mail")
    async def send(message: Message, ctx: Context) -> None:
        seen.append(message.payload)

    with connect() as business:
        outbox.on(business).enqueue("mail", "first", dedupe_key="k")
        outbox.on(business).cancel(topic="mail", dedupe_key="k")
        outbox.on(business).enqueue("mail", "second", dedupe_key="k")
    await drained(outbox)
    assert seen == ["second"]
    assert live_count(db) == 0


@pytest.mark.parametrize("way", BOTH)
def test_a_key_that_is_pruned_taken_and_freed_again_is_free_in_an_old_snapshot(
    outbox: Outbox, connect: Connect, db: psycopg.Connection, way: str
) -> None:
    put(db, State.SENT, topic="mail", dedupe_key="k")
    producer = connect()
    producer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    producer.execute("SELECT count(*) FROM pgoutbox.message").fetchall()
    db.execute("SELECT pgoutbox.prune('{sent}', '-1 day', NULL, 100)").fetchall()
    first = again(outbox, producer, way)
    outbox.on(producer).cancel(first.id)
    second = again(outbox, producer, way)
    producer.commit()
    assert (second.duplicate, second.id > first.id) == (False, True)
