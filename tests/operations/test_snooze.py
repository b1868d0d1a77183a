"""Tests that pending messages are put off, with a reason."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import ArgumentError, Outbox, State
from pgoutbox.operations import Action, ActResult, MessageFilter, Operator
from tests.support.messages import put
from tests.support.outbox_actions import row_of

if TYPE_CHECKING:
    from tests.conftest import Connect

HOUR = timedelta(hours=1)


def is_due_in(connection: psycopg.Connection, message_id: int, delay: timedelta) -> bool:
    """Return whether a message is due so long after the start of the transaction of its act, within a minute."""
    query = "SELECT available_at - now() BETWEEN %s - interval '1 min' AND %s FROM pgoutbox.message WHERE id = %s"
    ((answer,),) = connection.execute(query, [delay, delay, message_id]).fetchall()
    return bool(answer)


def test_a_message_waits_for_at_least_so_long(db: psycopg.Connection) -> None:
    message_id = put(db)
    result = Operator(db, actor="ada").snooze(message_id, HOUR, " mail server moves ")
    assert result.result is ActResult.SNOOZED
    assert is_due_in(db, message_id, HOUR)
    (act,) = Operator(db).list_acts(message_id=message_id)
    assert (act.action, act.actor, (act.details or {})["reason"]) == (Action.SNOOZE, "ada", "mail server moves")


def test_a_message_that_is_due_later_keeps_its_time(db: psycopg.Connection) -> None:
    message_id = put(db)
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '9 h' WHERE id = %s", [message_id])
    assert Operator(db).snooze(message_id, HOUR, "moves").result is ActResult.SNOOZED
    assert is_due_in(db, message_id, 9 * HOUR)


@pytest.mark.parametrize("state", sorted(set(State) - {State.PENDING}))
def test_only_a_pending_message_is_snoozed(rolled_back: psycopg.Connection, state: State) -> None:
    message_id = put(rolled_back, state)
    result = Operator(rolled_back).snooze(message_id, HOUR, "moves")
    assert result.result is ActResult.WRONG_STATE
    assert result.explanation == f"is {state}; only pending messages can be snoozed"
    assert row_of(rolled_back, message_id).state == state


def test_messages_that_would_come_too_late_are_left_alone(
    outbox: Outbox, db: psycopg.Connection, connect: Connect
) -> None:
    older, newer, expiring, held = (
        *(put(db, coalesce_key="k") for _ in range(2)),
        *(put(db) for _ in range(2)),
    )
    db.execute("UPDATE pgoutbox.message_live SET expires_at = now() + interval '30 min' WHERE id = %s", [expiring])
    connect().execute("SELECT FROM pgoutbox.message_live WHERE id = %s FOR KEY SHARE", [held])
    (batch,) = Operator(db).bulk("snooze", [older, expiring, held, 2**40], duration=HOUR, reason="moves")
    assert [(one.result, one.other_id) for one in batch.results] == [
        (ActResult.SUPERSEDED, newer),
        (ActResult.EXPIRES, None),
        (ActResult.LOCKED, None),
        (ActResult.MISSING, None),
    ]
    assert not any(is_due_in(db, message_id, HOUR) for message_id in (older, expiring, held))


def test_a_message_that_was_tried_again_since_is_left_alone(rolled_back: psycopg.Connection) -> None:
    message_id = put(rolled_back)
    call = "SELECT result FROM pgoutbox.snooze(%s, '1 h', 'moves', %s)"
    assert rolled_back.execute(call, [[message_id], [1]]).fetchone() == ("changed",)
    assert rolled_back.execute(call, [[message_id], [0]]).fetchone() == ("snoozed",)


def test_all_messages_of_a_filter_are_snoozed(db: psycopg.Connection) -> None:
    wanted, other = put(db), put(db, topic="sms")
    which = MessageFilter(topic="mail")
    assert Operator(db).act_on_all("snooze", which, duration=3600, reason="moves") == {"snoozed": 1}
    assert is_due_in(db, wanted, HOUR)
    assert not is_due_in(db, other, HOUR)


@pytest.mark.parametrize("duration", [None, -1, "1 h", timedelta(days=3651)])
def test_a_wrong_duration_is_refused(rolled_back: psycopg.Connection, duration: timedelta) -> None:
    with pytest.raises(ArgumentError, match=r"^duration: must be from"):
        Operator(rolled_back).snooze(put(rolled_back), duration, "moves")


@pytest.mark.parametrize("duration", [None, "0", "-1 h", "3651 d", "500 ms"])
def test_the_function_needs_a_duration(rolled_back: psycopg.Connection, duration: str | None) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="duration: must be from 1 second to 3650 days"):
        rolled_back.execute("SELECT pgoutbox.snooze('{1}', %s, 'moves')", [duration])


@pytest.mark.parametrize("reason", ["", " ", "x" * 1_001])
def test_a_reason_is_necessary(rolled_back: psycopg.Connection, reason: str) -> None:
    with pytest.raises(ArgumentError, match="reason: must have 1 to 1,000 characters"):
        Operator(rolled_back).snooze(1, HOUR, reason)


@pytest.mark.parametrize("duration", ["121 months 19 days", "-7000 years"])
def test_a_duration_is_a_number_of_seconds(rolled_back: psycopg.Connection, duration: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="duration: must be from 1 second to 3650 days"):
        rolled_back.execute("SELECT pgoutbox.snooze('{1}', %s, 'moves')", [duration])


def test_the_wait_begins_at_the_act_and_not_at_its_transaction(db: psycopg.Connection) -> None:
    message_id = put(db)
    with db.transaction():
        db.execute("SELECT now()")
        while not db.execute("SELECT WHERE clock_timestamp() > now() + interval '1.2 s'").fetchall():
            pass
        db.execute("SELECT pgoutbox.snooze(%s, '1 s', 'moves')", [[message_id]])
        row = db.execute(
            "SELECT available_at > now() + interval '2 s' FROM pgoutbox.message WHERE id = %s", [message_id]
        ).fetchone()
    assert row == (True,)


@pytest.mark.parametrize("reason", ["", " \t\n", "x" * 1_001, None])
def test_the_function_needs_a_reason(rolled_back: psycopg.Connection, reason: str | None) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="reason: must have 1 to 1000 characters"):
        rolled_back.execute("SELECT pgoutbox.snooze('{1}', '1 h', %s)", [reason])


def test_the_audit_has_the_time_in_utc(db: psycopg.Connection) -> None:
    db.execute("SET timezone = 'Asia/Tokyo'")
    db.execute("SELECT pgoutbox.snooze(%s, '1 h', 'moves')", [[put(db)]])
    ((text,),) = db.execute("SELECT a.details ->> 'available_at' FROM pgoutbox.audit AS a").fetchall()
    assert text.endswith("+00:00")
