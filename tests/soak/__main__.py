"""Run the outbox under faults, let it recover, and print a verdict for each invariant.

    python -m tests.soak --minutes 20 --seed 7

The exit code is 0 when every invariant holds and everything drained, otherwise 1. In that case the ledger, the logs
and the database stay in the directory that the last line names. The seed determines the faults and the messages; the
timing depends on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import psycopg
from psycopg.conninfo import make_conninfo
from rich.table import Table

from pgoutbox import migrate
from pgoutbox.embedded import EmbeddedServer, embedded_server
from pgoutbox.operations import Operator
from tests.soak.books import console, drain, open_books
from tests.soak.crew import LONELY_WORKER, WORKER_ROLE, WORKERS, crew_in
from tests.soak.failover import fail_over
from tests.soak.faults import restart
from tests.soak.liveness import onlooker
from tests.soak.nemesis import Fleet, Nemesis, chosen_faults
from tests.soak.producer import DRIVERS
from tests.soak.verdict import Balance, balance
from tests.support.ledger import Ledger
from tests.support.proxy import proxy_to

BEHIND_PROXY: Final = frozenset({"plain", "narrow", "supervised", LONELY_WORKER})
# The worker `polling` works as if behind a pooler, and takes over messages that the others cannot finish. The lonely
# worker has its own queue.


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="duration of the faults, in minutes (default: 5)")
    parser.add_argument("--fault", action="append", default=[], help="inject only this fault (repeatable)")
    parser.add_argument(
        "--failovers", type=int, default=0, help="number of failovers with lost commits after the faults (default: 0)"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of faults and messages (default: random, and printed)"
    )
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000_000)
    directory = Path(tempfile.mkdtemp(prefix="pgoutbox-soak-"))
    directory.chmod(0o711)  # PostgreSQL's account must be able to enter.
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # The proxy's clients are killed while it writes to them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console.print(f"seed {seed}, {arguments.minutes:g} minutes of faults, then a drain")
    with embedded_server(directory / "data") as server:
        result, nemesis = run(server, directory, seed, arguments.minutes * 60, arguments.fault)
        holds = report(result, nemesis)
    chance = random.Random(seed)
    for number in range(arguments.failovers):
        console.print(f"failover {number + 1} of {arguments.failovers}: the standby lacks some commits")
        holds &= report_verdict(fail_over(directory / f"failover-{number + 1}", chance))
    if holds:
        shutil.rmtree(directory)
        return 0
    console.print(f"[bold red]broken[/]: python -m tests.soak --minutes {arguments.minutes:g} --seed {seed}")
    console.print(f"files of the run: {directory}")
    return 1


def run(
    server: EmbeddedServer, directory: Path, seed: int, seconds: float, faults: Collection[str]
) -> tuple[Balance, Nemesis]:
    """Inject faults for this many seconds, then let the system recover and drain, and return the balance."""
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {WORKER_ROLE} SUPERUSER LOGIN".encode())
        if connection.info.server_version >= 170_000:
            connection.execute("ALTER SYSTEM SET max_notify_queue_pages = 64")
    restart(server, "fast")
    migrate.upgrade(server.dsn)
    chance = random.Random(seed)
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        open_books(connection, chance)
    with fleet(server, directory, chance) as ships:
        nemesis = Nemesis(ships, chance, chosen_faults(faults))
        with onlooker(server.dsn):
            strike_for(nemesis, seconds)
        for process in ships.producers:
            process.stop()
        with ships.connection() as connection:
            drained = drain(connection, ships.ledger, ships.workers)
        for process in ships.workers:
            process.stop()
    console.print(f"drained in {drained:.1f} s after the last fault" if drained else "[red]did not drain[/]")
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        Operator(connection).prune_by_retention()  # Contents without messages are deleted now at the latest.
        ends = {process.name: process.ends for process in ships.workers}
        return balance(directory / "ledger", connection, ends, struck=nemesis.struck), nemesis


@contextlib.contextmanager
def fleet(server: EmbeddedServer, directory: Path, chance: random.Random) -> Iterator[Fleet]:
    """Start workers and producers, and kill the rest at the end."""
    (directory / "proxy").mkdir()
    with (
        crew_in(directory) as crew,
        proxy_to(server.dsn, directory / "proxy") as proxy,
        Ledger(directory / "ledger") as ledger,
    ):

        def dsn_of(worker: str) -> str:
            return make_conninfo(proxy.dsn if worker in BEHIND_PROXY else server.dsn, user=WORKER_ROLE)

        ships = Fleet(
            server,
            proxy,
            [crew.worker(name, dsn_of(name)) for name in WORKERS],
            [crew.producer(driver, chance.randrange(1 << 30), server.dsn) for driver in DRIVERS],
            crew.host(),
            crew.postbox(chance.randrange(1 << 30)),
            ledger,
        )
        ships.host.keep_alive()
        ships.postbox.keep_alive()
        ships.keep_alive()
        yield ships


def strike_for(nemesis: Nemesis, seconds: float) -> None:
    """Inject one fault after the other, with pauses, and print a progress line from time to time."""
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
            console.print(f"{now - began_at:6.0f} s  {nemesis.injected.total():5} faults, the latest: {fault}")


def report(result: Balance, nemesis: Nemesis) -> bool:
    """Print the injected faults and the verdict. Return whether every invariant holds."""
    faults = Table("fault", "times", title="injected")
    for name, count in sorted(nemesis.injected.items()):
        faults.add_row(name.replace("_", " "), str(count))
    console.print(faults)
    starts = ", ".join(
        f"{process.name} {process.starts}" for process in nemesis.fleet.workers + nemesis.fleet.producers
    )
    console.print(f"starts: {starts}")
    return report_verdict(result)


def report_verdict(result: Balance) -> bool:
    """Print the table of the invariants. Return whether all of them hold."""
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
