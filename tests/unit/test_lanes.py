"""What the next claim asks for, given what the last ones found."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pgoutbox.errors import ConfigurationError
from pgoutbox.lanes import (
    FULL_CLAIM_SECONDS,
    FULL_CLAIM_SHARE,
    MAX_SUSPECTS,
    ClaimPlan,
    Lanes,
    Queues,
    QueueShare,
    parse_queues,
)
from pgoutbox.store import ClaimedRow

NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
ROOM = 4


def row(seconds: int, *, attempts: int = 0, former_state: str = "pending", state: str = "sending") -> ClaimedRow:
    """A claimed row that was due so many seconds after noon."""
    due_at = NOON + timedelta(seconds=seconds)
    return ClaimedRow(
        id=seconds,
        topic="greet",
        queue="default",
        destination=None,
        payload_json="null",
        headers_json=None,
        attempt_count=attempts + 1,
        max_attempts=11,
        attempt_budget=11,
        created_at=NOON,
        available_at=due_at,
        coalesce_key=None,
        ordering_key=None,
        content_id=None,
        claimed_at=NOON,
        state=state,
        former_state=former_state,
        former_attempt_count=attempts,
        expires_in_seconds=None,
        is_limited=False,
        has_ordered=False,
        superseded=False,
    )


def fresh(*seconds: int) -> list[ClaimedRow]:
    return [row(s) for s in seconds]


def again(*seconds: int) -> list[ClaimedRow]:
    return [row(s, attempts=1) for s in seconds]


def lost(*seconds: int, attempts: int = 1, state: str = "sending") -> list[ClaimedRow]:
    return [row(s, attempts=attempts, former_state="sending", state=state) for s in seconds]


class Clock:
    """Lanes with a clock that the test moves."""

    def __init__(self) -> None:
        self.lanes = Lanes("default")
        self.now = 1000.0

    def plan(self, *, from_beginning: bool = False, room: int = ROOM, suspects_in_flight: int = 0) -> ClaimPlan:
        return self.lanes.plan(room, now=self.now, from_beginning=from_beginning, suspects_in_flight=suspects_in_flight)

    def claim(
        self,
        rows: list[ClaimedRow],
        *,
        from_beginning: bool = False,
        took: float = 0.001,
        room: int = ROOM,
        suspects_in_flight: int = 0,
    ) -> bool:
        plan = self.plan(from_beginning=from_beginning, room=room, suspects_in_flight=suspects_in_flight)
        assert len(rows) <= plan.total
        began_at, self.now = self.now, self.now + took
        return self.lanes.learn(plan, rows, began_at=began_at, ended_at=self.now)


def test_the_first_claim_looks_from_the_beginning() -> None:
    plan = Clock().plan(from_beginning=True)
    assert plan == ClaimPlan(ROOM, ROOM, None, None, 1, 0, is_full=True)


def test_a_full_answer_sets_the_floor_where_it_ended() -> None:
    clock = Clock()
    assert clock.claim(fresh(1, 2, 3, 4), from_beginning=True)
    assert clock.claim(again(), from_beginning=False) is False
    clock = Clock()
    clock.claim(fresh(1, 2, 3, 4), from_beginning=True)
    clock.claim([])
    assert clock.plan().fresh_floor == (NOON + timedelta(seconds=4), 4)


def test_a_short_answer_takes_the_floor_away() -> None:
    clock = Clock()
    clock.claim(fresh(1, 2, 3, 4), from_beginning=True)
    clock.claim([])
    clock.claim(fresh(5))
    assert clock.plan().fresh_floor is None


def test_a_ring_takes_the_floor_away() -> None:
    clock = Clock()
    clock.claim(fresh(1, 2, 3, 4), from_beginning=True)
    assert clock.plan(from_beginning=True).fresh_floor is None


def test_under_load_claims_look_from_the_beginning_a_few_times_a_second() -> None:
    clock = Clock()
    clock.claim(fresh(1, 2, 3, 4), from_beginning=True)
    clock.claim([])
    assert not clock.plan().is_full
    clock.now += FULL_CLAIM_SECONDS
    assert clock.plan().is_full


def test_a_slow_look_from_the_beginning_comes_more_rarely() -> None:
    clock = Clock()
    clock.claim(fresh(1, 2, 3, 4), from_beginning=True, took=1.0)
    clock.claim([])
    clock.now += 0.9 / FULL_CLAIM_SHARE
    assert not clock.plan().is_full
    clock.now += 0.2 / FULL_CLAIM_SHARE
    assert clock.plan().is_full


def test_lanes_take_turns_while_both_have_work() -> None:
    clock = Clock()
    turns = []
    clock.claim(fresh(1, 2, 3, 4), from_beginning=True)
    for i in range(2, 8):
        retries_first = clock.plan().fresh_limit == 0
        turns.append(retries_first)
        seconds = range(10 * i, 10 * i + ROOM)
        clock.claim(again(*seconds) if retries_first else fresh(*seconds))
    assert turns == [True, False] * 3


def test_without_retries_fresh_messages_have_every_turn_but_a_few_a_second() -> None:
    clock = Clock()
    clock.claim(fresh(1, 2, 3, 4), from_beginning=True)
    clock.claim([])
    limits = []
    for i in range(2, 7):
        limits.append(clock.plan().fresh_limit)
        clock.claim(fresh(*range(10 * i, 10 * i + ROOM)))
    assert limits == [ROOM] * 5
    clock.now += FULL_CLAIM_SECONDS
    assert clock.plan().fresh_limit == 0


def test_the_floor_of_retries_is_their_own() -> None:
    clock = Clock()
    clock.claim([*fresh(50), *again(1, 2, 3)], from_beginning=True)
    plan = clock.plan()
    assert plan.retry_floor == (NOON + timedelta(seconds=3), 3)
    assert plan.fresh_floor is None


def test_a_look_at_fresh_messages_alone_changes_nothing_for_the_others() -> None:
    clock = Clock()
    clock.claim([*fresh(1, 2, 3, 4)], from_beginning=True)
    clock.claim(again(1, 2, 3, 4))
    before = clock.plan()
    look = clock.lanes.plan_fresh(ROOM, from_beginning=True)
    assert clock.lanes.learn(look, fresh(1, 2, 3, 4), began_at=clock.now, ended_at=clock.now)
    after = clock.plan()
    assert (after.retry_floor, after.suspect_limit) == (before.retry_floor, before.suspect_limit)
    assert not clock.lanes.learn(look, [], began_at=clock.now, ended_at=clock.now)


def busy() -> Clock:
    """More fresh messages wait, and every other lane has just had its turn."""
    clock = Clock()
    clock.claim(fresh(1, 2, 3, 4), from_beginning=True)
    clock.claim([])
    assert clock.lanes.is_for_fresh_alone(clock.now)
    return clock


def test_while_fresh_messages_wait_claims_leave_out_the_other_lanes_and_go_on_where_the_last_ended() -> None:
    clock = busy()
    look = clock.lanes.plan_fresh(ROOM, from_beginning=False)
    assert look.fresh_floor == (NOON + timedelta(seconds=4), 4)
    clock.lanes.learn(look, fresh(5, 6, 7, 8), began_at=clock.now, ended_at=clock.now)
    assert clock.lanes.plan_fresh(ROOM, from_beginning=False).fresh_floor == (NOON + timedelta(seconds=8), 8)
    clock.lanes.learn(look, fresh(9), began_at=clock.now, ended_at=clock.now)
    assert not clock.lanes.is_for_fresh_alone(clock.now)


def test_the_other_lanes_have_their_turn_a_few_times_a_second() -> None:
    clock = busy()
    assert not clock.lanes.is_for_fresh_alone(clock.now + FULL_CLAIM_SECONDS)


def test_no_lane_is_left_out_of_a_limited_queue() -> None:
    clock = busy()
    clock.lanes.is_limited = True
    assert not clock.lanes.is_for_fresh_alone(clock.now)


def test_no_lane_is_left_out_while_retries_wait() -> None:
    clock = Clock()
    clock.claim(fresh(1, 2, 3, 4), from_beginning=True)
    clock.claim(again(1, 2, 3, 4))
    clock.lanes.learn(
        clock.lanes.plan_fresh(ROOM, from_beginning=False), fresh(5, 6, 7, 8), began_at=clock.now, ended_at=clock.now
    )
    assert not clock.lanes.is_for_fresh_alone(clock.now)


def test_no_lane_is_left_out_while_suspects_wait() -> None:
    clock = Clock()
    clock.claim([*fresh(1, 2, 3), *lost(1)], from_beginning=True)
    clock.lanes.learn(
        clock.lanes.plan_fresh(ROOM, from_beginning=True), fresh(4, 5, 6, 7), began_at=clock.now, ended_at=clock.now
    )
    assert not clock.lanes.is_for_fresh_alone(clock.now)


def test_an_answer_that_fills_the_room_means_that_more_is_likely_to_wait() -> None:
    assert Clock().claim([*fresh(1, 2), *again(1, 2)], from_beginning=True)
    assert not Clock().claim([*fresh(1, 2), *again(1)], from_beginning=True)


def test_the_first_suspect_comes_alone() -> None:
    clock = Clock()
    assert clock.plan(suspects_in_flight=1).suspect_limit == 0
    assert clock.plan().suspect_limit == 1
    clock.claim(lost(1))
    assert clock.plan(suspects_in_flight=1).suspect_limit == 0
    assert clock.plan().suspect_limit == 2


def test_a_group_is_filled_up_to_twice_its_size_when_half_of_it_has_ended() -> None:
    clock = Clock()
    clock.claim(lost(1))
    limits = []
    in_flight = 0
    for _ in range(6):
        assert clock.plan(room=100, suspects_in_flight=in_flight + 1).suspect_limit == 0 or in_flight == 0
        limits.append(clock.plan(room=100, suspects_in_flight=in_flight).suspect_limit)
        clock.claim(lost(*range(limits[-1])), room=100, suspects_in_flight=in_flight)
        in_flight = (in_flight + limits[-1]) // 2
    assert limits == [2, 4 - 1, 8 - 2, 16 - 4, MAX_SUSPECTS - 8, MAX_SUSPECTS - 16]


def grouped(clock: Clock, *limits: int) -> None:
    """The first one, and groups that ended."""
    for limit in (1, *limits):
        assert clock.plan(room=100).suspect_limit == limit
        clock.claim(lost(*range(limit)), room=100)


def test_a_group_is_no_greater_than_the_room() -> None:
    clock = Clock()
    grouped(clock, 2, 4)
    assert clock.plan().suspect_limit == ROOM


def test_a_group_does_not_grow_by_what_did_not_fit_into_the_room() -> None:
    clock = Clock()
    grouped(clock, 2, 4)
    clock.claim(lost(1, 2, 3), room=3)
    assert clock.plan(room=100).suspect_limit == 8


def test_beside_others_no_group_of_one_is_asked_for_because_anyone_may_come_in_it() -> None:
    clock = Clock()
    grouped(clock, 2)
    assert clock.plan(room=1, suspects_in_flight=1).suspect_limit == 0
    assert clock.plan(room=1).suspect_limit == 1


def test_a_group_that_found_too_few_is_followed_by_one_alone_and_another_group() -> None:
    clock = Clock()
    grouped(clock, 2, 4)
    clock.claim(lost(1, 2), suspects_in_flight=1)
    assert clock.plan(suspects_in_flight=1).suspect_limit == 0
    assert clock.plan().suspect_limit == 1
    clock.claim(lost(1))
    assert clock.plan(room=100, suspects_in_flight=1).suspect_limit == 0
    assert clock.plan(room=100).suspect_limit == 8


def test_when_no_suspects_are_left_the_next_ones_begin_with_the_smallest_group() -> None:
    clock = Clock()
    grouped(clock, 2, 4)
    clock.claim([])
    clock.claim([])
    grouped(clock, 2)


def test_groups_without_an_end_do_not_starve_those_that_come_alone() -> None:
    clock = Clock()
    grouped(clock, 2, 4, 8, 16, *[MAX_SUSPECTS] * 8, 1, MAX_SUSPECTS)


def test_a_group_that_found_nobody_is_no_reason_to_sleep() -> None:
    clock = Clock()
    clock.claim(lost(1))
    assert clock.claim([], from_beginning=True)
    assert not clock.claim([], from_beginning=True)


def test_fresh_messages_that_use_up_the_room_do_not_change_the_turns_of_suspects() -> None:
    clock = Clock()
    clock.claim(lost(1))
    clock.claim(fresh(1, 2, 3, 4))
    assert clock.plan().suspect_limit == 2


def test_lost_attempts_neither_move_the_floor_of_retries_nor_count_as_such() -> None:
    clock = Clock()
    clock.claim([*lost(90), *again(1, 2, 3)], from_beginning=True)
    assert clock.plan().retry_floor == (NOON + timedelta(seconds=3), 3)
    clock.claim([*lost(91), *again(4)])
    assert clock.plan().retry_floor is None


def test_lost_attempts_that_end_are_no_suspects() -> None:
    clock = Clock()
    clock.claim(lost(1, state="failed"))
    assert clock.plan().suspect_limit == 1


# --- queues -----------------------------------------------------------------------------------------------------------


def test_queues_are_read_with_and_without_weights() -> None:
    assert parse_queues([]) == (QueueShare("default"),)
    assert parse_queues(["a", "b"]) == (QueueShare("a"), QueueShare("b"))
    assert parse_queues(["critical:6", "bulk:1"]) == (QueueShare("critical", 6), QueueShare("bulk", 1))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (["a:1", "b"], "all of them a weight, or none"),
        (["a", "a"], "each may be named once"),
        (["a:0"], "'a:0'"),
        (["a:-1"], "'a:-1'"),
        (["a:10000"], "'a:10000'"),
        (["A"], "'A'"),
        ([""], "''"),
        (["a b"], "'a b'"),
        (["a:"], "'a:'"),
    ],
)
def test_a_wrong_list_of_queues_is_refused(values: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        parse_queues(values)


def queues_of(*values: str) -> Queues:
    return Queues(parse_queues(values), now=0.0)


def test_queues_without_weights_come_in_the_order_given() -> None:
    queues = queues_of("b", "a")
    assert [[lanes.queue for lanes in queues.in_turn()] for _ in range(2)] == [["b", "a"]] * 2


def test_queues_with_weights_are_first_in_their_proportion_and_evenly_spread() -> None:
    queues = queues_of("a:3", "b:1", "c:2")
    first = [queues.in_turn()[0].queue for _ in range(12)]
    assert first == ["a", "c", "a", "b", "c", "a"] * 2


def test_every_queue_is_in_each_look_once() -> None:
    queues = queues_of("a:3", "b:1")
    assert all(sorted(lanes.queue for lanes in queues.in_turn()) == ["a", "b"] for _ in range(4))


def test_a_queue_that_turns_out_to_be_ordered_is_news_once() -> None:
    queues = queues_of("a", "b")
    assert not queues.note_ordered(["b"])  # All are taken to be until the database has said otherwise.
    assert not queues["a"].has_ordered
    assert queues.note_ordered(["a"])
    assert not queues.note_ordered(["a"])
    assert (queues["a"].has_ordered, queues["b"].has_ordered) == (True, False)


def test_an_end_is_waited_for_where_a_queue_is_limited_or_ordered() -> None:
    queues = queues_of("a", "b")
    queues.note_ordered([])
    assert not queues.may_wait_for_ends
    queues["b"].is_limited = True
    assert queues.may_wait_for_ends
    queues["b"].is_limited = False
    queues.note_ordered(["a"])
    assert queues.may_wait_for_ends
