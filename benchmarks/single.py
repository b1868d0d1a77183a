"""enqueue_one: transactions per second of one message each from one Python process, sync and async.

The limit is the same loops with a plain INSERT. No worker runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable

import psycopg

from benchmarks.options import TOPIC, Options, rotated
from benchmarks.report import Result, Table, median, ratio_of_rounds
from benchmarks.server import Server, empty_outbox, settle
from pgoutbox.outbox import Outbox
from pgoutbox.settings import load_settings

_INSERT = "INSERT INTO pgoutbox.message (topic, payload) VALUES (%s, %s::jsonb)"
_CONNECTIONS = 10

_Sync = psycopg.Connection[tuple[object, ...]]
_Async = psycopg.AsyncConnection[tuple[object, ...]]


def run(server: Server, options: Options) -> Result:
    """Alternate the variants; every measurement starts with empty tables."""
    outbox = Outbox(load_settings())
    seconds = options.single_seconds

    def sync_enqueue(connection: _Sync, number: int) -> None:
        outbox.on(connection).enqueue(TOPIC, {"user_id": number})

    def sync_insert(connection: _Sync, number: int) -> None:
        connection.execute(_INSERT, (TOPIC, json.dumps({"user_id": number})))

    async def async_enqueue(connection: _Async, number: int) -> None:
        await outbox.on(connection).enqueue(TOPIC, {"user_id": number})

    async def async_insert(connection: _Async, number: int) -> None:
        await connection.execute(_INSERT, (TOPIC, json.dumps({"user_id": number})))

    many = f"async, {_CONNECTIONS} connections"
    variants: dict[tuple[str, str], Callable[[str], float]] = {
        ("sync", "enqueue"): lambda dsn: _sync_rate(dsn, sync_enqueue, seconds),
        ("sync", "INSERT"): lambda dsn: _sync_rate(dsn, sync_insert, seconds),
        ("async", "enqueue"): lambda dsn: asyncio.run(_async_rate(dsn, async_enqueue, seconds, 1)),
        ("async", "INSERT"): lambda dsn: asyncio.run(_async_rate(dsn, async_insert, seconds, 1)),
        (many, "enqueue"): lambda dsn: asyncio.run(_async_rate(dsn, async_enqueue, seconds, _CONNECTIONS)),
        (many, "INSERT"): lambda dsn: asyncio.run(_async_rate(dsn, async_insert, seconds, _CONNECTIONS)),
    }
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as operator:
        for round_number in range(options.rounds):
            for name in rotated(list(variants), round_number):
                empty_outbox(operator)
                settle(operator, "pgoutbox.message_live")
                rates[name].append(variants[name](dsn))
    rows = [
        (
            f"{connection}, {what}",
            median(values),
            min(values),
            max(values),
            ratio_of_rounds(values, rates[connection, "INSERT"]),
        )
        for (connection, what), values in sorted(rates.items(), key=lambda item: list(variants).index(item[0]))
    ]
    columns = ("connection, statement", "transactions/s", "slowest", "fastest", "of INSERT")
    return Result(
        "enqueue_one",
        settings={"seconds": seconds, "rounds": options.rounds},
        tables=[Table("transactions of one message per second", columns, rows)],
        samples={", ".join(name): values for name, values in rates.items()},
    )


def _sync_rate(dsn: str, enqueue: Callable[[_Sync, int], None], seconds: float) -> float:
    with psycopg.connect(dsn) as connection:
        for number in range(10):  # Warm up until the statement is prepared.
            enqueue(connection, number)
            connection.commit()
        began_at = time.perf_counter()
        count = 0
        while (now := time.perf_counter()) < began_at + seconds:
            enqueue(connection, count)
            connection.commit()
            count += 1
    return count / (now - began_at)


async def _async_rate(
    dsn: str, enqueue: Callable[[_Async, int], Awaitable[None]], seconds: float, connections: int
) -> float:
    async with contextlib.AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(await psycopg.AsyncConnection.connect(dsn)) for _ in range(connections)
        ]

        async def produce(connection: _Async, until: float, least: int) -> int:
            count = 0
            while time.perf_counter() < until or count < least:
                await enqueue(connection, count)
                await connection.commit()
                count += 1
            return count

        await asyncio.gather(*(produce(connection, 0.0, 10) for connection in opened))
        began_at = time.perf_counter()
        counts = await asyncio.gather(*(produce(connection, began_at + seconds, 0) for connection in opened))
        return sum(counts) / (time.perf_counter() - began_at)
