"""The limit of the drain: only the statements of a worker's trips, in a loop on one connection.

A trip is one transaction, which finishes the messages of the last claim and claims the next ones. No handler is called
and no outcome is collected. Like the worker, it claims after the last row, and from the beginning when a claim is not
full.
"""

from __future__ import annotations

import asyncio
import os
import sys

import psycopg

from benchmarks import steps
from benchmarks.programs.lifeline import Meter, hold_lifeline
from pgoutbox.database import sql
from pgoutbox.database.round_trip import Pipeline
from pgoutbox.database.worker_connection import session_parameters
from pgoutbox.kernel.seams import Row
from pgoutbox.settings import load_settings


async def main(batch_size: int) -> int:
    hold_lifeline()
    meter = Meter()
    async with await psycopg.AsyncConnection.connect(os.environ["PGOUTBOX_DSN"], autocommit=True) as connection:
        await connection.execute(sql.PREPARE_SESSION, session_parameters(load_settings()), prepare=False)
        trips = Pipeline(connection, prepares=True)
        held: list[Row] = []
        after: Row | None = None
        while True:
            meter.begin()
            finishing = steps.finish(held) if held else []
            answers = await trips.fetch([*finishing, steps.claim(batch_size, after=after)])
            if held:
                ((count,),) = answers[0]
                meter.handled_count += count
                meter.end()
            held = answers[-1]
            if not held and after is None:
                break
            after = steps.last_of(held) if len(held) == batch_size else None
    meter.report()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]))))
