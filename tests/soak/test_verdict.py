"""Tests that the checker of the long run accepts a good run and counts each kind of damage."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, LiteralString, cast

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from pgoutbox.operations import Operator, Rate
from tests.soak.liveness import install_liveness
from tests.soak.runs import Lost, Struck, install_refusals
from tests.soak.verdict import balance
from tests.soak.witness import beyond_limits, flights, install_witness
from tests.support import races
from tests.support.judge import install_judge, violations
from tests.support.ledger import KEY, Ledger, install_audit
from tests.support.messages import PUT_SENDING
from tests.support.outbox_actions import enqueue, state_of
from tests.support.worker_sql import claim, finish_sent

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Connect

# Two messages of one key, of which the second superseded the first, one with an effect, and one that failed.
GOOD_RUN: LiteralString = """
INSERT INTO pgoutbox.message (
    id, topic, state, coalesce_key, dedupe_key, attempt_count, worker, claimed_at, finished_at, superseded_by,
    skip_reason, payload, attempts
)
SELECT
    r.id, r.topic, r.state, r.coalesce_key, r.dedupe_key, r.attempt_count, 'w', now(),
    now() + interval '1 minute', r.superseded_by,
    CASE WHEN r.state = 'skipped' THEN 'superseded' END,
    jsonb_build_object('ledger_key', 'k' || r.id, 'plan', jsonb_build_array(r.plan)),
    CASE WHEN r.ended IS NOT NULL THEN jsonb_build_array(
        (1, 1, r.ended, 'w', now(), now(), NULL, NULL, NULL, NULL)::pgoutbox.attempt
    ) END
FROM (
    VALUES
        (1, 'soak.async', 'skipped', 'key', NULL, 0, 2, 'ok', NULL),
        (2, 'soak.async', 'sent', 'key', NULL, 2, NULL, 'ok', 'lost'),
        (3, 'soak.effect', 'sent', NULL, 'once', 1, NULL, 'ok', NULL),
        (4, 'soak.sync', 'failed', NULL, NULL, 1, NULL, 'permanent', 'failed')
) AS r(id, topic, state, coalesce_key, dedupe_key, attempt_count, superseded_by, plan, ended);
INSERT INTO soak_effect (message_id, attempt_count) VALUES (3, 1)
"""

HEADS: LiteralString = """
INSERT INTO pgoutbox.key_head (scope, key, newest_id) VALUES ('soak.async', 'key', 2);
INSERT INTO pgoutbox.dedupe (topic, dedupe_key, message_id, payload_digest) VALUES ('soak.effect', 'once', 3, '')
"""

# Two messages of an ordering key, one for a destination that was down for a while, and one of a fan-out.
MORE_MESSAGES: LiteralString = """
INSERT INTO pgoutbox.content (body) VALUES ('{}');
INSERT INTO pgoutbox.message (
    id, topic, queue, ordering_key, state, attempt_count, worker, claimed_at, finished_at, content_id, destination,
    payload, attempts
)
SELECT
    r.id, r.topic, r.queue, r.ordering_key, r.state, r.attempt_count, 'w', now(), now() + interval '1 minute',
    CASE WHEN r.topic = 'soak.fanout' THEN (SELECT max(c.id) FROM pgoutbox.content AS c) END,
    r.destination,
    jsonb_build_object('ledger_key', 'k' || r.id, 'plan', jsonb_build_array('ok')),
    CASE WHEN r.id = 13 THEN jsonb_build_array(
        (1, 1, 'snoozed', 'w', now(), now(), NULL, NULL, NULL, NULL)::pgoutbox.attempt
    ) END
