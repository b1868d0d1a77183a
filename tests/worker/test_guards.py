"""Mutation tests: every guard has a scenario that holds with it and fails without it.

A scenario runs twice: on the unchanged package, where it must hold, and with its guard removed from the statement,
the schema or the worker, where it must fail. A mutation that no longer finds its text fails too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

import psycopg
import pytest
from psycopg.types.json import Jsonb

from pgoutbox import Outbox
from pgoutbox.database import sql
from pgoutbox.database.server import CopyError
from pgoutbox.database.store import Store
from pgoutbox.handlers import Context
from pgoutbox.kernel import lanes, statements
from pgoutbox.kernel.run import Run
from pgoutbox.message import AttemptOutcome, Message, ReasonCode, State
from tests.support import races
from tests.support.messages import put
from tests.support.outbox_actions import (
    Options,
    begin,
    cancel,
    enqueue,
    expire,
    first_of,
    lapse,
    make_due,
    redrive,
    row_of,
    rows_of,
    running,
    settings_for,
    state_of,
    until_blocked,
)
from tests.support.waiting import until
from tests.support.worker_sql import (
    FRESH,
    ORDERED,
    RETRIES,
    End,
    WatchedWorker,
    claim,
    claim_lanes,
    claim_ordered,
    claimed_ats,
    current_states,
    finish,
    finish_sent,
    forget_sent,
    ids_in_flight,
    lapsed,
    large_payload,
    renew,
    run_of,
    watch,
)

if TYPE_CHECKING:
    from pgoutbox.settings import Settings
    from tests.conftest import Connect


@dataclass(frozen=True, slots=True)
class Stage:
    """The resources of a scenario."""

    dsn: str
    connect: Connect
    db: psycopg.Connection


HOOKS = '{"greet": 3}'


def tomorrow() -> datetime:
    return datetime.now(UTC) + timedelta(days=1)


Scenario = Callable[[Stage], Awaitable[None]]
Mutation = Callable[[Stage, pytest.MonkeyPatch], None]


@pytest.fixture
def stage(dsn: str, connect: Connect) -> Stage:
    """Use the test's own database."""
    return Stage(dsn, connect, connect(autocommit=True))


# --- copies -----------------------------------------------------------------------------------------------------------


async def claims_nothing(stage: Stage, *, settings: Settings, change: str) -> None:
    enqueue(stage.db)
    stage.db.execute("SELECT pgoutbox.adopt()")
    stage.db.execute(f"UPDATE pgoutbox.home {change}".encode())
    store = Store(settings, worker="w")
    try:
        with pytest.raises(CopyError):
            await store.claims.trip([(statements.FORGET_LAPSED, {})])
    finally:
        await store.close()


async def a_worker_claims_nothing_in_another_database(stage: Stage) -> None:
    await claims_nothing(stage, settings=settings_for(stage.dsn), change="SET database_id = 1")


async def a_worker_behind_a_pooler_claims_nothing_in_another_database(stage: Stage) -> None:
    await claims_nothing(stage, settings=settings_for(stage.dsn, listen=False), change="SET database_id = 1")


async def a_worker_claims_nothing_on_another_server(stage: Stage) -> None:
    await claims_nothing(stage, settings=settings_for(stage.dsn), change="SET server_id = 1")


async def a_worker_of_another_deployment_claims_nothing(stage: Stage) -> None:
    settings = settings_for(stage.dsn, deployment="staging")
    await claims_nothing(stage, settings=settings, change="SET deployment = 'production'")


async def a_worker_without_a_deployment_claims_nothing_from_a_named_one(stage: Stage) -> None:
    await claims_nothing(stage, settings=settings_for(stage.dsn), change="SET deployment = 'production'")


# --- the fence --------------------------------------------------------------------------------------------------------


def attempted_again(stage: Stage) -> int:
    """Create a message in its second attempt, by the worker that made the first one."""
    message_id = enqueue(stage.db)
    claim(stage.db)
    finish(stage.db, End(message_id, 1, AttemptOutcome.RELEASED))
    assert ids_in_flight(claim(stage.db)) == [message_id]
    return message_id


def claimed_on_both_timelines(stage: Stage) -> int:
    """Create a message in its first attempt by worker-1. The server has lost the commit of another worker's first
    attempt."""
    message_id = enqueue(stage.db)
    lost = stage.connect()
    assert ids_in_flight(claim(lost, worker="stale")) == [message_id]
    lost.rollback()
    assert ids_in_flight(claim(stage.db)) == [message_id]
    return message_id


def claimed_as_another(stage: Stage) -> tuple[int, int, datetime]:
    """Create a message in its first attempt by worker-1. The server has lost an older message with the same id, which
    the same worker had claimed: return that attempt."""
    lost = stage.connect()
    message_id = enqueue(lost)
    claim(lost)
    claimed_at = claimed_ats(lost, message_id)[message_id]
    lost.rollback()
    # A rollback leaves the sequence alone, a lost commit does not.
    stage.db.execute("SELECT setval('pgoutbox.message_id_seq', %s, false)", [message_id])
    assert enqueue(stage.db) == message_id
    assert ids_in_flight(claim(stage.db)) == [message_id]
    return message_id, 1, claimed_at


def failures_announced(db: psycopg.Connection) -> int:
    """Return the number of messages for the hook of the topic `greet`."""
    ((count,),) = db.execute("SELECT count(*) FROM pgoutbox.message WHERE topic = 'greet.failed'").fetchall()
    return int(count)


async def an_attempt_that_is_retried_announces_no_failure(stage: Stage) -> None:
    message_id = enqueue(stage.db)
    claim(stage.db)
    finish(stage.db, End(message_id, 1, AttemptOutcome.RETRY, "busy"), hooks=HOOKS)
    assert failures_announced(stage.db) == 0


async def a_lapsed_attempt_that_expired_announces_no_failure(stage: Stage) -> None:
    message_id = enqueue(stage.db)
    claim(stage.db)
    lapse(stage.db, message_id)
    expire(stage.db, message_id)
    claim(stage.db, worker="other", hooks=HOOKS)
    assert row_of(stage.db, message_id).state == "skipped"
    assert failures_announced(stage.db) == 0


async def a_stale_attempt_cannot_watch(stage: Stage) -> None:
    message_id = attempted_again(stage)
    assert watch(stage.db, (message_id, 1)) == {}


async def a_worker_of_a_lost_timeline_cannot_watch(stage: Stage) -> None:
    message_id = claimed_on_both_timelines(stage)
    assert watch(stage.db, (message_id, 1), worker="stale") == {}


async def a_worker_of_a_lost_timeline_learns_that_its_attempt_is_lost(stage: Stage) -> None:
    message_id = claimed_on_both_timelines(stage)
    assert current_states(stage.db, (message_id, 1), worker="stale") == {}


async def an_attempt_of_a_lost_message_cannot_watch(stage: Stage) -> None:
    assert watch(stage.db, claimed_as_another(stage)) == {}


async def an_attempt_of_a_lost_message_learns_that_it_is_lost(stage: Stage) -> None:
    assert current_states(stage.db, claimed_as_another(stage)) == {}


async def an_attempt_of_a_lost_message_gets_no_payload(stage: Stage) -> None:
    assert large_payload(stage.db, claimed_as_another(stage)) == []


async def an_attempt_of_a_lost_message_cannot_delete_by_the_function(stage: Stage) -> None:
    keep_nothing(stage)
    message_id, attempt_count, claimed_at = claimed_as_another(stage)
    forget = "SELECT pgoutbox._forget_sent(ARRAY[%s::bigint], ARRAY[%s::integer], ARRAY[%s::timestamptz], 'worker-1')"
    assert stage.db.execute(forget, [message_id, attempt_count, claimed_at]).fetchall() == []


async def a_worker_does_not_repeat_a_lapsed_attempt_that_it_still_runs(stage: Stage) -> None:
    message_id = enqueue(stage.db)
    claim(stage.db)
    lapse(stage.db, message_id)
    assert claim(stage.db, held=[message_id]) == []


