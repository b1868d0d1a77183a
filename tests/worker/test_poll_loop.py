"""Tests the states of the poll loop: all transitions, as a table."""

from __future__ import annotations

from itertools import product

import pytest

from pgoutbox.worker.doorbell import LockAnswer
from pgoutbox.worker.poll_loop import PollResult, PollState, next_state

POLLING, FRESH, FULL = PollState.POLLING, PollState.FRESH_POLL, PollState.FULL_POLL
ACQUIRING, CONFIRMING, PAUSING, IDLE = PollState.ACQUIRING, PollState.CONFIRMING, PollState.PAUSING, PollState.IDLE
RESULTS = [*PollResult, *LockAnswer]
STEPS = list(product(PollState, RESULTS))

# All other combinations lead to a full poll.
TRANSITIONS: dict[tuple[PollState, PollResult | LockAnswer], PollState] = {
    (POLLING, PollResult.BACKLOG): POLLING,
    (FULL, PollResult.BACKLOG): POLLING,
    (FULL, PollResult.NOTHING): ACQUIRING,
    (ACQUIRING, PollResult.HIGH_RATE): PAUSING,
    (ACQUIRING, LockAnswer.ACQUIRED): CONFIRMING,
    (ACQUIRING, LockAnswer.UNCHANGED): IDLE,
    (ACQUIRING, LockAnswer.NO_LISTENER): IDLE,
    (CONFIRMING, PollResult.UNREAD_KEYS): CONFIRMING,
    (CONFIRMING, PollResult.NOTHING): IDLE,
    (POLLING, PollResult.NO_ROOM): POLLING,
    (FRESH, PollResult.NO_ROOM): FRESH,
}


@pytest.mark.parametrize(("state", "result"), STEPS)
def test_a_step_leads_to_the_state_in_the_table(state: PollState, result: PollResult | LockAnswer) -> None:
    assert next_state(state, result) is TRANSITIONS.get((state, result), FULL)


@pytest.mark.parametrize(("state", "result"), STEPS)
def test_after_a_notification_fresh_messages_are_polled_first(
    state: PollState, result: PollResult | LockAnswer
) -> None:
    following = next_state(state, result)
    waits_for_room = result is PollResult.NO_ROOM and state in (POLLING, FRESH, FULL)
    is_displaced = following in (POLLING, FULL) and state is not FRESH and not waits_for_room
    assert next_state(state, result, is_notified=True) is (FRESH if is_displaced else following)


@pytest.mark.parametrize(("state", "result"), STEPS)
def test_a_request_for_a_full_poll_ends_a_series_of_polls(state: PollState, result: PollResult | LockAnswer) -> None:
    following = next_state(state, result)
    is_series = following is POLLING and result is PollResult.BACKLOG
    assert next_state(state, result, needs_full_poll=True) is (FULL if is_series else following)


@pytest.mark.parametrize("result", RESULTS)
def test_a_worker_becomes_idle_only_with_an_answer_about_its_lock(result: PollResult | LockAnswer) -> None:
    """It polls once more after it has acquired the lock."""
    expected = {
        LockAnswer.UNCHANGED: {ACQUIRING},
        LockAnswer.NO_LISTENER: {ACQUIRING},
        PollResult.NOTHING: {CONFIRMING},
    }
    assert {state for state in PollState if next_state(state, result) is IDLE} == expected.get(result, set())
