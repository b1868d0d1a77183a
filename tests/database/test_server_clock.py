"""Tests the comparison of the server's clock with the local monotonic time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pgoutbox.worker.server_clock import ServerClock

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def later(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def told(clock: ServerClock, now: datetime, *, at: float) -> float | None:
    return clock.note(now, asked_at=at, answered_at=at)


def test_a_steady_clock_is_trusted_for_another_third_of_a_lease() -> None:
    clock = ServerClock(60)
    assert clock.limit(0) is None
    assert told(clock, NOON, at=0) is None
    assert clock.limit(0) == later(20)
    assert clock.limit(1000) == later(1020)
    assert told(clock, later(1010), at=1000) is None
    assert clock.limit(1000) == later(1030)


def test_a_forward_step_is_logged_once_and_trusted_after_a_lease() -> None:
    clock = ServerClock(60)
    told(clock, NOON, at=0)
    assert told(clock, later(3610), at=10) == 3600
    assert clock.limit(10) == later(30)
    assert told(clock, later(3630), at=30) is None
    assert clock.limit(30) == later(50)
    assert told(clock, later(3670), at=70) is None
    assert clock.limit(70) == later(3690)


def test_a_backward_step_is_followed_at_once() -> None:
    clock = ServerClock(60)
    told(clock, NOON, at=0)
    assert told(clock, later(-3600), at=10) is None
    assert clock.limit(10) == later(-3580)
    assert told(clock, later(10), at=20) == 3600


def test_a_slow_answer_is_not_a_step() -> None:
    clock = ServerClock(60)
    clock.note(later(30), asked_at=0, answered_at=30)
    assert clock.note(later(90), asked_at=31, answered_at=90) is None


def test_the_server_is_queried_every_two_leases_and_when_trust_may_return() -> None:
    clock = ServerClock(60)
    assert clock.is_due(0)
    told(clock, NOON, at=0)
    assert not clock.is_due(119)
    assert clock.is_due(120)
    told(clock, later(3659), at=59)
    assert [clock.is_due(at) for at in (60, 118, 119)] == [False, False, True]
