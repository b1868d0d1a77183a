"""Tests that failed messages are dismissed, or redriven to a corrected destination."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import ArgumentError, Outbox, State
from pgoutbox.operations import Action, ActResult, MessageFilter, Operator
from tests.support.messages import put
from tests.support.outbox_actions import row_of, state_of

if TYPE_CHECKING:
    from tests.conftest import Connect


def test_a_failed_message_is_dismissed_with_actor_and_reason(db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED)
    assert Operator(db, actor="ada").dismiss(message_id, " mailbox closed ").result is ActResult.DISMISSED
    row = row_of(db, message_id)
    assert (row.state, row.skip_reason) == ("skipped", "dismissed by ada: mailbox closed")
    (act,) = Operator(db).list_acts(message_id=message_id)
    assert (act.action, act.actor, act.details) == (Action.DISMISS, "ada", {"reason": "mailbox closed"})


def test_without_an_actor_the_role_has_dismissed_it(db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED)
    db.execute("SELECT pgoutbox.dismiss(%s, 'spam')", [[message_id]])
    assert row_of(db, message_id).skip_reason == f"dismissed by {db.info.user}: spam"


@pytest.mark.parametrize("state", sorted(set(State) - {State.FAILED}))
def test_only_a_failed_message_is_dismissed(rolled_back: psycopg.Connection, state: State) -> None:
    message_id = put(rolled_back, state)
    result = Operator(rolled_back).dismiss(message_id, "spam")
    assert result.result is ActResult.WRONG_STATE
    assert result.explanation == f"is {state}; only failed messages can be dismissed"
    assert state_of(rolled_back, message_id) == state


def test_missing_and_locked_messages_are_named(db: psycopg.Connection, connect: Connect) -> None:
    message_id, holder = put(db, State.FAILED), connect()
    holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR KEY SHARE", [message_id])
    operator = Operator(db)
    assert operator.dismiss(message_id, "spam").result is ActResult.LOCKED
    assert operator.dismiss(2**40, "spam").result is ActResult.MISSING


@pytest.mark.parametrize("reason", ["", " ", "x" * 1_001, None])
def test_a_reason_is_necessary(rolled_back: psycopg.Connection, reason: str | None) -> None:
    with pytest.raises(ArgumentError, match="reason: must have 1 to 1,000 characters"):
        Operator(rolled_back).dismiss(1, reason)  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", ["", " \t\n", "x" * 1_001, None])
def test_the_function_needs_a_reason(rolled_back: psycopg.Connection, reason: str | None) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="reason: must have 1 to 1000 characters"):
        rolled_back.execute("SELECT pgoutbox.dismiss('{1}', %s)", [reason])


def test_all_failed_messages_of_a_filter_are_dismissed(db: psycopg.Connection) -> None:
    failed = [put(db, State.FAILED) for _ in range(3)]
    other = put(db, State.FAILED, topic="sms")
    assert Operator(db).act_on_all("dismiss", MessageFilter(topic="mail"), reason="spam") == {"dismissed": 3}
    assert [state_of(db, i) for i in (*failed, other)] == ["skipped"] * 3 + ["failed"]


def test_a_dismissed_message_gives_its_dedupe_key_back(outbox: Outbox, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED, dedupe_key="k")
    Operator(db).dismiss(message_id, "spam")
    again = outbox.on(db).enqueue("mail", {"to": "bob"}, dedupe_key="k", require_transaction=False)
    assert not again.duplicate


def test_messages_behind_a_dismissed_one_are_claimable(db: psycopg.Connection, connect: Connect) -> None:
    """The workers are told to search, because they have passed over these messages before."""
    head = put(db, State.FAILED, ordering_key="k")
    db.execute("UPDATE pgoutbox.message_failed SET halts_key = true WHERE id = %s", [head])
    behind = put(db, ordering_key="k")
    view = "SELECT reason FROM pgoutbox.waiting_view WHERE id = %s"
    assert db.execute(view, [behind]).fetchone() == ("halted",)
    listener = connect(autocommit=True)
    listener.execute("LISTEN pgoutbox")
    Operator(db).dismiss(head, "spam")
    assert db.execute(view, [behind]).fetchone() == ("no worker",)
    assert [n.payload for n in listener.notifies(timeout=10, stop_after=1)] == ["all default"]


def test_a_superseded_message_is_dismissed_as_well(db: psycopg.Connection) -> None:
    older, _ = put(db, State.FAILED, coalesce_key="k"), put(db, coalesce_key="k")
    assert Operator(db).dismiss(older, "spam").result is ActResult.DISMISSED
