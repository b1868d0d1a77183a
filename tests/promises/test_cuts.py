"""A connection that is cut at any statement of a worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

from pgoutbox import Context, Message, Outbox, Permanent, RetryPolicy, Transient, Worker
from pgoutbox.operations import Operator
from tests.support.cuts import cuts
from tests.support.outbox_actions import enqueue, rows_of, settings_for
from tests.support.proxy import proxy_to

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
