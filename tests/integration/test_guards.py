"""Every guard has a scenario that holds with it and fails without it: the tests of the tests.

A scenario is run twice: as the package is, where it must hold, and with its guard taken out of the statement, the
schema or the worker, where it must fail. A mutation that no longer finds what it takes out fails too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import textwrap
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

import pgoutbox.worker
from pgoutbox import Outbox, sql
from pgoutbox.dispatch import Context
from pgoutbox.doorbell import Bell, Doorbell
from pgoutbox.link import Link
from pgoutbox.message import Message, State
from pgoutbox.store import Verdict
from pgoutbox.telemetry import Telemetry
from tests.messages import put
from tests.outbox_actions import (
    WatchedWorker,
    claim,
    enqueue,
    finish,
    finish_sent,
    finish_sent_and_forget,
    first_of,
    ids_in_flight,
    lapse,
    redrive,
    renew,
    row_of,
    rows_of,
    running,
    settings_for,
    state_of,
    until_blocked,
    watch,
)
from tests.races import ADVISORY_LOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.conftest import Connect


@dataclass(frozen=True, slots=True)
class Stage:
    """What a scenario plays on."""

    dsn: str
    connect: Connect
    db: psycopg.Connection


Scenario = Callable[[Stage], Awaitable[None]]
Mutation = Callable[[Stage, pytest.MonkeyPatch], None]


@pytest.fixture
def stage(dsn: str, connect: Connect) -> Stage:
    """The test's own database."""
    return Stage(dsn, connect, connect(autocommit=True))


# --- the fence --------------------------------------------------------------------------------------------------------


def attempted_again(stage: Stage) -> int:
    """A message in its second attempt, by the worker that made the first one."""
    message_id = enqueue(stage.db)
    claim(stage.db)
    finish(stage.db, Verdict(message_id, 1, "released"))
    assert ids_in_flight(claim(stage.db)) == [message_id]
    return message_id


def claimed_on_both_timelines(stage: Stage) -> int:
    """A message in its first attempt by worker-1. The server has lost the commit of another worker's first attempt."""
    message_id = enqueue(stage.db)
    lost = stage.connect()
    assert ids_in_flight(claim(lost, worker="stale")) == [message_id]
    lost.rollback()
    assert ids_in_flight(claim(stage.db)) == [message_id]
    return message_id


async def a_stale_attempt_cannot_write_sent(stage: Stage) -> None:
    message_id = attempted_again(stage)
    finish_sent(stage.db, (message_id, 1))
    assert row_of(stage.db, message_id).state == "sending"


async def a_stale_attempt_cannot_write_another_end(stage: Stage) -> None:
    message_id = attempted_again(stage)
    finish(stage.db, Verdict(message_id, 1, "failed", "stale"))
    assert row_of(stage.db, message_id).state == "sending"


async def a_stale_attempt_cannot_renew(stage: Stage) -> None:
    message_id = attempted_again(stage)
    assert renew(stage.db, (message_id, 1)) == {}


async def a_stale_attempt_cannot_watch(stage: Stage) -> None:
    message_id = attempted_again(stage)
    assert watch(stage.db, (message_id, 1)) == {}


async def a_worker_of_a_lost_timeline_cannot_write_sent(stage: Stage) -> None:
    message_id = claimed_on_both_timelines(stage)
    finish_sent(stage.db, (message_id, 1), worker="stale")
    assert row_of(stage.db, message_id).state == "sending"


async def a_worker_of_a_lost_timeline_cannot_write_another_end(stage: Stage) -> None:
    message_id = claimed_on_both_timelines(stage)
    finish(stage.db, Verdict(message_id, 1, "failed", "stale"), worker="stale")
    assert row_of(stage.db, message_id).state == "sending"


async def a_worker_of_a_lost_timeline_cannot_renew(stage: Stage) -> None:
    message_id = claimed_on_both_timelines(stage)
    assert renew(stage.db, (message_id, 1), worker="stale") == {}


async def a_worker_of_a_lost_timeline_cannot_watch(stage: Stage) -> None:
    message_id = claimed_on_both_timelines(stage)
    assert watch(stage.db, (message_id, 1), worker="stale") == {}


