"""Tests turns for claims from one backlog: two choose at once, so that they do not skip each other's rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgoutbox.database import sql
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.message import State
from pgoutbox.worker import Worker
from tests.support.outbox_actions import enqueue, rows_of, settings_for
from tests.support.races import ADVISORY_LOCKS, until_blocked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pgoutbox import Context, Message, Outbox
    from tests.conftest import Connect

TURN = {"queue": "default"}


@pytest.fixture
async def link(dsn: str) -> AsyncIterator[WorkerConnection]:
    link = WorkerConnection(dsn, settings_for(dsn), purpose="test")
    yield link
    await link.close()


def turns_of(observer: psycopg.Connection, connection: psycopg.Connection) -> int:
    """Count the turns of a session."""
    held = f"SELECT count(*) FROM {ADVISORY_LOCKS} WHERE l.granted AND l.pid = %s"
    ((count,),) = observer.execute(held, [connection.info.backend_pid]).fetchall()
    return int(count)


def take_both_turns(connect: Connect) -> list[psycopg.Connection]:
    """Open two sessions that hold one turn each. If there were a single one, these two would wait for the same."""
    holders: list[psycopg.Connection] = []
    while len(holders) < 2:
        if (session := connect()).info.backend_pid % 2 == 0:
            holders.append(session)
    for holder in holders:
        holder.execute(sql.TAKE_TURN, TURN)
    return holders


def test_two_claims_choose_at_once_and_the_next_waits_for_one_of_them(db: psycopg.Connection, connect: Connect) -> None:
    holders = take_both_turns(connect)
    third, elsewhere = connect(), connect()
    assert [turns_of(db, holder) for holder in holders] == [1, 1]
    elsewhere.execute(sql.TAKE_TURN, {"queue": "another"})
    assert turns_of(db, elsewhere) == 1
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(third.execute, sql.TAKE_TURN, TURN)
        until_blocked(db, third, taking)
        for holder in holders:
            holder.rollback()
        taking.result()
    assert turns_of(db, third) == 1


@pytest.mark.slow
def test_a_claim_continues_without_a_turn(db: psycopg.Connection, connect: Connect) -> None:
    """Only speed depends on a turn, so a session that keeps one on purpose stops nobody."""
    take_both_turns(connect)
    third = connect()
    third.execute("SET lock_timeout = 0")
    third.execute("SET statement_timeout = '20s'")  # A wait without its own limit would end with this one.
    third.execute(sql.TAKE_TURN, TURN)
    assert turns_of(db, third) == 0
    # The limit of this wait is not the limit of the claim.
    assert third.execute("SELECT current_setting('lock_timeout')").fetchall() == [("0",)]


@pytest.mark.slow
@pytest.mark.parametrize("is_pooled", [False, True], ids=["direct", "pooled"])
async def test_claims_of_a_backlog_take_turns_and_others_do_not(
    dsn: str,
    outbox: Outbox,
    db: psycopg.Connection,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    is_pooled: bool,
) -> None:
    take_both_turns(connect)
    claims: list[bool] = []
    fetch = WorkerConnection.fetch

    async def noted(self: WorkerConnection, statement: Any, parameters: Any, *, first: Any = None) -> Any:  # noqa: ANN401 - passed on
        if statement in (sql.CLAIM_FRESH, sql.CLAIM_RETRIES):
            claims.append(first is not None)
        return await fetch(self, statement, parameters, first=first)

    monkeypatch.setattr(WorkerConnection, "fetch", noted)

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        """Do nothing."""

    settings = settings_for(dsn, batch_size=2, listen=not is_pooled)
    enqueue(db)
    await Worker(outbox, settings=settings).run_once()
    assert not any(claims)
    for _ in range(5):
        enqueue(db)
    await Worker(outbox, settings=settings).run_once()
    assert any(claims)
    assert {row.state for row in rows_of(db)} == {State.SENT}


# --- one transaction in one message -----------------------------------------------------------------------------------


async def test_the_first_statements_run_in_the_same_transaction_and_are_prepared_once(link: WorkerConnection) -> None:
    first = ("SELECT set_config('my.turn', %(turn)s::text, true)", {"turn": "taken"})
    asked = "SELECT current_setting('my.turn', true)"
    prepared = "SELECT count(*) FROM pg_prepared_statements"
    counts = []
    for _ in range(2):
        assert await link.fetch(asked, {}, first=first) == [("taken",)]
        assert await link.fetch(asked, {}) == [("",)]
        counts += await link.fetch(prepared, {})
    assert counts == [(5,), (5,)]  # BEGIN, the two statements, COMMIT, and this query.


async def test_a_failed_transaction_is_rolled_back_and_the_next_one_is_intact(link: WorkerConnection) -> None:
    first = ("SELECT 1 / %(divisor)s::integer", {"divisor": 1})
    asked = "SELECT current_setting('transaction_isolation')"
    assert await link.fetch(asked, {}, first=first) == [("read committed",)]
    for divided, error in (
        ({"divisor": 0}, psycopg.errors.DivisionByZero),
        ({"divisor": "none"}, psycopg.errors.InvalidTextRepresentation),
    ):
        with pytest.raises(error):
            await link.fetch(asked, {}, first=(first[0], divided))
        assert await link.fetch("SELECT pg_current_xact_id_if_assigned()", {}) == [(None,)]
        assert await link.fetch(asked, {}, first=first) == [("read committed",)]
    for _ in range(2):  # A statement that failed to prepare leaves no name behind for the next time.
        with pytest.raises(psycopg.errors.UndefinedTable):
            await link.fetch("SELECT FROM nowhere", {}, first=first)
    assert await link.fetch(asked, {}, first=first) == [("read committed",)]


@pytest.mark.parametrize("is_pooled", [False, True], ids=["direct", "pooled"])
async def test_a_transaction_writes_nothing_if_the_default_is_read_only(
    dsn: str, db: psycopg.Connection, is_pooled: bool
) -> None:
    """Otherwise claims with a turn would succeed while others fail, and an outage would begin and end with each of
    them."""
    db.execute(f"ALTER DATABASE {db.info.dbname} SET default_transaction_read_only = on".encode())
    link = WorkerConnection(dsn, settings_for(dsn, listen=not is_pooled), purpose="test")
    try:
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            await link.fetch("DELETE FROM pgoutbox.message_live", {}, first=(sql.TAKE_TURN, TURN))
    finally:
        await link.close()
