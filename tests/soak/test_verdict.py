"""The checker of the long run sees what it is there to see: a good run balances, and each kind of damage is counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest

from pgoutbox import operations
from pgoutbox.operations import Rate
from tests import races
from tests.faults.judge import install_judge
from tests.faults.ledger import KEY, Ledger, install_audit
from tests.outbox_actions import claim, enqueue, finish_sent, state_of
from tests.soak.verdict import balance
from tests.soak.witness import beyond_limits, flights, install_witness

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Connect

# Two messages of one key, of which the second superseded the first, one with an effect, and one that failed.
GOOD_RUN: LiteralString = """
INSERT INTO pgoutbox.message (
    id, topic, state, coalesce_key, dedupe_key, attempt_count, worker, claimed_at, finished_at, superseded_by,
    skip_reason, payload
)
SELECT
    r.id, r.topic, r.state, r.coalesce_key, r.dedupe_key, r.attempt_count, 'w', now(),
    now() + interval '1 minute', r.superseded_by,
    CASE WHEN r.state = 'skipped' THEN 'superseded' END,
    jsonb_build_object('ledger_key', 'k' || r.id, 'plan', jsonb_build_array(r.plan))
FROM (
    VALUES
        (1, 'soak.async', 'skipped', 'key', NULL, 0, 2, 'ok'),
        (2, 'soak.async', 'sent', 'key', NULL, 2, NULL, 'ok'),
        (3, 'soak.effect', 'sent', NULL, 'once', 1, NULL, 'ok'),
        (4, 'soak.sync', 'failed', NULL, NULL, 1, NULL, 'permanent')
) AS r(id, topic, state, coalesce_key, dedupe_key, attempt_count, superseded_by, plan);
INSERT INTO pgoutbox.attempt (message_id, attempt_count, outcome, worker, started_at, ended_at)
VALUES (2, 1, 'lost', 'w', now(), now()), (4, 1, 'failed', 'w', now(), now());
INSERT INTO soak_effect (message_id, attempt_count) VALUES (3, 1)
"""

HEADS: LiteralString = """
INSERT INTO pgoutbox.coalesce (topic, coalesce_key, newest_id) VALUES ('soak.async', 'key', 2);
INSERT INTO pgoutbox.dedupe (topic, dedupe_key, message_id, payload_digest) VALUES ('soak.effect', 'once', 3, '')
"""

# Two messages of an ordering key, one for a destination that was down for a while, and one of a fan-out.
MORE_MESSAGES: LiteralString = """
INSERT INTO pgoutbox.content (body) VALUES ('{}');
INSERT INTO pgoutbox.message (
    id, topic, queue, ordering_key, state, attempt_count, worker, claimed_at, finished_at, content_id, destination,
    payload
)
SELECT
    r.id, r.topic, r.queue, r.ordering_key, r.state, r.attempt_count, 'w', now(), now() + interval '1 minute',
    CASE WHEN r.topic = 'soak.fanout' THEN (SELECT max(c.id) FROM pgoutbox.content AS c) END,
    r.destination,
    jsonb_build_object('ledger_key', 'k' || r.id, 'plan', jsonb_build_array('ok'))
FROM (
    VALUES
        (11, 'soak.ordered', 'ordered', 'go-1', 'sent', 1, NULL),
        (12, 'soak.ordered', 'ordered', 'go-1', 'sent', 1, NULL),
        (13, 'soak.line', 'default', NULL, 'sent', 2, 'line://host'),
        (14, 'soak.fanout', 'default', NULL, 'cancelled', 0, 'mailto:a@example.org')
) AS r(id, topic, queue, ordering_key, state, attempt_count, destination);
INSERT INTO pgoutbox.attempt (message_id, attempt_count, outcome, worker, started_at, ended_at)
VALUES (13, 1, 'snoozed', 'w', now() - interval '5 s', now() - interval '4 s');
INSERT INTO pgoutbox.retention (topic, state, keep) VALUES ('soak.forgotten', 'sent', interval '0')
"""

# What the witness saw of them, of one that was deleted as it was sent, and of two queues with limits.
ACCOUNT: LiteralString = """
INSERT INTO soak_flight (
    xid, at, message_id, ledger_key, topic, queue, ordering_key, halts, what, attempt_count, in_flight, max_in_flight,
    is_paused
)
SELECT
    r.xid::text::xid8, extract(epoch FROM now()) + 60, r.message_id, 'k' || r.message_id, r.topic, r.queue,
    r.ordering_key, false, r.what, 1, r.in_flight, 2, false
