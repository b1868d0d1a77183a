"""Tests fair shares: keys take turns, and no key has more in flight than its limit."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pgoutbox import Context, Message, Outbox
from pgoutbox.worker import Worker
from tests.support.outbox_actions import settings_for

if TYPE_CHECKING:
    import psycopg


def put(db: psycopg.Connection, key: str | None, count: int = 1, *, topic: str = "greet") -> None:
    db.execute(
        "SELECT pgoutbox.enqueue(%s, to_jsonb(n), fair_key => %s) FROM generate_series(1, %s) AS n", [topic, key, count]
    )


async def test_a_small_tenant_waits_for_one_round(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=5, batch_size=5))
    begun: list[str] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        ((key,),) = db.execute("SELECT fair_key FROM pgoutbox.message WHERE id = %s", [message.id]).fetchall()
        begun.append(key)

    put(db, "big", 600)
    put(db, "small", 2)
    await Worker(outbox).run_once()
    assert Counter(begun) == {"big": 600, "small": 2}
    assert max(place for place, key in enumerate(begun) if key == "small") < 30