FROM (
    VALUES
        (11, 'soak.ordered', 'ordered', 'go-1', 'sent', 1, NULL),
        (12, 'soak.ordered', 'ordered', 'go-1', 'sent', 1, NULL),
        (13, 'soak.line', 'default', NULL, 'sent', 2, 'line://host'),
        (14, 'soak.fanout', 'default', NULL, 'cancelled', 0, 'mailto:a@example.org')
) AS r(id, topic, queue, ordering_key, state, attempt_count, destination);
INSERT INTO pgoutbox.message (id, topic, state, attempt_count, worker, claimed_at, finished_at, payload)
VALUES (15, 'soak.sync.failed', 'sent', 1, 'w', now(), now(), '{"message_id": 4}');
INSERT INTO soak_effect (message_id, attempt_count) VALUES (15, 1);
INSERT INTO pgoutbox.retention (topic, state, keep) VALUES ('soak.forgotten', 'sent', interval '0')
"""

# The witness's records of these messages, of one that was deleted as it was sent, and of two queues with limits.
ACCOUNT: LiteralString = """
INSERT INTO soak_attempt (message_id, attempt_count, outcome, worker, started_at, ended_at)
VALUES
    (2, 1, 'lost', 'w', now(), now()),
    (4, 1, 'failed', 'w', now(), now()),
    (13, 1, 'snoozed', 'w', now() - interval '5 s', now() - interval '4 s');
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
    ("a failure without its one message for the hook", "DELETE FROM pgoutbox.message WHERE id = 15"),
    (
        "a failure without its one message for the hook",
        """
        INSERT INTO pgoutbox.message (topic, state, attempt_count, worker, claimed_at, finished_at, payload)
        VALUES ('soak.sync.failed', 'sent', 1, 'w', now(), now(), '{"message_id": 4}')
        """,
    ),
    (
        "a hook that did not run",
        "UPDATE pgoutbox.message SET state = 'pending', lane = 1, finished_at = NULL WHERE id = 15",
    ),
    (
        "an attempt that was not made is in the history",
        "UPDATE soak_attempt SET attempt_count = 3 WHERE message_id = 2",
    ),
    ("an attempt is missing from the history", "DELETE FROM soak_attempt WHERE message_id = 2"),
    ("a history that does not account for every attempt", "UPDATE pgoutbox.message SET attempts = NULL WHERE id = 2"),
    (
        "handed over by an attempt that neither sent nor was lost",
        "UPDATE soak_attempt SET outcome = 'retry' WHERE message_id = 2",
    ),
    (
        "sent, and not handed over before by that very attempt",
        "UPDATE pgoutbox.message SET attempt_count = 3, worker = 'vm:3:z' WHERE id = 2",
    ),
    (
        "sent, and not handed over before by that very attempt",
        "UPDATE pgoutbox.message SET finished_at = finished_at - interval '1 hour' WHERE id = 2",
    ),
    (
        "a forbidden change of a row, or rule of the tables",
        "UPDATE pgoutbox.message SET state = 'pending', lane = 1, finished_at = NULL WHERE id = 2",
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
    ("begun beyond the rate of its queue", "UPDATE soak_bucket SET most = 1"),
    ("begun beyond the rate of its queue", "DELETE FROM soak_bucket WHERE xid = '13'"),
    ("begun beyond the number in flight of its queue", "UPDATE soak_flight SET in_flight = 3 WHERE message_id = 41"),
    ("begun in a queue or topic that was paused", "UPDATE soak_flight SET is_paused = true WHERE message_id = 33"),
    ("begun in a queue or topic that was paused", "INSERT INTO soak_trespass VALUES (4)"),
    (
        "an attempt used up while its breaker was open",
        "UPDATE soak_attempt SET outcome = 'retry', error = 'ConnectionRefusedError: no' WHERE message_id = 13",
    ),
    ("passed over by claims while later messages began", "INSERT INTO soak_passed_over VALUES (4, 'default', now())"),
    ("a cancel and a transactional handler that wait for each other", "INSERT INTO soak_hung VALUES (4)"),
    (
        "undrained",
        "UPDATE pgoutbox.message SET state = 'pending', lane = 1, finished_at = NULL WHERE id = 4",
    ),
]


def add_history(connection: psycopg.Connection, message_id: int, attempt_count: int, outcome: str) -> None:
    """Add an attempt to the history of a message, without the triggers that record changes."""
    connection.execute("SET session_replication_role = 'replica'")
    connection.execute(
        "UPDATE pgoutbox.message SET attempts = pgoutbox._with_attempt("
        "attempts, (%s, 1, %s, 'w', now(), now(), NULL, NULL, NULL, NULL)::pgoutbox.attempt) WHERE id = %s",
        [attempt_count, outcome, message_id],
    )
    connection.execute("SET session_replication_role = 'origin'")


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
    install_refusals(connection)
    install_liveness(connection)
    connection.execute(ACCOUNT)
    path = tmp_path / "ledger"
    with Ledger(path, fsync=False) as ledger:
        for key in (*(f"k{number}" for number in (1, 2, 3, 4, 11, 12, 13, 20)), "k14/mailto:a@example.org"):
            ledger.write("intended", key)
            ledger.write("acknowledged", key)
        ledger.hand_over({KEY: "k2"}, 1)
    with Ledger(path, fsync=False) as another_process:
        for number, attempt_count in ((2, 2), (3, 1), (11, 1), (12, 1), (13, 2), (20, 1)):
            another_process.hand_over({KEY: f"k{number}"}, attempt_count)
    return path, connection


