"""Tests the state machine, the idempotency key and the outcomes, without a database."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta

import pytest

from pgoutbox.message import FINAL_STATES, Message, Permanent, Skip, Snooze, State, Transient
from pgoutbox.observability.events import LogEvent, event_of_state
from tests.support.transitions import TRANSITIONS

MESSAGE: Message[object] = Message(
    id=7,
    topic="greet",
    queue="default",
    destination=None,
    payload=None,
    headers={},
    attempt_count=1,
    max_attempts=11,
    created_at=datetime(2024, 1, 1, tzinfo=UTC),
    available_at=datetime(2024, 1, 1, tzinfo=UTC),
    coalesce_key=None,
)


def test_only_an_operator_changes_a_message_in_a_final_state() -> None:
    acts = {state: TRANSITIONS[state] for state in FINAL_STATES if TRANSITIONS[state]}
    assert acts == {State.FAILED: {State.PENDING, State.SKIPPED}, State.CANCELLED: {State.PENDING}}


def test_every_state_is_reachable_and_every_message_can_end() -> None:
    reached = {State.PENDING}
    while (more := {target for state in reached for target in TRANSITIONS[state]} | reached) != reached:
        reached = more
    assert reached == set(State)
    assert all(TRANSITIONS[state] & FINAL_STATES for state in set(State) - FINAL_STATES)


def test_messages_with_equal_values_are_equal() -> None:
    values = [f"value of {field.name}" for field in fields(Message)]
    message: Message = Message(*values)  # type: ignore[arg-type]
    assert message == Message(*values)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(message)) == message
    assert replace(message, id=8).id == 8
    with pytest.raises(AttributeError):
        message.paylod = 8  # type: ignore[attr-defined]


def test_the_idempotency_key_is_the_same_at_every_attempt() -> None:
    assert replace(MESSAGE, attempt_count=5).idempotency_key == MESSAGE.idempotency_key


def test_the_idempotency_key_differs_between_messages_and_databases() -> None:
    other = replace(MESSAGE, id=8)
    later = replace(MESSAGE, created_at=MESSAGE.created_at + timedelta(microseconds=1))
    assert len({MESSAGE.idempotency_key, other.idempotency_key, later.idempotency_key}) == 3


def test_the_idempotency_key_is_valid_in_a_header() -> None:
    assert MESSAGE.idempotency_key == "7-60dd710212000"
    assert replace(MESSAGE, id=2**63 - 1).idempotency_key.replace("-", "").isalnum()


@pytest.mark.parametrize(("delay", "seconds"), [(5, 5.0), (0.5, 0.5), (timedelta(minutes=2), 120.0)])
def test_a_snooze_takes_seconds_or_a_timedelta(delay: float | timedelta, seconds: float) -> None:
    assert Snooze(delay).delay_seconds == seconds


@pytest.mark.parametrize("delay", [float("nan"), float("inf"), float("-inf")])
def test_a_snooze_refuses_a_delay_that_is_not_finite(delay: float) -> None:
    with pytest.raises(ValueError, match=f"delay must be a finite number of seconds, got {delay}"):
        Snooze(delay)


def test_the_text_of_a_raised_outcome_describes_it() -> None:
    assert [str(error) for error in (Transient("busy", 3), Permanent("no"), Skip("why"), Snooze(5))] == [
        "busy",
        "no",
        "why",
        "snoozed for 5.0 s",
    ]
    assert Transient("busy", 3).retry_after == 3


@pytest.mark.parametrize("state", sorted(set(State) - {State.SENDING}))
def test_every_end_of_an_attempt_has_its_event(state: State) -> None:
    assert isinstance(event_of_state(state), LogEvent)
