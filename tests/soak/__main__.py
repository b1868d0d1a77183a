"""Run the outbox under fire, let everything heal, and print a verdict for each invariant.

    python -m tests.soak --minutes 20 --seed 7

Exit code 0 when every invariant holds and everything drained, 1 when not: then the ledger, the logs and the database
stay where the last line says. The seed draws the faults and the messages; the timing is the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import psycopg
from rich.console import Console
from rich.table import Table

from pgoutbox import maintenance, migrate, operations
from pgoutbox.embedded import EmbeddedServer, embedded_server
from tests import dialogues
from tests.faults.judge import install_judge
from tests.faults.ledger import LEDGER_VARIABLE, install_audit, owed_count
from tests.faults.proxy import proxy_to
from tests.soak.host import PORT_VARIABLE
from tests.soak.nemesis import LEASE_SECONDS, Fleet, Nemesis, Process, limit
from tests.soak.producer import DRIVERS
from tests.soak.verdict import Balance, balance
from tests.soak.witness import MAX_COOLDOWN_SECONDS, install_witness
from tests.worker_process import environment_with, worker_command

DRAIN_SECONDS: Final = 600.0
STOP_SECONDS: Final = 60.0
# The last one polls, as if it were behind a pooler, and takes over what the others cannot finish.
BEHIND_PROXY: Final = frozenset({"plain", "narrow", "supervised"})
WORKERS: Final[dict[str, tuple[list[str], dict[str, str]]]] = {
    "plain": ([], {}),
    "narrow": ([], {"PGOUTBOX_CONCURRENCY": "3", "PGOUTBOX_BATCH_SIZE": "7"}),
    "supervised": (["--processes", "2"], {}),
    "polling": ([], {"PGOUTBOX_LISTEN": "false", "PGOUTBOX_SWEEP_SECONDS": "0.5"}),
}

PRODUCER: Final = [sys.executable, "-m", "tests.soak.producer"]
HOST: Final = [sys.executable, "-m", "tests.soak.host"]
QUEUES: Final = [f"--queue={name}" for name in ("default", "bulk", "ordered", "rated", "crowded")]
# Of these nothing is kept that was sent.
FORGOTTEN_TOPICS: Final = ("soak.forgotten", "soak.fanout")
REDRIVE_SECONDS: Final = 2.0

console = Console(soft_wrap=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="length of the phase with faults (default: 5)")
    parser.add_argument("--seed", type=int, default=None, help="draws faults and messages; printed when not given")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000_000)
    directory = Path(tempfile.mkdtemp(prefix="pgoutbox-soak-"))
    directory.chmod(0o711)  # PostgreSQL's account has to pass.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console.print(f"seed {seed}, {arguments.minutes:g} minutes of faults, then everything has to drain")
    with embedded_server(directory / "data") as server:
        result, nemesis = run(server, directory, seed, arguments.minutes * 60)
        holds = report(result, nemesis)
    if holds:
        shutil.rmtree(directory)
        return 0
    console.print(f"[bold red]broken[/]: python -m tests.soak --minutes {arguments.minutes:g} --seed {seed}")
    console.print(f"what was left behind: {directory}")
    return 1


def run(server: EmbeddedServer, directory: Path, seed: int, seconds: float) -> tuple[Balance, Nemesis]:
    """Faults for so many seconds, then healing and draining, then the balance."""
    migrate.upgrade(server.dsn)
    with psycopg.connect(server.dsn) as connection:
        install_audit(connection)
        install_judge(connection)
        install_witness(connection)
        connection.execute("CREATE TABLE soak_effect (message_id bigint NOT NULL, attempt_count integer NOT NULL)")
    chance = random.Random(seed)
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        for topic in FORGOTTEN_TOPICS:
            maintenance.set_retention(connection, topic, "sent", timedelta())
        limit(connection, chance)
    with fleet(server, directory, chance) as ships:
        nemesis = Nemesis(ships, chance)
        strike_for(nemesis, seconds)
        for process in ships.producers:
            process.stop(seconds=STOP_SECONDS)
        drained = drain(ships)
        for process in ships.workers:
            process.stop(seconds=STOP_SECONDS)
    console.print(f"drained {drained:.1f} s after the last fault" if drained else "[red]did not drain[/]")
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        maintenance.prune_by_retention(connection)  # Contents whose last message is gone go now, if they have not yet.
        return balance(directory / "ledger", connection), nemesis


@contextlib.contextmanager
def fleet(server: EmbeddedServer, directory: Path, chance: random.Random) -> Iterator[Fleet]:
    """Workers and producers, started; whatever still runs at the end is killed."""
    port = free_port()
    environment = environment_with(
        dsn=server.dsn,
        lease_seconds=str(LEASE_SECONDS),
        sweep_seconds="5",
        maintenance_interval_seconds="1",
        probe_seconds="2",
        probe_timeout_seconds="1",
        shutdown_grace_seconds="1",
        statement_timeout_seconds="5",
        breaker_failures="3",
        breaker_cooldown_seconds="1",
        breaker_max_cooldown_seconds=str(MAX_COOLDOWN_SECONDS),
        breaker_probe_seconds="5",
    ) | {LEDGER_VARIABLE: str(directory / "ledger"), PORT_VARIABLE: str(port)}
    with contextlib.ExitStack() as stack:

        def process(name: str, command: list[str], extra: dict[str, str]) -> Process:
            log = stack.enter_context((directory / f"{name}.log").open("ab"))
            made = Process(name, command, environment | extra, log)
            stack.callback(made.signal, signal.SIGKILL)
            return made

        (directory / "proxy").mkdir()
        proxy = stack.enter_context(proxy_to(server.dsn, directory / "proxy"))
        ships = Fleet(
            server,
            proxy,
            [
                process(f"worker-{name}", worker_command("tests.soak.app:outbox", *QUEUES, *options), extra)
                for name, (options, extra) in WORKERS.items()
            ],
            [process(f"producer-{name}", [*PRODUCER, name, str(chance.randrange(1 << 30))], {}) for name in DRIVERS],
            process("host", [*HOST, str(port)], {}),
        )
        ships.host.keep_alive()
        ships.keep_alive()
        yield ships


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server((dialogues.HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def strike_for(nemesis: Nemesis, seconds: float) -> None:
    """Fault after fault, with pauses, and a line now and then."""
    began_at = time.monotonic()
    reported_at = began_at
    while (now := time.monotonic()) < began_at + seconds:
        fault = nemesis.strike()
        pause_until = time.monotonic() + nemesis.chance.expovariate(1.5)
        while time.monotonic() < pause_until:
            nemesis.fleet.keep_alive()
            time.sleep(0.05)
        if now > reported_at + 10:
            reported_at = now
            console.print(f"{now - began_at:6.0f} s  {nemesis.injected.total():5} faults, the last: {fault}")


def drain(ships: Fleet) -> float | None:
    """Keep the workers alive until nothing is owed; after how many seconds, or None if that never came.

    What waits behind a message that halts its key is owed too, and so is that message: somebody redrives it.
    """
    began_at = reported_at = redriven_at = time.monotonic()
    with ships.connection() as connection:
        while (now := time.monotonic()) < began_at + DRAIN_SECONDS:
            for process in ships.workers:
                process.keep_alive()
            owed = owed_count(connection)
            if owed == 0 or now > redriven_at + REDRIVE_SECONDS:
                redriven_at = now
                done = operations.redrive_matching(connection, operations.MessageFilter(topic="soak.halted"))
                if owed == done.redriven == done.locked == 0:
                    return now - began_at
            if now > reported_at + 10:
                reported_at = now
                console.print(f"{now - began_at:6.0f} s  {owed:5} messages owed")
            time.sleep(0.1)
    return None


def report(result: Balance, nemesis: Nemesis) -> bool:
    """Print both tables; whether every invariant holds."""
    faults = Table("fault", "times", title="injected")
    for name, count in sorted(nemesis.injected.items()):
        faults.add_row(name.replace("_", " "), str(count))
    console.print(faults)
    starts = ", ".join(
        f"{process.name} {process.starts}" for process in nemesis.fleet.workers + nemesis.fleet.producers
    )
    console.print(f"starts: {starts}")
    verdict = Table("invariant", "broken", "examples", title="verdict")
    for line in result.lines:
        verdict.add_row(
            line.invariant,
            f"[green]{line.broken}[/]" if line.broken == 0 else f"[bold red]{line.broken}[/]",
            ", ".join(map(str, line.examples)),
        )
    console.print(verdict)
    console.print(result.summary)
    return all(line.broken == 0 for line in result.lines)


if __name__ == "__main__":
    sys.exit(main())
