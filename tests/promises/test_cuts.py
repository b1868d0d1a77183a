"""A connection that is cut at any statement of a worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime, timedelta
from itertools import cycle
from typing import TYPE_CHECKING

from pgoutbox import Context, Message, Outbox, Permanent, RetryPolicy, Transient, Worker
from pgoutbox.operations import Operator
from tests.support.cuts import cuts
from tests.support.held import Held
from tests.support.outbox_actions import enqueue, rows_of, running, settings_for
from tests.support.proxy import Moment, proxy_to
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg


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