async def a_worker_does_not_end_a_lapsed_attempt_that_it_still_runs(stage: Stage) -> None:
    message_id = enqueue(stage.db, max_attempts=1)
    claim(stage.db)
    lapse(stage.db, message_id)
    assert claim(stage.db, held=[message_id]) == []


async def a_worker_repeats_an_attempt_in_its_name_that_it_does_not_run(stage: Stage) -> None:
    held, forgotten = enqueue(stage.db), enqueue(stage.db)
    claim(stage.db)
    lapse(stage.db, held)
    lapse(stage.db, forgotten)
    assert ids_in_flight(claim(stage.db, held=[held])) == [forgotten]


async def a_worker_ends_an_attempt_in_its_name_that_it_does_not_run(stage: Stage) -> None:
    held, forgotten = enqueue(stage.db, max_attempts=1), enqueue(stage.db, max_attempts=1)
    claim(stage.db)
    lapse(stage.db, held)
    lapse(stage.db, forgotten)
    claim(stage.db, held=[held])
    assert [row.state for row in rows_of(stage.db, held, forgotten)] == ["sending", "failed"]


# --- retention --------------------------------------------------------------------------------------------------------


def keep_nothing(stage: Stage, topic: str = "*", state: str = "sent") -> None:
    stage.db.execute("INSERT INTO pgoutbox.retention (topic, state, keep) VALUES (%s, %s, '0')", [topic, state])


async def a_removed_rule_has_no_effect_from_its_commit_on(stage: Stage) -> None:
    message_id = enqueue(stage.db)
    claim(stage.db)
    forget_sent(stage.db, (message_id, 1))
    assert rows_of(stage.db, message_id)


async def a_topics_own_rule_holds(stage: Stage) -> None:
    keep_nothing(stage)
    stage.db.execute("INSERT INTO pgoutbox.retention (topic, state) VALUES ('greet', 'sent')")
    message_id = enqueue(stage.db)
    claim(stage.db)
    forget_sent(stage.db, (message_id, 1))
    assert rows_of(stage.db, message_id)


async def a_repeated_enqueue_of_a_deleted_message_is_recognised(stage: Stage) -> None:
    message_id = put(stage.db, State.SENT, dedupe_key="k", age=timedelta(days=1))
    keep_nothing(stage)
    prune_by_rules(stage.db)
    assert rows_of(stage.db) == []
    assert put(stage.db, dedupe_key="k") == message_id


async def a_key_that_has_a_message_is_not_pruned(stage: Stage) -> None:
    message_id = put(stage.db, dedupe_key="k")
    keep_nothing(stage, state="dedupe_key")
    prune_by_rules(stage.db)
    assert put(stage.db, dedupe_key="k") == message_id


async def pruning_skips_messages_that_their_topic_keeps(stage: Stage) -> None:
    message_id = put(stage.db, State.SENT, age=timedelta(days=1))
    keep_nothing(stage)
    stage.db.execute("INSERT INTO pgoutbox.retention (topic, state) VALUES ('mail', 'sent')")
    prune_by_rules(stage.db)
    assert rows_of(stage.db, message_id)


async def pruning_skips_a_message_that_is_being_redriven(stage: Stage) -> None:
    message_id = put(stage.db, State.FAILED, age=timedelta(days=1))
    keep_nothing(stage, state="failed")
    operator = stage.connect()
    assert redrive(operator, message_id)
    stage.db.execute("SET lock_timeout = '100ms'")
    with contextlib.suppress(psycopg.errors.LockNotAvailable):
        prune_by_rules(stage.db)
        operator.commit()
        assert state_of(stage.db, message_id) == "pending"
        return
    pytest.fail("it waits for the redrive")


async def pruning_applies_the_current_rule(stage: Stage) -> None:
    message_id = put(stage.db, State.SENT, age=timedelta(days=1))
    parameters = {"topic": "mail", "state": "sent", "limit": 9, "since": "-infinity", "until": "infinity"}
    keep_nothing(stage, topic="mail")
    stage.db.execute("UPDATE pgoutbox.retention SET keep = '2 days'")
    stage.db.execute(sql.PRUNE_BY_RULE, parameters)
    assert rows_of(stage.db, message_id)


async def an_erasure_does_not_wait_for_a_breaker(stage: Stage) -> None:
    holder, message_id = stage.connect(), put(stage.db, destination="mailto:ada@example.org")
    stage.db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
        " VALUES ('smtp', now(), 1, 'w', 'ada@example.org')"
    )
    holder.execute("SELECT FROM pgoutbox.breaker FOR UPDATE")
    stage.db.execute("SET lock_timeout = '50ms'")
    try:
        stage.db.execute("SELECT pgoutbox.erase(%s)", [[message_id]])
    except psycopg.errors.LockNotAvailable:
        pytest.fail("the erasure waits")


async def a_content_that_a_message_refers_to_is_not_pruned(stage: Stage) -> None:
    stage.db.execute(
        'SELECT pgoutbox.enqueue_fanout(\'{"topic": "news", "payload": null}\', \'["tel:1", "tel:2"]\', \'1\')'
    )
    contents = stage.db.execute("SELECT id FROM pgoutbox.content").fetchall()
    stage.db.execute(sql.PRUNE_CONTENT, {"limit": 9, "after_key": ""})
    assert stage.db.execute("SELECT id FROM pgoutbox.content").fetchall() == contents != []


def prune_by_rules(db: psycopg.Connection) -> None:
    for topic, state in db.execute("SELECT topic, state FROM pgoutbox.retention WHERE keep IS NOT NULL").fetchall():
        statement = sql.PRUNE_DEDUPE_BY_RULE if state == "dedupe_key" else sql.PRUNE_BY_RULE
        parameters = {"topic": topic, "state": state, "limit": 9, "since": "-infinity", "until": "infinity"}
        db.execute(statement, parameters | {"after_scope": "", "after_key": ""})


# --- one in flight, newest wins ---------------------------------------------------------------------------------------


async def a_successor_waits_for_its_predecessor(stage: Stage) -> None:
    enqueue(stage.db, coalesce_key="k")
    claim(stage.db)
    enqueue(stage.db, coalesce_key="k")
    assert claim(stage.db) == []


async def one_of_two_claims_with_concurrent_snapshots_is_refused(stage: Stage) -> None:
    """The gate is an open transaction: neither claim sees the other's, and both have chosen when the first commits."""
    first, second = stage.connect(), stage.connect(autocommit=True)
    older = enqueue(stage.db, coalesce_key="k")
    assert ids_in_flight(claim(first)) == [older]
    enqueue(stage.db, coalesce_key="k")
    blocked: asyncio.Task[object] = asyncio.create_task(asyncio.to_thread(claim, second))
    await until_blocked(stage.db, blocked)
    first.commit()
    with pytest.raises(psycopg.errors.UniqueViolation) as caught:
        await blocked
    assert caught.value.diag.constraint_name == "message_live_in_flight"


def enqueue_bulk(connection: psycopg.Connection, **keys: list[str]) -> list[int]:
    """Enqueue a message for each key in one bulk, and return the ids in their order."""
    ((name, values),) = keys.items()
    messages = [{"topic": "greet", "payload": 1, name: value} for value in values]
    rows = connection.execute(
        "SELECT m.id FROM pgoutbox.enqueue_many(%s) AS m ORDER BY m.item_index", [Jsonb(messages)]
    ).fetchall()
    return [message_id for (message_id,) in rows]


async def a_bulk_that_waited_for_a_coalesce_key_is_the_newest(stage: Stage) -> None:
    """The gate is the head row. The bulk waits there with its ids drawn, while the holder writes a greater id."""
    holder, bulk = stage.connect(), stage.connect(autocommit=True)
    enqueue(stage.db, coalesce_key="k")
    holder.execute("SELECT FROM pgoutbox.key_head AS head WHERE head.key = 'k' FOR UPDATE")
    blocked = asyncio.create_task(asyncio.to_thread(enqueue_bulk, bulk, coalesce_key=["k", "k"]))
    await until_blocked(stage.db, blocked)
    enqueue(holder, coalesce_key="k")
    holder.commit()
    _, newest_id = await blocked
    assert ids_in_flight(claim(stage.db)) == [newest_id]


