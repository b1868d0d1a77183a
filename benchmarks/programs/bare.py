"""The limit of the drain: only pgoutbox's own claim and finish statements, in a loop on one connection.

It calls no handler and collects no outcome. Like the worker under load, it claims fresh messages from the last due
time, and from the beginning when a claim is not full.
"""

from __future__ import annotations

import os
import sys

import psycopg

from benchmarks.options import CLAIM_PARAMETERS
from benchmarks.programs.lifeline import Meter, hold_lifeline
from pgoutbox.database import sql
from pgoutbox.database.store import BEGINNING, ClaimedRow, Place, sent_fence
from pgoutbox.database.worker_connection import session_parameters
from pgoutbox.message import FencingToken
from pgoutbox.settings import load_settings

AVAILABLE_AT = ClaimedRow._fields.index("available_at")
CLAIMED_AT = ClaimedRow._fields.index("claimed_at")


def main(batch_size: int) -> int:
    hold_lifeline()
    settings = load_settings()
    meter = Meter()
    with psycopg.connect(os.environ["PGOUTBOX_DSN"], autocommit=True) as connection:
        connection.execute(sql.PREPARE_SESSION, session_parameters(settings), prepare=False)
        cursor = connection.cursor(binary=True)
        place = BEGINNING
        ended: list[object] = []
        while True:
            meter.begin()
            cursor.execute(
                sql.CLAIM_FRESH,
                {
                    **CLAIM_PARAMETERS,
                    "total": batch_size,
                    **place._asdict(),
                },
                prepare=True,
            )
            rows = cursor.fetchall()
            if not rows and place == BEGINNING:
                break
            last = max((row[AVAILABLE_AT], row[0]) for row in rows) if len(rows) == batch_size else None
            place = Place(*last) if last else BEGINNING
            if rows:
                parameters = {
                    **sent_fence(
                        [FencingToken(row[0], 1, row[CLAIMED_AT]) for row in rows], CLAIM_PARAMETERS["worker"]
                    ),
                    "ended_claims": ended,
                    "lock_timeout": "20ms",
                }
                ended = [rows[0][CLAIMED_AT]]
                cursor.execute(sql.FINISH_SENT_IF_HELD, parameters, prepare=True)
                meter.handled_count += len(cursor.fetchall())
                meter.end()
    meter.report()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
