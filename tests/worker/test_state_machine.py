"""Tests random histories of a few messages on a real database against a small model, after every step.

PGOUTBOX_TEST_EXAMPLES sets the number of histories; by default they take a few seconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pgoutbox.message import FINAL_STATES, AttemptOutcome, State
from pgoutbox.operations import ActResult, Operator
from tests.support.outbox_actions import cancel, enqueue, expire, lapse, make_due, redrive, rows_of
from tests.support.transitions import TRANSITIONS
from tests.support.worker_sql import End, claim, finish, finish_sent

if TYPE_CHECKING:
    from tests.support.outbox_actions import Row

pytestmark = pytest.mark.slow

MAX_ATTEMPTS = 3
WORKERS = ("worker-1", "worker-2")
KEYS = (None, "a", "b")
FINISHES = sorted(set(AttemptOutcome) - {AttemptOutcome.SENT, AttemptOutcome.CANCELLED, AttemptOutcome.LOST})


@dataclass(slots=True)
class Model:
    """The expected state of one message."""

    id: int
    key: str | None
    state: State = State.PENDING
    attempt_count: int = 0
    worker: str = ""
    max_attempts: int = MAX_ATTEMPTS
    cancel_requested: bool = False
    expired: bool = False
    lapsed: int = 0
    """The number of its lapsed lease, in their order; 0 if its lease has not lapsed."""
    due: bool = True
    ended_by: int | None = None
    """The newer message of an open transaction that ends this one as superseded."""
    superseded_by: int | None = None
    history: list[str] = field(default_factory=list)

    @property
    def has_used_up_half(self) -> bool:
        return 0 < self.max_attempts - self.attempt_count <= MAX_ATTEMPTS // 2


@dataclass(frozen=True, slots=True)
class Attempt:
    """The attempt that a worker believes to hold."""

    message_id: int
    attempt_count: int
    worker: str


class Outboxes(RuleBasedStateMachine):
    """Producers, two workers and an operator, whose actions hypothesis chooses."""

    dsn: str
    attempts: Bundle[Attempt] = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.db = psycopg.connect(self.dsn, autocommit=True)
        self.producer = psycopg.connect(self.dsn)
        self.db.execute("TRUNCATE pgoutbox.message, pgoutbox.key_head, pgoutbox.dedupe, pgoutbox.queue")
        self.is_paused = False
        self.lapsed_count = 0
        self.messages: dict[int, Model] = {}
        self.newest: dict[str, int] = {}
        self.uncommitted: list[Model] = []
        self.seen: dict[int, Row] = {}
        self.delivered: list[Model] = []

    def teardown(self) -> None:
        """Close both connections."""
        self.producer.close()
        self.db.close()

    # --- producers ----------------------------------------------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS))
    def enqueue(self, key: str | None) -> None:
        """Enqueue in a separate transaction."""
        if key is not None and any(message.key == key for message in self.uncommitted):
            return  # It would wait for the producer that holds the head row of the key.
        message = Model(enqueue(self.db, coalesce_key=key, max_attempts=MAX_ATTEMPTS), key)
        self._supersede_before_due(message)
        self._commit(message)

    @rule(key=st.sampled_from(KEYS))
    def enqueue_in_open_transaction(self, key: str | None) -> None:
        """Enqueue without committing."""
        message = Model(enqueue(self.producer, coalesce_key=key, max_attempts=MAX_ATTEMPTS), key)
        if not any(other.key == key for other in self.uncommitted):
            self._supersede_before_due(message)
        self.uncommitted.append(message)

    @precondition(lambda self: self.uncommitted)
    @rule(commits=st.booleans())
    def end_transaction(self, commits: bool) -> None:
        """Commit or roll back the open transaction with its enqueues."""
        if commits:
            self.producer.commit()
            for message in self.uncommitted:
                self._commit(message)
        else:
            self.producer.rollback()
            for message in self.messages.values():
                message.ended_by = None
        self.uncommitted.clear()

    def _supersede_before_due(self, newer: Model) -> None:
        """An enqueue ends the newest message of its key if it is pending and not due."""
        older = self.messages.get(self.newest.get(newer.key or "", 0))
        if newer.key is not None and older is not None and older.state is State.PENDING and not older.due:
            older.ended_by = newer.id

    def _commit(self, message: Model) -> None:
        self.messages[message.id] = message
        for older in self.messages.values():
            if older.ended_by == message.id:
                self._end(older, State.SKIPPED)
                older.superseded_by, older.ended_by = message.id, None
        if message.key is not None:
            self.newest[message.key] = message.id

    # --- workers ------------------------------------------------------------------------------------------------------

    @rule(
        target=attempts,
        worker=st.sampled_from(WORKERS),
        total=st.integers(1, 3),
        suspects=st.booleans(),
        fresh_only=st.booleans(),
    )
    def claim(self, worker: str, total: int, suspects: bool, fresh_only: bool) -> MultipleResults[Attempt]:
        """Claim as one worker."""
        rows = claim(self.db, worker=worker, total=total, suspects=suspects, fresh_only=fresh_only, spread=False)
        ended, suspect = ([], []) if fresh_only else self._take_lapsed(worker, total, suspects=suspects)
        assert [row.id for row in rows if row.lost_session] == sorted(message.id for message in [*ended, *suspect])
        claimed = [row for row in rows if not row.lost_session]
        expected = {message.id for message in self._claimable() if not fresh_only or message.attempt_count == 0}
        assert {row.id for row in claimed} <= expected
        assert len(claimed) == min(total - len(ended) - len(suspect), len(expected))
        for row in claimed:
            self._judge(self.messages[row.id], worker)
        return multiple(*(Attempt(row.id, row.attempt_count, worker) for row in rows if row.state == State.SENDING))

    def _take_lapsed(self, worker: str, total: int, *, suspects: bool) -> tuple[list[Model], list[Model]]:
        """End lapsed attempts, and begin one of a suspect. Return the messages that ended, and the suspect."""
        lapsed = sorted((m for m in self.messages.values() if m.lapsed), key=lambda m: (m.lapsed, m.id))
        ended = []
        for message in [m for m in lapsed if not self._is_suspect(m)][:total]:
            message.history.append("lost")
            self._judge(message, worker, is_pending=True)
            if message.state is State.PENDING:
                message.due = True
            else:
                ended.append(message)
        room = min(1, total - len(ended)) if suspects and not self.is_paused else 0
        suspect = [m for m in lapsed if m.lapsed and self._is_suspect(m)][:room]
        for message in suspect:
            message.history.append("lost")
            self._judge(message, worker)
        return ended, suspect

    def _claimable(self) -> list[Model]:
        found: list[Model] = []
        if self.is_paused:
            return found
        for message in self.messages.values():
            if message.state is not State.PENDING or not message.due:
                continue
            in_flight = any(
                other.state is State.SENDING and other.key == message.key for other in self.messages.values()
            )
            if message.key is None or not in_flight or self._is_superseded(message):
                found.append(message)
        return found

    def _is_suspect(self, message: Model) -> bool:
        """Return whether it is to be tried again, and it or one beside it has used up half of its attempts."""
        ends = message.cancel_requested or message.expired or self._is_superseded(message)
        beside = [m for m in self.messages.values() if m.state is State.SENDING and m.worker == message.worker]
        lost_again = any(other.has_used_up_half and other.history[-1:] == ["lost"] for other in beside)
        return not ends and message.attempt_count < message.max_attempts and (message.has_used_up_half or lost_again)

    def _judge(self, message: Model, worker: str, *, is_pending: bool = False) -> None:
        if message.cancel_requested:
            self._end(message, State.CANCELLED)
        elif self._is_superseded(message):
            self._end(message, State.SKIPPED)
            message.superseded_by = self.newest[message.key or ""]
        elif message.expired:
            self._end(message, State.SKIPPED)
        elif message.attempt_count >= message.max_attempts:
            self._end(message, State.FAILED)
        elif is_pending:
            self._end(message, State.PENDING)
        else:
            message.state = State.SENDING
            message.worker = worker
            message.attempt_count += 1
            message.lapsed = 0

    def _is_superseded(self, message: Model) -> bool:
        return message.key is not None and self.newest[message.key] > message.id

    @staticmethod
    def _end(message: Model, state: State) -> None:
        message.state = state
        message.lapsed = 0

    def _held(self, attempt: Attempt) -> Model | None:
        message = self.messages[attempt.message_id]
        fence = (message.attempt_count, message.worker)
        holds = message.state is State.SENDING and fence == (attempt.attempt_count, attempt.worker)
        return message if holds else None

    @rule(attempt=attempts)
    def finish_sent(self, attempt: Attempt) -> None:
        """Finish a hand-over as a worker, which may be stale."""
        message = self._held(attempt)
        written = finish_sent(self.db, (attempt.message_id, attempt.attempt_count), worker=attempt.worker)
        assert written == (set() if message is None else {message.id})
        if message is not None:
            self._end(message, State.SENT)
            self.delivered.append(message)

    @rule(attempt=attempts, outcome=st.sampled_from(FINISHES))
    def finish(self, attempt: Attempt, outcome: AttemptOutcome) -> None:
        """A worker, which may be stale, reports another outcome."""
        message = self._held(attempt)
        verdict = End(attempt.message_id, attempt.attempt_count, outcome, "why", 3600.0)
        written = finish(self.db, verdict, worker=attempt.worker)
        if message is None:
            assert written == {}
            return
        if outcome in {"failed", "skipped"}:
            state = State(outcome)
        elif message.cancel_requested:
            state = State.CANCELLED
        elif self._is_superseded(message):
            state = State.SKIPPED
            message.superseded_by = self.newest[message.key or ""]
        elif outcome == "retry" and message.attempt_count >= message.max_attempts:
            state = State.FAILED
        else:
            state = State.PENDING
        if outcome in {"snoozed", "released"}:
            message.max_attempts += 1
        message.due = outcome == "released" or state is not State.PENDING
        message.history.append(outcome if state is State.PENDING else state)
        self._end(message, state)
        assert written == {message.id: state}

    @rule(attempt=attempts)
    def crash(self, attempt: Attempt) -> None:
        """Let the worker of an attempt die and the lease of its claim end, for all attempts of the claim."""
        if self._held(attempt) is None:
            return
        lapse(self.db, attempt.message_id)
        self.lapsed_count += 1
        of_claim = self.db.execute(
            "SELECT other.id FROM pgoutbox.in_flight_view AS v JOIN pgoutbox.in_flight_view AS other"
            " USING (worker, claimed_at) WHERE v.id = %s",
            [attempt.message_id],
        )
        for (message_id,) in of_claim.fetchall():
            self.messages[message_id].lapsed = self.lapsed_count

    # --- time and operators -------------------------------------------------------------------------------------------

    def _one(self, choice: int) -> Model:
        return list(self.messages.values())[choice % len(self.messages)]

    @precondition(lambda self: self.messages)
    @rule(choice=st.integers(0, 99))
    def fall_due(self, choice: int) -> None:
        """Let time pass for one message."""
        message = self._one(choice)
        if message.state is State.PENDING and message.ended_by is None:
            make_due(self.db, message.id)
            message.due = True

    @precondition(lambda self: self.messages)
    @rule(choice=st.integers(0, 99))
    def expire(self, choice: int) -> None:
        """Let one message expire."""
        message = self._one(choice)
        if message.state not in FINAL_STATES and message.ended_by is None:
            expire(self.db, message.id)
            message.expired = True

    @precondition(lambda self: self.messages)
    @rule(choice=st.integers(0, 99))
    def cancel(self, choice: int) -> None:
        """Cancel one message as the application."""
        message = self._one(choice)
        answer = cancel(self.db, message.id)
        if message.state is State.PENDING and message.ended_by is None:
            assert answer == "cancelled"
            self._end(message, State.CANCELLED)
        elif message.state in {State.PENDING, State.SENDING}:
            assert answer == "requested"  # A worker or another transaction has its row. The next claim reads it.
            message.cancel_requested = True
        else:
            assert answer == ("already_cancelled" if message.state is State.CANCELLED else message.state)

    @precondition(lambda self: self.messages)
    @rule(choice=st.integers(0, 99))
    def redrive(self, choice: int) -> None:
        """Redrive one message as an operator."""
        message = self._one(choice)
        can_be = message.state in {State.FAILED, State.CANCELLED} and not self._is_superseded(message)
        assert redrive(self.db, message.id) == can_be
        if can_be:
            message.state = State.PENDING
            message.due = True
            message.cancel_requested = False
            message.max_attempts = message.attempt_count + MAX_ATTEMPTS

    @precondition(lambda self: self.messages)
    @rule(choice=st.integers(0, 99), is_later=st.booleans())
    def reschedule(self, choice: int, *, is_later: bool) -> None:
        """Make one message due now or tomorrow, as an operator."""
        message = self._one(choice)
        expected = ActResult.RESCHEDULED
        if message.state is not State.PENDING:
            expected = ActResult.WRONG_STATE
        elif self._is_superseded(message):
            expected = ActResult.SUPERSEDED
        elif message.expired:
            expected = ActResult.EXPIRES
        elif message.ended_by is not None:
            expected = ActResult.LOCKED
        due_at = datetime.now(UTC) + timedelta(days=1) if is_later else None
        assert Operator(self.db).reschedule(message.id, due_at).result is expected
        if expected is ActResult.RESCHEDULED:
            message.due = not is_later

    @precondition(lambda self: self.messages)
    @rule(choice=st.integers(0, 99))
    def dismiss(self, choice: int) -> None:
        """Dismiss one message as an operator."""
        message = self._one(choice)
        can_be = message.state is State.FAILED
        assert Operator(self.db).dismiss(message.id, "nobody needs it").is_done == can_be
        if can_be:
            self._end(message, State.SKIPPED)

    @rule()
    def pause_or_resume(self) -> None:
        """Pause or resume the queue as an operator."""
        if self.is_paused:
            assert Operator(self.db).resume("default")
        else:
            Operator(self.db).pause("default")
        self.is_paused = not self.is_paused

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_table_is_as_the_model_says(self) -> None:
        """Compare: nothing is missing, nothing rolled back exists, and every row matches the model."""
        rows = rows_of(self.db)
        assert [row.id for row in rows] == sorted(self.messages)
        for row in rows:
            message = self.messages[row.id]
            assert (row.state, row.attempt_count, row.max_attempts, row.superseded_by) == (
                message.state,
                message.attempt_count,
                message.max_attempts,
                message.superseded_by,
            )
        history = self.db.execute(
            "SELECT message_id, outcome FROM pgoutbox.attempt_view CROSS JOIN generate_series(1, times)"
            " WHERE outcome <> 'sent' ORDER BY 1, attempt_count"
        )
        assert history.fetchall() == [
            (message_id, outcome)
            for message_id in sorted(self.messages)
            for outcome in self.messages[message_id].history
        ]

    @invariant()
    def attempts_only_ever_count_up_and_states_change_by_the_rules(self) -> None:
        """Compare with the rows before the last step, independent of the model."""
        for row in rows_of(self.db):
            before = self.seen.get(row.id, replace(row, state=State.PENDING, attempt_count=0))
            assert row.attempt_count >= before.attempt_count
            assert row.state == before.state or State(row.state) in TRANSITIONS[State(before.state)]
            self.seen[row.id] = row

    @invariant()
    def two_messages_of_one_key_are_never_in_flight(self) -> None:
        """Query the table for broken rules."""
        twice = self.db.execute(
            "SELECT coalesce_key FROM pgoutbox.message_live WHERE state = 'sending' AND coalesce_key IS NOT NULL "
            "GROUP BY topic, coalesce_key HAVING count(*) > 1"
        )
        assert twice.fetchall() == []

    @invariant()
    def an_older_message_is_never_delivered_after_a_newer_one(self) -> None:
        """Check that hand-overs of each key come in the order of ids, each once."""
        for key in KEYS[1:]:
            order = [message.id for message in self.delivered if message.key == key]
            assert order == sorted(set(order))


def test_random_histories_agree_with_the_model(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outboxes, "dsn", dsn, raising=False)
    run_state_machine_as_test(
        Outboxes,
        settings=settings(
            max_examples=int(os.environ.get("PGOUTBOX_TEST_EXAMPLES", "20")),
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
