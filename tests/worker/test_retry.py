"""Tests the computation of retry delays."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Transient, Unavailable
from pgoutbox.retry import MAX_DELAY_SECONDS, RetryPolicy


def test_delays_double_up_to_the_cap() -> None:
    policy = RetryPolicy(base=5, cap=60, jitter=0)
    assert [policy.delay_seconds(n) for n in range(1, 7)] == [5, 10, 20, 40, 60, 60]


def test_durations_may_be_timedeltas() -> None:
    assert RetryPolicy(base=timedelta(minutes=1), cap=timedelta(hours=2)) == RetryPolicy(base=60, cap=7200)
    assert RetryPolicy.steps(timedelta(minutes=1), 300) == RetryPolicy.steps(60, 300)
    assert Transient("busy", timedelta(minutes=1)).retry_after == 60
    assert Unavailable("down", timedelta(minutes=1)).retry_after == 60


def test_steps_are_used_in_order_and_the_last_one_repeats() -> None:
    policy = RetryPolicy.steps(60, 300, 900)
    assert [policy.delay_seconds(n) for n in range(1, 6)] == [60, 300, 900, 900, 900]


@given(attempt_count=st.integers(-5, 2**31 - 1), jitter=st.floats(0, 1))
def test_a_delay_is_within_its_bounds_at_every_attempt(attempt_count: int, jitter: float) -> None:
    policy = RetryPolicy(jitter=jitter)
    delay = policy.delay_seconds(attempt_count)
    full = RetryPolicy(jitter=0).delay_seconds(attempt_count)
    assert full * (1 - jitter) <= delay <= full <= policy.cap_seconds


def test_delays_with_the_same_start_are_spread() -> None:
    policy = RetryPolicy(jitter=0.5)
    assert len({policy.delay_seconds(3) for _ in range(100)}) > 90


@pytest.mark.parametrize(
    ("asked", "granted"),
    [(7, 7), (0, 0), (-1, 0), (1e9, 60), (math.inf, 60), (-math.inf, 60), (math.nan, 60)],
)
def test_the_delay_requested_by_the_receiver_is_used_within_the_cap(asked: float, granted: float) -> None:
    policy = RetryPolicy(base=5, cap=60, jitter=0.5)
    assert policy.delay_seconds(1, retry_after=asked) == granted


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": 10_001}, "max_attempts"),
        ({"jitter": -0.1}, "jitter"),
        ({"jitter": 1.1}, "jitter"),
        ({"base": -1.0}, "base"),
        ({"base": math.nan}, "base"),
        ({"cap": math.inf}, "cap"),
        ({"cap": MAX_DELAY_SECONDS + 1}, "cap"),
        ({"base": timedelta(days=31)}, "base"),
    ],
)
def test_an_invalid_policy_is_refused_by_name(arguments: dict[str, float], name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}="):
        RetryPolicy(**arguments)  # type: ignore[arg-type] # one keyword at a time


def test_steps_must_not_be_empty() -> None:
    with pytest.raises(ConfigurationError, match="at least one delay"):
        RetryPolicy.steps()
