"""Connections that break at any statement of a worker: each message is handed over once, and none waits for a lease."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime, timedelta
from itertools import cycle
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from pgoutbox import Context, Message, MultiWorker, Outbox, Permanent, RetryPolicy, Transient, Worker
from pgoutbox.operations import Operator
from tests.support.cuts import cuts
from tests.support.held import Held
from tests.support.outbox_actions import enqueue, rows_of, running, settings_for
from tests.support.proxy import Moment, proxy_to
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from tests.conftest import Connect

MOMENTS = tuple(Moment)
LONG = {"lease_seconds": 600, "poll_interval_seconds": 3600}


@pytest.mark.parametrize("deletes", [False, True], ids=["kept", "deleted as they are sent"])
@pytest.mark.parametrize("is_one_of_many", [False, True], ids=["one database", "one of many"])
async def test_messages_are_handed_over_once_although_the_connection_breaks_again_and_again(
    dsn: str, db: psycopg.Connection, tmp_path: Path, deletes: bool, is_one_of_many: bool
) -> None:
    if deletes:
        Operator(db).set_retention("*", "sent", timedelta())
    handed_over: Counter[int] = Counter()
    cut_count, left = 0, 10
    with proxy_to(dsn, tmp_path) as proxy:

        def cut(application: str, text: str) -> None:
            """Break the session that claims and finishes again and again, in every way in turn."""
            nonlocal cut_count, left
            left -= application == "pgoutbox claim"
            if not left:
                proxy.cut_at(1, MOMENTS[cut_count % len(MOMENTS)])
                cut_count += 1
                left = 15 + cut_count % 13  # Each statement of a trip has its turn.

        settings = settings_for(proxy.dsn, batch_size=5, concurrency=5, **LONG)
        if is_one_of_many:  # Then the session that is broken listens, too.
            settings = settings.model_copy(update={"dsn": None, "dsns": SecretStr(f"one {proxy.dsn}")})
        outbox = Outbox(settings)

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            handed_over[message.id] += 1

        ids = [enqueue(db, coalesce_key=f"k{n}" if n % 2 else None) for n in range(300)]
        worker = MultiWorker(outbox) if is_one_of_many else Worker(outbox)
        async with running(worker):
            proxy.on_statement = cut
            await until(lambda: {row.state for row in rows_of(db, *ids)} <= {"sent"})
    assert handed_over == dict.fromkeys(ids, 1)
    assert len(rows_of(db)) == (0 if deletes else len(ids))
    if is_one_of_many:
        return
    counts = {str(event): count for event, count in worker.telemetry.counts.items()}
    assert counts["claim_lost"] > 0
    lost_count = counts.get("lease_lost", 0)
    # A deletion without an answer counts as a lost lease.
    assert counts["sent"] == len(ids) - lost_count
    assert deletes or lost_count == 0


async def test_a_claim_whose_next_statement_is_refused_costs_no_lease(
    dsn: str, db: psycopg.Connection, connect: Connect, tmp_path: Path
) -> None:
    """The worker looks for newer messages after the commit of a claim, and a session locks the table in between."""
    other = connect()
    handed_over: Counter[int] = Counter()
    with proxy_to(dsn, tmp_path) as proxy:
        outbox = Outbox(settings_for(proxy.dsn, lock_timeout_seconds=0.2, **LONG))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            handed_over[message.id] += 1

        moments: list[str] = []

        def lock(application: str, text: str) -> None:
            if application != "pgoutbox claim":
                return
            if moments:
                moments.append("refused")
            elif db.execute("SELECT FROM pgoutbox.in_flight_view").rowcount:
                other.execute("LOCK TABLE pgoutbox.key_head")
                moments.append("locked")

        async with running(Worker(outbox)):
            await until(lambda: proxy.open_count("pgoutbox listen") == 1)
            proxy.on_statement = lock
            message_id = enqueue(db, coalesce_key="k")
            await until(lambda: "refused" in moments)
            other.rollback()
            await until(lambda: {row.state for row in rows_of(db)} == {"sent"})
    assert handed_over == {message_id: 1}


async def test_claims_beside_the_finish_of_a_lost_attempt_are_not_released(dsn: str, db: psycopg.Connection) -> None:
    """The worker asks what became of the lost attempt, and has claimed other messages meanwhile."""
    handed_over: Counter[int] = Counter()
    outbox = Outbox(settings_for(dsn, batch_size=4, concurrency=4, **LONG))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        handed_over[message.id] += 1
        if message.id in lost:
            db.execute("UPDATE pgoutbox.message_live SET worker = 'another' WHERE id = %s", [message.id])

    ids = [enqueue(db) for _ in range(200)]
    lost = set(ids[::5])
    async with running(worker := Worker(outbox)):
        await until(lambda: {row.state for row in rows_of(db, *ids) if row.id not in lost} == {"sent"})
    assert handed_over == dict.fromkeys(ids, 1)
    counts = {str(event): count for event, count in worker.telemetry.counts.items()}
    assert not counts.get("claim_lost")


def test_only_messages_that_were_handed_over_are_deleted_as_they_are_sent_after_any_cut(
    dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    handed_over: Counter[int] = Counter()
    ids: dict[str, int] = {}

    def run_once(dsn: str) -> None:
        outbox = Outbox(settings_for(dsn))

        @outbox.handler("sent")
        async def send(message: Message, ctx: Context) -> None:
            handed_over[message.id] += 1

        @outbox.handler("pending", retry=RetryPolicy.steps(3600, jitter=0))
        async def put_off(message: Message, ctx: Context) -> Transient:
            return Transient("busy")

        @outbox.handler("failed")
        async def refuse(message: Message, ctx: Context) -> Permanent:
            return Permanent("refused")

        asyncio.run(Worker(outbox).run_once())

    def states() -> dict[int, str]:
        return {row.id: row.state for row in rows_of(db, *ids.values())}

    Operator(db).set_retention("*", "sent", timedelta())
    with proxy_to(dsn, tmp_path) as proxy:

        def play(name: str) -> None:
            db.execute("DELETE FROM pgoutbox.message_live")  # Later runs do not see what a cut has left.
            ids.update({topic: enqueue(db, topic, coalesce_key=name) for topic in ("sent", "pending", "failed")})
            run_once(proxy.dsn)

        deleted_count = 0
        for cut in cuts(proxy, play, at_most=12):
            deleted = {*ids.values()} - states().keys()
            assert deleted <= {ids["sent"]} & handed_over.keys(), cut
            deleted_count += len(deleted)
            run_once(dsn)
            assert states() == {ids["pending"]: "pending", ids["failed"]: "failed"}, cut
            assert handed_over[ids["sent"]] == 1, cut
        assert deleted_count > 0


# The lease of a worker that nobody can reach.
SHORTEN = """
    UPDATE pgoutbox.claim SET lease_expires_at = clock_timestamp() + interval '0.2 s'
    WHERE worker = %s AND lease_expires_at > now() + interval '10 s'
    RETURNING lease_expires_at
