"""A failover to a standby that lost commits, under load, and the invariants on the new timeline.

For some seconds the standby receives nothing. In this time producers get acknowledgements, workers claim, hand over
and finish, and some workers are suspended with messages in flight. Then the server crashes, the standby takes over,
and the suspended workers continue. The acknowledged messages of those seconds are lost. No write for an attempt of
the old timeline may take effect on the new one.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pgoutbox.operations import Operator
from tests.soak.books import console, drain, open_books
from tests.soak.crew import LEASE_SECONDS, WORKERS, Process, crew_in
from tests.soak.runs import Lost
from tests.soak.verdict import Balance, balance
from tests.support.ledger import Ledger
from tests.support.servers import DATABASE, OwnServer, open_workshop
from tests.support.waiting import PROCESS_PATIENCE_SECONDS

# DSNs that connect to whichever of two servers is the primary.
DRIVERS: Final = ("psycopg", "psycopg-async")


def fail_over(directory: Path, chance: random.Random) -> Balance:
    """Run one failover that loses commits, drain, and return the balance on the new timeline."""
    directory.mkdir()
    with open_workshop(os.environ) as workshop, workshop.server() as primary:
        primary.start()
        with primary.connect() as connection:
            open_books(connection, chance)
        with workshop.standby_of(primary, "heir") as heir, crew_in(directory) as crew:
            heir.start()
            dsn = dsn_of_either(primary, heir)
            workers = [crew.worker(name, dsn) for name in WORKERS]
            producers = [crew.producer(driver, chance.randrange(1 << 30), dsn) for driver in DRIVERS]
            every = [crew.host(), crew.postbox(chance.randrange(1 << 30)), *workers, *producers]
            keep_alive(every, chance.uniform(8.0, 12.0))
            lost = lose_commits(primary, heir, every, chance.sample(workers, chance.randrange(1, 4)), chance)
            keep_alive(every, 4 * LEASE_SECONDS)
            for process in producers:
                process.stop()
            with heir.connect() as connection, Ledger(directory / "ledger") as ledger:
                drained = drain(connection, ledger, workers)
                console.print(f"drained in {drained:.1f} s" if drained else "[red]did not drain[/]")
                for process in workers:
                    process.stop()
                Operator(connection).prune_by_retention()
                return balance(ledger.path, connection, {process.name: process.ends for process in workers}, lost)


def lose_commits(
    primary: OwnServer, heir: OwnServer, every: Sequence[Process], sleepers: Sequence[Process], chance: random.Random
) -> Lost:
    """Cut the standby off, crash the primary and promote the standby while some workers sleep. Return the lost time."""
    with heir.connect() as replica:
        replica.execute("ALTER SYSTEM SET primary_conninfo = ''")
        lost_from = time.time()
        replica.execute("SELECT pg_reload_conf()")
        keep_alive(
            every,
            PROCESS_PATIENCE_SECONDS,
            until=lambda: not replica.execute("SELECT pid FROM pg_stat_wal_receiver").fetchall(),
        )
    keep_alive(every, chance.uniform(0.5, 3.0))
    for process in sleepers:
        process.signal(signal.SIGSTOP)
    primary.stop("immediate")
    lost_until = time.time()
    heir.promote()
    keep_alive([process for process in every if process not in sleepers], chance.uniform(0.2, LEASE_SECONDS))
    for process in sleepers:
        process.signal(signal.SIGCONT)
    return Lost(lost_from, lost_until)


def keep_alive(processes: Sequence[Process], seconds: float, *, until: Callable[[], bool] | None = None) -> None:
    """Restart processes that end, for this many seconds or until the condition holds."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at and not (until is not None and until()):
        for process in processes:
            process.keep_alive()
        time.sleep(0.05)


def dsn_of_either(first: OwnServer, second: OwnServer) -> str:
    """Return a DSN that connects to the primary of two servers."""
    hosts = f"{first.home},{second.home}"
    return f"host={hosts} port=5432,5432 user=postgres dbname={DATABASE} target_session_attrs=read-write"
