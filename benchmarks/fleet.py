"""Guarantees of several worker processes: a queue's rate and the order of keys. Also the cost of a fan-out."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg

from benchmarks.options import TOPIC, Options
from benchmarks.processes import Child, child, wait_until
from benchmarks.report import Result, Table, Verdict
from benchmarks.server import Server
from pgoutbox.operations import Operator, Rate
from pgoutbox.outbox import Outbox
from pgoutbox.settings import load_settings

_RATE = 20
_BURST = 5
_LIMIT_PROCESSES = 4
_ORDER_PROCESSES = 8
_FAIL_PERCENT = 2


def run_limits(server: Server, options: Options) -> Result:
    """Run four processes with a limit of 20 a second and a burst of 5; the receiver counts."""
    with _fleet(server, _LIMIT_PROCESSES, fail_percent=0) as fleet:
        with psycopg.connect(fleet.dsn, autocommit=True) as connection:
            Operator(connection).limit_rate("default", Rate(_RATE, 1), burst=_BURST)
            connection.execute(
                "SELECT count(*) FROM generate_series(1, %s) AS n, LATERAL pgoutbox.enqueue(%s, to_jsonb(n))",
                (options.limited_messages, TOPIC),
            )
            fleet.wait_for(options.limited_messages)
        times = [moment for moment, _, _ in fleet.calls()]
    seconds = times[-1] - times[0]
    windows = [sum(start <= t < start + 1 for t in times[i : i + 4 * _RATE]) for i, start in enumerate(times)]
    whole = Counter(int(t - times[0]) for t in times)
    result = Result("limits", {"processes": _LIMIT_PROCESSES, "rate": f"{_RATE}/s", "burst": _BURST})
    result.tables.append(
        Table(
            "calls that the receiver counted",
            ("messages", "seconds", "mean a second", "most in a clock second", "most in any second"),
            [(len(times), seconds, len(times) / seconds, max(whole.values()), max(windows))],
        )
    )
    result.verdicts += [
        Verdict("mean", (len(times) - _BURST) / seconds, _RATE, "at most", "/s"),
        Verdict("most in any second", max(windows), _RATE, "at most", ""),
    ]
    result.notes.append(
        "The claim takes the tokens and the calls follow a little later, so windows may be off by one or two."
    )
    return result


def run_ordering(server: Server, options: Options) -> Result:
    """Run eight processes with 20 keys. Some attempts fail, and one process is killed in the middle."""
    total = options.ordered_keys * options.ordered_messages
    result = Result("ordering", {"processes": _ORDER_PROCESSES, "keys": options.ordered_keys, "messages": total})
    rows = []
    for halts_key in (False, True):
        with _fleet(server, 0, fail_percent=_FAIL_PERCENT) as fleet:
            with psycopg.connect(fleet.dsn, autocommit=True) as connection:
                connection.execute(
                    """
                    SELECT count(*)
                    FROM generate_series(0, %s - 1) AS n,
                        LATERAL pgoutbox.enqueue(
                            %s, to_jsonb(n), ordering_key => 'key-' || n %% %s, halts_key => %s, max_attempts => 51
                        )
                    """,
                    (total, TOPIC, options.ordered_keys, halts_key),
                )
                connection.execute("VACUUM ANALYZE pgoutbox.message_live")
                began_at = time.monotonic()
                fleet.start(_ORDER_PROCESSES)
                fleet.wait_for(total // 2)
                os.kill(fleet.workers[0].pid, signal.SIGKILL)
                fleet.start(1)
                fleet.wait_for(total)
                wait_until(lambda: _is_empty(connection), what="the last message to be sent")
                seconds = time.monotonic() - began_at
            calls = fleet.calls()
        last: dict[str, int] = defaultdict(int)
        violations = repeated = 0
        for _, message_id, key in calls:
            violations += message_id < last[key]
            repeated += message_id == last[key]
            last[key] = max(last[key], message_id)
        rows.append((halts_key, total, len(calls), repeated, violations, total / seconds))
        result.verdicts.append(Verdict(f"order violations, halts_key={halts_key}", violations, 0, "at most", ""))
    result.tables.append(
        Table(
            f"{_FAIL_PERCENT} % of the attempts fail, one process is killed",
            ("halts_key", "messages", "calls that came through", "repeated", "order violations", "messages/s"),
            rows,
        )
    )
    return result


def run_fanout(server: Server, options: Options) -> Result:
    """Send one content of a megabyte to ten thousand destinations, from enqueue until all rows are pruned."""
    content = {"html": "".join(f"<p>paragraph {n} of a long newsletter</p>" for n in range(24_000))}
    destinations = [f"mailto:{n}@example.org" for n in range(options.fanout_destinations)]
    with _fleet(server, 0, fail_percent=0) as fleet, psycopg.connect(fleet.dsn) as connection:
        outbox = Outbox(load_settings(max_payload_bytes=2_000_000))
        before = _size(connection)
        began_at = time.monotonic()
        outbox.on(connection).enqueue_fanout(TOPIC, {"issue": 12}, destinations, content=content)
        connection.commit()
        enqueue_seconds = time.monotonic() - began_at
        stored = _size(connection) - before
        connection.commit()
        began_at = time.monotonic()
        fleet.start(1)
        fleet.wait_for(len(destinations))
        deliver_seconds = time.monotonic() - began_at
        connection.autocommit = True
        wait_until(lambda: _is_empty(connection), what="the last message to be sent")
        connection.execute("UPDATE pgoutbox.message SET finished_at = finished_at - interval '2 days'")
        Operator(connection).prune(timedelta(days=1))
        left = connection.execute("SELECT count(*) FROM pgoutbox.content").fetchone()
    size = len(str(content["html"]))
    result = Result("fanout", {"destinations": len(destinations), "content_bytes": size})
    result.tables.append(
        Table(
            "one content, many destinations",
            ("content bytes", "stored bytes", "bytes for each", "enqueue s", "deliver s", "contents after prune"),
            [(size, stored, stored / len(destinations), enqueue_seconds, deliver_seconds, left[0] if left else -1)],
        )
    )
    return result


class _Fleet:
    def __init__(self, dsn: str, receiver: Path, stack: contextlib.ExitStack, fail_percent: int) -> None:
        self.dsn = dsn
        self.workers: list[Child] = []
        self._receiver = receiver
        self._stack = stack
        self._fail_percent = fail_percent

    def start(self, count: int) -> None:
        started = [
            self._stack.enter_context(child("fleet", str(self._receiver), str(self._fail_percent), dsn=self.dsn))
            for _ in range(count)
        ]
        for worker in started:
            worker.read()
        self.workers += started

    def calls(self) -> list[tuple[float, int, str]]:
        lines = [line.split(" ") for line in self._receiver.read_text().splitlines()]
        return sorted((float(moment), int(message_id), key) for moment, message_id, key in lines)

    def wait_for(self, count: int) -> None:
        wait_until(lambda: self._count() >= count, what=f"{count} calls of handlers", seconds=600)

    def _count(self) -> int:
        return self._receiver.read_bytes().count(b"\n") if self._receiver.exists() else 0


@contextlib.contextmanager
def _fleet(server: Server, processes: int, *, fail_percent: int) -> Iterator[_Fleet]:
    with (
        server.database() as dsn,
        tempfile.TemporaryDirectory(prefix="pgoutbox-bench-") as directory,
        contextlib.ExitStack() as stack,
    ):
        fleet = _Fleet(dsn, Path(directory) / "receiver", stack, fail_percent)
        fleet.start(processes)
        yield fleet


def _is_empty(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    row = connection.execute("SELECT NOT EXISTS (SELECT FROM pgoutbox.message_live)").fetchone()
    return row is not None and bool(row[0])


def _size(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    row = connection.execute(
        "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class"
        " WHERE relnamespace = 'pgoutbox'::regnamespace AND relkind = 'r'"
    ).fetchone()
    assert row is not None
    assert isinstance(row[0], int)
    return row[0]
