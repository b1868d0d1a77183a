"""Tests the pauses between retries."""

from __future__ import annotations

from pgoutbox.worker.backoff import Backoff


def test_pauses_double_up_to_the_maximum() -> None:
    backoff = Backoff(1.0, 5.0)
    for full in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert full / 2 <= backoff.next() <= full


def test_a_reset_starts_with_the_first_pause_again() -> None:
    backoff = Backoff(1.0, 64.0)
    for _ in range(3):
        backoff.next()
    backoff.reset()
    assert backoff.next() <= 1.0


def test_jitter_spreads_the_pauses() -> None:
    assert len({Backoff(1.0, 1.0).next() for _ in range(20)}) > 1
