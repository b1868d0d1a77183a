"""The CPU time of sessions on the server, if its processes are visible."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psycopg

from benchmarks.processes import wait_until
from benchmarks.server import Server

_KNOWN_PROCESSES = "SELECT a.pid FROM pg_stat_activity AS a"
_SESSIONS = """
SELECT a.pid
FROM pg_stat_activity AS a
WHERE a.datname = current_database() AND a.backend_type = 'client backend'
"""


@contextlib.contextmanager
def cpu_of_sessions(server: Server, dsn: str) -> Iterator[list[float]]:
    """Append the CPU seconds of the sessions in this database that begin and end within the `with` block.

    Append nothing for a server whose processes are not visible. Workers of autovacuum that end in that time count too.
    """
    found: list[float] = []
    postmaster = server.postmaster
    if postmaster is None:
        yield found
        return
    with psycopg.connect(dsn, autocommit=True) as connection:

        def pids(query: str) -> set[int]:
            return {pid for (pid,) in connection.execute(query.encode()).fetchall()}

        lasting = pids(_SESSIONS)
        before = _cpu_seconds_of_ended_children(postmaster)
        yield found
        wait_until(lambda: pids(_SESSIONS) <= lasting, what="the measured sessions have ended")
        # A process ends a moment after its session, and only then its parent gets its CPU time.
        wait_until(lambda: _children(postmaster) <= pids(_KNOWN_PROCESSES), what="their processes have ended")
        found.append(_cpu_seconds_of_ended_children(postmaster) - before)


def cpu_seconds_of_server(server: Server) -> float:
    """Return the CPU seconds of the server's processes so far, with those that have ended. NaN if they are hidden."""
    if server.postmaster is None:
        return float("nan")
    total = 0.0
    for pid in (server.postmaster, *_children(server.postmaster)):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total + _cpu_seconds_of_ended_children(server.postmaster)


def _children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def _cpu_seconds_of_ended_children(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
