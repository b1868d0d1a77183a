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
    import psycopg

LARGE = {"text": "x" * 1_000_000}


def end_elsewhere(db: psycopg.Connection, message_id: int, outcome: AttemptOutcome) -> None:
    """Let the lease of the attempt in flight lapse, and end the next attempt in another worker."""
    with db.transaction():  # At once: the worker whose lease it was may not claim in between.
        lapse(db, message_id)
        assert end_lapsed(db, worker="other")
        begin(db, message_id, worker="other")
        finish(db, End(message_id, 2, outcome, delay_seconds=3600), worker="other")


@pytest.mark.parametrize("outcome", [AttemptOutcome.SNOOZED, AttemptOutcome.RETRY, AttemptOutcome.FAILED])
async def test_an_attempt_goes_on_after_another_worker_has_ended_the_next_one(
    dsn: str, db: psycopg.Connection, outcome: AttemptOutcome
) -> None:
    held = Held(dsn)
    message_id = enqueue(db)
    async with running(held.worker):
        await held.until_begun(message_id)
        end_elsewhere(db, message_id, outcome)
        if outcome == AttemptOutcome.FAILED:
            Operator(db).redrive(message_id)
        else:
            with db.transaction():
                Outbox().on(db).reschedule(message_id)
        await until(lambda: row_of(db, message_id).attempt_count == 3)
        held.end(message_id, Sent())
        await until(lambda: state_of(db, message_id) == "sent")
    assert held.begun == [(message_id, 1)]


@pytest.mark.parametrize(
    "correction",
    [Correction(payload={"to": "ann"}), Correction(headers={"to": "ann"}), Correction(destination="tel:2")],
    ids=["payload", "headers", "destination"],
)
@pytest.mark.parametrize("payload", [{"to": "an"}, LARGE], ids=["small", "large"])
async def test_an_attempt_does_not_go_on_as_that_of_a_corrected_message(
    dsn: str, db: psycopg.Connection, payload: dict[str, str], correction: Correction
) -> None:
    held = Held(dsn)
    message_id = enqueue(db, payload=payload, destination="tel:1")
    async with running(held.worker):
        await held.until_begun(message_id)
        end_elsewhere(db, message_id, AttemptOutcome.FAILED)
        Operator(db).correct(message_id, correction)
        await held.until_begun(message_id, attempt_count=3)
        held.end(message_id, Sent())
        await until(lambda: state_of(db, message_id) == "sent")
    assert held.begun == [(message_id, 1), (message_id, 3)]
