"""Tests which lanes the next poll claims from, and from which position, given the previous results."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest

from pgoutbox.database.store import BEGINNING, LAPSED_DISTANCE_SECONDS, ClaimedRow, DueRow, LapsedRow, Place
from pgoutbox.errors import ConfigurationError
from pgoutbox.worker.claim_planner import SEARCH_SECONDS, ClaimPlanner, Cursor, Lane, QueueSchedule
from pgoutbox.worker.queues import QueueShare, name_all, parse_queues

NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
LIMIT = 4
FRESH, RETRIES, ORDERED = Lane.FRESH, Lane.RETRIES, Lane.ORDERED


def rows(*seconds: int) -> list[ClaimedRow]:
    """Return claimed rows that were due this many seconds after noon."""
    return [
        ClaimedRow(
            id=second,
            topic="greet",
            destination=None,
            payload_json="null",
            headers_json=None,
            attempt_count=1,
            max_attempts=11,
            attempt_budget=11,
            created_at=NOON,
            available_at=NOON + timedelta(seconds=second),
            coalesce_key=None,
            ordering_key=None,
            content_id=None,
            claimed_at=NOON,
            state="sending",
            expires_in_seconds=None,
            superseded=False,
            queue="default",
        )
        for second in seconds
    ]


class Clock:
    """A cursor with a clock that the test advances."""

    def __init__(self) -> None:
        self.cursor = Cursor()
        self.now = 1000.0

    def start(self, *, from_beginning: bool = False, only_news: bool = False) -> Place:
        return self.cursor.start(self.now, from_beginning=from_beginning, only_news=only_news)

    def claim(self, *seconds: int, from_beginning: bool = False, took: float = 0.001) -> None:
        self.start(from_beginning=from_beginning)
        began_at, self.now = self.now, self.now + took
        self.cursor.record(rows(*seconds), LIMIT, began_at=began_at, ended_at=self.now)


def test_the_first_claim_starts_at_the_beginning() -> None:
    assert Clock().start() == BEGINNING


def test_a_filled_claim_sets_the_position_where_it_ended() -> None:
    clock = Clock()
    clock.claim(1, 2, 3, 4)
    assert clock.cursor.is_waiting
    assert clock.start() == Place(NOON + timedelta(seconds=4), 4)


def test_after_a_partial_claim_the_next_one_goes_back_to_transactions_that_committed_late() -> None:
    clock = Clock()
    clock.claim(1, 2, 3, 4)
    clock.claim(5)
    assert not clock.cursor.is_waiting
    clock.now += 0.1
    assert clock.start().after_due_at is None
    assert 1.0 < clock.start().since_seconds < 10.0


def test_a_notified_message_does_not_wait_for_a_search_from_the_beginning_that_is_due() -> None:
    clock = Clock()
    clock.claim(1, 2)
    clock.now += 3600.0
    assert clock.start(only_news=True) != BEGINNING
    assert clock.start() == BEGINNING


def test_a_full_poll_starts_at_the_beginning() -> None:
    clock = Clock()
    clock.claim(1, 2, 3, 4)
    assert clock.start(from_beginning=True) == BEGINNING
    assert clock.cursor.search_owed_at == math.inf


def test_under_load_claims_start_at_the_beginning_a_few_times_a_second() -> None:
    clock = Clock()
    clock.claim(1, 2, 3, 4)
    clock.now += 0.9 * SEARCH_SECONDS
    assert clock.start() != BEGINNING
    clock.now += 0.2 * SEARCH_SECONDS
    assert clock.start() == BEGINNING


@pytest.mark.parametrize(("took", "pause"), [(1.0, 9.0), (3600.0, 60.0)])
def test_slow_searches_from_the_beginning_take_a_tenth_of_the_time_and_are_owed(took: float, pause: float) -> None:
    clock = Clock()
    clock.claim(1, 2, 3, took=took)
    assert clock.start(from_beginning=True) == BEGINNING, "the process may have been suspended"
    clock.claim(1, 2, 3, from_beginning=True, took=took)
    clock.now += 0.9 * pause
    assert clock.start(from_beginning=True) != BEGINNING
    assert clock.cursor.search_owed_at == 1000.0 + 2 * took + pause
    clock.now += 0.2 * pause
    assert clock.start(from_beginning=True) == BEGINNING
    assert clock.cursor.search_owed_at == math.inf


def test_a_search_that_is_wanted_since_the_last_one_is_owed_too() -> None:
    clock = Clock()
    clock.claim(1, 2, 3, took=1.0)
    clock.claim(1, 2, 3, from_beginning=True, took=1.0)
    assert clock.cursor.start(clock.now, from_beginning=False, wanted_at=1001.5) != BEGINNING
    assert clock.cursor.search_owed_at == 1011.0
    assert clock.cursor.start(clock.now, from_beginning=False, wanted_at=999.0) != BEGINNING
    assert clock.cursor.search_owed_at == math.inf


def test_a_claim_from_the_position_of_the_cursor_searches_nothing_before_it() -> None:
    clock = Clock()
    clock.claim(1, 2, 3, 4)
    searched_at = clock.cursor.searched_at
    clock.claim(5, 6, 7, 8)
    assert clock.cursor.searched_at == searched_at == 1000.0


def due(queue: str, *, is_limited: bool = False, has_ordered: bool = False, seconds: float | None = None) -> DueRow:
    """Return an answer of the database; `seconds` until something falls due in the other lanes."""
    return DueRow(queue, has_ordered, 0.0 if is_limited else None, None, seconds)


def plain(now: float = 1000.0) -> ClaimPlanner:
    """Return the lanes of a queue without limits and ordering keys, in which nothing is due."""
    lanes = ClaimPlanner("default")
    for cursor in (lanes.fresh, lanes.retries):
        cursor.start(now - 1, from_beginning=True)
        cursor.record([], LIMIT, began_at=now - 1, ended_at=now - 1)
    lanes.record_due(due("default"), asked_at=now, now=now)
    return lanes


def fill(cursor: Cursor, now: float) -> None:
    """Report a claim that found as much as it asked for."""
    cursor.record(rows(1, 2, 3, 4), LIMIT, began_at=now, ended_at=now)


def test_the_first_poll_claims_from_all_lanes() -> None:
    assert ClaimPlanner("default").turns(0.0) == [FRESH, ORDERED, RETRIES]


def test_if_nothing_else_is_due_a_poll_claims_only_fresh_messages() -> None:
    assert plain().turns(1e6) == [FRESH]


def test_the_other_lanes_are_polled_when_something_falls_due() -> None:
    lanes = plain()
    lanes.record_due(due("default", seconds=3.0), asked_at=1000.0, now=1000.0)
    assert lanes.turns(1002.9) == [FRESH]
    assert set(lanes.turns(1003.1)) == {FRESH, RETRIES}


def test_the_other_lanes_are_polled_a_few_times_a_second() -> None:
    lanes = plain()
    lanes.retries.start(1000.0, from_beginning=True)
    lanes.retries.record([], LIMIT, began_at=1000.0, ended_at=1000.0)
    assert lanes.turns(1000.0 + 0.9 * SEARCH_SECONDS) == [FRESH]
    assert set(lanes.turns(1000.0 + 1.1 * SEARCH_SECONDS)) == {FRESH, RETRIES}


def scheduled(now: float = 1000.0) -> QueueSchedule:
    """Return the schedule of a queue in which nothing is due."""
    queues = QueueSchedule([QueueShare("default")], now=now - 1)
    queues.record_lapsed([], limit=LIMIT, began_at=now - 1, ended_at=now - 1)
    queues.record_due([due("default")], asked_at=now, now=now)
    return queues


def lapsed(due_seconds: float, *, queue: str = "default", state: str = "pending") -> LapsedRow:
    return LapsedRow(1, "greet", queue, 1, None, None, state, due_seconds)


def test_the_first_poll_looks_for_lapsed_attempts_and_the_next_ones_when_a_lease_ends() -> None:
    assert QueueSchedule([QueueShare("default")], now=1000.0).is_lapsed_due(1000.0)
    queues = scheduled()
    assert not queues.is_lapsed_due(1e6)
    queues.record_due([due("default", seconds=3.0)], asked_at=1000.0, now=1000.0)
    assert [queues.is_lapsed_due(at) for at in (1002.9, 1003.1)] == [False, True]


def test_under_load_polls_look_for_lapsed_attempts_a_few_times_a_second() -> None:
    queues = scheduled()
    queues.record_lapsed([], limit=LIMIT, began_at=1000.0, ended_at=1000.0)
    assert [queues.is_lapsed_due(1000.0 + part * SEARCH_SECONDS) for part in (0.9, 1.1)] == [False, True]


def test_slow_searches_for_lapsed_attempts_become_rarer() -> None:
    queues = scheduled()
    for began_at in (998.0, 999.0):  # One alone may mean that the process was suspended.
        queues.record_lapsed([], limit=LIMIT, began_at=began_at, ended_at=began_at + 1)
    assert [queues.is_lapsed_due(at) for at in (1008.9, 1009.1)] == [False, True]


def test_a_search_that_found_as_many_lapsed_attempts_as_it_may_continues_at_once() -> None:
    queues = scheduled()
    searched_at = queues.others_searched_at
    queues.record_lapsed([lapsed(0.0)] * LIMIT, limit=LIMIT, began_at=1000.0, ended_at=1000.1)
    queues.record_due([due("default")], asked_at=None, now=1000.1)
    assert queues.is_lapsed_due(1000.1)
    assert queues.others_searched_at == searched_at


def test_a_search_for_lapsed_attempts_that_began_before_a_request_does_not_count() -> None:
    queues = scheduled()
    queues.search(now=1000.0)
    for began_at, is_enough in ((999.9, False), (1000.1, True)):
        queues.record_lapsed([], limit=LIMIT, began_at=began_at, ended_at=began_at)
        assert queues.is_lapsed_due(1000.2) is not is_enough


def test_messages_of_lapsed_attempts_that_fall_due_shortly_are_owed_a_search() -> None:
    queues = scheduled()
    queues.polled_at = 1000.0
    rows = [lapsed(0.0), lapsed(0.05), lapsed(0.1), lapsed(0.3, state="failed")]
    queues.record_lapsed(rows, limit=10, began_at=1000.0, ended_at=1000.0)
    assert queues.search_owed_at == 1000.0 + LAPSED_DISTANCE_SECONDS
    queues.record_lapsed([lapsed(0.0)], limit=10, began_at=1000.01, ended_at=1000.01)
    queues.polled_at = 1000.09
    assert queues.search_owed_at == 1000.09 + LAPSED_DISTANCE_SECONDS
    queues.polled_at = 1000.11
    assert queues.search_owed_at == math.inf


def test_a_round_ends_where_it_began() -> None:
    lanes = plain()
    assert [lanes.turn_page(last, found=0) for last in ("b", "d", "")] == [False, False, True]
    assert lanes.turn_page("b", found=2) is False
    # From here on, the second round begins.
    assert [lanes.turn_page(last, found=0) for last in ("d", "", "a", "b")] == [False, False, False, True]


def test_a_round_ends_at_the_second_wrap_if_its_first_key_is_gone() -> None:
    lanes = plain()
    lanes.turn_page("m", found=1)
    assert [lanes.turn_page(last, found=0) for last in ("", "c", "")] == [False, False, True]


def test_a_round_of_a_single_page_ends_at_once() -> None:
    lanes = plain()
    assert [lanes.turn_page("", found=0) for _ in range(2)] == [True, True]
    assert lanes.turn_page("", found=1) is False


def test_pages_of_ordering_keys_are_small_while_they_are_empty() -> None:
    """A message that arrives during a page waits for one page only."""
    lanes = plain()
    assert [lanes.page_limit(room) for room in (50, 5000)] == [50, 100]
    lanes.turn_page("m", found=1)
    assert lanes.page_limit(5000) == 5000
    lanes.turn_page("n", found=0)
    assert lanes.page_limit(5000) == 100


def test_a_search_begins_another_round() -> None:
    lanes = plain()
    assert [lanes.turn_page(last, found=0) for last in ("b", "d")] == [False, False]
    lanes.search(now=1000.0)
    assert [lanes.turn_page(last, found=0) for last in ("", "b", "d")] == [False, False, True]


def test_a_search_that_began_before_the_request_does_not_count() -> None:
    """The claims were running when a message became claimable: their snapshots may not show it."""
    lanes = plain()
    lanes.search(now=1000.0)
    for began_at, is_enough in ((999.9, False), (1000.1, True)):
        for cursor in (lanes.fresh, lanes.retries):
            cursor.start(began_at, from_beginning=True)
            cursor.record([], LIMIT, began_at=began_at, ended_at=began_at)
        lanes.record_due(due("default"), asked_at=1000.2, now=1000.2)
        assert (set(lanes.turns(1000.2)) == {FRESH}) is is_enough


def test_a_search_claims_from_all_lanes_once() -> None:
    lanes = plain()
    lanes.search(now=1000.0)
    assert set(lanes.turns(1000.0)) == {FRESH, RETRIES}
    assert lanes.fresh.start(1000.0, from_beginning=False) == BEGINNING


def test_lanes_with_a_backlog_alternate_in_coming_first() -> None:
    lanes = plain()
    fill(lanes.retries, 1000.0)
    assert [lanes.turns(1000.1) for _ in range(3)] == [[FRESH, RETRIES], [RETRIES, FRESH], [FRESH, RETRIES]]
    lanes.has_ordered = True
    assert [lanes.turns(1000.1)[0] for _ in range(6)] == [ORDERED, RETRIES, FRESH] * 2


def test_a_notified_worker_claims_only_fresh_messages() -> None:
    lanes = plain()
    fill(lanes.retries, 1000.0)
    assert lanes.turns(1000.1, fresh_only=True) == [FRESH]


@pytest.mark.parametrize(
    ("first_seconds", "other_seconds", "first"),
    [(-2.0, -1.0, FRESH), (-1.0, -2.0, RETRIES), (None, -1.0, RETRIES), (-1.0, None, FRESH)],
)
def test_in_a_queue_with_limits_the_lane_of_the_oldest_message_comes_first(
    first_seconds: float | None, other_seconds: float | None, first: Lane
) -> None:
    lanes = plain()
    fill(lanes.retries, 1000.0)
    lanes.record_due(DueRow("default", False, 0.0, first_seconds, other_seconds), asked_at=1000.0, now=1000.0)
    for _ in range(3):
        turns = lanes.turns(1000.1, fresh_only=True)
        assert next(lane for lane in turns if lane in (FRESH, RETRIES)) is first


def test_the_oldest_search_gives_the_time_since_when_messages_may_have_fallen_due() -> None:
    queues = QueueSchedule([QueueShare("default")], now=1000.0)
    assert queues.others_searched_at == -math.inf
    queues["default"].retries.record([], LIMIT, began_at=1002.0, ended_at=1002.0)
    assert queues.others_searched_at == -math.inf
    queues.record_lapsed([], limit=LIMIT, began_at=1001.0, ended_at=1001.5)
    assert queues.others_searched_at == 1001.0
    queues.record_due([due("default", seconds=-1.0)], asked_at=1003.0, now=1003.1)
    assert queues.others_searched_at == 1001.0
    queues.record_due([due("default", seconds=1.0)], asked_at=None, now=1003.1)
    assert queues.others_searched_at == 1001.0
    queues.record_due([due("default", seconds=1.0)], asked_at=1003.0, now=1003.1)
    assert queues.others_searched_at == 1003.0


def test_queues_are_parsed_with_and_without_weights() -> None:
    assert parse_queues([]) == (QueueShare("default"),)
    assert parse_queues(["a", "b"]) == (QueueShare("a"), QueueShare("b"))
    assert parse_queues(["critical:6", "bulk:1"]) == (QueueShare("critical", 6), QueueShare("bulk", 1))
    assert parse_queues(["*"]) == (QueueShare("*"),)


def test_a_star_stands_for_the_default_and_all_defined_queues_that_are_not_named() -> None:
    assert name_all(parse_queues(["bulk"]), ["critical"]) == [QueueShare("bulk")]
    assert name_all(parse_queues(["*"]), ["critical", "bulk"]) == [
        QueueShare("bulk", 1),
        QueueShare("critical", 1),
        QueueShare("default", 1),
    ]
    assert name_all(parse_queues(["critical:6", "*:2"]), ["critical", "bulk"]) == [
        QueueShare("critical", 6),
        QueueShare("bulk", 2),
        QueueShare("default", 2),
    ]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (["a", "*"], "give \\* alone"),
        (["a:1", "*"], "all of them a weight, or none"),
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
def test_an_invalid_list_of_queues_is_refused(values: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        parse_queues(values)


def test_a_text_instead_of_a_list_of_queues_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"queues: must be a list of names, not the text 'critical'"):
        parse_queues("critical")


def queues_of(*values: str) -> QueueSchedule:
    return QueueSchedule(parse_queues(values), now=0.0)


def test_queues_without_weights_come_in_the_order_given() -> None:
    queues = queues_of("b", "a")
    assert [[lanes.queue for lanes in queues.in_turn()] for _ in range(2)] == [["b", "a"]] * 2


def test_queues_with_weights_come_first_in_proportion_and_evenly_spread() -> None:
    queues = queues_of("a:3", "b:1", "c:2")
    assert [first_of(queues) for _ in range(12)] == ["a", "c", "a", "b", "c", "a"] * 2


def test_an_empty_queue_leaves_its_share_to_the_others_by_their_weights() -> None:
    queues = queues_of("high:16", "plain:4", "low:1")
    assert "".join(first_of(queues, empty="high")[0] for _ in range(15)) == "pplpppplpppplpp"
    assert [first_of(queues) for _ in range(21)].count("high") == 16


def first_of(queues: QueueSchedule, *, empty: str | None = None) -> str:
    """Return the queue that is the first with messages in the next poll."""
    for planner in queues.in_turn():
        if planner.queue != empty:
            queues.record_turn(planner.queue, 1, is_first=True)
            return planner.queue
        queues.record_turn(planner.queue, 0, is_first=True)
    raise AssertionError


def test_every_queue_is_in_each_poll_once() -> None:
    queues = queues_of("a:3", "b:1")
    assert all(sorted(lanes.queue for lanes in queues.in_turn()) == ["a", "b"] for _ in range(4))


def test_a_newly_ordered_or_limited_queue_is_reported_once() -> None:
    queues = queues_of("a", "b")
    # All queues count as such until the database has answered.
    assert not queues.record_due([due("a"), due("b", has_ordered=True)], asked_at=0.0, now=0.0)
    assert queues.record_due([due("a", has_ordered=True), due("b", has_ordered=True)], asked_at=0.0, now=0.0)
    assert not queues.record_due([due("a", has_ordered=True), due("b")], asked_at=0.0, now=0.0)
    assert queues.record_due([due("a", has_ordered=True), due("b", is_limited=True)], asked_at=0.0, now=0.0)
    assert not queues.record_due([due("a"), due("b", is_limited=True)], asked_at=0.0, now=0.0)


def test_the_end_of_an_attempt_triggers_a_search_in_limited_or_ordered_queues() -> None:
    queues = queues_of("a", "b")
    queues.record_due([due("a"), due("b")], asked_at=0.0, now=0.0)
    assert not queues.may_wait_for_ends
    queues.record_due([due("a"), due("b", is_limited=True)], asked_at=0.0, now=0.0)
    assert queues.may_wait_for_ends
    queues.record_due([due("a", has_ordered=True), due("b")], asked_at=0.0, now=0.0)
    assert queues.may_wait_for_ends
