"""Drain: the rate at which one process delivers a backlog, with one async handler call per message.

The variants are pgoutbox, PgQueuer with its best settings, and the statements of pgoutbox in a bare loop, which is
the limit. Others are pgoutbox with a pinned xmin horizon, a long history, many scheduled messages and coalesce keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import psycopg

from benchmarks.cpu import cpu_of_sessions
from benchmarks.options import TOPIC, Options, rotated
from benchmarks.processes import answer_of
from benchmarks.programs.floor import TABLES as FLOOR_TABLES
from benchmarks.report import Result, Table, Verdict, median, ratio_of_rounds
from benchmarks.server import Server, empty_outbox, load_keyed, load_pending, load_scheduled, load_sent, settle
from pgoutbox.settings import load_settings

# The scenario `peer-settings` found this. Its documentation recommends a larger batch for short jobs, and a direct
# connection instead of a pool for the consumer.
PGQUEUER_BATCH_SIZE = 500
PGQUEUER_DRIVER = "connection"
PGQUEUER_SETTINGS = (
    f"asyncpg {PGQUEUER_DRIVER}, uvloop, batch_size={PGQUEUER_BATCH_SIZE}, durability=durable, pgq autovac, "
    "concurrency default (unlimited), mode=drain"
)

_PER_KEY = 10
# The targets by a part of the variant's name, as a share of the plain drain's rate.
_TARGETS = {"pinned horizon": 0.95, "finished": 0.9, "scheduled": 0.9, "coalesce keys": 0.8}
_MESSAGE_TABLES = ("pgoutbox.message_live", "pgoutbox.key_head", "pgoutbox.queue")


@dataclass(slots=True)
class _Runs:
    """The measurements of one variant, by round."""

    rates: list[float] = field(default_factory=list)
    cpu_microseconds: list[float] = field(default_factory=list)
    claims: list[float] = field(default_factory=list)
    finishes: list[float] = field(default_factory=list)
    server_microseconds: list[float] = field(default_factory=list)

    def add(self, answer: Mapping[str, object], count: int, handled: int) -> None:
        numbers = {name: float(value) for name, value in answer.items() if isinstance(value, (int, float))}
        if numbers["handled_count"] != handled:
            raise RuntimeError(f"{numbers['handled_count']:.0f} of {handled} messages were handled")
        self.rates.append(count / numbers["seconds"])
        self.cpu_microseconds.append(1e6 * numbers["cpu_seconds"] / count)
        self.claims.append(numbers["claim_count"])
        self.finishes.append(numbers["finish_count"])
        if "server_cpu_seconds" in numbers:
            self.server_microseconds.append(1e6 * numbers["server_cpu_seconds"] / count)


def run(server: Server, options: Options) -> Result:
    """Alternate all variants, round by round, in an order that shifts with the round."""
    count = options.drain_messages
    with (
        server.database() as ours,
        server.database(migrated=False) as theirs,
        server.database() as aged,
        server.database() as booked,
        server.database(migrated=False) as floor,
    ):
        with _session(floor) as connection:
            connection.execute(FLOOR_TABLES)
        answer_of("peer", "install", dsn=theirs)
        with _session(aged) as connection:
            load_sent(connection, options.finished_messages, topic=TOPIC)
            settle(connection, "pgoutbox.message")
        with _session(booked) as connection:
            load_scheduled(connection, options.scheduled_messages, topic=TOPIC)
            settle(connection, "pgoutbox.message")
        with (
            _session(ours) as connection,
            _session(aged) as aged_connection,
            _session(booked) as booked_connection,
        ):
            variants: dict[str, Callable[[], Mapping[str, object]]] = {
                "pgoutbox": lambda: _drain(server, ours, connection, count),
                "pgqueuer": lambda: _drain_pgqueuer(server, theirs, count, PGQUEUER_BATCH_SIZE, PGQUEUER_DRIVER),
                "bare loop": lambda: _drain(server, ours, connection, count, "bare", str(load_settings().batch_size)),
                "floor loop": lambda: _drain_floor(server, floor, count),
                "pgoutbox, pinned horizon": lambda: _drain_pinned(server, ours, connection, count, one_bulk=False),
                "pgoutbox, pinned horizon, one bulk": lambda: _drain_pinned(
                    server, ours, connection, count, one_bulk=True
                ),
                f"pgoutbox, {options.finished_messages:,} finished": lambda: _drain_aged(
                    server, aged, aged_connection, count
                ),
                f"pgoutbox, {options.scheduled_messages:,} scheduled": lambda: _drain_booked(
                    server, booked, booked_connection, count
                ),
                f"pgoutbox, {count:,} coalesce keys": lambda: _drain_keyed(server, ours, connection, count, per_key=1),
                f"pgoutbox, {_PER_KEY} of each coalesce key": lambda: _drain_keyed(
                    server, ours, connection, count, per_key=_PER_KEY
                ),
            }
            runs = {name: _Runs() for name in variants}
            for round_number in range(options.rounds):
                for name in rotated(list(variants), round_number):
                    # Of the messages of one key only the newest is handled; the rate counts all.
                    handled = count // _PER_KEY if name.startswith(f"pgoutbox, {_PER_KEY} of each") else count
                    runs[name].add(variants[name](), count, handled)
    return _result(runs, options)


def _measured(server: Server, dsn: str, program: str, *arguments: str) -> Mapping[str, object]:
    """Return the answer of a program, and the CPU time of its sessions on the server if that is visible."""
    with cpu_of_sessions(server, dsn) as seconds:
        answer = answer_of(program, *arguments, dsn=dsn)
    return {**answer, "server_cpu_seconds": seconds[0]} if seconds else answer


def _drain(
    server: Server,
    dsn: str,
    connection: psycopg.Connection[tuple[object, ...]],
    count: int,
    program: str = "deliver",
    *arguments: str,
) -> Mapping[str, object]:
    empty_outbox(connection)
    load_pending(connection, count, topic=TOPIC)
    settle(connection, *_MESSAGE_TABLES)
    answer = _measured(server, dsn, program, *(arguments or ("drain",)))
    _check_sent(connection, count)
    return answer


def _drain_pinned(
    server: Server, dsn: str, connection: psycopg.Connection[tuple[object, ...]], count: int, *, one_bulk: bool
) -> Mapping[str, object]:
    empty_outbox(connection)
    with _pinned_horizon(dsn):
        # All messages of one transaction fall due at the same moment, so their due times are equal.
        with connection.transaction() if one_bulk else contextlib.nullcontext():
            load_pending(connection, count, topic=TOPIC)
        settle(connection, *_MESSAGE_TABLES)
        answer = _measured(server, dsn, "deliver", "drain")
    _check_sent(connection, count)
    return answer


def _drain_aged(
    server: Server, dsn: str, connection: psycopg.Connection[tuple[object, ...]], count: int
) -> Mapping[str, object]:
    # The history stays, and the messages that the round adds are removed.
    connection.execute("DELETE FROM pgoutbox.message WHERE worker IS DISTINCT FROM 'benchmark'")
    load_pending(connection, count, topic=TOPIC)
    settle(connection, "pgoutbox.message")
    return _measured(server, dsn, "deliver", "drain")


def _drain_booked(
    server: Server, dsn: str, connection: psycopg.Connection[tuple[object, ...]], count: int
) -> Mapping[str, object]:
    # Scheduled messages stay, and those of the previous round are removed.
    connection.execute("DELETE FROM pgoutbox.message WHERE state = 'sent'")
    load_pending(connection, count, topic=TOPIC)
    settle(connection, "pgoutbox.message")
    return _measured(server, dsn, "deliver", "drain")


def _drain_keyed(
    server: Server, dsn: str, connection: psycopg.Connection[tuple[object, ...]], count: int, *, per_key: int
) -> Mapping[str, object]:
    empty_outbox(connection)
    load_keyed(connection, count, topic=TOPIC, per_key=per_key)
    settle(connection, *_MESSAGE_TABLES)
    answer = _measured(server, dsn, "deliver", "drain")
    _check_sent(connection, count // per_key)
    return answer


def _drain_pgqueuer(server: Server, dsn: str, count: int, batch_size: int, driver: str) -> Mapping[str, object]:
    """Let PgQueuer deliver this number of jobs."""
    with _session(dsn) as connection:
        connection.execute("TRUNCATE pgqueuer, pgqueuer_log, pgqueuer_statistics")
        answer_of("peer", "enqueue", "--count", str(count), dsn=dsn)
        settle(connection, "pgqueuer", "pgqueuer_log")
        answer = _measured(server, dsn, "peer", "drain", "--batch-size", str(batch_size), "--driver", driver)
        row = connection.execute("SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'").fetchone()
        assert row is not None
        if row[0] != count:
            raise RuntimeError(f"pgqueuer finished {row[0]} of {count} jobs")
    return answer


def _drain_floor(server: Server, dsn: str, count: int) -> Mapping[str, object]:
    with _session(dsn) as connection:
        connection.execute("TRUNCATE floor.live, floor.done")
        connection.execute(
            "INSERT INTO floor.live (topic, queue, payload)"
            " SELECT %s, 'default', jsonb_build_object('user_id', n) FROM generate_series(1, %s) AS n",
            [TOPIC, count],
        )
        settle(connection, "floor.live", "floor.done")
    return _measured(server, dsn, "floor", str(load_settings().batch_size))


def _check_sent(connection: psycopg.Connection[tuple[object, ...]], count: int) -> None:
    row = connection.execute("SELECT count(*) FROM pgoutbox.message WHERE state = 'sent'").fetchone()
    assert row is not None
    if row[0] != count:
        raise RuntimeError(f"{row[0]} of {count} messages are sent")


@contextlib.contextmanager
def _pinned_horizon(dsn: str) -> Iterator[None]:
    """Open a transaction that prevents vacuum, and hints on dead index entries, for everything that follows."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT pg_current_xact_id()")
        yield
        connection.execute("ROLLBACK")


