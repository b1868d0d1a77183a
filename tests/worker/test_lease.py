"""Tests the statements that renew a lease and check an attempt in flight."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import pytest

from pgoutbox.database.store import HeldRow
from tests.support.outbox_actions import LEASE_SECONDS, cancel, enqueue, lapse, until_blocked
from tests.support.worker_sql import claim, finish_sent, renew, watch

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
        "SELECT extract(epoch FROM lease_expires_at - now())::float8 FROM pgoutbox.in_flight_view WHERE id = %s",
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


def test_a_renewal_is_one_write_for_all_attempts_of_a_claim(rolled_back: psycopg.Connection) -> None:
    ids = [enqueue(rolled_back) for _ in range(3)]
    claim(rolled_back)
    lapse(rolled_back, ids[0])
    assert len(renew(rolled_back, (ids[0], 1))) == 1
    assert [lease_left(rolled_back, message_id) for message_id in ids] == [LEASE_SECONDS] * 3


@pytest.mark.parametrize("commits", [True, False])
def test_a_transaction_that_cancels_keeps_nothing_from_the_worker(connect: Connect, *, commits: bool) -> None:
    ours, theirs = connect(autocommit=True), connect()
    ours.execute("SET lock_timeout = '1s'")
    cancelled, sent = in_flight(ours), in_flight(ours)
    for message_id in (cancelled, sent):
        assert cancel(theirs, message_id) == "requested"
    assert renew(ours, (cancelled, 1)) == {cancelled: HeldRow(cancelled, False, False, True)}
    assert finish_sent(ours, (sent, 1)) == {sent}
    theirs.commit() if commits else theirs.rollback()
    assert renew(ours, (cancelled, 1)) == {cancelled: HeldRow(cancelled, commits, False, True)}


async def test_a_renewal_during_a_take_over_reports_what_was_taken(connect: Connect) -> None:
    ours, others = connect(autocommit=True), connect()
    taken, left = (enqueue(ours, topic) for topic in ("greet", "bill"))
    claim(ours, topics=["greet", "bill"])
    lapse(ours, taken)
    assert [row.id for row in claim(others, worker="second")] == [taken]
    renewing = asyncio.create_task(asyncio.to_thread(renew, ours, (taken, 1), (left, 1)))
    await until_blocked(others, renewing)
    others.commit()
    assert await renewing == {left: HeldRow(left, False, False, True)}


def test_a_renewed_lease_is_not_taken_over(connect: Connect) -> None:
    """The claim of lapsed attempts began before the renewal was committed."""
    ours, others = connect(), connect(autocommit=True)
    message_id = in_flight(others)
    lapse(others, message_id)
    renew(ours, (message_id, 1))
    assert claim(others, worker="second") == []
    ours.commit()
    assert claim(others, worker="second") == []
