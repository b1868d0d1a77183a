"""Tests that pending messages get another due time, and that workers notice it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.errors import SerializationFailure

from pgoutbox import ArgumentError, Context, Message, Outbox, RescheduleResult, State
from pgoutbox.operations import Action, ActResult, MessageFilter, Operator
from pgoutbox.worker import Worker
from tests.support.messages import PUT_FINAL, put
from tests.support.outbox_actions import enqueue, running, settings_for, state_of
from tests.support.races import until_blocked
from tests.support.waiting import until, until_idle, until_polled

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import AsyncConnect, Connect

HOUR = timedelta(hours=1)


def due_of(connection: psycopg.Connection, message_id: int) -> datetime:
    row = connection.execute("SELECT available_at FROM pgoutbox.message WHERE id = %s", [message_id]).fetchone()
    assert row is not None
    moment = row[0]
    assert isinstance(moment, datetime)
    return moment


def later() -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + HOUR


def test_a_message_becomes_due_at_once(db: psycopg.Connection) -> None:
    message_id = enqueue(db, available_at=later())
    assert Operator(db).reschedule(message_id).result is ActResult.RESCHEDULED
    assert due_of(db, message_id) <= datetime.now(UTC)


def test_a_message_becomes_due_later(db: psycopg.Connection) -> None:
    message_id, moment = enqueue(db), later()
    assert Operator(db).reschedule(message_id, moment).is_done
    assert due_of(db, message_id) == moment


def test_a_past_time_means_now(db: psycopg.Connection) -> None:
    message_id = enqueue(db, available_at=later())
    began_at = db.execute("SELECT now()").fetchone()
    Operator(db).reschedule(message_id, datetime(2001, 1, 1, tzinfo=UTC))
    assert (due_of(db, message_id),) >= (began_at or ())


@pytest.mark.parametrize("state", sorted(set(State) - {State.PENDING}))
def test_only_a_pending_message_is_rescheduled(rolled_back: psycopg.Connection, state: State) -> None:
    message_id = put(rolled_back, state)
    before = due_of(rolled_back, message_id)
    result = Operator(rolled_back).reschedule(message_id, later())
    assert result.result is ActResult.WRONG_STATE
    assert result.explanation == f"is {state}; only pending messages can be rescheduled"
    assert due_of(rolled_back, message_id) == before


def test_a_missing_message_is_named(rolled_back: psycopg.Connection) -> None:
    assert Operator(rolled_back).reschedule(2**40).result is ActResult.MISSING


def test_a_superseded_message_is_left_alone(rolled_back: psycopg.Connection) -> None:
    older, newer = (enqueue(rolled_back, coalesce_key="k") for _ in range(2))
    result = Operator(rolled_back).reschedule(older, later())
    assert (result.result, result.other_id) == (ActResult.SUPERSEDED, newer)
    assert Operator(rolled_back).reschedule(newer, later()).is_done


def test_a_message_that_would_expire_before_is_left_alone(rolled_back: psycopg.Connection) -> None:
    moment = later()
    message_id = enqueue(rolled_back, expires_at=moment)
    assert Operator(rolled_back).reschedule(message_id, moment).result is ActResult.EXPIRES
    assert Operator(rolled_back).reschedule(message_id, moment - timedelta(seconds=1)).is_done


def test_a_locked_message_is_left_alone(db: psycopg.Connection, connect: Connect) -> None:
    message_id, holder = enqueue(db), connect()
    holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR SHARE", [message_id])
    assert Operator(db).reschedule(message_id, later()).result is ActResult.LOCKED


@pytest.mark.parametrize("moment", [datetime(2026, 1, 1), datetime(2126, 1, 1, tzinfo=UTC)])  # noqa: DTZ001 - refused
def test_an_invalid_time_is_refused(rolled_back: psycopg.Connection, moment: datetime) -> None:
    with pytest.raises(ArgumentError, match="available_at: "):
        Operator(rolled_back).reschedule(1, moment)


@pytest.mark.parametrize("moment", ["infinity", "2126-01-01"])
def test_the_function_refuses_an_invalid_time(rolled_back: psycopg.Connection, moment: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=r"pgoutbox\.reschedule: available_at: "):
        rolled_back.execute("SELECT pgoutbox.reschedule('{1}', %s)", [moment])


def test_all_messages_of_a_filter_are_rescheduled(db: psycopg.Connection) -> None:
    retries = [put(db, topic="mail") for _ in range(3)]
    other = put(db, topic="sms")
    moment, before = later(), due_of(db, other)
    assert Operator(db).act_on_all("reschedule", MessageFilter(topic="mail"), available_at=moment) == {"rescheduled": 3}
    assert {due_of(db, i) for i in retries} == {moment}
    assert due_of(db, other) == before


def test_the_audit_has_the_new_time(db: psycopg.Connection) -> None:
    message_id, moment = enqueue(db), later()
    Operator(db, actor="ada").reschedule(message_id, moment)
    (act,) = Operator(db).list_acts(action=Action.RESCHEDULE)
    assert (act.actor, act.first_ids) == ("ada", [message_id])
    assert act.details == {"available_at": moment.isoformat()}


# --- in the application's transaction ---------------------------------------------------------------------------------


def test_an_application_reschedules_in_its_transaction(
    outbox: Outbox, db: psycopg.Connection, connect: Connect
) -> None:
    producer, moment = connect(), later()
    message_id = enqueue(db)
    assert outbox.on(producer).reschedule(message_id, available_at=moment) is RescheduleResult.RESCHEDULED
    assert due_of(producer, message_id) == moment
    assert due_of(db, message_id) != moment
    producer.commit()
    assert due_of(db, message_id) == moment
    assert Operator(db).list_acts() == []


async def test_a_delay_counts_on_the_servers_clock(
    outbox: Outbox, db: psycopg.Connection, aconnect: AsyncConnect
) -> None:
    producer, message_id = await aconnect(), enqueue(db)
    assert await outbox.on(producer).reschedule(message_id, delay=HOUR) is RescheduleResult.RESCHEDULED
    await producer.commit()
    (seconds,) = db.execute("SELECT extract(epoch FROM %s - now())", [due_of(db, message_id)]).fetchone() or (0,)
    assert 0 < seconds <= HOUR.total_seconds()


def test_a_delay_and_a_time_exclude_each_other(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    with pytest.raises(ArgumentError, match="delay: give delay or available_at, not both"):
        outbox.on(rolled_back).reschedule(1, available_at=later(), delay=1)


# --- workers ----------------------------------------------------------------------------------------------------------


def scheduled(db: psycopg.Connection) -> int:
    return enqueue(db, available_at=later())


def in_back_off(db: psycopg.Connection) -> int:
    message_id = enqueue(db, available_at=later())
    db.execute("UPDATE pgoutbox.message_live SET attempt_count = 1, lane = 1 WHERE id = %s", [message_id])
    return message_id


def cancelled(db: psycopg.Connection) -> int:
    message_id = enqueue(db)
    db.execute("SELECT pgoutbox.cancel(%s)", [message_id])
    return message_id


@pytest.mark.parametrize(
    ("put_message", "act"),
    [(scheduled, "reschedule"), (in_back_off, "reschedule"), (cancelled, "redrive")],
)
async def test_a_worker_that_slept_since_the_act_finds_the_message_at_its_commit(
    dsn: str, db: psycopg.Connection, connect: Connect, put_message: Callable[[psycopg.Connection], int], act: str
) -> None:
    """The act writes a due time before the worker polls, and commits after it."""
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    message_id = put_message(db)
    worker, operator = Worker(outbox), connect()
    async with running(worker):
        await until_idle(worker)
        operator.execute("SELECT")
        assert getattr(Operator(operator), act)(message_id).is_done
        await until_polled(worker, db)
        assert state_of(db, message_id) != "sent"
        operator.commit()
        await until(lambda: state_of(db, message_id) == "sent")


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_message_that_is_finished_at_this_moment_fails_no_transaction(
    db: psycopg.Connection, connect: Connect, *, is_guarded: bool
) -> None:
    """Its row moves to another partition between the snapshot and the lock of the statement."""
    producer, gate = connect(), connect()
    db.execute("CREATE FUNCTION public.gate() RETURNS boolean LANGUAGE sql RETURN pg_advisory_xact_lock(1) IS NOT NULL")
    ((definition,),) = db.execute("SELECT pg_get_functiondef('pgoutbox._lock_pending'::regproc)").fetchall()
    before_lock = re.compile(r"\n(?= +ORDER BY m\.id\n +FOR UPDATE)")
    definition, count = before_lock.subn(" AND public.gate()\n", definition)
    assert count == 1
    if not is_guarded:
        guard = "IF NOT pgoutbox._reads_committed() THEN"
        assert definition.count(guard) == 1
        definition = definition.replace(guard, "IF true THEN")
    db.execute(definition.encode())
    message_id = enqueue(db)
    gate.execute("SELECT pg_advisory_xact_lock(1)")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            producer.execute, "SELECT result, state FROM pgoutbox.reschedule(ARRAY[%s]::bigint[])", [message_id]
        )
        until_blocked(db, producer, waiting)
        db.execute(PUT_FINAL, {"id": message_id, "state": "cancelled", "age": timedelta()})
        gate.commit()
        if is_guarded:
            assert waiting.result().fetchall() == [("wrong_state", "cancelled")]
        else:
            with pytest.raises(SerializationFailure):
                waiting.result()


def test_a_message_that_is_left_alone_is_not_locked(outbox: Outbox, db: psycopg.Connection, connect: Connect) -> None:
    producer, message_id = connect(), put(db, State.FAILED)
    assert outbox.on(producer).reschedule(message_id) is RescheduleResult.WRONG_STATE
    assert Operator(db).redrive(message_id).result is ActResult.REDRIVEN
    producer.rollback()
