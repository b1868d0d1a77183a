"""Tests the statements that renew a lease and check an attempt in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

from pgoutbox.database.store import HeldRow
from tests.support.outbox_actions import LEASE_SECONDS, cancel, claim, enqueue, finish_sent, lapse, renew, watch

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect


class Ask(Protocol):
    """Either of the two statements."""

    def __call__(self, connection: psycopg.Connection, *attempts: tuple[int, int]) -> dict[int, HeldRow]: ...


def in_flight(connection: psycopg.Connection, *, coalesce_key: str | None = None) -> int:
    message_id = enqueue(connection, coalesce_key=coalesce_key)
    claim(connection)
    return message_id


def lease_left(connection: psycopg.Connection, message_id: int) -> float:
    (seconds,) = connection.execute(
        "SELECT extract(epoch FROM lease_expires_at - now())::float8 FROM pgoutbox.message_live WHERE id = %s",
        [message_id],
    ).fetchone() or (0.0,)
    return float(seconds)


def test_a_renewal_extends_the_lease_from_now_on(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back)
    lapse(rolled_back, message_id)
    assert renew(rolled_back, (message_id, 1)) == {message_id: HeldRow(message_id, False, False, True)}
    assert lease_left(rolled_back, message_id) == LEASE_SECONDS


def test_watching_changes_no_lease(rolled_back: psycopg.Connection) -> None:
    message_id = in_flight(rolled_back)
    assert watch(rolled_back, (message_id, 1)) == {message_id: HeldRow(message_id, False, False, True)}
    lapse(rolled_back, message_id)
    assert watch(rolled_back, (message_id, 1)) == {message_id: HeldRow(message_id, False, False, False)}
    assert lease_left(rolled_back, message_id) < 0


@pytest.mark.parametrize("ask", [renew, watch])
def test_an_attempt_that_no_longer_holds_its_message_gets_no_answer(rolled_back: psycopg.Connection, ask: Ask) -> None:
    sent, taken = in_flight(rolled_back), in_flight(rolled_back)
    finish_sent(rolled_back, (sent, 1))
    lapse(rolled_back, taken)
    claim(rolled_back, worker="second")
    assert ask(rolled_back, (sent, 1), (taken, 1)) == {}
    assert lease_left(rolled_back, taken) == LEASE_SECONDS


@pytest.mark.parametrize("ask", [renew, watch])
def test_the_answer_reports_a_cancellation(rolled_back: psycopg.Connection, ask: Ask) -> None:
    message_id = in_flight(rolled_back)
    cancel(rolled_back, message_id)
    assert ask(rolled_back, (message_id, 1)) == {message_id: HeldRow(message_id, True, False, True)}


@pytest.mark.parametrize("ask", [renew, watch])
def test_the_answer_reports_a_successor(rolled_back: psycopg.Connection, ask: Ask) -> None:
    message_id = in_flight(rolled_back, coalesce_key="k")
    assert ask(rolled_back, (message_id, 1)) == {message_id: HeldRow(message_id, False, False, True)}
    enqueue(rolled_back, coalesce_key="k")
    assert ask(rolled_back, (message_id, 1)) == {message_id: HeldRow(message_id, False, True, True)}


def test_a_row_that_is_being_cancelled_is_skipped_without_waiting(connect: Connect) -> None:
    ours, theirs = connect(autocommit=True), connect()
    locked, free = in_flight(ours), in_flight(ours)
    lapse(ours, locked)
    lapse(ours, free)
    cancel(theirs, locked)
    answer = renew(ours, (locked, 1), (free, 1))
    assert answer == {locked: HeldRow(locked, False, False, False), free: HeldRow(free, False, False, True)}
    theirs.commit()
    assert renew(ours, (locked, 1)) == {locked: HeldRow(locked, True, False, True)}


def test_the_lease_of_a_locked_row_is_renewed_beside_it_and_stays_claimed(
    connect: Connect,
) -> None:
    ours, theirs, others = connect(autocommit=True), connect(), connect(autocommit=True)
    message_id = in_flight(ours)
    cancel(theirs, message_id)
    assert renew(ours, (message_id, 1)) == {message_id: HeldRow(message_id, False, False, True)}
    theirs.rollback()  # After more than a lease:
    lapse(ours, message_id)
    assert claim(others, worker="second") == []
    assert watch(ours, (message_id, 1)) == {message_id: HeldRow(message_id, False, False, True)}
    assert finish_sent(ours, (message_id, 1)) == {message_id}


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_lease_renewed_beside_its_row_expires_too(connect: Connect, cancelled: bool) -> None:
    ours, theirs, others = connect(autocommit=True), connect(), connect(autocommit=True)
    message_id = in_flight(ours)
    cancel(theirs, message_id)
    renew(ours, (message_id, 1))
    theirs.commit() if cancelled else theirs.rollback()
    lapse(ours, message_id)
    assert claim(others, worker="second") == []
    ours.execute("UPDATE pgoutbox.renewal SET lease_expires_at = now()")
    (claimed,) = claim(others, worker="second")
    assert (claimed.state, claimed.attempt_count) == (("cancelled", 1) if cancelled else ("sending", 2))
    assert renew(ours, (message_id, 1)) == {}


def test_a_lease_renewed_beside_its_row_belongs_to_one_attempt_and_worker(connect: Connect) -> None:
    ours, theirs, others = connect(autocommit=True), connect(), connect(autocommit=True)
    message_id = in_flight(ours)
    cancel(theirs, message_id)
    renew(ours, (message_id, 1))
    theirs.rollback()
    lapse(ours, message_id)
    for change, back in (("attempt_count = 7", "attempt_count = 1"), ("worker = 'x'", "worker = m.worker")):
        ours.execute(f"UPDATE pgoutbox.renewal SET {change}".encode())
        with others.transaction(force_rollback=True):
            assert len(claim(others, worker="second")) == 1
        joined = "FROM pgoutbox.message_live AS m WHERE m.id = r.message_id"
        ours.execute(f"UPDATE pgoutbox.renewal AS r SET {back} {joined}".encode())
        assert claim(others, worker="second") == []


def test_an_expired_lease_is_not_renewed_beside_a_locked_row(connect: Connect) -> None:
    ours, theirs = connect(autocommit=True), connect()
    message_id = in_flight(ours)
    lapse(ours, message_id)
    cancel(theirs, message_id)
    assert renew(ours, (message_id, 1)) == {message_id: HeldRow(message_id, False, False, False)}
    assert ours.execute("SELECT FROM pgoutbox.renewal").fetchall() == []
