"""Doorbell: the cost of one enqueue, compared with a plain insert and with insert and pg_notify.

There are conditions without a worker, and with a worker that delivers a backlog of older messages, with handlers that
do nothing or wait. The backlog is larger than the worker can deliver in that time, so the worker never reaches the
measured rows and never sleeps.

All variants run as one role with the necessary rights. Like an application's role it is not a superuser, because a
superuser's INSERT skips the permission checks.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from benchmarks.options import TOPIC, Options, rotated
from benchmarks.processes import child, run_tool, wait_until
from benchmarks.report import Result, Table, Verdict, median, ratio_of_rounds
from benchmarks.server import Server, empty_outbox, load_backlog, pgbench_program, settle

_PAYLOAD = '{"user_id": 42}'

# Each is one statement and one round trip. Topic and payload are parameters, as in an application. No session listens
# to the channel of the third, which is in its favour.
SCRIPTS: Mapping[str, str] = {
    "insert": "INSERT INTO pgoutbox.message (topic, payload) VALUES (:topic, :payload);",
    "enqueue": "SELECT pgoutbox.enqueue(:topic, :payload);",
    "insert + pg_notify": (
        "WITH inserted AS ("
        "INSERT INTO pgoutbox.message (topic, payload) VALUES (:topic, :payload) RETURNING queue"
        ") SELECT pg_notify('pgoutbox_benchmark', inserted.queue) FROM inserted;"
    ),
}
# The mode of `deliver`.
CONDITIONS: Mapping[str, str | None] = {"no worker": None, "worker busy": "run", "worker busy, waiting": "wait"}
_THREADS = 2
_APPLICATION = "pgoutbox_benchmark"

_Key = tuple[int, str, str]


def run(server: Server, options: Options) -> Result:
    """Alternate the variants within each round of a condition, which starts with empty tables.

    The rounds are short, and each ratio is from the measurements of one round, because the speed of a shared machine
    changes from one second to the next.
    """
    rates: dict[_Key, list[float]] = defaultdict(list)
    delivered: dict[_Key, list[float]] = defaultdict(list)
    ran_dry = 0
    with (
        server.database() as dsn,
        psycopg.connect(dsn, autocommit=True) as connection,
        tempfile.TemporaryDirectory(prefix="pgoutbox-bench-") as directory,
        application_role(connection),
    ):
        for variant, script in SCRIPTS.items():
            (Path(directory) / variant).write_text(script + "\n")
        for round_number in range(options.rounds):
            for clients in options.pgbench_clients:
                for condition in CONDITIONS:
                    with _prepared(dsn, connection, condition, options):
                        for variant in rotated(list(SCRIPTS), round_number):
                            key = (clients, condition, variant)
                            before = _sent_count(connection)
                            began_at = time.monotonic()
                            rates[key].append(pgbench(dsn, Path(directory) / variant, clients, options))
                            seconds = time.monotonic() - began_at
                            delivered[key].append((_sent_count(connection) - before) / seconds)
                        ran_dry += CONDITIONS[condition] is not None and _backlog_is_gone(connection)
    return _result(rates, delivered, ran_dry, options)


@contextlib.contextmanager
def application_role(connection: psycopg.Connection[tuple[object, ...]]) -> Iterator[None]:
    """Create a role that may enqueue and insert, for the length of the `with` block."""
    connection.execute(
        f"""
        CREATE ROLE {_APPLICATION} IN ROLE pgoutbox_producer;
        GRANT INSERT, SELECT ON ALL TABLES IN SCHEMA pgoutbox TO {_APPLICATION};
        GRANT USAGE ON ALL SEQUENCES IN SCHEMA pgoutbox TO {_APPLICATION};
        """
    )
    try:
        yield
    finally:
        connection.execute(f"DROP OWNED BY {_APPLICATION}; DROP ROLE {_APPLICATION}")


@contextlib.contextmanager
def _prepared(
    dsn: str, connection: psycopg.Connection[tuple[object, ...]], condition: str, options: Options
) -> Iterator[None]:
    empty_outbox(connection)
    mode = CONDITIONS[condition]
    if mode is None:
        settle(connection, "pgoutbox.message_live")
        yield
        return
    load_backlog(connection, options.doorbell_backlog, topic=TOPIC)
    settle(connection, "pgoutbox.message_live")
    with child("deliver", mode, dsn=dsn):
        wait_until(lambda: _sent_count(connection) > 0, what="the worker to deliver its first message")
        yield


def _sent_count(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    row = connection.execute("SELECT count(*) FROM pgoutbox.message_done").fetchone()
    assert row is not None
    assert isinstance(row[0], int)
    return row[0]


def _backlog_is_gone(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    row = connection.execute(
        "SELECT NOT EXISTS (SELECT FROM pgoutbox.message_live WHERE payload <> %s::jsonb AND state = 'pending')",
        (_PAYLOAD,),
    ).fetchone()
    assert row is not None
    return bool(row[0])


def pgbench(dsn: str, script: Path, clients: int, options: Options) -> float:
    """Return the transactions per second of the script, as the role `application_role`."""
    output = run_tool(
        [
            pgbench_program(),
            "--no-vacuum",
            "--protocol=prepared",
            f"--client={clients}",
            f"--jobs={_THREADS}",
            f"--time={options.pgbench_seconds}",
            "--progress=1",
            f"--define=topic={TOPIC}",
            f"--define=payload={_PAYLOAD}",
            f"--file={script}",
        ],
        dsn=make_conninfo(dsn, options=f"-c role={_APPLICATION}"),
        timeout=options.pgbench_seconds + 60,
    )
    per_second = [float(found) for found in re.findall(r"^progress: .*? ([0-9.]+) tps", output, re.MULTILINE)]
    if len(per_second) < 2:
        raise RuntimeError(f"pgbench did not say its tps: {output}")
    # In the first second the sessions start, and each plans the statement and compiles the function.
    return median(per_second[1:])


def _result(
    rates: Mapping[_Key, list[float]], delivered: Mapping[_Key, list[float]], ran_dry: int, options: Options
) -> Result:
    result = Result(
        "doorbell",
        settings={
            "seconds": options.pgbench_seconds,
            "rounds": options.rounds,
            "threads": _THREADS,
            "backlog": options.doorbell_backlog,
        },
    )
    result.tables.append(
        Table(
            "transactions per second",
            ("clients, condition, variant", "tps", "lowest", "highest", "ratio to insert", "worker delivers/s"),
            [
                (
                    f"{clients}, {condition}, {variant}",
                    median(values),
                    min(values),
                    max(values),
                    ratio_of_rounds(values, rates[clients, condition, "insert"]),
                    median(delivered[clients, condition, variant]) if CONDITIONS[condition] is not None else None,
                )
                for (clients, condition, variant), values in sorted(rates.items())
            ],
        )
    )
    for clients in options.pgbench_clients:
        for condition in CONDITIONS:
            enqueue = rates[clients, condition, "enqueue"]
            for other, target in (("insert", 0.85), ("insert + pg_notify", 3.0)):
                ratio = ratio_of_rounds(enqueue, rates[clients, condition, other])
                what = f"enqueue / {other}, {clients} clients, {condition}"
                result.verdicts.append(Verdict(what, ratio, target, "at least"))
    result.samples = {", ".join(map(str, key)): values for key, values in rates.items()}
    if ran_dry:
        result.notes.append(f"the worker's backlog ran dry in {ran_dry} measurements: they are not comparable")
    result.notes.append(
        "The worker shares the cores with the producers: a faster variant leaves less CPU for the worker. A column "
        "shows the worker's rate."
    )
    return result
