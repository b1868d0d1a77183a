"""Tests the views for people: the same values as the tables, without secrets, and the reason why a message waits."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from psycopg.types.json import Jsonb

from pgoutbox import Sent, Snooze
from pgoutbox.message import State
from pgoutbox.operations import Operator
from pgoutbox.redaction import REDACTED
from tests.support.held import Held
from tests.support.messages import PUT_FINAL, put
from tests.support.outbox_actions import begin, enqueue, redrive, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Expected = tuple[str, int | None, int | None]

SNOOZED = """
    UPDATE pgoutbox.message AS m
    SET attempts = jsonb_build_array(
        (1, 1, 'snoozed', 'w', now(), now(), g.error, NULL, g.code, g.key)::pgoutbox.attempt
    )
    FROM (VALUES (%s::bigint, %s::text, %s::text, %s::text)) AS g(id, error, code, key)
    WHERE m.id = g.id
"""
WAITS_FOR_RETRY = (
    "UPDATE pgoutbox.message_live SET attempt_count = 1, lane = 1, available_at = now() + interval '1 h' WHERE id = %s"
)


REPORT = "INSERT INTO pgoutbox.worker (name, queues, topics, started_at) VALUES (%s, %s, %s, now())"
# A worker that served the queue and had the handler would claim these.
CLAIMABLE = {"due", "turn", "next run", "no worker", "no handler"}


def reason_of(connection: psycopg.Connection, message_id: int) -> tuple[object, ...] | None:
    return connection.execute(
        "SELECT reason, waits_for, round(extract(epoch FROM until - now())) FROM pgoutbox.waiting_view WHERE id = %s",
        [message_id],
    ).fetchone()


def a_queue_is_paused(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("INSERT INTO pgoutbox.queue (name, paused_at, resume_at) VALUES ('q', now(), now() + interval '60 s')")
    return enqueue(db, queue="q"), ("paused", None, 60)


def a_pause_is_over(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("INSERT INTO pgoutbox.queue (name, paused_at, resume_at) VALUES ('q', now(), now() - interval '60 s')")
    return enqueue(db, queue="q"), ("due", None, None)


def its_topic_is_paused(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("SELECT pgoutbox.pause_topic('greet', '90 s')")
    return enqueue(db), ("paused", None, 90)


def its_queue_and_its_topic_are_paused(db: psycopg.Connection) -> tuple[int, Expected]:
    """It waits for both ends."""
    db.execute("SELECT pgoutbox.pause_topic('greet', '90 s')")
    return a_queue_is_paused(db)[0], ("paused", None, 90)


def one_of_its_pauses_has_no_end(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("SELECT pgoutbox.pause_topic('greet')")
    return a_queue_is_paused(db)[0], ("paused", None, None)


def another_topic_is_paused(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("SELECT pgoutbox.pause_topic('other')")
    return enqueue(db), ("due", None, None)


def the_pause_of_its_topic_is_over(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("INSERT INTO pgoutbox.topic_pause (topic, resume_at) VALUES ('greet', now() - interval '1 s')")
    return enqueue(db), ("due", None, None)


def it_is_for_later(db: psycopg.Connection) -> tuple[int, Expected]:
    message_id = enqueue(db)
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '1 h' WHERE id = %s", [message_id])
    return message_id, ("scheduled", None, 3600)


def it_is_retried(db: psycopg.Connection) -> tuple[int, Expected]:
    message_id = enqueue(db)
    db.execute(WAITS_FOR_RETRY, [message_id])
    return message_id, ("retry", None, 3600)


def a_handler_snoozed_it(db: psycopg.Connection) -> tuple[int, Expected]:
    message_id = enqueue(db)
    db.execute(WAITS_FOR_RETRY, [message_id])
    db.execute(SNOOZED, (message_id, "circuit breaker smtp is open: no", None, None))
    return message_id, ("retry", None, 3600)


def a_breaker_held_it_back(db: psycopg.Connection) -> tuple[int, Expected]:
    message_id = enqueue(db)
    db.execute(WAITS_FOR_RETRY, [message_id])
    db.execute(SNOOZED, (message_id, "connection refused", "circuit_open", "smtp:mail.example.org:587"))
    return message_id, ("breaker", None, 3600)


def its_destination_is_stalled(db: psycopg.Connection) -> tuple[int, Expected]:
    message_id = enqueue(db)
    db.execute(WAITS_FOR_RETRY, [message_id])
    db.execute(SNOOZED, (message_id, "no answer", "stalled", "smtp:mail.example.org:587"))
    return message_id, ("breaker", None, 3600)


def its_transport_is_unavailable(db: psycopg.Connection) -> tuple[int, Expected]:
    message_id = enqueue(db)
    db.execute(WAITS_FOR_RETRY, [message_id])
    db.execute(SNOOZED, (message_id, "no password", "unavailable", None))
    return message_id, ("unavailable", None, 3600)


def its_payload_is_unreadable(db: psycopg.Connection) -> tuple[int, Expected]:
    message_id = enqueue(db)
    db.execute(WAITS_FOR_RETRY, [message_id])
    db.execute(SNOOZED, (message_id, "does not fit", "unreadable", None))
    return message_id, ("unreadable", None, 3600)


def a_redirect_held_it_back(db: psycopg.Connection) -> tuple[int, Expected]:
    message_id = enqueue(db)
    db.execute(WAITS_FOR_RETRY, [message_id])
    db.execute(SNOOZED, (message_id, "refuses to redirect", "redirect", None))
    return message_id, ("redirect", None, 3600)


def a_newer_one_exists(db: psycopg.Connection) -> tuple[int, Expected]:
    message_id = enqueue(db, coalesce_key="k")
    return message_id, ("superseded", enqueue(db, coalesce_key="k"), None)


def its_key_is_halted(db: psycopg.Connection) -> tuple[int, Expected]:
    failed = enqueue(db, ordering_key="o", halts_key=True)
    db.execute(
        "UPDATE pgoutbox.message SET state = 'failed', attempt_count = 1, finished_at = now() WHERE id = %s", [failed]
    )
    return enqueue(db, ordering_key="o"), ("halted", failed, None)


def it_is_not_its_turn(db: psycopg.Connection) -> tuple[int, Expected]:
    first = enqueue(db, ordering_key="o")
    return enqueue(db, ordering_key="o"), ("in order", first, None)


def an_older_one_is_being_sent(db: psycopg.Connection) -> tuple[int, Expected]:
    older = enqueue(db, coalesce_key="k")
    begin(db, older)
    return enqueue(db, coalesce_key="k"), ("in flight", older, None)


def a_later_one_of_its_ordering_key_is_being_sent(db: psycopg.Connection) -> tuple[int, Expected]:
    """The first one had failed, and was redriven."""
    first, later = enqueue(db, ordering_key="o"), enqueue(db, ordering_key="o")
    db.execute(PUT_FINAL, {"id": first, "state": "failed", "age": timedelta()})
    begin(db, later)
    redrive(db, first)
    return first, ("in flight", later, None)


def the_rate_is_used_up(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute(
        "INSERT INTO pgoutbox.queue (name, rate_count, rate_seconds, burst, tokens, tokens_at)"
        " VALUES ('q', 3, 300, 1, 0.5, clock_timestamp() + interval '1 s')"
    )
    return enqueue(db, queue="q"), ("rate", None, 50)


def the_queue_is_full(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("INSERT INTO pgoutbox.queue (name, max_in_flight) VALUES ('q', 1)")
    put(db, State.SENDING, queue="q")
    return enqueue(db, queue="q"), ("max_in_flight", None, None)


def nothing_is_in_its_way(db: psycopg.Connection) -> tuple[int, Expected]:
    return enqueue(db), ("due", None, None)


def nobody_serves_its_queue(db: psycopg.Connection) -> tuple[int, Expected]:
    return enqueue(db, queue="unserved"), ("no worker", None, None)


def its_worker_is_long_gone(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("UPDATE pgoutbox.worker SET seen_at = now() - interval '1 h'")
    return enqueue(db), ("no worker", None, None)


def a_run_of_today_has_served_it(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("UPDATE pgoutbox.worker SET seen_at = now() - interval '24 h', ended_at = now() - interval '24 h'")
    return enqueue(db), ("next run", None, None)


def the_last_run_was_days_ago(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("UPDATE pgoutbox.worker SET seen_at = now() - interval '2 d', ended_at = now() - interval '2 d'")
    return enqueue(db), ("no worker", None, None)


def only_a_run_of_another_queue_has_ended(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("UPDATE pgoutbox.worker SET queues = '{other}', ended_at = now()")
    return enqueue(db), ("no worker", None, None)


def the_last_run_could_not_read_its_payload(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("UPDATE pgoutbox.worker SET ended_at = now()")
    message_id = enqueue(db)
    db.execute("UPDATE pgoutbox.message_live SET attempt_count = 1, lane = 1 WHERE id = %s", [message_id])
    db.execute(SNOOZED, (message_id, "does not fit", "unreadable", None))
    return message_id, ("unreadable", None, None)


def a_run_beside_the_worker_knows_its_topic(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("UPDATE pgoutbox.worker SET topics = '{other}'")
    db.execute(REPORT, ("run", ["default"], ["greet"]))
    db.execute("UPDATE pgoutbox.worker SET ended_at = now() WHERE name = 'run'")
    return enqueue(db), ("next run", None, None)


def no_worker_of_its_queue_knows_its_topic(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("UPDATE pgoutbox.worker SET topics = '{other}'")
    db.execute(REPORT, ("elsewhere", ["elsewhere"], ["greet"]))
    return enqueue(db), ("no handler", None, None)


def its_fair_key_is_paused(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("SELECT pgoutbox.set_fair_share('default', 'k', max_in_flight => 0)")
    return enqueue(db, fair_key="k"), ("share", None, None)


def only_another_fair_key_is_paused(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("SELECT pgoutbox.set_fair_share('default', max_in_flight => 0)")
    db.execute("SELECT pgoutbox.set_fair_share('default', 'k', max_in_flight => 3)")
    return enqueue(db, fair_key="k"), ("turn", None, None)


def its_fair_key_is_at_its_limit(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("SELECT pgoutbox.set_fair_share('default', max_in_flight => 2)")
    for key in ("k", "k", "other"):
        begin(db, enqueue(db, fair_key=key))
    return enqueue(db, fair_key="k"), ("share", None, None)


def its_fair_key_is_below_its_limit(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("SELECT pgoutbox.set_fair_share('default', max_in_flight => 2)")
    for key in ("k", "other", "other"):
        begin(db, enqueue(db, fair_key=key))
    return enqueue(db, fair_key="k"), ("turn", None, None)


def the_rate_of_its_fair_key_is_used_up(db: psycopg.Connection) -> tuple[int, Expected]:
    """The weight permits two at once, and then one in 50 seconds."""
    db.execute(
        "INSERT INTO pgoutbox.fair_share (queue, rate_count, rate_seconds, weight) VALUES ('default', 6, 300, 2)"
    )
    db.execute(
        "INSERT INTO pgoutbox.fair_share (queue, fair_key, spent_at) VALUES ('default', 'k', now() + interval '90 s')"
    )
    return enqueue(db, fair_key="k"), ("share", None, 40)


def the_rate_of_its_fair_key_permits_it(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute(
        "INSERT INTO pgoutbox.fair_share (queue, rate_count, rate_seconds, weight) VALUES ('default', 6, 300, 2)"
    )
    db.execute(
        "INSERT INTO pgoutbox.fair_share (queue, fair_key, spent_at) VALUES ('default', 'k', now() + interval '49 s')"
    )
    return enqueue(db, fair_key="k"), ("turn", None, None)


def it_waits_for_its_turn(db: psycopg.Connection) -> tuple[int, Expected]:
    return enqueue(db, fair_key="k"), ("turn", None, None)


def it_has_its_turn(db: psycopg.Connection) -> tuple[int, Expected]:
    message_id = enqueue(db, fair_key="k")
    db.execute("SELECT pgoutbox._give_turns('default', '{greet}', 5)")
    db.execute("SELECT pgoutbox.set_fair_share('default', 'k', max_in_flight => 0)")
    return message_id, ("due", None, None)


def a_message_with_a_fair_key_is_for_later(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("SELECT pgoutbox.set_fair_share('default', 'k', max_in_flight => 0)")
    message_id = enqueue(db, fair_key="k")
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '1 h' WHERE id = %s", [message_id])
    return message_id, ("scheduled", None, 3600)


def nobody_serves_the_queue_of_its_paused_fair_key(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("SELECT pgoutbox.set_fair_share('unserved', max_in_flight => 0)")
    return enqueue(db, queue="unserved", fair_key="k"), ("share", None, None)


def nobody_serves_the_queue_of_its_full_fair_key(db: psycopg.Connection) -> tuple[int, Expected]:
    db.execute("SELECT pgoutbox.set_fair_share('unserved', max_in_flight => 1)")
    begin(db, enqueue(db, queue="unserved", fair_key="k"), lease_seconds=-1)
    return enqueue(db, queue="unserved", fair_key="k"), ("no worker", None, None)


def a_run_of_today_served_its_fair_key(db: psycopg.Connection) -> tuple[int, Expected]:
    a_run_of_today_has_served_it(db)
    return enqueue(db, fair_key="k"), ("next run", None, None)


SITUATIONS = (
    a_queue_is_paused, a_pause_is_over, its_topic_is_paused, its_queue_and_its_topic_are_paused,
    one_of_its_pauses_has_no_end, another_topic_is_paused, the_pause_of_its_topic_is_over, it_is_for_later,
    it_is_retried, a_handler_snoozed_it, a_breaker_held_it_back,
    its_destination_is_stalled, its_transport_is_unavailable, its_payload_is_unreadable, a_redirect_held_it_back,
    a_newer_one_exists, its_key_is_halted, it_is_not_its_turn, an_older_one_is_being_sent,
    a_later_one_of_its_ordering_key_is_being_sent, the_rate_is_used_up,
    the_queue_is_full, nothing_is_in_its_way, nobody_serves_its_queue, its_worker_is_long_gone,
    a_run_of_today_has_served_it, only_a_run_of_another_queue_has_ended, the_last_run_was_days_ago,
    the_last_run_could_not_read_its_payload,
    a_run_beside_the_worker_knows_its_topic,
    no_worker_of_its_queue_knows_its_topic,
    its_fair_key_is_paused, only_another_fair_key_is_paused, its_fair_key_is_at_its_limit,
    its_fair_key_is_below_its_limit, the_rate_of_its_fair_key_is_used_up, the_rate_of_its_fair_key_permits_it,
    it_waits_for_its_turn, it_has_its_turn, a_message_with_a_fair_key_is_for_later,
    nobody_serves_the_queue_of_its_paused_fair_key, nobody_serves_the_queue_of_its_full_fair_key,
    a_run_of_today_served_its_fair_key,
)  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
async def test_the_view_gives_the_reason_and_a_run_takes_due_messages(
    dsn: str, db: psycopg.Connection, situation: Callable[[psycopg.Connection], tuple[int, Expected]]
) -> None:
    with db.transaction():
        db.execute(REPORT, ("w", ["default", "q"], ["greet"]))
        message_id, expected = situation(db)
        assert reason_of(db, message_id) == expected
    (queue,) = db.execute("SELECT queue FROM pgoutbox.message WHERE id = %s", [message_id]).fetchone() or ("",)
    held = Held(dsn, queues=[queue])
    for row in rows_of(db):
        held.end(row.id, Sent() if row.id == message_id else Snooze(3600))
    await held.run_once()
    assert (message_id in {taken for taken, _ in held.begun}) == (
        expected[0] in CLAIMABLE or situation is the_last_run_could_not_read_its_payload
    )


def test_a_message_that_waits_for_its_share_names_its_fair_key_and_the_cap(rolled_back: psycopg.Connection) -> None:
    rolled_back.execute(REPORT, ("w", ["default"], ["greet"]))
    rolled_back.execute("SELECT pgoutbox.set_fair_share('default', 'none', max_in_flight => 0)")
    rolled_back.execute("SELECT pgoutbox.set_fair_share('default', 'few', max_in_flight => 1)")
    begin(rolled_back, enqueue(rolled_back, fair_key="few"))
    rolled_back.execute(
        "INSERT INTO pgoutbox.fair_share (queue, fair_key, rate_count, rate_seconds, spent_at)"
        " VALUES ('default', 'slow', 100, 60, now() + interval '1 h')"
    )
    for key in ("free", "none", "few", "slow"):
        enqueue(rolled_back, fair_key=key)
    found = rolled_back.execute("SELECT fair_key, reason, cap FROM pgoutbox.waiting_view ORDER BY id").fetchall()
    assert found == [
        ("free", "turn", None),
        ("none", "share", "paused"),
        ("few", "share", "1 in flight"),
        ("slow", "share", "100 in 60 s"),
    ]
    words = {one.fair_key: one.why_it_waits for one in Operator(rolled_back).list_messages() if one.waits}
    assert words["free"] == "it waits for the turn of its fair key"
    assert words["none"] == "its fair key none is paused"
    assert words["few"] == "its fair key few is at its limit of 1 in flight"
    assert words["slow"] == "its fair key slow is at its limit of 100 in 60 s"


def test_messages_that_do_not_wait_are_not_shown(rolled_back: psycopg.Connection) -> None:
    for state in set(State) - {State.PENDING}:
        put(rolled_back, state)
    assert rolled_back.execute("SELECT count(*) FROM pgoutbox.waiting_view").fetchone() == (0,)


def test_the_view_has_every_column_of_a_message(rolled_back: psycopg.Connection) -> None:
    columns = """
        SELECT array_agg(attname ORDER BY attname) FROM pg_attribute
        WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped
    """
    (shown,) = rolled_back.execute(columns, ["pgoutbox.message_view"]).fetchone() or ([],)
    (stored,) = rolled_back.execute(columns, ["pgoutbox.message"]).fetchone() or ([],)
    # The key in flight is one of the keys again, the attempts have their own view, and two times have their own tables.
    own = {"first_attempt_at", "lease_expires_at", "cancel_requested_at", "cause"}
    own |= {"error_place", "reason_code", "breaker_key"}  # Of the last attempt.
    assert set(shown) == {*stored, *own} - {"key_in_flight", "attempts"}


def test_values_without_secrets_are_shown_unchanged(rolled_back: psycopg.Connection) -> None:
    put(rolled_back, State.FAILED, destination="mailto:ada@example.org", coalesce_key="k", age=timedelta(hours=1))
    columns = "id, topic, queue, destination, state, attempt_count, finished_at, worker, coalesce_key, last_error"
    seen, stored = (
        rolled_back.execute(f"SELECT {columns} FROM pgoutbox.{name}".encode()).fetchall()
        for name in ("message_view", "message")
    )
    assert seen == stored


# --- redaction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"to": "ada", "n": 1, "list": [1, {"b": None}], "none": {}, "empty": []},
         {"to": REDACTED, "n": REDACTED, "list": [REDACTED, {"b": REDACTED}], "none": {}, "empty": []}),
        ("text", REDACTED),
        (None, REDACTED),
        ({"ada@example.org": 1, "x" * 41: 2}, {REDACTED: REDACTED}),
    ],
)  # fmt: skip
def test_the_names_in_json_are_shown(rolled_back: psycopg.Connection, value: object, shown: object) -> None:
    assert rolled_back.execute("SELECT pgoutbox._redacted_json(%s)", [Jsonb(value)]).fetchone() == (shown,)


def test_every_possible_message_can_be_shown(rolled_back: psycopg.Connection) -> None:
    rolled_back.execute("SELECT pgoutbox.enqueue('deep', (repeat('[', 5000) || repeat(']', 5000))::jsonb)")
    rolled_back.execute("SELECT payload FROM pgoutbox.message_view")
