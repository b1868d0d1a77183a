"""Tests that an operator takes messages in flight away from their workers, and that the guarantees hold meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox import Context, LeaseLostError, Message, Outbox, State
from pgoutbox.kernel import statements
from pgoutbox.message import AttemptOutcome
from pgoutbox.operations import Action, ActResult, MessageFilter, Operator
from pgoutbox.worker import Worker
from tests.support.messages import meanwhile, put
from tests.support.outbox_actions import attempts_of, begin, enqueue, row_of, running, settings_for, state_of
from tests.support.waiting import until
from tests.support.worker_sql import End, claim, end_lapsed, finish, finish_sent, renew, watch

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect


def lapse_all(db: psycopg.Connection) -> None:
    db.execute("UPDATE pgoutbox.claim SET lease_expires_at = now()")
    db.execute(statements.FORGET_LAPSED)


def look_for_lapsed(db: psycopg.Connection, *, topic: str = "greet") -> list[int]:
    """Look for lapsed attempts like a worker, and return the messages of those that have ended."""
    db.execute(statements.FORGET_LAPSED)
    return [row.id for row in end_lapsed(db, topics=[topic])]


def test_a_released_message_is_tried_again_when_its_lease_ends(db: psycopg.Connection) -> None:
    message_id = enqueue(db)
    begin(db, message_id)
    before = db.execute("SELECT lease_expires_at FROM pgoutbox.in_flight_view").fetchall()
    assert Operator(db).release(message_id).result is ActResult.RELEASED
    assert db.execute("SELECT lease_expires_at FROM pgoutbox.in_flight_view").fetchall() == before
    assert end_lapsed(db) == []
    lapse_all(db)
    assert [(row.id, row.state) for row in end_lapsed(db)] == [(message_id, "pending")]
    ((_, outcome, error),) = attempts_of(db, message_id)
    assert (outcome, error) == ("lost", "lease expired, outcome unknown")
    assert f"(released message {message_id})" in str(row_of(db, message_id).last_error)


def test_its_worker_no_longer_holds_it(db: psycopg.Connection) -> None:
    message_id, other = (enqueue(db) for _ in range(2))
    rows = {row.id: row.attempt_count for row in claim(db)}
    Operator(db).release(message_id)
    attempts = [(message_id, rows[message_id]), (other, rows[other])]
    assert set(watch(db, *attempts)) == {other}
    assert set(renew(db, *attempts)) == {other}
    assert finish_sent(db, *attempts) == {other}
    assert finish(db, End(*attempts[0], AttemptOutcome.FAILED, "no such user")) == {}
    assert state_of(db, message_id) == "sending"
    # The renewal of its worker has renewed the other attempt alone.
    lapse_all(db)
    assert [row.id for row in end_lapsed(db)] == [message_id]


def test_a_message_without_an_attempt_left_is_tried_once_more(db: psycopg.Connection) -> None:
    message_id = enqueue(db, max_attempts=1)
    begin(db, message_id)
    Operator(db).release(message_id)
    lapse_all(db)
    assert [(row.id, row.state) for row in end_lapsed(db)] == [(message_id, "pending")]
    assert [(row.id, row.attempt_count) for row in claim(db, worker="other")] == [(message_id, 2)]


def test_a_second_release_changes_nothing(db: psycopg.Connection) -> None:
    message_id = enqueue(db)
    begin(db, message_id)
    assert [Operator(db).release(message_id).is_done for _ in range(2)] == [True, True]
    assert len(Operator(db).list_acts(action=Action.RELEASE)) == 1
    assert db.execute("SELECT count(*) FROM pgoutbox.in_flight_view").fetchone() == (1,)


@pytest.mark.parametrize("key", ["coalesce_key", "ordering_key"])
def test_a_key_has_one_message_in_flight_until_the_lease_ends(db: psycopg.Connection, key: str) -> None:
    keys: dict[str, Any] = {key: "k"}
    message_id = enqueue(db, **keys)
    begin(db, message_id)
    newer = enqueue(db, **keys)
    Operator(db).release(message_id)
    assert claim(db, worker="other") == []
    lapse_all(db)
    ended = {row.id: row.state for row in end_lapsed(db)}
    assert ended == {message_id: "skipped" if key == "coalesce_key" else "pending"}
    assert state_of(db, newer) == "pending"


def test_a_topic_whose_unknown_outcomes_a_person_judges_keeps_that(db: psycopg.Connection) -> None:
    message_id = enqueue(db)
    begin(db, message_id)
    Operator(db).release(message_id)
    lapse_all(db)
    assert [row.state for row in end_lapsed(db, hold_topics=["greet"])] == ["failed"]


@pytest.mark.parametrize("state", sorted(set(State) - {State.SENDING}))
def test_only_a_message_in_flight_is_released(rolled_back: psycopg.Connection, state: State) -> None:
    message_id = put(rolled_back, state)
    result = Operator(rolled_back).release(message_id)
    assert (result.result, result.explanation) == (
        ActResult.WRONG_STATE,
        f"is {state}; only sending messages can be released",
    )
    assert Operator(rolled_back).release(2**40).result is ActResult.MISSING


def test_a_locked_message_is_left_alone(db: psycopg.Connection, connect: Connect) -> None:
    message_id, holder = put(db, State.SENDING), connect()
    holder.execute("SELECT FROM pgoutbox.message FOR UPDATE")
    assert Operator(db).release(message_id).result is ActResult.LOCKED
    holder.rollback()
    assert Operator(db).release(message_id).is_done


def test_a_late_commit_leaves_the_worker_the_lease_that_it_has_then(db: psycopg.Connection, connect: Connect) -> None:
    """A release locks no claim, so its worker renews until the commit."""
    message_id, other = (enqueue(db) for _ in range(2))
    rows = {row.id: row.attempt_count for row in claim(db)}
    operator = connect()
    operator.execute("SELECT pgoutbox.release(%s)", ([message_id],))
    lapse_all(db)
    attempts = [(message_id, rows[message_id]), (other, rows[other])]
    assert set(renew(db, *attempts)) == {message_id, other}
    operator.commit()
    leases = "SELECT lease_expires_at FROM pgoutbox.claim ORDER BY worker"
    ((renewed,), _) = db.execute(leases).fetchall()
    db.execute("UPDATE pgoutbox.claim SET lease_expires_at = now() WHERE released_from IS NOT NULL")
    assert look_for_lapsed(db) == []
    assert db.execute(leases).fetchall() == [(renewed,)] * 2
    # It is extended once, although the worker renews its lease again.
    assert set(renew(db, attempts[1])) == {other}
    db.execute("UPDATE pgoutbox.claim SET lease_expires_at = now() WHERE released_from IS NOT NULL")
    assert look_for_lapsed(db) == [message_id]


@pytest.mark.parametrize("change", ["DELETE FROM pgoutbox.claim", "UPDATE pgoutbox.claim SET lease_expires_at = now()"])
def test_a_release_does_not_wait_for_the_claim_of_its_worker(
    db: psycopg.Connection, connect: Connect, change: str
) -> None:
    message_id, worker = put(db, State.SENDING), connect()
    worker.execute(change.encode())
    assert Operator(db).release(message_id).is_done
    worker.commit()
    lapse_all(db)
    assert look_for_lapsed(db, topic="mail") == [message_id]


def test_another_attempt_than_the_listed_one_is_left_alone(
    db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(db, State.SENDING)
    meanwhile(monkeypatch, lambda: db.execute("UPDATE pgoutbox.message SET attempt_count = attempt_count + 1"))
    batches = list(Operator(db).bulk("release", MessageFilter(topic="mail")))
    assert [result.result for batch in batches for result in batch.results] == [ActResult.CHANGED]
    assert db.execute("SELECT worker FROM pgoutbox.message").fetchone() == ("w",)


@pytest.mark.slow
async def test_a_process_with_a_free_slot_tries_its_message_again(dsn: str, db: psycopg.Connection) -> None:
    """The handler that does not end keeps its own slot. Its lease is lost, so it hands nothing over."""
    outbox = Outbox(settings_for(dsn, lease_seconds=3, shutdown_grace_seconds=0))
    calls: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        calls.append(message.attempt_count)
        if len(calls) == 1:
            await asyncio.Event().wait()

    message_id = enqueue(db)
    async with running(Worker(outbox)):
        await until(lambda: calls)
        assert Operator(db).release(message_id).is_done
        await until(lambda: state_of(db, message_id) == "sent")
    assert calls == [1, 2]


def test_all_messages_of_a_filter_are_released(db: psycopg.Connection) -> None:
    released, other = [put(db, State.SENDING) for _ in range(3)], put(db, State.SENDING, topic="sms")
    batches = list(Operator(db, actor="ada").bulk("release", MessageFilter(topic="mail")))
    assert [str(result.result) for batch in batches for result in batch.results] == ["released"] * 3
    (act,) = Operator(db).list_acts(action=Action.RELEASE)
    assert (act.actor, act.first_ids) == ("ada", released)
    assert row_of(db, other).worker == "w"


@pytest.mark.slow
async def test_an_attempt_that_does_not_end_is_given_to_another_process(dsn: str, db: psycopg.Connection) -> None:
    """The first worker renews its lease as long as its handler runs, and is told that it has lost the message."""
    # Its only slot is taken: it does not claim the message again, to wait for the handler that it has called.
    first = Outbox(settings_for(dsn, lease_seconds=3, concurrency=1, shutdown_grace_seconds=0))
    second = Outbox(settings_for(dsn))
    is_called, errors, calls = asyncio.Event(), list[LeaseLostError](), list[int]()

    @first.handler("greet")
    async def hang(message: Message, ctx: Context) -> None:
        is_called.set()
        await until(lambda: ctx.should_stop)
        try:
            await ctx.ensure_lease()
        except LeaseLostError as error:
            errors.append(error)
        await asyncio.Event().wait()

    @second.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        calls.append(message.attempt_count)

    message_id = enqueue(db)
    async with running(Worker(first)):
        await is_called.wait()
        assert Operator(db).release(message_id).is_done
        await until(lambda: errors)
        async with running(Worker(second)):
            await until(lambda: state_of(db, message_id) == "sent")
    assert calls == [2]