def _session(dsn: str) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(dsn, autocommit=True)


def _result(runs: Mapping[str, _Runs], options: Options) -> Result:
    ours = runs["pgoutbox"].rates
    result = Result(
        "drain",
        settings={"messages": options.drain_messages, "rounds": options.rounds, "pgqueuer": PGQUEUER_SETTINGS},
    )
    result.tables.append(
        Table(
            "one process, one async handler call per message",
            ("variant", "messages/s", "slowest", "fastest", "CPU us/message", "server's", "claims", "finishes"),
            [
                (
                    name,
                    median(r.rates),
                    min(r.rates),
                    max(r.rates),
                    median(r.cpu_microseconds),
                    median(r.server_microseconds) if r.server_microseconds else None,
                    median(r.claims),
                    median(r.finishes),
                )
                for name, r in runs.items()
            ],
        )
    )
    for name, other, target in (
        ("pgoutbox / pgqueuer", "pgqueuer", 3.0),
        ("pgoutbox / bare loop", "bare loop", 0.7),
    ):
        result.verdicts.append(Verdict(name, ratio_of_rounds(ours, runs[other].rates), target, "at least"))
    floor = runs["floor loop"].server_microseconds
    if floor:
        ratio = ratio_of_rounds(runs["pgoutbox"].server_microseconds, floor)
        result.verdicts.append(Verdict("CPU of the server, pgoutbox / floor loop", ratio, 1.1, "at most"))
    cpu = median(runs["pgoutbox"].cpu_microseconds)
    result.verdicts.append(Verdict("CPU of the worker's process for a message", cpu, 12.0, "at most", "us"))
    for name, variant in runs.items():
        share = next((share for part, share in _TARGETS.items() if part in name), None)
        if share is not None:
            result.verdicts.append(
                Verdict(f"{name} / pgoutbox", ratio_of_rounds(variant.rates, ours), share, "at least")
            )
    result.samples = {name: r.rates for name, r in runs.items()}
    result.notes.append(
        "CPU is the time of the measured Python process, between first claim and last finish. The server's CPU is the "
        "time of its sessions, from their start to their end."
    )
    return result
