"""Tests the statements of the shared circuit breaker, one at a time; each of their guards has a test that needs it."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pgoutbox.database import sql
from pgoutbox.worker.breakers.circuit_breaker import BreakerRow
from tests.support import races
from tests.support.messages import ADD_ATTEMPT
from tests.support.outbox_actions import enqueue
from tests.support.worker_sql import sleeping_worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from tests.conftest import Connect

KEY = "smtp:mail.example.org:587"
COOLDOWN_SECONDS = 30.0
MAX_COOLDOWN_SECONDS = 600.0
STALE_SECONDS = 172_800.0


def fail(
    db: psycopg.Connection,
    *,
    trips: bool = True,
    error: str = "refused",
    key: str = KEY,
    alert_queue: str | None = None,
    alert_destinations: Sequence[str] = ("mailto:ops@example.org",),
) -> BreakerRow | None:
    row = db.execute(
        sql.BREAKER_FAILED,
        {
            "key": key,
            "trips": trips,
            "error": error,
            "cooldown_seconds": COOLDOWN_SECONDS,
            "max_cooldown_seconds": MAX_COOLDOWN_SECONDS,
            "worker": "worker-1",
            "alert_queue": alert_queue,
            "alert_destinations": [*alert_destinations],
        },
    ).fetchone()
    return None if row is None else BreakerRow._make(row)


def probe(db: psycopg.Connection, *, key: str = KEY, is_early: bool = False) -> BreakerRow | None:
    parameters = {"key": key, "is_early": is_early, "probe_timeout_seconds": 60.0, "worker": "worker-2"}
    rows = db.execute(sql.BREAKER_PROBE, parameters).fetchall()
    assert len(rows) <= 1
    return BreakerRow._make(rows[0]) if rows else None


def won_probe(db: psycopg.Connection) -> str:
    leave = probe(db)
    assert leave is not None
    assert leave.probe_id is not None
    return leave.probe_id


def close(
    db: psycopg.Connection, probe_id: str | None, *, send_seconds: float | None = None, alert_queue: str | None = None
) -> bool:
    parameters = {
        "key": KEY,
        "probe_id": probe_id,
        "send_seconds": send_seconds,
        "alert_queue": alert_queue,
        "alert_destinations": [None],
    }
    return db.execute(sql.BREAKER_CLOSE_IF_NEWER, parameters).fetchone() is not None


def reopen(db: psycopg.Connection, probe_id: str, *, max_cooldown_seconds: float = 600.0) -> float | None:
    """Return the new pause."""
    row = db.execute(
        sql.BREAKER_REOPEN_IF_PROBING,
        {"key": KEY, "probe_id": probe_id, "error": "again", "max_cooldown_seconds": max_cooldown_seconds},
    ).fetchone()
    return None if row is None else float(row[1])


def release(db: psycopg.Connection, probe_id: str) -> bool:
    parameters = {"key": KEY, "probe_id": probe_id, "hold": None}
    return db.execute(sql.BREAKER_RELEASE_IF_PROBING, parameters).fetchone() is not None


def age(db: psycopg.Connection, seconds: float) -> None:
    """Age the row by this time."""
    db.execute(
        "UPDATE pgoutbox.breaker SET retry_at = retry_at - make_interval(secs => %(seconds)s),"
        " probe_until = probe_until - make_interval(secs => %(seconds)s)",
        {"seconds": seconds},
    )


def alerts(db: psycopg.Connection) -> list[tuple[str, str, str]]:
    return db.execute(
        "SELECT payload ->> 'event', payload ->> 'breaker', queue FROM pgoutbox.message"
        " WHERE topic = 'pgoutbox.alert' ORDER BY id"
    ).fetchall()


# --- open -------------------------------------------------------------------------------------------------------------


def test_a_failure_below_the_threshold_opens_nothing(rolled_back: psycopg.Connection) -> None:
    assert fail(rolled_back, trips=False) is None
    assert rolled_back.execute("SELECT count(*) FROM pgoutbox.breaker").fetchone() == (0,)


def test_one_failure_opens_the_breaker_and_the_next_ones_learn_it(rolled_back: psycopg.Connection) -> None:
    first = fail(rolled_back)
    assert first == BreakerRow(COOLDOWN_SECONDS, COOLDOWN_SECONDS, "refused", True, None)
    age(rolled_back, 10)
    assert fail(rolled_back, error="other") == BreakerRow(20.0, COOLDOWN_SECONDS, "refused", False, None)
    assert fail(rolled_back, trips=False) == BreakerRow(20.0, COOLDOWN_SECONDS, "refused", False, None)
    assert fail(rolled_back, trips=False, key="another") is None


def test_an_abandoned_row_is_replaced_by_a_new_opening(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    stale = won_probe_after_cooldown(rolled_back)
    age(rolled_back, STALE_SECONDS + 61)
    assert fail(rolled_back, trips=False) is None
    assert fail(rolled_back, error="new") == BreakerRow(COOLDOWN_SECONDS, COOLDOWN_SECONDS, "new", True, None)
    assert not close(rolled_back, stale)


def test_a_row_with_a_probe_in_progress_is_not_replaced(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    age(rolled_back, COOLDOWN_SECONDS + STALE_SECONDS + 1)
    probe_id = won_probe(rolled_back)
    answer = fail(rolled_back)
    assert answer is not None
    assert not answer.opened
    assert close(rolled_back, probe_id)


def test_after_the_pause_a_failure_counts_as_a_failed_probe(
    rolled_back: psycopg.Connection,
) -> None:
    """The worker was started after the opening, and does not know of it."""
    fail(rolled_back, alert_queue="default")
    for pause in (2, 4):
        age(rolled_back, 8 * COOLDOWN_SECONDS)
        assert fail(rolled_back, error="again", alert_queue="default") == BreakerRow(
            pause * COOLDOWN_SECONDS, pause * COOLDOWN_SECONDS, "again", False, None
        )
    age(rolled_back, 8 * COOLDOWN_SECONDS)
    learned = fail(rolled_back, trips=False)
    assert learned is not None
    assert learned.cooldown_seconds == 4 * COOLDOWN_SECONDS, "a failure among others is not a probe"
    assert len(alerts(rolled_back)) == 1


def test_a_failure_without_permission_does_not_end_a_running_probe(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    probe_id = won_probe_after_cooldown(rolled_back)
    answer = fail(rolled_back, error="other")
    assert answer is not None
    assert (answer.cooldown_seconds, answer.last_error) == (COOLDOWN_SECONDS, "refused")
    assert close(rolled_back, probe_id)


def test_a_failure_without_permission_ends_a_lost_probe(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    lost = won_probe_after_cooldown(rolled_back)
    age(rolled_back, 60)
    answer = fail(rolled_back)
    assert answer is not None
    assert answer.cooldown_seconds == 2 * COOLDOWN_SECONDS
    assert not close(rolled_back, lost)


def test_of_two_sessions_that_open_at_once_one_has_opened(connect: Connect) -> None:
    first, second, observer = connect(), connect(), connect(autocommit=True)
    opened = fail(first, alert_queue="default")
    assert opened is not None
    assert opened.opened
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fail, second, alert_queue="default")
        races.until_blocked(observer, second, waiting)
        first.commit()
        assert waiting.result() is None  # Its snapshot is older than the row; a second query shows it.
        second.commit()
    answer = fail(second)
    assert answer is not None
    assert not answer.opened
    assert len(alerts(observer)) == 1


# --- probe ------------------------------------------------------------------------------------------------------------


def won_probe_after_cooldown(db: psycopg.Connection) -> str:
    age(db, COOLDOWN_SECONDS)
    return won_probe(db)


def test_a_probe_before_its_time_is_refused(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    age(rolled_back, COOLDOWN_SECONDS - 1)
    assert probe(rolled_back) == BreakerRow(1.0, COOLDOWN_SECONDS, "refused", False, None)


def test_an_early_probe_is_granted_during_the_pause_and_does_not_extend_it(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    age(rolled_back, 10)
    early = probe(rolled_back, is_early=True)
    assert early is not None
    assert early.probe_id is not None
    other = probe(rolled_back, is_early=True)
    assert other is not None
    assert other.probe_id is None
    assert reopen(rolled_back, early.probe_id) == COOLDOWN_SECONDS
    assert probe(rolled_back) == BreakerRow(20.0, COOLDOWN_SECONDS, "again", False, None)


def test_a_closed_breaker_needs_no_probe(rolled_back: psycopg.Connection) -> None:
    assert probe(rolled_back) is None


def test_a_probe_belongs_to_one_key(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    fail(rolled_back, key="another")
    won_probe_after_cooldown(rolled_back)
    other = probe(rolled_back, key="another")
    assert other is not None
    assert other.probe_id is not None


def test_one_session_probes_until_its_time_is_over(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    first = won_probe_after_cooldown(rolled_back)
    for seconds in (0, 59):
        age(rolled_back, seconds)
        refused = probe(rolled_back)
        assert refused is not None
        assert refused.probe_id is None
    age(rolled_back, 1)
    assert won_probe(rolled_back) != first


def test_of_two_concurrent_requests_one_gets_the_probe(connect: Connect) -> None:
    first, second, observer = connect(), connect(), connect(autocommit=True)
    fail(observer)
    age(observer, COOLDOWN_SECONDS)
    won_probe(first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(probe, second)
        races.until_blocked(observer, second, waiting)
        first.commit()
        refused = waiting.result()
    assert refused is not None
    assert refused.probe_id is None


def test_a_successful_probe_closes_the_breaker(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    probe_id = won_probe_after_cooldown(rolled_back)
    assert close(rolled_back, probe_id)
    assert not close(rolled_back, probe_id)
    assert probe(rolled_back) is None
    assert fail(rolled_back, trips=False) is None


def test_a_failed_probe_doubles_the_pause_up_to_a_limit(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    pauses: list[float] = []
    for _ in range(3):
        age(rolled_back, 200)
        pauses.append(reopen(rolled_back, won_probe(rolled_back), max_cooldown_seconds=100) or 0.0)
        refused = probe(rolled_back)
        assert refused == BreakerRow(pauses[-1], pauses[-1], "again", False, None)
    assert pauses == [60, 100, 100]


def test_a_send_that_began_after_the_last_failure_closes_the_breaker(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    rolled_back.execute("UPDATE pgoutbox.breaker SET retry_at = retry_at - interval '10 s'")
    assert not close(rolled_back, None, send_seconds=11)
    assert close(rolled_back, None, send_seconds=9)


def test_a_failed_probe_is_over(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    failed = won_probe_after_cooldown(rolled_back)
    reopen(rolled_back, failed, max_cooldown_seconds=COOLDOWN_SECONDS)
    assert not close(rolled_back, failed)
    assert won_probe_after_cooldown(rolled_back) != failed  # Its time is not over.


def test_an_inconclusive_probe_allows_another_one(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    probe_id = won_probe_after_cooldown(rolled_back)
    assert release(rolled_back, probe_id)
    assert won_probe(rolled_back) != probe_id


def test_an_abandoned_probe_changes_nothing(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    lost = won_probe_after_cooldown(rolled_back)
    age(rolled_back, 60)
    current = won_probe(rolled_back)
    assert not close(rolled_back, lost)
    assert reopen(rolled_back, lost) is None
    assert not release(rolled_back, lost)
    assert not close(rolled_back, str(uuid.uuid4()))
    assert close(rolled_back, current)


# --- alerts -----------------------------------------------------------------------------------------------------------


def test_only_a_change_is_announced(rolled_back: psycopg.Connection) -> None:
    for _ in range(2):
        fail(rolled_back, alert_queue="ops")
    assert alerts(rolled_back) == [("opened", KEY, "ops")]
    probe_id = won_probe_after_cooldown(rolled_back)
    close(rolled_back, str(uuid.uuid4()), alert_queue="ops")
    for _ in range(2):
        close(rolled_back, probe_id, alert_queue="ops")
    assert alerts(rolled_back) == [("opened", KEY, "ops"), ("closed", KEY, "ops")]


def test_each_destination_gets_the_alert_and_none_supersedes_another(rolled_back: psycopg.Connection) -> None:
    both = ["mailto:ops@example.org", "https://hooks.example.org/a"]
    opened = fail(rolled_back, alert_queue="ops", alert_destinations=both)
    assert opened is not None
    assert opened.opened
    found = rolled_back.execute("SELECT destination, reason FROM pgoutbox.waiting_view ORDER BY id").fetchall()
    assert found == [(destination, "no worker") for destination in both]


def test_without_a_queue_nothing_is_announced(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back)
    close(rolled_back, won_probe_after_cooldown(rolled_back))
    assert alerts(rolled_back) == []


# --- closed by an operator --------------------------------------------------------------------------------------------

POSTPONED = """
    UPDATE pgoutbox.message AS m
    SET attempts = jsonb_build_array(
        (g.n, 1, 'snoozed', 'w', now(), now(), NULL, NULL, g.code, g.key)::pgoutbox.attempt
    )
    FROM (VALUES (%s::bigint, %s::integer, %s::text, %s::text)) AS g(id, n, code, key)
    WHERE m.id = g.id