def broken(path: Path, connection: psycopg.Connection) -> set[str]:
    return {line.invariant for line in balance(path, connection, {"worker-plain": {0: 1, -9: 2}}).lines if line.broken}


def test_a_good_run_balances(run: tuple[Path, psycopg.Connection]) -> None:
    path, connection = run
    assert broken(path, connection) == set()


def test_a_thread_may_hand_over_after_its_attempt_was_released_and_its_message_ended(
    run: tuple[Path, psycopg.Connection],
) -> None:
    path, connection = run
    connection.execute(
        """
        INSERT INTO pgoutbox.message (id, topic, state, attempt_count, finished_at, payload)
        VALUES (5, 'soak.sync', 'cancelled', 1, now(), '{"ledger_key": "k5", "plan": ["ok"]}');
        INSERT INTO soak_attempt (message_id, attempt_count, outcome, worker, started_at, ended_at)
        VALUES (5, 1, 'cancelled', 'w', now(), now())
        """
    )
    add_history(connection, 5, 1, "cancelled")
    with Ledger(path, fsync=False) as ledger:
        ledger.write("acknowledged", "k5")
        ledger.hand_over({KEY: "k5"}, 1)
    assert broken(path, connection) == set()


@pytest.mark.parametrize(("invariant", "damage"), DAMAGE)
def test_each_damage_is_detected(run: tuple[Path, psycopg.Connection], invariant: str, damage: LiteralString) -> None:
    path, connection = run
    connection.execute(damage)
    assert invariant in broken(path, connection)


def test_an_older_message_after_a_newer_one_is_detected(run: tuple[Path, psycopg.Connection]) -> None:
    path, connection = run
    connection.execute(
        "UPDATE pgoutbox.message SET state = 'sent', superseded_by = NULL, skip_reason = NULL, "
        "attempt_count = 1 WHERE id = 1"
    )
    with Ledger(path, fsync=False) as ledger:
        ledger.hand_over({KEY: "k1"}, 1)
    assert "an older message handed over after a newer one" in broken(path, connection)


def test_a_message_may_be_superseded_by_one_of_another_queue(run: tuple[Path, psycopg.Connection]) -> None:
    path, connection = run
    connection.execute("UPDATE pgoutbox.message SET queue = 'bulk' WHERE id = 1")
    assert "superseded by nothing newer that exists" not in broken(path, connection)


def test_a_pending_message_needs_the_head_of_its_key(run: tuple[Path, psycopg.Connection]) -> None:
    _, connection = run
    message_id = enqueue(connection, payload={KEY: "k50"}, coalesce_key="c")
    connection.execute("DELETE FROM pgoutbox.key_head WHERE key = 'c'")
    assert (message_id, "a message that is owed is newer than the head of its key") in violations(connection)


def test_a_copy_may_not_supersede_newer_messages(run: tuple[Path, psycopg.Connection]) -> None:
    _, connection = run
    original, _, copy = (enqueue(connection, payload={KEY: f"k5{n}"}, coalesce_key="c") for n in range(3))
    connection.execute("UPDATE pgoutbox.message SET resend_of = %s WHERE id = %s", [original, copy])
    assert (copy, "a copy supersedes messages newer than its original") in violations(connection)


def test_an_ordered_message_after_a_later_one_of_its_key_is_detected(run: tuple[Path, psycopg.Connection]) -> None:
    path, connection = run
    with Ledger(path, fsync=False) as ledger:
        ledger.hand_over({KEY: "k11"}, 1)
    assert "an ordered message handed over after a later one of its key" in broken(path, connection)


