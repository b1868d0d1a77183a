"""Run a rehearsal: start the processes of two releases, and compare their ledger with the database.

The ledger is a file. Producers note their transactions in it, and handlers the messages that they hand over.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg

import pgoutbox
from tests.rehearsal.release import Release, install, install_later
from tests.support.pages import ROOT
from tests.support.waiting import wait_until

PER_SECOND: Final = 50.0


@dataclass(slots=True)
class Fleet:
    """The processes of both releases."""

    dsn: str
    directory: Path
    seed: int
    processes: dict[str, tuple[subprocess.Popen[bytes], Callable[[], subprocess.Popen[bytes]]]] = field(
        default_factory=dict
    )
    log: list[str] = field(default_factory=list)
    kill_count: int = 0

    def start(self, name: str, release: Release, *arguments: str) -> None:
        """Start a process under this name."""

        def run() -> subprocess.Popen[bytes]:
            with (self.directory / f"{name}.log").open("a") as output:
                return subprocess.Popen(
                    [sys.executable, *arguments],
                    env=self.environment(release),
                    stdout=output,
                    stderr=output,
                    cwd=self.directory,
                )

        self.processes[name] = (run(), run)

    def environment(self, release: Release) -> dict[str, str]:
        """Return the variables of a process of this release."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PGOUTBOX_")}
        return inherited | {
            "PYTHONPATH": f"{release.path}{os.pathsep}{ROOT}",
            "PYTHONSAFEPATH": "1",
            "REHEARSAL_LEDGER": str(self.directory / "ledger"),
            "PGOUTBOX_DSN": self.dsn,
            "PGOUTBOX_LEASE_SECONDS": "3",
            "PGOUTBOX_LOG_FORMAT": "json",
            "PGOUTBOX_MAINTENANCE_INTERVAL_SECONDS": "0",
        }

    def work(self, name: str, release: Release) -> None:
        """Start a worker."""
        self.start(name, release, "-m", "pgoutbox", "worker", "--app", "tests.rehearsal.app:outbox")

    def produce(self, name: str, release: Release, *, is_later: bool = False) -> None:
        """Start a producer."""
        self.seed += 1
        kind = "later" if is_later else "first"
        self.start(name, release, "-m", "tests.rehearsal.app", self.dsn, str(self.seed), str(PER_SECOND), kind)

    def stop(self, *names: str) -> None:
        """Stop these processes, and note an exit code that is no success."""
        for name in names:
            process, _ = self.processes.pop(name)
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
            if code not in (0, -signal.SIGTERM, -signal.SIGKILL):
                self.note_end(name, code)

    def flow(self, seconds: float, chance: random.Random) -> None:
        """Let messages flow, kill a worker each second, and start again what has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(1.0, max(0.0, until - time.monotonic())))
            workers = sorted(name for name in self.processes if "worker" in name)
            victim = chance.choice(workers)
            self.processes[victim][0].kill()
            self.kill_count += 1
            self.keep_alive()

    def until_handed_over_by(self, release: Release) -> None:
        """Wait until a worker of this release has handed a message over: a busy machine starts them slowly."""
        by = f'"what": "handed over", "by": "{release.version}"'
        wait_until(lambda: by in (self.directory / "ledger").read_text(), lambda: f"no hand-over by {release.version}")

    def keep_alive(self) -> None:
        """Start again the processes that have ended."""
        for name, (process, run) in self.processes.items():
            code = process.poll()
            if code is not None:
                if code != -signal.SIGKILL:
                    self.note_end(name, code)
                self.processes[name] = (run(), run)

    def note_end(self, name: str, code: int) -> None:
        """Note that a process ended with this exit code, and the tail of its log."""
        said = (self.directory / f"{name}.log").read_text()[-1500:]
        self.log.append(f"{name}: exit code {code}: {said}")

    def migrate(self, release: Release, *arguments: str) -> float:
        """Run `pgoutbox migrate` until it gets its locks. Return the seconds of the last run."""
        while True:
            began_at = time.monotonic()
            command = [sys.executable, "-m", "pgoutbox", "migrate", *arguments]
            done = subprocess.run(
                command, env=self.environment(release), cwd=self.directory, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return time.monotonic() - began_at
            if "gave up waiting" not in done.stderr:
                raise RuntimeError(done.stderr)
            self.log.append(f"migrate {' '.join(arguments)}: waited for a lock in vain")


def rehearse(dsn: str, directory: Path, seconds: float, seed: int) -> dict[str, object]:
    """Run the upgrade and the way back. Return what happened."""
    chance = random.Random(seed)
    first, later = install(directory, pgoutbox.__version__), install_later(directory)
    fleet = Fleet(dsn, directory, seed)
    fact: dict[str, object] = {}
    step = seconds / 6
    try:
        fleet.migrate(first)
        for number in (1, 2):
            fleet.work(f"worker {number} of {first.version}", first)
            fleet.produce(f"producer {number} of {first.version}", first)
        fleet.flow(step, chance)
        fact["seconds of the upgrade"] = round(fleet.migrate(later), 2)
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
        fact["seconds of the downgrade"] = round(fleet.migrate(later, "downgrade", "pgoutbox_0001", "--yes"), 2)
        fleet.produce(f"producer of {later.version}", later)  # It goes on with the earlier schema.
        fleet.flow(step, chance)
        name = f"refused worker of {later.version}"
        fleet.work(name, later)
        refused, _ = fleet.processes.pop(name)
        code = refused.wait(60)
        fact["a later worker on the earlier schema"] = f"exit code {code}"
        if code != 1:
            fleet.note_end(name, code)
        fleet.flow(step, chance)
        fleet.stop(*(name for name in fleet.processes if "producer" in name))
        drain(dsn)
        fleet.stop(*fleet.processes)
    finally:
        for process, _ in fleet.processes.values():
            process.kill()
            process.wait()
    return fact | {"workers killed": fleet.kill_count} | judge(dsn, directory, fleet.log)


def drain(dsn: str) -> None:
    """Wait until nothing is pending or in flight."""
    count = "SELECT count(*) FROM pgoutbox.message_live"
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
        wait_until(
            lambda: connection.execute(count).fetchone() == (0,),
            lambda: f"{connection.execute(count).fetchone()} messages are pending or in flight",
        )


def judge(dsn: str, directory: Path, log: list[str]) -> dict[str, object]:
    """Compare the ledger with the database."""
    entries: list[dict[str, Any]] = [json.loads(line) for line in (directory / "ledger").read_text().splitlines()]
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for entry in entries:
        found.setdefault(entry["what"], {}).setdefault(entry.get("number", 0), []).append(entry)
    acknowledged, handed, rolled_back = found["acknowledged"], found["handed over"], found["rolled back"]
    delays = [handed[number][0]["at"] - done[0]["at"] for number, done in acknowledged.items() if number in handed]
    with psycopg.connect(dsn, prepare_threshold=None) as connection:
        (failed_count,) = connection.execute("SELECT count(*) FROM pgoutbox.message_failed").fetchone() or (0,)
    return {
        "acknowledged": len(acknowledged),
        "rolled back": len(rolled_back),
        "handed over again": sum(len(times) - 1 for times in handed.values()),
        "handed over by": dict(Counter(entry["by"] for entry in entries if entry["what"] == "handed over")),
        "longest enqueue, seconds": round(max(done[0]["seconds"] for done in acknowledged.values()), 3),
        "longest delay, seconds": round(max(delays), 2),
        "lost": len(acknowledged.keys() - handed.keys()),
        "handed over after a rollback": len(handed.keys() & rolled_back.keys()),
        "with a wrong option": len(found.get("wrong", {})),
        "failed": failed_count,
        "unexpected": log,
    }


BROKEN: Final = (
    "lost",
    "handed over after a rollback",
    "with a wrong option",
    "failed",
    "unexpected",
)
"""The facts that must be zero or empty."""
