"""Messages that change while a claim reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from pgoutbox import Context, EditResult, Message, Outbox, Worker
from pgoutbox.operations import Operator
from tests.support import races
from tests.support.outbox_actions import enqueue, running, settings_for
from tests.support.roles import login
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from tests.conftest import Connect

CLAIM_WAITS: Final = """
    SELECT FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event = 'advisory' AND application_name LIKE 'pgoutbox claim%'
"""
ACTS: Final[dict[str, Callable[[psycopg.Connection, int], Any]]] = {
    "corrected": lambda db, message_id: Operator(db).correct(message_id, {"payload": {"n": 1}}).result,
    "rescheduled": lambda db, message_id: Operator(db).reschedule(message_id).result,
    "edited": lambda db, message_id: (
        Outbox().on(db).edit(message_id, owner="account-7", payload={"n": 1}, require_transaction=False)
    ),
}


@pytest.mark.parametrize("result", ACTS)
async def test_a_backlog_goes_on_although_a_claim_misses_a_message_that_has_changed_meanwhile(
    dsn: str, db: psycopg.Connection, connect: Connect, result: str
) -> None:
    """The claim gets one message less than it has asked for, which looks as if nothing else were due."""
    delivered: list[int] = []
    gate = connect()
    with login(dsn, "pgoutbox_worker") as its_dsn:
        outbox = Outbox(settings_for(its_dsn, concurrency=10, batch_size=10))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            delivered.append(message.id)

        ids = [enqueue(db, owner="account-7") for _ in range(40)]
        races.stop_reads(db, "message_live")
        async with running(Worker(outbox)):
            for _ in range(6):  # The first trips only look for lapsed attempts.
                gate.execute("SELECT pg_advisory_xact_lock(1)")
                await until(lambda: db.execute(CLAIM_WAITS).rowcount > 0)
                assert str(ACTS[result](db, ids[0])) == result
                gate.rollback()
            await until(lambda: {*delivered} == {*ids})


async def test_a_claim_that_began_before_an_edit_does_not_hand_over_the_old_payload(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    delivered: list[object] = []
    gate = connect()
    with login(dsn, "pgoutbox_worker") as its_dsn:
        outbox = Outbox(settings_for(its_dsn))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            delivered.append(message.payload)

        message_id = enqueue(db, owner="account-7")
        races.stop_reads(db, "message_live")
        async with running(Worker(outbox)):
            for number in range(4):  # The first trips only look for lapsed attempts.
                gate.execute("SELECT pg_advisory_xact_lock(1)")
                await until(lambda: db.execute(CLAIM_WAITS).rowcount > 0)
                edit = outbox.on(db).edit(message_id, owner="account-7", payload=number, require_transaction=False)
                assert edit is EditResult.EDITED
                gate.rollback()
            await until(lambda: len(delivered) > 0)
    assert delivered == [3]
