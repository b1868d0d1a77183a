"""Retention: the effect on enqueues and finishes while a million old messages are deleted, by partition or by row."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import psycopg

from benchmarks.options import TOPIC, Options, rotated
from benchmarks.processes import child
from benchmarks.report import Result, Table, Verdict, median
from benchmarks.server import Server, settle_all
from pgoutbox.database import operator_connection
from pgoutbox.operations import Operator
from pgoutbox.settings import load_settings

_RATE = 500
_NOTHING = "no deletion"
_DROP = "one partition dropped"
_BLOCKED = "the same behind a reader of 3 s"
_ROWS = "row by row"
_VARIANTS = (_NOTHING, _DROP, _BLOCKED, _ROWS)
_READER_SECONDS = 3.0

_OLD_PARTITION = """
DO $$
BEGIN
    EXECUTE format(
        'CREATE TABLE pgoutbox.message_done_20260101 PARTITION OF pgoutbox.message_done FOR VALUES FROM (%L) TO (%L)',
        date_trunc('day', now(), 'UTC') - interval '40 days', date_trunc('day', now(), 'UTC') - interval '39 days'
    );
    ALTER TABLE pgoutbox.message_done_20260101 OWNER TO pgoutbox_owner; -- As are those that the outbox makes.
END
$$
"""
_OLD_MESSAGES = """
INSERT INTO pgoutbox.message_done (
    created_at, available_at, claimed_at, finished_at, attempt_count, state, topic, worker, payload
)
SELECT t.at, t.at, t.at, t.at, 1, 'sent', CASE WHEN n = 1 AND %(keeps_one)s::boolean THEN 'audit' ELSE %(topic)s END,
    'benchmark', jsonb_build_object('user_id', n)
FROM generate_series(1, %(count)s::integer) AS n
CROSS JOIN LATERAL (
    SELECT date_trunc('day', now(), 'UTC') - interval '40 days' + n * interval '24 hours' / (%(count)s + 1) AS at
) AS t
"""


@dataclass(frozen=True, slots=True)
class _Measured:
    """Milliseconds of each transaction, for enqueues also from their scheduled time; and seconds until the end."""

    enqueues: list[float]
    from_due: list[float]
    finishes: list[float]
    seconds: float


def run(server: Server, options: Options) -> Result:
    """Enqueue 500 a second, finish them, and prune by the rules at the same time."""
    rounds = min(options.rounds, 3)
    result = Result("retention", {"old messages": options.retention_messages, "rate": f"{_RATE}/s", "rounds": rounds})
    found: dict[str, list[_Measured]] = defaultdict(list)
    for turn in range(rounds):
        for variant in rotated(_VARIANTS, turn):
            found[variant].append(_measure(server, options, variant))
    result.tables.append(
        Table(
            f"{options.retention_messages:,} old messages are deleted (milliseconds, medians of the rounds)",
            (
                "what", "seconds", "enqueue p99", "longest", "p99 from due", "finish p99", "longest",
            ),
            [
                (
                    variant,
                    median([m.seconds for m in found[variant]]),
                    median([_p99(m.enqueues) for m in found[variant]]),
                    median([max(m.enqueues) for m in found[variant]]),
                    median([_p99(m.from_due) for m in found[variant]]),
                    median([_p99(m.finishes) for m in found[variant]]),
                    median([max(m.finishes) for m in found[variant]]),
                )
                for variant in _VARIANTS
            ],
        )
    )  # fmt: skip
    for variant in _VARIANTS:
        result.samples[f"longest enqueue, {variant}"] = [max(m.enqueues) for m in found[variant]]
        result.samples[f"longest finish, {variant}"] = [max(m.finishes) for m in found[variant]]
    longest = {variant: median([max(m.enqueues) for m in found[variant]]) for variant in _VARIANTS}
    seconds = {variant: median([m.seconds for m in found[variant]]) for variant in _VARIANTS}
    result.verdicts += [
        Verdict("longest enqueue, partition dropped / no deletion", longest[_DROP] / longest[_NOTHING], 3, "at most"),
        Verdict("seconds, row by row / partition", seconds[_ROWS] / seconds[_DROP], 10, "at least"),
    ]
    return result


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def _measure(server: Server, options: Options, variant: str) -> _Measured:
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_OLD_PARTITION)
        connection.execute(
            _OLD_MESSAGES,
            {"topic": TOPIC, "count": options.retention_messages, "keeps_one": variant == _ROWS},
        )
        for state in ("sent", "skipped", "cancelled"):
            Operator(connection).set_retention("*", state, timedelta(days=30))
        Operator(connection).set_retention("audit", "sent", None if variant == _ROWS else timedelta(days=30))
        settle_all(connection)
        with child("steady", "finish", dsn=dsn) as finisher, child("steady", "enqueue", dsn=dsn) as producer:
            for started in (producer, finisher):
                started.read()
            time.sleep(options.retention_seconds / 2)
            took = _let_go(dsn, variant)
            time.sleep(options.retention_seconds / 2)
            answers = []
            for started in (producer, finisher):
                started.interrupt()
                answers.append({name: cast("list[float]", times) for name, times in started.read().items()})
    return _Measured(answers[0]["milliseconds"], answers[0]["from_due"], answers[1]["milliseconds"], took)


def _let_go(dsn: str, variant: str) -> float:
    if variant == _NOTHING:
        return 0.0
    began_at = time.monotonic()
    with contextlib.ExitStack() as stack:
        if variant == _BLOCKED:
            reader = stack.enter_context(psycopg.connect(dsn))
            reader.execute("SELECT count(*) FROM (SELECT FROM pgoutbox.message_done LIMIT 1) AS m")
            timer = threading.Timer(_READER_SECONDS, reader.rollback)
            timer.start()
            stack.callback(timer.join)
        with operator_connection.connect(load_settings(dsn=dsn)) as connection:
            Operator(connection).prune_by_retention()
    return time.monotonic() - began_at
