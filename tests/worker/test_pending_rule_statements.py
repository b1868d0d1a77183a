"""Tests the rule `pending`: an enqueue locks nothing, and a claim delivers the newest of the due messages of a key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

from pgoutbox.database import sql
from pgoutbox.database.store import FinishRequest
from pgoutbox.message import AttemptOutcome
from tests.support.outbox_actions import (
    Options,
    attempts_of,
    cancel,
    claim,
    enqueue,
    expire,
    finish,
    finish_sent,
    ids_in_flight,
    lapse,
    make_due,
    redrive,
    renew,
    row_of,
    rows_of,
    state_of,
    watch,
)

if TYPE_CHECKING:
    from tests.conftest import Connect


def look_again(
    connection: psycopg.Connection, key: str = "k", *, queue: str = "default", available_at: datetime | None = None
) -> int:
    return enqueue(connection, coalesce_key=key, coalesce_rule="pending", queue=queue, available_at=available_at)


def reason_to_wait(connection: psycopg.Connection, message_id: int) -> str:
    ((reason,),) = connection.execute("SELECT reason FROM pgoutbox.waiting_view WHERE id = %s", [message_id]).fetchall()
    return str(reason)


def in_an_hour() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)


def cancel_key(connection: psycopg.Connection) -> list[tuple[int, str]]:
    rows = connection.execute("SELECT id, result FROM pgoutbox.cancel_by_key('greet', coalesce_key => 'k')")
    return rows.fetchall()


# --- enqueue ----------------------------------------------------------------------------------------------------------


def test_enqueue_writes_no_head(rolled_back: psycopg.Connection) -> None:
    message_id = look_again(rolled_back)
    assert rolled_back.execute("SELECT FROM pgoutbox.coalesce_head").fetchall() == []
    row = rolled_back.execute(
        "SELECT coalesce_key, coalesces_pending FROM pgoutbox.message WHERE id = %s", [message_id]
    )
    assert row.fetchall() == [("k", True)]


@pytest.mark.parametrize("rule", [None, "newest"])
def test_without_the_rule_the_newest_message_wins(rolled_back: psycopg.Connection, rule: str | None) -> None:
    message_id = enqueue(rolled_back, coalesce_key="k", coalesce_rule=rule)
    assert rolled_back.execute("SELECT newest_id FROM pgoutbox.coalesce_head").fetchall() == [(message_id,)]
    assert rolled_back.execute("SELECT coalesces_pending FROM pgoutbox.message").fetchall() == [(None,)]


def test_transactions_that_enqueue_for_one_key_do_not_wait_for_each_other(connect: Connect) -> None:
    """No lock of the first blocks the second, which would fail at the tests' lock timeout."""
    first, second = connect(), connect()
    for connection in (first, second):
        look_again(connection)
    second.commit()
    first.commit()


def test_enqueue_adds_only_the_wake_up_lock(connect: Connect) -> None:
    plain, keyed = connect(), connect()
    enqueue(plain)
    look_again(keyed)
    locks = """
        SELECT l.locktype, l.relation::regclass::text, l.mode
        FROM pg_locks AS l
        WHERE l.pid = pg_backend_pid() AND l.locktype NOT IN ('virtualxid', 'transactionid')
    """
    added = set(keyed.execute(locks).fetchall()) - set(plain.execute(locks).fetchall())
    assert not {mode for _, _, mode in added} & {"ExclusiveLock", "ShareLock"}
    assert not {relation for _, relation, _ in added} & {"pgoutbox.coalesce_head", "pgoutbox.dedupe"}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (Options(coalesce_rule="pending"), "coalesce_rule"),
        (Options(coalesce_rule="newest"), "coalesce_rule"),
        (Options(coalesce_key="k", coalesce_rule="latest"), "coalesce_rule"),
        (Options(coalesce_key="k", coalesce_rule="pending", max_delay=timedelta(seconds=1)), "max_delay"),
    ],
    ids=["pending without a key", "newest without a key", "unknown", "max_delay"],
)
def test_an_invalid_argument_is_refused_by_its_name(
    rolled_back: psycopg.Connection, options: Options, field: str
) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=rf"^pgoutbox\.enqueue: {field}: must ") as caught:
        enqueue(rolled_back, **options)
    assert caught.value.diag.column_name == field


