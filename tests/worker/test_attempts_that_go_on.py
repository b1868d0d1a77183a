"""An attempt goes on in its process when another worker has had its message meanwhile: none begins beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgoutbox import Outbox, Sent
from pgoutbox.message import AttemptOutcome
from pgoutbox.operations import Correction, Operator
from tests.support.held import Held
from tests.support.outbox_actions import begin, enqueue, lapse, row_of, running, state_of
from tests.support.waiting import until
from tests.support.worker_sql import End, end_lapsed, finish

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg


def end_elsewhere(db: psycopg.Connection, message_id: int, outcome: AttemptOutcome) -> None:
    """Let the lease of the attempt in flight lapse, and end the next attempt in another worker."""
    with db.transaction():  # At once: the worker whose lease it was may not claim in between.
        lapse(db, message_id)
        assert end_lapsed(db, worker="other")
        begin(db, message_id, worker="other")
        finish(db, End(message_id, 2, outcome, delay_seconds=3600), worker="other")


@pytest.mark.parametrize("outcome", [AttemptOutcome.SNOOZED, AttemptOutcome.RETRY])
async def test_an_attempt_goes_on_after_another_worker_has_ended_the_next_one(
    dsn: str, db: psycopg.Connection, outcome: AttemptOutcome
) -> None:
    held = Held(dsn)
    message_id = enqueue(db)
    async with running(held.worker):
        await held.until_begun(message_id)
        end_elsewhere(db, message_id, outcome)
        with db.transaction():
            Outbox().on(db).reschedule(message_id)
        await until(lambda: row_of(db, message_id).attempt_count == 3)
        held.end(message_id, Sent())
        await until(lambda: state_of(db, message_id) == "sent")
    assert held.begun == [(message_id, 1)]


async def test_an_attempt_goes_on_after_a_failover_has_lost_it_and_a_snooze_before_it(
    dsn: str, db: psycopg.Connection
) -> None:
    held = Held(dsn)
    message_id = enqueue(db)
    begin(db, message_id, worker="other")
    finish(db, End(message_id, 1, AttemptOutcome.SNOOZED), worker="other")
    async with running(held.worker):
        await held.until_begun(message_id, attempt_count=2)
        with db.transaction():
            db.execute("DELETE FROM pgoutbox.claim")
            db.execute(
                "UPDATE pgoutbox.message_live SET state = 'pending', attempt_count = 0, max_attempts = 11, lane = 0,"
                " worker = NULL, claimed_at = NULL, attempts = NULL"
            )
            Outbox().on(db).reschedule(message_id)
        await until(lambda: row_of(db, message_id).attempt_count == 1)
        held.end(message_id, Sent())
        await until(lambda: state_of(db, message_id) == "sent")
    assert held.begun == [(message_id, 2)]


@pytest.mark.parametrize(
    "act",
    [
        lambda operator, message_id: operator.redrive(message_id),
        lambda operator, message_id: operator.correct(message_id, Correction(payload={"to": "ann"})),
        lambda operator, message_id: operator.correct(message_id, Correction(destination="tel:2")),
    ],
    ids=["redrive", "payload", "destination"],
)
async def test_an_attempt_does_not_go_on_if_an_operator_has_acted_on_its_message(
    dsn: str, db: psycopg.Connection, act: Callable[[Operator, int], object]
) -> None:
    held = Held(dsn)
    message_id = enqueue(db, payload={"to": "an"}, destination="tel:1")
    async with running(held.worker):
        await held.until_begun(message_id)
        end_elsewhere(db, message_id, AttemptOutcome.FAILED)
        act(Operator(db), message_id)
        await held.until_begun(message_id, attempt_count=3)
        held.end(message_id, Sent())
        await until(lambda: state_of(db, message_id) == "sent")
    assert held.begun == [(message_id, 1), (message_id, 3)]