async def a_worker_of_a_lost_timeline_is_not_told_that_its_attempt_stands(stage: Stage) -> None:
    message_id = claimed_on_both_timelines(stage)
    parameters = {"ids": [message_id], "attempt_counts": [1], "worker": "stale"}
    assert stage.db.execute(sql.STANDING, parameters).fetchall() == []


async def a_worker_of_a_lost_timeline_cannot_delete(stage: Stage) -> None:
    keep_nothing(stage)
    message_id = claimed_on_both_timelines(stage)
    finish_sent_and_forget(stage.db, (message_id, 1), worker="stale")
    assert [row.state for row in rows_of(stage.db, message_id)] == ["sending"]


async def a_worker_leaves_the_lapsed_attempt_that_it_holds(stage: Stage) -> None:
    message_id = enqueue(stage.db)
    claim(stage.db)
    lapse(stage.db, message_id)
    assert claim(stage.db) == []
    assert claim(stage.db, held=[message_id]) == []


async def a_worker_does_not_end_the_lapsed_attempt_that_it_holds(stage: Stage) -> None:
    message_id = enqueue(stage.db, max_attempts=1)
    claim(stage.db)
    lapse(stage.db, message_id)
    assert claim(stage.db) == []
    assert claim(stage.db, held=[message_id]) == []


async def a_worker_takes_over_an_attempt_in_its_name_that_it_does_not_hold(stage: Stage) -> None:
    held, forgotten = enqueue(stage.db), enqueue(stage.db)
    claim(stage.db)
    lapse(stage.db, held)
    lapse(stage.db, forgotten)
    assert ids_in_flight(claim(stage.db, held=[held])) == [forgotten]


async def a_worker_ends_an_attempt_in_its_name_that_it_does_not_hold(stage: Stage) -> None:
    held, forgotten = enqueue(stage.db, max_attempts=1), enqueue(stage.db, max_attempts=1)
    claim(stage.db)
    lapse(stage.db, held)
    lapse(stage.db, forgotten)
    claim(stage.db, held=[held])
    assert [row.state for row in rows_of(stage.db, held, forgotten)] == ["sending", "failed"]


async def an_attempt_from_before_a_redrive_cannot_write(stage: Stage) -> None:
    message_id = enqueue(stage.db, max_attempts=1)
    claim(stage.db)
    finish(stage.db, Verdict(message_id, 1, "failed", "first"))
    assert redrive(stage.db, message_id)
    claim(stage.db)
    finish_sent(stage.db, (message_id, 1))
    assert state_of(stage.db, message_id) == "sending"


async def a_released_attempt_cannot_write(stage: Stage) -> None:
    message_id = enqueue(stage.db)
    claim(stage.db)
    finish(stage.db, Verdict(message_id, 1, "released"))
    claim(stage.db)
    finish_sent(stage.db, (message_id, 1))
    assert state_of(stage.db, message_id) == "sending"


# --- retention --------------------------------------------------------------------------------------------------------


def keep_nothing(stage: Stage, topic: str = "*", state: str = "sent") -> None:
    stage.db.execute("INSERT INTO pgoutbox.retention (topic, state, keep) VALUES (%s, %s, '0')", [topic, state])


async def a_stale_attempt_cannot_delete(stage: Stage) -> None:
    keep_nothing(stage)
    message_id = attempted_again(stage)
    finish_sent_and_forget(stage.db, (message_id, 1))
    assert [row.state for row in rows_of(stage.db, message_id)] == ["sending"]


async def what_is_pending_again_is_not_deleted(stage: Stage) -> None:
    keep_nothing(stage)
    message_id = enqueue(stage.db)
    claim(stage.db)
    finish(stage.db, Verdict(message_id, 1, "retry", "busy"))
    finish_sent_and_forget(stage.db, (message_id, 1))
    assert rows_of(stage.db, message_id)