def test_a_bulk_can_mix_both_rules(rolled_back: psycopg.Connection) -> None:
    rolled_back.execute(
        """
        SELECT FROM pgoutbox.enqueue_many(
            '{greet,greet,greet,greet}', %s,
            coalesce_keys => '{k,k,k,NULL}', coalesce_rules => '{pending,newest,pending,NULL}',
            dedupe_keys => '{NULL,NULL,d,NULL}'
        )
        """,
        [[Jsonb(number) for number in range(4)]],
    )
    rows = rolled_back.execute(
        "SELECT payload, coalesces_pending, dedupe_key FROM pgoutbox.message ORDER BY payload"
    ).fetchall()
    assert rows == [(0, True, None), (1, None, None), (2, True, "d"), (3, None, None)]
    assert len(rolled_back.execute("SELECT FROM pgoutbox.coalesce_head").fetchall()) == 1


def test_a_bulk_locks_dedupe_keys_in_one_order_with_any_coalesce_keys(rolled_back: psycopg.Connection) -> None:
    """The rows come in the order in which the keys were locked."""
    rows = rolled_back.execute(
        """
        SELECT r.item_index
        FROM pgoutbox.enqueue_many(
            '{greet,greet,greet}', %s,
            coalesce_keys => '{x,y,z}', coalesce_rules => '{pending,pending,pending}', dedupe_keys => '{c,a,b}'
        ) AS r
        """,
        [[Jsonb(None)] * 3],
    ).fetchall()
    assert rows == [(1,), (2,), (0,)]


def test_an_invalid_argument_in_a_bulk_is_refused_by_its_item(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"items\[1\]\.coalesce_rule"):
        rolled_back.execute(
            "SELECT FROM pgoutbox.enqueue_many('{a,a}', %s, coalesce_rules => '{NULL,pending}')", [[Jsonb(None)] * 2]
        )


def test_a_copy_has_the_rule_of_its_source(rolled_back: psycopg.Connection) -> None:
    message_id = look_again(rolled_back)
    claim(rolled_back)
    finish_sent(rolled_back, (message_id, 1))
    ((copy,),) = rolled_back.execute("SELECT id FROM pgoutbox.resend(%s)", [message_id]).fetchall()
    assert rolled_back.execute("SELECT coalesces_pending FROM pgoutbox.message WHERE id = %s", [copy]).fetchone() == (
        True,
    )


# --- claim ------------------------------------------------------------------------------------------------------------


def test_a_claim_of_strict_messages_calls_no_function_of_the_rule(rolled_back: psycopg.Connection) -> None:
    """`NULL AND f()` calls the function, which took a third of the time of such a claim."""
    rolled_back.execute("SET LOCAL track_functions = 'pl'")
    strict = [enqueue(rolled_back, coalesce_key=key) for key in ("k", "l", "k")]
    assert ids_in_flight(claim(rolled_back)) == strict[1:]
    called = "SELECT calls FROM pg_stat_xact_user_functions WHERE funcname = '_newer_pending'"
    assert rolled_back.execute(called).fetchall() == []
    look_again(rolled_back, "m")
    assert len(claim(rolled_back)) == 1
    assert rolled_back.execute(called).fetchall() != []


@pytest.mark.parametrize("fresh_only", [False, True])
def test_the_newest_due_message_of_a_key_is_claimed(rolled_back: psycopg.Connection, fresh_only: bool) -> None:
    first, second, newest = (look_again(rolled_back) for _ in range(3))
    other = look_again(rolled_back, "other")
    assert ids_in_flight(claim(rolled_back, fresh_only=fresh_only)) == [newest, other]
    for row in rows_of(rolled_back, first, second):
        assert (row.state, row.skip_reason, row.superseded_by) == ("skipped", f"superseded by {newest}", newest)


def test_older_messages_are_skipped_while_one_of_their_key_is_in_flight(rolled_back: psycopg.Connection) -> None:
    in_flight = look_again(rolled_back)
    claim(rolled_back)
    older, newest = look_again(rolled_back), look_again(rolled_back)
    assert ids_in_flight(claim(rolled_back)) == []
    assert [row.state for row in rows_of(rolled_back, in_flight, older, newest)] == ["sending", "skipped", "pending"]
    finish_sent(rolled_back, (in_flight, 1))
    assert ids_in_flight(claim(rolled_back)) == [newest]


