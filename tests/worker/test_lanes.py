"""The lanes of ordering keys: what a worker claims next, and how often it reads all keys."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from pgoutbox.kernel.lanes import KnownKeys, PagedKeys, Place

END = ""
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def paged() -> PagedKeys:
    lane = PagedKeys("default")
    lane.note_keys(has_keys=True)
    return lane


def read_round(lane: PagedKeys, at: float, *, pages: int = 10, page_seconds: float = 0.01, found: int = 0) -> float:
    """Read all pages of a round, of which the first ones have messages. Return the time of its end."""
    for number in range(pages):
        lane.begin(at)
        at += page_seconds
        key = END if number == pages - 1 else f"key-{number}"
        lane.record(Place(NOW if number < found else None, None, key), is_filled=False, now=at)
    return at


@pytest.mark.parametrize(
    ("pages", "page_seconds", "found", "pause"),
    [
        pytest.param(10, 0.01, 0, 0.9, id="a tenth of the time"),
        pytest.param(10, 0.01, 4, 0.54, id="pages with a message do not count"),
        pytest.param(10, 7.0, 0, 4.5, id="a suspended process"),
        pytest.param(1, 0.01, 0, 0.0, id="one page has no pause"),
    ],
)
def test_a_round_in_vain_is_followed_by_a_pause(pages: int, page_seconds: float, found: int, pause: float) -> None:
    lane = paged()
    at = read_round(lane, 0.0, found=10)  # From a random key: the keys before it follow at once.
    assert lane.due_at() == -math.inf
    at = read_round(lane, at, pages=pages, page_seconds=page_seconds, found=found)
    assert lane.due_at() == math.inf
    lane.want()
    assert lane.due_at() == pytest.approx(at + pause)
    assert [lane.may_begin(at + 0.3), lane.may_begin(at + 5.0)] == [pause <= 0.3, True]


def test_a_round_that_has_begun_goes_on_at_once() -> None:
    lane = paged()
    lane.begin(0.0)
    lane.record(Place(None, None, "key"), is_filled=False, now=0.01)
    assert lane.due_at() == -math.inf


def test_what_a_filled_claim_has_left_comes_next() -> None:
    lane = KnownKeys("default")
    lane.note_keys(has_keys=True)
    for key in ("a", "b"):
        lane.want_key(key)
    assert lane.begin(10.0).keys == ("a", "b")
    lane.record(Place(NOW, 1, None), is_filled=True, now=10.01)
    lane.forget_keys(["a"])
    assert lane.is_wanted
    start = lane.begin(10.02)
    assert (start.keys, start.since_seconds) == (("b",), 1e9)
    lane.record(Place(NOW, 2, None), is_filled=False, now=10.03)
    assert not lane.is_wanted
    # The latest due times are read again when they may have changed: after a wish, and beside other work.
    lane.want_key("c")
    start = lane.begin(10.04)
    assert (start.keys, start.since_seconds, lane.reads_lately) == (("c",), 0.0, False)
    lane.record(None, is_filled=False, now=10.05)
    lane.want()
    assert lane.begin(10.06).since_seconds == pytest.approx(10.06 - 10.02 + 2.0)
    lane.record(None, is_filled=False, now=10.07)
    assert lane.begin(10.4).since_seconds == pytest.approx(10.4 - 10.06 + 2.0)


def test_a_claim_visits_the_oldest_known_keys() -> None:
    lane = KnownKeys("default")
    lane.note_keys(has_keys=True)
    keys = [str(number) for number in range(1200)]
    for key in keys:
        lane.want_key(key)
    visited: list[str] = []
    while lane.is_wanted:
        visited += lane.begin(10.0).keys
        lane.record(Place(NOW, 1, None), is_filled=False, now=10.0)
    assert visited == keys


def test_no_round_waits_in_a_queue_with_limits() -> None:
    lane = paged()
    at = read_round(lane, 0.0)
    at = read_round(lane, at, page_seconds=1.0)
    lane.want()
    assert lane.due_at() > at
    lane.note_limits(is_limited=True)
    assert lane.due_at() < at
