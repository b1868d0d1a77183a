"""Tests each rule of CLAIM: the claimed messages, their order, and the messages that it ends instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import pytest

from pgoutbox.database import sql
from pgoutbox.database.store import name_shared_session
from pgoutbox.kernel import statements
from pgoutbox.message import AttemptOutcome, State
from tests.support.messages import PUT_FINAL
from tests.support.outbox_actions import (
    LEASE_SECONDS,
    Options,
    attempts_of,
    begin,
    cancel,
    due_earlier,
    enqueue,
    expire,
    lapse,
    make_due,
    row_of,
    state_of,
)
from tests.support.worker_sql import FRESH, RETRIES, End, claim, claim_lanes, finish, ids_in_flight

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect


def retried(connection: psycopg.Connection, **arguments: Unpack[Options]) -> int:
    """Create a message that failed once and is due again."""
    message_id = enqueue(connection, **arguments)
    connection.execute(
        "UPDATE pgoutbox.message_live SET attempt_count = 1, lane = 1, available_at = now() - interval '1 s'"
        " WHERE id = %s",
        [message_id],
    )
    return message_id


def in_flight(connection: psycopg.Connection, **arguments: Unpack[Options]) -> int:
    """Create a message that a worker has claimed."""
    message_id = enqueue(connection, **arguments)
    assert message_id in ids_in_flight(claim(connection, worker="first"))
    return message_id


def lost(connection: psycopg.Connection, **arguments: Unpack[Options]) -> int:
    """Create a message whose worker died."""
    message_id = in_flight(connection, **arguments)
    lapse(connection, message_id)
    return message_id


def test_a_claim_leases_the_message_and_counts_the_attempt(rolled_back: psycopg.Connection) -> None:
    message_id = enqueue(rolled_back, payload={"name": "Ann"}, destination="mailto:ann@example.org")
    (claimed,) = claim(rolled_back, worker="w")
    assert (claimed.id, claimed.state, claimed.attempt_count) == (message_id, "sending", 1)
    assert (claimed.payload_json, claimed.headers_json) == ('{"name": "Ann"}', None)
    assert (claimed.destination, claimed.topic) == ("mailto:ann@example.org", "greet")
    assert row_of(rolled_back, message_id).worker == "w"
    lease = rolled_back.execute("SELECT extract(epoch FROM lease_expires_at - now())::float8 FROM pgoutbox.claim")
    assert lease.fetchone() == (LEASE_SECONDS,)


def test_the_row_of_a_suspect_has_the_columns_of_a_claim(rolled_back: psycopg.Connection) -> None:
    enqueue(rolled_back, destination="mailto:a@example.org", coalesce_key="k", max_attempts=2)
    (first,) = claim(rolled_back, worker="first")
    lapse(rolled_back, first.id)
    (again,) = claim(rolled_back)
    assert first.claimed_at is not None
    assert again.lost_session == name_shared_session("first", first.claimed_at)
    alike = again._replace(claimed_at=first.claimed_at, lost_session=None)
    assert alike == first._replace(attempt_count=2, lane=1)


def test_a_claim_of_fresh_messages_skips_all_others(rolled_back: psycopg.Connection) -> None:
    retried(rolled_back)
    lost_one_after_the_other(rolled_back, 1)
    lost_one_after_the_other(rolled_back, 1, max_attempts=1)
    due_earlier(rolled_back, enqueue(rolled_back), -1)
    fresh = enqueue(rolled_back)
    assert ids_in_flight(claim(rolled_back, fresh_only=True)) == [fresh]
    assert claim(rolled_back, fresh_only=True) == []


def test_a_claimed_message_is_not_claimed_again_while_its_lease_lasts(rolled_back: psycopg.Connection) -> None:
    in_flight(rolled_back)
    assert claim(rolled_back, worker="second") == []


def test_messages_are_claimed_in_the_order_of_their_due_times(rolled_back: psycopg.Connection) -> None:
    first, second, third = (enqueue(rolled_back) for _ in range(3))
    due_earlier(rolled_back, third, 20)
    due_earlier(rolled_back, first, 10)
    assert [ids_in_flight(claim(rolled_back, total=1)) for _ in range(3)] == [[third], [first], [second]]


def test_messages_due_at_the_same_time_are_claimed_in_the_order_of_their_ids(rolled_back: psycopg.Connection) -> None:
    ids = [enqueue(rolled_back) for _ in range(4)]
    assert [ids_in_flight(claim(rolled_back, total=1)) for _ in range(4)] == [[i] for i in ids]


def test_a_claim_takes_at_most_its_total(rolled_back: psycopg.Connection) -> None:
    ids = [enqueue(rolled_back) for _ in range(5)]
    assert ids_in_flight(claim(rolled_back, total=3)) == ids[:3]


def test_a_message_is_not_claimed_before_it_is_due(rolled_back: psycopg.Connection) -> None:
    message_id = enqueue(rolled_back)
    due_earlier(rolled_back, message_id, -1)
    assert claim(rolled_back) == []


def test_a_message_of_another_queue_is_not_claimed(rolled_back: psycopg.Connection) -> None:
    enqueue(rolled_back, queue="bulk")
    assert claim(rolled_back) == []


def test_a_topic_without_a_handler_is_not_claimed(rolled_back: psycopg.Connection) -> None:
    unknown = enqueue(rolled_back, topic="unknown")
    known = enqueue(rolled_back)
    assert ids_in_flight(claim(rolled_back)) == [known]
    assert row_of(rolled_back, unknown).attempt_count == 0


def test_retries_fill_the_room_that_fresh_messages_leave(rolled_back: psycopg.Connection) -> None:
    retries = [retried(rolled_back) for _ in range(3)]
    fresh = [enqueue(rolled_back) for _ in range(2)]
    assert ids_in_flight(claim(rolled_back, total=4)) == sorted([*fresh, *retries[:2]])


def test_a_backlog_of_retries_does_not_delay_fresh_messages(rolled_back: psycopg.Connection) -> None:
    for _ in range(10):
        retried(rolled_back)
    fresh = enqueue(rolled_back)
    assert ids_in_flight(claim(rolled_back, total=1)) == [fresh]


def test_a_position_skips_messages_that_were_due_before_it(rolled_back: psycopg.Connection) -> None:
    ((now,),) = rolled_back.execute("SELECT now()").fetchall()
    below, at_position, after_position = (enqueue(rolled_back) for _ in range(3))
    due_earlier(rolled_back, below, 5)
    below_again, at_position_again, after_position_again = (retried(rolled_back) for _ in range(3))
    due_earlier(rolled_back, at_position_again, 0)
    due_earlier(rolled_back, after_position_again, 0)
    after = {FRESH: (now, at_position), RETRIES: (now, at_position_again)}
    rows = claim_lanes(rolled_back, (FRESH, RETRIES), after=after)
    assert sorted(ids_in_flight(rows)) == [after_position, after_position_again]
    assert ids_in_flight(claim(rolled_back)) == [below, at_position, below_again, at_position_again]


def test_the_position_of_one_lane_does_not_affect_the_other(rolled_back: psycopg.Connection) -> None:
    ((now,),) = rolled_back.execute("SELECT now()").fetchall()
    fresh, retry = enqueue(rolled_back), retried(rolled_back)
    due_earlier(rolled_back, fresh, 5)
    for lane, found in ((RETRIES, fresh), (FRESH, retry)):
        assert ids_in_flight(claim_lanes(rolled_back, (FRESH, RETRIES), after={lane: (now, retry)})) == [found]


def test_a_superseded_message_ends_skipped_and_names_its_successor(rolled_back: psycopg.Connection) -> None:
    older = enqueue(rolled_back, coalesce_key="k")
    newer = enqueue(rolled_back, coalesce_key="k")
    assert ids_in_flight(claim(rolled_back)) == [newer]
    row = row_of(rolled_back, older)
    assert (row.state, row.superseded_by, row.skip_reason) == ("skipped", newer, f"superseded by {newer}")
    assert (row.attempt_count, row.is_finished) == (0, True)


def test_a_key_of_another_topic_supersedes_nothing(rolled_back: psycopg.Connection) -> None:
    greeting = enqueue(rolled_back, coalesce_key="k")
    invoice = enqueue(rolled_back, topic="bill", coalesce_key="k")
    assert ids_in_flight(claim(rolled_back, topics=["greet", "bill"])) == [greeting, invoice]


def test_a_superseded_retry_is_skipped_while_its_successor_is_in_flight(rolled_back: psycopg.Connection) -> None:
    older = retried(rolled_back, coalesce_key="k")
    newer = enqueue(rolled_back, coalesce_key="k")
    assert ids_in_flight(claim(rolled_back, total=1)) == [newer]
    assert claim(rolled_back)[0].state == State.SKIPPED
    assert row_of(rolled_back, older).superseded_by == newer


@pytest.mark.parametrize("fresh_only", [False, True], ids=["all lanes", "fresh"])
def test_an_expired_message_ends_skipped(rolled_back: psycopg.Connection, fresh_only: bool) -> None:
    message_id = enqueue(rolled_back)
    expire(rolled_back, message_id)
    assert ids_in_flight(claim(rolled_back, fresh_only=fresh_only)) == []
    row = row_of(rolled_back, message_id)
    assert (row.state, row.skip_reason, row.superseded_by, row.attempt_count) == ("skipped", "expired", None, 0)


def test_a_retry_that_has_expired_ends_skipped(rolled_back: psycopg.Connection) -> None:
    message_id = retried(rolled_back)
    expire(rolled_back, message_id)
    assert claim(rolled_back)[0].state == State.SKIPPED


def test_a_lost_attempt_is_recorded_and_repeated(rolled_back: psycopg.Connection) -> None:
    message_id = lost(rolled_back)
    (again,) = claim(rolled_back, worker="second")
    assert (again.state, again.attempt_count) == ("sending", 2)
    assert attempts_of(rolled_back, message_id) == [(1, "lost", "lease expired, outcome unknown")]
    worker = rolled_back.execute("SELECT worker FROM pgoutbox.attempt_view").fetchone()
    assert worker == ("first",)
    assert row_of(rolled_back, message_id).last_error == "attempt 1: lease of first expired, outcome unknown"


def test_a_lost_last_attempt_ends_failed(rolled_back: psycopg.Connection) -> None:
    message_id = lost(rolled_back, max_attempts=1)
    assert ids_in_flight(claim(rolled_back)) == []
    row = row_of(rolled_back, message_id)
    assert (row.state, row.attempt_count, row.is_leased) == ("failed", 1, False)
    assert "outcome unknown" in (row.last_error or "")
    assert attempts_of(rolled_back, message_id) == [(1, "lost", "lease expired, outcome unknown")]


def test_a_lost_attempt_of_a_topic_on_hold_ends_failed_for_an_operator(rolled_back: psycopg.Connection) -> None:
    message_id = lost(rolled_back)
    assert ids_in_flight(claim(rolled_back, hold_topics=["greet"])) == []
    row = row_of(rolled_back, message_id)
    assert (row.state, row.last_error) == ("failed", "attempt 1: lease of first expired, outcome unknown")


def test_a_topic_on_hold_is_retried_after_a_known_failure(rolled_back: psycopg.Connection) -> None:
    message_id = retried(rolled_back)
    assert ids_in_flight(claim(rolled_back, hold_topics=["greet"])) == [message_id]


def test_a_lost_attempt_whose_message_was_cancelled_ends_cancelled(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back)
    assert cancel(rolled_back, message_id) == "requested"
    lapse(rolled_back, message_id)
    assert ids_in_flight(claim(rolled_back)) == []
    assert state_of(rolled_back, message_id) == State.CANCELLED
    assert [outcome for _, outcome, _ in attempts_of(rolled_back, message_id)] == ["lost"]


def lost_one_after_the_other(
    connection: psycopg.Connection, count: int, topic: str = "greet", **arguments: Unpack[Options]
) -> list[int]:
    """Create messages whose workers died, the first one first."""
    ids = []
    for age in range(count, 0, -1):
        message_id = enqueue(connection, topic, **arguments)
        begin(connection, message_id, worker="first", lease_seconds=-age)
        ids.append(message_id)
    return ids


def test_lost_attempts_delay_neither_fresh_messages_nor_retries(rolled_back: psycopg.Connection) -> None:
    lost_one_after_the_other(rolled_back, 5)
    fresh, retry = enqueue(rolled_back), retried(rolled_back)
    due_earlier(rolled_back, retry, 1)
    assert ids_in_flight(claim(rolled_back, total=2)) == [fresh, retry]


def test_a_suspect_has_lost_half_of_its_attempts(rolled_back: psycopg.Connection) -> None:
    (last_attempt,) = lost_one_after_the_other(rolled_back, 1, max_attempts=2)
    (later_attempt,) = lost_one_after_the_other(rolled_back, 1)
    rolled_back.execute("UPDATE pgoutbox.message_live SET attempt_count = 6 WHERE id = %s", [later_attempt])
    can_afford_it = lost_one_after_the_other(rolled_back, 2, max_attempts=3)
    assert ids_in_flight(claim(rolled_back, suspects=False)) == can_afford_it[:1]
    assert [state_of(rolled_back, i) for i in (last_attempt, later_attempt, can_afford_it[1])] == [
        "sending", "sending", "pending"
    ]  # fmt: skip
    assert [ids_in_flight(claim(rolled_back)) for _ in range(3)] == [[last_attempt], [later_attempt], []]


def test_snoozes_do_not_reduce_the_losses_that_a_message_can_afford(rolled_back: psycopg.Connection) -> None:
    (snoozed,) = lost_one_after_the_other(rolled_back, 1)
    rolled_back.execute(
        "UPDATE pgoutbox.message_live SET attempt_count = 21, max_attempts = 31 WHERE id = %s", [snoozed]
    )
    assert ids_in_flight(claim(rolled_back, suspects=False)) == [snoozed]


@pytest.mark.parametrize("why", ["superseded", "cancelled", "expired", "exhausted", "on hold"])
def test_a_lost_attempt_that_ends_does_not_wait_for_a_turn_of_suspects(
    rolled_back: psycopg.Connection, why: str
) -> None:
    suspects = lost_one_after_the_other(rolled_back, 3, max_attempts=2)
    max_attempts = 1 if why == "exhausted" else 11
    (ends,) = lost_one_after_the_other(rolled_back, 1, coalesce_key="k", max_attempts=max_attempts)
    successors = [enqueue(rolled_back, coalesce_key="k")] if why == "superseded" else []
    match why:
        case "cancelled":
            cancel(rolled_back, ends)
        case "expired":
            expire(rolled_back, ends)
        case "on hold":
            rolled_back.execute("UPDATE pgoutbox.message_live SET topic = 'bill' WHERE id = %s", [ends])
    rows = claim(rolled_back, topics=["greet", "bill"], hold_topics=["bill"], suspects=False)
    assert [row.id for row in rows if row.lost_session] == [ends]
    assert ids_in_flight(rows) == successors
    assert [outcome for _, outcome, _ in attempts_of(rolled_back, ends)] == ["lost"]
    assert ids_in_flight(claim(rolled_back)) == suspects[:1]


def test_a_suspect_locked_by_another_session_is_skipped(connect: Connect) -> None:
    ours, theirs = connect(autocommit=True), connect()
    first, second = lost_one_after_the_other(ours, 2, max_attempts=2)
    assert ids_in_flight(claim(theirs)) == [first]
    assert ids_in_flight(claim(ours)) == [second]


def test_an_attempt_with_a_valid_lease_is_not_a_suspect(rolled_back: psycopg.Connection) -> None:
    in_flight(rolled_back)
    (suspect,) = lost_one_after_the_other(rolled_back, 1)
    assert ids_in_flight(claim(rolled_back)) == [suspect]


def test_a_message_that_ends_takes_no_turn_of_a_suspect(rolled_back: psycopg.Connection) -> None:
    (ends,) = lost_one_after_the_other(rolled_back, 1, max_attempts=1)
    rolled_back.execute("UPDATE pgoutbox.claim SET lease_expires_at = now() - interval '1 h'")
    (suspect,) = lost_one_after_the_other(rolled_back, 1)
    assert {row.id: row.state for row in claim(rolled_back)} == {ends: "failed", suspect: "sending"}


def test_a_locked_message_that_would_end_is_skipped(connect: Connect) -> None:
    ours, theirs = connect(autocommit=True), connect()
    first, second = lost_one_after_the_other(ours, 2, max_attempts=1)
    assert [row.id for row in claim(theirs, total=1)] == [first]
    assert [row.id for row in claim(ours)] == [second]


def test_a_message_that_would_end_is_skipped_if_its_topic_has_no_handler(rolled_back: psycopg.Connection) -> None:
    (lost_last,) = lost_one_after_the_other(rolled_back, 1, "unknown", max_attempts=1)
    assert claim(rolled_back) == []
    assert state_of(rolled_back, lost_last) == State.SENDING


def test_in_a_paused_queue_lost_attempts_can_end_but_are_not_repeated(rolled_back: psycopg.Connection) -> None:
    (suspect,) = lost_one_after_the_other(rolled_back, 1)
    (ending,) = lost_one_after_the_other(rolled_back, 1, max_attempts=1)
    rolled_back.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('default', now())")
    assert [(row.id, row.state) for row in claim(rolled_back)] == [(ending, "failed")]
    rolled_back.execute("UPDATE pgoutbox.queue SET paused_at = NULL")
    assert ids_in_flight(claim(rolled_back)) == [suspect]


def test_a_suspect_behind_one_of_a_topic_without_handler_is_found(rolled_back: psycopg.Connection) -> None:
    lost_one_after_the_other(rolled_back, 1, queue="bulk")
    lost_one_after_the_other(rolled_back, 1)
    rolled_back.execute("UPDATE pgoutbox.message_live SET topic = 'unknown'")
    rolled_back.execute("UPDATE pgoutbox.claim SET lease_expires_at = now() - interval '1 h'")
    (suspect,) = lost_one_after_the_other(rolled_back, 1)
    assert ids_in_flight(claim(rolled_back)) == [suspect]


@pytest.mark.parametrize("claims", [1, 2, 5])
def test_every_claim_increments_the_attempt_count(rolled_back: psycopg.Connection, claims: int) -> None:
    message_id = in_flight(rolled_back)
    for number in range(claims - 1):
        lapse(rolled_back, message_id)
        claim(rolled_back, worker=f"successor-{number}")
    assert row_of(rolled_back, message_id).attempt_count == claims


def test_a_snoozed_message_continues_its_attempt_count(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back)
    finish(rolled_back, End(message_id, 1, AttemptOutcome.SNOOZED, None, 0.0), worker="first")
    assert claim(rolled_back)[0].attempt_count == 2


def test_rows_locked_by_another_session_are_skipped(connect: Connect) -> None:
    ours, theirs = connect(autocommit=True), connect()
    locked = [enqueue(ours) for _ in range(20)]
    free = [enqueue(ours) for _ in range(3)]
    retry = retried(ours)
    theirs.execute("SELECT FROM pgoutbox.message_live WHERE id = ANY (%s) FOR UPDATE", [locked])
    assert ids_in_flight(claim(ours, total=10)) == [*free, retry]
    theirs.rollback()
    assert ids_in_flight(claim(ours)) == locked


def due_of(connection: psycopg.Connection, *, since_seconds: float) -> float | None:
    parameters = {
        "queues": ["default", "bulk"],
        "topics": ["greet"],
        "since_seconds": since_seconds,
        "others_since_seconds": since_seconds,
    }
    rows = connection.execute(statements.NEXT_DUE, parameters).fetchall()
    return min((float(seconds) for row in rows for seconds in row[3:5] if seconds is not None), default=None)


def test_the_next_due_time_considers_both_lanes_and_leases(rolled_back: psycopg.Connection) -> None:
    assert due_of(rolled_back, since_seconds=0) is None
    in_flight(rolled_back)
    assert due_of(rolled_back, since_seconds=0) == LEASE_SECONDS
    due_earlier(rolled_back, retried(rolled_back, queue="bulk"), -30)
    assert due_of(rolled_back, since_seconds=0) == 30
    due_earlier(rolled_back, enqueue(rolled_back), -10)
    assert due_of(rolled_back, since_seconds=0) == 10


def test_a_message_already_due_is_not_the_next_due_time(rolled_back: psycopg.Connection) -> None:
    enqueue(rolled_back)
    message_id = retried(rolled_back)
    make_due(rolled_back, message_id)
    assert due_of(rolled_back, since_seconds=0) is None


def test_messages_due_since_the_last_claim_began_are_included(rolled_back: psycopg.Connection) -> None:
    message_id = enqueue(rolled_back)
    due_earlier(rolled_back, message_id, 3)
    assert due_of(rolled_back, since_seconds=5) == -3.0
    assert due_of(rolled_back, since_seconds=2) is None


def owed(connection: psycopg.Connection) -> int:
    parameters = {"queues": ["default"], "topics": ["greet"]}
    (count,) = connection.execute(sql.COUNT_OWED, parameters).fetchone() or (-1,)
    return int(count)


def test_a_drain_waits_for_due_in_flight_and_retried_messages(rolled_back: psycopg.Connection) -> None:
    in_flight(rolled_back)
    due_earlier(rolled_back, retried(rolled_back), -30)
    enqueue(rolled_back)
    due_earlier(rolled_back, enqueue(rolled_back), -30)
    enqueue(rolled_back, topic="unknown")
    enqueue(rolled_back, queue="bulk")

    assert owed(rolled_back) == 3
    rolled_back.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('default', now())")
    assert owed(rolled_back) == 0


def test_a_drain_reads_the_limits_of_a_paused_queue_once_for_all_its_messages(rolled_back: psycopg.Connection) -> None:
    rolled_back.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('default', now())")
    rolled_back.execute(
        "INSERT INTO pgoutbox.message (topic, payload) SELECT 'greet', '1' FROM generate_series(1, 1000)"
    )
    rolled_back.execute("SET LOCAL track_functions = 'pl'")
    assert owed(rolled_back) == 0
    calls = "SELECT calls FROM pg_stat_xact_user_functions WHERE funcname = '_tokens_of'"
    assert rolled_back.execute(calls).fetchall() == [(1,)]


@pytest.mark.parametrize(
    ("other", "comes_first", "scheduled", "waited_for"),
    [
        ({"ordering_key": "k"}, True, True, False),
        ({"ordering_key": "k"}, False, True, True),
        ({"ordering_key": "other"}, True, True, True),
        ({"ordering_key": "k", "queue": "bulk"}, True, True, True),
        ({"ordering_key": "k", "topic": "unknown"}, True, False, False),
        ({"ordering_key": "k", "topic": "unknown"}, False, False, True),
        ({"ordering_key": "other", "topic": "unknown"}, True, False, True),
    ],
)
def test_a_drain_waits_only_behind_messages_that_it_waits_for(
    rolled_back: psycopg.Connection,
    other: Options,
    comes_first: bool,
    scheduled: bool,
    waited_for: bool,
) -> None:
    if not comes_first:
        enqueue(rolled_back, ordering_key="k")
    other_id = enqueue(rolled_back, **other)
    if scheduled:
        due_earlier(rolled_back, other_id, -30)
    if comes_first:
        enqueue(rolled_back, ordering_key="k")
    assert owed(rolled_back) == waited_for


def test_a_drain_waits_behind_a_retry_that_is_not_yet_due(rolled_back: psycopg.Connection) -> None:
    due_earlier(rolled_back, retried(rolled_back, ordering_key="k"), -30)
    enqueue(rolled_back, ordering_key="k")
    assert owed(rolled_back) == 2


@pytest.mark.parametrize(
    ("other", "comes_first", "waited_for"),
    [
        ({"ordering_key": "k", "halts_key": True}, True, False),
        ({"ordering_key": "k", "halts_key": True}, False, True),
        ({"ordering_key": "k", "halts_key": False}, True, True),
        ({"ordering_key": "other", "halts_key": True}, True, True),
        ({"ordering_key": "k", "halts_key": True, "queue": "bulk"}, True, True),
    ],
)
def test_a_drain_does_not_wait_behind_a_message_that_halts_its_key(
    rolled_back: psycopg.Connection,
    other: Options,
    comes_first: bool,
    waited_for: bool,
) -> None:
    if not comes_first:
        enqueue(rolled_back, ordering_key="k")
    failed = enqueue(rolled_back, **other)
    rolled_back.execute(PUT_FINAL, {"id": failed, "state": "failed", "age": "0"})
    if comes_first:
        enqueue(rolled_back, ordering_key="k")
    assert owed(rolled_back) == waited_for
