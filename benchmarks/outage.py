"""The timeline of a host that dies among live hosts, and recovers: python -m benchmarks.outage

It prints, with and without circuit breakers: the attempts that the outage used up, the recovery time, and the
latency of the other messages from enqueue to sent, before, during and after the outage. Everything is real, and in
one process: an embedded PostgreSQL, a worker, two hosts on this machine. Only the ratios are meaningful.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, replace

import psycopg
from psycopg.rows import TupleRow

from pgoutbox import Context, Message, NewMessage, Outbox, RetryPolicy, migrate
from pgoutbox.embedded import embedded_server
from pgoutbox.settings import load_settings
from pgoutbox.worker import Worker
from tests.support.line_server import Line, LineHost, LineTransport, Mood, line_host

_TICK_SECONDS = 0.05  # The producer's interval: messages due since the last tick are enqueued at once.
_LOOK_SECONDS = 0.1  # The polling interval, which is the resolution of the recovery time.
_TIMEOUT_SECONDS = 3.0
_COOLDOWN_SECONDS = 2.0


@dataclass(frozen=True)
class Load:
    """The rate and the duration of the messages; one in `mortal_every` is for the host that dies."""

    per_second: int
    seconds: float
    mortal_every: int


async def produce(
    connection: psycopg.AsyncConnection[TupleRow],
    outbox: Outbox,
    phase: str,
    load: Load,
    hosts: tuple[LineHost, LineHost],
) -> None:
    """Enqueue at this rate, independent of the worker."""
    good, mortal = hosts
    began_at = time.monotonic()
    made = 0
    while (elapsed := time.monotonic() - began_at) < load.seconds:
        due = int(load.per_second * elapsed)
        batch = [
            NewMessage(
                "line", {"phase": phase}, destination=(mortal if number % load.mortal_every == 0 else good).destination
            )
            for number in range(made, due)
        ]
        made = due
        if batch:
            await outbox.on(connection).enqueue_many(batch)
            await connection.commit()
        await asyncio.sleep(_TICK_SECONDS)


async def play(dsn: str, load: Load, *, breaker: bool, concurrency: int) -> None:
    """Run and print one timeline."""
    settings = load_settings(
        dsn=dsn,
        concurrency=concurrency,
        breaker={
            "enabled": breaker,
            "cooldown_seconds": _COOLDOWN_SECONDS,
            "max_cooldown_seconds": 2 * _COOLDOWN_SECONDS,
        },
    )
    outbox = Outbox(settings, transports=[LineTransport(timeout_seconds=_TIMEOUT_SECONDS)])

    @outbox.handler("line", retry=RetryPolicy(base=1, cap=4))
    async def line(message: Message, ctx: Context) -> Line:  # noqa: ARG001
        return Line(str(message.id))

    async with line_host() as good, line_host() as mortal, await psycopg.AsyncConnection.connect(dsn) as connection:
        hosts = good, mortal
        worker = Worker(outbox)
        running = asyncio.create_task(worker.run())
        await produce(connection, outbox, "warm", replace(load, seconds=2), hosts)
        await produce(connection, outbox, "before", load, hosts)
        mortal.mood = Mood.HANG
        await produce(connection, outbox, "during", load, hosts)
        mortal.mood = Mood.TAKE
        mortal.hang_up()
        returned_at = time.monotonic()
        recovery = asyncio.create_task(until_delivered(dsn, mortal, returned_at))
        await produce(connection, outbox, "after", load, hosts)
        first, last = await recovery
        rows = await times(connection, good)
        cursor = await connection.execute(
            "SELECT m.state, count(*), coalesce(sum(11 - (m.max_attempts - m.attempt_count) - 1), 0)"
            " FROM pgoutbox.message AS m WHERE m.destination = %s GROUP BY m.state ORDER BY m.state",
            [mortal.destination],
        )
        fates = await cursor.fetchall()
        worker.stop()
        await running
    say(f"\nwith{'' if breaker else 'out'} breakers")
    for state, count, spent in fates:
        say(f"  the host that died: {count} messages {state}, {spent} attempts used up by its outage")
    say(f"  it answered again: first message after {first:.1f} s, the last that had waited after {last:.1f} s")
    baseline = next(p99 for phase, _, p99, _ in rows if phase == "before")
    for phase, p50, p99, count in sorted(rows, key=lambda row: ("before", "during", "after").index(row[0])):
        ratio = p99 / baseline
        say(f"  the others {phase:>6}: {count} sent, p50 {p50:6.1f} ms, p99 {p99:6.1f} ms, {ratio:4.1f} x before")


async def until_delivered(dsn: str, mortal: LineHost, returned_at: float) -> tuple[float, float]:
    """Return the time from the host's return to its first message, and to the last of the waiting messages."""
    first = None
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while True:
            cursor = await connection.execute(
                "SELECT count(*) FILTER (WHERE state IN ('pending', 'sending')),"
                " count(*) FILTER (WHERE state = 'sent')"
                " FROM pgoutbox.message WHERE destination = %s AND payload ->> 'phase' = 'during'",
                [mortal.destination],
            )
            ((waiting, sent),) = await cursor.fetchall()
            if first is None and sent:
                first = time.monotonic() - returned_at
            if not waiting:
                return first or 0.0, time.monotonic() - returned_at
            await asyncio.sleep(_LOOK_SECONDS)


async def times(connection: psycopg.AsyncConnection[TupleRow], good: LineHost) -> list[tuple[str, float, float, int]]:
    """Return p50 and p99 of the latency from enqueue to sent in milliseconds, for each phase, when all are sent."""
    while True:
        cursor = await connection.execute(
            "SELECT payload ->> 'phase',"
            " percentile_cont(0.5) WITHIN GROUP (ORDER BY 1000 * extract(epoch FROM finished_at - created_at)),"
            " percentile_cont(0.99) WITHIN GROUP (ORDER BY 1000 * extract(epoch FROM finished_at - created_at)),"
            " count(*)"
            " FROM pgoutbox.message WHERE destination = %s AND payload ->> 'phase' <> 'warm'"
            " GROUP BY 1 HAVING bool_and(state = 'sent')",
            [good.destination],
        )
        rows = await cursor.fetchall()
        await connection.commit()
        if len(rows) == 3:
            return [(phase, float(p50), float(p99), count) for phase, p50, p99, count in rows]
        await asyncio.sleep(_LOOK_SECONDS)


def say(text: str) -> None:
    """Print."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run both timelines on one server."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outage", description="The timeline of a dead host.")
    parser.add_argument("--per-second", type=int, default=500, help="messages enqueued per second")
    parser.add_argument("--seconds", type=float, default=20, help="duration of each of the three phases, in seconds")
    parser.add_argument(
        "--mortal-every", type=int, default=100, help="one in this many messages is for the host that dies"
    )
    parser.add_argument("--concurrency", type=int, default=50, help="number of concurrent sends")
    arguments = parser.parse_args()
    load = Load(arguments.per_second, arguments.seconds, arguments.mortal_every)
    with embedded_server(durable=False) as server:
        migrate.upgrade(server.dsn)
        for breaker in (True, False):
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                connection.execute("TRUNCATE pgoutbox.message, pgoutbox.breaker")
            asyncio.run(play(server.dsn, load, breaker=breaker, concurrency=arguments.concurrency))


if __name__ == "__main__":
    main()