def test_a_redriven_ordered_message_may_follow_the_messages_that_passed_it(
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
        INSERT INTO soak_attempt (message_id, attempt_count, outcome, worker, started_at, ended_at)
        VALUES (11, 1, 'lost', 'w', now(), now());
        DELETE FROM ledger_audit WHERE message_id = 11;
        DELETE FROM violation WHERE message_id = 11
        """
    )
    add_history(connection, 11, 1, "lost")
    with Ledger(path, fsync=False) as ledger:
        ledger.hand_over({KEY: "k11"}, 2)
    assert broken(path, connection) == set()


def test_an_open_breaker_may_cost_an_attempt_of_a_worker_without_database(
    run: tuple[Path, psycopg.Connection],
) -> None:
    path, connection = run
    connection.execute("UPDATE soak_attempt SET outcome = 'retry', error = 'TimeoutError: ' WHERE message_id = 13")
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
def test_an_attempt_may_be_used_up_unless_the_breaker_was_open_all_the_time(
    run: tuple[Path, psycopg.Connection], excuse: LiteralString
) -> None:
    path, connection = run
    connection.execute("UPDATE soak_attempt SET outcome = 'retry', error = 'TimeoutError: ' WHERE message_id = 13")
    connection.execute(excuse)
    assert broken(path, connection) == set()


def test_the_witness_records_what_the_workers_do(run: tuple[Path, psycopg.Connection]) -> None:
    _, connection = run
    connection.execute("TRUNCATE soak_flight, soak_bucket, soak_breaker, pgoutbox.retention")
    Operator(connection).limit_rate("rated", Rate(1, 1), burst=1)
    connection.commit()  # It also ends settings that are local to an operator's transaction.
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
    """Begin an attempt, whether or not the queue is paused."""
    connection.execute(PUT_SENDING, [message_id])


def trespasses(connection: psycopg.Connection) -> list[int]:
    return beyond_limits(flights(connection), connection)["begun in a queue or topic that was paused"]


@pytest.mark.parametrize(
    ("pause", "is_trespass"),
    [
        ("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('default', now())", True),
        ("INSERT INTO pgoutbox.queue (name, paused_at, resume_at) VALUES ('default', now(), now())", False),
        ("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('bulk', now())", False),
        ("INSERT INTO pgoutbox.topic_pause (topic) VALUES ('greet')", True),
        ("INSERT INTO pgoutbox.topic_pause (topic, resume_at) VALUES ('greet', now())", False),
        ("INSERT INTO pgoutbox.topic_pause (topic) VALUES ('other')", False),
    ],
    ids=["paused", "the pause is over", "another queue", "topic paused", "its pause is over", "another topic"],
)
def test_the_witness_detects_attempts_that_begin_in_a_paused_queue_or_topic(
    run: tuple[Path, psycopg.Connection], pause: LiteralString, is_trespass: bool
) -> None:
    _, connection = run
    message_id = enqueue(connection, payload={KEY: "k50", "plan": ["ok"]})
    connection.execute(pause)
    begin(connection, message_id)
    assert trespasses(connection) == ([message_id] if is_trespass else [])


def test_an_attempt_that_began_before_the_pause_may_continue(
    run: tuple[Path, psycopg.Connection], connect: Connect
) -> None:
    """The claim has its snapshot and waits for a row while the operator pauses the queue."""
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


# --- the handlers' account --------------------------------------------------------------------------------------------


@dataclass
class Handlers:
    """Handlers that began and ended at these seconds of a run, in processes of these names."""

    path: Path
    connection: psycopg.Connection

    def message(self, message_id: int, **columns: object) -> None:
        """Store a message of a good run, which the last of its attempts sent."""
        intended_at = columns.pop("intended_at", 0.0)
        finished_at = datetime.now(UTC) + timedelta(minutes=1)
        defaults = {"topic": "soak.sync", "queue": "default", "state": "sent", "attempt_count": 1, "payload": {}}
        columns = defaults | {"worker": "w", "claimed_at": datetime.now(UTC), "finished_at": finished_at} | columns
        payload = {KEY: f"k{message_id}", "plan": ["ok"]} | cast("dict[str, object]", columns.pop("payload"))
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        self.connection.execute(
            sql.SQL("INSERT INTO pgoutbox.message (id, payload, {}) VALUES (%s, %s, {})").format(
                names, sql.SQL(", ").join([sql.Placeholder()] * len(columns))
            ),
            [message_id, Jsonb(payload), *columns.values()],
        )
        with self.path.open("a") as file:
            for entry in ("intended", "acknowledged"):
                file.write("\n" + json.dumps({"entry": entry, "keys": [f"k{message_id}"], "at": intended_at}))

    def ended(
        self, message_id: int, attempt_count: int, outcome: str, *, worker: str = "w", ended_at: datetime | None = None
    ) -> None:
        """Store the history of an attempt that was not the last one."""
        at = ended_at or datetime.now(UTC)
        add_history(self.connection, message_id, attempt_count, outcome)
        self.connection.execute(
            "INSERT INTO soak_attempt (message_id, attempt_count, outcome, worker, started_at, ended_at) "
            "VALUES (%s, %s, %s, %s, %s, %s)",
            [message_id, attempt_count, outcome, worker, at, at],
        )

    def ran(self, message_id: int, attempt_count: int, process: str, from_at: float, to_at: float | None) -> None:
        """Record an attempt that handed its message over at its end, or was killed."""
        entries = [("began", from_at)] + ([("handed_over", to_at), ("ended", to_at)] if to_at is not None else [])
        with self.path.open("a") as file:
            for entry, at in entries:
                record = {"entry": entry, "keys": [f"k{message_id}"], "at": at, "attempt_count": attempt_count}
                file.write("\n" + json.dumps(record | {"process": process}))

    @property
    def broken(self) -> set[str]:
        return broken(self.path, self.connection)


@pytest.fixture
def handlers(run: tuple[Path, psycopg.Connection]) -> Handlers:
    return Handlers(*run)


DUPLICATE = "unexplained duplicates"
TWICE_AT_ONCE = "in flight twice at once, though its lease had not lapsed"
NO_ATTEMPT = "no attempt after commit"
BESIDE = "in flight beside another message of its key, whose lease had not lapsed"
AGAIN = "handed over again by the process that had handed it over"
LATE = "succeeded after its timeout, and was not recorded as sent"
OUT_OF_LINE = "handed over after a later item of its bulk"
BY_ANOTHER = "ended by another than the process that handled it"
CROWDED = "in flight beside more than the limit of its queue, though no lease had lapsed"
TOO_LATE = "begun inside a transport after another worker had taken it over"
AGAIN_AND_AGAIN = "handed over again and again while its finish was refused"


@pytest.mark.parametrize(
    ("outcome", "processes", "began_at", "expected"),
    [
        ("lost", "pq", 105.0, set()),
        ("lost", "pp", 105.0, {TWICE_AT_ONCE, AGAIN}),
        ("lost", "pp", 111.0, {AGAIN}),
        ("released", "pq", 105.0, {TWICE_AT_ONCE}),
        ("retry", "pq", 105.0, {TWICE_AT_ONCE, "handed over by an attempt that neither sent nor was lost"}),
    ],
    ids=["lapsed", "its own", "its own, one after the other", "released too early", "ended too early"],
)
def test_two_attempts_of_a_message_overlap_only_if_the_first_lapsed_in_another_process(
    handlers: Handlers, outcome: str, processes: str, began_at: float, expected: set[str]
) -> None:
    handlers.message(21, attempt_count=2)
    handlers.ended(21, 1, outcome)
    handlers.ran(21, 1, processes[0], 100.0, 110.0)
    handlers.ran(21, 2, processes[1], began_at, 112.0)
    assert handlers.broken == expected


def test_an_attempt_of_a_killed_process_breaks_no_invariant(handlers: Handlers) -> None:
    handlers.message(21, attempt_count=2)
    handlers.ended(21, 1, "lost")
    handlers.ran(21, 1, "p", 100.0, None)
    handlers.ran(21, 2, "q", 105.0, 112.0)
    assert handlers.broken == set()


@pytest.mark.parametrize(
    "key", [{"coalesce_key": "c"}, {"ordering_key": "o", "queue": "ordered"}], ids=["coalesce", "ordering"]
)
@pytest.mark.parametrize(("began_at", "expected"), [(105.0, {BESIDE}), (111.0, set())], ids=["beside", "after"])
def test_overlapping_messages_of_a_key_are_detected(
    handlers: Handlers, key: dict[str, object], began_at: float, expected: set[str]
) -> None:
    handlers.message(21, **key)
    handlers.message(22, **key)
    handlers.connection.execute("INSERT INTO pgoutbox.key_head (scope, key, newest_id) VALUES ('soak.sync', 'c', 22)")
    handlers.ran(21, 1, "p", 100.0, 110.0)
    handlers.ran(22, 1, "p", began_at, 112.0)
    assert handlers.broken == expected


@pytest.mark.parametrize(("began_at", "expected"), [(105.0, set()), (103.0, {BESIDE})], ids=["late", "before"])
def test_an_attempt_of_the_key_may_begin_late_only_if_it_was_lost_before(
    handlers: Handlers, began_at: float, expected: set[str]
) -> None:
    """A process that is suspended between the last lease check and its handler begins late."""
    handlers.message(21, ordering_key="o", attempt_count=2)
    handlers.message(22, ordering_key="o")
    handlers.ended(21, 1, "lost", ended_at=datetime.fromtimestamp(104.0, UTC))
    handlers.ran(22, 1, "q", 102.0, 110.0)
    handlers.ran(21, 1, "p", began_at, None)
    handlers.ran(21, 2, "q", 111.0, 112.0)
    assert handlers.broken & {BESIDE} == expected


@pytest.mark.parametrize(
    ("began_at", "expected"), [(99.0, {NO_ATTEMPT}), (101.0, set())], ids=["before the commit", "after it"]
)
def test_an_attempt_of_the_key_has_to_begin_after_each_commit_of_a_coalesce_key(
    handlers: Handlers, began_at: float, expected: set[str]
) -> None:
    """A hand-over after the commit is not enough: the attempt may have read the data before."""
    superseded = {"state": "skipped", "attempt_count": 0, "superseded_by": 22, "skip_reason": "superseded by 22"}
    handlers.message(21, intended_at=100.0, coalesce_key="c", **superseded)
    handlers.message(22, intended_at=90.0, coalesce_key="c")
    handlers.ran(22, 1, "p", began_at, 102.0)
    assert handlers.broken == expected


@pytest.mark.parametrize(
    ("outcome", "handed_over_at", "expected"),
    [("lost", 101.5, set()), ("released", 101.5, {LATE}), ("released", 100.9, set())],
    ids=["lapsed", "late", "in time"],
)
def test_a_late_success_that_is_not_sent_is_detected(
    handlers: Handlers, outcome: str, handed_over_at: float, expected: set[str]
) -> None:
    handlers.message(21, topic="soak.thread", attempt_count=2)
    handlers.ended(21, 1, outcome)
    handlers.ran(21, 1, "p", 100.0, handed_over_at)
    handlers.ran(21, 2, "q", 120.0, 121.5)
    assert handlers.broken == expected


@pytest.mark.parametrize(
    ("limit", "began_at", "struck", "expected"),
    [
        (2, 105.0, (), {CROWDED}),
        (2, 111.0, (), set()),
        (3, 105.0, (), set()),
        (2, 105.0, (Struck(101.0, 104.0),), set()),
        (2, 105.0, (Struck(106.0, 107.0),), {CROWDED}),
    ],
    ids=["beside", "after", "the limit was raised", "a lease may have lapsed", "struck later"],
)
def test_more_attempts_at_once_than_the_limit_allows_are_detected(
    handlers: Handlers, limit: int, began_at: float, struck: tuple[Struck, ...], expected: set[str]
) -> None:
    for message_id, at in ((21, 100.0), (22, 100.5), (23, began_at)):
        handlers.message(message_id, topic="soak.async", queue="crowded")
        handlers.connection.execute(
            "INSERT INTO soak_flight (message_id, ledger_key, topic, queue, halts, what, attempt_count, max_in_flight)"
            " VALUES (%s, '', 'soak.async', 'crowded', false, 'sending', 1, %s)",
            [message_id, limit if message_id == 23 else 2],
        )
        handlers.ran(message_id, 1, "p", at, at + 10.0)
    lines = balance(handlers.path, handlers.connection, {}, struck=struck).lines
    assert {line.invariant for line in lines if line.broken} == expected


@pytest.mark.parametrize(
    ("outcome", "began_at", "expected"),
    [("lost", 106.0, {TOO_LATE}), ("lost", 104.0, set()), ("retry", 106.0, set())],
    ids=["after the take-over", "before it", "by the next attempt of its own"],
)
def test_an_email_that_begins_after_another_worker_has_its_message_is_detected(
    handlers: Handlers, outcome: str, began_at: float, expected: set[str]
) -> None:
    handlers.message(21, topic="soak.mail", attempt_count=2)
    handlers.ended(21, 1, outcome, ended_at=datetime.fromtimestamp(105.0, UTC))
    handlers.ran(21, 1, "p", began_at, began_at + 0.3)
    handlers.ran(21, 2, "q", 120.0, 120.3)
    assert handlers.broken == expected


@pytest.mark.parametrize(("again_at", "expected"), [(105.7, set()), (106.5, {TOO_LATE})], ids=["again", "not yet"])
def test_an_email_goes_on_in_the_process_that_has_claimed_it_again(
    handlers: Handlers, again_at: float, expected: set[str]
) -> None:
    handlers.message(21, topic="soak.mail", attempt_count=2, claimed_at=datetime.fromtimestamp(again_at, UTC))
    handlers.ended(21, 1, "lost", ended_at=datetime.fromtimestamp(105.0, UTC))
    handlers.ran(21, 1, "w", 106.0, 106.3)
    assert handlers.broken == expected


@pytest.mark.parametrize(("first", "expected"), [(0, set()), (1, {OUT_OF_LINE})], ids=["in order", "not in order"])
def test_bulk_items_that_are_handed_over_in_another_order_are_detected(
    handlers: Handlers, first: int, expected: set[str]
) -> None:
    for message_id, item in ((21, first), (22, 1 - first)):
        place = {"queue": "ordered", "ordering_key": "o"}
        handlers.message(message_id, payload={"bulk": "b", "item": item}, **place)
        handlers.ran(message_id, 1, "p", 100.0 + message_id, 100.5 + message_id)
    assert handlers.broken == expected


@pytest.mark.parametrize(
    ("topic", "modulus", "until_at", "living", "expected"),
    [
        ("soak.sync", 7, 200.0, "pq", {AGAIN_AND_AGAIN}),
        ("soak.sync", 7, 200.0, "p", set()),
        ("soak.sync", 7, 102.8, "pq", set()),
        ("soak.sync", 5, 200.0, "pq", set()),
        ("soak.effect", 7, 200.0, "pq", set()),
    ],
    ids=["refused", "a process was killed", "no longer refused", "others are refused", "rolled back with its effect"],
)
def test_a_message_handed_over_again_for_each_refused_finish_is_detected(
    handlers: Handlers, topic: str, modulus: int, until_at: float, living: str, expected: set[str]
) -> None:
    for message_id, process in enumerate(living, 22):
        handlers.message(message_id)
        handlers.ran(message_id, 1, process, 150.0, 150.5)
    handlers.connection.execute(
        "INSERT INTO soak_refusal VALUES (%s, 0, to_timestamp(99), to_timestamp(%s))", [modulus, until_at]
    )
    handlers.message(21, topic=topic, attempt_count=3)
    if topic == "soak.effect":
        handlers.connection.execute("INSERT INTO soak_effect VALUES (21, 3)")
    for count, process in enumerate("pqr", 1):
        handlers.ran(21, count, process, 100.0 + count, 100.5 + count)
        if count < 3:
            handlers.ended(21, count, "lost")
    assert handlers.broken == expected


@pytest.mark.parametrize(("outcome", "expected"), [("lost", set()), ("retry", {TWICE_AT_ONCE})])
def test_only_a_lost_attempt_may_begin_beside_the_next_one(
    handlers: Handlers, outcome: str, expected: set[str]
) -> None:
    """A process that is suspended between the last lease check and its handler begins late."""
    handlers.message(21, attempt_count=2)
    handlers.ran(21, 2, "q", 101.0, 103.0)
    handlers.ran(21, 1, "p", 102.0, None)
    handlers.ended(21, 1, outcome)
    assert handlers.broken & {TWICE_AT_ONCE} == expected


GIVEN_UP = "it was handed over and ended sent, which the database refused to write (23514)"


@pytest.mark.parametrize("is_redriven", [False, True], ids=["failed", "sent after a redrive"])
@pytest.mark.parametrize(
    ("modulus", "refused_from", "error", "is_excused"),
    [
        (7, "epoch", GIVEN_UP, True),
        (7, "epoch", "Permanent: no such user", False),
        (5, "epoch", GIVEN_UP, False),
        (7, "infinity", GIVEN_UP, False),
    ],
    ids=["refused", "failed by its handler", "others are refused", "refused later"],
)
def test_a_stopping_worker_may_fail_a_message_whose_finish_was_refused(
    handlers: Handlers, modulus: int, refused_from: str, error: str, is_excused: bool, is_redriven: bool
) -> None:
    handlers.connection.execute("INSERT INTO soak_refusal VALUES (%s, 0, %s::timestamptz)", [modulus, refused_from])
    handlers.message(21, topic="soak.async", state="failed", attempt_count=1)
    handlers.ran(21, 1, "p", 101.0, 101.5)
    handlers.ended(21, 1, "failed")
    handlers.connection.execute("UPDATE soak_attempt SET error = %s WHERE message_id = 21", [error])
    expected = {"handed over by an attempt that neither sent nor was lost"}
    if is_redriven:
        handlers.ran(21, 2, "q", 102.0, 102.5)
        handlers.connection.execute("SET session_replication_role = 'replica'")
        handlers.connection.execute("UPDATE pgoutbox.message SET state = 'sent', attempt_count = 2 WHERE id = 21")
        handlers.connection.execute("SET session_replication_role = 'origin'")
    else:
        expected.add("failed though its plan was to succeed")
    assert handlers.broken == (set() if is_excused else expected)


def test_the_trigger_refuses_exactly_the_chosen_finishes(run: tuple[Path, psycopg.Connection]) -> None:
    _, connection = run
    refused, accepted = (enqueue(connection, payload={KEY: key, "plan": ["ok"]}) for key in ("k50", "k51"))
    claim(connection)
    connection.execute("INSERT INTO soak_refusal VALUES (2, %s)", [refused % 2])
    assert finish_sent(connection, (accepted, 1)) == {accepted}
    with pytest.raises(psycopg.errors.CheckViolation), connection.transaction():
        finish_sent(connection, (refused, 1))
    connection.execute("UPDATE soak_refusal SET until_at = now()")
    assert finish_sent(connection, (refused, 1)) == {refused}


@pytest.mark.parametrize(
    ("state", "finished_at", "process", "expected"),
    [
        ("sent", 110.5, "41", set()),
        ("sent", 110.5, "42", {BY_ANOTHER}),
        ("sent", 109.0, "41", {BY_ANOTHER, "sent, and not handed over before by that very attempt"}),
        ("retry", 110.5, "41", set()),
        ("retry", 109.0, "41", {BY_ANOTHER}),
        ("retry", 109.0, "42", set()),
    ],
    ids=["sent", "sent by another", "sent too early", "ended", "ended while it runs", "ended for another"],
)
def test_an_attempt_that_another_process_has_ended_is_detected(
    handlers: Handlers, state: str, finished_at: float, process: str, expected: set[str]
) -> None:
    """A stale owner's write is in the row of the current owner, whose handler still runs."""
    ended_at = datetime.fromtimestamp(finished_at, UTC)
    handlers.ran(21, 1, process, 100.0, 110.0)
    if state == "sent":
        handlers.message(21, worker="host:41:abc", finished_at=ended_at)
    else:
        handlers.message(21, attempt_count=2)
        handlers.ran(21, 2, "43", 120.0, 121.0)
        handlers.ended(21, 1, "retry", worker="host:41:abc", ended_at=ended_at)
        expected = expected | {"handed over by an attempt that neither sent nor was lost"}
    assert handlers.broken == expected


def test_acknowledged_messages_lost_in_a_failover_are_counted_apart(handlers: Handlers) -> None:
    with handlers.path.open("a") as file:
        for key, at in (("k91", 103.0), ("k92", 106.0)):
            file.write("\n" + json.dumps({"entry": "acknowledged", "keys": [key], "at": at}))
    result = balance(handlers.path, handlers.connection, {}, Lost(102.0, 105.0))
    assert [line for line in result.lines if line.broken] == [("lost", 1, ["k92"])]
    assert result.summary.endswith("; 1 lost by a failover")


@pytest.mark.parametrize(
    ("processes", "began_at", "expected"),
    [("pq", 108.0, set()), ("pp", 108.0, {TWICE_AT_ONCE}), ("pp", 111.0, set())],
    ids=["elsewhere", "in one process at once", "in one process again"],
)
def test_an_attempt_whose_claim_a_failover_lost_may_repeat_but_not_overlap(
    handlers: Handlers, processes: str, began_at: float, expected: set[str]
) -> None:
    handlers.message(21)
    handlers.ran(21, 1, processes[0], 103.0, 110.0)
    handlers.ran(21, 1, processes[1], began_at, 112.0)
    lines = balance(handlers.path, handlers.connection, {}, Lost(102.0, 105.0)).lines
    assert {line.invariant for line in lines if line.broken} == expected


@pytest.mark.parametrize(
    ("owner", "began_at", "expected"),
    [("42", 106.0, set()), ("41", 106.0, {TWICE_AT_ONCE, DUPLICATE}), ("42", 107.5, {TWICE_AT_ONCE, DUPLICATE})],
    ids=["waited for its handler", "is the one that the database knows", "waited for longer than a lease"],
)
def test_an_attempt_claimed_before_a_failover_may_begin_after_it(
    handlers: Handlers, owner: str, began_at: float, expected: set[str]
) -> None:
    """Process 41 has its claim from the lost timeline, if the database knows only the claim of process 42."""
    handlers.message(21, worker=f"host:{owner}:abc")
    handlers.ran(21, 1, "41", began_at, 110.0)
    handlers.ran(21, 1, owner, began_at + 0.5, 112.0)
    lines = balance(handlers.path, handlers.connection, {}, Lost(102.0, 105.0)).lines
    assert {line.invariant for line in lines if line.broken} == expected


def test_a_transaction_refused_by_a_full_notification_queue_is_detected(
    run: tuple[Path, psycopg.Connection],
) -> None:
    path, connection = run
    with Ledger(path, fsync=False) as ledger:
        ledger.write("refused", "k99")
    assert broken(path, connection) == {"a producer's transaction failed for want of room for a notification"}


def test_a_worker_that_ended_by_itself_is_detected(run: tuple[Path, psycopg.Connection]) -> None:
    """Exit code 143 belongs to a worker that was told to stop twice."""
    path, connection = run
    lines = balance(path, connection, {"worker-plain": {1: 1, 143: 1}}).lines
    assert [line for line in lines if line.broken] == [("a worker ended by itself", 1, ["worker-plain: 1"])]


def test_a_delivered_rollback_is_detected(run: tuple[Path, psycopg.Connection]) -> None:
    path, connection = run
    with Ledger(path, fsync=False) as ledger:
        ledger.hand_over({KEY: "k9"}, 1)
    assert "rolled back delivered" in broken(path, connection)