async def waited_for_a_coalesce_key(stage: Stage, dedupe_key: str | None = None) -> int:
    """Enqueue a message that waits at the head row with its id drawn, while the holder writes a greater id."""
    holder, producer = stage.connect(), stage.connect(autocommit=True)
    enqueue(stage.db, coalesce_key="k")
    holder.execute("SELECT FROM pgoutbox.key_head AS head WHERE head.key = 'k' FOR UPDATE")
    waiting = partial(enqueue, producer, coalesce_key="k", dedupe_key=dedupe_key)
    blocked = asyncio.create_task(asyncio.to_thread(waiting))
    await until_blocked(stage.db, blocked)
    enqueue(holder, coalesce_key="k")
    holder.commit()
    return await blocked


async def an_enqueue_that_waited_for_a_coalesce_key_is_the_newest(stage: Stage) -> None:
    newest_id = await waited_for_a_coalesce_key(stage)
    assert ids_in_flight(claim(stage.db)) == [newest_id]


async def an_enqueue_that_drew_again_keeps_its_dedupe_key(stage: Stage) -> None:
    message_id = await waited_for_a_coalesce_key(stage, dedupe_key="d")
    assert enqueue(stage.db, coalesce_key="k", dedupe_key="d") == message_id


async def two_bulks_lock_dedupe_keys_in_one_order_even_if_one_is_freed(stage: Stage) -> None:
    """The gate holds the key a, like a redrive. A bulk that waits there must not have locked the key b yet."""
    gate, bulk, other = stage.connect(), stage.connect(autocommit=True), stage.connect(autocommit=True)
    freed_id = enqueue(stage.db, dedupe_key="a")
    stage.db.execute("SELECT pgoutbox.cancel(%s)", [freed_id])
    gate.execute("SELECT FROM pgoutbox.dedupe AS d WHERE d.dedupe_key = 'a' FOR UPDATE")
    blocked = asyncio.create_task(asyncio.to_thread(enqueue_bulk, bulk, dedupe_key=["b", "a"]))
    await until_blocked(stage.db, blocked)
    other.execute("SET lock_timeout = '50ms'")
    try:
        enqueue_bulk(other, dedupe_key=["b"])
    except psycopg.errors.LockNotAvailable:
        pytest.fail("the bulk has taken the key b")
    finally:
        gate.rollback()
        await blocked


async def a_claim_inserts_its_ordering_keys_in_one_order(stage: Stage) -> None:
    """The gate holds the key b. A claim that waits there already holds the ordering key a, which it finds last."""
    gate, other = stage.connect(), stage.connect(autocommit=True)
    enqueue(stage.db, coalesce_key="b")
    claim(gate)
    enqueue(stage.db, coalesce_key="b")
    ids = [enqueue(stage.db, ordering_key="a") for _ in range(2)]
    both = partial(claim_lanes, stage.connect(autocommit=True), (FRESH, ORDERED))
    blocked: asyncio.Task[object] = asyncio.create_task(asyncio.to_thread(both))
    await until_blocked(stage.db, blocked)
    other.execute("SET lock_timeout = '50ms'")
    try:
        with pytest.raises(psycopg.errors.LockNotAvailable):
            begin(other, ids[1])
    finally:
        gate.rollback()
        await blocked


async def a_redriven_message_waits_for_the_one_of_its_ordering_key_in_flight(stage: Stage) -> None:
    first, _ = (enqueue(stage.db, ordering_key="k") for _ in range(2))
    claim_ordered(stage.db)
    finish(stage.db, End(first, 1, AttemptOutcome.FAILED, "no"))
    claim_ordered(stage.db)
    assert redrive(stage.db, first)
    assert claim_ordered(stage.db) == []


async def a_due_message_is_left_to_its_claim(stage: Stage) -> None:
    older = enqueue(stage.db, coalesce_key="k")
    enqueue_bulk(stage.db, coalesce_key=["k"])
    assert state_of(stage.db, older) == "pending"


async def a_message_that_fell_due_during_the_transaction_is_left_to_its_claim(stage: Stage) -> None:
    producer = stage.connect()
    producer.execute("SELECT now()")
    older = enqueue(stage.db, coalesce_key="k")
    enqueue_bulk(producer, coalesce_key=["k"])
    producer.commit()
    assert state_of(stage.db, older) == "pending"


async def an_enqueue_does_not_wait_for_a_scheduled_message(stage: Stage) -> None:
    older, holder = enqueue(stage.db, coalesce_key="k", available_at=tomorrow()), stage.connect()
    holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [older])
    stage.db.execute("SET lock_timeout = '50ms'")
    try:
        enqueue(stage.db, coalesce_key="k")
    except psycopg.errors.LockNotAvailable:
        pytest.fail("the enqueue waits for the older message")


async def an_enqueue_with_an_older_snapshot_than_a_claim_succeeds(stage: Stage) -> None:
    older, producer = enqueue(stage.db, coalesce_key="k", available_at=tomorrow()), stage.connect()
    producer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    # The scheduled message is moved forward, and the snapshot still shows it as not due.
    producer.execute("SELECT FROM pgoutbox.message")
    make_due(stage.db, older)
    claim(stage.db)
    try:
        enqueue(producer, coalesce_key="k")
    except psycopg.errors.SerializationFailure:
        pytest.fail("the transaction of the producer fails")
    producer.commit()
    assert state_of(stage.db, older) == "sending"


async def a_producer_waits_since_a_concurrent_first_message(stage: Stage) -> None:
    """The gate is the head row: its holder enqueues the first message while the other producer waits there."""
    first, second = stage.connect(), stage.connect(autocommit=True)
    enqueue(stage.db, coalesce_key="k")
    claim(stage.db)
    first.execute("SELECT FROM pgoutbox.key_head FOR UPDATE")
    debounced = partial(enqueue, coalesce_key="k", max_delay=timedelta(hours=1), available_at=tomorrow())
    blocked: asyncio.Task[object] = asyncio.create_task(asyncio.to_thread(debounced, second))
    await until_blocked(stage.db, blocked)
    debounced(first)
    look = "SELECT waiting_since FROM pgoutbox.key_head"
    since = first.execute(look).fetchone()
    first.commit()
    await blocked
    assert stage.db.execute(look).fetchone() == since


# --- cancels and dedupe keys ------------------------------------------------------------------------------------------


async def a_cancel_with_an_older_snapshot_than_a_redrive_is_refused(stage: Stage) -> None:
    """Otherwise its answer would be that the message was cancelled before, and the message would be sent."""
    message_id, application = put(stage.db, State.CANCELLED), stage.connect()
    application.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    application.execute("SELECT FROM pgoutbox.message")
    assert redrive(stage.db, message_id)
    try:
        answer = cancel(application, message_id)
    except psycopg.errors.SerializationFailure:
        return
    pytest.fail(f"the answer is {answer}")


async def a_cancel_does_not_wait_for_a_row(stage: Stage) -> None:
    message_id, holder = enqueue(stage.db), stage.connect()
    holder.execute("SELECT FROM pgoutbox.message_live FOR UPDATE")
    stage.db.execute("SET lock_timeout = '50ms'")
    try:
        assert cancel(stage.db, message_id) == "requested"
    except psycopg.errors.LockNotAvailable:
        pytest.fail("the cancel waits")


