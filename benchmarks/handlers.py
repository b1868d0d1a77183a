"""Handlers: the rate at which one process delivers a backlog, by the kind of handler; and fresh messages with retries.

The kinds are measured by the clock that all systems share. The lanes are measured with a backlog of due retries that
is older than the fresh messages, as after an outage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import psycopg

from benchmarks.clock import seconds_to_drain
from benchmarks.options import RETRY_NUMBER, TOPIC, Options, rotated
from benchmarks.processes import answer_of, program_command
from benchmarks.report import Result, Table, Verdict, median, ratio_of_rounds
from benchmarks.server import Server, empty_outbox, load_due_retries, load_pending, settle
from benchmarks.systems import asking
from pgoutbox.settings import load_settings

# The modes of `deliver` and their names in the tables.
KINDS: Mapping[str, str] = {
    "noop": "async, does nothing",
    "io": "async, 1 ms of waiting",
    "sync": "sync, in threads",
    "batch": "batch of up to 100",
    "transactional": "transactional, one INSERT",
    "transactional, 4 slots": "transactional, one INSERT, 4 slots",
}
# The same work without an outbox: the arguments of `bare_handlers`, and the names in the tables.
LIMITS: Mapping[str, tuple[tuple[str, str], str]] = {
    "bare threads": (("threads", "50"), "bare pool of 50 threads"),
    "bare transactions": (("transactions", "10"), "bare UPDATE, INSERT, COMMIT on 10 connections"),
    "bare transactions, 4": (("transactions", "4"), "bare UPDATE, INSERT, COMMIT on 4 connections"),
}
_TITLES = {**KINDS, **{name: title for name, (_, title) in LIMITS.items()}}
_TARGETS = (
    ("sync", "bare threads", 0.6),
    ("transactional", "bare transactions", 0.5),
    ("transactional, 4 slots", "bare transactions, 4", 0.3),
)
_SLOTS: Mapping[str, str] = {"transactional, 4 slots": "4"}
# Each message needs a transaction, and so a flush, so the rate is much lower.
_SHARES: Mapping[str, float] = dict.fromkeys(
    ("transactional", "transactional, 4 slots", "bare transactions", "bare transactions, 4"), 0.1
)
# Autovacuum leaves these statistics in a quiet hour, and few slots make many small claims.
_FORMER_CLAIM = """
INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
VALUES (now(), now(), 'default', 'former', '{1}')
"""
_UNFINISHED = "SELECT EXISTS (SELECT FROM pgoutbox.message_live)"
_TABLES = ("pgoutbox.message_live", "pgoutbox.key_head", "pgoutbox.queue")


def run(server: Server, options: Options) -> Result:
    """Alternate the kinds, round by round."""
    rates: dict[str, list[float]] = defaultdict(list)
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (number bigint NOT NULL)")
        connection.execute("CREATE TABLE job (id bigint PRIMARY KEY, done boolean NOT NULL DEFAULT false)")
        for round_number in range(options.rounds):
            for kind in rotated(list(_TITLES), round_number):
                count = int(options.drain_messages * _SHARES.get(kind, 1.0))
                connection.execute("TRUNCATE effect, job")
                seconds = (_seconds_bare if kind in LIMITS else _seconds)(dsn, connection, kind, count)
                rates[kind].append(count / seconds)
    rows = [
        (title, median(rates[kind]), min(rates[kind]), max(rates[kind]), ratio_of_rounds(rates[kind], rates["noop"]))
        for kind, title in _TITLES.items()
    ]
    return Result(
        "handlers",
        settings={
            "messages": options.drain_messages,
            **{f"messages, {_TITLES[kind]}": int(options.drain_messages * share) for kind, share in _SHARES.items()},
            "rounds": options.rounds,
            "concurrency": load_settings().concurrency,
        },
        tables=[Table("one process", ("handler", "messages/s", "slowest", "fastest", "of doing nothing"), rows)],
        verdicts=[
            Verdict(
                f"{_TITLES[kind]} / {_TITLES[limit]}", ratio_of_rounds(rates[kind], rates[limit]), target, "at least"
            )
            for kind, limit, target in _TARGETS
        ],
        samples=dict(rates),
    )


def _seconds(dsn: str, connection: psycopg.Connection[tuple[object, ...]], kind: str, count: int) -> float:
    """Return the seconds in which a worker delivers so many messages to this kind of handler."""
    empty_outbox(connection)
    load_pending(connection, count, topic=TOPIC)
    connection.execute(_FORMER_CLAIM)
    settle(connection, *_TABLES, "pgoutbox.claim")
    command = program_command("deliver", "work", kind.partition(",")[0])
    environment = {"PGOUTBOX_CONCURRENCY": _SLOTS[kind]} if kind in _SLOTS else {}
    with asking(dsn, _UNFINISHED) as is_unfinished:
        return seconds_to_drain(command, dsn=dsn, count=count, is_unfinished=is_unfinished, environment=environment)


def _seconds_bare(dsn: str, connection: psycopg.Connection[tuple[object, ...]], limit: str, count: int) -> float:
    """Return the seconds that the same work takes without an outbox."""
    connection.execute("INSERT INTO job (id) SELECT generate_series(1, %s)", [count])
    settle(connection, "job")
    command = program_command("bare_handlers", *LIMITS[limit][0])
    with asking(dsn, "SELECT EXISTS (SELECT FROM job WHERE NOT done)") as is_unfinished:
        return seconds_to_drain(command, dsn=dsn, count=count, is_unfinished=is_unfinished)


def run_lanes(server: Server, options: Options) -> Result:
    """Measure fresh messages alone, and the same with a backlog of due retries."""
    fresh, retries = options.fresh_messages, options.due_retries
    alone, behind, everything = [], [], []
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(options.rounds):
            alone.append(_fresh_seconds(dsn, connection, fresh, 0)[0])
            seconds, total = _fresh_seconds(dsn, connection, fresh, retries)
            behind.append(seconds)
            everything.append(total)
    result = Result("lanes", settings={"fresh": fresh, "due retries": retries, "rounds": options.rounds})
    rows = [
        (f"{fresh:,} fresh alone", median(alone), min(alone), max(alone)),
        (f"{fresh:,} fresh, {retries:,} older retries due", median(behind), min(behind), max(behind)),
        ("the retries too", median(everything), min(everything), max(everything)),
    ]
    result.tables.append(Table("seconds until all were handled", ("messages", "seconds", "fastest", "slowest"), rows))
    # Taking turns with the retries doubles the time.
    result.verdicts.append(
        Verdict("fresh behind retries / fresh alone", ratio_of_rounds(behind, alone), 3.0, "at most")
    )
    result.samples = {"alone": alone, "behind": behind, "everything": everything}
    return result


def _fresh_seconds(
    dsn: str, connection: psycopg.Connection[tuple[object, ...]], fresh: int, retries: int
) -> tuple[float, float]:
    """Return the seconds from the first claim to the last fresh message's handler, and to the end of all messages."""
    empty_outbox(connection)
    load_due_retries(connection, retries, topic=TOPIC, number=RETRY_NUMBER)
    load_pending(connection, fresh, topic=TOPIC)
    settle(connection, *_TABLES)
    answer = answer_of("deliver", "lanes", dsn=dsn)
    if answer["handled_count"] != fresh + retries:
        raise RuntimeError(f"{answer['handled_count']} of {fresh + retries} messages were handled")
    seconds, total = answer["fresh_seconds"], answer["seconds"]
    assert isinstance(seconds, float)
    assert isinstance(total, float)
    return seconds, total
