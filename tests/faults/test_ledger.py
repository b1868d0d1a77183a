"""Tests that the ledger accepts a correct run and detects each kind of damage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.support.ledger import KEY, Ledger, install_audit, judge, owed_count, read_entries
from tests.support.outbox_actions import enqueue, lapse, redrive, state_of
from tests.support.worker_sql import claim, finish_sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Connect


@pytest.fixture
def db(connect: Connect) -> psycopg.Connection:
    connection = connect(autocommit=True)
    install_audit(connection)
    return connection


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger") as opened:
        yield opened


def committed(db: psycopg.Connection, ledger: Ledger, key: str) -> int:
    """Enqueue a message whose commit is acknowledged."""
    with ledger.committing(db, key):
        return enqueue(db, payload={KEY: key})


def deliver(db: psycopg.Connection, ledger: Ledger, *, queue: str = "default") -> None:
    """Hand over and finish every due message, as a different worker than the one whose lease may have lapsed."""
    for row in claim(db, worker="worker-2", queue=queue):
        if row.state != "sending":
            continue
        ledger.hand_over({KEY: (row.payload_json or "").split('"')[3]}, row.attempt_count)
        assert finish_sent(db, (row.id, row.attempt_count), worker="worker-2") == {row.id}


def test_the_ledger_accepts_a_correct_run(db: psycopg.Connection, connect: Connect, ledger: Ledger) -> None:
    producer = connect()
    with ledger.committing(producer, "committed"):
        enqueue(producer, payload={KEY: "committed"})
    with ledger.rolling_back(producer, "rolled back"):
        enqueue(producer, payload={KEY: "rolled back"})
    with pytest.raises(psycopg.errors.DivisionByZero), ledger.committing(producer, "failed"):
        producer.execute("SELECT %s / 0", [enqueue(producer, payload={KEY: "failed"})])
    ledger.write("intended", "nobody knows")
    lapse(db, claim(db)[0].id)
    assert owed_count(db) == 1
    deliver(db, ledger)
    verdict = judge(ledger.path, db)
    assert verdict.violations == {}, verdict
    assert (verdict.acknowledged_count, verdict.unknown_count, verdict.rolled_back_count) == (1, 1, 2)
    assert (verdict.hand_over_count, verdict.duplicate_count, owed_count(db)) == (1, 0, 0)
    assert verdict.states == {"sent": 1}


def test_a_commit_that_raises_has_an_unknown_outcome(db: psycopg.Connection, connect: Connect, ledger: Ledger) -> None:
    producer = connect()
    enqueue(producer, payload={KEY: "k"})
    with pytest.raises(psycopg.OperationalError), ledger.committing(producer, "k"):
        db.execute("SELECT pg_terminate_backend(%s, 10000)", [producer.info.backend_pid])
    assert read_entries(ledger.path).unknown == {"k"}
    verdict = judge(ledger.path, db)
    assert (verdict.violations, verdict.unknown_committed_count) == ({}, 0)


def test_a_hand_over_after_a_lapsed_lease_is_an_explained_duplicate(db: psycopg.Connection, ledger: Ledger) -> None:
    message_id = committed(db, ledger, "k")
    ledger.hand_over({KEY: "k"}, claim(db)[0].attempt_count)
    lapse(db, message_id)
    deliver(db, ledger)
    verdict = judge(ledger.path, db)
    assert (verdict.violations, verdict.duplicate_count) == ({}, 1)


def test_a_redrive_is_not_a_second_final_state(db: psycopg.Connection, ledger: Ledger) -> None:
    message_id = committed(db, ledger, "k")
    db.execute("UPDATE pgoutbox.message SET max_attempts = 1 WHERE id = %s", [message_id])
    claim(db)
    lapse(db, message_id)
    claim(db, worker="worker-2")
    assert redrive(db, message_id)
    deliver(db, ledger)
    assert judge(ledger.path, db).violations == {}


# --- coalesce keys ----------------------------------------------------------------------------------------------------


def newest(db: psycopg.Connection, ledger: Ledger, key: str = "newest", *, queue: str = "default") -> int:
    """Enqueue one more message whose commit is acknowledged."""
    with ledger.committing(db, key):
        return enqueue(db, payload={KEY: key}, queue=queue, coalesce_key="c")


def enqueue_without_lock(db: psycopg.Connection, key: str) -> int:
    """Enqueue a message as if `enqueue` did not lock its key: it can commit after messages with greater ids."""
    message_id = enqueue(db, payload={KEY: key})
    db.execute("UPDATE pgoutbox.message_live SET coalesce_key = 'c' WHERE id = %s", [message_id])
    return message_id


@dataclass
class Late:
    """A message that committed after `newer`, which has a greater id, was delivered."""

    db: psycopg.Connection
    ledger: Ledger
    newer: int
    id: int

    def end(
        self, message_id: int, state: str, superseded_by: int | None = None, skip_reason: str | None = None
    ) -> None:
        """End a message in this state, correctly or not."""
        self.db.execute(
            "UPDATE pgoutbox.message "
            "SET state = %s, superseded_by = %s, skip_reason = %s, finished_at = now(), key_in_flight = NULL "
            "WHERE id = %s",
            [state, superseded_by, skip_reason, message_id],
        )

    def forget_head(self) -> None:
        """Delete the head that names `newer`, so that a claim begins the late message."""
        self.db.execute("DELETE FROM pgoutbox.key_head")

    def supersede(self, by: int) -> None:
        """Skip it in favour of this message."""
        self.end(self.id, "skipped", by, f"superseded by {by}")


@pytest.fixture
def late(db: psycopg.Connection, connect: Connect, ledger: Ledger) -> Late:
    producer = connect()
    message_id = enqueue_without_lock(producer, "late")
    newer = newest(db, ledger, "newer")
    deliver(db, ledger)
    with ledger.committing(producer, "late"):
        pass
    return Late(db, ledger, newer, message_id)


def is_delivered(late: Late) -> None:
    late.forget_head()
    deliver(late.db, late.ledger)
    assert state_of(late.db, late.id) == "sent"


def is_superseded_by_one_that_is_delivered(late: Late) -> None:
    newest(late.db, late.ledger)
    deliver(late.db, late.ledger)
    assert state_of(late.db, late.id) == "skipped"


def is_superseded_in_another_queue(late: Late) -> None:
    late.supersede(newest(late.db, late.ledger, queue="bulk"))
    deliver(late.db, late.ledger, queue="bulk")


def is_cancelled(late: Late) -> None:
    late.end(late.id, "cancelled")


def is_expired(late: Late) -> None:
    late.end(late.id, "skipped", skip_reason="expired")


def is_superseded_by_one_that_is_cancelled(late: Late) -> None:
    by = newest(late.db, late.ledger)
    late.supersede(by)
    late.end(by, "cancelled")


def is_superseded_by_one_that_was_delivered_before(late: Late) -> None:
    deliver(late.db, late.ledger)
    assert state_of(late.db, late.id) == "skipped"


def is_skipped_by_nobody(late: Late) -> None:
    late.end(late.id, "skipped", skip_reason="not wanted")


def is_passed_by_one_that_did_not_supersede_it(late: Late) -> None:
    newest(late.db, late.ledger)
    late.supersede(late.newer)
    deliver(late.db, late.ledger)


def is_superseded_by_one_that_is_superseded(late: Late) -> None:
    late.supersede(newest(late.db, late.ledger, "between"))
    newest(late.db, late.ledger)
    deliver(late.db, late.ledger)


def is_tried_and_then_superseded(late: Late) -> None:
    """Its own attempt began after its commit."""
    late.forget_head()
    claim(late.db)
    with late.ledger.running({KEY: "late"}, 1):
        late.supersede(late.newer)


@pytest.mark.parametrize(
    ("end", "is_broken"),
    [
        (is_delivered, False),
        (is_superseded_by_one_that_is_delivered, False),
        (is_superseded_by_one_that_is_superseded, False),
        (is_tried_and_then_superseded, False),
        (is_superseded_in_another_queue, False),
        (is_cancelled, False),
        (is_expired, False),
        (is_superseded_by_one_that_is_cancelled, False),
        (is_superseded_by_one_that_was_delivered_before, True),
        (is_skipped_by_nobody, True),
        (is_passed_by_one_that_did_not_supersede_it, True),
    ],
)
def test_an_attempt_must_begin_after_each_commit_of_a_coalesce_key(
    late: Late, end: Callable[[Late], None], is_broken: bool
) -> None:
    end(late)
    expected = {"no_attempt_after_commit": ["late"]} if is_broken else {}
    assert judge(late.ledger.path, late.db).violations == expected


def test_any_of_several_transactions_for_one_record_may_be_the_committed_one(
    db: psycopg.Connection, ledger: Ledger
) -> None:
    """With a dedupe key, later transactions find the message and write nothing."""
    newest(db, ledger)
    deliver(db, ledger)
    ledger.write("intended", "newest")
    assert judge(ledger.path, db).violations == {}


def test_an_attempt_that_hands_over_after_the_commit_may_have_begun_before_it(
    db: psycopg.Connection, connect: Connect, ledger: Ledger
) -> None:
    producer = connect()
    message_id = enqueue_without_lock(producer, "late")
    newer = newest(db, ledger, "newer")
    claim(db)
    with ledger.running({KEY: "newer"}, 1):
        with ledger.committing(producer, "late"):
            pass
        ledger.hand_over({KEY: "newer"}, 1)
    finish_sent(db, (newer, 1))
    Late(db, ledger, newer, message_id).supersede(newer)
    assert judge(ledger.path, db).violations == {"no_attempt_after_commit": ["late"]}


# --- records ----------------------------------------------------------------------------------------------------------


def test_half_a_line_is_not_a_record_and_corrupts_no_other(db: psycopg.Connection, ledger: Ledger) -> None:
    committed(db, ledger, "first")
    with ledger.path.open("ab") as file:
        file.write(b'\n{"entry": "handed_over", "ke')
    committed(db, ledger, "second")
    entries = read_entries(ledger.path)
    assert entries.acknowledged.keys() == {"first", "second"}
    assert not entries.hand_overs


def lose(db: psycopg.Connection, ledger: Ledger) -> None:
    ledger.write("acknowledged", "k")


def deliver_a_rollback(db: psycopg.Connection, ledger: Ledger) -> None:
    ledger.write("rolled_back", "k")
    ledger.hand_over({KEY: "k"}, 1)


def keep_a_rollback(db: psycopg.Connection, ledger: Ledger) -> None:
    enqueue(db, payload={KEY: "k"})
    deliver(db, ledger)


def enqueue_twice(db: psycopg.Connection, ledger: Ledger) -> None:
    committed(db, ledger, "k")
    enqueue(db, payload={KEY: "k"})
    for row in claim(db):
        ledger.hand_over({KEY: "k"}, 1)
        finish_sent(db, (row.id, row.attempt_count))


def overwrite_a_final_state(db: psycopg.Connection, ledger: Ledger) -> None:
    message_id = committed(db, ledger, "k")
    deliver(db, ledger)
    db.execute("UPDATE pgoutbox.message SET state = 'cancelled' WHERE id = %s", [message_id])


def bring_a_sent_message_back(db: psycopg.Connection, ledger: Ledger) -> None:
    message_id = committed(db, ledger, "k")
    deliver(db, ledger)
    db.execute(
        "UPDATE pgoutbox.message SET state = 'pending', lane = 1, finished_at = NULL WHERE id = %s", [message_id]
    )
    claim(db)
    finish_sent(db, (message_id, 2))


def send_without_hand_over(db: psycopg.Connection, ledger: Ledger) -> None:
    message_id = committed(db, ledger, "k")
    claim(db)
    finish_sent(db, (message_id, 1))


def hand_over_twice_in_one_attempt(db: psycopg.Connection, ledger: Ledger) -> None:
    committed(db, ledger, "k")
    ledger.hand_over({KEY: "k"}, 1)
    deliver(db, ledger)


def hand_over_by_an_attempt_without_an_end(db: psycopg.Connection, ledger: Ledger) -> None:
    message_id = committed(db, ledger, "k")
    ledger.hand_over({KEY: "k"}, 1)
    db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = %s", [message_id])
    deliver(db, ledger)


def leave_undrained(db: psycopg.Connection, ledger: Ledger) -> None:
    committed(db, ledger, "k")


@pytest.mark.parametrize(
    ("fault", "invariant"),
    [
        (lose, "lost"),
        (deliver_a_rollback, "rolled_back_delivered"),
        (keep_a_rollback, "rolled_back_delivered"),
        (enqueue_twice, "two_final_states"),
        (overwrite_a_final_state, "two_final_states"),
        (bring_a_sent_message_back, "two_final_states"),
        (send_without_hand_over, "sent_without_hand_over"),
        (hand_over_twice_in_one_attempt, "unexplained_duplicates"),
        (hand_over_by_an_attempt_without_an_end, "unexplained_duplicates"),
        (leave_undrained, "undrained"),
    ],
)
def test_each_kind_of_damage_is_reported_under_its_invariant(
    db: psycopg.Connection, ledger: Ledger, fault: Callable[[psycopg.Connection, Ledger], None], invariant: str
) -> None:
    fault(db, ledger)
    assert invariant in judge(ledger.path, db).violations
