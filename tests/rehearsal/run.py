"""The run of a rehearsal: two releases, their processes, and the comparison of the ledger with the database."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg

from pgoutbox.embedded import EmbeddedServer
from tests.rehearsal.locks import watched_locks
from tests.rehearsal.release import FORMER_VARIABLE, PRESENT_VARIABLE, Release
from tests.rehearsal.storm import Storm, storm_over
from tests.soak.crew import LEASE_SECONDS, Process
from tests.soak.verdict import ENDS
from tests.support.pages import ROOT
from tests.support.waiting import wait_until

PER_SECOND: Final = 70.0
"""Of each producer. Two of them keep above a hundred, although they are killed."""


@dataclass(slots=True)
class Fleet:
    """The processes of both releases."""

    dsn: str
    directory: Path
    seed: int
    processes: dict[str, Process] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    kill_count: int = 0
    retry_count: int = 0
    storm: Storm | None = None
    worker_dsn: str = ""

    def start(self, name: str, release: Release, *arguments: str, dsn: str) -> None:
        """Start a process under this name."""
        log = (self.directory / f"{name}.log").open("ab")
        environment = self.environment(release) | {"PGOUTBOX_DSN": dsn}
        self.processes[name] = Process(name, [sys.executable, *arguments], environment, log)
        self.processes[name].keep_alive()

    def environment(self, release: Release) -> dict[str, str]:
        """Return the variables of a process of this release."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PGOUTBOX_")}
        return inherited | {
            "PYTHONPATH": f"{release.path}{os.pathsep}{ROOT}",
            "PYTHONSAFEPATH": "1",
            "REHEARSAL_LEDGER": str(self.directory / "ledger"),
            "PGOUTBOX_DSN": self.dsn,
            "PGOUTBOX_LEASE_SECONDS": str(LEASE_SECONDS),
            "PGOUTBOX_LOG_FORMAT": "json",
            FORMER_VARIABLE: "rehearsal",
            "PGOUTBOX_MAINTENANCE_INTERVAL_SECONDS": "0",
        }

    def work(self, name: str, release: Release) -> None:
        """Start a worker."""
        arguments = ("-m", "pgoutbox", "worker", "--app", "tests.rehearsal.app:outbox")
        self.start(name, release, *arguments, dsn=self.worker_dsn or self.dsn)

    def produce(self, name: str, release: Release, *, is_later: bool = False) -> None:
        """Start a producer."""
        self.seed += 1
        kind = "later" if is_later else "first"
        arguments = ("-m", "tests.rehearsal.app", self.dsn, str(self.seed), str(PER_SECOND), kind)
        self.start(name, release, *arguments, dsn=self.dsn)

    def stop(self, *names: str) -> None:
        """Stop these processes, and note ends that nobody has caused."""
        for name in names:
            process = self.processes.pop(name)
            process.stop()
            process.log.close()
            assert process.running is not None
            for code in (*process.ends.elements(), process.running.returncode):
                if code not in ENDS:
                    said = (self.directory / f"{name}.log").read_text()[-1500:]
                    self.log.append(f"{name}: ended by itself with {code}: {said}")

    def flow(self, seconds: float, chance: random.Random) -> None:
        """Let messages flow under faults."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.strike(chance, min(1.0, until - time.monotonic()))

    def strike(self, chance: random.Random, seconds: float) -> None:
        """Inject a fault of the storm; without one, kill a worker after this time."""
        if self.storm is not None:
            self.storm.strike()
            return
        time.sleep(seconds)
        chance.choice([process for name, process in self.processes.items() if "worker" in name]).signal(signal.SIGKILL)
        self.kill_count += 1
        self.keep_alive()

    def keep_alive(self) -> None:
        """Start again the processes that have ended."""
        for process in self.processes.values():
            process.keep_alive()

    def until_handed_over_by(self, release: Release) -> None:
        """Wait until a worker of this release has handed a message over: a busy machine starts them slowly."""
        by = f'"what": "handed over", "by": "{release.version}"'
        wait_until(lambda: by in (self.directory / "ledger").read_text(), lambda: f"no hand-over by {release.version}")

    def facts(self) -> dict[str, Any]:
        """Return the faults that were injected, and the ends of processes that nobody has caused."""
        faults = {} if self.storm is None else dict(self.storm.faults.injected)
        return {
            "workers killed": self.kill_count + faults.get("kill_worker", 0),
            "faults": " ".join(f"{name}:{count}" for name, count in sorted(faults.items())),
            "migrations begun again": self.retry_count,
            "unexpected": self.log,
        }

    def migrate(self, release: Release, *arguments: str, chance: random.Random | None = None) -> None:
        """Run `pgoutbox migrate` until it gets its locks. With a storm, kill a first run, and strike others."""
        storm = self.storm if chance is not None else None
        if storm is not None:
            with self._migration(release, *arguments) as killed:
                storm.interrupt(killed)
                killed.communicate()
        with contextlib.nullcontext() if storm is None else storm.obstacles():
            while True:
                with self._migration(release, *arguments) as running:
                    while storm is not None and running.poll() is None:
                        storm.strike()
                    _, said = running.communicate()
                if running.returncode == 0:
                    return
                if not re.search("gave up waiting" if storm is None else EXCUSES, said):
                    raise RuntimeError(said)
                self.retry_count += 1

    def _migration(self, release: Release, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pgoutbox", "migrate", *arguments],
            env=self.environment(release),
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def rehearse(
    dsn: str,
    directory: Path,
    releases: tuple[Release, Release],
    seconds: float,
    seed: int,
    *,
    server: EmbeddedServer | None = None,
) -> dict[str, Any]:
    """Run the upgrade and the way back. Return what happened. With its own `server`, a storm strikes all the time."""
    chance = random.Random(seed)
    first, later = releases
    fleet = Fleet(dsn, directory, seed)
    with contextlib.ExitStack() as stack:
        if server is not None:
            fleet.storm = stack.enter_context(storm_over(fleet, server, chance))
        fleet.migrate(first)
        # After a crash PgBouncer refuses clients for a while.
        judge_dsn = dsn if server is None else server.dsn
        locks = stack.enter_context(watched_locks(judge_dsn))
        try:
            fact = _there_and_back(fleet, first, later, seconds / 6, chance, judge_dsn)
        finally:
            for process in fleet.processes.values():
                process.signal(signal.SIGKILL)
                process.log.close()
    fact["warned of the former name"] = [
        release.version
        for release in releases
        if any(
            f"setting {FORMER_VARIABLE} is now {PRESENT_VARIABLE}" in log.read_text()
            for log in directory.glob(f"worker * of {release.version}.log")
        )
    ]
    return fact | fleet.facts() | locks.facts() | judge(judge_dsn, directory, has_storm=server is not None)


def _there_and_back(
    fleet: Fleet, first: Release, later: Release, step: float, chance: random.Random, judge_dsn: str
) -> dict[str, Any]:
    for number in (1, 2):
        fleet.work(f"worker {number} of {first.version}", first)
        fleet.produce(f"producer {number} of {first.version}", first)
    fleet.flow(step, chance)
    fleet.migrate(later, chance=chance)
    fleet.flow(step, chance)  # The first release on the later schema.
    for number in (1, 2):
        fleet.work(f"worker {number} of {later.version}", later)
    fleet.produce(f"producer of {later.version}", later, is_later=True)
    fleet.flow(step, chance)  # Both on the later schema.
    fleet.stop(*(f"worker {number} of {first.version}" for number in (1, 2)))
    fleet.flow(step, chance)
    fleet.until_handed_over_by(later)
    # The way back.
    for number in (1, 2):
        fleet.work(f"worker {number} of {first.version}", first)
    fleet.stop(*(f"worker {number} of {later.version}" for number in (1, 2)), f"producer of {later.version}")
    fleet.migrate(later, "downgrade", "pgoutbox_0001", "--yes", chance=chance)
    fleet.produce(f"producer of {later.version}", later)  # It goes on with the earlier schema.
    fleet.flow(step, chance)
    fleet.work(f"refused worker of {later.version}", later)
    refused = fleet.processes.pop(f"refused worker of {later.version}")
    assert refused.running is not None
    code = refused.running.wait(60)
    fact: dict[str, Any] = {"a later worker on the earlier schema": f"exit code {code}"}
    refused.log.close()
    fleet.flow(step, chance)
    fleet.stop(*(name for name in fleet.processes if "producer" in name))
    drain(judge_dsn)
    fleet.stop(*fleet.processes)
    return fact


def drain(dsn: str) -> None:
    """Wait until nothing is pending or in flight."""
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
        left = "SELECT state, count(*) FROM pgoutbox.message_live GROUP BY state"
        wait_until(lambda: not connection.execute(left).fetchall(), lambda: str(connection.execute(left).fetchall()))


def judge(dsn: str, directory: Path, *, has_storm: bool) -> dict[str, Any]:
    """Compare the ledger with the database."""
    entries: list[dict[str, Any]] = [json.loads(line) for line in (directory / "ledger").read_text().splitlines()]
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for entry in entries:
        found.setdefault(entry["what"], {}).setdefault(entry.get("number", 0), []).append(entry)
    acknowledged, handed, rolled_back = found["acknowledged"], found["handed over"], found["rolled back"]
    delays = [handed[number][0]["at"] - done[0]["at"] for number, done in acknowledged.items() if number in handed]
    times = [done[0]["at"] for done in acknowledged.values()]
    with psycopg.connect(dsn, prepare_threshold=None) as connection:
        (failed_count,) = connection.execute("SELECT count(*) FROM pgoutbox.message_failed").fetchone() or (0,)
        rows = connection.execute("SELECT (m.payload ->> 'number')::bigint FROM pgoutbox.message AS m")
        committed = {number for (number,) in rows}
        unnamed = "SELECT count(*) FROM pgoutbox.message WHERE worker NOT LIKE 'rehearsal:%'"
        (unnamed_count,) = connection.execute(unnamed).fetchone() or (0,)
        half_built = "SELECT count(*) FROM pg_index WHERE NOT indisvalid"
        (half_built_count,) = connection.execute(half_built).fetchone() or (0,)
    disconnections = sum(map(len, found.get("disconnected", {}).values()))
    return {
        "acknowledged": len(acknowledged),
        "acknowledged a second": round(len(acknowledged) / (max(times) - min(times)), 1),
        "rolled back": len(rolled_back),
        "handed over again": sum(len(each) - 1 for each in handed.values()),
        "handed over by": dict(Counter(entry["by"] for entry in entries if entry["what"] == "handed over")),
        "longest enqueue, seconds": round(max(done[0]["seconds"] for done in acknowledged.values()), 3),
        "longest delay, seconds": round(max(delays), 2),
        "lost": len(acknowledged.keys() - (handed.keys() & committed)),
        "ghosts": len(handed.keys() & rolled_back.keys() | handed.keys() - committed),
        "out of order": _out_of_order(entries),
        "with a wrong option": len(found.get("wrong", {})),
        "failed": failed_count,
        "connections lost by faults" if has_storm else "disconnected producers": disconnections,
        "by a worker without the name that its setting gives": unnamed_count,
        "indexes that are half built": half_built_count,
    }


def _out_of_order(entries: list[dict[str, Any]]) -> int:
    """Count messages whose first hand-over comes after that of a later one of their key."""
    latest: dict[str, int] = {}
    seen: set[int] = set()
    count = 0
    for entry in entries:
        if entry["what"] == "handed over" and entry["key"] is not None and entry["id"] not in seen:
            seen.add(entry["id"])
            count += entry["id"] < latest.get(entry["key"], 0)
            latest[entry["key"]] = max(entry["id"], latest.get(entry["key"], 0))
    return count


EXCUSES: Final = (
    "gave up waiting|paused for a second|terminating connection|server closed|the connection is lost"
    "|the database system is|refused"
    # Of PgBouncer.
    "|server login has been failing|server conn crashed|received 2 results from command"
)
"""What a migration may say that was struck by a storm."""
BROKEN: Final = (
    "lost",
    "ghosts",
    "out of order",
    "with a wrong option",
    "failed",
    "disconnected producers",
    "by a worker without the name that its setting gives",
    "indexes that are half built",
    "unexpected",
)
"""The facts that must be zero or empty."""
