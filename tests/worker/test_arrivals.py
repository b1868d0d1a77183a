"""Tests up to which id a worker has seen all messages, given the snapshots of the database."""

from __future__ import annotations

from datetime import UTC, datetime

from pgoutbox.database.store import Horizon
from pgoutbox.worker.arrivals import Arrivals

START = datetime(2024, 1, 1, tzinfo=UTC)


def quiet(next_xid: int, last_id: int) -> Horizon:
    """Return a snapshot without concurrent writers."""
    return Horizon(START, next_xid, next_xid, last_id)


def after(*horizons: Horizon) -> Arrivals:
    """Return the state after these answers, each followed by a search that left nothing behind."""
    arrivals = Arrivals()
    for horizon in horizons:
        arrivals.record(horizon)
        arrivals.note_searched(arrivals.visible_id)
    return arrivals


def test_one_snapshot_gives_no_seen_id_yet() -> None:
    assert after(quiet(100, 7)).seen_id is None


def test_the_seen_id_is_the_last_id_before_a_snapshot_without_writers() -> None:
    assert after(quiet(100, 7), quiet(105, 9)).seen_id == 7
    assert after(quiet(100, 7), quiet(105, 9), quiet(105, 9)).seen_id == 9


def test_the_seen_id_stays_until_every_open_transaction_has_ended() -> None:
    writer_open = Horizon(START, 103, 105, 9)
    assert after(quiet(100, 7), writer_open).seen_id is None
    assert after(quiet(100, 7), writer_open, Horizon(START, 103, 110, 12)).seen_id is None
    # The first writer has ended, another one is open: everything that the first snapshot covers is visible.
    assert after(quiet(100, 7), writer_open, Horizon(START, 106, 110, 12)).seen_id == 7
    assert after(quiet(100, 7), writer_open, quiet(110, 12)).seen_id == 9


def test_a_search_that_began_earlier_does_not_count() -> None:
    arrivals = Arrivals()
    arrivals.record(quiet(100, 7))
    before = arrivals.visible_id
    arrivals.record(quiet(105, 9))
    arrivals.note_searched(before)
    assert arrivals.seen_id is None


def test_the_seen_id_never_decreases_on_one_server() -> None:
    arrivals = after(quiet(100, 7), quiet(105, 9), quiet(106, 11))
    arrivals.note_searched(7)
    assert arrivals.seen_id == 9


def test_another_server_may_assign_the_same_ids_again() -> None:
    promoted = Horizon(datetime(2024, 1, 2, tzinfo=UTC), 200, 200, 20)
    assert after(quiet(100, 7), quiet(105, 9), promoted).seen_id is None
    assert after(quiet(100, 7), quiet(105, 9), quiet(106, 5)).seen_id is None


def test_a_long_writer_costs_only_a_limited_memory() -> None:
    open_for_long = [Horizon(START, 101, 110 + n, 10 + n) for n in range(1000)]
    arrivals = after(quiet(100, 7), *open_for_long)
    assert arrivals.seen_id is None
    assert len(arrivals._marks) < 100
    arrivals.record(quiet(2000, 2000))
    assert arrivals.visible_id == open_for_long[-1].last_id
