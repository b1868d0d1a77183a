"""Tests the state machine of one circuit breaker, as a table of its transitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgoutbox.message import Permanent, SendFailure, Sent, Transient, Unavailable
from pgoutbox.worker.breakers.circuit_breaker import BreakerRow, CircuitBreaker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgoutbox.message import Outcome

NOW = 1_000.0
OUTAGE = SendFailure("down", outage=True)
SOON, LATER = BreakerRow(10.0, 50.0, "down", False, None), BreakerRow(100.0, 50.0, "still down", False, None)
PROBED_ELSEWHERE = BreakerRow(-1.0, 50.0, "down", False, None)


def breaker_in(state: str, *, is_part: bool = False) -> CircuitBreaker:
    """Return a breaker in this state at `NOW`."""
    breaker = CircuitBreaker("key", failure_limit=3, error_rate=0.5, is_part=is_part)
    if state != "closed":
        breaker.open(SOON, NOW if state == "open" else NOW - 10)
    breaker.is_probing = state == "probing"
    return breaker


def state_of(breaker: CircuitBreaker, now: float = NOW) -> str:
    if breaker.is_closed:
        return "closed"
    if breaker.is_paused(now):
        return "open"
    return "probing" if breaker.is_probing else "half-open"


@pytest.mark.parametrize(
    ("state", "holds"), [("closed", False), ("open", True), ("half-open", False), ("probing", True)]
)
def test_a_state_holds_messages_back(state: str, holds: bool) -> None:
    assert breaker_in(state).holds(NOW, "ann") is holds


EVENTS: dict[str, Callable[[CircuitBreaker], object]] = {
    "open": lambda breaker: breaker.open(LATER, NOW),
    "open, probed elsewhere": lambda breaker: breaker.open(PROBED_ELSEWHERE, NOW),
    "pause": lambda breaker: breaker.pause(NOW),
    "close": lambda breaker: breaker.close(),
    "failure": lambda breaker: breaker.record_failure(OUTAGE, NOW),
    "success": lambda breaker: breaker.record_success("ann"),
    "refresh with a row": lambda breaker: breaker.refresh(LATER, asked_at=NOW, now=NOW),
    "refresh without a row": lambda breaker: breaker.refresh(None, asked_at=NOW, now=NOW),
    "refresh from before the change": lambda breaker: breaker.refresh(None, asked_at=NOW - 11, now=NOW),
}
STATES = ("closed", "open", "half-open", "probing")
TRANSITIONS = {
    "open": ("open", "open", "open", "open"),
    "open, probed elsewhere": ("open", "open", "open", "open"),
    "pause": ("open", "open", "open", "open"),
    "close": ("closed", "closed", "closed", "closed"),
    "failure": ("closed", "open", "half-open", "probing"),
    "success": ("closed", "open", "half-open", "probing"),
    "refresh with a row": ("closed", "open", "open", "open"),
    "refresh without a row": ("closed", "closed", "closed", "closed"),
    "refresh from before the change": ("closed", "open", "half-open", "probing"),
}


@pytest.mark.parametrize(
    ("event", "state", "after"),
    [(event, state, after) for event, row in TRANSITIONS.items() for state, after in zip(STATES, row, strict=True)],
)
def test_an_event_leads_from_a_state_to_a_state(event: str, state: str, after: str) -> None:
    breaker = breaker_in(state)
    assert state_of(breaker) == state
    EVENTS[event](breaker)
    assert state_of(breaker) == after


def test_the_pause_ends_at_the_retry_time() -> None:
    breaker = breaker_in("open")
    assert (state_of(breaker, NOW + 9.9), state_of(breaker, NOW + 10)) == ("open", "half-open")
    assert (breaker.wait_seconds(NOW + 4), breaker.wait_seconds(NOW + 10)) == (6, 5)


@pytest.mark.parametrize(("cooldown_seconds", "pause_seconds"), [(0.001, 0.05), (20.0, 2.0), (3_600.0, 10.0)])
def test_the_pause_beside_another_workers_probe_is_a_tenth_within_bounds(
    cooldown_seconds: float, pause_seconds: float
) -> None:
    breaker = breaker_in("closed")
    breaker.open(BreakerRow(0.0, cooldown_seconds, "down", False, None), NOW)
    assert breaker.retry_at == NOW + pause_seconds


def count(breaker: CircuitBreaker, sends: str, now: float = NOW) -> str:
    """Record these sends, `f` for a failure and `s` for a success. Return the failures that reach a limit as `F`."""
    answers = ""
    for send in sends:
        if send == "s":
            breaker.record_success("ann")
            answers += send
        else:
            answers += "F" if breaker.record_failure(OUTAGE, now) else "f"
    return answers


@pytest.mark.parametrize(
    ("sends", "answers"),
    [
        ("fff", "ffF"),
        ("ffsff", "ffsff"),
        ("fs" * 9 + "ssf", "fs" * 9 + "ssf"),  # 10 of 21 are less than a half.
        ("fs" * 9 + "ff", "fs" * 9 + "fF"),  # 11 of 20.
        ("fs" * 8 + "ff", "fs" * 8 + "ff"),  # 18 sends are too few for a rate.
    ],
)
def test_failures_in_succession_or_their_rate_reach_the_limit(sends: str, answers: str) -> None:
    assert count(breaker_in("closed"), sends) == answers


def test_the_rate_begins_again_after_a_minute() -> None:
    breaker = breaker_in("closed")
    count(breaker, "fs" * 9)
    assert not breaker.is_forgettable(NOW)
    assert breaker.is_forgettable(NOW + 61)
    assert count(breaker, "fsf", NOW + 61) == "fsf"
    assert not breaker.is_forgettable(NOW + 122), "failures in succession count at any interval"


def test_failures_in_succession_count_at_any_interval() -> None:
    breaker = breaker_in("closed")
    assert [count(breaker, "f", NOW + hours * 3_600) for hours in range(3)] == ["f", "f", "F"]


def test_closing_forgets_the_counts() -> None:
    breaker = breaker_in("closed")
    assert [breaker.record_failure(OUTAGE, NOW) for _ in range(3)] == [False, False, True]
    breaker.close()
    assert breaker.is_forgettable(NOW)
    assert not breaker.record_failure(OUTAGE, NOW)


MINE, ALL = Unavailable("x", breaker="key"), Unavailable("x")
REFUSED = SendFailure("no", outage=True, breaker="key")
OTHERS: list[Outcome] = [
    Unavailable("x", breaker="other"),
    SendFailure("no", outage=True, breaker="other"),
    SendFailure("full", breaker="key"),
    Transient("full"),
    Permanent("no"),
    Sent(),
]


@pytest.mark.parametrize(("is_part", "failures"), [(False, [OUTAGE, MINE, ALL, REFUSED]), (True, [MINE, REFUSED])])
def test_an_outcome_is_a_failure_of_the_breaker_that_it_concerns(is_part: bool, failures: list[Outcome]) -> None:
    breaker = breaker_in("closed", is_part=is_part)
    outcomes: list[Outcome] = [OUTAGE, MINE, ALL, REFUSED, *OTHERS]
    assert [outcome for outcome in outcomes if breaker.failure_of(outcome)] == failures


def doubtful(recipient: str) -> SendFailure:
    return SendFailure("no", outage=True, doubtful=recipient)


def doubtful_fault(recipient: str) -> Unavailable:
    return Unavailable("no", doubtful=recipient)


def doubt(breaker: CircuitBreaker, sends: str, failure_of: Callable[[str], Transient | Unavailable] = doubtful) -> str:
    """Send to recipients: `a` is refused, `A` succeeds. Return `!` for each failure that opens the breaker."""
    answers = ""
    for send in sends:
        recipient = send.lower()
        if send.isupper():
            breaker.record_success(recipient)
            answers += "."
        elif (counted := breaker.failure_of(failure_of(recipient))) is None:
            answers += "-"
        else:
            answers += "!" if breaker.record_failure(counted, NOW) else "."
    return answers


@pytest.mark.parametrize(
    ("sends", "answers"),
    [
        ("aaaaaaaa", "........"),  # One recipient does not hold others.
        ("abab", "...."),
        ("abac", "...!"),
        ("abCc", "...."),
        ("aBacd", "..-.."),  # `b` has shown that the fault is `a`'s own.
        ("aBAacd", ".....!"),
        ("abcdCab", "..!!.--"),
    ],
)
def test_doubtful_failures_of_three_destinations_in_a_row_open_the_breaker(sends: str, answers: str) -> None:
    assert doubt(breaker_in("closed"), sends) == answers


def test_a_doubtful_fault_opens_the_breaker_until_another_destination_succeeds() -> None:
    assert doubt(breaker_in("closed"), "aaBaabAaB", doubtful_fault) == "!!.--!.!."


def test_another_recipient_may_probe_at_once_until_three_recipients_are_suspects() -> None:
    breaker = breaker_in("open")
    for recipient, following in zip("abc", "bcd", strict=True):
        breaker.record_failure(doubtful_fault(recipient), NOW)
        assert breaker.holds(NOW, recipient)
        assert breaker.holds(NOW, following) is (recipient == "c")


def test_a_failure_that_is_not_doubtful_ends_the_doubt() -> None:
    breaker = breaker_in("open")
    breaker.record_failure(doubtful_fault("a"), NOW)
    breaker.record_failure(OUTAGE, NOW)
    assert breaker.holds(NOW, "b")


def test_a_suspect_probes_a_little_later_than_others() -> None:
    breaker = breaker_in("half-open")
    for recipient in "abc":
        breaker.record_failure(doubtful_fault(recipient), NOW)
    assert breaker.holds(NOW, "a")
    assert breaker.wait_seconds(NOW, "a") == breaker.pause_seconds
    assert not breaker.holds(NOW, "d")
    assert not breaker.holds(NOW + breaker.pause_seconds, "a")


def test_the_fault_of_an_outlier_is_a_failure_that_uses_up_an_attempt() -> None:
    breaker = breaker_in("closed")
    assert doubt(breaker, "aB", doubtful_fault) == "!."
    own = breaker.own_failure(Unavailable("no", 7, doubtful="a"))
    assert (type(own), str(own), own.retry_after) == (Transient, "no", 7)  # type: ignore[union-attr] # of the type
    other = doubtful_fault("c")
    assert breaker.own_failure(other) is other


def test_doubtful_failures_count_for_no_rate() -> None:
    assert "!" not in doubt(breaker_in("closed"), "aZbZ" * 20)


def test_the_next_run_continues_with_suspects_and_outliers() -> None:
    breaker, later = breaker_in("closed"), breaker_in("closed")
    assert doubt(breaker, "xYab") == "...."
    assert not breaker.is_forgettable(NOW)
    later.remember(**breaker.memory())
    assert doubt(later, "xc") == "-!"
    assert breaker_in("closed").memory() == {}


def test_the_number_of_remembered_destinations_has_a_limit() -> None:
    breaker = breaker_in("closed")
    for number in range(5_000):
        breaker.record_failure(doubtful(str(number)), NOW)
        if number % 700 == 0:
            breaker.record_success("good")
    assert len(breaker.suspects) <= 1_000
    assert len(breaker.outliers) <= 2_000
