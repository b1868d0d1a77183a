"""Rehearse an upgrade and the way back, while messages flow and things fail.

    python -m tests.rehearsal --seconds 300 --seed 7
    python -m tests.rehearsal --pooled
    python -m tests.rehearsal --calm

Two producers and two workers of this release run from begin to end of the upgrade. The later release migrates, then its
own workers and producer join. Those of this release leave, and come back for the way back, before the downgrade. The
faults of the soak strike all the time. Each migration is killed once, and then runs beside a transaction that has
locked a message for 20 seconds, a prepared transaction, and dumps. `--calm` only kills a worker each second.

The exit code is 0 if no acknowledged message is lost, fails or leaves its order, none is handed over that was rolled
back, nothing waits for longer than a second behind a migration, and a hundred transactions a second were acknowledged.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from pgoutbox.embedded import EmbeddedServer, embedded_server
from tests.conftest import Server
from tests.rehearsal.release import install_both
from tests.rehearsal.run import BROKEN, rehearse
from tests.support.pooler import pooled

console = Console(width=80)
WAIT_SECONDS: Final = 1.0
PER_SECOND: Final = 100.0


@contextlib.contextmanager
def server_for(directory: Path, *, is_pooled: bool) -> Iterator[tuple[EmbeddedServer, str]]:
    """Run a server, with PgBouncer in transaction mode if wanted, and return the DSN to use."""
    with embedded_server(directory / "data") as server:
        if not is_pooled:
            yield server, server.dsn
            return
        with Server.at(server.dsn) as described, pooled(server.dsn, described, mode="transaction", size=30) as dsn:
            yield server, dsn


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="duration of the flow, in seconds (default: 180)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the faults (default: random, and printed)")
    parser.add_argument("--pooled", action="store_true", help="all connections through PgBouncer in transaction mode")
    parser.add_argument("--calm", action="store_true", help="kill a worker each second, and nothing else")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # The proxy's clients are killed while it writes to them.
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000)
    console.print(f"seed {seed}, {arguments.seconds:g} seconds")
    with tempfile.TemporaryDirectory(prefix="pgoutbox-rehearsal-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # PostgreSQL's account must be able to enter.
        releases = install_both(directory)
        with server_for(directory, is_pooled=arguments.pooled) as (server, dsn):
            struck = None if arguments.calm else server
            facts = rehearse(dsn, directory, releases, arguments.seconds, seed, server=struck)
    unexpected = facts.pop("unexpected")
    table = Table("fact", "value")
    for name, value in facts.items():
        table.add_row(name, str(value))
    console.print(table)
    for line in unexpected:
        console.print(line, markup=False)
    is_late = facts["longest wait behind one, seconds"] > WAIT_SECONDS or facts["acknowledged a second"] < PER_SECOND
    return int(bool(unexpected) or is_late or any(facts.get(name) for name in BROKEN))


if __name__ == "__main__":
    sys.exit(main())