"""


def postponed(db: psycopg.Connection, key: str | None = KEY, *, queue: str = "default") -> int:
    """Return a message that waits for an hour since its first attempt, which the breaker of this key postponed."""
    message_id = enqueue(db, queue=queue)
    db.execute(
        "UPDATE pgoutbox.message_live SET attempt_count = 1, lane = 1, available_at = now() + interval '1 hour'"
        " WHERE id = %s",
        [message_id],
    )
    db.execute(POSTPONED, (message_id, 1, None if key is None else "circuit_open", key))
    return message_id


def close_by_hand(db: psycopg.Connection, at_most: int = 10_000) -> tuple[bool, int]:
    ((was_open, message_count),) = db.execute("SELECT * FROM pgoutbox.close_breaker(%s, %s)", (KEY, at_most)).fetchall()
    return was_open, message_count


def due_within(db: psycopg.Connection, seconds: float) -> set[int]:
    rows = db.execute(
        "SELECT id FROM pgoutbox.message_live WHERE available_at <= now() + make_interval(secs => %s)", [seconds]
    )
    return {message_id for (message_id,) in rows}


def test_an_operator_closes_a_breaker_and_its_postponed_messages_are_due_in_a_second(
    rolled_back: psycopg.Connection,
) -> None:
    fail(rolled_back, trips=True)
    ours = {postponed(rolled_back), postponed(rolled_back, queue="bulk")}
    postponed(rolled_back, "smtp://other.example.org:25")
    postponed(rolled_back, None)
    rolled_back.execute(ADD_ATTEMPT, (postponed(rolled_back), 2))  # An earlier attempt was postponed, not the last one.
    assert close_by_hand(rolled_back) == (True, 2)
    assert due_within(rolled_back, 1) == ours
    assert due_within(rolled_back, 0.9) == set()
    assert rolled_back.execute("SELECT FROM pgoutbox.breaker").fetchall() == []
    assert close_by_hand(rolled_back) == (False, 0)


def test_closing_a_breaker_changes_messages_in_batches(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back, trips=True)
    for _ in range(3):
        postponed(rolled_back)
    assert [close_by_hand(rolled_back, 2) for _ in range(3)] == [(True, 2), (False, 1), (False, 0)]


def test_closing_a_breaker_does_not_wait_for_a_locked_message(dsn: str, connect: Connect) -> None:
    db, other = connect(autocommit=True), connect()
    locked, free = postponed(db), postponed(db)
    other.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [locked])
    assert close_by_hand(db) == (False, 1)
    assert due_within(db, 1) == {free}


def test_closing_a_breaker_wakes_a_sleeping_worker(dsn: str, connect: Connect) -> None:
    db = connect(autocommit=True)
    postponed(db)
    with sleeping_worker(connect) as rings:
        close_by_hand(db)
        assert rings() == ["all default"]