async def a_cancel_leaves_no_lock_on_a_message_that_was_claimed_meanwhile(stage: Stage) -> None:
    gate, business = stage.connect(), stage.connect()
    message_id = enqueue(stage.db)
    races.prepare_slow_lock(stage.db, gate)
    locking = asyncio.create_task(asyncio.to_thread(races.lock_slowly, business, message_id))
    await until_blocked(stage.db, locking)
    claim(stage.db)
    gate.rollback()
    assert await locking == []
    stage.db.execute("SET lock_timeout = '50ms'")
    try:
        finish_sent(stage.db, (message_id, 1))
    except psycopg.errors.LockNotAvailable:
        pytest.fail("the row is locked")


async def cancel_beside_a_claim(
    stage: Stage, take: Callable[[psycopg.Connection], object], *, ordering_key: str | None = None
) -> None:
    """Cancel a message whose claim is then rolled back, and claim again."""
    claiming = stage.connect()
    message_id = enqueue(stage.db, ordering_key=ordering_key)
    take(claiming)
    cancel(stage.db, message_id)
    claiming.rollback()
    take(stage.db)
    assert state_of(stage.db, message_id) == "cancelled"


async def an_ordered_message_whose_cancel_met_its_claim_begins_no_other_attempt(stage: Stage) -> None:
    await cancel_beside_a_claim(stage, claim_ordered, ordering_key="k")


def with_a_used_id(stage: Stage, **options: Unpack[Options]) -> int:
    """Create a message whose id an older one had, which was cancelled in flight and ended as sent."""
    enqueue(stage.db)
    ((message_id, attempt_count),) = [(row.id, row.attempt_count) for row in claim(stage.db)]
    assert cancel(stage.db, message_id) == "requested"
    finish_sent(stage.db, (message_id, attempt_count))
    stage.db.execute("ALTER SEQUENCE pgoutbox.message_id_seq RESTART")
    assert enqueue(stage.db, **options) == message_id
    return message_id


def live_states(stage: Stage) -> list[str]:
    return [row[0] for row in stage.db.execute("SELECT state FROM pgoutbox.message_live").fetchall()]


async def a_request_of_another_message_ends_no_claim(stage: Stage) -> None:
    with_a_used_id(stage)
    assert [row.state for row in claim(stage.db)] == ["sending"]


async def a_request_of_another_message_ends_no_ordered_one(stage: Stage) -> None:
    with_a_used_id(stage, ordering_key="k")
    assert [row.state for row in claim_ordered(stage.db)] == ["sending"]


def begun_with_a_used_id(stage: Stage) -> int:
    message_id = with_a_used_id(stage)
    assert ids_in_flight(claim(stage.db, worker="dead")) == [message_id]
    return message_id


async def a_request_of_another_message_ends_no_retry(stage: Stage) -> None:
    message_id = begun_with_a_used_id(stage)
    finish(stage.db, End(message_id, 1, AttemptOutcome.RETRY, "busy"), worker="dead")
    assert live_states(stage) == ["pending"]


async def a_request_of_another_message_ends_no_lost_attempt(stage: Stage) -> None:
    message_id = begun_with_a_used_id(stage)
    lapse(stage.db, message_id)
    claim(stage.db)
    assert live_states(stage) == ["sending"]


async def a_request_of_another_message_stops_no_attempt(stage: Stage) -> None:
    message_id = begun_with_a_used_id(stage)
    assert not watch(stage.db, (message_id, 1), worker="dead")[message_id].cancelled


# --- claims and leases ------------------------------------------------------------------------------------------------


def lost(stage: Stage) -> int:
    message_id = enqueue(stage.db)
    claim(stage.db, worker="dead")
    lapse(stage.db, message_id)
    return message_id


def released_after_its_lease(stage: Stage) -> int:
    """Create a released message whose own lease has ended; its worker has renewed its other attempts since."""
    message_id, other = enqueue(stage.db), enqueue(stage.db)
    claim(stage.db, worker="first")
    lapse(stage.db, message_id)
    stage.db.execute("SELECT pgoutbox.release(%s)", [[message_id]])
    assert set(renew(stage.db, (other, 1), worker="first")) == {other}
    return message_id


async def a_released_message_is_left_to_its_worker_until_its_lease_is_extended(stage: Stage) -> None:
    message_id = released_after_its_lease(stage)
    lapsed(stage.db, worker="second")
    assert (state_of(stage.db, message_id), row_of(stage.db, message_id).attempt_count) == ("sending", 1)


async def a_claim_that_has_ended_takes_no_lease_from_the_next_one(stage: Stage) -> None:
    """A worker claims a message again after another one has looked for claims that have ended."""
    message_id = enqueue(stage.db)
    claim(stage.db, worker="first")
    lapse(stage.db, message_id)
    finish(stage.db, End(message_id, 1, AttemptOutcome.RELEASED), worker="first")
    assert ids_in_flight(claim_lanes(stage.db, (RETRIES,), worker="first")) == [message_id]
    assert lapsed(stage.db, worker="second") == []


async def a_finish_does_not_wait_for_a_renewal(stage: Stage) -> None:
    """Each of the two may hold one of several claims and wait for another one."""
    message_id, renewing = enqueue(stage.db), stage.connect()
    claim(stage.db)
    renew(renewing, (message_id, 1))
    finish_sent(stage.db, (message_id, 1))
    stage.db.execute("SET lock_timeout = '50ms'")
    claimed_ats = [row[0] for row in stage.db.execute("SELECT claimed_at FROM pgoutbox.claim").fetchall()]
    try:
        stage.db.execute(statements.END_CLAIMS, {"worker": "worker-1", "claimed_ats": claimed_ats})
    except psycopg.errors.LockNotAvailable:
        pytest.fail("the finish waits")


async def a_claim_with_an_attempt_is_not_deleted(stage: Stage) -> None:
    message_id = enqueue(stage.db)
    claim(stage.db)
    claimed_ats = [row[0] for row in stage.db.execute("SELECT claimed_at FROM pgoutbox.claim").fetchall()]
    stage.db.execute(statements.END_CLAIMS, {"worker": "worker-1", "claimed_ats": claimed_ats})
    lapse(stage.db, message_id)
    assert ids_in_flight(claim(stage.db, worker="second")) == [message_id]


async def a_search_does_not_wait_for_an_ended_claim(stage: Stage) -> None:
    message_id, holder = lost(stage), stage.connect()
    finish_sent(stage.db, (message_id, 1), worker="dead")
    holder.execute("SELECT FROM pgoutbox.claim FOR UPDATE")
    stage.db.execute("SET lock_timeout = '50ms'")
    try:
        stage.db.execute(statements.FORGET_LAPSED)
    except psycopg.errors.LockNotAvailable:
        pytest.fail("the search waits")


async def a_lapsed_claim_with_attempts_is_not_deleted(stage: Stage) -> None:
    message_id = lost(stage)
    stage.db.execute(statements.FORGET_LAPSED)
    assert ids_in_flight(claim(stage.db, worker="second")) == [message_id]


async def a_dedupe_key_stays_with_a_message_that_is_redriven_meanwhile(stage: Stage) -> None:
    operator, producer = stage.connect(), stage.connect(autocommit=True)
    first = enqueue(stage.db, dedupe_key="k")
    cancel(stage.db, first)
    assert redrive(operator, first)
    blocked = asyncio.create_task(asyncio.to_thread(enqueue, producer, dedupe_key="k"))
    await until_blocked(stage.db, blocked)
    operator.commit()
    assert await blocked == first


async def a_superseded_message_keeps_its_dedupe_key(stage: Stage) -> None:
    older = enqueue(stage.db, coalesce_key="c", dedupe_key="k", available_at=tomorrow())
    enqueue(stage.db, coalesce_key="c")
    assert state_of(stage.db, older) == "skipped"
    assert enqueue(stage.db, dedupe_key="k") == older


# --- acts of operators ------------------------------------------------------------------------------------------------


def announced(stage: Stage, act: Callable[[], object]) -> list[str]:
    """Return the notifications of an act. The last one, of the listener itself, arrives after all of them."""
    listener, heard = stage.connect(autocommit=True), list[str]()
    listener.add_notify_handler(lambda notification: heard.append(notification.payload))
    listener.execute("LISTEN pgoutbox")
    act()
    listener.execute("NOTIFY pgoutbox, 'end'")
    while "end" not in heard:
        listener.execute("SELECT")
    return heard[: heard.index("end")]


