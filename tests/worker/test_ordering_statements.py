"""Tests messages with an ordering key: one after the other in commit order, at the cost of reading only the first."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox.kernel import statements
from pgoutbox.message import AttemptOutcome, State
from pgoutbox.operations import Operator, Rate
from tests.support.outbox_actions import (
    attempts_of,
    begin,
    cancel,
    enqueue,
    expire,
    lapse,
    redrive,
    row_of,
    state_of,
    until_blocked,
)
from tests.support.worker_sql import (
    FRESH,
    ORDERED,
    RETRIES,
    End,
    claim,
    claim_ordered,
    claim_parameters,
    claim_rows,
    finish,
    finish_sent,
    ids_in_flight,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conftest import Connect


def page(connection: psycopg.Connection, after_key: str | None, *, key_limit: int = 9) -> tuple[list[int], str]:
    """Claim a page of ordering keys. Return the ids, and the key after which the next page begins."""
    *rows, end = claim_rows(connection, (ORDERED,), after_key=after_key, key_limit=key_limit)
    assert end.ordering_key is not None
    return [row.id for row in rows], end.ordering_key


def ordered(connection: psycopg.Connection, count: int, key: str = "k", **arguments: object) -> list[int]:
    return [enqueue(connection, ordering_key=key, **arguments) for _ in range(count)]  # type: ignore[arg-type] # passed on


def test_only_the_first_message_of_each_key_is_found(rolled_back: psycopg.Connection) -> None:
    first, second = ordered(rolled_back, 3, "a"), ordered(rolled_back, 2, "b")
    assert ids_in_flight(claim_ordered(rolled_back)) == [first[0], second[0]]


def test_the_first_page_of_a_process_may_begin_behind_each_key(db: psycopg.Connection) -> None:
    """In a database of its own: the pages of a shared one are nearly all empty."""
    enqueue(db)
    ordered(db, 1, "elsewhere", queue="bulk")
    assert page(db, None) == ([], "")
    ids = [ordered(db, 1, f"key-{number}")[0] for number in range(10)]
    found: set[int] = set()
    for _ in range(200):
        with db.transaction(force_rollback=True):
            found.update(page(db, None, key_limit=1)[0] or ids[:1])
    assert found == set(ids)


def test_the_next_message_follows_when_the_previous_one_is_final(rolled_back: psycopg.Connection) -> None:
    ids = ordered(rolled_back, 3)
    for message_id in ids:
        assert ids_in_flight(claim_ordered(rolled_back)) == [message_id]
        assert claim_ordered(rolled_back) == []
        finish_sent(rolled_back, (message_id, 1))


def test_claims_of_other_lanes_skip_ordered_messages(rolled_back: psycopg.Connection) -> None:
    (message_id,) = ordered(rolled_back, 1)
    assert claim(rolled_back) == []
    claim_ordered(rolled_back)
    finish(rolled_back, End(message_id, 1, AttemptOutcome.RETRY, "busy", 0.0))
    assert claim(rolled_back) == []
    assert ids_in_flight(claim_ordered(rolled_back)) == [message_id]


def test_the_next_message_waits_while_the_first_waits_for_its_retry(rolled_back: psycopg.Connection) -> None:
    first, _ = ordered(rolled_back, 2)
    claim_ordered(rolled_back)
    finish(rolled_back, End(first, 1, AttemptOutcome.RETRY, "busy", 60.0))
    assert claim_ordered(rolled_back) == []


@pytest.mark.parametrize("how", ["failed", "skipped", "cancelled", "expired"])
def test_the_next_message_follows_any_end_of_the_first(rolled_back: psycopg.Connection, how: str) -> None:
    first, second = ordered(rolled_back, 2)
    match how:
        case "cancelled":
            cancel(rolled_back, first)
        case "expired":
            expire(rolled_back, first)
            assert ids_in_flight(claim_ordered(rolled_back)) == []
        case _:
            claim_ordered(rolled_back)
            finish(rolled_back, End(first, 1, AttemptOutcome(how), "why"))
    assert state_of(rolled_back, first) not in (State.PENDING, State.SENDING)
    assert ids_in_flight(claim_ordered(rolled_back)) == [second]


def test_a_lost_attempt_is_repeated_before_the_next_message(rolled_back: psycopg.Connection) -> None:
    first, _ = ordered(rolled_back, 2)
    claim_ordered(rolled_back)
    lapse(rolled_back, first)
    assert claim_ordered(rolled_back) == []
    assert claim(rolled_back, worker="successor") == []
    assert ids_in_flight(claim_ordered(rolled_back, worker="successor")) == [first]


def test_a_halting_failure_blocks_the_messages_behind_it(rolled_back: psycopg.Connection) -> None:
    first, second = ordered(rolled_back, 2, halts_key=True)
    claim_ordered(rolled_back)
    finish(rolled_back, End(first, 1, AttemptOutcome.FAILED, "why"))
    (third,) = ordered(rolled_back, 1)
    assert claim_ordered(rolled_back) == []
    redrive(rolled_back, first)
    for message_id, attempt in ((first, 2), (second, 1), (third, 1)):
        assert ids_in_flight(claim_ordered(rolled_back)) == [message_id]
        finish_sent(rolled_back, (message_id, attempt))


def test_a_halting_failure_does_not_block_earlier_messages(rolled_back: psycopg.Connection) -> None:
    first, second = ordered(rolled_back, 2, halts_key=True)
    rolled_back.execute(
        """
        UPDATE pgoutbox.message SET state = 'failed', attempt_count = 1, finished_at = now() WHERE id = %s
        """,
        [second],
    )
    assert ids_in_flight(claim_ordered(rolled_back)) == [first]


@pytest.mark.parametrize("meanwhile", ["in flight", "waiting for its retry"])
def test_a_claim_of_a_limited_queue_leaves_the_message_of_another_claim_alone(connect: Connect, meanwhile: str) -> None:
    """It began before the other one committed, and does not wait for it."""
    db, other, late = connect(autocommit=True), connect(), connect()
    (message_id,) = ordered(db, 1)
    Operator(db).limit_rate("default", Rate(60, 3600), burst=5)
    assert ids_in_flight(claim_ordered(other)) == [message_id]
    if meanwhile == "waiting for its retry":
        finish(other, End(message_id, 1, AttemptOutcome.RETRY, "busy", 60.0))
    history = attempts_of(other, message_id)
    late.execute("SET lock_timeout = '1ms'")
    assert claim_ordered(late) == []
    other.commit()
    assert claim_ordered(late) == []
    late.commit()
    (queue,) = Operator(db).list_queues()
    assert attempts_of(db, message_id) == history
    assert queue.tokens is not None
    assert queue.tokens >= 4


def test_the_first_message_is_claimed_once(connect: Connect) -> None:
    ours, theirs = connect(autocommit=True), connect()
    first, _ = ordered(ours, 2)
    assert ids_in_flight(claim_ordered(theirs)) == [first]
    assert claim_ordered(ours) == []
    theirs.commit()
    assert claim_ordered(ours) == []


def test_two_messages_of_a_key_are_never_in_flight_after_any_write(rolled_back: psycopg.Connection) -> None:
    _, second = ordered(rolled_back, 2)
    claim_ordered(rolled_back)
    with pytest.raises(psycopg.errors.UniqueViolation, match="message_live_ordered_in_flight"):
        begin(rolled_back, second)


@pytest.mark.parametrize("key_is_new", [True, False])
async def test_messages_are_ordered_by_their_commits(connect: Connect, *, key_is_new: bool) -> None:
    """The second producer waits for the first one."""
    first, second, db = connect(), connect(), connect(autocommit=True)
    if not key_is_new:
        enqueue(db, ordering_key="k")
    older = enqueue(first, ordering_key="k")
    waiting = asyncio.create_task(asyncio.to_thread(enqueue, second, ordering_key="k"))
    await until_blocked(db, waiting)
    assert not waiting.done()
    first.commit()
    assert older < await waiting


def test_a_repeated_enqueue_after_a_second_id_draw_is_a_duplicate(rolled_back: psycopg.Connection) -> None:
    ordered(rolled_back, 1)
    (message_id,) = ordered(rolled_back, 1, dedupe_key="d")
    assert ordered(rolled_back, 1, dedupe_key="d") == [message_id]
    assert row_of(rolled_back, message_id).state == State.PENDING


def test_one_claim_covers_at_most_the_given_number_of_keys(rolled_back: psycopg.Connection) -> None:
    ids = [ordered(rolled_back, 2, key)[0] for key in ("a", "b", "c", "d", "e")]
    assert page(rolled_back, "", key_limit=2) == (ids[:2], "b")
    assert page(rolled_back, "b", key_limit=2) == (ids[2:4], "d")
    assert page(rolled_back, "d", key_limit=2) == (ids[4:], "")
    assert page(rolled_back, "e") == ([], "")


def test_a_message_of_a_topic_without_handler_blocks_its_key(rolled_back: psycopg.Connection) -> None:
    enqueue(rolled_back, "unknown", ordering_key="a")
    ordered(rolled_back, 1, "a")
    (other,) = ordered(rolled_back, 1, "b")
    assert ids_in_flight(claim_ordered(rolled_back)) == [other]


@pytest.mark.slow
def test_messages_behind_the_first_are_not_read(connect: Connect) -> None:
    """A few index tuples for each key, and not one for each message."""
    db = connect(autocommit=True)
    db.execute(
        """
        INSERT INTO pgoutbox.message_live (topic, payload, ordering_key)
        SELECT 'greet', '1', 'key-' || n % 5
        FROM generate_series(1, 20000) AS n
        """
    )
    db.execute("ANALYZE pgoutbox.message_live")
    db.execute("SET enable_seqscan = off")
    db.execute("SET enable_bitmapscan = off")
    lines: Sequence[tuple[str]] = db.execute(
        f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) {statements.CLAIM}".encode(), claim_parameters([ORDERED])
    ).fetchall()
    read = [int(rows) for (line,) in lines for rows in re.findall(r"Rows Removed by Filter: (\d+)", line)]
    read += [int(float(rows)) for (line,) in lines for rows in re.findall(r"actual rows=([\d.]+)", line)]
    assert max(read) <= 10, "\n".join(line for (line,) in lines)


def test_ordered_messages_in_a_limited_queue_take_tokens_too(rolled_back: psycopg.Connection) -> None:
    ids = [ordered(rolled_back, 1, key)[0] for key in ("a", "b", "c")]
    Operator(rolled_back).limit_rate("default", Rate(60, 3600), burst=2)
    assert ids_in_flight(claim_ordered(rolled_back)) == ids[:2]
    assert claim_ordered(rolled_back) == []


def test_the_first_message_of_a_key_is_not_claimed_while_its_topic_is_paused(rolled_back: psycopg.Connection) -> None:
    first = enqueue(rolled_back, "paused", ordering_key="k")
    second = enqueue(rolled_back, ordering_key="k")
    topics = ["greet", "paused"]
    Operator(rolled_back).pause_topic("paused")
    assert claim_ordered(rolled_back, topics=topics) == []
    Operator(rolled_back).resume_topic("paused")
    assert ids_in_flight(claim_ordered(rolled_back, topics=topics)) == [first]
    assert state_of(rolled_back, second) == "pending"


def test_a_claim_reads_the_paused_topics_once_and_not_for_each_message(rolled_back: psycopg.Connection) -> None:
    for number in range(20):
        enqueue(rolled_back)
        enqueue(rolled_back, ordering_key=str(number))
    Operator(rolled_back).pause_topic("greet")
    explain = f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {statements.CLAIM}".encode()
    lines: Sequence[tuple[str]] = rolled_back.execute(explain, claim_parameters([FRESH, RETRIES, ORDERED])).fetchall()
    scans = [line for (line,) in lines if " on topic_pause " in line and "never executed" not in line]
    assert len(scans) == 2, "one for the messages without an ordering key, and one for those with one"
    assert all(line.endswith("loops=1)") for line in scans), scans


def test_cancelling_the_first_message_notifies_for_the_next(connect: Connect) -> None:
    db, sleeper = connect(autocommit=True), connect(autocommit=True)
    first, _ = ordered(db, 2)
    sleeper.execute("LISTEN pgoutbox")
    sleeper.execute("SELECT pg_advisory_lock(1885826146, hashtext('default'))")
    cancel(db, first)
    assert [notify.payload for notify in sleeper.notifies(timeout=30, stop_after=1)] == ["default"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"ordering_key": "k", "coalesce_key": "k"}, "ordering_key: must not be given together with coalesce_key"),
        ({"ordering_key": "k" * 513}, "ordering_key: must not be longer than 512 bytes"),
        ({"halts_key": True}, "halts_key: must not be given without ordering_key"),
    ],
)
def test_invalid_arguments_are_named(rolled_back: psycopg.Connection, arguments: dict[str, str], problem: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=problem):
        enqueue(rolled_back, **arguments)  # type: ignore[arg-type] # The test passes wrong types.


def test_a_message_halts_no_key_unless_it_is_told_to(rolled_back: psycopg.Connection) -> None:
    for message_id in (*ordered(rolled_back, 1, halts_key=False), *ordered(rolled_back, 1)):
        (halts_key,) = rolled_back.execute(
            "SELECT halts_key FROM pgoutbox.message WHERE id = %s", [message_id]
        ).fetchone() or ("?",)
        assert halts_key is False
        assert row_of(rolled_back, message_id).state == State.PENDING
