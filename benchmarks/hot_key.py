"""Hot key: transactions that enqueue for one coalesce key and then take 5 ms, with each rule and without a key.

The transactions wait and do not compute, so the variants differ only by their waits. The conditions are with and
without a worker.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import psycopg

from benchmarks.doorbell import application_role, pgbench
from benchmarks.options import Options, rotated
from benchmarks.processes import child
from benchmarks.report import Result, Table, Verdict, median, ratio_of_rounds
from benchmarks.server import Server, empty_outbox, settle

SCRIPT: Final = """BEGIN;
SELECT pgoutbox.enqueue(:topic, :payload{keys});
\\sleep 5 ms
COMMIT;
"""
KEYS: Final[Mapping[str, str]] = {
    "no key": "",
    "rule pending": ", coalesce_key => 'hot', coalesce_rule => 'pending'",
    "rule newest": ", coalesce_key => 'hot'",
}
CONDITIONS: Final[Mapping[str, str | None]] = {"no worker": None, "worker": "run", "worker, waiting": "wait"}
_CLIENTS: Final = 32
_TARGET: Final = 0.9

_Key = tuple[str, str]


def run(server: Server, options: Options) -> Result:
    """Alternate the variants within each round of a condition; each starts with empty tables."""
    rates: dict[_Key, list[float]] = defaultdict(list)
    with (
        server.database() as dsn,
        psycopg.connect(dsn, autocommit=True) as connection,
        tempfile.TemporaryDirectory(prefix="pgoutbox-bench-") as directory,
        application_role(connection),
    ):
        for variant, keys in KEYS.items():
            (Path(directory) / variant).write_text(SCRIPT.format(keys=keys))
        for round_number in range(options.rounds):
            for condition, mode in CONDITIONS.items():
                for variant in rotated(list(KEYS), round_number):
                    empty_outbox(connection)
                    settle(connection, "pgoutbox.message_live")
                    with _worker(mode, dsn):
                        rate = pgbench(dsn, Path(directory) / variant, _CLIENTS, options)
                    rates[condition, variant].append(rate)
    return _result(rates, options)


@contextlib.contextmanager
def _worker(mode: str | None, dsn: str) -> Iterator[None]:
    if mode is None:
        yield
        return
    with child("deliver", mode, dsn=dsn):
        yield


def _result(rates: Mapping[_Key, list[float]], options: Options) -> Result:
    result = Result(
        "hot_key",
        settings={"seconds": options.pgbench_seconds, "rounds": options.rounds, "clients": _CLIENTS},
        samples={", ".join(key): values for key, values in rates.items()},
    )
    rows = [
        (
            f"{condition}, {variant}",
            median(values),
            min(values),
            max(values),
            ratio_of_rounds(values, rates[condition, "no key"]),
        )
        for (condition, variant), values in sorted(rates.items())
    ]
    columns = ("condition, variant", "tps", "lowest", "highest", "ratio to no key")
    result.tables.append(Table("transactions per second", columns, rows))
    for condition in CONDITIONS:
        ratio = ratio_of_rounds(rates[condition, "rule pending"], rates[condition, "no key"])
        what = f"hot key, {_CLIENTS} clients, 5 ms in the transaction, {condition}: rule pending / no key"
        result.verdicts.append(Verdict(what, ratio, _TARGET, "at least"))
    return result