def halting(stage: Stage) -> int:
    """Create a failed message that halts its ordering key."""
    message_id = put(stage.db, State.FAILED, ordering_key="k")
    stage.db.execute("UPDATE pgoutbox.message_failed SET halts_key = true WHERE id = %s", [message_id])
    return message_id


async def a_redrive_makes_workers_search(stage: Stage) -> None:
    """A worker has passed over the message before, so the notification of an enqueue is not enough."""
    message_id = put(stage.db, State.FAILED)
    assert announced(stage, lambda: redrive(stage.db, message_id)) == ["all default"]


async def a_reschedule_makes_workers_search(stage: Stage) -> None:
    message_id = enqueue(stage.db, available_at=tomorrow())
    reschedule = partial(stage.db.execute, "SELECT pgoutbox.reschedule(%s)", [[message_id]])
    assert announced(stage, reschedule) == ["all default"]


async def a_dismissal_makes_workers_search_behind_a_halted_key(stage: Stage) -> None:
    message_id = halting(stage)
    dismiss = partial(stage.db.execute, "SELECT pgoutbox.dismiss(%s, 'spam')", [[message_id]])
    assert announced(stage, dismiss) == ["all default"]


def held_back(stage: Stage) -> int:
    """Create a message that a redirect holds back for five minutes."""
    message_id = enqueue(stage.db)
    claim(stage.db)
    held = End(message_id, 1, AttemptOutcome.SNOOZED, "not sent", 300.0, ReasonCode.REDIRECT)
    finish(stage.db, held)
    return message_id


async def the_end_of_a_redirect_makes_workers_search(stage: Stage) -> None:
    held_back(stage)
    assert announced(stage, lambda: stage.db.execute(sql.CLEAR_REDIRECT)) == ["all default"]


async def the_end_of_a_redirect_does_not_wait_for_a_row(stage: Stage) -> None:
    locked, free, holder = held_back(stage), held_back(stage), stage.connect()
    holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [locked])
    stage.db.execute("SET lock_timeout = '50ms'")
    try:
        stage.db.execute(sql.CLEAR_REDIRECT)
    except psycopg.errors.LockNotAvailable:
        pytest.fail("it waits")
    assert [row.due_in_seconds < 3 for row in rows_of(stage.db, locked, free)] == [False, True]


async def the_end_of_a_redirect_leaves_two_seconds_to_old_answers(stage: Stage) -> None:
    """A worker may still take the redirect for switched on, and would hold the message back again."""
    message_id = held_back(stage)
    with stage.db.transaction():  # One transaction has one time.
        stage.db.execute(sql.CLEAR_REDIRECT)
        assert row_of(stage.db, message_id).due_in_seconds == 2


async def the_end_of_a_redirect_leaves_a_message_that_was_attempted_since(stage: Stage) -> None:
    message_id = held_back(stage)
    make_due(stage.db, message_id)
    claim(stage.db)
    finish(stage.db, End(message_id, 2, AttemptOutcome.RETRY, "busy", 300.0))
    stage.db.execute(sql.CLEAR_REDIRECT)
    assert row_of(stage.db, message_id).due_in_seconds > 3


STOP = """
    CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF current_setting('test.stops', true) = 'yes' THEN PERFORM pg_advisory_xact_lock_shared(4711); END IF;
        RETURN NEW;
    END $$
"""


def report_presence(connection: psycopg.Connection, worker: str) -> None:
    parameters = {"worker": worker, "queues": ["default"], "topics": ["greet"], "redirect_to": None}
    facts = {"version": "1", "slots": 50, "watched": [], "late_seconds": 60.0}
    connection.execute(sql.REPORT_WORKER, parameters | facts)


async def two_late_reports_of_presence_do_not_deadlock(stage: Stage) -> None:
    """Each finds the row of the other old. The gate stops the first one right before it writes its own row."""
    gate, first, second = (stage.connect(autocommit=True) for _ in range(3))
    stage.db.execute(STOP.encode())
    stage.db.execute("CREATE TRIGGER stop BEFORE INSERT ON pgoutbox.worker FOR EACH ROW EXECUTE FUNCTION stop()")
    for worker in ("first", "second"):
        report_presence(stage.db, worker)
    stage.db.execute("UPDATE pgoutbox.worker SET seen_at = now() - interval '15 days'")
    gate.execute("SELECT pg_advisory_lock(4711)")
    for connection, stops in ((first, "yes"), (second, "no")):
        connection.execute(
            "SELECT set_config('test.stops', %s, false), set_config('deadlock_timeout', '50ms', false)", [stops]
        )
    with ThreadPoolExecutor(2) as threads:
        stopped = threads.submit(report_presence, first, "first")
        races.until_blocked(stage.db, first, stopped)
        other = threads.submit(report_presence, second, "second")
        await until(lambda: other.done() or is_blocked(stage.db, second))
        gate.execute("SELECT pg_advisory_unlock(4711)")
    assert (stopped.exception(), other.exception()) == (None, None)


def is_blocked(db: psycopg.Connection, other: psycopg.Connection) -> bool:
    pids = db.execute("SELECT pg_blocking_pids(%s)", [other.info.backend_pid]).fetchone()
    return pids is not None and bool(pids[0])


async def a_cancelled_head_of_an_ordering_key_wakes_an_idle_worker(stage: Stage) -> None:
    head, idle = enqueue(stage.db, ordering_key="k", available_at=tomorrow()), stage.connect(autocommit=True)
    idle.execute("SELECT pg_advisory_lock(1885826146, hashtext('default'))")
    assert announced(stage, lambda: cancel(stage.db, head)) == ["default"]


async def a_message_that_has_failed_again_is_not_dismissed(stage: Stage) -> None:
    message_id = put(stage.db, State.FAILED)
    before = row_of(stage.db, message_id).attempt_count - 1
    stage.db.execute("SELECT pgoutbox.dismiss(%s, 'spam', %s)", [[message_id], [before]])
    assert state_of(stage.db, message_id) == "failed"


async def a_dismissal_does_not_wait_for_a_redrive(stage: Stage) -> None:
    message_id, operator = put(stage.db, State.FAILED), stage.connect()
    assert redrive(operator, message_id)
    stage.db.execute("SET lock_timeout = '50ms'")
    try:
        stage.db.execute("SELECT pgoutbox.dismiss(%s, 'spam')", [[message_id]])
    except psycopg.errors.LockNotAvailable:
        pytest.fail("the dismissal waits")


async def a_rate_does_not_evade_a_ceiling_that_commits_meanwhile(stage: Stage) -> None:
    """Both write the first row of the queue. The operator sees none, and waits for that of the owner."""
    owner, operator = stage.connect(), stage.connect(autocommit=True)
    owner.execute(sql.LIMIT_CEILING, {"queue": "mail", "count": 60, "seconds": 3600.0})
    rate = {"queue": "mail", "count": 61, "seconds": 3600.0, "burst": 5}
    blocked: asyncio.Task[object] = asyncio.create_task(asyncio.to_thread(operator.execute, sql.LIMIT_RATE, rate))
    await until_blocked(stage.db, blocked)
    owner.commit()
    with contextlib.suppress(psycopg.errors.CheckViolation):
        await blocked
    assert stage.db.execute("SELECT rate_count FROM pgoutbox.queue").fetchall() == [(60,)]


async def a_ceiling_lowers_a_rate_that_commits_meanwhile(stage: Stage) -> None:
    owner, operator = stage.connect(autocommit=True), stage.connect()
    operator.execute(sql.LIMIT_RATE, {"queue": "mail", "count": 61, "seconds": 3600.0, "burst": 61})
    ceiling = {"queue": "mail", "count": 60, "seconds": 3600.0}
    blocked: asyncio.Task[object] = asyncio.create_task(asyncio.to_thread(owner.execute, sql.LIMIT_CEILING, ceiling))
    await until_blocked(stage.db, blocked)
    operator.commit()
    await blocked
    assert stage.db.execute("SELECT rate_count, burst FROM pgoutbox.queue").fetchall() == [(60, 5)]


