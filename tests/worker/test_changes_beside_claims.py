"""Claims and finishes beside a change that commits between their snapshot and their locks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, LiteralString, TypeVar

import pytest

from pgoutbox.database import sql
from pgoutbox.kernel import statements
from tests.support import races
from tests.support.held_messages import DESTINATION, HOLD, KEY, open_breaker
from tests.support.outbox_actions import begin, cancel, enqueue, row_of, state_of
from tests.support.worker_sql import (
    FRESH,
    claim,
    claim_parameters,
    claim_probe,
    ids_in_flight,
    postpone,
    sleeping_worker,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from tests.conftest import Connect

T = TypeVar("T")


def holds_of(db: psycopg.Connection) -> list[str]:
    ((holds,),) = db.execute("SELECT holds FROM pgoutbox.breaker").fetchall()
    return list(holds)


@pytest.fixture
def beside(connect: Connect, db: psycopg.Connection) -> Callable[..., Any]:
    """Return a function that runs an action, and another one between its snapshot and its locks of this table."""

    def run(table: LiteralString, action: Callable[[psycopg.Connection], T], meanwhile: Callable[[], object]) -> T:
        gate, worker = connect(), connect(autocommit=True)
        races.stop_reads(db, table)
        gate.execute("SELECT pg_advisory_xact_lock(1)")
        worker.execute("SET ROLE pgoutbox_worker")
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(action, worker)
            races.until_blocked(db, worker, future)
            meanwhile()
            gate.rollback()
            return future.result()

    return run


def test_a_probe_begins_beside_a_change_of_its_breaker(
    db: psycopg.Connection, beside: Callable[..., list[tuple[int, str]]]
) -> None:
    message_id = enqueue(db, destination=DESTINATION)
    open_breaker(db)
    found = beside("breaker", claim_probe, lambda: db.execute("UPDATE pgoutbox.breaker SET holds = holds || '{other}'"))
    assert found == db.execute("SELECT %s::bigint, probe_id::text FROM pgoutbox.breaker", [message_id]).fetchall()
    assert holds_of(db) == [HOLD, "other"]


def test_a_message_that_changes_meanwhile_begins_no_probe_and_stays_behind_its_breaker(
    db: psycopg.Connection, beside: Callable[..., list[tuple[int, str]]]
) -> None:
    message_id = enqueue(db, destination=DESTINATION)
    open_breaker(db)
    found = beside("message_live", claim_probe, lambda: db.execute("UPDATE pgoutbox.message_live SET owner = 'ada'"))
    assert (found, state_of(db, message_id)) == ([], "pending")
    assert db.execute("SELECT holds, probe_id FROM pgoutbox.breaker").fetchall() == [([HOLD], None)]
    assert [message for message, _ in claim_probe(db)] == [message_id]


def test_a_hold_is_noted_beside_a_change_of_its_breaker(db: psycopg.Connection, beside: Callable[..., None]) -> None:
    message_id = enqueue(db, destination=DESTINATION)
    begin(db, message_id)
    open_breaker(db, holds=())
    beside(
        "breaker",
        lambda worker: postpone(worker, message_id),
        lambda: db.execute("UPDATE pgoutbox.breaker SET holds = holds || '{other}'"),
    )
    assert (state_of(db, message_id), holds_of(db)) == ("pending", ["other", HOLD])


@pytest.mark.parametrize("ordering_key", [None, "member 1"])
def test_a_message_that_shall_be_cancelled_is_no_probe(
    connect: Connect, db: psycopg.Connection, ordering_key: str | None
) -> None:
    worker = connect()
    message_id = enqueue(db, destination=DESTINATION, ordering_key=ordering_key)
    claim(worker, lanes=(0, 1, 3))
    assert cancel(db, message_id) == "requested"
    worker.rollback()
    open_breaker(db)
    assert claim_probe(db) == []
    assert ids_in_flight(claim(db, lanes=(0, 1, 3))) == []
    assert state_of(db, message_id) == "cancelled"


def test_the_end_of_a_hold_wakes_a_sleeping_worker(connect: Connect, db: psycopg.Connection) -> None:
    """Messages that were enqueued meanwhile were left out, and nobody looks for them again."""
    open_breaker(db)
    with sleeping_worker(connect) as rings:
        assert claim_probe(db) == []
        assert rings() == ["all default"]
    assert holds_of(db) == []


def test_a_probe_on_another_way_wakes_a_sleeping_worker(connect: Connect, db: psycopg.Connection) -> None:
    enqueue(db, destination=DESTINATION)
    open_breaker(db)
    with sleeping_worker(connect) as rings:
        ((_, probe_id),) = claim_probe(db)
        db.execute(sql.BREAKER_RELEASE_IF_PROBING, {"key": KEY, "probe_id": probe_id, "hold": HOLD})
        assert rings() == ["all default"]
    assert holds_of(db) == []


def test_requests_to_cancel_are_forgotten_without_a_wait_for_a_redrive(
    connect: Connect, db: psycopg.Connection
) -> None:
    """Both delete requests, each in an order of its own: if both waited, they could wait in a circle."""
    message_id = enqueue(db, destination=DESTINATION)
    begin(db, message_id)
    assert cancel(db, message_id) == "requested"
    db.execute("UPDATE pgoutbox.message SET state = 'cancelled', finished_at = now(), key_in_flight = NULL")
    operator = connect()
    operator.execute("SELECT pgoutbox.redrive(ARRAY[%s]::bigint[])", [message_id])
    db.execute("SET lock_timeout = '100ms'")
    db.execute("SELECT pgoutbox._forget_requests()")
    operator.commit()
    assert row_of(db, message_id).state == "pending"


def test_a_claim_beside_a_new_rate_takes_no_message_without_a_token(
    db: psycopg.Connection, beside: Callable[..., None]
) -> None:
    """The claim has a snapshot without the rate, and asks for permits when the rate is committed."""
    enqueue(db, queue="first")
    limited = [enqueue(db, queue="limited") for _ in range(5)]
    queues = ["first", "limited"]
    parameters = {**claim_parameters([FRESH, FRESH]), "served": queues, "queues": queues}
    beside(
        "message_live",
        lambda worker: worker.execute(statements.CLAIM_WITHOUT_KEYS, parameters),
        lambda: db.execute("INSERT INTO pgoutbox.queue (name, rate_count, rate_seconds) VALUES ('limited', 3, 3600)"),
    )
    ((begun,),) = db.execute("SELECT begun_count FROM pgoutbox.queue").fetchall()
    assert begun == sum(state_of(db, message_id) == "sending" for message_id in limited)