def test_a_newer_message_beyond_the_limit_of_a_claim_supersedes_too(rolled_back: psycopg.Connection) -> None:
    oldest, older, newest = (look_again(rolled_back) for _ in range(3))
    assert ids_in_flight(claim(rolled_back, total=2)) == []
    assert [row.state for row in rows_of(rolled_back, oldest, older, newest)] == ["skipped", "skipped", "pending"]
    assert ids_in_flight(claim(rolled_back, total=2)) == [newest]


def test_the_newest_id_is_delivered_even_if_due_times_run_against_ids(
    rolled_back: psycopg.Connection,
) -> None:
    first, second, third = (look_again(rolled_back) for _ in range(3))
    for message_id, seconds in ((first, 3), (second, 1), (third, 2)):
        rolled_back.execute(
            "UPDATE pgoutbox.message_live SET available_at = now() - make_interval(secs => %s) WHERE id = %s",
            [seconds, message_id],
        )
    assert ids_in_flight(claim(rolled_back)) == [third]
    assert [row.superseded_by for row in rows_of(rolled_back, first, second)] == [second, third]


def test_an_older_id_committed_after_a_delivery_of_a_newer_one_is_delivered(connect: Connect) -> None:
    late, db = connect(), connect(autocommit=True)
    older = look_again(late)
    newer = look_again(db)
    assert ids_in_flight(claim(db)) == [newer]
    late.commit()
    assert claim(db) == []
    finish_sent(db, (newer, 1))
    assert ids_in_flight(claim(db)) == [older]


def test_a_newer_message_in_an_open_transaction_supersedes_nothing(connect: Connect) -> None:
    opened, db = connect(), connect(autocommit=True)
    older = look_again(db)
    look_again(opened)
    assert ids_in_flight(claim(db)) == [older]


def test_a_message_waits_while_its_newer_one_is_locked(connect: Connect) -> None:
    """Another transaction may cancel the newer message. Then nothing would be delivered for the older one."""
    cancelling, db = connect(), connect(autocommit=True)
    older, newer = look_again(db), look_again(db)
    assert cancel(cancelling, newer) == "cancelled"
    assert claim(db) == []
    cancelling.commit()
    assert ids_in_flight(claim(db)) == [older]


@pytest.mark.parametrize("is_analyzed", [False, True])
def test_the_newer_message_of_a_hot_key_is_found_by_reading_one_row(
    rolled_back: psycopg.Connection, is_analyzed: bool
) -> None:
    fetched = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'message_live'"
    ids = [look_again(rolled_back) for _ in range(300)]
    look_again(rolled_back, available_at=in_an_hour())
    if is_analyzed:
        rolled_back.execute("ANALYZE pgoutbox.message_live")
    before = rolled_back.execute(fetched).fetchone() or (0,)
    newer = rolled_back.execute("SELECT pgoutbox._newer_pending('greet', 'k', 'default', %s)", [ids[0]]).fetchone()
    after = rolled_back.execute(fetched).fetchone() or (0,)
    assert newer == (ids[-1],)
    assert after[0] - before[0] == 1


def test_only_a_pending_and_due_message_supersedes_after_it_was_found(rolled_back: psycopg.Connection) -> None:
    """Another session may have claimed or postponed it since the claim's snapshot."""
    in_flight = look_again(rolled_back)
    claim(rolled_back)
    postponed, due = look_again(rolled_back, available_at=in_an_hour()), look_again(rolled_back)
    rows = rolled_back.execute(
        "SELECT id, pgoutbox._lock_if_due(id) FROM unnest(%s::bigint[]) AS id", [[in_flight, postponed, due]]
    ).fetchall()
    assert dict(rows) == {in_flight: False, postponed: False, due: True}


