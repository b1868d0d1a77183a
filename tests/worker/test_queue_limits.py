"""Tests queues with limits: how many attempts may begin, in which order, and when the next one may begin."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Unpack

import pytest

from pgoutbox.database import sql
from pgoutbox.database.store import DueRow
from pgoutbox.database.worker_connection import session_parameters
from pgoutbox.errors import ArgumentError
from pgoutbox.kernel import statements
from pgoutbox.operations import Operator, Rate
from pgoutbox.settings import load_settings
from tests.support.held_messages import open_breaker
from tests.support.outbox_actions import Options, enqueue, lapse
from tests.support.worker_sql import ask_for_locks, claim, ids_in_flight

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from tests.conftest import Connect


both_lanes = pytest.mark.parametrize("attempt_count", [0, 1], ids=["fresh", "retries"])


def enqueued(connection: psycopg.Connection, count: int, **arguments: Unpack[Options]) -> list[int]:
    return [enqueue(connection, **arguments) for _ in range(count)]


def limit(connection: psycopg.Connection, count: int, seconds: float = 3600, *, burst: int | None = None) -> None:
    connection.execute("SELECT")  # Begun here, so that a later transaction block does not commit it.
    Operator(connection).limit_rate("default", Rate(count, seconds), burst=burst)


def pass_time(connection: psycopg.Connection, seconds: float) -> None:
    """Age the last look at the bucket, and the claims."""
    connection.execute("UPDATE pgoutbox.queue SET tokens_at = tokens_at - make_interval(secs => %s)", [seconds])
    connection.execute("UPDATE pgoutbox.rate_claim SET claimed_at = claimed_at - make_interval(secs => %s)", [seconds])


def tokens(connection: psycopg.Connection) -> float:
    (found,) = Operator(connection).list_queues()
    assert found.tokens is not None
    return found.tokens


def next_permit(connection: psycopg.Connection) -> float | None:
    """Return the seconds until the next permit, None for now."""
    row = connection.execute(
        "SELECT extract(epoch FROM pgoutbox.next_permit_at('default') - clock_timestamp())::float8"
    ).fetchone()
    assert row is not None
    seconds: float | None = row[0]
    return seconds


def due(connection: psycopg.Connection, *, since_seconds: float = 0.0) -> DueRow:
    """Ask when something falls due that the last poll, so many seconds ago, has not found."""
    parameters = {
        "queues": ["default"],
        "topics": ["greet"],
        "since_seconds": since_seconds,
        "others_since_seconds": since_seconds,
    }
    (row,) = connection.execute(statements.NEXT_DUE, parameters).fetchall()
    return DueRow._make(row[:5])


def next_due(connection: psycopg.Connection) -> float | None:
    return due(connection).due_seconds


def standing_of(connection: psycopg.Connection) -> tuple[object, object]:
    """Return what an idle worker is told about its queue: its standing, and the seconds until the next permit."""
    ((_, standing, seconds, _),) = ask_for_locks(connection, "default")
    return standing, seconds


def test_a_bucket_begins_full_and_is_emptied_by_claims(rolled_back: psycopg.Connection) -> None:
    ids = enqueued(rolled_back, 8)
    limit(rolled_back, 60, burst=5)
    assert ids_in_flight(claim(rolled_back, total=3)) == ids[:3]
    assert ids_in_flight(claim(rolled_back)) == ids[3:5]
    assert claim(rolled_back) == []


@pytest.mark.parametrize(
    ("count", "seconds", "asked", "burst"),
    [
        (1, 3600, None, 1),
        (3, 3600, None, 1),
        (20, 3600, None, 2),
        (60, 3600, None, 5),
        (1000, 3600, None, 5),
        (20, 1, None, 20),
        (20, 1, 5, 20),
        (25, 2, None, 13),
        (2, 0.1, 1, 2),
    ],
)
def test_the_default_burst_is_a_tenth_of_the_rate_from_one_to_five_and_at_least_that_of_a_second(
    rolled_back: psycopg.Connection, count: int, seconds: float, asked: int | None, burst: int
) -> None:
    limit(rolled_back, count, seconds, burst=asked)
    assert tokens(rolled_back) == burst


@pytest.mark.parametrize("burst", [0, 61])
def test_a_burst_is_a_part_of_the_rate(rolled_back: psycopg.Connection, burst: int) -> None:
    with pytest.raises(ArgumentError, match=r"^burst: must be from 1 to 60, because it is a part of the rate; got"):
        limit(rolled_back, 60, burst=burst)


def test_tokens_refill_at_the_pace_of_the_rate_up_to_the_burst(rolled_back: psycopg.Connection) -> None:
    ids = enqueued(rolled_back, 8)
    limit(rolled_back, 60, burst=2)
    claim(rolled_back)
    pass_time(rolled_back, 59)
    assert claim(rolled_back) == []
    pass_time(rolled_back, 1.5)
    assert ids_in_flight(claim(rolled_back)) == [ids[2]]
    pass_time(rolled_back, 3600)
    assert ids_in_flight(claim(rolled_back)) == ids[3:5]


def test_a_clock_step_back_takes_no_tokens_away(rolled_back: psycopg.Connection) -> None:
    limit(rolled_back, 60, burst=2)
    pass_time(rolled_back, -3600)
    assert tokens(rolled_back) == 2


def test_a_queue_remembers_the_claims_of_its_period(rolled_back: psycopg.Connection) -> None:
    enqueued(rolled_back, 12)
    limit(rolled_back, 3, burst=3)
    for _ in range(10):
        assert len(claim(rolled_back, total=1)) == 1
        pass_time(rolled_back, 1201)
    assert rolled_back.execute("SELECT attempt_count FROM pgoutbox.rate_claim").fetchall() == [(1,)] * 3


def test_a_claim_reads_few_rows_of_the_many_that_have_ended(db: psycopg.Connection) -> None:
    """The statistics are from a time when there was one row."""
    db.execute(sql.PREPARE_SESSION, session_parameters(load_settings()))
    enqueued(db, 2)
    limit(db, 20, 1)
    claim(db, total=1)
    db.execute("ALTER TABLE pgoutbox.rate_claim SET (autovacuum_enabled = off)")
    db.execute("ANALYZE pgoutbox.rate_claim")
    db.execute(
        "INSERT INTO pgoutbox.rate_claim (queue, claimed_at, begun_count, attempt_count)"
        " SELECT 'default', now() - make_interval(secs => 100 + n), 1, 1 FROM generate_series(1, 1000) AS n"
    )
    before = rows_read(db)
    assert len(claim(db, total=1)) == 1
    assert rows_read(db) - before < 100


def rows_read(db: psycopg.Connection) -> int:
    """Return how many rows and index entries of the claims were read."""
    db.execute("SELECT pg_stat_force_next_flush()")
    ((read,),) = db.execute(
        "SELECT t.seq_tup_read + i.idx_tup_read FROM pg_stat_user_tables AS t"
        " JOIN pg_stat_user_indexes AS i USING (relid) WHERE t.relname = 'rate_claim'"
    ).fetchall()
    return int(read)


def test_the_period_of_a_lowered_rate_ends_with_the_attempt_that_makes_room(rolled_back: psycopg.Connection) -> None:
    enqueued(rolled_back, 8)
    limit(rolled_back, 4, burst=4)
    for _ in range(4):
        claim(rolled_back, total=1)
        pass_time(rolled_back, 600)
    limit(rolled_back, 2, burst=2)
    assert 2390 < (next_permit(rolled_back) or 0) <= 2400
    assert tokens(rolled_back) == 0


def test_a_queue_whose_settings_were_deleted_counts_from_zero(rolled_back: psycopg.Connection) -> None:
    enqueued(rolled_back, 12)
    limit(rolled_back, 3, burst=3)
    for _ in range(5):
        claim(rolled_back, total=1)
        pass_time(rolled_back, 1201)
    rolled_back.execute("DELETE FROM pgoutbox.queue")
    limit(rolled_back, 3, burst=3)
    assert len(claim(rolled_back)) == 3
    pass_time(rolled_back, 1201)
    assert claim(rolled_back) == []


def test_an_empty_claim_takes_no_tokens(rolled_back: psycopg.Connection) -> None:
    limit(rolled_back, 60, burst=2)
    assert claim(rolled_back) == []
    assert tokens(rolled_back) == 2


def impatient(connect: Connect) -> psycopg.Connection:
    """Return a session whose statements fail instead of waiting for a lock."""
    connection = connect(autocommit=True)
    connection.execute("SET lock_timeout = '1ms'")
    return connection


@pytest.mark.parametrize(
    ("change", "following"),
    [
        pytest.param(lambda operator: Operator(operator).pause("default"), 0, id="pause"),
        pytest.param(lambda operator: limit(operator, 60, burst=2), 2, id="first rate"),
        pytest.param(lambda operator: Operator(operator).limit_in_flight("default", 3), 3, id="limit in flight"),
    ],
)
def test_a_claim_does_not_wait_for_a_change_of_the_limits(
    connect: Connect, change: Callable[[psycopg.Connection], object], following: int
) -> None:
    db, operator, worker = connect(autocommit=True), connect(), impatient(connect)
    ids = enqueued(db, 4)
    Operator(db).limit_in_flight("default", 100)
    operator.execute("SELECT")  # Begun here, so that it is committed below.
    change(operator)
    assert claim(worker) == []
    operator.commit()
    assert ids_in_flight(claim(worker)) == ids[:following]


def test_a_claim_never_waits_for_a_queue_without_limits(connect: Connect) -> None:
    ours, theirs = connect(autocommit=True), connect()
    ids = enqueued(ours, 2)
    Operator(ours).pause("default")
    Operator(ours).resume("default")
    assert ids_in_flight(claim(theirs, total=1)) == ids[:1]
    assert ids_in_flight(claim(ours)) == ids[1:]


def test_a_lost_attempt_does_not_count_as_in_flight(rolled_back: psycopg.Connection) -> None:
    """Otherwise it could never be repeated."""
    first, _ = enqueued(rolled_back, 2, max_attempts=2)
    Operator(rolled_back).limit_in_flight("default", 1)
    assert ids_in_flight(claim(rolled_back)) == [first]
    lapse(rolled_back, first)
    assert ids_in_flight(claim(rolled_back, worker="successor")) == [first]
    assert claim(rolled_back) == []


def test_the_next_permit_is_due_when_the_bucket_holds_one(rolled_back: psycopg.Connection) -> None:
    enqueued(rolled_back, 1)
    assert next_permit(rolled_back) is None
    limit(rolled_back, 60, burst=1)
    assert next_permit(rolled_back) is None
    claim(rolled_back)
    seconds = next_permit(rolled_back)
    assert seconds is not None
    assert 50 < seconds <= 60


def test_a_full_queue_is_polled_again_within_a_second(rolled_back: psycopg.Connection) -> None:
    enqueued(rolled_back, 1)
    Operator(rolled_back).limit_in_flight("default", 1)
    claim(rolled_back)
    seconds = next_permit(rolled_back)
    assert seconds is not None
    assert 0 < seconds <= 1


def test_the_next_due_time_of_a_limited_queue_is_that_of_its_permit(rolled_back: psycopg.Connection) -> None:
    enqueued(rolled_back, 2)
    limit(rolled_back, 60, burst=1)
    claim(rolled_back)
    assert 50 < (next_due(rolled_back) or 0) <= 61
    # Messages that could not be claimed a moment ago may be claimable now, so the worker must poll again soon.
    pass_time(rolled_back, 120)
    assert next_due(rolled_back) == 0.25


def test_due_messages_of_a_paused_topic_wake_nobody_but_the_end_of_the_pause_does(
    rolled_back: psycopg.Connection,
) -> None:
    retried = enqueued(rolled_back, 3)[0]
    enqueue(rolled_back, ordering_key="k")
    rolled_back.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = %s", [retried])
    limit(rolled_back, 60)
    Operator(rolled_back).pause_topic("greet")
    assert next_due(rolled_back) is None
    Operator(rolled_back).pause_topic("greet", duration=timedelta(minutes=1))
    assert next_due(rolled_back) == 60
    enqueue(rolled_back, "other")
    assert next_due(rolled_back) == 0.25


@pytest.mark.parametrize("is_limited", [False, True])
def test_a_pause_of_a_topic_that_has_ended_since_the_last_poll_wakes_and_an_earlier_one_does_not(
    rolled_back: psycopg.Connection, *, is_limited: bool
) -> None:
    if is_limited:
        limit(rolled_back, 60)
    rolled_back.execute("INSERT INTO pgoutbox.topic_pause (topic, resume_at) VALUES ('greet', now() - interval '5 s')")
    assert due(rolled_back, since_seconds=6).due_seconds is not None
    assert due(rolled_back, since_seconds=4).due_seconds is None


def test_a_due_probe_of_a_paused_topic_wakes_nobody(rolled_back: psycopg.Connection) -> None:
    def next_probe() -> float | None:
        parameters = {"queues": ["default"], "topics": ["greet"], "since_seconds": 0, "others_since_seconds": 0}
        ((*_, seconds, _),) = rolled_back.execute(statements.NEXT_DUE, parameters).fetchall()
        return None if seconds is None else float(seconds)

    open_breaker(rolled_back)
    assert next_probe() == 0
    Operator(rolled_back).pause_topic("greet")
    assert next_probe() is None


def test_in_a_queue_paused_without_an_end_nothing_falls_due(rolled_back: psycopg.Connection) -> None:
    enqueued(rolled_back, 1)
    Operator(rolled_back).pause("default")
    assert next_due(rolled_back) is None


@both_lanes
def test_a_pause_ends_by_itself(rolled_back: psycopg.Connection, attempt_count: int) -> None:
    ids = enqueued(rolled_back, 1)
    rolled_back.execute(
        "UPDATE pgoutbox.message_live SET attempt_count = %s, lane = %s", [attempt_count, min(attempt_count, 1)]
    )
    rolled_back.execute(
        "INSERT INTO pgoutbox.queue (name, paused_at, resume_at) VALUES ('default', now(), now() + interval '1 h')"
    )
    assert claim(rolled_back) == []
    rolled_back.execute("UPDATE pgoutbox.queue SET resume_at = now()")
    assert ids_in_flight(claim(rolled_back)) == ids


def test_no_worker_has_the_wake_up_lock_of_a_queue_at_its_limit(connect: Connect) -> None:
    """Otherwise every enqueue behind the limit would ring for nothing."""
    db = connect(autocommit=True)
    enqueued(db, 1)
    limit(db, 60, burst=1)
    assert standing_of(db) == ("holds", None)
    db.execute("SELECT pg_advisory_unlock_all()")
    claim(db)
    standing, seconds = standing_of(db)
    assert standing == "limited"
    assert isinstance(seconds, float)
    assert 50 < seconds <= 60
    Operator(db).pause("default")
    assert standing_of(db) == ("limited", None)


def test_changing_the_rate_keeps_the_tokens_in_the_bucket(rolled_back: psycopg.Connection) -> None:
    enqueued(rolled_back, 3)
    limit(rolled_back, 60, burst=5)
    claim(rolled_back)
    limit(rolled_back, 16, burst=10)
    assert 2 <= tokens(rolled_back) < 2.1
    limit(rolled_back, 6, burst=1)
    assert tokens(rolled_back) == 1
    Operator(rolled_back).limit_rate("default", None)
    assert Operator(rolled_back).list_queues() == []


@pytest.mark.parametrize(
    "wrong",
    [
        "rate_count = 5",
        "rate_count = 5, rate_seconds = 0, burst = 1, tokens = 1, tokens_at = now()",
        "rate_count = 5, rate_seconds = 9, burst = 1, tokens = 2, tokens_at = now()",
        "rate_count = 5, rate_seconds = 1, burst = 6, tokens = 1, tokens_at = now()",
        "max_in_flight = 0",
        "resume_at = now()",
        "name = 'Bulk'",
    ],
)
def test_the_table_refuses_an_incomplete_limit(rolled_back: psycopg.Connection, wrong: str) -> None:
    rolled_back.execute("INSERT INTO pgoutbox.queue (name) VALUES ('default')")
    with pytest.raises(Exception, match="queue_sound"):
        rolled_back.execute(f"UPDATE pgoutbox.queue SET {wrong}".encode())
