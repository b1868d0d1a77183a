"""Explain: the plan and the time of a claim of 200 from a backlog, with a long history."""

from __future__ import annotations

import re
import time

import psycopg
from psycopg import sql as composing

from benchmarks import steps
from benchmarks.options import CLAIM_PARAMETERS, TOPIC, Options
from benchmarks.report import Result, Table, median, percentile
from benchmarks.server import Server, load_pending, load_sent, settle
from pgoutbox.database import sql
from pgoutbox.database.worker_connection import session_parameters
from pgoutbox.kernel import statements
from pgoutbox.kernel.seams import Row
from pgoutbox.settings import load_settings

_BATCH_SIZE = CLAIM_PARAMETERS["total"]


def run(server: Server, options: Options) -> Result:
    """Show the generic plan of the worker's sessions, then time committed claims."""
    result = Result(
        "explain",
        settings={
            "finished": options.explain_finished_messages,
            "pending": options.pending_messages,
            "batch": _BATCH_SIZE,
        },
    )
    with server.database() as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            load_sent(connection, options.explain_finished_messages, topic=TOPIC)
            load_pending(connection, options.pending_messages, topic=TOPIC)
            settle(connection, "pgoutbox.message")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(sql.PREPARE_SESSION, session_parameters(load_settings()), prepare=False)
            result.texts.append(("claim.sql without ordering keys, rolled back", _plan_of_claim(connection)))
            from_beginning = _time_claims(connection, options.claims, with_position=False)
            with_position = _time_claims(connection, options.claims, with_position=True)
    result.tables.append(
        Table(
            f"milliseconds of a committed claim of {_BATCH_SIZE}, round trip and decoding included",
            ("claims", "median", "p90", "max"),
            [
                (f"{len(times)} {what}", median(times), percentile(times, 90), max(times))
                for what, times in (("from the beginning", from_beginning), ("from the last position", with_position))
            ],
        )
    )
    result.samples = {"from the beginning, ms": from_beginning, "from the last position, ms": with_position}
    return result


def _plan_of_claim(connection: psycopg.Connection[tuple[object, ...]]) -> str:
    """Run EXPLAIN on a prepared statement. With parameters in place the planner would fold them, unlike in a worker."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    statement = re.sub(r"%\((\w+)\)s", number, statements.CLAIM_WITHOUT_KEYS)
    values = composing.SQL(", ").join(composing.Literal(CLAIM_PARAMETERS[name]) for name in names)
    connection.execute(composing.SQL("PREPARE claim AS {}").format(composing.SQL(statement)))
    connection.execute("BEGIN")
    try:
        # TIMING off keeps the clock's own cost out of the plan's total. The counts and buffers are the same.
        explain = composing.SQL("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) EXECUTE claim ({})").format(values)
        rows = connection.execute(explain).fetchall()
    finally:
        connection.execute("ROLLBACK")
        connection.execute("DEALLOCATE claim")
    return "\n".join(str(line) for (line,) in rows)


def _time_claims(connection: psycopg.Connection[tuple[object, ...]], count: int, *, with_position: bool) -> list[float]:
    cursor = connection.cursor(binary=True)
    times = []
    after: Row | None = None
    for _ in range(count + 1):
        began_at = time.perf_counter()
        statement, parameters = steps.claim(_BATCH_SIZE, after=after)
        cursor.execute(statement, parameters, prepare=True)
        rows = cursor.fetchall()
        times.append(1e3 * (time.perf_counter() - began_at))
        if with_position and rows:
            after = steps.last_of(rows)
    return times[1:]