def test_claims_of_two_workers_skip_for_one_newer_message(connect: Connect) -> None:
    """The lock on the newer message is shared, and neither claim waits for it."""
    first, second = connect(), connect()
    with connect(autocommit=True) as db:
        in_flight = look_again(db)
        claim(db)
        one, two, newest = (look_again(db) for _ in range(3))
    claim(first, total=1)
    claim(second, total=1)
    first.commit()
    second.commit()
    states = [row.state for row in rows_of(first, in_flight, one, two, newest)]
    assert states == ["sending", "skipped", "skipped", "pending"]


def test_an_expired_message_is_skipped_as_expired(rolled_back: psycopg.Connection) -> None:
    older, newer = look_again(rolled_back), look_again(rolled_back)
    expire(rolled_back, newer)
    assert ids_in_flight(claim(rolled_back)) == [older]
    assert row_of(rolled_back, newer).skip_reason == "expired"


def test_a_due_retry_is_superseded_too(rolled_back: psycopg.Connection) -> None:
    older = look_again(rolled_back)
    claim(rolled_back)
    finish(rolled_back, FinishRequest(older, 1, AttemptOutcome.RETRY, "busy", 60.0))
    newer = look_again(rolled_back)
    make_due(rolled_back, older)
    assert ids_in_flight(claim(rolled_back, fresh_limit=0)) == []
    assert row_of(rolled_back, older).superseded_by == newer
    assert ids_in_flight(claim(rolled_back)) == [newer]


def test_a_lost_attempt_ends_if_a_newer_message_is_pending(rolled_back: psycopg.Connection) -> None:
    older = look_again(rolled_back)
    claim(rolled_back, worker="dead")
    newer = look_again(rolled_back)
    lapse(rolled_back, older)
    assert ids_in_flight(claim(rolled_back)) == [newer]
    assert row_of(rolled_back, older).superseded_by == newer
    assert [outcome for _, outcome, _ in attempts_of(rolled_back, older)] == ["lost"]


def test_a_lost_attempt_in_an_unserved_queue_blocks_no_newer_message(rolled_back: psycopg.Connection) -> None:
    older = look_again(rolled_back, queue="old")
    claim(rolled_back, queue="old", worker="dead")
    newer = look_again(rolled_back)
    lapse(rolled_back, older)
    assert ids_in_flight(claim(rolled_back)) == []
    parameters = {
        "queue": "", "queues": ["bulk", "default"], "topics": ["greet"], "hold_topics": [], "total": 100,
        "clock_limit": None, "worker": "w", "lease_seconds": 60, "in_flight": [], "set_aside": [],
    }  # fmt: skip
    rolled_back.execute(sql.END_SUPERSEDED_ELSEWHERE, parameters)
    assert row_of(rolled_back, older).superseded_by == newer
    assert ids_in_flight(claim(rolled_back)) == [newer]


# --- beside the strict rule -------------------------------------------------------------------------------------------


def test_a_newer_strict_message_supersedes_nothing(rolled_back: psycopg.Connection) -> None:
    older = look_again(rolled_back)
    strict = enqueue(rolled_back, coalesce_key="k")
    assert ids_in_flight(claim(rolled_back)) == [strict]
    finish_sent(rolled_back, (strict, 1))
    (row,) = claim(rolled_back)
    assert (row.id, row.state, row.superseded) == (older, "sending", False)


def test_a_message_committed_after_a_delivered_newer_strict_one_is_delivered(connect: Connect) -> None:
    producer, other, worker = connect(), connect(autocommit=True), connect(autocommit=True)
    late = look_again(producer)
    strict = enqueue(other, coalesce_key="k")
    assert ids_in_flight(claim(worker)) == [strict]
    finish_sent(worker, (strict, 1))
    producer.commit()
    assert ids_in_flight(claim(worker)) == [late]


def test_an_attempt_is_not_ended_by_an_already_delivered_strict_message(rolled_back: psycopg.Connection) -> None:
    message_id = look_again(rolled_back)
    strict = enqueue(rolled_back, coalesce_key="k")
    assert ids_in_flight(claim(rolled_back)) == [strict]
    finish_sent(rolled_back, (strict, 1))
    assert reason_to_wait(rolled_back, message_id) == "due"
    assert ids_in_flight(claim(rolled_back)) == [message_id]
    assert not renew(rolled_back, (message_id, 1))[message_id].superseded
    assert not watch(rolled_back, (message_id, 1))[message_id].superseded
    finish(rolled_back, FinishRequest(message_id, 1, AttemptOutcome.RETRY, "busy", 0.0))
    assert ids_in_flight(claim(rolled_back)) == [message_id]
    lapse(rolled_back, message_id)
    assert ids_in_flight(claim(rolled_back)) == [message_id]
    assert row_of(rolled_back, message_id).attempt_count == 3


