"""Tests the finish statements: the effect of each outcome on the row, and that the fence refuses all other writers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import psycopg
import pytest

from pgoutbox.kernel import statements
from pgoutbox.message import AttemptOutcome, State
from tests.support.outbox_actions import (
    Options,
    attempts_of,
    cancel,
    enqueue,
    lapse,
    make_due,
    row_of,
    state_of,
)
from tests.support.worker_sql import End, claim, current_states, finish, finish_sent, ids_in_flight

if TYPE_CHECKING:
    from tests.conftest import Connect

ASKED = ["retry", "snoozed", "released", "failed", "skipped"]


def in_flight(connection: psycopg.Connection, **arguments: Unpack[Options]) -> int:
    """Create a message in its first attempt."""
    message_id = enqueue(connection, **arguments)
    assert message_id in ids_in_flight(claim(connection))
    return message_id


def verdict(message_id: int, outcome: str, attempt_count: int = 1) -> End:
    reason = None if outcome in {"snoozed", "released"} else f"because {outcome}"
    delay = 30.0 if outcome in {"retry", "snoozed"} else 0.0
    return End(message_id, attempt_count, AttemptOutcome(outcome), reason, delay)


def test_a_sent_message_is_final_and_keeps_its_attempt(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back)
    assert finish_sent(rolled_back, (message_id, 1)) == {message_id}
    row = row_of(rolled_back, message_id)
    assert (row.state, row.attempt_count, row.worker) == ("sent", 1, "worker-1")
    assert (row.is_leased, row.is_finished) == (False, True)
    assert attempts_of(rolled_back, message_id) == []


@pytest.mark.parametrize(
    ("outcome", "state", "due_in_seconds", "last_error", "skip_reason"),
    [
        ("retry", "pending", 30, "because retry", None),
        ("snoozed", "pending", 30, None, None),
        ("released", "pending", 0, None, None),
        ("failed", "failed", 0, "because failed", None),
        ("skipped", "skipped", 0, None, "because skipped"),
    ],
)
def test_each_outcome_leads_to_its_state(
    rolled_back: psycopg.Connection,
    outcome: str,
    state: str,
    due_in_seconds: float,
    last_error: str | None,
    skip_reason: str | None,
) -> None:
    message_id = in_flight(rolled_back)
    asked = verdict(message_id, outcome)
    assert finish(rolled_back, asked) == {message_id: state}
    row = row_of(rolled_back, message_id)
    assert (row.state, row.attempt_count, row.is_leased) == (state, 1, False)
    assert (row.due_in_seconds, row.last_error, row.skip_reason) == (due_in_seconds, last_error, skip_reason)
    assert row.is_finished == (state != State.PENDING)
    assert row.superseded_by is None
    assert attempts_of(rolled_back, message_id) == [(1, outcome, asked.reason)]


def test_a_cancelled_message_that_was_handed_over_ends_sent(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back)
    cancel(rolled_back, message_id)
    assert finish_sent(rolled_back, (message_id, 1)) == {message_id}
    assert state_of(rolled_back, message_id) == State.SENT


@pytest.mark.parametrize(
    ("outcome", "state", "names_successor"),
    [
        ("retry", "skipped", True),
        ("snoozed", "skipped", True),
        ("released", "skipped", True),
        ("failed", "failed", False),
        ("skipped", "skipped", False),
    ],
)
def test_a_superseded_message_never_becomes_pending_again(
    rolled_back: psycopg.Connection, outcome: str, state: str, names_successor: bool
) -> None:
    message_id = in_flight(rolled_back, coalesce_key="k")
    newer = enqueue(rolled_back, coalesce_key="k")
    assert finish(rolled_back, verdict(message_id, outcome)) == {message_id: state}
    row = row_of(rolled_back, message_id)
    assert row.superseded_by == (newer if names_successor else None)
    if names_successor:
        assert row.skip_reason == f"superseded by {newer}"
    assert [ended for _, ended, _ in attempts_of(rolled_back, message_id)] == [state]
    assert ids_in_flight(claim(rolled_back)) == [newer]


def test_a_superseded_message_that_was_handed_over_ends_sent(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back, coalesce_key="k")
    enqueue(rolled_back, coalesce_key="k")
    assert finish_sent(rolled_back, (message_id, 1)) == {message_id}


def test_a_cancelled_and_superseded_message_ends_cancelled(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back, coalesce_key="k")
    cancel(rolled_back, message_id)
    enqueue(rolled_back, coalesce_key="k")
    assert finish(rolled_back, verdict(message_id, "retry")) == {message_id: State.CANCELLED}
    assert row_of(rolled_back, message_id).superseded_by is None


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ("retry", "failed"),
        ("snoozed", "pending"),
        ("released", "pending"),
        ("failed", "failed"),
        ("skipped", "skipped"),
    ],
)
def test_only_a_retry_needs_a_remaining_attempt(rolled_back: psycopg.Connection, outcome: str, state: str) -> None:
    message_id = in_flight(rolled_back, max_attempts=1)
    assert finish(rolled_back, verdict(message_id, outcome)) == {message_id: state}


def test_the_last_retry_fails_with_its_error(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back, max_attempts=1)
    finish(rolled_back, verdict(message_id, "retry"))
    row = row_of(rolled_back, message_id)
    assert (row.last_error, row.is_finished) == ("because retry", True)
    assert attempts_of(rolled_back, message_id) == [(1, "failed", "because retry")]


def test_a_snooze_with_a_reason_replaces_the_last_error_and_without_one_keeps_it(
    rolled_back: psycopg.Connection,
) -> None:
    message_id = enqueue(rolled_back)
    for asked, reason, shown in (
        ("retry", "refused", "refused"),
        ("snoozed", None, "refused"),
        ("snoozed", "held back", "held back"),
        ("released", None, "held back"),
    ):
        make_due(rolled_back, message_id)
        (row,) = claim(rolled_back)
        finish(rolled_back, End(message_id, row.attempt_count, AttemptOutcome(asked), reason))
        assert row_of(rolled_back, message_id).last_error == shown


@pytest.mark.parametrize("outcome", ["snoozed", "released"])
def test_an_outcome_without_a_used_attempt_raises_the_budget_and_keeps_the_count(
    rolled_back: psycopg.Connection, outcome: str
) -> None:
    message_id = in_flight(rolled_back, max_attempts=3)
    finish(rolled_back, verdict(message_id, outcome))
    row = row_of(rolled_back, message_id)
    assert (row.attempt_count, row.max_attempts) == (1, 4)


@pytest.mark.parametrize("outcome", ["retry", "failed", "skipped"])
def test_an_outcome_with_a_used_attempt_keeps_the_budget(rolled_back: psycopg.Connection, outcome: str) -> None:
    message_id = in_flight(rolled_back, max_attempts=3)
    finish(rolled_back, verdict(message_id, outcome))
    row = row_of(rolled_back, message_id)
    assert (row.attempt_count, row.max_attempts) == (1, 3)


def test_a_retry_records_the_error_of_the_previous_attempt(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back)
    finish(rolled_back, End(message_id, 1, AttemptOutcome.RETRY, "first", 0.0))
    claim(rolled_back)
    finish(rolled_back, End(message_id, 2, AttemptOutcome.RETRY, "second", 0.0))
    assert attempts_of(rolled_back, message_id) == [(1, "retry", "first"), (2, "retry", "second")]
    assert row_of(rolled_back, message_id).last_error == "second"


def test_the_outcomes_of_a_batch_are_written_together(rolled_back: psycopg.Connection) -> None:
    ids = [in_flight(rolled_back) for _ in ASKED]
    reached = finish(rolled_back, *(verdict(i, o) for i, o in zip(ids, ASKED, strict=True)))
    assert [reached.pop(i) for i in ids] == ["pending", "pending", "pending", "failed", "skipped"]
    assert reached == {}


def lock(connection: psycopg.Connection, message_id: int) -> None:
    connection.execute("SELECT FROM pgoutbox.message_live WHERE id = %s FOR UPDATE", [message_id])


def test_the_common_finish_fails_at_a_locked_row_and_keeps_its_sessions_settings(connect: Connect) -> None:
    ours, theirs = connect(autocommit=True), connect()
    ours.execute("SET lock_timeout = '1h'; SET statement_timeout = '5s'")
    first, locked, other = (in_flight(ours) for _ in range(3))
    assert finish_sent(ours, (other, 1)) == {other}
    assert ours.execute("SHOW lock_timeout").fetchall() == [("1h",)]
    lock(theirs, locked)
    with pytest.raises(psycopg.errors.LockNotAvailable):
        finish_sent(ours, (first, 1), (locked, 1))
    assert [state_of(ours, i) for i in (first, locked)] == ["sending"] * 2


def test_a_current_attempt_has_the_state_of_its_message(rolled_back: psycopg.Connection) -> None:
    sent, failed, held = (in_flight(rolled_back) for _ in range(3))
    finish_sent(rolled_back, (sent, 1))
    finish(rolled_back, verdict(failed, "failed"))
    assert current_states(rolled_back, (sent, 1), (failed, 1), (held, 1)) == {
        sent: "sent",
        failed: "failed",
        held: "sending",
    }


def test_a_replaced_attempt_has_no_state(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back)
    lapse(rolled_back, message_id)
    claim(rolled_back, worker="successor")
    assert current_states(rolled_back, (message_id, 1)) == {}


def successors(connection: psycopg.Connection, message_id: int) -> list[str]:
    parameters = {
        "ids": [message_id],
        "topics": ["greet"],
        "queues": ["default"],
        "coalesce_keys": ["k"],
        "ordering_keys": [None],
        "own_queues": [],
        "own_topics": ["greet"],
    }
    return [row[0] for row in connection.execute(statements.TELL_SUCCESSORS, parameters).fetchall()]


def test_the_queue_of_a_waiting_successor_is_named(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back, coalesce_key="k")
    enqueue(rolled_back, coalesce_key="k", queue="bulk")
    finish_sent(rolled_back, (message_id, 1))
    assert successors(rolled_back, message_id) == ["bulk"]


def test_without_a_due_successor_no_worker_is_woken(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back, coalesce_key="k")
    enqueue(rolled_back, coalesce_key="other")
    finish_sent(rolled_back, (message_id, 1))
    assert successors(rolled_back, message_id) == []
    newer = enqueue(rolled_back, coalesce_key="k")
    rolled_back.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '1 h' WHERE id = %s", [newer])
    assert successors(rolled_back, message_id) == []