FROM (
    VALUES
        (1, 11, 'soak.ordered', 'ordered', 'go-1', 'pending', NULL),
        (2, 12, 'soak.ordered', 'ordered', 'go-1', 'pending', NULL),
        (3, 11, 'soak.ordered', 'ordered', 'go-1', 'sending', NULL),
        (4, 11, 'soak.ordered', 'ordered', 'go-1', 'gone', NULL),
        (4, 11, 'soak.ordered', 'ordered', 'go-1', 'sent', NULL),
        (5, 12, 'soak.ordered', 'ordered', 'go-1', 'sending', NULL),
        (6, 12, 'soak.ordered', 'ordered', 'go-1', 'sent', NULL),
        (7, 20, 'soak.forgotten', 'default', NULL, 'sending', NULL),
        (8, 20, 'soak.forgotten', 'default', NULL, 'gone', NULL),
        (12, 31, 'soak.async', 'rated', NULL, 'sending', NULL),
        (12, 32, 'soak.async', 'rated', NULL, 'sending', NULL),
        (13, 33, 'soak.async', 'rated', NULL, 'sending', NULL),
        (14, 41, 'soak.async', 'crowded', NULL, 'sending', 2)
) AS r(xid, message_id, topic, queue, ordering_key, what, in_flight);
INSERT INTO soak_bucket (xid, queue, rate, burst, at)
VALUES ('11', 'rated', 1, 2, 100), ('12', 'rated', 1, 2, 100), ('13', 'rated', 1, 2, 101);
INSERT INTO soak_breaker (key, what, at, until)
VALUES
    ('line:host', 'opened', now() - interval '10 s', now() - interval '9 s'),
    ('line:host', 'changed', now() - interval '8 s', now()),
    ('line:host', 'closed', now() - interval '1 s', NULL);
