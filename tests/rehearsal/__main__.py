"""Rehearse an upgrade and the way back, while messages flow and workers are killed.

    python -m tests.rehearsal --seconds 60 --seed 7
    python -m tests.rehearsal --pooled

Two producers and two workers of this release run from begin to end of the upgrade. The later release migrates, then its
own workers and producer join. Those of this release leave, and come back for the way back, before the downgrade. Each
second one worker is killed. The exit code is 0 if no acknowledged message is lost, none fails, and none is handed over
that was rolled back.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pgoutbox.embedded import embedded_server
from tests.conftest import Server
from tests.rehearsal.run import BROKEN, rehearse
from tests.support.pooler import pooled

console = Console()


@contextlib.contextmanager
def server_for(directory: Path, *, is_pooled: bool) -> Iterator[str]:
    """Run a server, with PgBouncer in transaction mode if wanted, and return its DSN."""
    with embedded_server(directory / "data") as server:
        if not is_pooled:
            yield server.dsn
            return
        with Server.at(server.dsn) as described, pooled(server.dsn, described, mode="transaction", size=30) as dsn:
            yield dsn


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the flow, in seconds (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the kills (default: random, and printed)")
    parser.add_argument("--pooled", action="store_true", help="all connections through PgBouncer in transaction mode")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000)
    console.print(f"seed {seed}, {arguments.seconds:g} seconds")
    with tempfile.TemporaryDirectory(prefix="pgoutbox-rehearsal-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # PostgreSQL's account must be able to enter.
        with server_for(directory, is_pooled=arguments.pooled) as dsn:
            facts = rehearse(dsn, directory, arguments.seconds, seed)
    table = Table("fact", "value")
    for name, value in facts.items():
        table.add_row(name, str(value))
    console.print(table)
    return int(any(facts[name] for name in BROKEN))


if __name__ == "__main__":
    sys.exit(main())
