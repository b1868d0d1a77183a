"""Queues with weights share a worker in their proportion, and an empty one leaves its share to the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, Settings, Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg


@pytest.mark.parametrize("kind", ["plain", "ordered"])
@pytest.mark.parametrize(
    ("queues", "counts", "first", "shares"),
    [
        (["high:3", "low:1"], {"low": 100, "high": 100}, 80, {"high": 60, "low": 20}),
        (["high:16", "plain:4", "low:1"], {"plain": 100, "low": 100}, 50, {"plain": 40, "low": 10}),
        (["high", "low"], {"low": 20, "high": 20}, 20, {"high": 20}),
    ],
)
async def test_queues_share_a_worker_in_the_proportion_of_their_weights(
    dsn: str,
    db: psycopg.Connection,
    queues: Sequence[str],
    counts: dict[str, int],
    first: int,
    shares: dict[str, int],
    kind: str,
) -> None:
    outbox = Outbox(Settings(dsn=dsn, concurrency=1, batch_size=1))
    order: list[str] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        order.append(message.queue)

    for queue, count in counts.items():
        db.execute(
            "SELECT pgoutbox.enqueue('greet', '1', queue => %s, ordering_key => CASE WHEN %s THEN (n %% 3)::text END)"
            " FROM generate_series(1, %s) AS n",
            (queue, kind == "ordered", count),
        )
    await Worker(outbox, queues=queues).run_once()

    assert len(order) == sum(counts.values())
    found = {queue: order[:first].count(queue) for queue in dict.fromkeys(order[:first])}
    # The first claims are on their way before the worker knows which queues are empty.
    assert all(abs(found.get(queue, 0) - share) <= 2 for queue, share in shares.items()), found
