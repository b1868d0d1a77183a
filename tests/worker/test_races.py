"""Tests races with two real connections and a gate between them: the winner, and that the loser does no harm and
does not wait."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Outbox
from pgoutbox.database import sql
from pgoutbox.handlers import Context
from pgoutbox.message import AttemptOutcome, Message, State, Transient
from pgoutbox.observability.events import LogEvent
from pgoutbox.operations import ActResult, Operator
from pgoutbox.operations.acts import ACTS
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from tests.support import races
from tests.support.outbox_actions import (
    attempts_of,
    cancel,
    enqueue,
    lapse,
    redrive,
    reports,
    row_of,
    rows_of,
    running,
    settings_for,
    state_of,
    until_blocked,
)
from tests.support.waiting import until, until_idle
from tests.support.worker_sql import End, claim, finish, finish_sent, ids_in_flight

if TYPE_CHECKING:
    from tests.conftest import Connect


# --- prune against producers and operators ----------------------------------------------------------------------------


def test_a_message_is_not_pruned_during_its_resend_and_keeps_its_content(
    connect: Connect, db: psycopg.Connection
) -> None:
    resending = connect()
    ((_, source_id),) = db.execute(
        "SELECT * FROM pgoutbox.enqueue_fanout("
        '\'{"topic": "greet", "payload": {}}\', \'["mailto:a@example.org"]\', \'"shared"\')'
    ).fetchall()
    claim(db)
    finish_sent(db, (source_id, 1))
    db.execute("UPDATE pgoutbox.message SET finished_at = now() - interval '1 day' WHERE state = 'sent'")
    ((_, _, _, copy_id),) = resending.execute(ACTS["resend"].statement, {"ids": [source_id]}).fetchall()
    old = {"states": ["sent"], "older_than_seconds": 1.0, "topic": None, "limit": 9}
    assert db.execute(sql.PRUNE, old).fetchall() == []
    db.execute(sql.PRUNE_CONTENT, {"limit": 9, "after_key": ""})
    resending.commit()
    assert db.execute(sql.PRUNE, old).fetchall() == [("sent",)]
    db.execute(sql.PRUNE_CONTENT, {"limit": 9, "after_key": ""})
    body = db.execute(
        "SELECT c.body FROM pgoutbox.message AS m JOIN pgoutbox.content AS c ON c.id = m.content_id WHERE m.id = %s",
        (copy_id,),
    )
    assert body.fetchall() == [("shared",)]


def test_a_message_pruned_before_its_resend_is_unknown(connect: Connect, db: psycopg.Connection) -> None:
    pruning, operator = connect(), connect(autocommit=True)
    source_id = enqueue(db)
    claim(db)
    finish_sent(db, (source_id, 1))
    pruning.execute("DELETE FROM pgoutbox.message WHERE id = %s", (source_id,))
    with ThreadPoolExecutor(1) as threads:
        resent = threads.submit(Operator(operator).resend, source_id)
        races.until_blocked(db, operator, resent)
        pruning.commit()
        assert resent.result().result is ActResult.MISSING


# --- claim against claim ----------------------------------------------------------------------------------------------


def test_two_claims_of_the_same_rows_share_them(connect: Connect, db: psycopg.Connection) -> None:
    first, second = connect(), connect()
    ids = [enqueue(db) for _ in range(10)]
    taken = ids_in_flight(claim(first, total=4, worker="first"))
    left = ids_in_flight(claim(second, total=10, worker="second"))
    assert taken == ids[:4]
    assert left == ids[4:]


def test_a_rolled_back_claim_leaves_its_messages_unchanged(connect: Connect, db: psycopg.Connection) -> None:
    first = connect()
    message_id = enqueue(db)
    before = row_of(db, message_id)
    claim(first)
    first.rollback()
    assert (row_of(db, message_id).state, row_of(db, message_id).attempt_count) == (before.state, before.attempt_count)
    assert ids_in_flight(claim(db)) == [message_id]


def test_a_claim_in_a_session_older_than_the_enqueue_finds_the_message(
    connect: Connect, db: psycopg.Connection
) -> None:
    producer = connect()
    early = enqueue(producer)
    late = enqueue(db)
    assert ids_in_flight(claim(db)) == [late]
    producer.commit()
    assert ids_in_flight(claim(db)) == [early]


async def test_a_worker_that_meets_another_at_one_key_continues(outbox: Outbox, connect: Connect) -> None:
    db, rival = connect(autocommit=True), connect()
    delivered: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.append(message.id)

    older = enqueue(db, coalesce_key="k")
    assert ids_in_flight(claim(rival, worker="rival")) == [older]
    newer, other = enqueue(db, coalesce_key="k"), enqueue(db)
    run: asyncio.Task[object] = asyncio.create_task(Worker(outbox).run_once())
    await until_blocked(db, run)
    rival.commit()
    await run
    assert delivered == [other]
    assert [row.state for row in rows_of(db, older, newer)] == ["sending", "pending"]
    assert finish_sent(db, (older, 1), worker="rival") == {older}
    assert ids_in_flight(claim(db)) == [newer]


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_a_cancel_before_the_claim_wins(connect: Connect, db: psycopg.Connection) -> None:
    business = connect()
    message_id = enqueue(db)
    assert cancel(business, message_id) == "cancelled"
    assert claim(db) == []
    business.commit()
    assert claim(db) == []
    assert state_of(db, message_id) == State.CANCELLED


def test_a_cancel_that_rolls_back_cancels_nothing(connect: Connect, db: psycopg.Connection) -> None:
    business = connect()
    message_id = enqueue(db)
    cancel(business, message_id)
    business.rollback()
    assert ids_in_flight(claim(db)) == [message_id]


def test_a_cancel_after_the_claim_is_a_request(connect: Connect, db: psycopg.Connection) -> None:
    business = connect()
    message_id = enqueue(db)
    claim(db)
    assert cancel(business, message_id) == "requested"
    business.commit()
    assert finish(db, End(message_id, 1, AttemptOutcome.RETRY, "busy")) == {message_id: State.CANCELLED}


@pytest.mark.parametrize("commits", [True, False])
async def test_a_cancel_that_stays_open_delays_no_outcome(
    dsn: str, connect: Connect, db: psycopg.Connection, *, commits: bool
) -> None:
    outbox = Outbox(settings_for(dsn))
    begun, go_on = asyncio.Event(), asyncio.Event()

    @outbox.handler("mail")
    async def send(message: Message, ctx: Context) -> None:
        begun.set()
        await go_on.wait()

    message_id, business = enqueue(db, "mail"), connect()
    async with running(Worker(outbox)):
        await begun.wait()
        assert await asyncio.to_thread(cancel, business, message_id) == "requested"
        go_on.set()
        await until(lambda: state_of(db, message_id) == State.SENT)
        business.commit() if commits else business.rollback()
    assert attempts_of(db, message_id) == []


@pytest.mark.parametrize("claim_commits", [True, False])
def test_a_cancel_during_a_claim_is_honoured_by_the_next_one(
    connect: Connect, db: psycopg.Connection, *, claim_commits: bool
) -> None:
    worker, business = connect(), connect()
    message_id = enqueue(db)
    claim(worker)
    assert cancel(business, message_id) == "requested"
    business.commit()
    if claim_commits:
        worker.commit()
        finish(db, End(message_id, 1, AttemptOutcome.RETRY, "busy"))
    else:
        worker.rollback()
        assert ids_in_flight(claim(db)) == []
    assert state_of(db, message_id) == State.CANCELLED


def test_a_cancel_returns_the_state_of_the_message(connect: Connect, db: psycopg.Connection) -> None:
    message_id = enqueue(db)
    claim(db)
    finish_sent(db, (message_id, 1))
    assert cancel(db, message_id) == "sent"
    assert cancel(db, 4711) == "missing"


@pytest.mark.parametrize("level", psycopg.IsolationLevel)
def test_one_function_knows_which_transactions_see_new_commits(
    connect: Connect, db: psycopg.Connection, level: psycopg.IsolationLevel
) -> None:
    reader = connect()
    reader.isolation_level = level
    reader.execute("SELECT FROM pgoutbox.message")
    enqueue(db)
    sees_it = reader.execute("SELECT count(*) > 0 FROM pgoutbox.message").fetchone()
    assert reader.execute("SELECT pgoutbox._reads_committed()").fetchone() == sees_it
    body = "concat(prosrc, pg_get_function_sqlbody(oid))"
    others = f"SELECT proname FROM pg_proc WHERE {body} LIKE '%transaction\\_isolation%'"
    assert db.execute(f"{others} AND pronamespace = 'pgoutbox'::regnamespace").fetchall() == [("_reads_committed",)]


# --- newest wins ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["default", "bulk"], ids=["same queue", "another queue"])
@pytest.mark.parametrize("fails", [False, True], ids=["sent", "retried"])
async def test_a_successor_is_delivered_as_soon_as_its_predecessor_has_ended(
    dsn: str, db: psycopg.Connection, queue: str, fails: bool
) -> None:
    started, go_on, newer_delivered = asyncio.Event(), asyncio.Event(), asyncio.Event()
    delivered: list[int] = []

    def outbox() -> Outbox:
        made = Outbox(settings_for(dsn))

        @made.handler("greet", retry=RetryPolicy.steps(3600))
        async def greet(message: Message, ctx: Context) -> None:
            delivered.append(message.id)
            if message.payload == "newer":
                newer_delivered.set()
                return
            started.set()
            await go_on.wait()
            if fails:
                raise Transient("busy")

        return made

    older = enqueue(db, payload="older", coalesce_key="k")
    with reports() as heard:
        async with (
            running(Worker(outbox())),
            running(second := Worker(outbox(), queues=["bulk"])),
        ):
            await started.wait()
            await until_idle(second)
            newer = enqueue(db, payload="newer", coalesce_key="k", queue=queue)
            assert claim(db, queue=queue, worker="thief") == []
            go_on.set()
            await newer_delivered.wait()
            await heard.wait_for(LogEvent.WORKER_STARTED)
    assert delivered == [older, newer]
    row = row_of(db, older)
    if fails:
        assert (row.state, row.superseded_by) == ("skipped", newer)
        assert attempts_of(db, older) == [(1, "skipped", "busy")]
    else:
        assert row.state == State.SENT
    assert state_of(db, newer) == State.SENT


async def test_a_successor_follows_when_another_workers_claim_ends_its_lost_predecessor(
    dsn: str, db: psycopg.Connection
) -> None:
    delivered: list[int] = []
    newer_delivered = asyncio.Event()

    def outbox() -> Outbox:
        made = Outbox(settings_for(dsn))

        @made.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            delivered.append(message.id)
            newer_delivered.set()

        return made

    older = enqueue(db, coalesce_key="k")
    assert ids_in_flight(claim(db, worker="lost")) == [older]
    newer = enqueue(db, coalesce_key="k", queue="bulk")
    async with running(sleeper := Worker(outbox(), queues=["bulk"])):
        await until_idle(sleeper)
        lapse(db, older)
        async with running(Worker(outbox())):
            await newer_delivered.wait()
    assert delivered == [newer]
    assert (row_of(db, older).state, row_of(db, older).superseded_by) == ("skipped", newer)


def test_a_successor_that_rolls_back_supersedes_nothing(connect: Connect, db: psycopg.Connection) -> None:
    producer = connect()
    older = enqueue(db, coalesce_key="k")
    enqueue(producer, coalesce_key="k")
    assert ids_in_flight(claim(db)) == [older]
    producer.rollback()
    assert finish(db, End(older, 1, AttemptOutcome.RETRY, "busy", 0.0)) == {older: State.PENDING}


def test_a_redrive_does_not_revive_a_superseded_message(db: psycopg.Connection) -> None:
    older = enqueue(db, coalesce_key="k")
    claim(db)
    finish(db, End(older, 1, AttemptOutcome.FAILED, "no"))
    enqueue(db, coalesce_key="k")
    assert not redrive(db, older)
    assert state_of(db, older) == State.FAILED


@pytest.mark.slow
async def test_a_claim_refused_by_a_unique_index_of_any_name_is_a_lost_race(db: psycopg.Connection, dsn: str) -> None:
    """REINDEX CONCURRENTLY, for example, enforces the same rule with an index of an unpredictable name."""
    db.execute(
        "CREATE UNIQUE INDEX message_live_in_flight_ccold ON pgoutbox.message_live (topic) WHERE state = 'sending'"
    )
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        """Do nothing; the message is then sent."""

    ids = [enqueue(db) for _ in range(5)]
    async with running(Worker(outbox)):
        await until(lambda: all(row.is_finished for row in rows_of(db, *ids)))
    assert {row.state for row in rows_of(db, *ids)} == {State.SENT}