async def a_rule_that_was_taken_back_is_obeyed_at_once(stage: Stage) -> None:
    message_id = enqueue(stage.db)
    claim(stage.db)
    assert finish_sent_and_forget(stage.db, (message_id, 1)) == {message_id}
    assert rows_of(stage.db, message_id)


async def a_topics_own_rule_holds(stage: Stage) -> None:
    keep_nothing(stage)
    stage.db.execute("INSERT INTO pgoutbox.retention (topic, state) VALUES ('greet', 'sent')")
    message_id = enqueue(stage.db)
    claim(stage.db)
    finish_sent_and_forget(stage.db, (message_id, 1))
    assert rows_of(stage.db, message_id)


async def a_repetition_of_a_deleted_message_is_known(stage: Stage) -> None:
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


async def pruning_leaves_what_its_topic_keeps(stage: Stage) -> None:
    message_id = put(stage.db, State.SENT, age=timedelta(days=1))
    keep_nothing(stage)
    stage.db.execute("INSERT INTO pgoutbox.retention (topic, state) VALUES ('mail', 'sent')")
    prune_by_rules(stage.db)
    assert rows_of(stage.db, message_id)


async def pruning_leaves_a_message_that_is_being_redriven(stage: Stage) -> None:
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


async def pruning_obeys_the_rule_as_it_stands(stage: Stage) -> None:
    message_id = put(stage.db, State.SENT, age=timedelta(days=1))
    parameters = {"topic": "mail", "state": "sent", "limit": 9, "since": "-infinity", "until": "infinity"}
    keep_nothing(stage, topic="mail")
    stage.db.execute("UPDATE pgoutbox.retention SET keep = '2 days'")
    stage.db.execute(sql.PRUNE_BY_RULE, parameters)
    assert rows_of(stage.db, message_id)


def prune_by_rules(db: psycopg.Connection) -> None:
    for topic, state in db.execute("SELECT topic, state FROM pgoutbox.retention WHERE keep IS NOT NULL").fetchall():
        statement = sql.PRUNE_DEDUPE_BY_RULE if state == "dedupe_key" else sql.PRUNE_BY_RULE
        db.execute(statement, {"topic": topic, "state": state, "limit": 9, "since": "-infinity", "until": "infinity"})


# --- one in flight, newest wins ---------------------------------------------------------------------------------------


async def a_successor_waits_for_its_predecessor(stage: Stage) -> None:
    enqueue(stage.db, coalesce_key="k")
    claim(stage.db)
    enqueue(stage.db, coalesce_key="k")
    assert claim(stage.db) == []


async def a_fresh_successor_waits_for_its_predecessor(stage: Stage) -> None:
    enqueue(stage.db, coalesce_key="k")
    claim(stage.db, fresh_only=True)
    enqueue(stage.db, coalesce_key="k")
    assert claim(stage.db, fresh_only=True) == []


async def of_two_claims_that_do_not_see_each_other_one_is_refused(stage: Stage) -> None:
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


async def an_older_message_is_not_delivered_after_a_newer_one(stage: Stage) -> None:
    older = enqueue(stage.db, coalesce_key="k")
    newer = enqueue(stage.db, coalesce_key="k")
    assert ids_in_flight(claim(stage.db)) == [newer]
    assert state_of(stage.db, older) == "skipped"


async def an_older_message_is_not_delivered_by_a_claim_of_fresh_ones(stage: Stage) -> None:
    older = enqueue(stage.db, coalesce_key="k")
    newer = enqueue(stage.db, coalesce_key="k")
    assert ids_in_flight(claim(stage.db, fresh_only=True)) == [newer]
    assert state_of(stage.db, older) == "skipped"


async def an_older_attempt_is_not_retried_after_a_newer_message(stage: Stage) -> None:
    older = enqueue(stage.db, coalesce_key="k")
    claim(stage.db)
    enqueue(stage.db, coalesce_key="k")
    finish(stage.db, Verdict(older, 1, "retry", "busy"))
    assert state_of(stage.db, older) == "skipped"


# --- suspects ---------------------------------------------------------------------------------------------------------


