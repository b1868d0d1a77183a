"""The checker of the long run sees what it is there to see: a good run balances, and each kind of damage is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest

from tests.faults.judge import install_judge
from tests.faults.ledger import KEY, Ledger, install_audit
from tests.soak.verdict import balance

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
    path = tmp_path / "ledger"
    with Ledger(path, fsync=False) as ledger:
        for number in range(1, 5):
            ledger.write("intended", f"k{number}")
            ledger.write("acknowledged", f"k{number}")
        for number, attempt_count in ((2, 1), (2, 2), (3, 1)):
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


def test_what_was_rolled_back_and_delivered_is_seen(run: tuple[Path, psycopg.Connection]) -> None:
    path, connection = run
    with Ledger(path, fsync=False) as ledger:
        ledger.hand_over({KEY: "k9"}, 1)
    assert "rolled back delivered" in broken(path, connection)
