"""Tests how many suspects the next claim takes, given the previous results."""

from __future__ import annotations

from pgoutbox.worker.crash_suspects import MAX_SUSPECTS, CrashSuspects

ROOM = 100


def claimed(suspects: CrashSuspects, found: int, *, in_flight: int = 0, room: int = ROOM) -> bool:
    """Record a claim that found this many."""
    limit = suspects.limit(room, in_flight)
    assert found <= limit
    return suspects.record(limit, found, in_flight=in_flight, is_filled=found == room)


def grouped(*limits: int) -> CrashSuspects:
    """Record the first suspect and groups, each of which ended before the next claim."""
    suspects = CrashSuspects()
    for limit in (1, *limits):
        assert suspects.limit(ROOM, 0) == limit
        claimed(suspects, limit)
    return suspects


def test_the_first_suspect_comes_alone() -> None:
    suspects = CrashSuspects()
    assert suspects.limit(ROOM, 1) == 0
    assert suspects.limit(ROOM, 0) == 1
    claimed(suspects, 1)
    assert suspects.limit(ROOM, 1) == 0
    assert suspects.limit(ROOM, 0) == 2


def test_a_group_grows_to_twice_its_size_when_half_of_it_has_ended() -> None:
    suspects = grouped()
    limits = []
    in_flight = 0
    for _ in range(6):
        assert suspects.limit(ROOM, in_flight + 1) == 0 or in_flight == 0
        limits.append(suspects.limit(ROOM, in_flight))
        claimed(suspects, limits[-1], in_flight=in_flight)
        in_flight = (in_flight + limits[-1]) // 2
    assert limits == [2, 4 - 1, 8 - 2, 16 - 4, MAX_SUSPECTS - 8, MAX_SUSPECTS - 16]


def test_a_group_is_not_larger_than_the_room() -> None:
    assert grouped(2, 4).limit(5, 0) == 5


def test_suspects_without_room_do_not_count_for_the_growth_of_a_group() -> None:
    suspects = grouped(2, 4)
    claimed(suspects, 3, room=3)
    assert suspects.limit(ROOM, 0) == 8


def test_a_group_of_one_is_not_claimed_beside_other_suspects() -> None:
    suspects = grouped(2)
    assert suspects.limit(1, 1) == 0
    assert suspects.limit(1, 0) == 1


def test_an_incomplete_group_is_followed_by_a_single_suspect_and_another_group() -> None:
    suspects = grouped(2, 4)
    claimed(suspects, 2, in_flight=1)
    assert suspects.limit(ROOM, 1) == 0
    assert suspects.limit(ROOM, 0) == 1
    claimed(suspects, 1)
    assert suspects.limit(ROOM, 1) == 0
    assert suspects.limit(ROOM, 0) == 8


def test_after_the_last_suspect_the_next_ones_begin_with_the_smallest_group() -> None:
    suspects = grouped(2, 4)
    claimed(suspects, 0)
    claimed(suspects, 0)
    assert not suspects.are_waiting
    assert suspects.limit(ROOM, 0) == 1
    claimed(suspects, 1)
    assert suspects.limit(ROOM, 0) == 2


def test_continuous_groups_do_not_starve_single_suspects() -> None:
    grouped(2, 4, 8, 16, *[MAX_SUSPECTS] * 8, 1, MAX_SUSPECTS)


def test_an_empty_group_is_followed_by_another_poll() -> None:
    suspects = grouped()
    assert suspects.are_waiting
    assert claimed(suspects, 0)
    assert not claimed(suspects, 0)