def lost_together(stage: Stage, count: int, *, max_attempts: int = 11) -> list[int]:
    """Messages whose process has ended, and one of them may have ended it."""
    ids = [enqueue(stage.db, max_attempts=max_attempts) for _ in range(count)]
    assert ids_in_flight(claim(stage.db, worker="dead")) == ids
    for message_id in ids:
        lapse(stage.db, message_id)
    return ids


async def suspects_are_claimed_one_by_one(stage: Stage) -> None:
    ids = lost_together(stage, 3)
    assert ids_in_flight(claim(stage.db, suspect_limit=1)) == ids[:1]


async def a_last_attempt_is_not_made_beside_other_suspects(stage: Stage) -> None:
    lost_together(stage, 3, max_attempts=2)
    assert ids_in_flight(claim(stage.db, suspect_limit=3)) == []


async def while_a_suspect_is_in_flight_its_worker_claims_no_other(stage: Stage) -> None:
    lost_together(stage, 2)
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
        opened.set()
        assert len(in_flight) == 1


# --- the doorbell -----------------------------------------------------------------------------------------------------


async def an_enqueue_under_way_is_not_missed_by_arming(stage: Stage) -> None:
    producer = stage.connect()
    enqueue(producer)
    rings: list[str | None] = []
    doorbell = Doorbell(
        settings_for(stage.dsn),
        ["greet"],
        on_ring=rings.append,
        on_check=lambda: None,
        telemetry=Telemetry(pgoutbox.worker._log),
    )
    await doorbell.start()
    try:
        armed = await doorbell.arm(["default"])
        producer.commit()
        await doorbell._probe()  # Its answer comes after every ring that is on the way.
    finally:
        await doorbell.stop()
    assert armed is Bell.PRODUCERS or rings == ["default"]


async def a_commit_between_the_claim_and_arming_is_not_missed(stage: Stage) -> None:
    outbox = Outbox(settings_for(stage.dsn))
    delivered = asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.set()

    worker = WatchedWorker(outbox)
    with enqueued_before_arming(stage.db):
        async with running(worker):
            await first_of(delivered, worker.asleep)
            assert delivered.is_set()


@contextmanager
def enqueued_before_arming(db: psycopg.Connection) -> Iterator[None]:
    """A message commits after the worker's claim found nothing, and before it arms the bell."""
    arm = Doorbell.arm
    gate_is_open = True

    async def enqueue_and_arm(self: Doorbell, queues: Sequence[str]) -> Bell:
        nonlocal gate_is_open
        if gate_is_open:
            gate_is_open = False
            enqueue(db)
        return await arm(self, queues)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Doorbell, "arm", enqueue_and_arm)
        yield


# --- the session ------------------------------------------------------------------------------------------------------


async def two_workers_claims_do_not_fail_under_a_strict_default_isolation(stage: Stage) -> None:
    stage.db.execute(
        psycopg.sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = 'serializable'").format(
            psycopg.sql.Identifier(stage.db.info.dbname)
        )
    )
    link = Link(stage.dsn, settings_for(stage.dsn), purpose="test")
    try:
        ((isolation,),) = await link.fetch("SELECT current_setting('transaction_isolation')", {})
    finally:
        await link.close()
    assert isolation == "read committed"


# --- mutations --------------------------------------------------------------------------------------------------------


def without(text: str, *parts: str, times: int = 1) -> str:
    """`text` with each part taken out; every part has to be there so many times."""
    for part in parts:
        assert text.count(part) == times, f"{part!r} is there {text.count(part)} times"
        text = text.replace(part, "")
    return text