# --- suspects ---------------------------------------------------------------------------------------------------------


def lost_together(stage: Stage, count: int, *, max_attempts: int = 11) -> list[int]:
    """Create messages whose process has ended, and one of which may have crashed it."""
    ids = [enqueue(stage.db, max_attempts=max_attempts) for _ in range(count)]
    assert ids_in_flight(claim(stage.db, worker="dead")) == ids
    for message_id in ids:
        lapse(stage.db, message_id)
    return ids


async def messages_that_were_lost_together_are_not_due_together(stage: Stage) -> None:
    ids = lost_together(stage, 3)
    with stage.db.transaction():
        assert ids_in_flight(claim(stage.db)) == ids[:1]


async def a_suspect_on_its_last_attempt_is_claimed_alone(stage: Stage) -> None:
    lost_together(stage, 3, max_attempts=2)
    assert ids_in_flight(claim(stage.db, suspects=False, spread=False)) == []


async def a_message_that_was_lost_beside_a_suspect_is_claimed_alone(stage: Stage) -> None:
    poison, other = enqueue(stage.db, max_attempts=11), enqueue(stage.db, max_attempts=3)
    for worker in ("first", "second"):
        assert ids_in_flight(claim(stage.db, worker=worker, suspects=False, spread=False)) == [poison, other]
        lapse(stage.db, poison)
    assert ids_in_flight(claim(stage.db, suspects=False, spread=False)) == []


async def a_worker_claims_no_second_suspect_while_one_is_alone(stage: Stage) -> None:
    lost_together(stage, 2, max_attempts=2)
    outbox = Outbox(settings_for(stage.dsn))
    opened = asyncio.Event()
    in_flight: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        in_flight.append(message.id)
        await opened.wait()

    worker = WatchedWorker(outbox)
    async with running(worker):
        await worker.asleep.wait()
        run_of(worker).kernel.sweep()
        await worker.falls_asleep()
        opened.set()
        assert len(in_flight) == 1


async def a_search_that_was_put_off_is_not_forgotten(stage: Stage) -> None:
    """A message that was committed late lies before the place where the next claim starts."""
    outbox = Outbox(settings_for(stage.dsn))
    delivered, overslept = asyncio.Event(), asyncio.Event()
    wait = Run._wait

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        if message.id == late:
            delivered.set()

    async def watched(kernel: Run[Any], seconds: float) -> bool:
        if is_committed and seconds > 2 * pause:
            overslept.set()
        return await wait(kernel, seconds)

    writer, is_committed, pause = stage.connect(), False, 3.0
    worker = WatchedWorker(outbox)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_wait", watched)
        patch.setattr(lanes, "_CHEAP_SEARCH_SECONDS", 0.0)  # As if every search were slow.
        patch.setattr(lanes, "_PAUSE_AFTER_SEARCH", 1e9)
        patch.setattr(lanes, "_MAX_PAUSE_SECONDS", pause)
        patch.setattr(lanes, "_LATE_COMMIT_SECONDS", 0.0)
        async with running(worker):
            await worker.sleeping.wait()
            late = enqueue(writer)
            early = enqueue(stage.db)
            await until(partial(is_sent, stage.db, early))
            writer.commit()
            is_committed = True
            await first_of(delivered, overslept)
    assert delivered.is_set()


def is_sent(db: psycopg.Connection, message_id: int) -> bool:
    return state_of(db, message_id) == "sent"


# --- mutations --------------------------------------------------------------------------------------------------------


def no_part(part: str, *names: str, instead: str = "") -> Mutation:
    """Return the statements of these names, or all that have it, without this part."""
    part = part.strip()  # It may begin a line.

    def mutate(stage: Stage, patch: pytest.MonkeyPatch) -> None:
        found = [
            (module, name, text)
            for module in (statements, sql)
            for name in (names or dir(module))
            if isinstance(text := getattr(module, name, None), str) and part in text
        ]
        assert {name for _, name, _ in found} >= set(names or [found[0][1]])
        for module, name, text in found:
            patch.setattr(module, name, text.replace(part, instead))

    return mutate


def no_worker_in(name: str) -> Mutation:
    """Return the statement of this name without its condition on the worker."""
    return no_part("AND m.worker = %(worker)s::text", name)


PLACE = "width_bucket(m.id, %(ids)s::bigint[])"
NUMBER = f"AND m.attempt_count = (%(attempt_counts)s::integer[])[{PLACE}]"
CLAIM = f"AND m.claimed_at = (%(claimed_ats)s::timestamptz[])[{PLACE}]"


NAMED = " AND c.message_created_at = m.created_at"
REQUEST = f"c.message_id = m.id{NAMED}"
OWN = " AND (m.worker <> %(worker)s::text OR m.id <> ALL (%(in_flight)s::bigint[]))"


def no_request(condition: str) -> Mutation:
    """Return the statements that find no request to cancel by this condition."""
    return no_part(condition, instead="false")