@pytest.mark.parametrize("fresh_only", [False, True])
def test_a_strict_message_is_not_superseded_by_messages_of_the_rule(
    rolled_back: psycopg.Connection, fresh_only: bool
) -> None:
    strict = enqueue(rolled_back, coalesce_key="k")
    newer = look_again(rolled_back)
    assert ids_in_flight(claim(rolled_back, fresh_only=fresh_only)) == [strict]
    assert ids_in_flight(claim(rolled_back, fresh_only=fresh_only)) == []
    finish_sent(rolled_back, (strict, 1))
    assert ids_in_flight(claim(rolled_back, fresh_only=fresh_only)) == [newer]


def test_a_strict_message_that_waits_for_its_retry_blocks_nothing(rolled_back: psycopg.Connection) -> None:
    strict = enqueue(rolled_back, coalesce_key="k")
    claim(rolled_back)
    finish(rolled_back, FinishRequest(strict, 1, AttemptOutcome.RETRY, "busy", 60.0))
    newer = look_again(rolled_back)
    assert ids_in_flight(claim(rolled_back)) == [newer]


# --- attempts ---------------------------------------------------------------------------------------------------------


def test_a_newer_message_does_not_interrupt_an_attempt(rolled_back: psycopg.Connection) -> None:
    message_id = look_again(rolled_back)
    claim(rolled_back)
    look_again(rolled_back)
    assert not renew(rolled_back, (message_id, 1))[message_id].superseded
    assert not watch(rolled_back, (message_id, 1))[message_id].superseded


@pytest.mark.parametrize("outcome", ["retry", "snoozed", "released"])
def test_an_attempt_is_not_repeated_if_a_newer_message_is_pending(
    rolled_back: psycopg.Connection, outcome: str
) -> None:
    older = look_again(rolled_back)
    claim(rolled_back)
    newer = look_again(rolled_back)
    finish(
        rolled_back, FinishRequest(older, 1, AttemptOutcome(outcome), "busy", 0.0 if outcome == "released" else 60.0)
    )
    row = row_of(rolled_back, older)
    assert (row.state, row.superseded_by) == ("skipped", newer)
    assert ids_in_flight(claim(rolled_back)) == [newer]


def test_an_attempt_is_repeated_if_the_newer_message_is_due_later(rolled_back: psycopg.Connection) -> None:
    older = look_again(rolled_back)
    claim(rolled_back)
    look_again(rolled_back, available_at=in_an_hour())
    finish(rolled_back, FinishRequest(older, 1, AttemptOutcome.RETRY, "busy", 60.0))
    assert state_of(rolled_back, older) == "pending"


# --- operators --------------------------------------------------------------------------------------------------------


def test_a_failed_message_can_be_redriven_beside_newer_ones(rolled_back: psycopg.Connection) -> None:
    older = look_again(rolled_back)
    claim(rolled_back)
    finish(rolled_back, FinishRequest(older, 1, AttemptOutcome.FAILED, "no"))
    newer = look_again(rolled_back)
    assert redrive(rolled_back, older)
    assert ids_in_flight(claim(rolled_back, fresh_limit=0)) == []
    assert row_of(rolled_back, older).superseded_by == newer
    assert ids_in_flight(claim(rolled_back)) == [newer]


def test_cancelling_a_key_cancels_all_its_messages(rolled_back: psycopg.Connection) -> None:
    in_flight = look_again(rolled_back)
    claim(rolled_back)
    older, newer = look_again(rolled_back), look_again(rolled_back)
    assert cancel_key(rolled_back) == [(newer, "cancelled"), (older, "cancelled"), (in_flight, "requested")]


def test_cancelling_a_key_without_messages_cancels_nothing(rolled_back: psycopg.Connection) -> None:
    look_again(rolled_back, "other")
    assert cancel_key(rolled_back) == []