"""


async def test_a_lease_is_renewed_between_cuts_and_another_attempt_begins_after_its_end(
    dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    moments, cut_count, left = cycle(Moment), 0, 1
    with proxy_to(dsn, tmp_path) as proxy:

        def cut(application: str, text: str) -> None:
            nonlocal cut_count, left
            left -= application == "pgoutbox lease"
            if not left:
                proxy.cut_at(1, next(moments))
                cut_count += 1
                left = 8 + cut_count % 7  # A connection and a renewal. The next cut is at any statement after that.

        def cut_each(application: str, text: str) -> None:
            proxy.cut_at(1, Moment.BEFORE)

        worker = Held(proxy.dsn, lease_seconds=60, renew_seconds=0.1, shutdown_grace_seconds=0)
        other = Held(dsn, poll_interval_seconds=0.1, shutdown_grace_seconds=0)
        renewed = "SELECT FROM pgoutbox.claim WHERE lease_expires_at > claimed_at + interval '61 s'"
        begun = "SELECT claimed_at FROM pgoutbox.message WHERE attempt_count = 2"
        lease_ends: list[datetime] = []

        def has_begun_again() -> bool:
            lease_ends.extend(lease_end for (lease_end,) in db.execute(SHORTEN, [worker.worker.name]).fetchall())
            return db.execute(begun).rowcount == len(ids)

        async with running(worker.worker):
            ids = [enqueue(db) for _ in range(3)]
            await worker.until_begun(*ids)
            async with running(other.worker):
                proxy.on_statement = cut
                await until(lambda: cut_count > 21)
                assert db.execute(renewed).rowcount > 0
                proxy.on_statement = cut_each
                await until(has_begun_again)
                proxy.on_statement = lambda application, text: None
                begun_ats = [claimed_at for (claimed_at,) in db.execute(begun).fetchall()]
        assert max(lease_ends) <= min(begun_ats)