def no_check_of_the_rule_in_forget(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    redefine(stage, "_forget_sent", ") = interval '0'\n", ") = interval '0' OR true\n")


def any_attempt_instead_of_the_last_one(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    redefine(stage, "_make_due", "ARRAY['-1', field]", "ARRAY['0', field]")


def no_mark_of_a_kept_key(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    redefine(stage, "_delete_messages", "is_kept = true", "is_kept = d.is_kept")


def redefine(stage: Stage, name: str, part: str, instead: str) -> None:
    """Replace one part of a function of the schema."""
    (definition,) = stage.db.execute(
        "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'pgoutbox'::regnamespace AND proname = %s",
        [name],
    ).fetchone() or ("",)
    assert definition.count(part) == 1
    stage.db.execute(definition.replace(part, instead).encode())


OWN_RULE = """
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.retention AS own WHERE own.topic = m.topic AND own.state = r.state
                )"""


def no_guard_in_function(name: str, part: str, instead: str = "") -> Mutation:
    """Return the function of this name without this part."""

    def mutate(stage: Stage, patch: pytest.MonkeyPatch) -> None:
        redefine(stage, name, part, instead)

    return mutate


def no_count_of_attempts(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    """An act locks and changes messages whatever their number of attempts."""
    redefine(stage, "_choose", "AND m.attempt_count = coalesce(a.attempt_count, m.attempt_count)", "")
    redefine(stage, "_choose", "WHEN m.attempt_count <> a.attempt_count THEN 'changed'", "")


def no_check_of_isolation(name: str) -> Mutation:
    """Return the function of this name, which treats every transaction as read committed."""
    return no_guard_in_function(name, "NOT pgoutbox._reads_committed()", "false")


def notifies_like_an_enqueue(name: str) -> Mutation:
    """Return the function of this name, which notifies only a worker with the wake-up lock."""
    return no_guard_in_function(name, "_wake_all_workers", "_notify_workers")


def no_ceiling_for_updates(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    """Check only new rows of queues."""
    stage.db.execute(
        "CREATE OR REPLACE TRIGGER queue_ceiling BEFORE INSERT ON pgoutbox.queue"
        " FOR EACH ROW EXECUTE FUNCTION pgoutbox._check_limits()"
    )


KEYS_IN_ORDER = "ORDER BY key, is_ordered, CASE WHEN key IS NOT NULL THEN scope END"

SIBLING = "AND (sibling.id IS NULL OR head.newest_id IS NOT NULL)"


def no_unique_index(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    stage.db.execute("DROP INDEX pgoutbox.message_live_in_flight")


def no_guard_of_superseded(instead: str) -> Mutation:
    """The function looks first whether there is such a message."""

    def mutate(stage: Stage, patch: pytest.MonkeyPatch) -> None:
        for end in ("\n    ) THEN", "\n                FOR UPDATE"):
            redefine(stage, "_skip_superseded", f" AND m.available_at > clock_timestamp(){end}", instead + end)

    return mutate


def no_newer_id_of_a_changed_head(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    redefine(stage, "_take_keys", "THEN pgoutbox._next_id(k.newest_id)", "THEN ids[d.ordinality]")


def no_order_of_dedupe_keys(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    redefine(stage, "_take_dedupe_keys", "FROM first AS f\n", "FROM (SELECT * FROM first ORDER BY id OFFSET 0) AS f\n")


def no_own_row_first(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    no_part("CROSS JOIN reported AS r\n", "REPORT_WORKER")(stage, patch)
    no_part("r.name\n", "REPORT_WORKER", instead="%(worker)s::text\n")(stage, patch)


def no_memory_of_suspects(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Run, "suspect", property(lambda self: None, lambda self, suspect: None), raising=False)


def no_owed_search(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lanes.Lane, "due_at", lambda lane: -math.inf if lane.is_wanted else math.inf)


def no_comparison_of(column: str) -> Mutation:
    def mutate(stage: Stage, patch: pytest.MonkeyPatch) -> None:
        ((view,),) = stage.db.execute("SELECT pg_get_viewdef('pgoutbox.home_view'::regclass)").fetchall()
        comparison = f"h.{column} = here.{column}"
        assert view.count(comparison) == 1
        without_it = view.replace(comparison, "true")
        stage.db.execute(f"CREATE OR REPLACE VIEW pgoutbox.home_view AS {without_it}".encode())

    return mutate


def no_comparison_of_deployments(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    redefine(stage, "_require_home", "home.deployment <> coalesce(_require_home.deployment, '')", "false")


def no_comparison_without_a_deployment(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    redefine(stage, "_require_home", "<> coalesce(_require_home.deployment, '')", "<> _require_home.deployment")


REQUIRE_HOME: Final = "    pgoutbox._require_home(%(deployment)s::text, %(package)s::text),\n"

GUARDED: list[tuple[str, Scenario, Mutation]] = [
    ("home of a session", a_worker_claims_nothing_in_another_database, no_part(REQUIRE_HOME, "PREPARE_SESSION")),
    (
        "home of a transaction",
        a_worker_behind_a_pooler_claims_nothing_in_another_database,
        no_part(REQUIRE_HOME, "PREPARE_TRANSACTION"),
    ),
    ("home: database", a_worker_claims_nothing_in_another_database, no_comparison_of("database_id")),
    ("home: server", a_worker_claims_nothing_on_another_server, no_comparison_of("server_id")),
    ("home: deployment", a_worker_of_another_deployment_claims_nothing, no_comparison_of_deployments),
    (
        "home: missing deployment",
        a_worker_without_a_deployment_claims_nothing_from_a_named_one,
        no_comparison_without_a_deployment,
    ),
    (
        "state of an announced failure",
        an_attempt_that_is_retried_announces_no_failure,
        no_part("m.state = 'failed' AND "),
    ),
    (
        "state of an announced failure of a lapsed attempt",
        a_lapsed_attempt_that_expired_announces_no_failure,
        no_part("m.state = 'failed' AND "),
    ),
    (
        "fence in watch",
        a_stale_attempt_cannot_watch,
        no_part(NUMBER, "WATCH_IF_HELD"),
    ),
    ("claim in watch", an_attempt_of_a_lost_message_cannot_watch, no_part(CLAIM, "WATCH_IF_HELD")),
    (
        "claim in current states",
        an_attempt_of_a_lost_message_learns_that_it_is_lost,
        no_part(CLAIM, "STATES"),
    ),
    ("claim in large payload", an_attempt_of_a_lost_message_gets_no_payload, no_part(CLAIM, "LARGE_PAYLOAD")),
    (
        "claim in the function",
        an_attempt_of_a_lost_message_cannot_delete_by_the_function,
        no_guard_in_function("_forget_sent", "AND m.claimed_at = o.claimed_at "),
    ),
    ("worker in watch", a_worker_of_a_lost_timeline_cannot_watch, no_worker_in("WATCH_IF_HELD")),
    (
        "worker in current states",
        a_worker_of_a_lost_timeline_learns_that_its_attempt_is_lost,
        no_worker_in("STATES"),
    ),
    ("own attempts: suspects", a_worker_does_not_repeat_a_lapsed_attempt_that_it_still_runs, no_part(OWN)),
    ("own attempts: ending", a_worker_does_not_end_a_lapsed_attempt_that_it_still_runs, no_part(OWN)),
    (
        "forgotten attempts: suspects",
        a_worker_repeats_an_attempt_in_its_name_that_it_does_not_run,
        no_part(" OR m.id <> ALL (%(in_flight)s::bigint[])"),
    ),
    (
        "forgotten attempts: ending",
        a_worker_ends_an_attempt_in_its_name_that_it_does_not_run,
        no_part(" OR m.id <> ALL (%(in_flight)s::bigint[])"),
    ),
    ("rule in forget", a_removed_rule_has_no_effect_from_its_commit_on, no_check_of_the_rule_in_forget),
    (
        "own rule in forget",
        a_topics_own_rule_holds,
        no_guard_in_function("_forget_sent", "ORDER BY r.topic = '*'", "ORDER BY r.topic <> '*'"),
    ),
    (
        "dedupe key outlives zero",
        a_repeated_enqueue_of_a_deleted_message_is_recognised,
        no_mark_of_a_kept_key,
    ),
    (
        "dedupe key of a message",
        a_key_that_has_a_message_is_not_pruned,
        no_guard_in_function(
            "_delete_dedupe_keys",
            "        AND (SELECT m.id FROM pgoutbox.message AS m WHERE m.id = p.message_id LIMIT 1) IS NULL\n",
        ),
    ),
    (
        "own rule in prune",
        pruning_skips_messages_that_their_topic_keeps,
        no_guard_in_function("_prune_by_rule", OWN_RULE),
    ),
    (
        "locked rows in prune",
        pruning_skips_a_message_that_is_being_redriven,
        no_guard_in_function("_prune_by_rule", " SKIP LOCKED"),
    ),
    (
        "locked breaker in an erasure",
        an_erasure_does_not_wait_for_a_breaker,
        no_guard_in_function("_erase", "FOR UPDATE SKIP LOCKED\n    ) AS locked", "FOR UPDATE\n    ) AS locked"),
    ),
    (
        "content of a message in prune",
        a_content_that_a_message_refers_to_is_not_pruned,
        no_guard_in_function(
            "_prune_content",
            " AND (SELECT m.id FROM pgoutbox.message AS m WHERE m.content_id = p.id LIMIT 1) IS NULL",
        ),
    ),
    (
        "age in prune",
        pruning_applies_the_current_rule,
        no_guard_in_function("_prune_by_rule", "        AND m.finished_at <= now() - r.keep\n"),
    ),
    ("one in flight: look", a_successor_waits_for_its_predecessor, no_part(SIBLING)),
    (
        "one in flight: look at an ordering key",
        a_redriven_message_waits_for_the_one_of_its_ordering_key_in_flight,
        no_part("s.key_in_flight = v.key", "CLAIM", instead="false"),
    ),
    ("one in flight: index", one_of_two_claims_with_concurrent_snapshots_is_refused, no_unique_index),
    ("order of ordering keys", a_claim_inserts_its_ordering_keys_in_one_order, no_part(KEYS_IN_ORDER)),
    (
        "bulk: newer id of a changed head",
        a_bulk_that_waited_for_a_coalesce_key_is_the_newest,
        no_newer_id_of_a_changed_head,
    ),
    (
        "head: one message",
        an_enqueue_that_waited_for_a_coalesce_key_is_the_newest,
        no_guard_in_function("_enqueue_receipt", "ELSE pgoutbox._next_id(head.newest_id)", "ELSE excluded.newest_id"),
    ),
    (
        "head: dedupe key",
        an_enqueue_that_drew_again_keeps_its_dedupe_key,
        no_guard_in_function("_enqueue_receipt", "IF newest_id <> new_id AND", "IF false AND"),
    ),
    (
        "bulk: look for freed keys",
        two_bulks_lock_dedupe_keys_in_one_order_even_if_one_is_freed,
        no_order_of_dedupe_keys,
    ),
    (
        "superseded before due: due",
        a_due_message_is_left_to_its_claim,
        no_guard_of_superseded(""),
    ),
    (
        "superseded before due: clock",
        a_message_that_fell_due_during_the_transaction_is_left_to_its_claim,
        no_guard_of_superseded(" AND m.available_at > now()"),
    ),
    (
        "superseded before due: lock",
        an_enqueue_does_not_wait_for_a_scheduled_message,
        no_guard_in_function("_skip_superseded", " SKIP LOCKED"),
    ),
    (
        "superseded before due: moved row",
        an_enqueue_with_an_older_snapshot_than_a_claim_succeeds,
        no_guard_in_function("_skip_superseded", "WHEN serialization_failure", "WHEN division_by_zero"),
    ),
    (
        "max_delay: start of the wait",
        a_producer_waits_since_a_concurrent_first_message,
        no_guard_in_function("_take_keys", "coalesce(head.waiting_since, now())", "now()"),
    ),
    (
        "cancel: older snapshot",
        a_cancel_with_an_older_snapshot_than_a_redrive_is_refused,
        no_check_of_isolation("_cancel_unrecorded"),
    ),
    (
        "cancel: locked row",
        a_cancel_does_not_wait_for_a_row,
        no_guard_in_function("_lock_pending", " SKIP LOCKED"),
    ),
    (
        "cancel: no lock left",
        a_cancel_leaves_no_lock_on_a_message_that_was_claimed_meanwhile,
        no_guard_in_function("_lock_pending", "RAISE SQLSTATE 'PGOBX'", "RETURN locked"),
    ),
    (
        "request in claim of ordered messages",
        an_ordered_message_whose_cancel_met_its_claim_begins_no_other_attempt,
        no_request(REQUEST),
    ),
    ("message of a request: claim", a_request_of_another_message_ends_no_claim, no_part(NAMED)),
    ("message of a request: ordered", a_request_of_another_message_ends_no_ordered_one, no_part(NAMED)),
    ("message of a request: finish", a_request_of_another_message_ends_no_retry, no_part(NAMED, "FINISH")),
    (
        "message of a request: lapsed",
        a_request_of_another_message_ends_no_lost_attempt,
        no_part(NAMED.replace("c.", "r.")),
    ),
    (
        "message of a request: watch",
        a_request_of_another_message_stops_no_attempt,
        no_part(NAMED.replace("c.", "r.")),
    ),
    (
        "lease of a released message",
        a_released_message_is_left_to_its_worker_until_its_lease_is_extended,
        no_part(" AND coalesce(c.released_from, '') = ''"),
    ),
    (
        "claim of an attempt",
        a_claim_that_has_ended_takes_no_lease_from_the_next_one,
        no_part(" AND m.claimed_at = c.claimed_at"),
    ),
    (
        "renewal beside a finish",
        a_finish_does_not_wait_for_a_renewal,
        no_part(" SKIP LOCKED", "END_CLAIMS"),
    ),
    (
        "attempts of an ended claim",
        a_claim_with_an_attempt_is_not_deleted,
        no_part("NOT EXISTS", "END_CLAIMS", instead="true OR EXISTS"),
    ),
    (
        "lock of an ended claim",
        a_search_does_not_wait_for_an_ended_claim,
        no_part(" SKIP LOCKED", "FORGET_LAPSED"),
    ),
    (
        "attempts of a deleted claim",
        a_lapsed_claim_with_attempts_is_not_deleted,
        no_part("NOT EXISTS", "FORGET_LAPSED", instead="true OR EXISTS"),
    ),
    (
        "dedupe: second look at a freed key",
        a_dedupe_key_stays_with_a_message_that_is_redriven_meanwhile,
        no_guard_in_function("_take_dedupe_keys", " AND pgoutbox._has_freed_key(t.message_id)"),
    ),
    (
        "dedupe: superseded message",
        a_superseded_message_keeps_its_dedupe_key,
        no_guard_in_function("_has_freed_key", "WHEN m.superseded_by IS NULL THEN", "WHEN true THEN"),
    ),
    ("redrive: search", a_redrive_makes_workers_search, notifies_like_an_enqueue("_acted")),
    ("reschedule: search", a_reschedule_makes_workers_search, notifies_like_an_enqueue("_acted")),
    ("dismiss: search", a_dismissal_makes_workers_search_behind_a_halted_key, notifies_like_an_enqueue("_acted")),
    (
        "cancel: messages behind it",
        a_cancelled_head_of_an_ordering_key_wakes_an_idle_worker,
        no_guard_in_function("_cancel_unrecorded", "c.ordering_key IS NOT NULL", "false"),
    ),
    (
        "dismiss: attempt count",
        a_message_that_has_failed_again_is_not_dismissed,
        no_count_of_attempts,
    ),
    (
        "dismiss: locked row",
        a_dismissal_does_not_wait_for_a_redrive,
        no_guard_in_function("_choose", " SKIP LOCKED"),
    ),
    ("redirect: search", the_end_of_a_redirect_makes_workers_search, notifies_like_an_enqueue("_make_due")),
    (
        "redirect: locked row",
        the_end_of_a_redirect_does_not_wait_for_a_row,
        no_guard_in_function("_make_due", " SKIP LOCKED"),
    ),
    (
        "redirect: old answers",
        the_end_of_a_redirect_leaves_two_seconds_to_old_answers,
        no_guard_in_function("_make_due", "SET available_at = due_at", "SET available_at = now()"),
    ),
    (
        "redirect: attempts since",
        the_end_of_a_redirect_leaves_a_message_that_was_attempted_since,
        any_attempt_instead_of_the_last_one,
    ),
    (
        "presence: own row first",
        two_late_reports_of_presence_do_not_deadlock,
        no_own_row_first,
    ),
    (
        "ceiling: concurrent rate",
        a_rate_does_not_evade_a_ceiling_that_commits_meanwhile,
        no_ceiling_for_updates,
    ),
    ("ceiling: concurrent ceiling", a_ceiling_lowers_a_rate_that_commits_meanwhile, no_ceiling_for_updates),
    (
        "suspects: last attempt",
        a_suspect_on_its_last_attempt_is_claimed_alone,
        no_part("m.max_attempts - m.attempt_count <= m.attempt_budget / 2", instead="false"),
    ),
    (
        "suspects: lost beside one",
        a_message_that_was_lost_beside_a_suspect_is_claimed_alone,
        no_part("s.claimed_at = o.claimed_at", instead="s.claimed_at = o.claimed_at AND s.id = m.id"),
    ),
    (
        "suspects: distance",
        messages_that_were_lost_together_are_not_due_together,
        no_part("(j.number - 1)", instead="0"),
    ),
    ("suspects: memory", a_worker_claims_no_second_suspect_while_one_is_alone, no_memory_of_suspects),
    ("search put off", a_search_that_was_put_off_is_not_forgotten, no_owed_search),
]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [pytest.param(scenario, id=name) for name, scenario, _ in GUARDED])
async def test_a_scenario_holds_with_its_guard(stage: Stage, scenario: Scenario) -> None:
    await scenario(stage)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "mutate"), [pytest.param(scenario, mutate, id=name) for name, scenario, mutate in GUARDED]
)
async def test_a_scenario_fails_without_its_guard(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, scenario: Scenario, mutate: Mutation
) -> None:
    mutate(stage, monkeypatch)
    with pytest.raises((AssertionError, psycopg.errors.UniqueViolation, pytest.fail.Exception)):
        await scenario(stage)
