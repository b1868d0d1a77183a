"""Up to which id a worker has seen all messages, given what the database's snapshots cover."""

from __future__ import annotations

from datetime import UTC, datetime

from pgoutbox.arrivals import Arrivals
from pgoutbox.store import Horizon

START = datetime(2024, 1, 1, tzinfo=UTC)


def quiet(next_xid: int, last_id: int) -> Horizon:
    """A snapshot beside which no transaction writes."""
    return Horizon(START, next_xid, next_xid, last_id)


def after(*horizons: Horizon) -> Arrivals:
    """After these answers, each followed by a search that left nothing behind."""
    arrivals = Arrivals()
    for horizon in horizons:
        arrivals.learn(horizon)
        arrivals.note_searched(arrivals.visible_id)
    return arrivals


def test_one_snapshot_says_nothing_yet() -> None:
    assert after(quiet(100, 7)).floor_id is None


def test_the_floor_is_the_last_id_that_was_drawn_before_a_snapshot_without_writers() -> None:
    assert after(quiet(100, 7), quiet(105, 9)).floor_id == 7
    assert after(quiet(100, 7), quiet(105, 9), quiet(105, 9)).floor_id == 9


def test_the_floor_stays_until_every_transaction_has_ended_that_was_open() -> None:
    writer_open = Horizon(START, 103, 105, 9)
    assert after(quiet(100, 7), writer_open).floor_id is None
    assert after(quiet(100, 7), writer_open, Horizon(START, 103, 110, 12)).floor_id is None
    # The first writer has ended, another one is open: what the first snapshot covers is visible.
    assert after(quiet(100, 7), writer_open, Horizon(START, 106, 110, 12)).floor_id == 7
    assert after(quiet(100, 7), writer_open, quiet(110, 12)).floor_id == 9


def test_a_search_that_began_before_says_nothing() -> None:
    arrivals = Arrivals()
    arrivals.learn(quiet(100, 7))
    before = arrivals.visible_id
    arrivals.learn(quiet(105, 9))
    arrivals.note_searched(before)
    assert arrivals.floor_id is None


def test_the_floor_never_goes_back_on_one_server() -> None:
    arrivals = after(quiet(100, 7), quiet(105, 9), quiet(106, 11))
    arrivals.note_searched(7)
    assert arrivals.floor_id == 9


def test_another_server_may_give_out_the_same_ids_again() -> None:
    promoted = Horizon(datetime(2024, 1, 2, tzinfo=UTC), 200, 200, 20)
    assert after(quiet(100, 7), quiet(105, 9), promoted).floor_id is None
    assert after(quiet(100, 7), quiet(105, 9), quiet(106, 5)).floor_id is None


def test_a_writer_that_stays_open_for_long_costs_a_bounded_memory_and_nothing_else() -> None:
    open_for_long = [Horizon(START, 101, 110 + n, 10 + n) for n in range(1000)]
    arrivals = after(quiet(100, 7), *open_for_long)
    assert arrivals.floor_id is None
    assert len(arrivals._marks) < 100
    arrivals.learn(quiet(2000, 2000))
    assert arrivals.visible_id == open_for_long[-1].last_id