def no_fence_in(name: str, *conditions: str) -> Mutation:
    """The statement of this name without its conditions on the attempt count."""

    def mutate(stage: Stage, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(sql, name, without(getattr(sql, name), *conditions))

    return mutate


def no_worker_in(name: str, *, times: int = 1) -> Mutation:
    """The statement of this name without its condition on the worker."""

    def mutate(stage: Stage, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(sql, name, without(getattr(sql, name), "AND m.worker = %(worker)s::text", times=times))

    return mutate


OWN = " AND (m.worker <> %(worker)s::text OR m.id <> ALL (%(held)s::bigint[]))"


def no_look_at_the_owner(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql, "CLAIM", without(sql.CLAIM, OWN, times=2))


def no_look_at_what_is_held(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql, "CLAIM", without(sql.CLAIM, " OR m.id <> ALL (%(held)s::bigint[])", times=2))


NO_FENCE_IN_SENT = no_fence_in("FINISH_SENT_IF_HELD", "AND m.attempt_count = o.attempt_count")
NO_FENCE_IN_FINISH = no_fence_in(
    "FINISH_IF_HELD", "AND m.attempt_count = o.attempt_count", "AND m.attempt_count = h.attempt_count"
)


def no_fence_in_forget(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    fenced = without(sql.FINISH_SENT_AND_FORGET_IF_HELD, "AND m.attempt_count = o.attempt_count")
    patch.setattr(sql, "FINISH_SENT_AND_FORGET_IF_HELD", without(fenced, "AND m.attempt_count = h.attempt_count"))


def no_state_in_forget(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    stateless = without(sql.FINISH_SENT_AND_FORGET_IF_HELD, "m.state = 'sending' AND ")
    patch.setattr(sql, "FINISH_SENT_AND_FORGET_IF_HELD", without(stateless, "AND m.state = 'sending'\n"))
    redefine(stage, "forget_sent", "AND m.state = 'sending'\n", "\n")


def no_look_at_the_rule_in_forget(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    redefine(stage, "forget_sent", "WHERE EXISTS (", "WHERE true OR EXISTS (")


def redefine(stage: Stage, name: str, part: str, instead: str) -> None:
    """Replace one part of a function of the schema."""
    (definition,) = stage.db.execute(
        "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'pgoutbox'::regnamespace AND proname = %s",
        [name],
    ).fetchone() or ("",)
    assert definition.count(part) == 1
    stage.db.execute(definition.replace(part, instead).encode())


OWN_RULE_IN_FORGET = """
                    AND (
                        r.topic = t.topic
                        OR NOT EXISTS (
                            SELECT FROM pgoutbox.retention AS own WHERE own.topic = t.topic AND own.state = 'sent'
                        )
                    )"""

OWN_RULE = """
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.retention AS own WHERE own.topic = m.topic AND own.state = r.state
                )"""


def no_guard_in_function(name: str, part: str) -> Mutation:
    """The function of this name without this part."""

    def mutate(stage: Stage, patch: pytest.MonkeyPatch) -> None:
        redefine(stage, name, part, "")

    return mutate


SIBLING = """
        AND (
            m.coalesce_key IS NULL
            OR NOT EXISTS (
                SELECT
                FROM pgoutbox.message_live AS sibling
                WHERE sibling.topic = m.topic
                    AND sibling.coalesce_key = m.coalesce_key
                    AND sibling.state = 'sending'
                    AND sibling.id <> m.id
            )
            OR EXISTS (
                SELECT
                FROM pgoutbox.coalesce AS head
                WHERE head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND head.newest_id > m.id
            )
        )"""


def no_look_at_siblings(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql, "CLAIM", without(sql.CLAIM, SIBLING, times=2))


FRESH_SIBLING = """
        AND (
            m.coalesce_key IS NULL
            OR head.newest_id > m.id
            OR NOT EXISTS (
                SELECT
                FROM pgoutbox.message_live AS sibling
                WHERE sibling.topic = m.topic
                    AND sibling.coalesce_key = m.coalesce_key
                    AND sibling.state = 'sending'
                    AND sibling.id <> m.id
            )
        )"""


def no_look_at_siblings_of_fresh(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql, "CLAIM_FRESH", without(sql.CLAIM_FRESH, FRESH_SIBLING))


def no_unique_index(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    stage.db.execute("DROP INDEX pgoutbox.message_live_in_flight")


def no_supersession_in_claim(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql, "CLAIM", without(sql.CLAIM, "WHEN head.newest_id > l.id THEN 'skipped'\n"))


def no_supersession_in_claim_of_fresh(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql, "CLAIM_FRESH", without(sql.CLAIM_FRESH, "head.newest_id > m.id OR "))


def no_supersession_in_finish(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql, "FINISH_IF_HELD", without(sql.FINISH_IF_HELD, "WHEN head.newest_id > o.id THEN 'skipped'\n"))


def no_limit_of_suspects(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    limit = "%(suspect_limit)s::bigint,\n"
    patch.setattr(sql, "CLAIM", without(sql.CLAIM, limit))


def no_look_at_the_budget_of_a_suspect(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        sql,
        "CLAIM",
        without(sql.CLAIM, "m.attempt_budget / 2\n").replace("- m.attempt_count > ", "- m.attempt_count > 0\n"),
    )


def no_memory_of_suspects(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pgoutbox.worker.Worker, "_watch_suspects", lambda self, suspects: None)


def no_shared_lock(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    """An enqueue that only looks whether the bell is armed, and lets go of it before its row can be seen."""
    lock = "NOT pg_catalog.pg_try_advisory_xact_lock_shared(1885826146, pg_catalog.hashtext(queue))"
    looks = f"EXISTS (SELECT FROM {ADVISORY_LOCKS} WHERE l.mode = 'ExclusiveLock')"
    redefine(stage, "enqueue_receipt", lock, looks)


def no_claim_after_arming(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    source = textwrap.dedent(inspect.getsource(pgoutbox.worker.Worker._arm_and_look))
    guard = "if bell in (Bell.DOWN, Bell.STILL_ARMED):"
    assert source.count(guard) == 1
    scope = dict(vars(pgoutbox.worker))
    exec(source.replace(guard, "if True:"), scope)
    patch.setattr(pgoutbox.worker.Worker, "_arm_and_look", scope["_arm_and_look"])


def no_pinned_isolation(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    pin = "    set_config('default_transaction_isolation', 'read committed', false),\n"
    patch.setattr(sql, "PREPARE_SESSION", without(sql.PREPARE_SESSION, pin))


GUARDED: list[tuple[str, Scenario, Mutation]] = [
    ("fence in finish sent", a_stale_attempt_cannot_write_sent, NO_FENCE_IN_SENT),
    ("fence after redrive", an_attempt_from_before_a_redrive_cannot_write, NO_FENCE_IN_SENT),
    ("fence after release", a_released_attempt_cannot_write, NO_FENCE_IN_SENT),
    ("fence in finish", a_stale_attempt_cannot_write_another_end, NO_FENCE_IN_FINISH),
    (
        "fence in renew",
        a_stale_attempt_cannot_renew,
        lambda stage, patch: patch.setattr(
            sql, "RENEW_IF_HELD", without(sql.RENEW_IF_HELD, "AND m.attempt_count = a.attempt_count", times=3)
        ),
    ),
    (
        "fence in watch",
        a_stale_attempt_cannot_watch,
        no_fence_in("WATCH_IF_HELD", "AND m.attempt_count = a.attempt_count"),
    ),
    ("fence in forget", a_stale_attempt_cannot_delete, no_fence_in_forget),
    ("worker in finish sent", a_worker_of_a_lost_timeline_cannot_write_sent, no_worker_in("FINISH_SENT_IF_HELD")),
    ("worker in finish", a_worker_of_a_lost_timeline_cannot_write_another_end, no_worker_in("FINISH_IF_HELD")),
    ("worker in renew", a_worker_of_a_lost_timeline_cannot_renew, no_worker_in("RENEW_IF_HELD", times=3)),
    ("worker in watch", a_worker_of_a_lost_timeline_cannot_watch, no_worker_in("WATCH_IF_HELD")),
    (
        "worker in standing",
        a_worker_of_a_lost_timeline_is_not_told_that_its_attempt_stands,
        no_worker_in("STANDING"),
    ),
    (
        "worker in forget",
        a_worker_of_a_lost_timeline_cannot_delete,
        no_worker_in("FINISH_SENT_AND_FORGET_IF_HELD"),
    ),
    ("own attempts: suspects", a_worker_leaves_the_lapsed_attempt_that_it_holds, no_look_at_the_owner),
    ("own attempts: ending", a_worker_does_not_end_the_lapsed_attempt_that_it_holds, no_look_at_the_owner),
    (
        "forgotten attempts: suspects",
        a_worker_takes_over_an_attempt_in_its_name_that_it_does_not_hold,
        no_look_at_what_is_held,
    ),
    (
        "forgotten attempts: ending",
        a_worker_ends_an_attempt_in_its_name_that_it_does_not_hold,
        no_look_at_what_is_held,
    ),
    ("state in forget", what_is_pending_again_is_not_deleted, no_state_in_forget),
    ("rule in forget", a_rule_that_was_taken_back_is_obeyed_at_once, no_look_at_the_rule_in_forget),
    ("own rule in forget", a_topics_own_rule_holds, no_guard_in_function("forget_sent", OWN_RULE_IN_FORGET)),
    (
        "dedupe key outlives zero",
        a_repetition_of_a_deleted_message_is_known,
        no_guard_in_function("prune_by_rule", " AND NOT o.keeps_dedupe_key"),
    ),
    (
        "dedupe key of a message",
        a_key_that_has_a_message_is_not_pruned,
        no_guard_in_function(
            "prune_dedupe_by_rule",
            "        AND NOT EXISTS (SELECT FROM pgoutbox.message AS m WHERE m.id = d.message_id)\n",
        ),
    ),
    ("own rule in prune", pruning_leaves_what_its_topic_keeps, no_guard_in_function("prune_by_rule", OWN_RULE)),
    (
        "locked rows in prune",
        pruning_leaves_a_message_that_is_being_redriven,
        no_guard_in_function("prune_by_rule", " SKIP LOCKED"),
    ),
    (
        "age in prune",
        pruning_obeys_the_rule_as_it_stands,
        no_guard_in_function("prune_by_rule", "        AND m.finished_at <= now() - r.keep\n"),
    ),
    ("one in flight: look", a_successor_waits_for_its_predecessor, no_look_at_siblings),
    ("one in flight: look at fresh", a_fresh_successor_waits_for_its_predecessor, no_look_at_siblings_of_fresh),
    ("one in flight: index", of_two_claims_that_do_not_see_each_other_one_is_refused, no_unique_index),
    ("supersession in claim", an_older_message_is_not_delivered_after_a_newer_one, no_supersession_in_claim),
    (
        "supersession in claim of fresh",
        an_older_message_is_not_delivered_by_a_claim_of_fresh_ones,
        no_supersession_in_claim_of_fresh,
    ),
    ("supersession in finish", an_older_attempt_is_not_retried_after_a_newer_message, no_supersession_in_finish),
    ("suspects: limit", suspects_are_claimed_one_by_one, no_limit_of_suspects),
    (
        "suspects: last attempt",
        a_last_attempt_is_not_made_beside_other_suspects,
        no_look_at_the_budget_of_a_suspect,
    ),
    ("suspects: memory", while_a_suspect_is_in_flight_its_worker_claims_no_other, no_memory_of_suspects),
    ("shared doorbell lock", an_enqueue_under_way_is_not_missed_by_arming, no_shared_lock),
    ("claim after arming", a_commit_between_the_claim_and_arming_is_not_missed, no_claim_after_arming),
    ("read committed", two_workers_claims_do_not_fail_under_a_strict_default_isolation, no_pinned_isolation),
]


@pytest.mark.parametrize("scenario", [pytest.param(scenario, id=name) for name, scenario, _ in GUARDED])
async def test_the_scenario_of_a_guard_holds(stage: Stage, scenario: Scenario) -> None:
    await scenario(stage)


@pytest.mark.parametrize(
    ("scenario", "mutate"), [pytest.param(scenario, mutate, id=name) for name, scenario, mutate in GUARDED]
)
async def test_the_scenario_of_a_guard_fails_without_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, scenario: Scenario, mutate: Mutation
) -> None:
    mutate(stage, monkeypatch)
    with pytest.raises((AssertionError, psycopg.errors.UniqueViolation, pytest.fail.Exception)):
        await scenario(stage)