INSERT INTO ledger_audit (message_id, ledger_key, state) VALUES (20, 'k20', 'pending')
"""

DAMAGE: list[tuple[str, LiteralString]] = [
    ("lost", "DELETE FROM pgoutbox.message WHERE id = 4; DELETE FROM ledger_audit WHERE message_id = 4"),
    ("two messages of one dedupe key", "UPDATE pgoutbox.message SET dedupe_key = 'once', topic = 'soak.effect'"),
    ("superseded by nothing newer that exists", "UPDATE pgoutbox.message SET superseded_by = 3 WHERE id = 1"),
    ("the newest of a key was superseded", "DELETE FROM pgoutbox.message WHERE id = 2"),
    ("skipped without a reason to be", "UPDATE pgoutbox.message SET superseded_by = NULL WHERE id = 1"),
    (
        "failed though its plan was to succeed",
        """UPDATE pgoutbox.message SET payload = jsonb_set(payload, '{plan}', '["ok"]') WHERE id = 4""",
    ),
    (
        "sent though its plan was to fail",
        """UPDATE pgoutbox.message SET payload = jsonb_set(payload, '{plan}', '["permanent"]') WHERE id = 2""",
    ),
    ("sent without its one effect in the database", "DELETE FROM soak_effect"),
    ("sent without its one effect in the database", "INSERT INTO soak_effect SELECT * FROM soak_effect"),
    ("sent without its one effect in the database", "UPDATE soak_effect SET attempt_count = 2"),
    ("an effect in the database without being sent", "INSERT INTO soak_effect VALUES (4, 1)"),
    (
        "an attempt that was not made is in the history",
        "UPDATE pgoutbox.attempt SET attempt_count = 3 WHERE message_id = 2",
    ),
    ("an attempt is missing from the history", "DELETE FROM pgoutbox.attempt WHERE message_id = 2"),
    (
        "handed over by an attempt that neither sent nor was lost",
        "UPDATE pgoutbox.attempt SET outcome = 'retry' WHERE message_id = 2",
    ),
    (
        "sent, and not handed over before by that very attempt",
        "UPDATE pgoutbox.message SET attempt_count = 3 WHERE id = 2",
    ),
    (
        "sent, and not handed over before by that very attempt",
        "UPDATE pgoutbox.message SET finished_at = finished_at - interval '1 hour' WHERE id = 2",
    ),
    (
        "a forbidden change of a row, or rule of the tables",
        "UPDATE pgoutbox.message SET state = 'pending', finished_at = NULL WHERE id = 2",
    ),
    ("a forbidden change of a row, or rule of the tables", "DELETE FROM pgoutbox.dedupe"),
    ("a content that no message names", "DELETE FROM pgoutbox.message WHERE id = 14"),
    ("a message whose content is gone", "DELETE FROM pgoutbox.content"),
    (
        "sent, and kept though a rule keeps nothing of it",
        "UPDATE soak_flight SET what = 'sent' WHERE message_id = 20 AND what = 'gone'",
    ),
    (
        "deleted, and not handed over before by that very attempt",
        "UPDATE soak_flight SET attempt_count = 2 WHERE message_id = 20",
    ),
    (
        "deleted, and not handed over before by that very attempt",
        "UPDATE soak_flight SET at = at - 3600 WHERE message_id = 20",
    ),
    (
        "begun while another message of its ordering key was in flight",
        "UPDATE soak_flight SET seq = seq + 1000 WHERE message_id = 11 AND what IN ('gone', 'sent')",
    ),
    (
        "begun before an earlier message of its ordering key was done with",
        "UPDATE soak_flight SET what = 'pending' WHERE message_id = 11",
    ),
    (
        "begun before an earlier message of its ordering key was done with",
        "UPDATE soak_flight SET what = 'failed', halts = true WHERE message_id = 11 AND what = 'sent'",
    ),
    ("begun beyond the rate of its queue", "UPDATE soak_bucket SET at = 100.9 WHERE xid = '13'"),
    ("begun beyond the rate of its queue", "UPDATE soak_bucket SET burst = 1"),
    ("begun beyond the rate of its queue", "DELETE FROM soak_bucket WHERE xid = '13'"),
    ("begun beyond the number in flight of its queue", "UPDATE soak_flight SET in_flight = 3 WHERE message_id = 41"),
    ("begun in a queue that was paused", "UPDATE soak_flight SET is_paused = true WHERE message_id = 33"),
    ("begun in a queue that was paused", "INSERT INTO soak_trespass VALUES (4)"),
    (
        "an attempt used up while its breaker was open",
        "UPDATE pgoutbox.attempt SET outcome = 'retry', error = 'ConnectionRefusedError: no' WHERE message_id = 13",
    ),
    (
        "undrained",
        "UPDATE pgoutbox.message SET state = 'pending', finished_at = NULL WHERE id = 4",
    ),
]


@pytest.fixture
def run(connect: Connect, tmp_path: Path) -> tuple[Path, psycopg.Connection]:
    connection = connect()
    install_audit(connection)
    install_judge(connection)
    connection.execute("CREATE TABLE soak_effect (message_id bigint NOT NULL, attempt_count integer NOT NULL)")
    connection.execute(GOOD_RUN)
    connection.execute(HEADS)
    connection.execute(MORE_MESSAGES)
    connection.execute("ALTER SEQUENCE pgoutbox.message_id_seq RESTART WITH 50")
    install_witness(connection)
    connection.execute(ACCOUNT)
    path = tmp_path / "ledger"
    with Ledger(path, fsync=False) as ledger:
        for key in (*(f"k{number}" for number in (1, 2, 3, 4, 11, 12, 13, 20)), "k14/mailto:a@example.org"):
            ledger.write("intended", key)
            ledger.write("acknowledged", key)
        for number, attempt_count in ((2, 1), (2, 2), (3, 1), (11, 1), (12, 1), (13, 2), (20, 1)):
            ledger.hand_over({KEY: f"k{number}"}, attempt_count)
    return path, connection


def broken(path: Path, connection: psycopg.Connection) -> set[str]:
    return {line.invariant for line in balance(path, connection).lines if line.broken}


def test_a_good_run_balances(run: tuple[Path, psycopg.Connection]) -> None:
    path, connection = run
    assert broken(path, connection) == set()


def test_a_thread_may_hand_over_when_its_attempt_was_released_and_its_message_has_ended(
    run: tuple[Path, psycopg.Connection],
) -> None:
    path, connection = run
    connection.execute(
        """
        INSERT INTO pgoutbox.message (id, topic, state, attempt_count, finished_at, payload)
        VALUES (5, 'soak.sync', 'cancelled', 1, now(), '{"ledger_key": "k5", "plan": ["ok"]}');
        INSERT INTO pgoutbox.attempt (message_id, attempt_count, outcome, worker, started_at, ended_at)
        VALUES (5, 1, 'cancelled', 'w', now(), now())
        """
    )
    with Ledger(path, fsync=False) as ledger:
        ledger.write("acknowledged", "k5")
        ledger.hand_over({KEY: "k5"}, 1)
    assert broken(path, connection) == set()


@pytest.mark.parametrize(("invariant", "damage"), DAMAGE)
def test_damage_is_seen(run: tuple[Path, psycopg.Connection], invariant: str, damage: LiteralString) -> None:
    path, connection = run
    connection.execute(damage)
    assert invariant in broken(path, connection)


def test_an_older_message_after_a_newer_one_is_seen(run: tuple[Path, psycopg.Connection]) -> None:
    path, connection = run
    connection.execute(
        "UPDATE pgoutbox.message SET state = 'sent', superseded_by = NULL, skip_reason = NULL, "
        "attempt_count = 1 WHERE id = 1"
    )
    with Ledger(path, fsync=False) as ledger:
        ledger.hand_over({KEY: "k1"}, 1)
    assert "an older message handed over after a newer one" in broken(path, connection)


def test_an_ordered_message_after_a_later_one_of_its_key_is_seen(run: tuple[Path, psycopg.Connection]) -> None:
    path, connection = run
    with Ledger(path, fsync=False) as ledger:
        ledger.hand_over({KEY: "k11"}, 1)
    assert "an ordered message handed over after a later one of its key" in broken(path, connection)


def test_an_ordered_message_that_was_redriven_may_come_after_those_that_passed_it(
    run: tuple[Path, psycopg.Connection],
) -> None:
    path, connection = run
    connection.execute(
        """
        UPDATE soak_flight SET what = 'failed' WHERE message_id = 11 AND what = 'sent';
        INSERT INTO soak_flight (message_id, ledger_key, topic, queue, ordering_key, halts, what, attempt_count)
        SELECT 11, 'k11', 'soak.ordered', 'ordered', 'go-1', false, w.what, 2
        FROM (VALUES ('pending'), ('sending'), ('sent')) AS w(what);
        UPDATE pgoutbox.message SET attempt_count = 2 WHERE id = 11;
        INSERT INTO pgoutbox.attempt (message_id, attempt_count, outcome, worker, started_at, ended_at)
        VALUES (11, 1, 'lost', 'w', now(), now());
        DELETE FROM ledger_audit WHERE message_id = 11;
        DELETE FROM violation WHERE message_id = 11
        """
    )
    with Ledger(path, fsync=False) as ledger:
        ledger.hand_over({KEY: "k11"}, 2)
    assert broken(path, connection) == set()


def test_an_attempt_that_met_an_open_breaker_may_be_used_up_by_a_worker_that_could_not_ask(
    run: tuple[Path, psycopg.Connection],
) -> None:
    path, connection = run
    connection.execute("UPDATE pgoutbox.attempt SET outcome = 'retry', error = 'TimeoutError: ' WHERE message_id = 13")
    log = path.parent / "worker-plain.log"
    for seconds, expected in ((60.0, {"an attempt used up while its breaker was open"}), (4.5, set())):
        told_at = datetime.now(UTC) - timedelta(seconds=seconds)
        log.write_text(f'{{"event": "breaker_unknown", "time": "{told_at.isoformat()}"}}\n')
        assert broken(path, connection) == expected


@pytest.mark.parametrize(
    "excuse",
    [
        "UPDATE soak_breaker SET until = now() - interval '6.5 s' WHERE what = 'changed'",
        "UPDATE soak_breaker SET at = now() - interval '4.5 s' WHERE what = 'closed'",
        "UPDATE soak_breaker SET at = now() - interval '5.5 s' WHERE what <> 'closed'",
    ],
)
def test_an_attempt_may_be_used_up_when_the_breaker_was_not_open_all_the_time(
    run: tuple[Path, psycopg.Connection], excuse: LiteralString
) -> None:
    path, connection = run
    connection.execute("UPDATE pgoutbox.attempt SET outcome = 'retry', error = 'TimeoutError: ' WHERE message_id = 13")
    connection.execute(excuse)
    assert broken(path, connection) == set()


def test_the_witness_sees_what_the_workers_do(run: tuple[Path, psycopg.Connection]) -> None:
    _, connection = run
    connection.execute("TRUNCATE soak_flight, soak_bucket, soak_breaker, pgoutbox.retention")
    operations.limit_rate(connection, "rated", Rate(1, 1), burst=1)
    connection.commit()  # With it ends what is local to an operator's transaction.
    message_id = enqueue(connection, payload={KEY: "k50", "plan": ["ok"]}, queue="rated")
    claim(connection, queue="rated")
    finish_sent(connection, (message_id, 1))
    assert [(line.message_id, line.what) for line in flights(connection)] == [
        (message_id, "pending"),
        (message_id, "sending"),
        (message_id, "sent"),
    ]
    assert not any(beyond_limits(flights(connection), connection).values())


def begin(connection: psycopg.Connection, message_id: int) -> None:
    """An attempt, whether or not the queue is paused."""
    connection.execute(
        """
        UPDATE pgoutbox.message
        SET state = 'sending', attempt_count = 1, worker = 'w', claimed_at = now(), lease_expires_at = now()
        WHERE id = %s
        """,
        [message_id],
    )


def trespasses(connection: psycopg.Connection) -> list[int]:
    return beyond_limits(flights(connection), connection)["begun in a queue that was paused"]


@pytest.mark.parametrize(
    ("pause", "is_trespass"),
    [
        ("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('default', now())", True),
        ("INSERT INTO pgoutbox.queue (name, paused_at, resume_at) VALUES ('default', now(), now())", False),
        ("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('bulk', now())", False),
    ],
    ids=["paused", "the pause is over", "another queue"],
)
def test_the_witness_sees_who_begins_in_a_paused_queue(
    run: tuple[Path, psycopg.Connection], pause: LiteralString, is_trespass: bool
) -> None:
    _, connection = run
    message_id = enqueue(connection, payload={KEY: "k50", "plan": ["ok"]})
    connection.execute(pause)
    begin(connection, message_id)
    assert trespasses(connection) == ([message_id] if is_trespass else [])


def test_who_began_before_the_pause_may_go_on(run: tuple[Path, psycopg.Connection], connect: Connect) -> None:
    """The claim has its snapshot and waits for a row when the operator pauses the queue."""
    _, connection = run
    message_id = enqueue(connection, payload={KEY: "k50", "plan": ["ok"]})
    connection.commit()
    operator, worker = connect(), connect(autocommit=True)
    operator.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [message_id])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(begin, worker, message_id)
        races.until_blocked(connection, worker, waiting)
        operator.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('default', now())")
        operator.commit()
        waiting.result()
    assert state_of(connection, message_id) == "sending"
    assert trespasses(connection) == []


def test_what_was_rolled_back_and_delivered_is_seen(run: tuple[Path, psycopg.Connection]) -> None:
    path, connection = run
    with Ledger(path, fsync=False) as ledger:
        ledger.hand_over({KEY: "k9"}, 1)
    assert "rolled back delivered" in broken(path, connection)
